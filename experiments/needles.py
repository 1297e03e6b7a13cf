"""Draws needles as rows of tokens: pairs of a key and a value, then questions for the value of a key.

A context is BOS and n pairs, with distinct keys drawn for each context. Every pair is a needle, and all others are its
haystack. A question is a key of the context, followed by the value to be found. Tokens: 0 is BOS, then KEYS keys, then
VALUES values.
"""

import jax
import jax.numpy as jnp

KEYS, VALUES = 1024, 128
VOCAB = 1 + KEYS + VALUES


def draw(key: jax.Array, pairs: int, asked: jax.Array) -> jax.Array:
    """Returns one row of tokens i32[1 + 2 (pairs + Q)]. Its questions are for the pairs `asked` i32[Q], in this
    order."""
    of_keys, of_values = jax.random.split(key)
    keys = 1 + jax.random.permutation(of_keys, KEYS)[:pairs]
    values = 1 + KEYS + jax.random.randint(of_values, (pairs,), 0, VALUES)
    order = jnp.concatenate([jnp.arange(pairs), asked])
    tokens = jnp.stack([keys[order], values[order]], axis=1).reshape(-1)
    return jnp.concatenate([jnp.zeros(1, jnp.int32), tokens])


def questions(pairs: int, count: int) -> slice:
    """Returns the rows of the keys of `count` questions. Each one's next token is the answer."""
    return slice(1 + 2 * pairs, 1 + 2 * (pairs + count), 2)
