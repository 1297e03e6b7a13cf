"""Adds up the partial results of heads that workers of decode_attention don't share evenly."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode_attention.shape_sm90 import COMPILER, FETCHED, MASKED, PAD, Shape, first_query
from pallas_kernels.decode_attention.work import Work
from pallas_kernels.hopper.hadamard_sm90 import turn

_MOST_CTAS = 8  # of what was cut: one a query, in turns if there are more
_ROW = plgpu.Layout.TILED(  # each warp has all of a row, two elements a lane
    plgpu.Tiling(((64,), (2,))), warp_dims=(plgpu.Replicated(4),), lane_dims=(-2,), vector_dim=-1
)


def merge_cuts(
    shape: Shape, out: jax.Array, parts: jax.Array, work: Work, interpret: plgpu.InterpretGPUParams | None
) -> jax.Array:
    """Fills in the results [R * H, D] of heads that were cut, from their partial ones."""
    result = jax.new_ref(out)
    chunks, each = -(-shape.splits // FETCHED), shape.sums
    queries = shape.config.computing * shape.queries
    plgpu.kernel(
        partial(_merge_kernel, shape),
        scratch_types={
            "parts_s": plgpu.SMEM((each, chunks * FETCHED, 1, shape.head_dim), jnp.float32),
            "weights_s": plgpu.SMEM((each, chunks * FETCHED, 1, PAD), jnp.float32),
            "out_s": plgpu.SMEM((1, shape.head_dim), out.dtype),
            "full": plgpu.Barrier(num_arrivals=2 * each, num_barriers=chunks),
        },
        grid=(min(queries, _MOST_CTAS), shape.config.workers),
        grid_names=("query", "worker"),
        compiler_params=COMPILER,
        interpret=interpret,
        kernel_name="decode_attention_merge",
    )(parts, work.cuts, result)
    return jax.freeze(result)


def _place(shape: Shape, query: jax.Array) -> jax.Array:
    """Returns where a head's column is among the queries of the batch, from its first one on."""
    if shape.width == 1:
        return query
    of_row, head = (f(query, jnp.int32(shape.heads)) for f in (lax.div, lax.rem))
    return of_row * shape.num_heads + head


def _merge_kernel(
    shape: Shape, part_ref: Any, cuts_ref: Any, out_ref: Any, parts_s: Any, weights_s: Any, out_s: Any, full: Any
) -> None:
    """Sums one query's partial results of one head, from left to right, as compute_item adds up splits. Then it sums
    those of its warps, where each has one."""
    worker, head_dim, sums_of = lax.axis_index("worker"), shape.head_dim, range(shape.sums)
    row, item, slot, count = (cuts_ref[i, worker] for i in range(4))
    fetches = lax.div(count + (FETCHED - 1), jnp.int32(FETCHED))
    queries = jnp.where(count > 0, shape.config.computing * shape.queries, 0)

    @pl.loop(lax.axis_index("query"), queries, step=lax.axis_size("query"))
    def _query(index: jax.Array) -> None:
        warpgroup, query = (f(index, jnp.int32(shape.queries)) for f in (lax.div, lax.rem))
        head = item * shape.config.computing + warpgroup

        @pl.loop(0, fetches)
        def _fetch(i: jax.Array) -> None:
            rows = pl.ds(i * FETCHED, FETCHED)
            for w in sums_of:
                source = part_ref.at[warpgroup * shape.sums + w, pl.ds(slot + i * FETCHED, FETCHED), pl.ds(query, 1)]
                plgpu.copy_gmem_to_smem(source.at[..., pl.ds(0, head_dim)], parts_s.at[w, rows], full.at[i])
                plgpu.copy_gmem_to_smem(source.at[..., pl.ds(head_dim, PAD)], weights_s.at[w, rows], full.at[i])

        def top_of(i: jax.Array, top: jax.Array) -> jax.Array:
            plgpu.barrier_wait(full.at[i])
            for j in range(FETCHED):
                for w in sums_of:
                    at = i * FETCHED + j
                    top = jnp.maximum(top, jnp.where(at < count, weights_s[w, at, 0, 0], MASKED))
            return top

        top = lax.fori_loop(jnp.int32(0), fetches, top_of, jnp.float32(MASKED))

        def add(i: jax.Array, sums: Any) -> Any:
            for j in range(FETCHED):
                at = i * FETCHED + j
                there, added = at < count, []
                for w, (total, acc) in zip(sums_of, sums):
                    factor = jnp.where(there, jnp.exp2(weights_s[w, at, 0, 0] - top), 0.0)
                    part = plgpu.load(parts_s.at[w, at, 0], layout=_ROW, optimized=False)
                    total = total + jnp.where(there, weights_s[w, at, 0, 1], 0.0) * factor
                    added.append((total, acc + jnp.where(there, part, 0.0) * factor))
                sums = tuple(added)
            return sums

        zeros = plgpu.layout_cast(jnp.zeros((head_dim,), jnp.float32), _ROW)
        sums = lax.fori_loop(jnp.int32(0), fetches, add, ((jnp.float32(0), zeros),) * shape.sums)
        total, acc = jax.tree.map(lambda *both: sum(both[1:], both[0]), *sums)
        result = acc * (1 / total)
        if shape.v.format.hadamard:
            result = turn(result, _ROW, head_dim, lanes=32)
        out_s[0] = result.astype(out_s.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_s, out_ref.at[pl.ds(first_query(shape, row, head) + _place(shape, query), 1)])
        plgpu.wait_smem_to_gmem(0)
