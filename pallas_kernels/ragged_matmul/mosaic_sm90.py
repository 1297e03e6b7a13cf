"""Runs ragged_matmul on Hopper: by skinny.py of gemm_sm90, whose tiles are blocks of rows by slabs of a group's weight.
Gradients are xla's."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.formats.quantized_rows import QuantizedRows
from pallas_kernels.formats.quantized_weights import QuantizedWeight
from pallas_kernels.hopper.gemm_sm90 import skinny
from pallas_kernels.hopper.gemm_sm90.skinny_config import Config
from pallas_kernels.ragged_matmul import xla
from pallas_kernels.ragged_matmul.config import choose_config


def ragged_matmul(
    x: jax.Array | QuantizedRows,
    w: jax.Array | QuantizedWeight,
    sizes: jax.Array,
    gated: bool,
    out_dtype: jnp.dtype,
    config: Config | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """Returns [M, N] of x [M, K], w [X N, K] and sizes i32[X]; see api.py."""
    groups = sizes.shape[0]
    if isinstance(x, QuantizedRows):
        assert isinstance(w, QuantizedWeight)
        values, (n, k) = x.values, w.values.shape
        if values.shape[1] < k:
            values = jnp.pad(values, ((0, 0), (0, k - values.shape[1])))
        operands = values, w.values
        scales = {"x_scale": x.scales.astype(jnp.float32), "w_scale": w.scales.astype(jnp.float32)}
    else:
        assert not isinstance(w, QuantizedWeight)
        operands, scales, (n, k) = (x, w), {}, w.shape
    if config is None:
        n = n // groups // (2 if gated else 1)
        config = choose_config(len(operands[0]), groups, n, k, operands[0].dtype.itemsize, gated)
    if scales:
        options = {**scales, "sizes": sizes, "gated": gated, "config": config, "interpret": interpret}
        return skinny.gemm(*operands, **options, out_dtype=jnp.dtype(out_dtype))
    return _plain(*operands, sizes, gated, jnp.dtype(out_dtype), config, interpret)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def _plain(x, w, sizes, gated, out_dtype, config, interpret):
    return skinny.gemm(x, w, sizes=sizes, gated=gated, out_dtype=out_dtype, config=config, interpret=interpret)


def _forward(x, w, sizes, gated, out_dtype, config, interpret):
    return _plain(x, w, sizes, gated, out_dtype, config, interpret), (x, w, sizes)


def _backward(gated, out_dtype, config, interpret, saved, gradient):
    return jax.vjp(lambda x, w, sizes: xla.ragged_matmul(x, w, sizes, gated, out_dtype), *saved)[1](gradient)


_plain.defvjp(_forward, _backward)
