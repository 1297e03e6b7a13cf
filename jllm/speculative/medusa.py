"""Drafts with Medusa heads (Cai et al., arXiv 2401.10774), several small heads on the target's hidden state.

Each head predicts the token at one distance. The heads need no K and V, and draft a whole tree at once. The target's
own head draws token t + 1 from a hidden state, and head k = 0, 1, ... drafts token t + 2 + k from the same one. A head
does not see the tokens in between. So all nodes of one depth and rank have the same token, whatever their parents: the
tree is a Cartesian product.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jllm.config import LlamaConfig
from jllm.errors import DrafterError
from jllm.model.backbone import whole_rows
from jllm.model.linear import linear
from jllm.model.norms import norm_rows
from jllm.model.params import Params, Weight
from jllm.speculative.drafter import Advance, Drafts, Proposal
from jllm.speculative.levels import best_tokens, last_valid
from jllm.speculative.tree import Tree
from jllm.speculative.weights import check_weights, random_weights
from pallas_kernels.formats.numerics import compute_dtype


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MedusaHead:
    """Holds the weights that predict the token at one distance, in the target's dtype."""

    linear: jax.Array  # [E, E], outputs by inputs
    bias: jax.Array  # [E]
    head: jax.Array | None = None  # [V, E]; None: the target's head


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Medusa:
    """Is a Drafter of heads, whose tree has at most as many levels below the root as there are heads."""

    heads: tuple[MedusaHead, ...]
    tree: Tree = field(metadata={"static": True})

    def init(
        self, config: LlamaConfig, dtype: Any, *, slots: int, num_pages: int, page_size: int, max_tokens: int
    ) -> tuple[tuple[()], None]:
        """Returns empty pools and no memory. Raises DrafterError for weights of another model's shapes or dtype, and
        for a tree that is too deep."""
        if self.tree.depth > (n := len(self.heads)):
            raise DrafterError(f"{n} Medusa heads draft {n} tokens ahead, but the tree has depth {self.tree.depth}")
        check_weights(self.heads, medusa_shapes(config, dtype, [head.head is not None for head in self.heads]))
        return (), None

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
        hidden, newest = last_valid(advance.hidden, advance.count), advance.start + advance.count - 1
        normed = norm_rows(hidden, params.norm, config, backend)
        found: dict[int, jax.Array] = {}
        for depth, nodes in enumerate(self.tree.levels()[1:], 1):
            logits = head_logits(self.heads[depth - 1], normed, params, backend=backend)
            if self.heads[depth - 1].head is None:  # the target's head: a device of a mesh has a part of it
                logits = whole_rows(logits, config)
            most = 1 + max(self.tree.ranks[node] for node in nodes)
            best = best_tokens(logits, advance.sampling, newest + depth, most, backend=backend)
            found |= {node: best[:, self.tree.ranks[node]] for node in nodes}
        tokens = jnp.stack([found[node] for node in range(1, self.tree.size)], axis=1)
        count = jnp.where(advance.count > 0, tokens.shape[1], 0)
        return Proposal(tokens, count, (), None)

    def remember(self, memory: None, slot: jax.Array, tokens: jax.Array, start: jax.Array, count: jax.Array) -> None:
        return None


def head_logits(p: MedusaHead, normed: jax.Array, params: Params, *, backend: str | None = None) -> jax.Array:
    """Returns logits [T, V] = W (x + SiLU(A x + b)), in float32 at least. x [T, E] are hidden states after the target's
    final norm."""
    residual = jax.nn.silu(linear(normed, p.linear, p.bias, backend=backend))
    head: Weight = p.head if p.head is not None else params.embed if params.head is None else params.head
    return linear(normed + residual, head, out_dtype=compute_dtype(normed.dtype), backend=backend)


def medusa_shapes(config: LlamaConfig, dtype: DTypeLike, own: list[bool]) -> tuple[MedusaHead, ...]:
    """Returns heads of jax.ShapeDtypeStruct for a target of this config and dtype, one for each entry of `own`. An
    entry is whether the head has a projection of its own. Otherwise it takes the target's."""
    E, V = config.hidden_size, config.vocab_size

    def array(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    return tuple(MedusaHead(array(E, E), array(E), array(V, E) if o else None) for o in own)


def init_medusa(config: LlamaConfig, key: jax.Array, tree: Tree, dtype: DTypeLike, *, own: bool = False) -> Medusa:
    """Returns a drafter with one random head for each level of the tree. Heads share the target's projection unless
    `own`."""
    return Medusa(random_weights(medusa_shapes(config, dtype, [own] * tree.depth), key), tree)
