"""Runs sample in plain jnp: per row, without a sort, and the same whatever else is in the batch.

Each filter only raises one threshold a row, the lowest logit that may still be drawn. So ties at a threshold are all
kept and filters compose by `maximum`. Thresholds are exact. Bisection over the float's integer image finds them, one
pass over the logits a bit, rather than sorting.

A row's token is the argmax of its logits over temperature plus Gumbel noise, among those that reach the threshold. Sums
run over blocks first, then over the blocks' sums. In float32 a plain sum over a large vocabulary would lose what the
rarest tokens weigh.

Letters: R rows, V vocabulary, B tokens of a block.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.formats.numerics import compute_dtype
from pallas_kernels.sample.config import HOTTEST
from pallas_kernels.sample.noise import gumbel


class Filters(NamedTuple):
    """Holds what api.sample takes beside logits and keys, each [R]."""

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array


@jax.jit
def sample(
    logits: Array, temperature: Array, top_k: Array, top_p: Array, min_p: Array, keys: Array
) -> tuple[Array, Array]:
    """Returns tokens i32[R], finite bool[R]; see api.py. Takes logits [R, V], keys u32[R, 4], the rest [R]. What no row
    asks for is skipped at run time, for which a GPU's host has to know it."""
    filters = Filters(temperature, top_k, top_p, min_p)
    clean = clean_logits(logits)
    top = clean.max(axis=1)
    greedy = _first(clean, top)
    sampled = temperature > 0
    drawn = lax.cond(jnp.any(sampled), lambda: _draw(logits, top, filters, keys), lambda: greedy)
    return jnp.where(sampled, drawn, greedy), jnp.isfinite(logits).all(axis=1)


@jax.jit
def perturbed(logits: Array, temperature: Array, top_k: Array, top_p: Array, min_p: Array, keys: Array) -> Array:
    """Returns the scores [R, V] whose argmax is the token of sample, which takes the same arguments. Rows with a
    temperature have noise, others are logits. NaN counts as -inf, and +inf as the largest number."""
    filters = Filters(temperature, top_k, top_p, min_p)
    clean = clean_logits(logits)
    sampled = temperature > 0
    scores = lax.cond(jnp.any(sampled), lambda: _scores(logits, clean.max(axis=1), filters, keys), lambda: clean)
    return jnp.where(sampled[:, None], scores, clean)


def threshold(logits: Array, temperature: Array, top_k: Array, top_p: Array, min_p: Array) -> Array:
    """Returns the lowest logit of each row [R, V] that the filters leave to be drawn: [R]; -inf when all are off."""
    filters = Filters(temperature, top_k, top_p, min_p)
    blocks, top = _blocks(clean_logits(logits)), clean_logits(logits).max(axis=1)
    return _threshold(blocks, _weights(blocks, top, filters), top, filters, logits.shape[1])


def clean_logits(logits: Array) -> Array:
    """Replaces NaN by -inf and +inf by the largest number, so that comparisons and differences are well defined."""
    logits = logits.astype(compute_dtype(logits.dtype))
    return jnp.where(jnp.isnan(logits), -jnp.inf, jnp.minimum(logits, jnp.finfo(logits.dtype).max))


def _weights(logits: Array, top: Array, filters: Filters) -> Array:
    """Returns probabilities [R, V/B, B] in units of the row's largest, so that no temperature overflows."""
    top = jnp.where(top == -jnp.inf, 0, top)  # a row of bans: all weights 0 rather than NaN
    return jnp.exp((logits - top[:, None, None]) / clip_temperature(filters.temperature, logits.dtype)[:, None, None])


def clip_temperature(temperature: Array, dtype: jnp.dtype) -> Array:
    """Returns a temperature that logits are divided by."""
    return jnp.clip(temperature.astype(dtype), jnp.finfo(dtype).tiny, HOTTEST)


def _first(scores: Array, largest: Array) -> Array:
    """Returns the lowest token i32[R] with the largest score [R] of its row [R, V]: an argmax, but vectorized by
    XLA."""
    ids = lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    return jnp.where(scores == largest[:, None], ids, scores.shape[1]).min(axis=1)


def _draw(logits: Array, top: Array, filters: Filters, keys: Array) -> Array:
    """Returns sample's token i32[R] for rows that are not greedy, given the rows' largest logits [R]."""
    scores = _scores(logits, top, filters, keys)
    return _first(scores, scores.max(axis=1))


def _scores(logits: Array, top: Array, filters: Filters, keys: Array) -> Array:
    kept = _kept(logits, top, filters)
    return kept + gumbel(keys, logits.shape[1], kept.dtype)


def _kept(logits: Array, top: Array, filters: Filters) -> Array:
    """Returns (logit - largest) / temperature [R, V] of kept tokens, -inf of others, given the rows' largest logits
    [R]."""
    clean = clean_logits(logits)
    blocks = _blocks(clean)
    lowest = _threshold(blocks, _weights(blocks, top, filters), top, filters, logits.shape[1])
    top = jnp.where(top == -jnp.inf, 0, top)[:, None]
    return jnp.where(
        clean >= lowest[:, None], (clean - top) / clip_temperature(filters.temperature, clean.dtype)[:, None], -jnp.inf
    )


def _threshold(logits: Array, weights: Array, top: Array, filters: Filters, vocabulary: int) -> Array:
    """Returns threshold over logits and weights in blocks [R, V/B, B], given the rows' largest logits [R]."""
    off = jnp.full_like(top, -jnp.inf)
    sampled = filters.temperature > 0
    limited = sampled & (filters.top_k > 0) & (filters.top_k < vocabulary)
    nucleus = sampled & (filters.top_p < 1)

    def by_count():
        k = filters.top_k.astype(top.dtype)  # exact: V is far below 2^24
        return jnp.where(limited, _largest_reaching(logits, jnp.ones_like(logits), k, top), off)

    lowest = lax.cond(jnp.any(limited), by_count, lambda: off)

    def by_mass():
        mass = _sum(jnp.where(logits >= lowest[:, None, None], weights, 0))
        target = jnp.maximum(filters.top_p.astype(top.dtype) * mass, jnp.finfo(top.dtype).tiny)
        return jnp.where(nucleus, _largest_reaching(logits, weights, target, top), off)

    lowest = jnp.maximum(lowest, lax.cond(jnp.any(nucleus), by_mass, lambda: off))
    ratio = jnp.minimum(filters.min_p.astype(top.dtype), 1)  # p >= ratio * p_max, in logarithms
    return jnp.maximum(
        lowest, jnp.where(ratio > 0, top + clip_temperature(filters.temperature, top.dtype) * jnp.log(ratio), off)
    )


def _largest_reaching(logits: Array, weights: Array, target: Array, top: Array) -> Array:
    """Returns the largest t [R] for which the weights of logits >= t [R, V/B, B] sum up to at least target > 0; -inf if
    none. Bisects floats in their order as integers: as many passes as the dtype has bits. That trip count is known
    beforehand, so that a loop on a GPU needs no word from the host. It is exact, because sums of one order are monotone
    in the mask. It has one pivot a pass: several cost XLA's CPU backend more than the passes that they save."""

    def halve(_, bounds):
        low, high = bounds  # the weights reach the target at low (or low is -inf), and not at high
        middle = low + (high - low) // 2
        reached = _sum(jnp.where(logits >= _float(middle)[:, None, None], weights, 0)) >= target
        return jnp.where(reached, middle, low), jnp.where(reached, high, middle)

    low = _image(jnp.full_like(top, -jnp.inf))
    high = _image(top) + 1
    return _float(lax.fori_loop(0, jnp.finfo(top.dtype).bits, halve, (low, high))[0])


def _image(x: Array) -> Array:
    """Maps to unsigned integers in the order of the floats: sets the sign bit of positive numbers, flips all bits of
    others."""
    bits = lax.bitcast_convert_type(x, jnp.dtype(f"uint{jnp.finfo(x.dtype).bits}"))
    sign = bits.dtype.type(1 << (jnp.finfo(x.dtype).bits - 1))
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _float(image: Array) -> Array:
    size = jnp.iinfo(image.dtype).bits
    sign = image.dtype.type(1 << (size - 1))
    return lax.bitcast_convert_type(jnp.where(image >= sign, image ^ sign, ~image), jnp.dtype(f"float{size}"))


def _blocks(x: Array) -> Array:
    """Cuts [R, V] into blocks of about sqrt(V): [R, V/B, B], padded with -inf."""
    rows, vocabulary = x.shape
    size = 1 << round(math.log2(vocabulary) / 2)
    x = jnp.pad(x, ((0, 0), (0, -vocabulary % size)), constant_values=-jnp.inf)
    return x.reshape(rows, -1, size)


def _sum(x: Array) -> Array:
    """Sums [R, V/B, B] to [R], blocks upon each other first: that is the order which vectorizes."""
    return x.sum(axis=1).sum(axis=1)
