"""Sampling on the device: per row, without a sort, and the same whatever else is in the batch.

Order: penalties, bias, temperature, top-k, top-p, min-p. Each filter only raises one threshold a row, the lowest logit
that may still be drawn, so ties at a threshold are all kept and filters compose by `maximum`. Thresholds are exact:
they are found by bisection over the float's integer image, one pass over the logits a bit, rather than by sorting.

A row is drawn from one uniform number by the inverse of the distribution function in token order. Sums run over blocks
first, then over the blocks' sums: in float32 a plain running sum over 128k entries would lose what the rarest tokens
weigh, and one block is all that must be read again once it is chosen.

Letters: R rows (one token to be sampled each), V vocabulary, S slots, T tokens, X bias entries a row.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.numerics import compute_dtype


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowParams:
    """How to sample each row. A row that is only padding may hold anything, zeros included."""

    temperature: Array  # f[R]; 0 is greedy
    top_k: Array  # i32[R]; 0 is off
    top_p: Array  # f[R]; 1 is off
    min_p: Array  # f[R]; 0 is off
    seed: Array  # u32[R]; of the request
    sample: Array  # i32[R]; which of the request's n samples


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Penalties:
    """What changes logits before sampling. Bias ids lie in [0, V) and are distinct within a row; -1 pads."""

    repetition: Array  # f[R]; 1 is off
    presence: Array  # f[R]; 0 is off
    frequency: Array  # f[R]; 0 is off
    seen: Array  # bool[R, V]; the token occurs in the prompt or the output
    counts: Array  # i32[R, V]; occurrences in the output
    bias_ids: Array  # i32[R, X]
    bias_values: Array  # f[R, X]; -inf bans


def penalize(logits: Array, penalties: Penalties | None) -> Array:
    """Penalties, then bias: [R, V] -> [R, V] in the compute dtype; None (nobody asked) changes nothing.

    Repetition divides positive and multiplies other logits of seen tokens (Keskar et al. 2019, as Hugging Face has
    it); presence and frequency subtract for tokens of the output (as OpenAI's API has it).
    """
    if penalties is None:
        return logits
    logits = logits.astype(compute_dtype(logits.dtype))
    repetition, presence, frequency, bias = (
        x.astype(logits.dtype)
        for x in (penalties.repetition, penalties.presence, penalties.frequency, penalties.bias_values)
    )
    repeated = jnp.where(logits > 0, logits / repetition[:, None], logits * repetition[:, None])
    logits = jnp.where(penalties.seen, repeated, logits)
    counts = penalties.counts.astype(logits.dtype)
    logits -= counts * frequency[:, None] + (counts > 0).astype(logits.dtype) * presence[:, None]
    ids = jnp.where(penalties.bias_ids < 0, logits.shape[1], penalties.bias_ids)  # a negative index would wrap around
    return logits.at[jnp.arange(logits.shape[0])[:, None], ids].add(bias, mode="drop")


def count_tokens(seen: Array, counts: Array, slot: Array, tokens: Array, is_output: Array) -> tuple[Array, Array]:
    """Enters tokens i32[T] of slots i32[T] into seen bool[S, V] and, where is_output bool[T], into counts i32[S, V].

    A slot >= S drops its token; a token may come several times.
    """
    seen = seen.at[slot, tokens].set(True, mode="drop")
    counts = counts.at[slot, tokens].add(is_output.astype(counts.dtype), mode="drop")
    return seen, counts


def sample(logits: Array, params: RowParams, position: Array) -> Array:
    """One token a row: logits [R, V] (penalized), position i32[R] (absolute, of the new token) -> i32[R].

    Greedy rows take the most likely token, at ties the lowest id. A row's token depends on its logits, params and
    position alone. Banned tokens (-inf) and NaN are never drawn unless a whole row is: then the token is 0. What no
    row asks for is skipped at run time.
    """
    clean = _clean(logits)
    ids = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    top = clean.max(axis=1)
    greedy = jnp.where(clean == top[:, None], ids, logits.shape[1]).min(axis=1)  # an argmax, but vectorized by XLA
    sampled = params.temperature > 0
    drawn = lax.cond(jnp.any(sampled), lambda: _draw(logits, top, params, position), lambda: greedy)
    return jnp.where(sampled, drawn, greedy)


def threshold(logits: Array, params: RowParams) -> Array:
    """The lowest logit of each row [R, V] that top-k, top-p and min-p leave to be drawn -> [R]; -inf when all are off.

    top-k keeps what reaches the k-th largest logit; top-p the smallest set of the most likely tokens whose
    probability, renormalized after top-k, reaches p; min-p what is at least min_p times as likely as the most likely
    token. Ties are kept together, and the most likely token always.
    """
    blocks, top = _blocks(_clean(logits)), _clean(logits).max(axis=1)
    return _threshold(blocks, _weights(blocks, top, params), top, params, logits.shape[1])


def token_logprobs(logits: Array, tokens: Array) -> Array:
    """Log-softmax of raw logits [R, V] at tokens i32[R] -> [R] in the compute dtype; no [R, V] softmax is kept."""
    logits = logits.astype(compute_dtype(logits.dtype))
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1, mode="clip")[:, 0]
    return chosen - jax.nn.logsumexp(logits, axis=1)


def token_ranks(logits: Array, tokens: Array) -> Array:
    """Where tokens i32[R] stand among raw logits [R, V]: 1 for the most likely, which ties share -> i32[R]."""
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1, mode="clip")
    return 1 + jnp.sum(logits > chosen, axis=1, dtype=jnp.int32)


def top_logprobs(logits: Array, n: int) -> tuple[Array, Array]:
    """The n most likely tokens of raw logits [R, V], best first -> ids i32[R, n], log-probabilities [R, n]."""
    logits = logits.astype(compute_dtype(logits.dtype))
    values, ids = lax.top_k(logits, n)
    return ids, values - jax.nn.logsumexp(logits, axis=1)[:, None]


def sample_reference(logits: Array, params: RowParams, position: Array) -> Array:
    """`sample` as one would first write it, by sorting each row: the reference in tests and a baseline for speed."""
    dtype, vocabulary = compute_dtype(logits.dtype), logits.shape[1]
    logits = logits.astype(dtype)
    temperature = jnp.where(params.temperature > 0, params.temperature, 1).astype(dtype)[:, None]
    probability = jax.nn.softmax(logits / temperature, axis=1)
    order = jnp.argsort(-logits, axis=1, stable=True)
    by_rank = jnp.take_along_axis(logits, order, axis=1)

    k = jnp.where(params.top_k > 0, jnp.minimum(params.top_k, vocabulary), vocabulary)
    kept = by_rank >= jnp.take_along_axis(by_rank, k[:, None] - 1, axis=1)
    mass = jnp.where(kept, jnp.take_along_axis(probability, order, axis=1), 0)
    mass /= mass.sum(axis=1, keepdims=True)
    more_likely = jnp.cumsum(mass, axis=1) - mass
    kept &= (more_likely < params.top_p.astype(dtype)[:, None]) | (params.top_p >= 1)[:, None]
    lowest = jnp.take_along_axis(by_rank, kept.sum(axis=1, keepdims=True) - 1, axis=1)
    likely = probability >= params.min_p.astype(dtype)[:, None] * probability.max(axis=1, keepdims=True)

    cdf = jnp.cumsum(jnp.where((logits >= lowest) & likely, probability, 0), axis=1)
    target = _uniform(params, position, dtype)[:, None] * cdf[:, -1:]
    drawn = jnp.argmax(cdf > target, axis=1)
    return jnp.where(params.temperature > 0, drawn, jnp.argmax(logits, axis=1)).astype(jnp.int32)


def _clean(logits: Array) -> Array:
    """NaN becomes -inf and +inf the largest number, so that comparisons and differences are well defined."""
    logits = logits.astype(compute_dtype(logits.dtype))
    return jnp.where(jnp.isnan(logits), -jnp.inf, jnp.minimum(logits, jnp.finfo(logits.dtype).max))


def _weights(logits: Array, top: Array, params: RowParams) -> Array:
    """Probabilities [R, V/B, B] in units of the row's largest, so that no temperature overflows."""
    top = jnp.where(top == -jnp.inf, 0, top)  # a row of bans: all weights 0 rather than NaN
    return jnp.exp((logits - top[:, None, None]) / _temperature(params, logits.dtype)[:, None, None])


def _temperature(params: RowParams, dtype: jnp.dtype) -> Array:
    return jnp.maximum(params.temperature.astype(dtype), jnp.finfo(dtype).tiny)


def _draw(logits: Array, top: Array, params: RowParams, position: Array) -> Array:
    """sample's token i32[R] for rows that are not greedy, given the rows' largest logits [R]."""
    vocabulary = logits.shape[1]
    logits = _blocks(_clean(logits))  # [R, V/B, B]
    weights = _weights(logits, top, params)
    lowest = _threshold(logits, weights, top, params, vocabulary)
    kept = jnp.where(logits >= lowest[:, None, None], weights, 0)
    sums = kept.sum(axis=2)
    block, rest = _inverse_cdf(sums, _uniform(params, position, kept.dtype) * sums.sum(axis=1))
    inside, _ = _inverse_cdf(jnp.take_along_axis(kept, block[:, None, None], axis=1)[:, 0], rest)
    return jnp.minimum(block * kept.shape[2] + inside, vocabulary - 1)


def _threshold(logits: Array, weights: Array, top: Array, params: RowParams, vocabulary: int) -> Array:
    """threshold over logits and weights in blocks [R, V/B, B], given the rows' largest logits [R]."""
    off = jnp.full_like(top, -jnp.inf)
    sampled = params.temperature > 0
    limited = sampled & (params.top_k > 0) & (params.top_k < vocabulary)
    nucleus = sampled & (params.top_p < 1)

    def by_count():
        k = params.top_k.astype(top.dtype)  # exact: V is far below 2^24
        return jnp.where(limited, _largest_reaching(logits, jnp.ones_like(logits), k, top), off)

    lowest = lax.cond(jnp.any(limited), by_count, lambda: off)

    def by_mass():
        mass = _sum(jnp.where(logits >= lowest[:, None, None], weights, 0))
        target = jnp.maximum(params.top_p.astype(top.dtype) * mass, jnp.finfo(top.dtype).tiny)
        return jnp.where(nucleus, _largest_reaching(logits, weights, target, top), off)

    lowest = jnp.maximum(lowest, lax.cond(jnp.any(nucleus), by_mass, lambda: off))
    ratio = params.min_p.astype(top.dtype)  # p >= ratio * p_max, in logarithms
    return jnp.maximum(lowest, jnp.where(ratio > 0, top + _temperature(params, top.dtype) * jnp.log(ratio), off))


def _largest_reaching(logits: Array, weights: Array, target: Array, top: Array) -> Array:
    """The largest t [R] for which the weights of logits >= t [R, V/B, B] sum up to at least target > 0; -inf if none.

    Bisects floats in their order as integers: as many passes as the dtype has bits, a trip count known beforehand (a
    loop on a GPU then needs no word from the host), and exact, because sums of one order are monotone in the mask.
    One pivot a pass: several cost XLA's CPU backend more than the passes that they save.
    """

    def halve(_, bounds):
        low, high = bounds  # the weights reach the target at low (or low is -inf), and not at high
        middle = low + (high - low) // 2
        reached = _sum(jnp.where(logits >= _float(middle)[:, None, None], weights, 0)) >= target
        return jnp.where(reached, middle, low), jnp.where(reached, high, middle)

    low = _image(jnp.full_like(top, -jnp.inf))
    high = _image(top) + 1
    return _float(lax.fori_loop(0, jnp.finfo(top.dtype).bits, halve, (low, high))[0])


def _image(x: Array) -> Array:
    """Unsigned integers in the order of the floats: set the sign bit of positive numbers, flip all bits of others."""
    bits = lax.bitcast_convert_type(x, jnp.dtype(f"uint{jnp.finfo(x.dtype).bits}"))
    sign = bits.dtype.type(1 << (jnp.finfo(x.dtype).bits - 1))
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _float(image: Array) -> Array:
    """The inverse of _image."""
    size = jnp.iinfo(image.dtype).bits
    sign = image.dtype.type(1 << (size - 1))
    return lax.bitcast_convert_type(jnp.where(image >= sign, image ^ sign, ~image), jnp.dtype(f"float{size}"))


def _blocks(x: Array) -> Array:
    """[R, V] in blocks of about sqrt(V): [R, V/B, B], padded with -inf."""
    rows, vocabulary = x.shape
    size = 1 << round(math.log2(vocabulary) / 2)
    x = jnp.pad(x, ((0, 0), (0, -vocabulary % size)), constant_values=-jnp.inf)
    return x.reshape(rows, -1, size)


def _sum(x: Array) -> Array:
    """[R, V/B, B] -> [R], blocks upon each other first: that is the order which vectorizes."""
    return x.sum(axis=1).sum(axis=1)


def _uniform(params: RowParams, position: Array, dtype: jnp.dtype) -> Array:
    """One number in [0, 1) a row, from (seed, sample, position) alone."""

    def draw(seed, index, position):
        key = jax.random.key(seed, impl="threefry2x32")
        return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, index), position), (), dtype)

    return jax.vmap(draw)(params.seed, params.sample, position)


def _inverse_cdf(weights: Array, target: Array) -> tuple[Array, Array]:
    """First index at which the running sum of weights [R, N] exceeds target [R] -> index, target less what is below it.

    An index without weight is never chosen while there is another one, however sums are rounded: a target beyond the
    last sum falls to the last index that has weight.
    """
    cdf = jnp.cumsum(weights, axis=1)
    index = lax.broadcasted_iota(jnp.int32, weights.shape, 1)
    rank = jnp.where(cdf > target[:, None], weights.shape[1], index)  # argmax takes the first of equals
    index = jnp.argmax(jnp.where(weights > 0, rank, -1), axis=1).astype(jnp.int32)
    below = jnp.take_along_axis(cdf - weights, index[:, None], axis=1)[:, 0]
    return index, target - below
