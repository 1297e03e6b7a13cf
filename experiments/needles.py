"""Needles: pairs of a key and a value, and questions for the value of a key, as rows of tokens.

A context is BOS and n pairs, whose keys are distinct and drawn anew for each context; every pair is a needle, and all
others are its haystack. Questions follow: a key of the context, and after it the value, which is what has to be found.
Tokens: 0 is BOS, then KEYS keys, then VALUES values.
"""

import jax
import jax.numpy as jnp

KEYS, VALUES = 1024, 128
VOCAB = 1 + KEYS + VALUES


def draw(key: jax.Array, pairs: int, asked: jax.Array) -> jax.Array:
    """Returns one row of tokens i32[1 + 2 (pairs + Q)], whose questions are for the pairs `asked` i32[Q], in this
    order."""
    of_keys, of_values = jax.random.split(key)
    keys = 1 + jax.random.permutation(of_keys, KEYS)[:pairs]
    values = 1 + KEYS + jax.random.randint(of_values, (pairs,), 0, VALUES)
    order = jnp.concatenate([jnp.arange(pairs), asked])
    tokens = jnp.stack([keys[order], values[order]], axis=1).reshape(-1)
    return jnp.concatenate([jnp.zeros(1, jnp.int32), tokens])


def questions(pairs: int, count: int) -> slice:
    """Returns the rows of the keys of `count` questions: each one's next token is the answer."""
    return slice(1 + 2 * pairs, 1 + 2 * (pairs + count), 2)
