"""Sampling on the device: per row, without a sort, and the same whatever else is in the batch.

Order: penalties, bias, temperature, top-k, top-p, min-p. From temperature on, pallas_kernels.sample does it, given one
uniform number a row.

Letters: R rows (one token to be sampled each), V vocabulary, S slots, T tokens, X bias entries a row.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import sample as kernels
from pallas_kernels.numerics import compute_dtype
from pallas_kernels.sample import xla


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


def sample(logits: Array, params: RowParams, position: Array, *, backend: str | None = None) -> Array:
    """One token a row: logits [R, V] (penalized), position i32[R] (absolute, of the new token) -> i32[R].

    Greedy rows take the most likely token, at ties the lowest id. A row's token depends on its logits, params and
    position alone. Banned tokens (-inf) and NaN are never drawn unless a whole row is: then the token is 0. What no
    row asks for is skipped at run time. `backend` is that of pallas_kernels.sample.
    """
    return sample_checked(logits, params, position, backend=backend)[0]


def sample_checked(
    logits: Array, params: RowParams, position: Array, *, backend: str | None = None
) -> tuple[Array, Array]:
    """`sample`'s tokens, and whether all of a row's logits are finite, bool[R], which the same pass tells."""
    uniform = _uniform(params, position, compute_dtype(logits.dtype))
    filters = params.temperature, params.top_k, params.top_p, params.min_p
    return kernels.sample(logits, *filters, uniform, backend=backend)


def threshold(logits: Array, params: RowParams) -> Array:
    """The lowest logit of each row [R, V] that top-k, top-p and min-p leave to be drawn -> [R]; -inf when all are off.

    top-k keeps what reaches the k-th largest logit; top-p the smallest set of the most likely tokens whose
    probability, renormalized after top-k, reaches p; min-p what is at least min_p times as likely as the most likely
    token. Ties are kept together, and the most likely token always.
    """
    return xla.threshold(logits, params.temperature, params.top_k, params.top_p, params.min_p)


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


def _uniform(params: RowParams, position: Array, dtype: jnp.dtype) -> Array:
    """One number in [0, 1) a row, from (seed, sample, position) alone."""

    def draw(seed, index, position):
        key = jax.random.key(seed, impl="threefry2x32")
        return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, index), position), (), dtype)

    return jax.vmap(draw)(params.seed, params.sample, position)
