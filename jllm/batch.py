"""What the host tells the device about one step: a ladder of compiled sizes and one packed buffer of small integers.

The buffer is allocated anew for every step, because the runtime may still be reading it after dispatch.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

STOP_IDS = 8  # end tokens and stop ids that the device checks; the host checks the rest one step later


@dataclass(frozen=True, order=True)
class Rung:
    """One compiled size: R decode rows, C prompt tokens in at most B chunks."""

    decodes: int
    tokens: int
    chunks: int

    @property
    def size(self) -> int:
        return self.decodes + self.tokens


FINE = (2, 7, 18, 28, 40, 50, 64, 80, 96, 114, 128)  # of 128 parts of the slots: see make_ladder
FEW_SLOTS = 64  # so few rows cost a GPU no more than one: reading the weights takes longer


def make_ladder(max_slots: int, max_step_tokens: int) -> tuple[Rung, ...]:
    """At most 16 rungs, so that what they round up is little where it costs.

    Many slots: eleven numbers of decode rows without prompt tokens, since a full batch runs out row by row, spaced for
    the least waste on conversations (experiments.qps) by a scheduler that lets a few rows too many sit out; with prompt
    tokens five, since the scheduler fills those: a quarter and all of what fits a step in which every slot decodes,
    there, all of it while a batch begins, and a quarter where few decode.
    Few slots: four numbers of decode rows (all slots, fewer by factors of 2 and 4, and one) times three of tokens.
    """
    most = max(1, max_step_tokens - max_slots)
    quarter = -(-most // 4)
    if max_slots > FEW_SLOTS:
        sizes = {(-(-max_slots * part // 128), 0) for part in FINE}
        sizes |= {(-(-max_slots * eighths // 8), most) for eighths in (2, 5, 8)}
        sizes |= {(max_slots, quarter), (-(-max_slots // 16), quarter)}
    else:
        sizes = {(max(1, -(-max_slots // n)), c) for n in (1, 2, 4, 16, max_slots) for c in (0, quarter, most)}
    return tuple(Rung(r, c, min(max_slots, c)) for r, c in sorted(sizes))


def choose_rung(ladder: Sequence[Rung], decodes: int, tokens: int, chunks: int) -> Rung:
    """The smallest rung that holds a step."""
    fits = [r for r in ladder if r.decodes >= decodes and r.tokens >= tokens and r.chunks >= chunks]
    return min(fits, key=lambda r: (r.size, r))


@dataclass(frozen=True)
class Layout:
    """Where each field lies in the packed buffer of a rung (static under jit)."""

    rung: Rung
    deltas: int  # most page table changes in a step
    bias: int = 0  # logit bias entries a sequence; 0 leaves out the two fields

    def fields(self) -> Iterator[tuple[str, tuple[int, ...], int | float]]:
        """Name, shape and padding value of each field; float padding marks a float32 field."""
        R, C, B = self.rung.decodes, self.rung.tokens, self.rung.chunks
        nowhere = np.iinfo(np.int32).max  # a slot out of range: gathers clip, scatters drop
        yield "decode_slot", (R,), nowhere
        yield "tokens", (C,), 0
        yield "targets", (C,), -1
        yield "deltas", (self.deltas, 3), nowhere
        yield "chunk_slot", (B,), nowhere
        for name in ("chunk_start", "chunk_len", "chunk_final", "prompt_len", "max_length", "top_k", "seed", "sample"):
            yield name, (B,), 0
        yield "stop_ids", (B, STOP_IDS), -1
        for name, neutral in (("temperature", 0.0), ("top_p", 1.0), ("min_p", 0.0)):
            yield name, (B,), neutral
        for name, neutral in (("repetition", 1.0), ("presence", 0.0), ("frequency", 0.0)):
            yield name, (B,), neutral
        if self.bias:
            yield "bias_ids", (B, self.bias), -1
            yield "bias_values", (B, self.bias), 0.0

    @property
    def size(self) -> int:
        """Integers in the buffer."""
        return sum(math.prod(shape) for _, shape, _ in self.fields())

    def pack(self) -> tuple[np.ndarray, "RaggedBatch"]:
        """A fresh i32 buffer filled with padding, and a batch of views into it for the host to write."""
        buffer = np.empty(self.size, np.int32)
        views, at = {}, 0
        for name, shape, pad in self.fields():
            size = math.prod(shape)
            view = buffer[at : at + size].view(np.float32 if isinstance(pad, float) else np.int32).reshape(shape)
            view[...] = pad
            views[name], at = view, at + size
        return buffer, RaggedBatch(**views)

    def unpack(self, buffer: jax.Array) -> "RaggedBatch":
        """The same fields on the device, under jit."""
        fields, at = {}, 0
        for name, shape, pad in self.fields():
            size = math.prod(shape)
            field = buffer[at : at + size].reshape(shape)
            fields[name] = jax.lax.bitcast_convert_type(field, jnp.float32) if isinstance(pad, float) else field
            at += size
        return RaggedBatch(**fields)


@dataclass(frozen=True)
class RaggedBatch:
    """One step. Of each field only the first entries are valid; the rest holds the padding of Layout.fields.

    A chunk row carries its slot's whole set of parameters, so that admission is nothing but a first chunk.
    Arrays are numpy views on the host and jax arrays on the device. Types: i32 unless said otherwise.
    """

    decode_slot: Any  # [R] slots that decode one token
    tokens: Any  # [C] prompt tokens of all chunks, head to tail
    targets: Any  # [C] the prompt token that follows each, or -1: for prompt logprobs
    deltas: Any  # [L, 3] page table changes: slot, index, page
    chunk_slot: Any  # [B]
    chunk_start: Any  # [B] position of the chunk's first token
    chunk_len: Any  # [B] tokens in the chunk
    chunk_final: Any  # [B] 1: the sequence's last known token is in it, so a token is sampled
    prompt_len: Any  # [B] tokens of the original prompt (later ones were generated)
    max_length: Any  # [B] prompt and output tokens at which the sequence is done
    top_k: Any  # [B]
    seed: Any  # [B] u32 bits
    sample: Any  # [B] sample index within the request
    stop_ids: Any  # [B, STOP_IDS]
    temperature: Any  # f32[B]
    top_p: Any  # f32[B]
    min_p: Any  # f32[B]
    repetition: Any  # f32[B]
    presence: Any  # f32[B]
    frequency: Any  # f32[B]
    bias_ids: Any = None  # [B, X]
    bias_values: Any = None  # f32[B, X]


def pack_prompt(
    layout: Layout, tokens: Sequence[int], pages: Sequence[int], *, slot: int = 0, start: int = 0
) -> np.ndarray:
    """A step, written by hand, that prefills one slot and samples greedily: for notebooks and tests.

    `pages` are the slot's page table; they must hold the tokens and those that will follow. The `start` tokens before
    these are in the pages already (see snapshot.put). Further parameters can be written into `layout.pack()`'s views in
    the same way.
    """
    buffer, batch = layout.pack()
    batch.deltas[: len(pages)] = [(slot, i, page) for i, page in enumerate(pages)]
    batch.tokens[: len(tokens)] = tokens
    batch.chunk_slot[0], batch.chunk_len[0], batch.chunk_final[0] = slot, len(tokens), 1
    batch.chunk_start[0] = start
    batch.prompt_len[0], batch.max_length[0] = start + len(tokens), np.iinfo(np.int32).max
    return buffer


def pack_decode(layout: Layout, slots: Sequence[int]) -> np.ndarray:
    """A step in which these slots decode one token each."""
    buffer, batch = layout.pack()
    batch.decode_slot[: len(slots)] = slots
    return buffer
