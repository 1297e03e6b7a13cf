"""What a drafter is: a value that proposes the next tokens of sequences, on the device, at the end of a step.

A drafter is a pytree: its weights, if it has any, are leaves, and all else is static. It sees what the step did
(Advance) and remembers what it likes between steps (Drafts). The next step of a sequence verifies what was drafted; no
draft changes a token, so a drafter that knows little of a sequence (after a prefix was found in the cache, say) costs
acceptance and nothing else.

A drafter that wants its drafts accepted draws them as the target draws: sampling.sample with the request's parameters
at the draft's token index uses the same noise.
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
    """What was drafted for each slot, and what the drafter remembers."""

    tokens: jax.Array  # i32[S, Q - 1] of the nodes of its tree after the root
    count: jax.Array  # i32[S] how many of them were drafted: the first ones
    cache: Cache  # pools of pages that share numbers and page tables with the target's; () where it needs none
    memory: Any  # a pytree of the drafter's own
    tree: Tree = field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Advance:
    """What a step did to G = R + B sequences: R short segments of Q rows, then B prompt chunks on C rows.

    The K and V of tokens before `start` are there, if the drafter saw them; those of `tokens` and of the chunks are its
    to compute. Token i of a sequence has cache index i in its pages.
    """

    slot: jax.Array  # i32[G], out of range for a sequence that took no part
    start: jax.Array  # i32[G], the token index of the first of `tokens`
    tokens: jax.Array  # i32[G, Q], those drawn in the step; the first `count` are valid, the last of these the newest
    count: jax.Array  # i32[G]; 0 where none was drawn or the sequence has ended: then nothing is to be drafted
    hidden: jax.Array  # [G, Q, E], the target's hidden state that each was drawn from, before the final norm
    pages: jax.Array  # i32[G, M]
    room: jax.Array  # i32[G], tokens that the pages have room for: nothing is written at this index and past it
    sampling: Sampling  # [G]
    chunk_slot: jax.Array  # i32[B]
    chunks: Chunks  # of B sequences, the last B of the G
    chunk_hidden: jax.Array  # [C, E], the target's, of the chunks' tokens
    cache: Cache = ()  # the target's, of all tokens but each sequence's newest one


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Proposal:
    """What a drafter proposes for the G sequences of an Advance, and what it keeps."""

    tokens: jax.Array  # i32[G, Q - 1] for the nodes of its tree after the root
    count: jax.Array  # i32[G] how many of them were drafted: the first ones
    cache: Cache  # its pools after the step
    memory: Any  # its memory after the step
    # The target's cache, of a drafter that wrote to it: from each sequence's newest token on, where the target writes
    # before it reads. None: as it was.
    target_cache: Cache | None = None


@runtime_checkable
class Drafter(Protocol):
    """Proposes drafts for sequences that decode."""

    @property
    def tree(self) -> Tree:
        """Returns the shape of what it drafts, fixed by its type and static fields."""

    def init(
        self, config: LlamaConfig, dtype: Any, *, slots: int, num_pages: int, page_size: int, max_tokens: int
    ) -> tuple[Cache, Any]:
        """Returns its page pools and its memory for a target of this config and dtype, whose sequences have at most
        max_tokens tokens. Raises ConfigError for a target that it does not fit."""

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
        """Returns drafts the tokens after each sequence's newest one. params and config are the target's. Where drafts
        are not wanted, these are not used, and only what later drafts need is worth computing."""

    def remember(self, memory: Any, slot: jax.Array, tokens: jax.Array, start: jax.Array, count: jax.Array) -> Any:
        """Returns its memory once a slot's sequence has tokens i32[n] at start, start + 1, ..., of which the first
        `count` are valid, that no step computes: a prefix that was found in the cache, or came with a snapshot."""
