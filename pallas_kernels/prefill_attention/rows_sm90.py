"""Computes softmax of a warpgroup's 64 rows in the Hopper kernel of prefill_attention, and copies them out."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.hadamard_sm90 import turn
from pallas_kernels.prefill_attention.plan_sm90 import Plan, Refs

LOWEST = -1e30  # finite: a row that has seen no key yet keeps its sum without NaN


def full(shape: tuple[int, ...], value: float, layout: Any) -> jax.Array:
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def exponentials(scores: jax.Array, peak: jax.Array, scale: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns P f32 [64, T] of masked scores (-inf), the rows' new peak (in units of log2), and what earlier sums
    shrink by."""
    to_log2 = scale * math.log2(math.e)
    new_peak = jnp.maximum(peak, scores.max(axis=1) * to_log2)
    p = jnp.exp2(scores * to_log2 - lax.broadcast_in_dim(new_peak, scores.shape, [0]))
    return p, new_peak, jnp.exp2(peak - new_peak)


def copy_rows(source: Any, target: Any) -> None:
    """Copies rows of shared memory from plain to swizzled or back, 16 bytes a thread at a time."""
    layout = plgpu.Layout.SMEM_GMEM_COPY(source.shape, source.dtype, 128)
    target[...] = plgpu.load(source, layout=layout)


def stage_queries(plan: Plan, refs: Refs, wg: jax.Array) -> None:
    """Puts a warpgroup's queries where products take them from, rotated where K is."""
    if plan.k_format.hadamard:
        queries = plgpu.load(refs.q_raw.at[wg], layout=plgpu.Layout.WGMMA, optimized=False)
        refs.q_s[wg] = _turned(plan, queries.astype(jnp.float32)).astype(plan.dtype)
    else:
        copy_rows(refs.q_raw.at[wg], refs.q_s.at[wg])
    plgpu.commit_smem()


def _turned(plan: Plan, rows: jax.Array) -> jax.Array:
    """Returns rows [64, D] of which four lanes have one each, and another."""
    return turn(rows, plgpu.Layout.WGMMA, plan.head_dim, lanes=4, rows=2)


def stage_rows(plan: Plan, refs: Refs, wg: jax.Array, out: jax.Array) -> None:
    """Puts out [64, D] where `write_rows` takes it from, in place of the queries; rotated back where V is."""
    if plan.v_format.hadamard:
        out = _turned(plan, out)
    refs.q_s[wg] = out.astype(plan.dtype)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the rows of the tile before
    copy_rows(refs.q_s.at[wg], refs.out_s.at[wg])
    plgpu.commit_smem()


def write_rows(
    plan: Plan, refs: Refs, wg: jax.Array, begin: Any, each: Any, row: jax.Array, rows: jax.Array, head: jax.Array
) -> None:
    """Writes `rows` of the staged rows, from `begin` on, to `row` and after: by powers of two, each one copy. The next
    head's rows come `each` rows later."""
    size = plan.config.queries
    while size:

        @pl.when(rows & jnp.int32(size) != 0)
        def _(size: int = size) -> None:
            done = rows & jnp.int32(-2 * size)  # larger pieces
            for i in range(plan.config.stack):
                source = refs.out_s.at[wg, pl.ds(begin + i * each + done, size)]
                plgpu.copy_smem_to_gmem(source, refs.out.at[pl.ds(row + done, size), head + i])

        size //= 2
