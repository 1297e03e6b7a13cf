"""Drafts with weights: the tokens of a tree level by level, each drawn as the target draws it.

Letters: G sequences, W tokens that a step may advance one by, Q nodes of a tree, E model dim.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jllm.model.cache import Cache
from jllm.model.paged import Chunks, Paged, ShortSegments, no_chunks, paged_batch
from jllm.model.sampling import Sampling, perturbed, sample
from jllm.speculative.drafter import Advance, Proposal
from jllm.speculative.tree import Tree
from pallas_kernels.formats.segments import WORD, words_of

# Batch, hidden states [T, E] of the tokens before its own, cache -> hidden states [T, E] of its tokens, cache.
Forward = Callable[[Paged, jax.Array | None, Cache], tuple[jax.Array, Cache]]


def last_valid(values: jax.Array, count: jax.Array) -> jax.Array:
    """Returns the last of the first `count` i32[G] values [G, W, ...] -> [G, ...]. It is arbitrary if count is 0."""
    return values[jnp.arange(values.shape[0]), jnp.maximum(count - 1, 0)]


def after_previous(previous: jax.Array, values: jax.Array, advance: Advance) -> jax.Array:
    """Returns values of each sequence's `tokens` [G, W, ...] behind the value of the token before them [G, ...]. The
    result [G, W + 1, ...] is for the rows of step_segments. A sequence whose chunk contains that previous token does
    not get it again, but has an unused row."""
    wide = jnp.concatenate([previous[:, None], values], axis=1)
    R = wide.shape[0] - advance.chunk_slot.shape[0]
    return jnp.concatenate([wide[:R], jnp.roll(wide[R:], -1, axis=1)])


def newest_tokens(memory: jax.Array, advance: Advance) -> jax.Array:
    """Returns the newest token of each slot's sequence i32[S] after the step. `memory` has those before it."""
    slot = jnp.where(advance.count > 0, advance.slot, memory.shape[0])
    return memory.at[slot].set(last_valid(advance.tokens, advance.count), mode="drop")


def best_tokens(
    logits: jax.Array, sampling: Sampling, position: jax.Array, most: int, *, backend: str | None
) -> jax.Array:
    """Returns the tokens i32[rows, most] that a target with logits [rows, V] would draw at token index i32[rows],
    likeliest first. The noise is the target's."""
    if most == 1:
        return sample(logits, sampling, position, backend=backend)[0][:, None]
    return lax.top_k(perturbed(logits, sampling, position), most)[1].astype(jnp.int32)


def step_segments(advance: Advance, tokens: jax.Array) -> tuple[ShortSegments, jax.Array]:
    """Returns segments of the step's tokens, and the number of rows i32[G] of each up to its newest token. Tokens are
    i32[G, W + 1] from after_previous. They include the token before the drawn ones. It had no place while it was the
    newest, if its page was missing then. Rows count with or without a place."""
    G = tokens.shape[0]
    more = (np.arange(G) < G - advance.chunk_slot.shape[0]).astype(np.int32)  # 1: the first row is the previous token's
    start, count = advance.start - more, jnp.where(advance.count > 0, advance.count + more, 0)
    return ShortSegments(tokens, start, jnp.clip(advance.room - start, 0, count), advance.pages), count


def newest_segments(advance: Advance) -> tuple[ShortSegments, jax.Array]:
    """Returns what step_segments returns, for the newest tokens alone."""
    start, count = newest_index(advance), jnp.minimum(advance.count, 1)
    tokens = last_valid(advance.tokens, advance.count)[:, None]
    return ShortSegments(tokens, start, jnp.clip(advance.room - start, 0, count), advance.pages), count


def newest_index(advance: Advance) -> jax.Array:
    """Returns the token index i32[G] of each sequence's newest token."""
    return advance.start + advance.count - 1


def first_pass(
    segments: ShortSegments,
    count: jax.Array,
    chunks: Chunks,
    cache: Cache,
    before: jax.Array | None,
    forward: Forward,
) -> tuple[jax.Array, Cache]:
    """Runs segments of `count` rows, and chunks. Returns the hidden states [G, E] of the segments' last rows, and the
    cache. `before` [G W + C, E] has the hidden states of the tokens before these."""
    pool, (G, width) = cache.k, segments.tokens.shape
    batch = paged_batch(segments, chunks, num_pages=pool.num_pages, page_size=pool.page_size)
    hidden, cache = forward(batch, before, cache)
    return last_valid(hidden[: G * width].reshape(G, width, -1), count), cache


def nothing_drafted(tree: Tree, advance: Advance, cache: Cache | tuple[()]) -> Proposal:
    """Returns a proposal without drafts."""
    G = advance.slot.shape[0]
    return Proposal(jnp.zeros((G, tree.size - 1), jnp.int32), jnp.zeros(G, jnp.int32), cache, None)


def draft_levels(
    tree: Tree,
    advance: Advance,
    cache: Cache,
    newest_state: jax.Array,
    forward: Forward,
    logits_of: Callable[[jax.Array], jax.Array],
    *,
    backend: str | None,
) -> Proposal:
    """Returns a drafter's proposal without its memory. The cache must have the K and V up to each sequence's newest
    token.

    newest_state [G, E] are the hidden states of the newest tokens. Each level except the last takes a pass. The pass
    runs over the one new node of a chain, or over all nodes of a tree so far. A node is written behind the newest token
    in the order of nodes, but never at `room` or past it. Drafts that need such a node do not count. `logits_of` takes
    hidden states [rows, E].
    """
    pool, G = cache.k, advance.slot.shape[0]
    sizes = {"num_pages": pool.num_pages, "page_size": pool.page_size}
    newest = newest_index(advance)
    space = jnp.where(advance.count > 0, advance.room - newest, 0)  # places from that of the newest token on

    states = jnp.zeros((G, tree.size, newest_state.shape[1]), newest_state.dtype).at[:, 0].set(newest_state)
    drafts = jnp.zeros((G, tree.size - 1), jnp.int32)
    parents = np.array((0, *tree.parents), np.int32)
    for depth, nodes in enumerate(map(np.array, tree.levels()[1:]), 1):
        above, of = np.unique(parents[nodes], return_inverse=True)
        ranks = np.array(tree.ranks)[nodes]
        row = np.repeat(np.arange(G), len(above))
        sampling: Sampling = jax.tree.map(lambda x: x[row], advance.sampling)  # noqa: B023
        logits = logits_of(states[:, above].reshape(len(row), -1))
        best = best_tokens(logits, sampling, (newest + depth)[row], 1 + int(ranks.max()), backend=backend)
        drafts = drafts.at[:, nodes - 1].set(best.reshape(G, len(above), -1)[:, of, ranks])
        inner = nodes[np.isin(nodes, tree.parents)]
        if not len(inner):
            break
        first, end = depth if tree.is_chain else 1, int(inner.max()) + 1
        segments = ShortSegments(
            tokens=drafts[:, first - 1 : end - 1],
            start=newest + first,
            used=jnp.clip(space - first, 0, end - first),
            pages=advance.pages,
            ancestors=None if tree.is_chain else jnp.stack([_ancestors(tree, end)] * G),
        )
        paged = paged_batch(segments, no_chunks(advance.pages.shape[1]), **sizes)  # type: ignore[arg-type]
        hidden, cache = forward(paged, states[:, parents[first:end]].reshape(G * (end - first), -1), cache)
        states = states.at[:, inner].set(hidden.reshape(G, end - first, -1)[:, inner - first])
    needed = np.maximum.accumulate(parents[1:])  # the last parent of the drafts up to each node
    counts = jnp.sum(needed[None] < space[:, None], axis=1, dtype=jnp.int32)
    return Proposal(drafts, counts, cache, None)


def _ancestors(tree: Tree, end: int) -> np.ndarray:
    """Returns Tree.ancestors of nodes 1 .. end - 1 in a segment of their own, where the root is committed."""
    masks = np.zeros((end - 1, words_of(end - 1)), np.uint32)
    for row, path in enumerate(tree.paths[1:end]):
        for node in path[1:]:
            masks[row, (node - 1) // WORD] |= np.uint32(1) << np.uint32((node - 1) % WORD)
    return masks
