"""The MLP block, the second half of a layer: the residual stream plus the MLP of its norm.

Another kind of MLP is a params type with its entries in the table (params.py), registered for a config in
param_specs.layer_types, and its block, registered here by that type.
"""

from functools import singledispatch
from typing import Any

import jax

from jllm.config import LlamaConfig
from jllm.fused_linear import fuses_swiglu, norm_linear, norm_swiglu, silu_linear
from jllm.linear import linear
from jllm.params import MLPParams
from jllm.taps import Tap
from pallas_kernels.norm_quant import norm_quant
from pallas_kernels.silu_mul_quant import silu_mul_quant


@singledispatch
def mlp_block(p: Any, x: jax.Array, *, config: LlamaConfig, backend: str | None, tap: Tap) -> jax.Array:
    """x [T, E] plus the MLP of its norm. The type of `p` decides which MLP."""
    raise NotImplementedError(f"{type(p).__name__} has no mlp_block: register one for it")


@mlp_block.register
def _(p: MLPParams, x: jax.Array, *, config: LlamaConfig, backend: str | None, tap: Tap) -> jax.Array:
    shared: dict[str, Any] = {"axis": config.axis, "parts": config.activation_parts}
    if tap.edits_any("mlp_norm", "gate_up", "silu_mul"):
        rows = tap.pass_on("mlp_norm", norm_quant(x, p.norm, eps=config.norm_eps, backend=backend)[0])
        gate_up = tap.pass_on("gate_up", linear(rows, p.gate_up, p.gate_up_bias, backend=backend))
        rows = tap.pass_on("silu_mul", silu_mul_quant(gate_up, backend=backend))
        return linear(rows, p.down, p.down_bias, residual=x, out_dtype=x.dtype, backend=backend, **shared)
    tap("mlp_norm", lambda: norm_quant(x, p.norm, eps=config.norm_eps, backend=backend)[0])
    if fuses_swiglu(x, p.gate_up, p.gate_up_bias, p.down, backend=backend) and not tap.wants("gate_up"):
        rows = norm_swiglu(x, p.norm, p.gate_up, eps=config.norm_eps, backend=backend)
        tap("silu_mul", lambda: rows)
        return linear(rows, p.down, p.down_bias, residual=x, out_dtype=x.dtype, backend=backend, **shared)
    gate_up = norm_linear(x, p.norm, p.gate_up, p.gate_up_bias, eps=config.norm_eps, backend=backend)
    tap("gate_up", lambda: gate_up)
    tap("silu_mul", lambda: silu_mul_quant(gate_up, backend=backend))
    return silu_linear(gate_up, p.down, p.down_bias, residual=x, backend=backend, **shared)
