"""Runs matmul for few rows on Hopper: gemv.py of one row and skinny.py of gemm_sm90, with gradients through xla."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.hopper.gemm_sm90 import gemv_config, skinny
from pallas_kernels.hopper.gemm_sm90.gemv import gemv
from pallas_kernels.hopper.gemm_sm90.skinny_config import Config, choose_config
from pallas_kernels.matmul import xla
from pallas_kernels.norm_quant import xla as norm_xla
from pallas_kernels.norm_quant.mosaic_sm90 import normed


def matmul(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    out_dtype: DTypeLike,
    config: Config | gemv_config.Config | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
    norm: jax.Array | None = None,
    eps: float = 0.0,
) -> jax.Array:
    """Returns [..., N] of x [..., K], w [N, K], bias [N], and residual [..., N] of out_dtype; see api.py."""
    (n, k), rows = w.shape, x.reshape(-1, x.shape[-1])
    if config is None and len(rows) == 1 and gemv_config.fits(gemv_config.PLAIN, n, k):
        config = gemv_config.PLAIN
    elif config is None:
        config = choose_config(len(rows), n, k, x.dtype.itemsize, jnp.dtype(out_dtype).itemsize)
    if norm is not None and isinstance(config, Config):
        rows, norm = normed(rows, norm, eps=eps, interpret=interpret), None
    if bias is not None and bias.dtype == jnp.float64:
        bias = bias.astype(jnp.float32)  # as it is added
    added = None if residual is None else residual.reshape(-1, w.shape[0])
    out = _product(rows, w, norm, bias, added, eps, jnp.dtype(out_dtype), config, interpret)
    return out.reshape(*x.shape[:-1], w.shape[0])


def in_one_order(
    x: jax.Array, w: jax.Array, bias: jax.Array | None, residual: jax.Array | None, out_dtype: DTypeLike, **options
) -> jax.Array:
    """Runs matmul of any number of rows by skinny.py, whose tiles all add in the order of K."""
    rows, (n, k) = x.size // x.shape[-1], w.shape
    config = choose_config(rows, n, k, x.dtype.itemsize, jnp.dtype(out_dtype).itemsize)
    return matmul(x, w, bias, residual, out_dtype, config, **options)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7, 8))
def _product(x, w, norm, bias, residual, eps, out_dtype, config, interpret):
    options = {"bias": bias, "residual": residual, "out_dtype": out_dtype, "interpret": interpret}
    if isinstance(config, gemv_config.Config):
        return gemv(x, w, norm=norm, eps=eps, config=config, **options)
    return skinny.gemm(x, w, config=config, **options)


def _forward(x, w, norm, bias, residual, eps, out_dtype, config, interpret):
    return _product(x, w, norm, bias, residual, eps, out_dtype, config, interpret), (x, w, norm, bias, residual)


def _backward(eps, out_dtype, config, interpret, saved, gradient):
    def plain(x, w, norm, bias, residual):
        rows = x if norm is None else norm_xla.norm_quant(x, norm, eps=eps)[0]
        return xla.matmul(rows, w, bias, residual, out_dtype)

    return jax.vjp(plain, *saved)[1](gradient)


_product.defvjp(_forward, _backward)
