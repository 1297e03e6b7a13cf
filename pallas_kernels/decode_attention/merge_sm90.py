"""The kernel of decode_attention that merges the partial results of rows of several splits."""

import functools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode_attention.shape_sm90 import BLOCK, COMPILER, MASKED, MERGED, Shape
from pallas_kernels.decode_attention.work import Work, row_splits

_BY_HEAD = plgpu.Layout.TILED(plgpu.Tiling(((BLOCK, 64), (2,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


def merge_splits(
    shape: Shape,
    out: jax.Array,
    parts: jax.Array,
    lengths: jax.Array,
    work: Work,
    interpret: plgpu.InterpretGPUParams | None,
) -> jax.Array:
    """Fills in the rows of several splits, from their partial results."""
    result = jax.new_ref(out)
    blocks = -(-shape.num_heads // BLOCK)
    plgpu.kernel(
        partial(_merge_kernel, shape, work.window),
        scratch_types={"out_s": plgpu.SMEM((BLOCK, shape.head_dim), out.dtype)},
        grid=(min(shape.config.merge_per_sm * shape.config.sms, shape.rows * blocks),),
        grid_names=("worker",),
        compiler_params=COMPILER,
        interpret=interpret,
    )(parts, lengths, work.merges, work.num_merges, work.slots, result)
    return jax.freeze(result)


def _merge_kernel(
    shape: Shape,
    window: int | None,
    part_ref: Any,
    lengths_ref: Any,
    merges_ref: Any,
    num_merges_ref: Any,
    slots_ref: Any,
    out_ref: Any,
    out_s: Any,
) -> None:
    head_dim, num_heads, workers = shape.head_dim, shape.num_heads, lax.axis_size("worker")
    blocks = -(-num_heads // BLOCK)

    def spread(x: jax.Array) -> jax.Array:
        return plgpu.layout_cast(lax.broadcast_in_dim(x, (BLOCK, head_dim), [0]), _BY_HEAD)

    def merge(i: jax.Array) -> None:
        row, block = merges_ref[i // blocks], lax.rem(i, jnp.int32(blocks))
        _, _, splits = row_splits(lengths_ref[row], window, shape.config.split)
        head = jnp.minimum(block * BLOCK, max(num_heads - BLOCK, 0))  # the last block may overlap
        slot = slots_ref[row]

        def some(b: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            top, total, acc = carry
            values, weights = [], []
            for index in range(MERGED):  # their loads don't wait for each other
                source = part_ref.at[slot + b * MERGED + index, pl.ds(head, BLOCK)]
                value = plgpu.load(source.at[:, pl.ds(0, head_dim)], layout=_BY_HEAD, optimized=False)
                weight = plgpu.load(source.at[:, head_dim], layout=_BY_HEAD.reduce(1), optimized=False)
                there = b * MERGED + index < splits
                values.append(jnp.where(there, value, 0.0))
                weights.append(jnp.where(there, weight, MASKED))
            new_top = functools.reduce(jnp.maximum, weights, top)
            shrink = jnp.exp2(top - new_top)
            total, acc = total * shrink, acc * spread(shrink)
            for value, weight in zip(values, weights):
                share = jnp.exp2(weight - new_top)
                total, acc = total + share, acc + value * spread(share)
            return new_top, total, acc

        zeros = plgpu.layout_cast(jnp.zeros((BLOCK, head_dim), jnp.float32), _BY_HEAD)
        top, total = (
            plgpu.layout_cast(jnp.full((BLOCK,), value, jnp.float32), _BY_HEAD.reduce(1)) for value in (MASKED, 0.0)
        )
        steps = (splits + (MERGED - 1)) // MERGED
        _, total, acc = lax.fori_loop(jnp.int32(0), steps, some, (top, total, zeros))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        out_s[...] = (acc / spread(total)).astype(out_s.dtype)
        plgpu.commit_smem()
        heads = min(BLOCK, num_heads)
        plgpu.copy_smem_to_gmem(out_s.at[pl.ds(0, heads)], out_ref.at[pl.ds(row * num_heads + head, heads)])

    @pl.loop(lax.axis_index("worker"), num_merges_ref[0] * blocks, step=workers)
    def _merge_rows(i: jax.Array) -> None:
        merge(i)

    plgpu.wait_smem_to_gmem(0)
