"""matmul for few rows on Hopper: the product of gemm_sm90/skinny.py, with gradients through the xla backend."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.gemm_sm90 import skinny
from pallas_kernels.gemm_sm90.skinny_config import Config, choose_config
from pallas_kernels.matmul import xla


def matmul(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    out_dtype: DTypeLike,
    config: Config | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """x [..., K], w [N, K], bias [N], residual [..., N] of out_dtype -> [..., N]; see api.py."""
    if config is None:
        (n, k), out_itemsize = w.shape, jnp.dtype(out_dtype).itemsize
        config = choose_config(x.size // k, n, k, x.dtype.itemsize, out_itemsize)
    if bias is not None and bias.dtype == jnp.float64:
        bias = bias.astype(jnp.float32)  # as it is added
    rows = x.reshape(-1, x.shape[-1])
    added = None if residual is None else residual.reshape(-1, w.shape[0])
    out = _product(rows, w, bias, added, jnp.dtype(out_dtype), config, interpret)
    return out.reshape(*x.shape[:-1], w.shape[0])


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _product(x, w, bias, residual, out_dtype, config, interpret):
    return skinny.gemm(x, w, bias=bias, residual=residual, out_dtype=out_dtype, config=config, interpret=interpret)


def _forward(x, w, bias, residual, out_dtype, config, interpret):
    return _product(x, w, bias, residual, out_dtype, config, interpret), (x, w, bias, residual)


def _backward(out_dtype, config, interpret, saved, gradient):
    return jax.vjp(lambda *arguments: xla.matmul(*arguments, out_dtype), *saved)[1](gradient)


_product.defvjp(_forward, _backward)
