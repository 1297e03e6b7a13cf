"""Runs ragged_matmul on Hopper, where tiles are blocks of rows by slabs of a group's weight.

Plain rows by plain weights, and codes by codes, are skinny.py's of gemm_sm90. Plain rows by codes of 4 bits are
tiles_sm90.py's of weight_only_matmul. Few rows read their weights one by one: in gemv.py of gemm_sm90, and in
row_sm90.py of weight_only_matmul. Gradients are xla's."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.formats.quantized_rows import QuantizedRows
from pallas_kernels.formats.quantized_weights import QuantizedWeight
from pallas_kernels.hopper.gemm_sm90 import gemv_config, skinny
from pallas_kernels.hopper.gemm_sm90.gemv import gemv
from pallas_kernels.hopper.gemm_sm90.skinny_config import Config
from pallas_kernels.ragged_matmul import xla
from pallas_kernels.ragged_matmul.config import (
    CodesConfig,
    RowConfig,
    choose_codes_config,
    choose_config,
    choose_rows,
)
from pallas_kernels.row_groups import Schedule, groups_of_rows, known_pairs
from pallas_kernels.weight_only_matmul import row_sm90, tiles_sm90

AnyConfig = Config | CodesConfig | gemv_config.Config | RowConfig


def ragged_matmul(
    x: jax.Array | QuantizedRows,
    w: jax.Array | QuantizedWeight,
    sizes: jax.Array,
    gated: bool,
    out_dtype: jnp.dtype,
    config: AnyConfig | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
    schedule: Schedule | None = None,
    one_order: bool = False,
) -> jax.Array:
    """Returns [M, N] of x [M, K], w [X N, K] and sizes i32[X]; see api.py. one_order: no kernel of few rows runs."""
    groups, (n, k) = sizes.shape[0], (w.values if isinstance(w, QuantizedWeight) else w).shape
    n, block = n // (groups * (2 if gated else 1)), None if schedule is None else schedule.block
    m = len(x.values if isinstance(x, QuantizedRows) else x)
    config = config or choose_rows(m, w, groups, gated, block=block, one_order=one_order)
    if not isinstance(x, QuantizedRows):
        if config is None and isinstance(w, QuantizedWeight):
            cuts = None if schedule is None else (schedule.block, schedule.apart)
            config = choose_codes_config(m, groups, n, x.shape[1], gated, cuts, one_order)
        config = config or choose_config(m, groups, n, k, x.dtype.itemsize, gated, block)
        return _plain_rows(x, w, sizes, schedule, gated, jnp.dtype(out_dtype), config, interpret)
    assert isinstance(w, QuantizedWeight), "codes are multiplied by codes"
    values = jnp.pad(x.values, ((0, 0), (0, k - x.values.shape[1])))
    config = config or choose_config(m, groups, n, k, values.dtype.itemsize, gated, block)
    scales = {"x_scale": x.scales.astype(jnp.float32), "w_scale": w.scales.astype(jnp.float32)}
    return _product(values, w.values, sizes, schedule, gated, jnp.dtype(out_dtype), config, interpret, **scales)


def _product(x, w, sizes, schedule, gated, out_dtype, config, interpret, **scales):
    options = {**scales, "gated": gated, "out_dtype": out_dtype, "config": config, "interpret": interpret}
    if isinstance(config, gemv_config.Config):
        return gemv(x, w, group=_group_of_rows(x, sizes, schedule), groups=sizes.shape[0], **options)
    return skinny.gemm(x, w, sizes=sizes, schedule=schedule, **options)


def _group_of_rows(x: jax.Array, sizes: jax.Array, schedule: Schedule | None) -> jax.Array:
    """Returns the number of each row's group, i32[M or more]."""
    known = known_pairs(schedule, 1)
    return groups_of_rows(sizes, x.shape[0]) if known is None else known.group


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6, 7))
def _plain_rows(x, w, sizes, schedule, gated, out_dtype, config, interpret):
    if not isinstance(w, QuantizedWeight):
        return _product(x, w, sizes, schedule, gated, out_dtype, config, interpret)
    return _by_codes(x, w, sizes, schedule, gated, out_dtype, config, interpret)


@partial(jax.jit, static_argnums=(4, 5, 6, 7))
def _by_codes(x, w, sizes, schedule, gated, out_dtype, config, interpret):
    if not x.shape[0]:  # of which no kernel can be launched
        return jnp.zeros((0, w.shape[0] // (sizes.shape[0] * (2 if gated else 1))), out_dtype)
    if isinstance(config, RowConfig):
        how = {"groups": sizes.shape[0], "gated": gated, "config": config, "interpret": interpret}
        group = _group_of_rows(x, sizes, schedule)
        return row_sm90.product(x, w, None, None, None, out_dtype, group=group, **how)
    return tiles_sm90.product(x, w, out_dtype, config, interpret, sizes=sizes, schedule=schedule, gated=gated)[0]


def _forward(x, w, sizes, schedule, gated, out_dtype, config, interpret):
    return _plain_rows(x, w, sizes, schedule, gated, out_dtype, config, interpret), (x, w, sizes)


def _backward(gated, out_dtype, config, interpret, saved, gradient):
    run = partial(xla.ragged_matmul, gated=gated, out_dtype=out_dtype)
    return *jax.vjp(run, *saved)[1](gradient), None


_plain_rows.defvjp(_forward, _backward)
