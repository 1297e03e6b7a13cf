"""Drafts with a quantized copy of the target, which reads the target's own K and V.

The copy reads exact K and V up to the newest token. So its errors do not add up over a text, and it has no pools and
computes no prompts. K and V of its drafts take the places that the target writes next. The target writes them before it
reads them.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from jllm.config import LlamaConfig
from jllm.errors import DrafterError
from jllm.model.backbone import backbone, head
from jllm.model.cache import Cache
from jllm.model.paged import Paged, no_chunks
from jllm.model.params import Params
from jllm.parallel.mesh import ranks_of
from jllm.speculative.drafter import Advance, Drafts, Proposal
from jllm.speculative.levels import draft_levels, first_pass, newest_segments, nothing_drafted
from jllm.speculative.tree import Tree, chain


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedCopy:
    """Is a Drafter of the target's weights in fewer bits, with the target's config. It has no memory. On a mesh each
    device has its share of the copy."""

    params: Params
    tree: Tree = field(default=chain(4), metadata={"static": True})

    def init(
        self, config: LlamaConfig, dtype: Any, *, slots: int, num_pages: int, page_size: int, max_tokens: int
    ) -> tuple[tuple[()], tuple[()]]:
        """Returns no pools and no memory. Raises DrafterError for a copy of a model of other shapes, or on other
        devices."""
        devices = math.prod(self.params.norm.shape[:-1])
        ranks = ranks_of(config) if config.axis is None else devices  # a share was checked with the whole model
        found = len(self.params.layers), *self.params.embed.shape[-2:], devices
        wanted = config.num_layers, -(-config.vocab_size // ranks), config.hidden_size, ranks
        if found != wanted or self.params.dtype != dtype:
            said = "{} layers, {} tokens and {} columns on each of {} devices"
            raise DrafterError(
                f"the copy is of a model of {said.format(*found)} in {self.params.dtype}, its target has "
                f"{said.format(*wanted)} in {dtype}: quantize the target's own params"
            )
        return (), ()

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
        if not wanted:
            return replace(nothing_drafted(self.tree, advance, ()), memory=())

        def forward(batch: Paged, before: jax.Array | None, cache: Cache) -> tuple[jax.Array, Cache]:
            hidden, updated = backbone(self.params, config, batch, cache, backend=backend)
            assert updated is not None
            return hidden, updated

        def logits_of(hidden: jax.Array) -> jax.Array:
            return head(self.params, config, hidden, backend=backend)

        chunks = no_chunks(advance.pages.shape[1])
        newest, cache = first_pass(*newest_segments(advance), chunks, advance.cache, None, forward)
        found = draft_levels(self.tree, advance, cache, newest, forward, logits_of, backend=backend)
        return replace(found, cache=(), memory=(), target_cache=found.cache)

    def remember(
        self, memory: tuple[()], slot: jax.Array, tokens: jax.Array, start: jax.Array, count: jax.Array
    ) -> tuple[()]:
        return memory
