"""prefill_attention for Hopper, in Pallas Mosaic GPU: FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608) over pages.

Persistent CTAs walk the work list. One warpgroup fetches query tiles and KV blocks, a TMA copy per page and head, and
runs ahead across tiles. Each computing warpgroup holds 64 query rows of one head; it issues the next block's Q K^T,
then this block's P V, and does the next block's softmax while P V runs. Two of them take turns at the tensor cores.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kv_pages import KVPages
from pallas_kernels.prefill_attention.config import WARPGROUP_ROWS, Config
from pallas_kernels.prefill_attention.work import CHUNK, KEYS, POSITION, ROW, ROWS, Work, make_work

# Registers of a computing and of the memory warpgroup's threads: the CTA's 64 Ki, moved to where they are needed.
REGISTERS = {1: None, 2: (232, 40), 3: (160, 32)}
LOWEST = -1e30  # finite: a row that has seen no key yet keeps its sum without NaN


class Refs(NamedTuple):
    """Global arrays and shared memory of the kernel; barriers are named for what they say."""

    q: Any
    k: Any
    v: Any
    table: Any
    tiles: Any
    count: Any
    out: Any
    q_raw: Any  # [warpgroups, 64, D], plain rows: tiled copies would have to start at multiples of 8
    q_s: Any  # the same, tiled and swizzled as wgmma wants it
    k_s: Any  # [stages, T, D]
    v_s: Any
    p_s: Any  # [warpgroups, 64, T] if P is staged
    out_s: Any  # [warpgroups, 64, D], plain rows
    q_ready: Any
    q_free: Any
    k_ready: Any
    v_ready: Any
    v_raw: Any  # V of a boundary block, before its unseen slots are cleared
    k_free: Any
    v_free: Any
    turn: Any


class Tile(NamedTuple):
    """One query tile: scalars of the work list, its query heads, and its KV blocks first <= j < last."""

    chunk: jax.Array
    row: jax.Array
    rows: jax.Array
    position: jax.Array
    keys: jax.Array
    head: jax.Array  # the first of config.heads
    low: jax.Array  # the first key that any row sees
    first: jax.Array
    last: jax.Array


@dataclass(frozen=True)
class Plan:
    """Static sizes."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: jnp.dtype
    scale: float
    window: int | None
    config: Config

    @property
    def pages(self) -> int:
        """Pages of a KV block."""
        return self.config.block_kv // self.page_size

    def scratch(self) -> dict[str, Any]:
        config, dim = self.config, self.head_dim
        groups, rows, block = config.warpgroups, WARPGROUP_ROWS, config.block_kv

        def tiled(*shape: int) -> Any:
            transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]
            return plgpu.SMEM(shape, self.dtype, transforms=transforms)

        full = partial(plgpu.Barrier, num_barriers=config.stages)
        return {
            "q_raw": plgpu.SMEM((groups, rows, dim), self.dtype),
            "q_s": tiled(groups, rows, dim),
            "k_s": tiled(config.stages, block, dim),
            "v_s": tiled(config.stages, block, dim),
            "p_s": tiled(groups, rows, block) if config.stage_probabilities else None,
            "out_s": plgpu.SMEM((groups, rows, dim), self.dtype),
            "q_ready": plgpu.Barrier(num_arrivals=groups),
            "q_free": plgpu.Barrier(num_arrivals=groups),
            "k_ready": full(num_arrivals=self.pages),
            "v_ready": full(num_arrivals=self.pages),
            "v_raw": plgpu.Barrier(num_arrivals=self.pages),
            "k_free": full(num_arrivals=groups),
            "v_free": full(num_arrivals=groups),
            "turn": plgpu.Barrier(num_barriers=2) if config.alternate else None,
        }


@partial(jax.jit, static_argnames=("scale", "window", "config", "interpret"))
def prefill_attention(
    q: jax.Array,
    pages: KVPages,
    page_table: jax.Array,
    cu_q_lens: jax.Array,
    kv_lens: jax.Array,
    scale: float,
    window: int | None,
    work: Work | None = None,
    config: Config | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """q [C, H, D], page_table i32[B, M], cu_q_lens i32[B + 1], kv_lens i32[B] -> [C, H, D]; see api.py.

    `work` carries its configuration; `config` is that of the list made here without one. Raises ValueError for a list
    made for another window, and NotImplementedError for a scale that isn't positive.
    """
    num_rows, num_heads, head_dim = q.shape
    _, num_kv_heads, page_size, _ = pages.k.values.shape
    if not scale > 0:
        raise NotImplementedError(f"scale is {scale}: the mosaic kernel takes positive ones")
    if num_rows == 0 or page_table.shape[0] == 0:
        return jnp.zeros_like(q)
    if num_rows < WARPGROUP_ROWS:  # no copy is larger than its array
        q = jnp.pad(q, ((0, WARPGROUP_ROWS - num_rows), (0, 0), (0, 0)))
    if work is None:
        sizes = num_rows, num_heads, num_kv_heads, head_dim
        work = make_work(cu_q_lens, kv_lens, *sizes, window=window, config=config)
    if work.window != window:
        raise ValueError(f"work was made for window {work.window}, not {window}")
    config = work.config
    plan = Plan(num_heads, num_kv_heads, head_dim, page_size, q.dtype, scale, window, config)
    kernel = plgpu.kernel(
        partial(_kernel, plan),
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_types=plan.scratch(),
        grid=(config.ctas,),
        grid_names=("cta",),
        num_threads=config.warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )
    return kernel(q, pages.k.values, pages.v.values, page_table, work.tiles, work.count)[:num_rows]


def _kernel(plan: Plan, *arrays: Any, **scratch: Any) -> None:
    refs = Refs(*arrays, **scratch)
    warpgroup = lax.axis_index("warpgroup")
    registers = REGISTERS[plan.config.warpgroups]

    @pl.when(warpgroup < plan.config.warpgroups)
    def _() -> None:
        if registers is not None:
            plgpu.set_max_registers(registers[0], action="increase")
        _compute(plan, refs, warpgroup)

    @pl.when(warpgroup == plan.config.warpgroups)
    def _() -> None:
        if registers is not None:
            plgpu.set_max_registers(registers[1], action="decrease")
        _fetch(plan, refs)


def _for_each_tile(plan: Plan, refs: Refs, body: Any) -> tuple[jax.Array, jax.Array]:
    """Calls body(tile, n, blocks) for the n-th tile of this CTA, `blocks` KV blocks done; returns both totals.

    Tiles are dealt out longest first, back and forth, which evens out what the CTAs get.
    """
    ctas, sets = plan.config.ctas, plan.num_heads // plan.config.heads
    cta = lax.axis_index("cta")
    total = refs.count[0] * sets
    rounds, rest = total // ctas, lax.rem(total, jnp.int32(ctas))

    def dealt(n: jax.Array) -> jax.Array:
        return jnp.where(lax.rem(n, jnp.int32(2)) == 0, cta, ctas - 1 - cta)

    def step(n: jax.Array, blocks: jax.Array) -> jax.Array:
        item = n * ctas + dealt(n)
        index = item // sets
        chunk, row, rows, position, keys = (refs.tiles[index, i] for i in (CHUNK, ROW, ROWS, POSITION, KEYS))
        low = jnp.int32(0)
        if plan.window is not None:
            low = jnp.maximum(position - (plan.window - 1), 0)
        first = low // plan.config.block_kv
        last = (position + rows + (plan.config.block_kv - 1)) // plan.config.block_kv
        head = (item - index * sets) * plan.config.heads
        body(Tile(chunk, row, rows, position, keys, head, low, first, last), n, blocks)
        return blocks + last - first

    tiles = rounds + (dealt(rounds) < rest).astype(jnp.int32)
    return tiles, lax.fori_loop(0, tiles, step, jnp.int32(0))


def _fetch(plan: Plan, refs: Refs) -> None:
    """The memory warpgroup: queries and KV blocks of every tile, in the order in which they are consumed."""
    config = plan.config

    def fetch_tile(tile: Tile, n: jax.Array, blocks: jax.Array) -> None:
        pl.when(n > 0)(lambda: plgpu.barrier_wait(refs.q_free))
        for w in range(config.warpgroups):
            rows = pl.ds(tile.row + w // config.heads * WARPGROUP_ROWS, WARPGROUP_ROWS)
            source = refs.q.at[rows, tile.head + w % config.heads]
            plgpu.copy_gmem_to_smem(source, refs.q_raw.at[w], refs.q_ready)

        @pl.loop(tile.first, tile.last)
        def _(j: jax.Array) -> None:
            _fetch_block(plan, refs, tile, j, blocks + j - tile.first)

    tiles, blocks = _for_each_tile(plan, refs, fetch_tile)

    # A barrier must have been seen complete by all who wait on it before the CTA exits.
    pl.when(tiles > 0)(lambda: plgpu.barrier_wait(refs.q_free))

    @pl.loop(jnp.maximum(blocks - config.stages, 0), blocks)
    def _(n: jax.Array) -> None:
        plgpu.barrier_wait(refs.k_free.at[lax.rem(n, jnp.int32(config.stages))])
        plgpu.barrier_wait(refs.v_free.at[lax.rem(n, jnp.int32(config.stages))])


def _fetch_block(plan: Plan, refs: Refs, tile: Tile, j: jax.Array, n: jax.Array) -> None:
    """K and V of KV block j, the n-th of this CTA."""
    size, block = plan.page_size, plan.config.block_kv
    slot = lax.rem(n, jnp.int32(plan.config.stages))
    kv_head = tile.head // (plan.num_heads // plan.num_kv_heads)
    # Entries beyond the visible pages name no page: fetch the nearest visible one instead. Entries are all read before
    # any copy is issued, so that their latencies overlap.
    entries = [jnp.clip(j * plan.pages + i, tile.low // size, (tile.keys - 1) // size) for i in range(plan.pages)]
    numbers = [refs.table[tile.chunk, entry] for entry in entries]

    def copy(pool: Any, shared: Any, barrier: Any) -> None:
        for i, number in enumerate(numbers):
            plgpu.copy_gmem_to_smem(pool.at[number, kv_head], shared.at[slot, pl.ds(i * size, size)], barrier)

    pl.when(n >= plan.config.stages)(lambda: plgpu.barrier_wait(refs.k_free.at[slot]))
    copy(refs.k, refs.k_s, refs.k_ready.at[slot])
    pl.when(n >= plan.config.stages)(lambda: plgpu.barrier_wait(refs.v_free.at[slot]))
    boundary = (j * block < tile.low) | ((j + 1) * block > tile.keys)
    pl.when(jnp.logical_not(boundary))(lambda: copy(refs.v, refs.v_s, refs.v_ready.at[slot]))

    @pl.when(boundary)
    def _() -> None:  # whatever is in slots that nobody sees (NaN times zero is NaN) becomes zero
        copy(refs.v, refs.v_s, refs.v_raw)
        plgpu.barrier_wait(refs.v_raw)
        for row in range(0, block, 64):
            token = j * block + row + plgpu.broadcasted_iota(jnp.int32, (64, 64), 0, layout=plgpu.Layout.WGMMA)
            seen = (token >= tile.low) & (token < tile.keys)
            for column in range(0, plan.head_dim, 64):
                part = refs.v_s.at[slot, pl.ds(row, 64), pl.ds(column, 64)]
                part[...] = jnp.where(seen, plgpu.load(part, layout=plgpu.Layout.WGMMA), jnp.zeros((), plan.dtype))
        plgpu.commit_smem()
        for _ in range(plan.pages):
            plgpu.barrier_arrive(refs.v_ready.at[slot])


def _compute(plan: Plan, refs: Refs, wg: jax.Array) -> None:
    """A computing warpgroup: attention of its 64 rows of every tile."""
    config = plan.config
    if config.alternate:  # the first warpgroup has the first turn
        pl.when(wg == 1)(lambda: plgpu.barrier_arrive(refs.turn.at[0]))

    def compute_tile(tile: Tile, n: jax.Array, blocks: jax.Array) -> None:
        below = wg // config.heads * WARPGROUP_ROWS  # rows of the tile that other warpgroups have
        plgpu.barrier_wait(refs.q_ready)
        _copy(refs.q_raw.at[wg], refs.q_s.at[wg])
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs.q_free)
        store = partial(_store, plan, refs, tile, wg, below)

        @pl.when(tile.last > tile.first)
        def _() -> None:
            acc, total = _attend(plan, refs, tile, wg, refs.q_s.at[wg], tile.position + below, blocks)
            store(acc * lax.broadcast_in_dim(1 / total, acc.shape, [0]))

        @pl.when(tile.last == tile.first)
        def _() -> None:
            store(plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS, plan.head_dim), jnp.float32), plgpu.Layout.WGMMA))

    _for_each_tile(plan, refs, compute_tile)
    if config.alternate:
        pl.when(wg == 0)(lambda: plgpu.barrier_wait(refs.turn.at[0]))
    plgpu.wait_smem_to_gmem(0)


def _attend(
    plan: Plan, refs: Refs, tile: Tile, wg: jax.Array, q: Any, position: jax.Array, blocks: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Unnormalized P V [64, D] and the row sums [64] of the rows at `position` and after, over blocks first..last."""
    config, block = plan.config, plan.config.block_kv
    shape, out_shape = (WARPGROUP_ROWS, block), (WARPGROUP_ROWS, plan.head_dim)
    to_log2 = plan.scale * math.log2(math.e)

    def slot(j: jax.Array) -> jax.Array:
        return lax.rem(blocks + j - tile.first, jnp.int32(config.stages))

    def take_turn() -> None:
        if config.alternate:
            plgpu.barrier_wait(refs.turn.at[wg])

    def pass_turn() -> None:
        if config.alternate:
            plgpu.barrier_arrive(refs.turn.at[1 - wg])

    def softmax(
        scores: jax.Array, j: jax.Array, peak: jax.Array, masked: bool
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """P of block j (f32), the rows' new peak (in units of log2), and what earlier sums shrink by."""
        if masked:
            row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
            column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
            distance = row - column + (position - j * block)  # query's position - key's
            seen = distance >= 0
            if plan.window is not None:
                seen = seen & (distance < plan.window)
            scores = jnp.where(seen, scores, -jnp.inf)
        new_peak = jnp.maximum(peak, scores.max(axis=1) * to_log2)
        p = jnp.exp2(scores * to_log2 - lax.broadcast_in_dim(new_peak, shape, [0]))
        return p, new_peak, jnp.exp2(peak - new_peak)

    def first_scores(j: jax.Array) -> jax.Array:
        def product(acc: Any) -> jax.Array:
            plgpu.barrier_wait(refs.k_ready.at[slot(j)])
            take_turn()
            plgpu.wgmma(acc, q, refs.k_s.at[slot(j)].transpose((1, 0)))
            pass_turn()
            return lax.optimization_barrier(acc[...])

        scores = pl.run_scoped(product, plgpu.ACC(shape, jnp.float32))
        plgpu.barrier_arrive(refs.k_free.at[slot(j)])
        return scores

    def step(j: jax.Array, carry: tuple[jax.Array, ...], masked: bool) -> tuple[jax.Array, ...]:
        """P V of block j - 1, under which the scores and the softmax of block j are computed."""
        acc, peak, total, p = carry

        def products(scores_ref: Any, acc_ref: Any) -> tuple[jax.Array, ...]:
            acc_ref[...] = acc
            plgpu.barrier_wait(refs.k_ready.at[slot(j)])
            take_turn()
            plgpu.wgmma(scores_ref, q, refs.k_s.at[slot(j)].transpose((1, 0)))
            plgpu.barrier_wait(refs.v_ready.at[slot(j - 1)])
            plgpu.wgmma(acc_ref, p, refs.v_s.at[slot(j - 1)])
            pass_turn()
            # The barriers keep LLVM from reading accumulators before the wait: it doesn't know that they change late.
            scores = lax.optimization_barrier(plgpu.wgmma_accumulator_load(scores_ref, wait_n=1))
            plgpu.barrier_arrive(refs.k_free.at[slot(j)])
            new_p, new_peak, decay = softmax(scores, j, peak, masked)
            new_total = total * decay + new_p.sum(axis=1)
            return lax.optimization_barrier(acc_ref[...]), new_peak, new_total, new_p, decay

        if config.stage_probabilities:
            scores = first_scores(j)
            new_acc = last_product(j - 1, acc, p)
            new_p, new_peak, decay = softmax(scores, j, peak, masked)
            new_total = total * decay + new_p.sum(axis=1)
        else:
            accs = plgpu.ACC(shape, jnp.float32), plgpu.ACC(out_shape, jnp.float32)
            new_acc, new_peak, new_total, new_p, decay = pl.run_scoped(products, *accs)
            plgpu.barrier_arrive(refs.v_free.at[slot(j - 1)])
        new_acc = new_acc * lax.broadcast_in_dim(decay, acc.shape, [0])
        return new_acc, new_peak, new_total, new_p.astype(plan.dtype)

    def last_product(j: jax.Array, acc: jax.Array, p: jax.Array) -> jax.Array:
        plgpu.barrier_wait(refs.v_ready.at[slot(j)])
        if config.stage_probabilities:
            refs.p_s[wg] = p
            plgpu.commit_smem()

        def product(acc_ref: Any) -> jax.Array:
            if not config.stage_probabilities:
                acc_ref[...] = acc
            take_turn()
            plgpu.wgmma(acc_ref, refs.p_s.at[wg] if config.stage_probabilities else p, refs.v_s.at[slot(j)])
            pass_turn()
            return lax.optimization_barrier(acc_ref[...])

        out = pl.run_scoped(product, plgpu.ACC(out_shape, jnp.float32))
        plgpu.barrier_arrive(refs.v_free.at[slot(j)])
        return acc + out if config.stage_probabilities else out

    def full(size: tuple[int, ...], value: float, layout: Any) -> jax.Array:
        return plgpu.layout_cast(jnp.full(size, value, jnp.float32), layout)

    lowest = full(shape[:1], LOWEST, plgpu.Layout.WGMMA.reduce(1))
    acc = full((WARPGROUP_ROWS, plan.head_dim), 0, plgpu.Layout.WGMMA)
    p, peak, _ = softmax(first_scores(tile.first), tile.first, lowest, True)
    carry = (acc, peak, p.sum(axis=1), p.astype(plan.dtype))

    # Blocks that every row sees in full need no mask.
    begin, end = tile.first + 1, tile.last
    full_end = jnp.clip((position + 1) // block, begin, end)
    if plan.window is not None:
        full_begin = (position + WARPGROUP_ROWS - plan.window + block - 1) // block
        full_begin = jnp.clip(full_begin, begin, full_end)
        carry = lax.fori_loop(begin, full_begin, partial(step, masked=True), carry)
        begin = full_begin
    carry = lax.fori_loop(begin, full_end, partial(step, masked=False), carry)
    acc, _, total, p = lax.fori_loop(full_end, end, partial(step, masked=True), carry)
    return last_product(tile.last - 1, acc, p), total


def _copy(source: Any, target: Any) -> None:
    """Rows of shared memory from plain to swizzled or back, 16 bytes a thread at a time."""
    layout = plgpu.Layout.SMEM_GMEM_COPY(source.shape, source.dtype, 128)
    target[...] = plgpu.load(source, layout=layout)


def _store(plan: Plan, refs: Refs, tile: Tile, wg: jax.Array, below: jax.Array, out: jax.Array) -> None:
    """Writes the warpgroup's rows of the tile, and none of the next chunk's."""
    head = tile.head + lax.rem(wg, jnp.int32(plan.config.heads))
    row, rows = tile.row + below, jnp.clip(tile.rows - below, 0, WARPGROUP_ROWS)
    refs.q_s[wg] = out.astype(plan.dtype)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the rows of the tile before
    _copy(refs.q_s.at[wg], refs.out_s.at[wg])
    plgpu.commit_smem()

    @pl.when(rows == WARPGROUP_ROWS)
    def _() -> None:
        plgpu.copy_smem_to_gmem(refs.out_s.at[wg], refs.out.at[pl.ds(row, WARPGROUP_ROWS), head])

    @pl.when(rows < WARPGROUP_ROWS)
    def _() -> None:
        @pl.loop(0, rows)
        def _(i: jax.Array) -> None:
            plgpu.copy_smem_to_gmem(refs.out_s.at[wg, i], refs.out.at[row + i, head])
