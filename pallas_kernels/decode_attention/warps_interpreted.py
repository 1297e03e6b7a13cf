"""What warps_sm90 does, for Pallas's interpreter, which runs no inlined code: the same calls, sums of warps one after
the other [4 * D, columns]."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.decode_attention.storage_sm90 import Storage
from pallas_kernels.decode_attention.warps_sm90 import Queries


def no_queries(stored: Storage, columns: int, dtype: DTypeLike) -> Queries:
    zeros = jnp.zeros((columns, stored.head_dim), jnp.float16)
    return zeros, None if dtype == jnp.float16 else jnp.zeros((32, columns), jnp.float32)


def load_queries(stored: Storage, queries: Any) -> Queries:
    x = queries[...]
    if x.dtype == jnp.float16:
        return x, None
    bits = lax.bitcast_convert_type(jnp.abs(x).max(axis=1), jnp.uint16).astype(jnp.int32)
    factors = lax.bitcast_convert_type(jnp.clip(bits >> 7, 1, 253) << 23, jnp.float32)
    exact = x.astype(jnp.float32) / factors[:, None]
    return exact.astype(jnp.float16), jnp.broadcast_to(factors, (32, x.shape[0]))


def load_k(stored: Storage, values: Any, scales: Any) -> jax.Array:
    return stored.read(values, scales, None, jnp.int32(0))


load_v = load_k


def dot_k(stored: Storage, k: jax.Array, zero: jax.Array, queries: jax.Array) -> jax.Array:
    return plgpu.layout_cast(jnp.dot(k.astype(jnp.float32), queries.astype(jnp.float32).T), plgpu.Layout.WGMMA)


def convert_v(stored: Storage, v: jax.Array, zero: jax.Array, bounds: tuple[jax.Array, jax.Array]) -> jax.Array:
    token = jnp.arange(64, dtype=jnp.int32)[:, None]
    seen = jnp.logical_and(token >= bounds[0], token < bounds[1])
    return jnp.where(seen, v.astype(jnp.float32), 0.0)


def weighted(stored: Storage, v: jax.Array, bounds: tuple[jax.Array, jax.Array], weights: jax.Array) -> jax.Array:
    return weights  # `load_v` has multiplied by all scales


def dot_v(v: jax.Array, weights: jax.Array, acc: jax.Array, factor: jax.Array) -> jax.Array:
    of_warps = jnp.einsum("wtd,wtc->wdc", v.reshape(4, 16, -1), weights.astype(jnp.float32).reshape(4, 16, -1))
    return acc * spread(factor, acc.shape[0] // 64) + of_warps.reshape(acc.shape)


def reduce_warp(x: jax.Array, op: str) -> jax.Array:
    of_warps = x.reshape(4, 16, -1)
    return jnp.repeat(of_warps.sum(axis=1) if op == "add" else of_warps.max(axis=1), 8, axis=0)


def spread(x: jax.Array, blocks: int) -> jax.Array:
    return jnp.repeat(x[::8], 16 * blocks, axis=0)


def store_sums(stored: Storage, acc: jax.Array, top: jax.Array, total: jax.Array, queries: int, target: Any) -> None:
    head_dim = stored.head_dim
    for warp in range(4):
        for dim in range(head_dim):
            target[warp, :, dim] = acc[warp * head_dim + dim]
        target[warp, :, head_dim], target[warp, :, head_dim + 1] = top[8 * warp], total[8 * warp]


def store_rows(x: jax.Array, target: Any, first: jax.Array, queries: int) -> None:
    target[pl.ds(first, queries)] = x[:queries]


def wait_for_warps() -> None:
    pass
