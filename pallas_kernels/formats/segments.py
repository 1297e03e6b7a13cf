"""Describes short segments: several query rows a sequence, as a drafter asks for, in a chain or a tree."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

MOST_ROWS = 64
WORD = 32  # bits of a word of a mask of ancestors


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Segments:
    """Says which rows of R segments of Q rows are in use, and which rows of its own segment each row sees.

    If a segment's sequence has `length` keys, the last `rows` keys are the segment's own. The keys before are
    committed. Row i's key is at cache index length - rows + i, behind its ancestors' keys. Row i's position is length -
    rows plus its number of ancestors, without itself. In a chain it equals the cache index. Siblings in a tree share a
    position.
    """

    rows: jax.Array  # i32[R], 0 .. Q; the first ones are in use
    # u32[R, Q, ceil(Q / 32)], bit j % 32 of word j // 32 of row i: row j is i itself or its ancestor; None: a chain
    ancestors: jax.Array | None = None


def depths(ancestors: jax.Array) -> jax.Array:
    """Counts each row's ancestors, itself left out: u32[R, Q, words] gives i32[R, Q]."""
    bits = jnp.sum(jax.lax.population_count(ancestors).astype(jnp.int32), axis=-1, dtype=jnp.int32)
    return jnp.maximum(bits, 1) - 1


def related(ancestors: jax.Array) -> jax.Array:
    """Returns whether row j is row i or its ancestor: u32[R, Q, words] gives bool[R, Q, Q], by i and j."""
    bit = jnp.arange(WORD, dtype=jnp.uint32)[None, None, None, :]
    bits = ((ancestors[..., None] >> bit) & jnp.uint32(1)).reshape(*ancestors.shape[:2], -1)
    return bits[:, :, : ancestors.shape[1]] == 1


def within(ancestors: jax.Array, window: int) -> jax.Array:
    """Returns the masks u32[R, Q, words] without ancestors whose positions lie outside of a row's window."""
    R, Q, words = ancestors.shape
    bit = jnp.arange(WORD, dtype=jnp.uint32)[None, None, None, :]
    related = (ancestors[..., None] >> bit) & jnp.uint32(1)  # [R, Q, words, WORD]
    depth = depths(ancestors)
    of_bits = jnp.pad(depth, ((0, 0), (0, words * WORD - Q))).reshape(R, 1, words, WORD)
    held = depth[:, :, None, None] - of_bits < window
    return jnp.sum(jnp.where(held, related << bit, 0), axis=-1, dtype=jnp.uint32)


def words_of(rows: int) -> int:
    """Counts the words of a mask over `rows` rows."""
    return -(-rows // WORD)


def as_numbers(ancestors: np.ndarray) -> list[int]:
    """Returns the masks u32[Q, words] of a segment's rows as Python's integers: bit j is row j."""
    return [sum(word << WORD * i for i, word in enumerate(words)) for words in ancestors.tolist()]
