"""Describes the rows of a step as the model reads them: sequences with page tables, or whole ones without a cache."""

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np

from jllm.model.shapes import Array, Int32, shaped
from pallas_kernels.formats.kv_formats import KVFormat
from pallas_kernels.formats.kv_pages import RowMap
from pallas_kernels.formats.segments import Segments, depths

NOWHERE = np.iinfo(np.int32).max  # a slot out of range: gathers clip, scatters drop
PAGE_SIZE = 16  # tokens of a KV page, by default


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Packed:
    """Holds whole sequences without a cache. vmap may run over a batch of rows. With `stored`, attention sees K and V
    as a cache of these formats would store them, and passes gradients straight through that rounding."""

    tokens: jax.Array  # i32[T]
    positions: jax.Array  # i32[T], from 0 in each segment
    segments: jax.Array  # i32[T], equal for tokens that may see each other
    stored: tuple[KVFormat, KVFormat] | None = field(default=None, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ShortSegments:
    """Holds Q rows for each of R sequences that have tokens in their pages. The first `used` rows of a segment
    count."""

    tokens: jax.Array  # i32[R, Q]
    start: jax.Array  # i32[R], committed tokens, so the first row's cache index
    used: jax.Array  # i32[R], 0 .. Q
    pages: jax.Array  # i32[R, M]
    ancestors: jax.Array | None = None  # u32[R, Q, ceil(Q / 32)], as Segments has it; None: a chain


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Chunks:
    """Holds B chunks of prompts, head to tail on C rows."""

    tokens: jax.Array  # i32[C]
    start: jax.Array  # i32[B], cache index of each chunk's first token
    lengths: jax.Array  # i32[B]
    pages: jax.Array  # i32[B, M]


def no_segments(max_pages: int) -> ShortSegments:
    """Returns zero segments, for chunks whose page tables have M entries."""
    return ShortSegments(*(np.zeros(shape, np.int32) for shape in ((0, 1), 0, 0, (0, max_pages))))  # type: ignore[arg-type]


def no_chunks(max_pages: int) -> Chunks:
    """Returns zero chunks, for segments whose page tables have M entries. Makes the arrays while it is traced.
    Constants would become empty arguments of a mesh's devices, on which XLA crashes (JAX 0.11.2)."""
    return Chunks(*(jnp.zeros(shape, jnp.int32) for shape in (0, 0, 0, (0, max_pages))))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Paged:
    """Holds one step's rows over a paged cache: R short segments of Q rows, then B prompt chunks on C rows."""

    tokens: jax.Array  # i32[T]
    positions: jax.Array  # i32[T], rotary
    page: jax.Array  # i32[T], the page of the token's K and V; >= N writes nothing
    offset: jax.Array  # i32[T], within the page
    decode_pages: jax.Array  # i32[R, M]
    decode_lengths: jax.Array  # i32[R], keys in the pages, the segment's own included; 0: an unused segment
    chunk_pages: jax.Array  # i32[B, M]
    chunk_cu: jax.Array  # i32[B + 1], chunk b's rows are R Q + chunk_cu[b] .. R Q + chunk_cu[b + 1]
    chunk_lengths: jax.Array  # i32[B], keys visible to the chunk's last row
    segments: Segments | None = None  # the used rows of each segment and their masks, if Q > 1
    width: int = field(default=1, metadata={"static": True})  # Q
    row_map: RowMap | None = None  # of the T rows, if the cache has tails
    adapter: jax.Array | None = None  # i32[T], the adapter of each row, if the params have adapters; -1: none

    @property
    def short_rows(self) -> int:
        """Returns R Q, the number of rows before the chunks."""
        return self.decode_lengths.shape[0] * self.width

    @property
    def runs(self) -> int:
        """Bounds the runs of neighbouring rows that have one sequence, or none."""
        return self.decode_lengths.shape[0] + self.chunk_cu.shape[0]


def paged_batch(
    short: ShortSegments,
    chunks: Chunks,
    *,
    num_pages: int,
    page_size: int,
    slots: tuple[Int32[Array, " R"], Int32[Array, " B"]] | None = None,
) -> Paged:
    """Returns the place of each row in its sequence and in the page pool of N pages of P tokens. `slots` are those of
    the segments and of the chunks, for a cache with tails. Drafts are chains there."""
    (R, Q), C = short.tokens.shape, chunks.tokens.shape[0]
    row = jnp.arange(Q, dtype=jnp.int32)[None, :]
    in_use = row < short.used[:, None]
    index = jnp.where(in_use, short.start[:, None] + row, 0)
    depth = row if short.ancestors is None else depths(short.ancestors)
    position = jnp.where(in_use, short.start[:, None] + depth, 0).reshape(-1)
    cu = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(chunks.lengths, dtype=jnp.int32)])
    chunk = chunk_of_row(cu[1:], C)
    in_chunk = chunk < chunks.lengths.shape[0]
    chunk_index = jnp.where(in_chunk, jnp.arange(C, dtype=jnp.int32) - _at(cu, chunk) + _at(chunks.start, chunk), 0)

    short_page = _page(short.pages, jnp.repeat(jnp.arange(R, dtype=jnp.int32), Q), index.reshape(-1), page_size)
    chunk_page = _page(chunks.pages, chunk, chunk_index, page_size)
    writes = jnp.concatenate([in_use.reshape(-1), in_chunk])
    row_map = None
    if slots is not None:
        assert short.ancestors is None, "a cache with tails takes no trees of drafts"

        def each(of_short: jax.Array, of_chunk: jax.Array) -> jax.Array:
            return jnp.concatenate([jnp.repeat(of_short, Q), _at(of_chunk, chunk) if C else of_chunk[:0]])

        slot = jnp.where(writes, each(*slots), NOWHERE)
        stop = each(short.start + short.used, chunks.start + chunks.lengths)
        index = jnp.concatenate([index.reshape(-1), chunk_index])
        row_map = RowMap(slot, index, each(short.start, chunks.start), stop, R + chunks.lengths.shape[0])
        index = index[: R * Q].reshape(R, Q)
    return Paged(
        tokens=jnp.concatenate([short.tokens.reshape(-1), chunks.tokens]),
        positions=jnp.concatenate([position, chunk_index]),
        page=jnp.where(writes, jnp.concatenate([short_page, chunk_page]), num_pages),
        offset=jnp.concatenate([index.reshape(-1), chunk_index]) % page_size,
        decode_pages=short.pages,
        decode_lengths=jnp.where(short.used > 0, short.start + short.used, 0),
        chunk_pages=chunks.pages,
        chunk_cu=cu,
        chunk_lengths=jnp.where(chunks.lengths > 0, chunks.start + chunks.lengths, 0),
        segments=None if Q == 1 else Segments(short.used, short.ancestors),
        width=Q,
        row_map=row_map,
    )


def as_chunks(batch: Paged) -> Paged:
    """Returns the batch with its short segments as chunks. One kernel then attends all rows, in one order. A segment's
    unused rows are a chunk without keys. Trees of drafts stay short segments."""
    R, Q, segments = batch.decode_lengths.shape[0], batch.width, batch.segments
    if not R or (segments is not None and segments.ancestors is not None):
        return batch
    begin, lengths, pages = Q * jnp.arange(R, dtype=jnp.int32), batch.decode_lengths, batch.decode_pages
    if segments is not None:
        begin = jnp.stack([begin, begin + segments.rows], axis=1).reshape(-1)
        lengths = jnp.stack([lengths, jnp.zeros_like(lengths)], axis=1).reshape(-1)
        pages = jnp.repeat(pages, 2, axis=0)
    return replace(
        batch,
        decode_pages=batch.decode_pages[:0],
        decode_lengths=batch.decode_lengths[:0],
        chunk_pages=jnp.concatenate([pages, batch.chunk_pages]),
        chunk_cu=jnp.concatenate([begin, R * Q + batch.chunk_cu]),
        chunk_lengths=jnp.concatenate([lengths, batch.chunk_lengths]),
        segments=None,
        width=1,
    )


@shaped
def chunk_of_row(ends: Int32[Array, " B"], rows: int) -> Int32[Array, " {rows}"]:
    """Returns the index of each row's chunk, for chunks that end before the rows `ends`. It is B for unused rows at the
    end."""
    # Without bisection, which would be a loop of small kernels at the start of the step.
    return jnp.searchsorted(ends, jnp.arange(rows, dtype=jnp.int32), side="right", method="compare_all").astype(
        jnp.int32
    )


@shaped
def _page(
    table: Int32[Array, "sequences M"], sequence: Int32[Array, " rows"], index: Int32[Array, " rows"], page_size: int
) -> Int32[Array, " rows"]:
    """Returns the page of each cache index of a sequence, by the page tables."""
    if not index.shape[0]:
        return index
    last = table.shape[1] - 1
    return table.at[sequence, jnp.clip(index // page_size, 0, last)].get(mode="clip")


def _at(array: jax.Array, index: jax.Array) -> jax.Array:
    return jnp.take(array, index, mode="clip")
