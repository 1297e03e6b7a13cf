"""Runs silu_mul_quant in plain jnp."""

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.formats.numerics import compute_dtype
from pallas_kernels.formats.quantized_rows import QuantizedRows, quantize_rows
from pallas_kernels.formats.rounding import round_to


@partial(jax.jit, static_argnames="kind")
def silu_mul_quant(gate_up: jax.Array, *, kind: str | None = None) -> jax.Array | QuantizedRows:
    """Returns rows [T, F] of gate_up [T, 2F]; see api.py."""
    gate, up = jnp.split(gate_up.astype(compute_dtype(gate_up.dtype)), 2, axis=-1)
    product = round_to(jax.nn.silu(gate) * up, gate_up.dtype)
    return product if kind is None else quantize_rows(product, kind)
