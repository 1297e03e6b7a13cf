"""Keeps the newest tokens of a step as they were computed, where K is stored per channel (kv_formats.Kivi).

Groups of tokens go to the pages once they are whole. A step's rows are at hand, and what came before them lies in the
tail's rings. A prompt's chunk may be longer than a ring. So the rows' K and V are kept beside the rings until attention
has read both, and go there at its end.

A group is stored whenever its last token is written, and read as stored only by queries of a later block. A draft among
its tokens may be rejected. Then the group is stored again before it is read, with what took the draft's place.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp

from pallas_kernels.formats.kv_formats import Kivi, KVFormat, encode
from pallas_kernels.formats.kv_pages import KVPages, Pages, RowMap, Tail, store, write
from pallas_kernels.one_order import Run, plainly


def allocate_tail(slots: int, num_kv_heads: int, head_dim: int, tokens: int, fmt: KVFormat, layers: int = 1) -> Tail:
    """Returns rings of `tokens` tokens for each of S slots of L layers, of a float format, all zero."""

    def ring() -> Pages:
        return Pages(jnp.zeros((layers * slots, num_kv_heads, tokens, head_dim), fmt.storage_dtype), None, fmt, layers)

    return Tail(ring(), ring())


def update(
    pages: KVPages, k: jax.Array, v: jax.Array, page: jax.Array, offset: jax.Array, apart: Run = plainly
) -> KVPages:
    """Takes in a step's k and v [T, K, D], of which row t belongs at slot `offset[t]` of page `page[t]` (i32[T]).
    Groups that they complete are stored there, and the rows are beside the tail. `apart` runs what is each group's own.
    Raises ValueError without a tail and the map of the step's rows."""
    fmt, tail = pages.k.format, pages.tail
    if tail is None or tail.row_map is None:
        raise ValueError(f"K stored as {fmt.name} needs a tail for the newest tokens, and a map of the step's rows")
    assert isinstance(fmt, Kivi)
    assert fmt.group is not None
    T, group, dtype, row_map = k.shape[0], fmt.group, tail.k.values.dtype, tail.row_map
    tail = replace(tail, rows=(k.astype(dtype), v.astype(dtype)))
    written = (page >= 0) & (page < pages.k.num_pages)
    most = min(T, T // group + row_map.sequences)
    (last,) = jnp.nonzero(written & (row_map.index % group == group - 1), size=most, fill_value=T)
    last = last.astype(jnp.int32)  # in 64-bit mode it is not
    token = jnp.arange(group, dtype=jnp.int32)[None, :]
    index = row_map.index.at[last].get(mode="clip")[:, None] - (group - 1) + token
    to = page.at[last].get(mode="fill", fill_value=pages.k.num_pages)
    to = jnp.broadcast_to(to[:, None], index.shape).reshape(-1)
    at = (offset.at[last].get(mode="clip")[:, None] - (group - 1) + token).reshape(-1)

    def put(part: Pages, x: jax.Array) -> Pages:  # x [n, K, g, D]
        values, scales = apart(lambda x: encode(x, part.format), x)
        return store(part, _flat(values), None if scales is None else _flat(scales), to, at)

    whole_k, whole_v = newest(tail, last, index)
    return KVPages(put(pages.k, whole_k), put(pages.v, whole_v), tail=tail)


def _flat(x: jax.Array) -> jax.Array:
    """Reshapes [n, K, g, ...] to rows [n g, K, ...]."""
    return x.swapaxes(1, 2).reshape(-1, x.shape[1], x.shape[3])


def newest(tail: Tail, row: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns K and V, as they were computed, of cache indices i32[n, t] of the sequences of rows i32[n]: [n, K, t, D]
    each. Tokens before a sequence's block come out as anything."""
    row_map, rows = tail.row_map, tail.rows
    assert row_map is not None
    assert rows is not None
    slot, start, own = (x.at[row].get(mode="clip")[:, None] for x in (row_map.slot, row_map.start, row_map.index))
    at_hand = (index >= start)[:, None, :, None]
    at = row[:, None] + index - own

    def find(ring: Pages, new: jax.Array) -> jax.Array:
        heads = jnp.arange(new.shape[1], dtype=jnp.int32)[None, :, None]
        row = ring.rows_read(slot)[..., None]
        older = ring.values.at[row, heads, (index % ring.page_size)[:, None, :]].get(mode="clip")
        return jnp.where(at_hand, new.at[at[:, None, :], heads].get(mode="clip"), older)

    return find(tail.k, rows[0]), find(tail.v, rows[1])


def settle(pages: KVPages) -> KVPages:
    """Moves the last of a step's rows into the rings at the end of a layer. Pages without a tail stay as they are."""
    tail = pages.tail
    if tail is None:
        return pages
    row_map, rows = tail.row_map, tail.rows
    assert row_map is not None
    assert rows is not None
    kept = row_map.index >= row_map.stop - tail.k.page_size
    to = jnp.where(kept & (row_map.slot >= 0), row_map.slot, tail.k.num_pages)
    at = row_map.index % tail.k.page_size
    return replace(pages, tail=Tail(write(tail.k, rows[0], to, at), write(tail.v, rows[1], to, at)))


def with_row_map(pages: KVPages, row_map: RowMap | None) -> KVPages:
    """Adds the map of the step's rows at the beginning of a layer, where there is a tail."""
    return pages if pages.tail is None else replace(pages, tail=replace(pages.tail, row_map=row_map))


def is_new(fmt: KVFormat, index: jax.Array, positions: jax.Array) -> jax.Array:
    """Returns whether queries at some positions read the keys at some indices as they were computed, not as stored."""
    assert isinstance(fmt, Kivi)
    return index >= positions - positions % fmt.residual
