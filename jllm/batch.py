"""What one step computes: ragged rows on one flat axis, as the host says them and as the model reads them.

A step's T tokens lie head to tail. First come R short segments of Q rows each, whose tokens are on the device already
(a decoding sequence has one row), then B prompt chunks on C rows: T = R Q + C. Each row has three numbers, which are
equal in plain decoding: its rotary position, its token index (how many tokens of its sequence come before it: the key
of a draw, limits) and its cache index (its place in the sequence's pages). Nodes of a tree of drafts share token
indices, but no place."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jllm.sampling import Sampling, neutral_sampling, write_row
from jllm.shapes import Array, Int32, shaped
from pallas_kernels.kv_pages import RowMap
from pallas_kernels.segments import Segments, depths

NOWHERE = np.iinfo(np.int32).max  # a slot out of range: gathers clip, scatters drop


# What the host says


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RaggedBatch:
    """One step. Of each field only the first entries are valid; the rest is padding, as empty_batch has it.

    A chunk carries its slot's whole set of sampling parameters, so that admission is nothing but a first chunk. Arrays
    are numpy's on the host and JAX's on the device, i32 but for those of `sampling`.

    Here slot 0 decodes, and page 3 becomes the second of its pages. A prompt of three tokens begins in slot 1, on page
    4. Slot 2 gets the next two tokens of a prompt, of which 16 are in its pages and more are to come:

    >>> first, second = PromptChunk(1, [5, 6, 7], pages=[4]), PromptChunk(2, [8, 9], start=16, final=False)
    >>> batch = ragged_batch([first, second], decodes=[0], deltas=[(0, 1, 3)])
    >>> batch.decode_slot.tolist(), batch.deltas.tolist()
    ([0], [[0, 1, 3], [1, 0, 4]])
    >>> batch.tokens.tolist(), batch.chunk_slot.tolist(), batch.chunk_start.tolist(), batch.chunk_len.tolist()
    ([5, 6, 7, 8, 9], [1, 2], [0, 16], [3, 2])
    >>> batch.chunk_final.tolist()  # tokens are drawn for slots 0 and 1, not for 2
    [1, 0]
    """

    decode_slot: Any  # [R] slots that decode
    decode_rows: Any  # [R] rows that each may have, 1 .. Q: its newest token, and drafts of the next ones
    decode_room: Any  # [R] tokens that the slot's pages have room for, for a drafter's K and V
    tokens: Any  # [C] prompt tokens of all chunks, head to tail
    targets: Any  # [C] the prompt token that follows each, or -1: for prompt logprobs
    deltas: Any  # [L, 3] page table changes: slot, index, page
    chunk_slot: Any  # [B]
    chunk_start: Any  # [B] cache index of the chunk's first token
    chunk_len: Any  # [B] tokens in the chunk
    chunk_final: Any  # [B] 1: the sequence's last known token is in it, so a token is sampled
    chunk_room: Any  # [B] as decode_room
    prompt_len: Any  # [B] tokens of the original prompt (later ones were generated)
    sampling: Sampling  # a row a chunk
    width: int = field(default=1, metadata={"static": True})  # Q: rows of a short segment


@dataclass(frozen=True)
class PromptChunk:
    """Tokens of one sequence that a step computes at start, start + 1, ..."""

    slot: int
    tokens: Sequence[int]
    start: int = 0  # tokens of the sequence that are in the pages already
    final: bool = True  # the last known token is among them, so that the next one is sampled
    pages: Sequence[int] = ()  # the slot's page table from its first entry on, where this step is to set it
    prompt_len: int | None = None  # tokens of the prompt, where some of these were generated
    targets: Sequence[int] = ()  # the tokens that follow each, where their log-probabilities are wanted
    room: int = NOWHERE  # tokens that the slot's pages have room for
    sampling: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))  # by names of Sampling's fields


def empty_batch(decodes: int, tokens: int, chunks: int, *, deltas: int, bias: int = 0, width: int = 1) -> RaggedBatch:
    """A batch of nothing but padding, in numpy, with room for R decodes of Q rows (`width`), C tokens in B chunks, and
    L page table changes. bias: X, logit bias entries a sequence; 0 leaves out penalties."""

    def ints(value: int, *shape: int) -> np.ndarray:
        return np.full(shape, value, np.int32)

    return RaggedBatch(
        decode_slot=ints(NOWHERE, decodes),
        decode_rows=ints(1, decodes),
        decode_room=ints(NOWHERE, decodes),
        tokens=ints(0, tokens),
        targets=ints(-1, tokens),
        deltas=ints(NOWHERE, deltas, 3),
        chunk_slot=ints(NOWHERE, chunks),
        chunk_start=ints(0, chunks),
        chunk_len=ints(0, chunks),
        chunk_final=ints(0, chunks),
        chunk_room=ints(NOWHERE, chunks),
        prompt_len=ints(0, chunks),
        sampling=neutral_sampling(chunks, bias),
        width=width,
    )


def fill_batch(
    batch: RaggedBatch,
    chunks: Sequence[PromptChunk] = (),
    decodes: Sequence[int] = (),
    deltas: Sequence[tuple[int, int, int]] = (),
) -> None:
    """Writes a step into an empty batch that has room for it."""
    deltas = [*deltas, *((chunk.slot, i, page) for chunk in chunks for i, page in enumerate(chunk.pages))]
    batch.decode_slot[: len(decodes)] = decodes
    if deltas:
        batch.deltas[: len(deltas)] = deltas
    at = 0
    for b, chunk in enumerate(chunks):
        n = len(chunk.tokens)
        batch.tokens[at : at + n] = chunk.tokens
        batch.targets[at : at + len(chunk.targets)] = chunk.targets
        batch.chunk_slot[b], batch.chunk_start[b], batch.chunk_len[b] = chunk.slot, chunk.start, n
        batch.chunk_final[b], batch.chunk_room[b] = chunk.final, chunk.room
        batch.prompt_len[b] = chunk.start + n if chunk.prompt_len is None else chunk.prompt_len
        write_row(batch.sampling, b, chunk.sampling)
        at += n


def ragged_batch(
    chunks: Sequence[PromptChunk] = (),
    decodes: Sequence[int] = (),
    deltas: Sequence[tuple[int, int, int]] = (),
    rows: int = 1,
) -> RaggedBatch:
    """A step written by hand, no larger than it needs to be: prompt chunks, slots that decode, and page table changes
    (slot, index, page) besides those of the chunks. Each decode has Q = `rows` rows: its newest token, and what was
    drafted for the next ones. Sequences end only where `sampling` says so."""
    tokens, changes = sum(len(chunk.tokens) for chunk in chunks), sum(len(chunk.pages) for chunk in chunks)
    bias = max((len(chunk.sampling.get("bias_ids", ())) for chunk in chunks), default=0)
    penalized = any(name.endswith("_penalty") for chunk in chunks for name in chunk.sampling)
    sizes = {"deltas": len(deltas) + changes, "bias": max(bias, int(penalized)), "width": rows}
    batch = empty_batch(len(decodes), tokens, len(chunks), **sizes)
    batch.sampling.max_length[:], batch.decode_rows[:] = NOWHERE, rows
    fill_batch(batch, chunks, decodes, deltas)
    return batch


# What the model reads


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Packed:
    """Whole sequences without a cache. Under vmap for a batch of rows."""

    tokens: jax.Array  # i32[T]
    positions: jax.Array  # i32[T], from 0 in each segment
    segments: jax.Array  # i32[T], equal for tokens that may see each other


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ShortSegments:
    """Rows of R sequences that already have tokens in their pages: Q each, of which the first `used` count."""

    tokens: jax.Array  # i32[R, Q]
    start: jax.Array  # i32[R], committed tokens: the first row's cache index
    used: jax.Array  # i32[R], 0 .. Q
    pages: jax.Array  # i32[R, M]
    ancestors: jax.Array | None = None  # u32[R, Q, ceil(Q / 32)], as Segments has it; None: a chain


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Chunks:
    """B chunks of prompts, head to tail on C rows."""

    tokens: jax.Array  # i32[C]
    start: jax.Array  # i32[B], cache index of each chunk's first token
    lengths: jax.Array  # i32[B]
    pages: jax.Array  # i32[B, M]


def no_segments(max_pages: int) -> ShortSegments:
    """No segment, beside chunks whose page tables have M entries."""
    return ShortSegments(*(np.zeros(shape, np.int32) for shape in ((0, 1), 0, 0, (0, max_pages))))  # type: ignore[arg-type]


def no_chunks(max_pages: int) -> Chunks:
    """No chunk, beside segments whose page tables have M entries. Made where it is traced, since XLA crashes on empty
    arguments of a mesh's devices (JAX 0.11.2), which constants become."""
    return Chunks(*(jnp.zeros(shape, jnp.int32) for shape in (0, 0, 0, (0, max_pages))))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Paged:
    """One step's rows over a paged cache: R short segments of Q rows, then B prompt chunks on C rows."""

    tokens: jax.Array  # i32[T]
    positions: jax.Array  # i32[T], rotary
    page: jax.Array  # i32[T], where the token's K and V go; >= N writes nothing
    offset: jax.Array  # i32[T], within the page
    decode_pages: jax.Array  # i32[R, M]
    decode_lengths: jax.Array  # i32[R], keys in the pages with the segment's own; 0: an unused segment
    chunk_pages: jax.Array  # i32[B, M]
    chunk_cu: jax.Array  # i32[B + 1], chunk b's rows are R Q + chunk_cu[b] .. R Q + chunk_cu[b + 1]
    chunk_lengths: jax.Array  # i32[B], keys visible to the chunk's last row
    segments: Segments | None = None  # which rows of each are in use, and what they see, where Q > 1
    width: int = field(default=1, metadata={"static": True})  # Q
    row_map: RowMap | None = None  # of the T rows, where the cache has tails

    @property
    def short_rows(self) -> int:
        """R Q, the rows before those of chunks."""
        return self.decode_lengths.shape[0] * self.width


def paged_batch(
    short: ShortSegments,
    chunks: Chunks,
    *,
    num_pages: int,
    page_size: int,
    slots: tuple[Int32[Array, " R"], Int32[Array, " B"]] | None = None,
) -> Paged:
    """Returns where each row of a step stands in its sequence and in the page pool of N pages of P tokens. `slots` are
    those of the segments and of the chunks, for a cache with tails; drafts are chains there."""
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


@shaped
def chunk_of_row(ends: Int32[Array, " B"], rows: int) -> Int32[Array, " {rows}"]:
    """Returns which chunk each row is in, of chunks that end before the rows `ends`; B for the unused tail."""
    # Not by halves, which would be a loop of small kernels before anything else.
    return jnp.searchsorted(ends, jnp.arange(rows, dtype=jnp.int32), side="right", method="compare_all").astype(
        jnp.int32
    )


@shaped
def _page(
    table: Int32[Array, "sequences M"], sequence: Int32[Array, " rows"], index: Int32[Array, " rows"], page_size: int
) -> Int32[Array, " rows"]:
    """Returns the pages of cache indices of sequences, by their page table."""
    if not index.shape[0]:
        return index
    last = table.shape[1] - 1
    return table.at[sequence, jnp.clip(index // page_size, 0, last)].get(mode="clip")


def _at(array: jax.Array, index: jax.Array) -> jax.Array:
    return jnp.take(array, index, mode="clip")


# Compiled sizes


@dataclass(frozen=True, order=True)
class Bucket:
    """One compiled size: R decodes of Q rows each, C prompt tokens in at most B chunks."""

    decodes: int
    tokens: int
    chunks: int
    rows: int = 1  # Q

    @property
    def size(self) -> int:
        return self.decodes * self.rows + self.tokens


FINE = (2, 7, 18, 28, 40, 50, 64, 80, 96, 114, 128)  # of 128 parts of the slots: see make_buckets
FEW_SLOTS = 64  # so few rows cost a GPU no more than one: reading the weights takes longer


def make_buckets(max_slots: int, max_step_tokens: int) -> tuple[Bucket, ...]:
    """At most 17 buckets, so that what they round up is little where it costs.

    Many slots: eleven numbers of decode rows without prompt tokens, since a full batch runs out row by row, spaced for
    the least waste on conversations (experiments.qps) by a scheduler that lets a few rows too many sit out; with prompt
    tokens six, since the scheduler fills those: a quarter and all of what fits a step in which every slot decodes,
    there, all of it while a batch begins, and a quarter where few decode or where pages are too few for all slots.
    Few slots: four numbers of decode rows (all slots, fewer by factors of 2 and 4, and one) times three of tokens.
    """
    most = max(1, max_step_tokens - max_slots)
    quarter = -(-most // 4)
    if max_slots > FEW_SLOTS:
        sizes = {(-(-max_slots * part // 128), 0) for part in FINE}
        sizes |= {(-(-max_slots * eighths // 8), most) for eighths in (2, 5, 8)}
        sizes |= {(-(-max_slots * sixteenths // 16), quarter) for sixteenths in (1, 10, 16)}
    else:
        sizes = {(max(1, -(-max_slots // n)), c) for n in (1, 2, 4, 16, max_slots) for c in (0, quarter, most)}
    return tuple(Bucket(r, c, min(max_slots, c)) for r, c in sorted(sizes))


def choose_bucket(buckets: Sequence[Bucket], decodes: int, tokens: int, chunks: int, rows: int = 1) -> Bucket:
    """The smallest bucket that holds a step."""
    fits = [r for r in buckets if r.decodes >= decodes and r.tokens >= tokens and r.chunks >= chunks and r.rows >= rows]
    return min(fits, key=lambda r: (r.size, r))


if __name__ == "__main__":  # `python -m jllm.batch` is the command of that name, which is elsewhere
    import runpy

    runpy.run_module("jllm.serve.batch", run_name="__main__")
