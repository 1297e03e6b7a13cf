"""Defines a drafter: a value that proposes the next tokens of sequences, on the device, at the end of a step.

A drafter is a pytree. Its weights, if it has any, are leaves, and all else is static. It sees the results of the step
(Advance) and keeps its own memory between steps (Drafts). The next step of a sequence verifies the drafts. No draft
changes a token. So a drafter that has seen little of a sequence, such as after a prefix cache hit, only loses
acceptance.

To have its drafts accepted, a drafter draws as the target draws. sampling.sample with the request's parameters at the
draft's token index uses the same noise.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import jax

from jllm.config import LlamaConfig
from jllm.model.cache import Cache
from jllm.model.paged import Chunks
from jllm.model.params import Params
from jllm.model.sampling import Sampling
from jllm.speculative.tree import Tree


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Drafts:
    """Holds the drafts of each slot, and the drafter's memory."""

    tokens: jax.Array  # i32[S, Q - 1], for the tree's nodes after the root
    count: jax.Array  # i32[S], the number of valid ones, which come first
    cache: Any  # page pools (Cache), addressed by the target's page tables; () if it needs none
    memory: Any  # a pytree of the drafter
    tree: Tree = field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Advance:
    """Holds the results of a step for G = R + B sequences: R short segments of Q rows, then B prompt chunks on C rows.

    The cache has the K and V of tokens before `start`, if the drafter saw them. The drafter computes those of `tokens`
    and of the chunks. Token i of a sequence has cache index i in its pages.
    """

    slot: jax.Array  # i32[G], out of range for a sequence without part in the step
    start: jax.Array  # i32[G], the token index of the first of `tokens`
    tokens: jax.Array  # i32[G, Q], drawn in the step; the first `count` are valid, the last of them is the newest
    count: jax.Array  # i32[G]; 0: none was drawn or the sequence has ended, so nothing is drafted
    hidden: jax.Array  # [G, Q, E], the target's hidden state before the final norm, from which each was drawn
    pages: jax.Array  # i32[G, M]
    room: jax.Array  # i32[G], tokens that the pages have room for: no write at this index or past it
    sampling: Sampling  # [G]
    chunk_slot: jax.Array  # i32[B]
    chunks: Chunks  # of the last B of the G sequences
    chunk_hidden: jax.Array  # [C, E], the target's hidden states of the chunks' tokens
    cache: Any = ()  # the target's, with all tokens except each sequence's newest one


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Proposal:
    """Holds a drafter's proposals for the G sequences of an Advance, and its new state."""

    tokens: jax.Array  # i32[G, Q - 1], for the tree's nodes after the root
    count: jax.Array  # i32[G], the number of valid ones, which come first
    cache: Any  # its pools after the step
    memory: Any  # its memory after the step
    # The target's cache, if the drafter wrote to it: from each sequence's newest token on, where the target writes
    # before it reads. None: unchanged.
    target_cache: Cache | None = None


@runtime_checkable
class Drafter(Protocol):
    """Proposes drafts for sequences that decode."""

    @property
    def tree(self) -> Tree:
        """Returns the shape of the drafts, fixed by the drafter's type and static fields."""

    def init(
        self, config: LlamaConfig, dtype: Any, *, slots: int, num_pages: int, page_size: int, max_tokens: int
    ) -> tuple[Cache | tuple[()], Any]:
        """Returns the drafter's page pools and memory for a target of this config and dtype. Sequences have at most
        max_tokens tokens. Raises ConfigError for a target that the drafter does not fit."""

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
        """Returns drafts of the tokens after each sequence's newest one. `params` and `config` are the target's. If
        drafts are not `wanted`, they are not used. Then only the state that later drafts need is worth computing."""

    def remember(self, memory: Any, slot: jax.Array, tokens: jax.Array, start: jax.Array, count: jax.Array) -> Any:
        """Returns the memory after a slot's sequence has tokens i32[n] at start, start + 1, ... that no step computes.
        The first `count` are valid. They are a prefix from the cache or from a snapshot."""
