"""Forced tokens as drafts: where a guide leaves one way to go on (a key of a JSON object, say), that way is drafted.

The host, which knows the guides, gives the tokens that a step probably draws and those that come after them. Where the
step drew those, what follows takes the place of the drafter's first drafts.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from jllm.speculative.drafter import Advance, Proposal
from jllm.speculative.tree import Tree


def coming_tokens(tree: Tree) -> int:
    """Returns F: all tokens that a step may draw of a sequence, and as many drafts as a path of the next one has."""
    return 2 * tree.depth + 1


def with_forced(found: Proposal, advance: Advance, coming: jax.Array, tree: Tree) -> Proposal:
    """Returns what a drafter found, with forced tokens on the tree's first path: coming i32[G, F] are the tokens that
    the step probably drew and those after them, padded with -1."""
    path = np.array(tree.first_path[1:], np.int32)
    step = jnp.arange(advance.tokens.shape[1], dtype=jnp.int32)[None, :]
    fits = (step >= advance.count[:, None]) | (coming[:, : step.shape[1]] == advance.tokens)
    place = advance.count[:, None] + jnp.arange(len(path), dtype=jnp.int32)[None, :]
    after = jnp.take_along_axis(coming, place, axis=1, mode="clip")  # place is at most 2 depth, the last
    forced = jnp.cumprod(fits.all(axis=1, keepdims=True) & (after >= 0), axis=1).astype(bool)
    tokens = found.tokens.at[:, path - 1].set(jnp.where(forced, after, found.tokens[:, path - 1]))
    reach = jnp.max(jnp.where(forced, path, 0), axis=1, initial=0)
    return replace(found, tokens=tokens, count=jnp.maximum(found.count, reach))
