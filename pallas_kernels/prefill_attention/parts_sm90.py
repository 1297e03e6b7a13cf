"""Adds up parts of rows that see many keys, in the Hopper kernel of prefill_attention.

A part has the keys from one multiple of Config.part to the next. Its softmax begins afresh, and parts are added from
left to right. The CTA that has a tile adds them up. Registers lack room for two sums, so one waits in shared memory, or
in global memory where that is full. Of a tile that is cut each part is an item, and a second kernel adds them. Both do
the same arithmetic. Factors are powers of two, so that products are exact and only the additions round. A row with a
single part is never scaled.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.hadamard_sm90 import turn
from pallas_kernels.hopper.logits_sm90 import LOWEST
from pallas_kernels.hopper.row_pieces_sm90 import tiled
from pallas_kernels.prefill_attention.config import WARPGROUP_ROWS
from pallas_kernels.prefill_attention.plan_sm90 import Plan, quotient
from pallas_kernels.prefill_attention.work import CUT, ROW, ROWS, Work

LOADED = 8  # parts of a row that are read at once
ROWS_AT_ONCE = 4  # CTAs that share the rows of a tile


class Sum(NamedTuple):
    """Holds sums over some keys, of 64 rows or of one: P V [64, D] or [D], peaks (in units of log2) and weights."""

    acc: jax.Array
    peak: jax.Array
    total: jax.Array

    def scaled(self, factor: jax.Array) -> jax.Array:
        """Returns the rows of P V times a factor each."""
        return self.acc * (factor if self.acc.ndim == 1 else lax.broadcast_in_dim(factor, self.acc.shape, [0]))

    def normalized(self) -> jax.Array:
        return self.scaled(1 / self.total)


def with_whole_peaks(own: Sum, several: jax.Array) -> Sum:
    """Returns the same sums, with integers as peaks of those rows that have several parts."""
    peak = jnp.where(several, lax.round(own.peak, lax.RoundingMethod.TO_NEAREST_EVEN), own.peak)
    factor = jnp.exp2(own.peak - peak)
    return Sum(own.scaled(factor), peak, own.total * factor)


def added(a: Sum, b: Sum) -> Sum:
    """Adds the sums of further keys. Peaks are integers, or those of the only part in which a row sees keys."""
    peak = jnp.maximum(a.peak, b.peak)
    of_a, of_b = (_power_of_two(x.peak - peak) for x in (a, b))
    return Sum(a.scaled(of_a) + b.scaled(of_b), peak, a.total * of_a + b.total * of_b)


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """Returns 2^exponent of integers that are not positive, exactly; 0 below 2^-126."""
    bits = lax.shift_left(jnp.maximum(exponent, -127.0).astype(jnp.int32) + 127, jnp.int32(23))
    return lax.bitcast_convert_type(bits, jnp.float32)


def store_sum(sums: Any, weights: Any, at: jax.Array, own: Sum) -> None:
    """Writes a warpgroup's sums to a place of global or shared memory."""
    sums[at] = own.acc
    for i, numbers in enumerate((own.peak, own.total)):
        weights[at, i] = numbers


def load_sum(sums: Any, weights: Any, at: jax.Array, shared: bool) -> Sum:
    """Reads the sums that the same threads wrote there."""
    layout = plgpu.Layout.WGMMA
    acc = plgpu.load(sums.at[at], layout=layout, optimized=shared)
    return Sum(acc, *(plgpu.load(weights.at[at, i], layout=layout.reduce(1), optimized=False) for i in range(2)))


def areas(plan: Plan, work: Work) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Returns the shapes of Refs.sums and Refs.weights. There is an area for each warpgroup of an item that is a part,
    and for those of a CTA unless it keeps its sums."""
    own = 1 if plan.keeps_sums else plan.config.ctas  # one, unused, as no array is empty
    count = (num_cuts(plan, work) + own) * plan.config.warpgroups
    sizes = (count, WARPGROUP_ROWS, plan.head_dim), (count, 2, WARPGROUP_ROWS)
    return tuple(jax.ShapeDtypeStruct(size, jnp.float32) for size in sizes)  # type: ignore[return-value]


def num_cuts(plan: Plan, work: Work) -> int:
    """Returns how many items may be parts, at most."""
    assert work.items is not None
    return (work.items.shape[0] - work.tiles.shape[0] * plan.num_kv_heads) * plan.sets


def add_parts(
    plan: Plan,
    work: Work,
    sums: jax.Array,
    weights: jax.Array,
    out: Any,
    interpret: plgpu.InterpretGPUParams | None,
) -> None:
    """Fills in the rows of `out`, a reference, whose tiles are cut."""
    plgpu.kernel(
        partial(_add_kernel, plan),
        grid=(ROWS_AT_ONCE, plan.config.ctas),
        grid_names=("row", "cta"),
        kernel_name="prefill_attention_parts",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )(work.tiles, work.parts, sums, weights, out)


def row_layout(head_dim: int) -> Any:
    """Lays out a row [D] in each warp. A rotation adds columns bit by bit of their numbers: those of registers first,
    then those of lanes. The order is that of Layout.WGMMA: bit 0, then from bit 3 up, then bits 1 and 2."""
    return tiled(((head_dim,), (head_dim // 8,), (8,), (2,)), (plgpu.Replicated(4),), (-2, -4))


def _add_kernel(plan: Plan, tiles: Any, parts: Any, sums: Any, weights: Any, out: Any) -> None:
    """Adds the parts of each row of each query head of the tiles that are cut."""
    config, group = plan.config, plan.num_heads // plan.num_kv_heads
    layout = row_layout(plan.head_dim)

    @pl.loop(lax.axis_index("cta"), parts[CUT] * plan.num_heads, step=config.ctas)
    def _head(unit: jax.Array) -> None:
        tile, head = quotient(unit, plan.num_heads), lax.rem(unit, jnp.int32(plan.num_heads))
        kv_head, of_group = quotient(head, group), lax.rem(head, jnp.int32(group))
        of_set, of_tile = quotient(of_group, plan.tile_heads), lax.rem(of_group, jnp.int32(plan.tile_heads))
        begin, count = parts[CUT + 1 + tile], parts[CUT + 2 + tile] - parts[CUT + 1 + tile]

        @pl.loop(lax.axis_index("row"), tiles[tile, ROWS], step=ROWS_AT_ONCE)
        def _row(row: jax.Array) -> None:
            warpgroup = quotient(row, config.queries) * config.heads + quotient(of_tile, config.stack)
            place = lax.rem(of_tile, jnp.int32(config.stack)) * config.queries + lax.rem(row, jnp.int32(config.queries))

            def load(i: jax.Array) -> Sum:
                item = ((begin + jnp.minimum(i, count - 1)) * plan.num_kv_heads + kv_head) * plan.sets + of_set
                area = item * config.warpgroups + warpgroup
                acc = plgpu.load(sums.at[area, place], layout=layout, optimized=False)
                return Sum(acc, weights[area, 0, place], weights[area, 1, place])

            def add(i: jax.Array, total: Sum) -> Sum:
                own = [load(i * LOADED + k) for k in range(LOADED)]  # before any is waited for
                for k, part in enumerate(own):
                    there = i * LOADED + k < count
                    total = Sum(*(jnp.where(there, new, old) for new, old in zip(added(total, part), total)))
                return total

            nothing = plgpu.layout_cast(jnp.zeros((plan.head_dim,), jnp.float32), layout)
            start = Sum(nothing, jnp.float32(LOWEST), jnp.float32(0))
            result = lax.fori_loop(0, quotient(count + (LOADED - 1), LOADED), add, start).normalized()
            if plan.v_format.hadamard:
                result = turn(result, layout, plan.head_dim, lanes=32)
            out[plan.first_row + tiles[tile, ROW] + row, head] = result.astype(out.dtype)
