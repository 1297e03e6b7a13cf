"""Runs swiglu for few rows on Hopper: gemm_sm90's gated gemv.py of one row and skinny.py, with gradients through plain
jnp."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.gemm_sm90 import gemv_config, skinny
from pallas_kernels.hopper.gemm_sm90.gemv import gemv
from pallas_kernels.hopper.gemm_sm90.skinny_config import Config, choose_config
from pallas_kernels.matmul import xla as matmul_xla
from pallas_kernels.norm_quant import xla as norm_xla
from pallas_kernels.norm_quant.mosaic_sm90 import normed
from pallas_kernels.silu_mul_quant import xla as silu_xla


def swiglu(
    x: jax.Array,
    w: jax.Array,
    config: Config | gemv_config.Config | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
    norm: jax.Array | None = None,
    eps: float = 0.0,
) -> jax.Array:
    """Returns [..., F] of x [..., K] and w [2F, K]; see api.py. Columns of a tile of `config` are half gate's, half
    up's."""
    (n, k), rows = w.shape, x.reshape(-1, x.shape[-1])
    if config is None and len(rows) == 1 and gemv_config.fits(gemv_config.GATED, n // 2, k):
        config = gemv_config.GATED
    elif config is None:
        config = choose_config(len(rows), n, k, x.dtype.itemsize)
    if norm is not None and isinstance(config, Config):
        rows, norm = normed(rows, norm, eps=eps, interpret=interpret), None
    return _swiglu(rows, w, norm, eps, config, interpret).reshape(*x.shape[:-1], n // 2)


def in_one_order(x: jax.Array, w: jax.Array, **options) -> jax.Array:
    """Runs swiglu of any number of rows by skinny.py, whose tiles all add in the order of K."""
    (n, k), rows = w.shape, x.size // x.shape[-1]
    return swiglu(x, w, choose_config(rows, n, k, x.dtype.itemsize), **options)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _swiglu(x, w, norm, eps, config, interpret):
    options = {"out_dtype": jnp.dtype(x.dtype), "gated": True, "interpret": interpret}
    if isinstance(config, gemv_config.Config):
        return gemv(x, w, norm=norm, eps=eps, config=config, **options)
    return skinny.gemm(x, w, config=config, **options)


def _forward(x, w, norm, eps, config, interpret):
    return _swiglu(x, w, norm, eps, config, interpret), (x, w, norm)


def _backward(eps, config, interpret, saved, gradient):
    def plain(x, w, norm):
        rows = x if norm is None else norm_xla.norm_quant(x, norm, eps=eps)[0]
        return silu_xla.silu_mul_quant(matmul_xla.matmul(rows, w, None, None, x.dtype))

    return jax.vjp(plain, *saved)[1](gradient)


_swiglu.defvjp(_forward, _backward)
