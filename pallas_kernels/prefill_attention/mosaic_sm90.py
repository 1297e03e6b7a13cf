"""Runs prefill_attention on Hopper, in Pallas Mosaic GPU: FlashAttention-3 (arXiv:2407.08608) over pages.

Persistent CTAs walk the work list. One warpgroup fetches query tiles and KV blocks, a TMA copy per page and head, and
runs ahead across tiles. Pages of another format are converted by one or two warpgroups of their own. Each computing
warpgroup holds 64 query rows of one head. It issues the next block's Q K^T, then this block's P V, and does the next
block's softmax while P V runs. Two of them take turns at the tensor cores. Short chunks share a warpgroup
(pack_sm90.py).
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.formats.kv_pages import KVPages
from pallas_kernels.prefill_attention.compute_sm90 import compute
from pallas_kernels.prefill_attention.config import WARPGROUP_ROWS, Config, check_supported
from pallas_kernels.prefill_attention.copy_sm90 import convert, fetch
from pallas_kernels.prefill_attention.parts_sm90 import add_parts, areas, num_cuts
from pallas_kernels.prefill_attention.plan_sm90 import REGISTERS, Plan, Pool, Refs, flat_scales
from pallas_kernels.prefill_attention.work import Work, make_work


@partial(jax.jit, static_argnames=("scale", "window", "config", "first", "softcap", "part", "interpret"))
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
    into: jax.Array | None = None,
    first: int = 0,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    part: int | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """Returns [C, H, D] of q [C, H, D], page_table i32[B, M], cu_q_lens i32[B + 1] and kv_lens i32[B]; see api.py.
    `work` carries its configuration; `config` and `part` are those of the list made here without one. Raises ValueError
    for a list made for another window or part, and NotImplementedError for what isn't supported."""
    all_rows, num_heads, head_dim = q.shape
    num_rows = all_rows - first
    _, num_kv_heads, page_size, _ = pages.k.values.shape
    check_supported(q, pages, scale)
    if num_rows == 0 or page_table.shape[0] == 0:
        return jnp.zeros_like(q) if into is None else into.at[first:].set(0)
    if work is None:
        own = jax.ShapeDtypeStruct((num_rows, num_heads, head_dim), q.dtype)
        work = make_work(own, pages, cu_q_lens, kv_lens, window=window, config=config, part=part)
    if work.window != window:
        raise ValueError(f"work was made for window {work.window}, not {window}")
    if not isinstance(work.config, Config):
        raise ValueError("work was made for backend triton, not mosaic")
    if part not in (None, work.config.part):
        raise ValueError(f"work was made for parts of {work.config.part} keys, not {part}")
    if all_rows < WARPGROUP_ROWS:  # no copy is larger than its array
        pad = partial(jnp.pad, pad_width=((0, WARPGROUP_ROWS - all_rows), (0, 0), (0, 0)))
        q, into = pad(q), None if into is None else pad(into)
    formats = pages.k.format, pages.v.format
    heads, sizes = (num_heads, num_kv_heads, head_dim), (page_size, pages.k.num_pages)
    config = work.config
    if config.part is not None and page_table.shape[1] * page_size <= config.part:  # no row has more than one
        config = replace(config, part=None)
    plan = Plan(*heads, *sizes, q.dtype, *formats, scale, softcap, window, config, first)
    plan.check()
    given = {"parts": None if config.part is None else work.parts, "sinks": sinks}
    given = {name: array for name, array in given.items() if array is not None}
    made = () if config.part is None else areas(plan, work)
    kernel = plgpu.kernel(
        partial(_kernel, plan, tuple(given)),
        out_type=made if into is not None else (jax.ShapeDtypeStruct(q.shape, q.dtype), *made),
        scratch_types=plan.scratch(),
        grid=(config.ctas,),
        grid_names=("cta",),
        num_threads=plan.warpgroups,
        thread_name="warpgroup",
        kernel_name="prefill_attention",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )
    pools = [array for pool in (pages.k, pages.v) for array in (pool.values, flat_scales(pool)) if array is not None]
    arrays = q, page_table, work.tiles, work.count, work.items, pages.k.layer_operand, *given.values(), *pools
    if into is None:
        out, *sums = kernel(*arrays)
        if not sums or not num_cuts(plan, work):
            return out[:all_rows]
        out = jax.new_ref(out)
    else:
        out = jax.new_ref(into)
        sums = kernel(*arrays, out)
    if sums and num_cuts(plan, work):
        add_parts(plan, work, sums[0], sums[1], out, interpret)
    return jax.freeze(out)[:all_rows]


def _kernel(plan: Plan, given: tuple[str, ...], q: Any, table: Any, *arrays: Any, **scratch: Any) -> None:
    tiles, count, items, layer, *rest = arrays
    names = "out", *(() if plan.config.part is None else ("sums", "weights"))
    pools, made = iter(rest[len(given) : -len(names)]), rest[-len(names) :]
    named: dict[str, Any] = (
        dict.fromkeys(("parts", "sinks", "sums", "weights")) | dict(zip(given, rest)) | dict(zip(names, made))
    )
    for name, fmt in (("k", plan.k_format), ("v", plan.v_format)):
        values, scales = next(pools), None if fmt.group is None else next(pools)
        scratch[name] = Pool(values=values, scales=scales, **scratch[name])
    refs = Refs(q=q, table=table, tiles=tiles, count=count, items=items, layer=layer, **named, **scratch)
    warpgroup, computing = lax.axis_index("warpgroup"), plan.config.warpgroups
    registers = REGISTERS[computing, plan.warpgroups]

    @pl.when(warpgroup < computing)
    def _() -> None:
        if registers is not None:
            plgpu.set_max_registers(registers[0], action="increase")
        compute(plan, refs, warpgroup)

    @pl.when(warpgroup == computing)
    def _() -> None:
        if registers is not None:
            plgpu.set_max_registers(registers[2], action="decrease")
        if plan.fetches_by_warp:
            plgpu.warp_map(lambda warp: pl.when(warp == 0)(lambda: fetch(plan, refs)))
        else:
            fetch(plan, refs)

    both = [(refs.k, plan.k_format), (refs.v, plan.v_format)]
    converted = [(pool, fmt) for pool, fmt in both if pool.raw is not None]
    for i in range(plan.warpgroups - computing - 1):

        @pl.when(warpgroup == computing + 1 + i)
        def _(own: Any = converted[i :: plan.warpgroups - computing - 1]) -> None:
            if registers is not None:
                plgpu.set_max_registers(registers[1], action="decrease")
            convert(plan, refs, own)
