"""Makes Gumbel noise from a counter: a token's noise depends on its row's keys and its id alone.

So it is the same in any batch, on any shard of the vocabulary, and for any model with the same keys. The generator is
Philox4x32-10 (Salmon et al. 2011). A row's keys are (seed, sample, index, purpose). Seed and sample are Philox's key;
token id // 4, index, purpose and 0 its counter. Token id % 4 chooses among the four words that these give.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

KEYS = 4  # words of a row: seed, sample, index, purpose
WORDS = 4  # tokens that share a counter
ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
BUMPS = (0x9E3779B9, 0xBB67AE85)  # of the key, from round to round


def gumbel(keys: Array, size: int, dtype: DTypeLike, first: int | Array = 0) -> Array:
    """Returns the noise of tokens first .. first + size - 1 for rows of keys u32[R, 4]: [R, size] of a float dtype.
    With b a token's 32 bits and v = (b + 1/2) / 2^32, E = -log(1 - v) is exponential and -log(E) is Gumbel noise. The
    smaller of v and 1 - v is made from integers, so that E's relative error is rounding at either end. The winners
    among many tokens have an E near 0."""
    counters = -(-(size + WORDS - 1) // WORDS)  # the first of them may be begun
    random = lax.dynamic_slice_in_dim(bits(keys, counters, first // WORDS), first % WORDS, size, axis=1)
    upper = random >> 31 == 1
    smaller = jnp.where(upper, ~random, random).astype(dtype) * 2.0**-32 + 2.0**-33
    return -jnp.log(jnp.where(upper, -jnp.log(smaller), -jnp.log1p(-smaller)))


def bits(keys: Array, counters: int, first: int | Array = 0) -> Array:
    """Returns the words of `counters` successive counters for rows of keys u32[R, 4]: u32[R, 4 * counters], by
    token."""
    seed, sample, index, purpose = (keys[:, i, None] for i in range(KEYS))
    quad = jnp.asarray(first, jnp.uint32) + lax.broadcasted_iota(jnp.uint32, (1, counters), 1)
    words = philox((quad, index, purpose, jnp.zeros_like(index)), (seed, sample))
    return jnp.stack(words, axis=2).reshape(keys.shape[0], WORDS * counters)


def philox(counter: Sequence[Array], key: Sequence[Array]) -> list[Array]:
    """Returns Philox4x32-10 of four words and two, u32 that broadcast against each other: four words."""
    a, b, c, d = counter
    first, second = key
    for number in range(ROUNDS):
        if number:
            first, second = first + jnp.uint32(BUMPS[0]), second + jnp.uint32(BUMPS[1])
        (high, low), (high_2, low_2) = (_product(x, m) for x, m in zip((a, c), MULTIPLIERS))
        a, b, c, d = high_2 ^ b ^ first, low_2, high ^ d ^ second, low
    return [a, b, c, d]


def _product(x: Array, multiplier: int) -> tuple[Array, Array]:
    """Returns the high and the low word of x times a constant."""
    factor = jnp.full_like(x, multiplier)
    if jax.sharding.get_abstract_mesh().manual_axes:  # JAX 0.11.2 cannot lower mulhi for several devices
        return _high(x, factor), x * factor
    return lax.mulhi(x, factor), x * factor


def _high(x: Array, y: Array) -> Array:
    """Returns the high word of the product of two, from their halves."""
    low, half = jnp.uint32(0xFFFF), jnp.uint32(16)
    (a, b), (c, d) = ((z >> half, z & low) for z in (x, y))
    middle = a * d + ((b * d) >> half)
    return a * c + (middle >> half) + ((b * c + (middle & low)) >> half)
