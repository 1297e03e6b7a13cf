"""Computes softmax of a warpgroup's 64 rows in the Hopper kernel of prefill_attention, and copies them out."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.hadamard_sm90 import turn
from pallas_kernels.hopper.logits_sm90 import LOG2_E, LOWEST, sinks_of, tanh
from pallas_kernels.prefill_attention.config import WARPGROUP_ROWS
from pallas_kernels.prefill_attention.plan_sm90 import Plan, Refs


def full(shape: tuple[int, ...], value: float, layout: Any) -> jax.Array:
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def first_peak(plan: Plan, refs: Refs, heads: Callable[[jax.Array], tuple[jax.Array, jax.Array]]) -> jax.Array:
    """Returns the peaks f32 [64] (in units of log2) of rows that have seen no key: their sinks, of total weight 1.
    `heads` returns the warpgroup's first query head, and which one from it on each of rows i32[64] has."""
    layout = plgpu.Layout.WGMMA.reduce(1)
    if refs.sinks is None:
        return full((WARPGROUP_ROWS,), LOWEST, layout)
    row = plgpu.broadcasted_iota(jnp.int32, (WARPGROUP_ROWS,), 0, layout=layout)
    return sinks_of(refs.sinks, *heads(row), plan.config.stack)


def first_total(refs: Refs, p: jax.Array, decay: jax.Array) -> jax.Array:
    """Returns the rows' sums of weights after their first block, whose weights are p [64, T]. `decay` is what the
    sinks' weights shrank to."""
    total = p.sum(axis=1)
    return total if refs.sinks is None else decay + total


def bounded(plan: Plan, scores: jax.Array) -> jax.Array:
    """Returns the numbers [64, T] of which `exponentials` takes powers, of scores that are not masked yet."""
    return scores if plan.softcap is None else tanh(scores * (plan.scale / plan.softcap))


def exponentials(plan: Plan, scores: jax.Array, peak: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns P f32 [64, T] of bounded and masked scores (-inf), the rows' new peak (in units of log2), and what
    earlier sums shrink by."""
    to_log2 = (plan.scale if plan.softcap is None else plan.softcap) * LOG2_E
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
