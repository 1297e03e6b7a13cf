"""Runs ragged_matmul on Hopper, where tiles are blocks of rows by slabs of a group's weight.

Plain rows by plain weights, and codes by codes, are skinny.py's of gemm_sm90. Plain rows by codes of 4 bits are
tiles_sm90.py's of weight_only_matmul. Gradients are xla's."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.formats.quantized_rows import QuantizedRows
from pallas_kernels.formats.quantized_weights import QuantizedWeight
from pallas_kernels.hopper.gemm_sm90 import skinny
from pallas_kernels.hopper.gemm_sm90.skinny_config import Config
from pallas_kernels.ragged_matmul import xla
from pallas_kernels.ragged_matmul.config import CodesConfig, choose_codes_config, choose_config
from pallas_kernels.row_groups import Schedule
from pallas_kernels.weight_only_matmul import tiles_sm90


def ragged_matmul(
    x: jax.Array | QuantizedRows,
    w: jax.Array | QuantizedWeight,
    sizes: jax.Array,
    gated: bool,
    out_dtype: jnp.dtype,
    config: Config | CodesConfig | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
    schedule: Schedule | None = None,
    one_order: bool = False,
) -> jax.Array:
    """Returns [M, N] of x [M, K], w [X N, K] and sizes i32[X]; see api.py."""
    groups, (n, k) = sizes.shape[0], (w.values if isinstance(w, QuantizedWeight) else w).shape
    n, block = n // (groups * (2 if gated else 1)), None if schedule is None else schedule.block
    if not isinstance(x, QuantizedRows):
        if config is None and isinstance(w, QuantizedWeight):
            cuts = None if schedule is None else (schedule.block, schedule.apart)
            config = choose_codes_config(x.shape[0], groups, n, x.shape[1], gated, cuts, one_order)
        config = config or choose_config(x.shape[0], groups, n, k, x.dtype.itemsize, gated, block)
        return _plain_rows(x, w, sizes, schedule, gated, jnp.dtype(out_dtype), config, interpret)
    assert isinstance(w, QuantizedWeight), "codes are multiplied by codes"
    values = jnp.pad(x.values, ((0, 0), (0, k - x.values.shape[1])))
    config = config or choose_config(len(values), groups, n, k, values.dtype.itemsize, gated, block)
    scales = {"x_scale": x.scales.astype(jnp.float32), "w_scale": w.scales.astype(jnp.float32)}
    options = {**scales, "sizes": sizes, "schedule": schedule, "gated": gated, "config": config, "interpret": interpret}
    return skinny.gemm(values, w.values, **options, out_dtype=jnp.dtype(out_dtype))


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6, 7))
def _plain_rows(x, w, sizes, schedule, gated, out_dtype, config, interpret):
    how = {"sizes": sizes, "schedule": schedule, "gated": gated}
    if not isinstance(w, QuantizedWeight):
        return skinny.gemm(x, w, **how, out_dtype=out_dtype, config=config, interpret=interpret)
    return _by_codes(x, w, sizes, schedule, gated, out_dtype, config, interpret)


@partial(jax.jit, static_argnums=(4, 5, 6, 7))
def _by_codes(x, w, sizes, schedule, gated, out_dtype, config, interpret):
    if not x.shape[0]:  # of which no kernel can be launched
        return jnp.zeros((0, w.shape[0] // (sizes.shape[0] * (2 if gated else 1))), out_dtype)
    return tiles_sm90.product(x, w, out_dtype, config, interpret, sizes=sizes, schedule=schedule, gated=gated)[0]


def _forward(x, w, sizes, schedule, gated, out_dtype, config, interpret):
    return _plain_rows(x, w, sizes, schedule, gated, out_dtype, config, interpret), (x, w, sizes)


def _backward(gated, out_dtype, config, interpret, saved, gradient):
    run = partial(xla.ragged_matmul, gated=gated, out_dtype=out_dtype)
    return *jax.vjp(run, *saved)[1](gradient), None


_plain_rows.defvjp(_forward, _backward)
