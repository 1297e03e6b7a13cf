"""Computes the MLP block, the second half of a layer: the residual stream plus the MLP of its norm.

To add another kind of MLP, write a params type with its entries in the table (params.py). Register it for a config in
param_specs.layer_types, and its block here by that type.
"""

from functools import singledispatch
from typing import Any

import jax

from jllm.config import LlamaConfig
from jllm.model.fused_linear import fuses_swiglu, norm_gate_up, norm_swiglu, silu_linear
from jllm.model.linear import linear
from jllm.model.norms import add_linear
from jllm.model.params import MLPParams
from jllm.model.shapes import Array, Float, shaped
from jllm.model.taps import Tap
from pallas_kernels.backends import where_faster
from pallas_kernels.norm_quant import norm_quant
from pallas_kernels.silu_mul_quant import silu_mul_quant


@singledispatch
def mlp_block(
    p: Any, x: Float[Array, "T E"], *, config: LlamaConfig, backend: str | None, tap: Tap
) -> Float[Array, "T E"]:
    """Returns x [T, E] plus the MLP of its norm. The type of `p` decides which MLP runs. `tap` is as in
    attention_block."""
    raise NotImplementedError(f"{type(p).__name__} has no mlp_block: register one for it")


@mlp_block.register
@shaped
def _(
    p: MLPParams, x: Float[Array, "T E"], *, config: LlamaConfig, backend: str | None, tap: Tap
) -> Float[Array, "T E"]:
    if tap.open or config.residual_multiplier != 1:
        return _open_block(p, x, config=config, backend=backend, tap=tap)
    return _fast_block(p, x, config=config, backend=backend)


def _fast_block(p: MLPParams, x: jax.Array, *, config: LlamaConfig, backend: str | None) -> jax.Array:
    """Computes the block by as few operations as its weights allow."""
    shared: dict[str, Any] = {"axis": config.axis, "parts": config.activation_parts}
    normed: dict[str, Any] = {"eps": config.norm_eps, "backend": backend}
    if fuses_swiglu(x, p.gate_up, p.gate_up_bias, p.down, backend=backend):
        rows = norm_swiglu(x, p.norm, p.gate_up, **normed)
        return linear(rows, p.down, p.down_bias, residual=x, out_dtype=x.dtype, backend=backend, **shared)
    gate_up = norm_gate_up(x, p.norm, p.gate_up, p.gate_up_bias, **normed)
    return silu_linear(gate_up, p.down, p.down_bias, residual=x, backend=backend, **shared)


def _open_block(p: MLPParams, x: jax.Array, *, config: LlamaConfig, backend: str | None, tap: Tap) -> jax.Array:
    """Computes the block one operation at a time, with a name for each value."""
    rows = tap("mlp_norm", norm_quant(x, p.norm, eps=config.norm_eps, backend=where_faster(backend))[0])
    gate_up = tap("gate_up", tap.add("gate_up", rows, linear(rows, p.gate_up, p.gate_up_bias, backend=backend)))
    rows = tap("silu_mul", silu_mul_quant(gate_up, backend=backend))
    return add_linear(x, rows, p.down, p.down_bias, config=config, backend=backend, tap=tap, name="down")
