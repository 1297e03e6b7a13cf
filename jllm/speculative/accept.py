"""Accepts the drafts of a step that equal the target's tokens, and no others.

The target's token at a token index depends on its logits there and on noise keyed by request and index. So the tokens
are those of plain decoding, whatever was drafted. In Leviathan et al. (arXiv 2211.17192) they depend on the drafter.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jllm.speculative.tree import Tree


def accept(tree: Tree, drafted: jax.Array, drawn: jax.Array, used: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Walks each tree from its root to the child that equals the target's token, while there is one.

    drafted i32[R, Q] has the token of each node, and drawn i32[R, Q] the target's token after it. used i32[R] is the
    number of valid nodes. Returns the nodes that were reached i32[R, W], W = 1 + the tree's depth, the root first. Also
    returns their number i32[R], 0 where no node is valid. Of equal siblings the first is reached.
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
    """Returns the drafts on the path to each node, the node included and the root left out: i32[R, Q, D] from i32[R,
    Q]. D is the tree's depth. Unused places of shorter paths have -1."""
    paths = np.full((tree.size, tree.depth), -1, np.int32)
    for node, path in enumerate(tree.paths):
        paths[node, : len(path) - 1] = path[1:]
    return jnp.where(paths[None] >= 0, drafted[:, np.maximum(paths, 0)], -1)
