"""Runs weight_only_matmul on sm_90 where codes come through a ring of shared memory. One warpgroup copies codes, scales
and x into a ring of stages, on and on across the tiles of a persistent CTA. The others multiply what is there: by wgmma
(wgmma_sm90.py), or few rows of x by products of single warps (warp_sm90.py).

With `sizes`, rows of x are in groups with a weight each, one below the other. A tile is a block of rows by a slab of
the weight of a group that has rows in it. It multiplies all of the block's rows and stores those of its group. By wgmma
blocks begin at multiples of their size. By warps they begin with their group's rows, so few rows are one block."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.formats.quantized_weights import QuantizedWeight, group_scales
from pallas_kernels.hopper.ring_sm90 import drain, free_slot
from pallas_kernels.row_groups import Pairs, Schedule, known_pairs, pairs_of
from pallas_kernels.weight_only_matmul import warp_sm90, wgmma_sm90
from pallas_kernels.weight_only_matmul.config import WARP_ROWS, Config
from pallas_kernels.weight_only_matmul.operand_sm90 import ROWS, pair_table
from pallas_kernels.weight_only_matmul.plan_sm90 import PIECE, Item, Plan

# Of a thread that computes, and that copies, by the warpgroups that compute. Two warpgroups in all have enough as they
# are launched: asking for more than that is undefined.
REGISTERS = {1: None, 2: (232, 40), 3: (152, 40)}


def product(
    x: jax.Array,
    w: QuantizedWeight,
    out_dtype: jnp.dtype,
    config: Config,
    interpret: plgpu.InterpretGPUParams | None,
    *,
    sizes: jax.Array | None = None,
    schedule: Schedule | None = None,
    gated: bool = False,
) -> jax.Array:
    """Returns x [M, K'] times the weight's padded rows [N', K'], transposed: [split, M, N'] of out_dtype, to be
    summed. sizes i32[X]: the rows of group i meet block i of [X N', K'], and rows after the last group are zero.
    schedule: of sizes, if it is made already. gated: each block has gate's rows and as many of up's, and SiLU of one
    product times the other is returned, [1, M, N' / 2]."""
    weights = 0 if sizes is None else sizes.shape[0]
    (m, k), n = x.shape, w.values.shape[0] // (max(weights, 1) * (2 if gated else 1))
    plan = Plan(m, n, k, x.dtype, out_dtype, w.format, config, weights, gated)
    cut = (config.fold > 1 and not plan.apart) or config.split > 1
    if (weights or gated) and (cut or (config.by_warp and not weights) or not plan.by_group):
        raise NotImplementedError(f"{config} is not for {w.format.name} of groups of rows, or gated")
    if gated and (config.row_tiles % 2 if config.by_warp else config.row_tiles != 2):
        raise NotImplementedError(f"{config} is not for a gated product, which has row_tiles=2, or by warp more such")
    if config.by_warp and ((m > config.tokens and not weights) or n % WARP_ROWS or not w.format.packed):
        raise NotImplementedError(
            f"{config} is for at most {config.tokens} rows of x, multiples of {WARP_ROWS} rows of the weight and 4 "
            f"bits, not M={m}, N={n} and {w.format.name}"
        )
    if config.fold > 1 and (w.format.group or 1) > plan.step:
        raise NotImplementedError(
            f"{config} cuts groups of {w.format.group}: stages hold {plan.step} columns of a part"
        )
    rows = m
    if m > 8 and m % 8 and not plan.apart:  # TMA cuts x into groups of 8 rows
        rows = m + -m % 8
        x = jnp.pad(x, ((0, rows - m), (0, 0)))
    scales = w.scales if w.format.scale_codes == "e8m0" else group_scales(w)
    arrays = {"x": x, "w": w.values, "scales": scales, "zeros": w.zeros}
    if w.format.codes == "nf4":
        arrays["table"] = pair_table(x.dtype)
    arrays = {name: array for name, array in arrays.items() if array is not None}
    # What is as wide as its array is copied as one run of bytes, which is not cut at the array's edges.
    width = n + 16 if n == ROWS // config.fold else n
    shape = (config.split, m, n) if config.by_warp or weights else (config.split, rows, width)
    pairs = None
    if sizes is not None:
        cuts = config.tokens, plan.apart
        pairs = known_pairs(schedule, *cuts) or pairs_of(sizes, m, config.tokens, apart=plan.apart)
    kernel = plgpu.kernel(
        partial(_kernel, plan, tuple(arrays)),
        out_type=jax.ShapeDtypeStruct(shape, out_dtype),
        scratch_types=plan.scratch(tuple(arrays)),
        grid=(min(config.ctas, plan.items),),
        grid_names=("worker",),
        num_threads=config.warpgroups + 1,
        thread_name="warpgroup",
        kernel_name="weight_only_matmul" + ("_gated" if gated else "") + ("_ragged" if weights else ""),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            approx_math=gated,  # SiLU's exponential, good to 2^-21
        ),
        interpret=interpret,
    )
    return kernel(*arrays.values(), *(() if pairs is None else pairs.arrays()))[:, :m, :n]


def _kernel(plan: Plan, names: tuple[str, ...], *refs: Any, **scratch: Any) -> None:
    sources, out, config = dict(zip(names, refs)), refs[-1], plan.config
    pairs = Pairs(*refs[len(names) : -1]) if plan.weights else None
    worker, warpgroup = lax.axis_index("worker"), lax.axis_index("warpgroup")
    workers = lax.axis_size("worker")
    items = plan.items if pairs is None else pairs.number(plan.m, config.tokens, plan.apart) * plan.tiles[0]
    mine = lax.div(items - worker + workers - 1, workers)  # `//` asks for signs: more to run and to lower
    registers = REGISTERS[config.warpgroups]
    item = partial(item_of, plan, pairs)

    @pl.when(warpgroup < config.warpgroups)
    def _compute() -> None:
        if registers is not None:
            plgpu.set_max_registers(registers[0], action="increase")
        if "table" in names:
            plgpu.barrier_wait(scratch["table_full"])

        compute = (warp_sm90 if config.by_warp else wgmma_sm90).compute_item

        @pl.loop(0, mine)
        def _item(i: jax.Array) -> None:
            compute(plan, names, warpgroup, i, item(i), out, scratch)

        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == config.warpgroups)
    def _copy() -> None:
        if registers is not None:
            plgpu.set_max_registers(registers[1], action="decrease")

        @plgpu.warp_map
        def _warps(warp: jax.Array) -> None:
            copies = plan.copies(names)
            for w in range(3):
                pl.when(warp == w)(partial(copy_stages, plan, sources, scratch, mine, item, copies[w::3]))

            @pl.when(warp == 3)
            def _vectors() -> None:
                if "table" in names:
                    plgpu.copy_gmem_to_smem(sources["table"], scratch["table_s"], scratch["table_full"])
                if plan.vectors(names):
                    copy_vectors(plan, sources, scratch, mine, item, plan.vectors(names))


def item_of(plan: Plan, pairs: Pairs | None, i: jax.Array) -> Item:
    """Returns this CTA's i-th tile. Neighbours share the weight's rows. With groups they share x's, and a group's
    weight is near in the second-level cache until its next block."""
    number = lax.axis_index("worker") + i * lax.axis_size("worker")
    slabs, along_x = (jnp.int32(count) for count in plan.tiles)
    if pairs is not None:
        pair, column = lax.div(number, slabs), lax.rem(number, slabs) * plan.rows
        group, token, first, last = (each[pair] for each in pairs[:4])
        row = jnp.minimum(group, plan.weights - 1) * (plan.halves * plan.n) + column
        return Item(row, token, jnp.int32(0), column, first, last, group)
    rest, split = lax.div(number, along_x), jnp.int32(plan.config.split)
    column = lax.div(rest, split) * plan.rows
    return Item(column, lax.rem(number, along_x) * plan.config.tokens, lax.rem(rest, split), column)


def copy_stages(
    plan: Plan, sources: Any, scratch: Any, mine: jax.Array, item: Any, copies: list[tuple[str, int, int]]
) -> None:
    """Copies one warp's share of what fills the ring."""
    if not copies:
        return
    config, steps, full, free = plan.config, plan.steps, scratch["full"], scratch["free"]

    @pl.loop(0, mine)
    def _item(i: jax.Array) -> None:
        place = item(i)

        @pl.loop(0, steps)
        def _step(s: jax.Array) -> None:
            slot = free_slot(i * steps + s, free)
            first = (place.split * steps + s) * config.fold  # of the parts of K
            for name, half, part in copies:
                source, target = sources[name], scratch[f"{name}_s"].at[slot]
                row = place.row + half * plan.n
                if name == "w":
                    width = config.width if plan.apart else config.fold * config.width
                    target = target.at[part] if plan.apart else target
                    source = source.at[pl.ds(row, plan.rows), pl.ds((first + part) * config.width, width)]
                    target = target.at[pl.ds(half * plan.rows, plan.rows)]
                elif name == "x" and plan.apart:
                    columns = pl.ds(first * plan.step + part * PIECE, PIECE)
                    copy_rows(source.at[:, columns], target.at[part], place, full.at[slot])
                    continue
                elif name == "x":
                    columns = pl.ds((first + part) * plan.step, plan.step)
                    source = source.at[pl.ds(place.token, config.tokens), columns]
                    target = target.at[pl.ds(part * config.tokens, config.tokens)]
                else:
                    assert plan.format.group is not None
                    group = lax.div(first * plan.step, jnp.int32(plan.format.group))
                    groups, rows = target.shape[0] // plan.halves, target.shape[1]
                    source = source.at[pl.ds(group, groups), pl.ds(row, rows)]
                    target = target.at[pl.ds(half * groups, groups)]
                plgpu.copy_gmem_to_smem(source, target, full.at[slot])

    drain(mine * steps, free)


def copy_rows(source: Any, target: Any, place: Item, full: Any) -> None:
    """Copies a group's rows to the first of target [tokens, columns], and few others: 2, 4, 8 .. in all."""
    count, tokens = place.last - place.first, target.shape[0]
    sizes = [size for size in (2, 4, 8, 16) if size < tokens] + [tokens]
    for less, size in zip([0, *sizes], sizes):  # one copy whatever the count is: who reads waits for it
        fits = (count > less) | (size == sizes[0]), (count <= size) | (size == tokens)

        @pl.when(fits[0] & fits[1])
        def _copy(size: int = size) -> None:
            plgpu.copy_gmem_to_smem(source.at[pl.ds(place.token, size)], target.at[pl.ds(0, size)], full)


def copy_vectors(plan: Plan, sources: Any, scratch: Any, mine: jax.Array, item: Any, names: list[str]) -> None:
    """Copies scales and zeros of rows, once a tile."""

    @pl.loop(0, mine)
    def _item(i: jax.Array) -> None:
        pl.when(i > 0)(lambda: plgpu.barrier_wait(scratch["vectors_free"]))
        for name in names:
            target = scratch[f"{name}_s"]
            source = sources[name].at[pl.ds(item(i).row, target.shape[0])]
            plgpu.copy_gmem_to_smem(source, target, scratch["vectors_full"])

    pl.when(mine > 0)(lambda: plgpu.barrier_wait(scratch["vectors_free"]))
