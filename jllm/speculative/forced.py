"""Drafts forced tokens: where a guide leaves only one continuation, such as a key of a JSON object, it is drafted.

The host has the guides. It gives the tokens that a step probably draws, and those after them. If the step drew them,
the tokens after them replace the drafter's first drafts.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from jllm.speculative.drafter import Advance, Proposal
from jllm.speculative.tree import Tree


def coming_tokens(tree: Tree) -> int:
    """Returns F: the most tokens that a step draws for a sequence, plus the drafts on a path of the next step."""
    return 2 * tree.depth + 1


def with_forced(found: Proposal, advance: Advance, coming: jax.Array, tree: Tree) -> Proposal:
    """Returns a drafter's proposal with forced tokens on the tree's first path. coming i32[G, F] are the tokens that
    the step probably drew and those after them, padded with -1."""
    path = np.array(tree.first_path[1:], np.int32)
    step = jnp.arange(advance.tokens.shape[1], dtype=jnp.int32)[None, :]
    fits = (step >= advance.count[:, None]) | (coming[:, : step.shape[1]] == advance.tokens)
    place = advance.count[:, None] + jnp.arange(len(path), dtype=jnp.int32)[None, :]
    after = jnp.take_along_axis(coming, place, axis=1, mode="clip")  # place is at most 2 depth, the last index
    forced = jnp.cumprod(fits.all(axis=1, keepdims=True) & (after >= 0), axis=1).astype(bool)
    tokens = found.tokens.at[:, path - 1].set(jnp.where(forced, after, found.tokens[:, path - 1]))
    reach = jnp.max(jnp.where(forced, path, 0), axis=1, initial=0)
    return replace(found, tokens=tokens, count=jnp.maximum(found.count, reach))
