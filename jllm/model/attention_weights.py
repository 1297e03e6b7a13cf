"""Computes attention's weights for the tap of that name, since no kernel keeps them."""

from typing import Any

import jax
import jax.numpy as jnp

from jllm.errors import EvaluationError
from jllm.model.paged import Paged, chunk_of_row
from jllm.model.shapes import Array, Float, Int32, shaped
from pallas_kernels.formats.kv_pages import KVPages, gather
from pallas_kernels.formats.numerics import compute_dtype


@shaped
def packed_weights(
    q: Float[Array, "T H D"],
    k: Float[Array, "T K D"],
    segments: Int32[Array, " T"],
    *,
    scale: float,
    window: int | None,
    **logits: Any,
) -> Float[Array, "T H T"]:
    """Returns the weights of queries over the keys of their segments, in float32 at least."""
    row = jnp.arange(q.shape[0], dtype=jnp.int32)
    distance = row[:, None] - row[None, :]
    seen = _in_window(distance, window) & (segments[:, None] == segments[None, :])
    return _weights(q, k, seen, scale, **logits)


@shaped
def paged_weights(
    q: Float[Array, "T H D"], pages: KVPages, batch: Paged, *, scale: float, window: int | None, **logits: Any
) -> Float[Array, "T H MP"]:
    """Returns the weights of queries over the keys as they are stored, by cache index. Unused rows have arbitrary
    values. Raises EvaluationError for trees of drafts, and for KIVI, whose newest keys are not in the pages."""
    if pages.tail is not None:
        raise EvaluationError(
            f"attention weights cannot be tapped where K is stored as {pages.k.format.name}: take another KV format"
        )
    if batch.segments is not None and batch.segments.ancestors is not None:
        raise EvaluationError("attention weights cannot be tapped where drafts are a tree: draft a chain")
    C = q.shape[0] - batch.short_rows
    chunk = jnp.minimum(chunk_of_row(batch.chunk_cu[1:], C), max(batch.chunk_pages.shape[0] - 1, 0))
    table = jnp.concatenate([jnp.repeat(batch.decode_pages, batch.width, axis=0), batch.chunk_pages[chunk]])
    table = jnp.clip(table, 0, pages.k.num_pages - 1)

    def one(row: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        query, own, position = row
        keys = gather(pages.k, own[None], compute_dtype(q.dtype))[0].swapaxes(0, 1)  # [M P, K, D]
        seen = _in_window(position - jnp.arange(keys.shape[0], dtype=jnp.int32), window)
        return _weights(query[None], jnp.where(seen[:, None, None], keys, 0), seen[None], scale, **logits)[0]

    return jax.lax.map(one, (q, table, batch.positions))


def _in_window(distance: jax.Array, window: int | None) -> jax.Array:
    return (distance >= 0) & (distance < (jnp.iinfo(jnp.int32).max if window is None else window))


def _weights(
    q: jax.Array,
    k: jax.Array,
    seen: jax.Array,
    scale: float,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Returns weights [T, H, J] of queries [T, H, D] over keys [J, K, D]. `seen` bool[T, J] masks the keys of each
    query. Softcap and sinks are as in decode_attention."""
    dtype = compute_dtype(q.dtype)
    tiles = q.astype(dtype).reshape(q.shape[0], k.shape[1], -1, q.shape[2])
    logits = scale * jnp.einsum("tkgd,jkd->tkgj", tiles, k.astype(dtype), precision="highest")
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    logits = jnp.where(seen[:, None, None, :], logits, -jnp.inf)
    if sinks is not None:
        own = jnp.broadcast_to(sinks.astype(dtype).reshape(1, k.shape[1], -1, 1), (*logits.shape[:-1], 1))
        logits = jnp.concatenate([logits, own], axis=-1)
    weights = jax.nn.softmax(logits, axis=-1)[..., : k.shape[0]]
    return weights.reshape(q.shape[0], q.shape[1], -1)
