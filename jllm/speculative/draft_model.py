"""Drafts with a smaller LLaMA (Leviathan et al., arXiv 2211.17192) that has K and V of its own."""

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jllm.config import LlamaConfig
from jllm.errors import DrafterError
from jllm.model.backbone import backbone, head
from jllm.model.cache import Cache, make_cache, parse_kv_cache
from jllm.model.paged import Paged
from jllm.model.params import Params
from jllm.speculative.drafter import Advance, Drafts, Proposal
from jllm.speculative.levels import (
    after_previous,
    draft_levels,
    first_pass,
    newest_tokens,
    nothing_drafted,
    step_segments,
)
from jllm.speculative.tree import Tree, chain


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftModel:
    """Is a Drafter that is a model. Its dtype may differ from the target's, and its vocabulary may be a part of the
    target's. Its memory is i32[S], the newest token of each slot's sequence."""

    params: Params
    config: LlamaConfig = field(metadata={"static": True})
    tree: Tree = field(default=chain(4), metadata={"static": True})
    # i32[V'], the target's id of each of its V' tokens; None: the same ids. A token that it lacks becomes its token 0.
    target_ids: jax.Array | None = None

    def init(
        self, config: LlamaConfig, dtype: DTypeLike, *, slots: int, num_pages: int, page_size: int, max_tokens: int
    ) -> tuple[Cache, jax.Array]:
        """Returns page pools for its own config, in its params' dtype, and its memory. Raises DrafterError for a model
        of another vocabulary."""
        own, target = self.config.vocab_size, config.vocab_size
        if self.target_ids is None and own != target:
            tell = "give target_ids, the target's id of each of its tokens"
            raise DrafterError(f"the draft model has a vocabulary of {own} tokens, its target one of {target}: {tell}")
        if self.target_ids is not None:
            _check_ids(self.target_ids, own, target)
        formats = parse_kv_cache(None, self.config, self.params.dtype)
        return make_cache(self.config, num_pages, page_size, formats), jnp.zeros(slots, jnp.int32)

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
        own = None
        if self.target_ids is not None:
            numbers = jnp.arange(self.config.vocab_size, dtype=jnp.int32)
            own = jnp.zeros(config.vocab_size, jnp.int32).at[self.target_ids].set(numbers)

        def forward(batch: Paged, before: jax.Array | None, cache: Cache) -> tuple[jax.Array, Cache]:
            if own is not None:
                batch = replace(batch, tokens=jnp.take(own, batch.tokens, mode="clip"))
            hidden, updated = backbone(self.params, self.config, batch, cache, backend=backend)
            assert updated is not None
            return hidden, updated

        def logits_of(hidden: jax.Array) -> jax.Array:
            logits = head(self.params, self.config, hidden, backend=backend)
            if self.target_ids is None:
                return logits
            banned = jnp.full((logits.shape[0], config.vocab_size), -jnp.inf, logits.dtype)
            return banned.at[:, self.target_ids].set(logits)

        tokens = after_previous(jnp.take(drafts.memory, advance.slot, mode="clip"), advance.tokens, advance)
        newest, cache = first_pass(*step_segments(advance, tokens), advance.chunks, drafts.cache, None, forward)
        found = nothing_drafted(self.tree, advance, cache)
        if wanted:
            found = draft_levels(self.tree, advance, cache, newest, forward, logits_of, backend=backend)
        return replace(found, memory=newest_tokens(drafts.memory, advance))

    def remember(
        self, memory: jax.Array, slot: jax.Array, tokens: jax.Array, start: jax.Array, count: jax.Array
    ) -> jax.Array:
        return memory  # unchanged: a prompt chunk comes before any draft


def _check_ids(target_ids: jax.Array, own: int, target: int) -> None:
    if target_ids.shape != (own,) or target_ids.dtype != jnp.int32:
        found = f"{target_ids.dtype} of shape {list(target_ids.shape)}"
        raise DrafterError(f"target_ids is {found}; a draft model of {own} tokens takes int32 of shape [{own}]")
    if not isinstance(target_ids, (jax.core.Tracer, jax.ShapeDtypeStruct)):
        ids = np.asarray(target_ids)
        if len(np.unique(ids)) < own or ids.min() < 0 or ids.max() >= target:
            raise DrafterError(f"target_ids must be {own} different ids of the target's {target} tokens")
