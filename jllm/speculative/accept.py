"""Which drafts a step accepts: those that equal what the target draws in their place, and nothing else.

The target's token at a token index is a function of its logits there and of noise keyed by request and index, so the
tokens are those of plain decoding, whatever was drafted (compare Leviathan et al., arXiv 2211.17192, whose tokens
depend on the drafter).
"""

import jax
import jax.numpy as jnp
import numpy as np

from jllm.speculative.tree import Tree


def accept(tree: Tree, drafted: jax.Array, drawn: jax.Array, used: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Walks each tree from its root to the child that is what the target drew at the node, while there is one.

    drafted i32[R, Q] has the token of each node, drawn i32[R, Q] what the target drew after it, and used i32[R] how
    many of the nodes count. Returns the nodes that were reached i32[R, W], W = 1 + the tree's depth, the root first,
    and how many they are i32[R]: 0 where no node counts. Of equal siblings the first is reached.
    """
    R, Q = drafted.shape
    node, there = jnp.zeros(R, jnp.int32), used > 0
    path, count = [node], there.astype(jnp.int32)
    if tree.is_chain:
        for i in range(1, Q):
            there &= (i < used) & (drafted[:, i] == drawn[:, i - 1])
            count += there.astype(jnp.int32)
        return jnp.broadcast_to(jnp.arange(Q, dtype=jnp.int32), (R, Q)), count
    parents = jnp.asarray([(-1, *tree.parents)], jnp.int32)
    counts = jnp.arange(Q, dtype=jnp.int32)[None, :] < used[:, None]
    for _ in range(tree.depth):
        wanted = jnp.take_along_axis(drawn, node[:, None], axis=1)
        children = counts & (parents == node[:, None]) & (drafted == wanted)
        there &= children.any(axis=1)
        node = jnp.where(there, jnp.argmax(children, axis=1).astype(jnp.int32), node)
        path.append(node)
        count += there.astype(jnp.int32)
    return jnp.stack(path, axis=1), count


def drafts_before(tree: Tree, drafted: jax.Array) -> jax.Array:
    """Returns the drafts on the path to each node, itself included and the root left out: drafted i32[R, Q] -> i32[R,
    Q, D], D the tree's depth, -1 in places that a shorter path leaves."""
    paths = np.full((tree.size, tree.depth), -1, np.int32)
    for node, path in enumerate(tree.paths):
        paths[node, : len(path) - 1] = path[1:]
    return jnp.where(paths[None] >= 0, drafted[:, np.maximum(paths, 0)], -1)
