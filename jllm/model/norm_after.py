"""Computes blocks that end with a norm: x plus the norm of what the block computed (OLMo 2, arXiv 2501.00656).

OLMo 2 has no other norm. Gemma 2 has one before each block as well (arXiv 2408.00118). These blocks run one operation
at a time, but for the attention of serving.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jllm.config import LlamaConfig
from jllm.model.attention import AttentionInputs, attend, attention_block, open_attend
from jllm.model.linear import linear
from jllm.model.mlp import mlp_block
from jllm.model.norms import add_linear, norm_rows
from jllm.model.params import NormAfterAttentionParams, NormAfterMLPParams
from jllm.model.shapes import Array, Float, shaped
from jllm.model.taps import Tap
from pallas_kernels.formats.kv_pages import KVPages
from pallas_kernels.formats.numerics import compute_dtype
from pallas_kernels.one_order import fenced
from pallas_kernels.silu_mul_quant import silu_mul_quant


@attention_block.register
@shaped
def _(
    p: NormAfterAttentionParams,
    x: Float[Array, "T E"],
    inputs: AttentionInputs,
    pages: KVPages | None,
    *,
    config: LlamaConfig,
    window: int | None,
    backend: str | None,
    tap: Tap,
) -> tuple[Float[Array, "T E"], KVPages | None]:
    rows = tap("attn_norm", x if p.norm is None else norm_rows(x, p.norm, config, backend))
    if tap.open:
        out, pages = open_attend(p, rows, inputs, pages, config=config, window=window, backend=backend, tap=tap)
    else:
        qkv = linear(rows, p.qkv, p.qkv_bias, backend=backend)
        out, pages = attend(p, qkv, inputs, pages, config=config, window=window, backend=backend)
    how: dict[str, Any] = {"config": config, "backend": backend, "tap": tap, "name": "o"}
    return add_linear(x, out, p.o, p.o_bias, p.norm_after, **how), pages


@mlp_block.register
@shaped
def _(
    p: NormAfterMLPParams, x: Float[Array, "T E"], *, config: LlamaConfig, backend: str | None, tap: Tap
) -> Float[Array, "T E"]:
    rows = tap("mlp_norm", x if p.norm is None else norm_rows(x, p.norm, config, backend))
    gate_up = tap("gate_up", tap.add("gate_up", rows, linear(rows, p.gate_up, backend=backend)))
    rows = tap("silu_mul", _gated(gate_up, config.activation, backend))
    how: dict[str, Any] = {"config": config, "backend": backend, "tap": tap, "name": "down"}
    return add_linear(x, rows, p.down, None, p.norm_after, **how)


def _gated(gate_up: jax.Array, activation: str, backend: str | None) -> jax.Array:
    """Returns the activation of the gates times the ups."""
    if activation == "silu":
        return silu_mul_quant(gate_up, backend=backend)

    def gelu(gate_up: jax.Array) -> jax.Array:
        gate, up = jnp.split(gate_up.astype(compute_dtype(gate_up.dtype)), 2, axis=1)
        return (jax.nn.gelu(gate, approximate=True) * up).astype(gate_up.dtype)

    return fenced(backend, gelu, gate_up)
