"""swiglu for few rows on Hopper: the gated product of gemm_sm90/skinny.py, with gradients through plain jnp."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemm_sm90 import skinny
from pallas_kernels.gemm_sm90.skinny_config import Config, choose_config
from pallas_kernels.matmul import xla as matmul_xla
from pallas_kernels.silu_mul_quant import xla as silu_xla


def swiglu(
    x: jax.Array, w: jax.Array, config: Config | None = None, interpret: plgpu.InterpretGPUParams | None = None
) -> jax.Array:
    """x [..., K], w [2F, K] -> [..., F]; see api.py. Columns of a tile of `config` are half gate's, half up's."""
    (n, k), rows = w.shape, x.reshape(-1, x.shape[-1])
    config = choose_config(len(rows), n, k, x.dtype.itemsize) if config is None else config
    return _swiglu(rows, w, config, interpret).reshape(*x.shape[:-1], n // 2)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _swiglu(x: jax.Array, w: jax.Array, config: Config, interpret: plgpu.InterpretGPUParams | None) -> jax.Array:
    return skinny.gemm(x, w, out_dtype=jnp.dtype(x.dtype), config=config, gated=True, interpret=interpret)


def _forward(x, w, config, interpret):
    return _swiglu(x, w, config, interpret), (x, w)


def _plain(x, w):
    return silu_xla.silu_mul_quant(matmul_xla.matmul(x, w, None, None, x.dtype))


def _backward(config, interpret, saved, gradient):
    return jax.vjp(_plain, *saved)[1](gradient)


_swiglu.defvjp(_forward, _backward)
