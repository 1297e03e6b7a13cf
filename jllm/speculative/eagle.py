"""Drafts with an EAGLE head (Li et al., arXiv 2401.15077), one decoder layer that predicts the target's next hidden
state.

It reads the target's last hidden state and the token drawn from it:

    x_i = fc [embed(token_i); h_(i-1)]        f_i = layer(x_0 ... x_i), which stands for h_i
    token i + 1 is drawn from the target's final norm and head of f_i

h is the target's hidden state before its final norm; h_(-1) is zero. Row i has the rotary position and the cache index
of token i. While drafting, f replaces the h that are not known yet. EAGLE-3 (Li et al., arXiv 2503.01840) trains heads
of this form on their own drafts, without a loss on f. It also feeds them hidden states of several layers, which these
heads do not take.
"""

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jllm.config import LlamaConfig
from jllm.model.backbone import head, run_layers
from jllm.model.cache import Cache, make_cache, parse_kv_cache
from jllm.model.linear import embed, linear
from jllm.model.paged import Packed, Paged
from jllm.model.param_specs import abstract_params, init_params
from jllm.model.params import LayerParams, Params
from jllm.speculative.drafter import Advance, Drafts, Proposal
from jllm.speculative.levels import (
    after_previous,
    draft_levels,
    first_pass,
    last_valid,
    newest_tokens,
    nothing_drafted,
    step_segments,
)
from jllm.speculative.tree import Tree, chain
from jllm.speculative.weights import check_weights, random_weights
from pallas_kernels.backends import DIFFERENTIABLE


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EagleHead:
    """Holds the weights that predict the target's next hidden state, in the target's dtype."""

    fc: jax.Array  # [E, 2E]: columns for the embedding, then for the hidden state
    layer: LayerParams  # like the target's first layer, without a window


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EagleMemory:
    """Holds the memory of an EAGLE head for each slot's sequence."""

    hidden: jax.Array  # [S, E], the target's, of the token before the newest one; zero where it is unknown
    token: jax.Array  # i32[S], the newest token


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Eagle:
    """Is a Drafter with an EAGLE head."""

    head: EagleHead
    tree: Tree = field(default=chain(4), metadata={"static": True})

    def init(
        self, config: LlamaConfig, dtype: DTypeLike, *, slots: int, num_pages: int, page_size: int, max_tokens: int
    ) -> tuple[Cache, EagleMemory]:
        """Returns page pools of one layer, and a memory. Raises DrafterError for weights of another model's shapes or
        dtype."""
        if config.axis is None:  # a share was checked with the whole model
            check_weights(self.head, eagle_shapes(config, dtype))
        own = eagle_config(config, self.head.layer)
        cache = make_cache(own, num_pages, page_size, parse_kv_cache(None, own, dtype))
        return cache, EagleMemory(jnp.zeros((slots, config.hidden_size), dtype), jnp.zeros(slots, jnp.int32))

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
        def forward(batch: Paged, before: jax.Array | None, cache: Cache) -> tuple[jax.Array, Cache]:
            assert before is not None
            hidden, updated = eagle_hidden(self.head, params, config, batch, before, cache, backend=backend)
            assert updated is not None
            return hidden, updated

        def logits_of(hidden: jax.Array) -> jax.Array:
            return head(params, config, hidden, backend=backend)

        memory: EagleMemory = drafts.memory
        hidden, token = jax.tree.map(
            lambda x: jnp.take(x, advance.slot, axis=0, mode="clip"), (memory.hidden, memory.token)
        )
        tokens = after_previous(token, advance.tokens, advance)
        states = after_previous(hidden, advance.hidden, advance).reshape(-1, config.hidden_size)
        before = jnp.concatenate([states, _before_chunks(memory.hidden, advance)])
        newest, cache = first_pass(*step_segments(advance, tokens), advance.chunks, drafts.cache, before, forward)
        found = nothing_drafted(self.tree, advance, cache)
        if wanted:
            found = draft_levels(self.tree, advance, cache, newest, forward, logits_of, backend=backend)
        memory = EagleMemory(_newest_states(memory.hidden, advance), newest_tokens(memory.token, advance))
        return replace(found, memory=memory)

    def remember(
        self, memory: EagleMemory, slot: jax.Array, tokens: jax.Array, start: jax.Array, count: jax.Array
    ) -> EagleMemory:
        return replace(memory, hidden=memory.hidden.at[slot].set(jnp.zeros_like(memory.hidden[0]), mode="drop"))


def eagle_hidden(
    p: EagleHead,
    params: Params,
    config: LlamaConfig,
    batch: Packed | Paged,
    before: jax.Array,
    cache: Cache | None,
    *,
    backend: str | None = None,
) -> tuple[jax.Array, Cache | None]:
    """Returns f [T, E] of a batch's tokens, and the updated cache. `before` [T, E] are the hidden states of the tokens
    before them. params and config are the target's. It is differentiable without a cache."""
    if backend is None and cache is None:
        backend = DIFFERENTIABLE
    tokens = batch.tokens if config.axis is None else jnp.clip(batch.tokens, 0, config.vocab_size - 1)
    embedded = embed(params.embed, tokens, params.dtype, axis=config.axis, backend=backend)
    x = linear(jnp.concatenate([embedded, before], axis=1), p.fc, backend=backend)
    return run_layers((p.layer,), eagle_config(config, p.layer), x, batch, cache, backend=backend)[:2]


def _before_chunks(memory: jax.Array, advance: Advance) -> jax.Array:
    """Returns the hidden states [C, E] of the tokens before those of the chunks, with the memory's states [S, E]."""
    chunks, C = advance.chunks, advance.chunk_hidden.shape[0]
    if not C:
        return advance.chunk_hidden
    first = jnp.cumsum(chunks.lengths, dtype=jnp.int32) - chunks.lengths
    known = jnp.take(memory, advance.chunk_slot, axis=0, mode="clip")
    known = jnp.where((chunks.start > 0)[:, None], known, jnp.zeros_like(known))
    shifted = jnp.roll(advance.chunk_hidden, 1, axis=0)
    return shifted.at[jnp.where(chunks.lengths > 0, first, C)].set(known, mode="drop")


def _newest_states(memory: jax.Array, advance: Advance) -> jax.Array:
    """Returns the memory's states [S, E] after the step: those of chunks' last tokens, and those that the newest tokens
    were drawn from."""
    S, C = memory.shape[0], advance.chunk_hidden.shape[0]
    if C:
        last = jnp.cumsum(advance.chunks.lengths, dtype=jnp.int32) - 1
        slot = jnp.where(advance.chunks.lengths > 0, advance.chunk_slot, S)
        memory = memory.at[slot].set(jnp.take(advance.chunk_hidden, last, axis=0, mode="clip"), mode="drop")
    slot = jnp.where(advance.count > 0, advance.slot, S)
    return memory.at[slot].set(last_valid(advance.hidden, advance.count), mode="drop")


def eagle_config(config: LlamaConfig, layer: LayerParams | None = None) -> LlamaConfig:
    """Returns the config of the head's layer. The layer is whole on every device of a mesh. Beside a share of the
    target, its heads and MLP columns are counted from its weights."""
    own = replace(config.one_layer(0), windows=(), unrotated=(), mesh=None, axis=None)
    if config.axis is None or layer is None:
        return own
    heads = layer.attention.o.shape[1] // config.head_dim
    kv_heads = (layer.attention.qkv.shape[0] // config.head_dim - heads) // 2
    return replace(own, num_heads=heads, num_kv_heads=kv_heads, intermediate_size=layer.mlp.down.shape[1])


def eagle_shapes(config: LlamaConfig, dtype: DTypeLike) -> EagleHead:
    """Returns a head of jax.ShapeDtypeStruct for a target of this config and dtype."""
    E = config.hidden_size
    return EagleHead(jax.ShapeDtypeStruct((E, 2 * E), dtype), abstract_params(eagle_config(config), dtype).layers[0])  # type: ignore[arg-type]


def init_eagle(config: LlamaConfig, key: jax.Array, tree: Tree, dtype: DTypeLike) -> Eagle:
    """Returns a drafter with a head of random weights."""
    fc, layer = jax.random.split(key)
    own = replace(eagle_config(config), vocab_size=1)  # the embedding is not used
    shapes = eagle_shapes(config, dtype)
    return Eagle(EagleHead(random_weights(shapes.fc, fc), init_params(own, layer, dtype).layers[0]), tree)
