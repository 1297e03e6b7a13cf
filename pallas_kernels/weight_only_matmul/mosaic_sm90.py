"""Runs weight_only_matmul on Hopper GPUs: which of its kernels runs, and what follows it.

One row of x has a kernel of its own (row_sm90.py). Up to 8 rows of it and codes of 8 bits go straight into registers
(stream_sm90.py). Else codes come through a ring of shared memory (tiles_sm90.py). What these leave in parts of K is
added up here, with bias and residual.
"""

import functools
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.formats.quantized_weights import QuantizedWeight
from pallas_kernels.norm_quant import xla as norm_xla
from pallas_kernels.silu_mul_quant import xla as silu_xla
from pallas_kernels.weight_only_matmul import row_sm90, stream_sm90, tiles_sm90, xla
from pallas_kernels.weight_only_matmul.config import (
    AnyConfig,
    Config,
    RowConfig,
    StreamConfig,
    check_supported,
    choose_config,
)


@partial(jax.jit, static_argnames=("out_dtype", "config", "interpret"))
def product(
    x: jax.Array,
    w: QuantizedWeight,
    *,
    out_dtype: jnp.dtype,
    config: Config | StreamConfig,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """Returns x [M, K'] times the weight's padded rows [N', K'], transposed: [split, M, N'] of out_dtype, to be
    summed."""
    if isinstance(config, StreamConfig):
        return stream_sm90.product(x, w, jnp.dtype(out_dtype), config, interpret)[None]
    return tiles_sm90.product(x, w, jnp.dtype(out_dtype), config, interpret)


@partial(jax.jit, static_argnames=("out_dtype", "eps", "gated", "config", "interpret"))
def weight_only_matmul(
    x: jax.Array,
    w: QuantizedWeight,
    bias: jax.Array | None,
    residual: jax.Array | None,
    out_dtype: jnp.dtype,
    *,
    norm: jax.Array | None = None,
    eps: float = 0.0,
    gated: bool = False,
    config: AnyConfig | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """Returns [M, N] of x [M, K'] with columns as stored, bias [N] and residual [M, N]; see api.py. norm [K'] is for a
    RowConfig. So is gated, SiLU of one half of the product times the other: [M, N / 2]. Gradients are xla's."""
    n, k = w.values.shape[0], x.shape[1]
    check_supported(x.dtype, x.shape[0], n, k, w.format)
    config = config or choose_config(x.shape[0], n, k, w.format)
    return _product(x, w, norm, bias, residual, out_dtype, eps, gated, config, interpret)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7, 8, 9))
def _product(
    x: jax.Array,
    w: QuantizedWeight,
    norm: jax.Array | None,
    bias: jax.Array | None,
    residual: jax.Array | None,
    out_dtype: jnp.dtype,
    eps: float,
    gated: bool,
    config: AnyConfig,
    interpret: plgpu.InterpretGPUParams | None,
) -> jax.Array:
    if isinstance(config, RowConfig):
        return row_sm90.product(
            x, w, norm, bias, residual, out_dtype, eps=eps, gated=gated, config=config, interpret=interpret
        )
    assert norm is None, "a norm goes with one row"
    assert not gated, "so does SiLU"
    split = config.split if isinstance(config, Config) else 1
    whole = split == 1 and bias is None and residual is None and out_dtype != jnp.float64
    parts = product(x, w, out_dtype=out_dtype if whole else jnp.float32, config=config, interpret=interpret)
    y = functools.reduce(jnp.add, list(parts))  # in order
    return xla.finish(y[:, : w.shape[0]], bias, residual, out_dtype)


def _forward(x, w, norm, bias, residual, *options):
    return _product(x, w, norm, bias, residual, *options), (x, w, norm, bias, residual)


def _backward(out_dtype, eps, gated, config, interpret, saved, gradient):
    def plain(x, w, norm, bias, residual):
        rows = x if norm is None else norm_xla.norm_quant(x, norm, eps=eps)[0]
        if not gated:
            return xla.weight_only_matmul(rows, w, bias, residual, out_dtype)
        return silu_xla.silu_mul_quant(xla.weight_only_matmul(rows, w, None, None, x.dtype)).astype(out_dtype)

    return jax.vjp(plain, *saved)[1](gradient)


_product.defvjp(_forward, _backward)
