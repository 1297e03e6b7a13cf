"""Describes one step's computation: ragged rows on one flat axis, as the host writes them.

A step's T tokens lie head to tail. First come R short segments of Q rows each, whose tokens are on the device already.
A decoding sequence has one row. Then come B prompt chunks on C rows: T = R Q + C.

Each row has three numbers, which are equal in plain decoding: its rotary position, its token index and its cache index.
The token index is the number of tokens before it in its sequence; draws and limits use it. The cache index is its place
in the sequence's pages. Nodes of a draft tree may share a token index, but have different places.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from jllm.model.paged import NOWHERE
from jllm.model.sampling import Sampling, neutral_sampling, write_row
from jllm.model.shapes import AnyArray


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RaggedBatch:
    """Holds one step. Only the first entries of each field are valid; the rest is padding, as in empty_batch.

    A chunk carries all sampling parameters of its slot, so admission is simply a first chunk. Arrays are numpy's on the
    host and JAX's on the device. They are i32, except those of `sampling`.

    Here slot 0 decodes, and page 3 becomes the second of its pages. A prompt of three tokens begins in slot 1, on page
    4. Slot 2 has 16 tokens of its prompt in its pages. It gets the next two, and more are to come:

    >>> first, second = PromptChunk(1, [5, 6, 7], pages=[4]), PromptChunk(2, [8, 9], start=16, final=False)
    >>> batch = ragged_batch([first, second], decodes=[0], deltas=[(0, 1, 3)])
    >>> batch.decode_slot.tolist(), batch.deltas.tolist()
    ([0], [[0, 1, 3], [1, 0, 4]])
    >>> batch.tokens.tolist(), batch.chunk_slot.tolist(), batch.chunk_start.tolist(), batch.chunk_len.tolist()
    ([5, 6, 7, 8, 9], [1, 2], [0, 16], [3, 2])
    >>> batch.chunk_final.tolist()  # tokens are drawn for slots 0 and 1, not for 2
    [1, 0]
    """

    decode_slot: AnyArray  # [R] decoding slots
    decode_rows: AnyArray  # [R] the most rows of each, 1 .. Q: its newest token, then drafts
    decode_room: AnyArray  # [R] tokens that the slot's pages have room for, for a drafter's K and V
    tokens: AnyArray  # [C] prompt tokens of all chunks, head to tail
    targets: AnyArray  # [C] the prompt token after each, or -1, for prompt logprobs
    deltas: AnyArray  # [L, 3] page table changes: slot, index, page
    chunk_slot: AnyArray  # [B]
    chunk_start: AnyArray  # [B] cache index of the chunk's first token
    chunk_len: AnyArray  # [B] tokens in the chunk
    chunk_final: AnyArray  # [B] 1: it has the sequence's last known token, so a token is sampled
    chunk_room: AnyArray  # [B] as decode_room
    prompt_len: AnyArray  # [B] tokens of the original prompt (later ones were generated)
    tapped: AnyArray  # [N] the rows whose tapped values the step returns; of length 0: all
    sampling: Sampling  # a row a chunk
    width: int = field(default=1, metadata={"static": True})  # Q: rows of a short segment


@dataclass(frozen=True)
class PromptChunk:
    """Holds tokens of one sequence that a step computes, at cache indices start, start + 1, ..."""

    slot: int
    tokens: Sequence[int]
    start: int = 0  # tokens of the sequence in the pages already
    final: bool = True  # it has the last known token, so the next one is sampled
    pages: Sequence[int] = ()  # the slot's first page table entries, if this step sets them
    prompt_len: int | None = None  # tokens of the prompt, if some of `tokens` were generated
    targets: Sequence[int] = ()  # the token after each, if log-probabilities are wanted
    room: int = NOWHERE  # tokens that the slot's pages have room for
    sampling: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))  # by names of Sampling's fields


def empty_batch(
    decodes: int,
    tokens: int,
    chunks: int,
    *,
    deltas: int,
    bias: int = 0,
    width: int = 1,
    tapped: int = 0,
    adapters: bool = False,
) -> RaggedBatch:
    """Returns a batch of nothing but padding, in numpy. It has room for R decodes of Q rows (`width`), C tokens in B
    chunks, L page table changes, and N tapped rows. `bias` and `adapters` are as in neutral_sampling."""

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
        tapped=ints(NOWHERE, tapped),
        sampling=neutral_sampling(chunks, bias, adapters),
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
    adapters: bool = False,
) -> RaggedBatch:
    """Returns a step as a batch without padding, for callers without an engine. It holds prompt chunks, decoding slots,
    and page table changes (slot, index, page) besides those of the chunks. Each decode has Q = `rows` rows: its newest
    token and its drafts. Sequences end only where `sampling` has a limit. `adapters` is whether the params have
    some; a chunk's `sampling` then has its place among them as "adapter"."""
    tokens, changes = sum(len(chunk.tokens) for chunk in chunks), sum(len(chunk.pages) for chunk in chunks)
    bias = max((len(chunk.sampling.get("bias_ids", ())) for chunk in chunks), default=0)
    penalized = any(name.endswith("_penalty") for chunk in chunks for name in chunk.sampling)
    sizes = {"deltas": len(deltas) + changes, "bias": max(bias, int(penalized)), "width": rows}
    batch = empty_batch(len(decodes), tokens, len(chunks), **sizes, adapters=adapters)
    batch.sampling.max_length[:], batch.decode_rows[:] = NOWHERE, rows
    fill_batch(batch, chunks, decodes, deltas)
    return batch
