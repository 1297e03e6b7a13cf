"""Drafts by lookup: the tokens that followed the last time that the sequence ended in the same tokens.

This is prompt lookup (Saxena 2023) with the longest suffix that occurs, as in SuffixDecoding (Oliaro et al., arXiv
2411.04975). It searches prompt and output alike, and has no weights.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from jllm.config import LlamaConfig
from jllm.errors import ConfigError
from jllm.model.paged import chunk_of_row
from jllm.model.params import Params
from jllm.speculative.drafter import Advance, Drafts, Proposal
from jllm.speculative.tree import Tree, chain


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NGram:
    """Drafts the tokens after the most recent of the longest matches of a sequence's last tokens. A match has
    `shortest` to `longest` tokens, and lies within the sequence's last `context` tokens. Drafts that run past the
    newest token repeat from the match."""

    drafts: int = field(default=4, metadata={"static": True})
    longest: int = field(default=8, metadata={"static": True})
    shortest: int = field(default=2, metadata={"static": True})
    context: int = field(default=4096, metadata={"static": True})

    def __post_init__(self):
        if not 1 <= self.shortest <= self.longest:
            raise ConfigError(f"matches of {self.shortest} to {self.longest} tokens: expected 1 <= shortest <= longest")
        if self.drafts < 1 or self.context < 1:
            raise ConfigError(f"drafts={self.drafts} and context={self.context}: expected at least 1 of each")

    @property
    def tree(self) -> Tree:
        return chain(self.drafts)

    def init(
        self, config: LlamaConfig, dtype: Any, *, slots: int, num_pages: int, page_size: int, max_tokens: int
    ) -> tuple[tuple[()], jax.Array]:
        """Returns no pools, and a memory i32[S, L]. Its column i % L has token i of a slot's sequence."""
        return (), jnp.full((slots, min(self.context, max_tokens)), -1, jnp.int32)

    def propose(
        self,
        drafts: Drafts,
        advance: Advance,
        params: Params,
        *,
        config: LlamaConfig,
        backend: str | None,
        wanted: bool = True,
    ) -> Proposal:
        memory = self._take_in(drafts.memory, advance)
        rows = jnp.take(memory, advance.slot, axis=0, mode="clip")
        found, count = jax.vmap(self._look_up)(rows, advance.start + advance.count - 1)
        return Proposal(found, jnp.where(advance.count > 0, count, 0), (), memory)

    def remember(
        self, memory: jax.Array, slot: jax.Array, tokens: jax.Array, start: jax.Array, count: jax.Array
    ) -> jax.Array:
        i = jnp.arange(tokens.shape[0], dtype=jnp.int32)
        return self._write(memory, jnp.full_like(i, slot), start + i, tokens, i < count, start + count)

    def _take_in(self, memory: jax.Array, advance: Advance) -> jax.Array:
        chunks, C, W = advance.chunks, advance.chunks.tokens.shape[0], advance.tokens.shape[1]
        if C:
            ends = jnp.cumsum(chunks.lengths, dtype=jnp.int32)
            chunk = chunk_of_row(ends, C)
            B = chunks.lengths.shape[0]
            at = jnp.minimum(chunk, B - 1)
            end = (chunks.start + chunks.lengths)[at]
            index = end - ends[at] + jnp.arange(C, dtype=jnp.int32)
            memory = self._write(memory, advance.chunk_slot[at], index, chunks.tokens, chunk < B, end)
        e = jnp.arange(W, dtype=jnp.int32)[None, :]
        index, valid = advance.start[:, None] + e, e < advance.count[:, None]
        slot, end = (jnp.broadcast_to(x[:, None], index.shape) for x in (advance.slot, advance.start + advance.count))
        return self._write(memory, *(x.reshape(-1) for x in (slot, index, advance.tokens, valid, end)))

    def _write(
        self, memory: jax.Array, slot: jax.Array, index: jax.Array, tokens: jax.Array, valid: jax.Array, end: jax.Array
    ) -> jax.Array:
        """Writes tokens [n] at indices [n] of the slots' sequences [n], only the last L before `end`. Returns the
        memory."""
        S, L = memory.shape
        slot = jnp.where(valid & (index >= end - L), slot, S)
        return memory.at[slot, index % L].set(tokens, mode="drop")

    def _look_up(self, row: jax.Array, newest: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns drafts i32[k] and their number, for a sequence whose last tokens are in row i32[L]. `newest` is the
        newest one's index."""
        L = row.shape[0]
        column = jnp.arange(L, dtype=jnp.int32)
        behind = (newest - column) % L  # the token in this column has index newest - behind
        alike, length = jnp.ones(L, bool), jnp.zeros(L, jnp.int32)
        for i in range(min(self.longest, L)):
            there = behind + i <= jnp.minimum(newest, L - 1)
            alike &= there & (jnp.roll(row, i) == row[(newest - i) % L])
            length += alike.astype(jnp.int32)
        length = jnp.where((behind > 0) & (length >= self.shortest), length, 0)
        best = jnp.max(length)
        back = jnp.min(jnp.where((length == best) & (behind > 0), behind, L))  # the most recent match ends there
        ahead = jnp.arange(self.drafts, dtype=jnp.int32) % jnp.maximum(back, 1)
        found = row[(newest - back + 1 + ahead) % L]
        return found, jnp.where(best > 0, self.drafts, 0)
