"""Samples without filters from rows that are sharded over a mesh: to the bit what xla.py draws of whole rows.

Each device finds the best of its part. It tells the others its value and its id: 8 bytes a row, 12 in float64. Noise
follows from a token's id in the whole vocabulary. Scores are relative to the row's largest logit, which all devices
have to know first. So rows with a temperature take a second exchange.
"""

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.sample.noise import gumbel
from pallas_kernels.sample.xla import clean_logits, clip_temperature


def sample_parts(
    logits: Array, temperature: Array, keys: Array, *, axis: str, vocabulary: int, noise: bool = True
) -> tuple[Array, Array]:
    """Returns tokens i32[R] and finite bool[R] of whole rows, alike on all devices. Takes logits [R, W] of device i of
    a mesh axis: columns i W to (i + 1) W - 1 of [R, V]; those from V on are anything. Takes temperature [R] and keys
    u32[R, 4]. Without noise no row has a temperature."""
    W = logits.shape[1]
    first = lax.axis_index(axis) * W
    ids = first + lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    own = ids < vocabulary
    clean = jnp.where(own, clean_logits(logits), -jnp.inf)
    finite = (jnp.isfinite(logits) | ~own).all(axis=1)
    top, greedy, finite = _best(clean, ids, finite, axis)
    if not noise:
        return greedy, finite
    top = jnp.where(top == -jnp.inf, 0, top)[:, None]
    scores = (clean - top) / clip_temperature(temperature, clean.dtype)[:, None] + gumbel(keys, W, clean.dtype, first)
    _, drawn, _ = _best(scores, ids, finite, axis)
    return jnp.where(temperature > 0, drawn, greedy), finite


def _best(scores: Array, ids: Array, finite: Array, axis: str) -> tuple[Array, Array, Array]:
    """Returns the largest of whole rows [R], the lowest id i32[R] that has it, and whether all devices say finite,
    bool[R]. Takes one device's scores and ids [R, W]. There is one exchange, of integers: the value's bits, and the id
    with the flag."""
    largest = scores.max(axis=1)
    most = jnp.iinfo(jnp.int32).max
    id = jnp.where(scores == largest[:, None], ids, most).min(axis=1)
    bits = lax.bitcast_convert_type(largest, jnp.int32).reshape(len(largest), -1)
    told = jnp.concatenate([bits, (2 * id + finite.astype(jnp.int32))[:, None]], axis=1)
    every = lax.all_gather(told, axis)  # [devices, R, words]
    words = every[..., 0] if bits.shape[1] == 1 else every[..., :-1]
    values, last = lax.bitcast_convert_type(words, scores.dtype), every[..., -1]
    largest = values.max(axis=0)
    return largest, jnp.where(values == largest[None], last // 2, most).min(axis=0), (last % 2 == 1).all(axis=0)
