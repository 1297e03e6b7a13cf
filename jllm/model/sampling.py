"""Samples tokens on the device: per row, without a sort, and batch-invariant.

The order is penalties, bias, temperature, top-k, top-p, min-p. From temperature on, pallas_kernels.sample does the
work, with noise keyed by a row's seed, sample and position.

Letters: R rows (one token is sampled for each), V vocabulary, S slots, T tokens, X bias entries of a row.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jllm.model.shapes import AnyArray, Array, Bool, Float, Int32, UInt32, shaped
from pallas_kernels import one_order
from pallas_kernels import sample as kernels
from pallas_kernels.backends import DETERMINISTIC, on_hopper
from pallas_kernels.formats.numerics import compute_dtype
from pallas_kernels.sample import xla
from pallas_kernels.sample.noise import gumbel

STOP_IDS = 8  # end tokens and stop ids that the device checks; the host checks the rest one step later


class Draws(enum.IntEnum):
    """Names the most general draw among a step's rows, in order of cost."""

    GREEDY = 0  # no row has a temperature
    NOISE = 1  # no row has top-k, top-p or min-p
    FILTERED = 2


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Penalties:
    """Holds the parameters that change logits before a draw. Bias ids lie in [0, V) and are distinct within a row; -1
    pads."""

    repetition_penalty: AnyArray  # f32[R]; 1 is off
    presence_penalty: AnyArray  # f32[R]; 0 is off
    frequency_penalty: AnyArray  # f32[R]; 0 is off
    bias_ids: AnyArray  # i32[R, X]
    bias_values: AnyArray  # f32[R, X]; -inf bans


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampling:
    """Holds the parameters that decide how a sequence's tokens are drawn and when it ends.

    One struct serves slots (one row each), batches and the rows that a step samples. In a batch it has one row for each
    prompt chunk, as numpy views on the host. Fields that users set have the names of engine.request.SamplingParams.
    Padding rows may hold anything, zeros included.
    """

    temperature: AnyArray  # f32[R]; 0 is greedy
    top_k: AnyArray  # i32[R]; 0 is off
    top_p: AnyArray  # f32[R]; 1 is off
    min_p: AnyArray  # f32[R]; 0 is off
    seed: AnyArray  # u32[R]; the request's
    sample: AnyArray  # i32[R]; the index of the sample within its request
    stop_ids: AnyArray  # i32[R, STOP_IDS], -1 pads; tokens that end the sequence
    max_length: AnyArray  # i32[R]; prompt and output tokens at which the sequence ends
    penalties: Penalties | None = None
    adapter: AnyArray | None = None  # i32[R], the sequence's place among the params' adapters; -1: none


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenCounts:
    """Holds the tokens that occurred, for penalties. Slots have [S, V]; rows gather [R, V]."""

    seen: Array  # bool[S, V]; the token occurs in the prompt or the output
    counts: Array  # i32[S, V]; occurrences in the output


def neutral_sampling(rows: int, bias: int = 0, adapters: bool = False) -> Sampling:
    """Returns parameters that change nothing: greedy, without end, in numpy. `bias` is X; 0 leaves the penalties
    out. `adapters` is whether the params have some."""

    def ints(value: int, *shape: int) -> np.ndarray:
        return np.full((rows, *shape), value, np.int32)

    def floats(value: float, *shape: int) -> np.ndarray:
        return np.full((rows, *shape), value, np.float32)

    penalties = Penalties(floats(1), floats(0), floats(0), ints(-1, bias), floats(0, bias)) if bias else None
    return Sampling(
        temperature=floats(0),
        top_k=ints(0),
        top_p=floats(1),
        min_p=floats(0),
        seed=np.zeros(rows, np.uint32),
        sample=ints(0),
        stop_ids=ints(-1, STOP_IDS),
        max_length=ints(0),
        penalties=penalties,
        adapter=ints(-1) if adapters else None,
    )


def write_row(sampling: Sampling, row: int, values: Mapping[str, Any]) -> None:
    """Writes values by name of their field into one row of numpy arrays. stop_ids, bias_ids and bias_values take as
    many values as there are. Where the struct has no penalties or adapters, the values must be neutral."""
    structs = (sampling,) if sampling.penalties is None else (sampling, sampling.penalties)
    for struct in structs:
        for each in fields(struct):
            if each.name in values and getattr(struct, each.name) is not None:
                array, value = getattr(struct, each.name), values[each.name]
                if array.ndim == 1:
                    array[row] = value
                else:
                    array[row, : len(value)] = value


def make_counts(slots: int, vocab: int) -> TokenCounts:
    """Returns counts in which no token has occurred, for S slots and V tokens."""
    return TokenCounts(jnp.zeros((slots, vocab), bool), jnp.zeros((slots, vocab), jnp.int32))


@shaped
def constrain(logits: Float[Array, "R V"], allowed: UInt32[Array, "R words"]) -> Float[Array, "R V"]:
    """Returns logits with -inf for tokens that are not allowed. Token i is bit i % 32 of word i // 32."""
    bits = (allowed[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)[None, None, :]) & 1
    return jnp.where(bits.reshape(logits.shape[0], -1)[:, : logits.shape[1]] == 1, logits, -jnp.inf)


@shaped
def penalize(
    logits: Float[Array, "R V"],
    penalties: Penalties | None,
    counts: TokenCounts | None,
    drafts: Int32[Array, "R D"] | None = None,
) -> Float[Array, "R V"]:
    """Returns logits after penalties, then bias, in the compute dtype. None changes nothing.

    Repetition divides positive logits of seen tokens and multiplies other ones (Keskar et al. 2019, as in Hugging
    Face). Presence and frequency subtract from logits of the output's tokens (as in OpenAI's API). `drafts` are output
    tokens before each row that `counts` do not include; -1 pads.
    """
    if penalties is None or counts is None:
        return logits
    logits = logits.astype(compute_dtype(logits.dtype))
    row = jnp.arange(logits.shape[0])[:, None]
    penalized = _penalized(logits, counts.seen, counts.counts, penalties)
    if drafts is not None:
        ids = jnp.maximum(drafts, 0)
        more = jnp.sum(drafts[:, :, None] == drafts[:, None, :], axis=2, dtype=counts.counts.dtype)
        again = _penalized(logits[row, ids], jnp.ones_like(ids, bool), counts.counts[row, ids] + more, penalties)
        penalized = penalized.at[row, _or_none(drafts, logits)].set(again, mode="drop")
    bias = penalties.bias_values.astype(logits.dtype)
    return penalized.at[row, _or_none(penalties.bias_ids, logits)].add(bias, mode="drop")


def _or_none(ids: Array, logits: Array) -> Array:
    """Returns ids out of range where they are negative, since a negative index would wrap around."""
    return jnp.where(ids < 0, logits.shape[1], ids)


def _penalized(logits: Array, seen: Array, output: Array, penalties: Penalties) -> Array:
    """Returns penalized logits [R, n] of tokens: `seen` is bool[R, n], and `output` i32[R, n] their occurrences in the
    output."""
    repetition, presence, frequency = (
        x.astype(logits.dtype)[:, None]
        for x in (penalties.repetition_penalty, penalties.presence_penalty, penalties.frequency_penalty)
    )
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    times = output.astype(logits.dtype)
    return jnp.where(seen, repeated, logits) - (times * frequency + (times > 0).astype(logits.dtype) * presence)


@shaped
def count_tokens(
    counts: TokenCounts, slot: Int32[Array, " T"], tokens: Int32[Array, " T"], is_output: Bool[Array, " T"]
) -> TokenCounts:
    """Returns counts with the tokens of slots added: as seen and, where is_output, as output.

    A slot >= S drops its token. A token may come several times.
    """
    seen = counts.seen.at[slot, tokens].set(True, mode="drop")
    output = counts.counts.at[slot, tokens].add(is_output.astype(counts.counts.dtype), mode="drop")
    return TokenCounts(seen, output)


@shaped
def sample(
    logits: Float[Array, "R V"], params: Sampling, position: Int32[Array, " R"], *, backend: str | None = None
) -> tuple[Int32[Array, " R"], Bool[Array, " R"]]:
    """Returns one token for each row, and whether all of the row's logits are finite. Both take one pass.

    Logits are penalized. `position` is the new token's index in its sequence. Greedy rows take the most likely token,
    at ties the lowest id. A row's token depends on its logits, params and position alone. Banned tokens (-inf) and NaN
    are never drawn. If a whole row is banned or NaN, the token is 0. Filters that no row uses are skipped at run time.
    `backend` is that of pallas_kernels.sample.
    """
    return kernels.sample(logits, *_asked(logits, params), _keys(params, position), backend=backend)


@shaped
def sample_parts(
    logits: Float[Array, "R W"],
    params: Sampling,
    position: Int32[Array, " R"],
    *,
    axis: str,
    vocabulary: int,
    draws: Draws,
) -> tuple[Int32[Array, " R"], Bool[Array, " R"]]:
    """Returns the result of `sample` by xla bitwise, where the devices of a mesh axis share the vocabulary. Device i
    has W columns of the logits [R, V], from i W on. No row has filters: `draws` is GREEDY or NOISE. `vocabulary` is V;
    columns past it may hold anything. All devices get tokens and flags of whole rows."""
    options: dict[str, Any] = {"axis": axis, "vocabulary": vocabulary, "noise": draws > Draws.GREEDY}
    return kernels.sample_parts(logits, _asked(logits, params)[0], _keys(params, position), **options)


@shaped
def perturbed(logits: Float[Array, "R V"], params: Sampling, position: Int32[Array, " R"]) -> Float[Array, "R V"]:
    """Returns the scores of which `sample` takes the largest, in the compute dtype. A drafter's tree holds the best
    few.

    With a temperature T the scores are (logit - the row's largest) / T + noise. They are -inf for tokens that top-k,
    top-p or min-p drop. Without a temperature they are the logits, with NaN as -inf and +inf as the largest number. If
    two scores are within rounding of each other, another backend of `sample` may take either.
    """
    return xla.perturbed(logits, *_asked(logits, params), _keys(params, position))


@shaped
def threshold(logits: Float[Array, "R V"], params: Sampling) -> Float[Array, " R"]:
    """Returns the lowest logit of each row that top-k, top-p and min-p keep. It is -inf when all are off.

    top-k keeps logits that reach the k-th largest. top-p keeps the smallest set of the most likely tokens whose
    probability, renormalized after top-k, reaches p. min-p keeps tokens that are at least min_p times as likely as the
    most likely one. Ties are kept together. The most likely token is always kept.
    """
    return xla.threshold(logits, params.temperature, params.top_k, params.top_p, params.min_p)


@shaped
def token_logprobs(
    logits: Float[Array, "R V"], tokens: Int32[Array, " R"], *, backend: str | None = None
) -> Float[Array, " R"]:
    """Returns log-softmax of raw logits at tokens, in the compute dtype, without a [R, V] softmax."""
    logits = logits.astype(compute_dtype(logits.dtype))
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1, mode="clip")[:, 0]
    return chosen - _log_sum_exp(logits, backend)


@shaped
def token_entropies(logits: Float[Array, "R V"]) -> Float[Array, " R"]:
    """Returns the entropy of softmax of each row, in the compute dtype."""
    logp = jax.nn.log_softmax(logits.astype(compute_dtype(logits.dtype)), axis=1)
    p = jnp.exp(logp)
    return -jnp.sum(jnp.where(p > 0, p * logp, 0), axis=1)


@shaped
def tempered_logprobs(
    logits: Float[Array, "R V"],
    tokens: Int32[Array, " R"],
    top: Int32[Array, "R N"],
    temperature: Float[Array, " R"],
    *,
    backend: str | None = None,
) -> tuple[Float[Array, " R"], Float[Array, "R N"]]:
    """Returns log-softmax of logits / temperature at tokens, and at the most likely tokens `top`, in the compute dtype.
    A row whose temperature is 0 has it of raw logits."""
    logits = logits.astype(compute_dtype(logits.dtype))
    logits /= jnp.where(temperature > 0, temperature, 1).astype(logits.dtype)[:, None]
    values = jnp.take_along_axis(logits, top, axis=1, mode="clip")
    total = _log_sum_exp(logits, backend)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1, mode="clip")[:, 0]
    return chosen - total, values - total[:, None]


@shaped
def token_ranks(logits: Float[Array, "R V"], tokens: Int32[Array, " R"]) -> Int32[Array, " R"]:
    """Returns the tokens' ranks among raw logits. The most likely token has rank 1, and ties share a rank."""
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1, mode="clip")
    return 1 + jnp.sum(logits > chosen, axis=1, dtype=jnp.int32)


@shaped
def top_logprobs(
    logits: Float[Array, "R V"], n: int, *, backend: str | None = None
) -> tuple[Int32[Array, "R {n}"], Float[Array, "R {n}"]]:
    """Returns the n most likely tokens of raw logits, best first, and their log-probabilities."""
    logits = logits.astype(compute_dtype(logits.dtype))
    values, ids = lax.top_k(logits, n)
    return ids, values - _log_sum_exp(logits, backend)[:, None]


def _log_sum_exp(logits: Array, backend: str | None) -> Array:
    """Returns log(sum(exp(logits))) [R]. On a CPU `one_order.fenced` gives a deterministic backend its one order."""
    one = backend == DETERMINISTIC and on_hopper()
    return one_order.log_sum_exp(logits) if one else jax.nn.logsumexp(logits, axis=1)


@shaped
def sample_reference(logits: Float[Array, "R V"], params: Sampling, position: Int32[Array, " R"]) -> Int32[Array, " R"]:
    """Returns the tokens of `sample`, by sorting each row: the reference in tests and a baseline for speed."""
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

    scores = logits / temperature + gumbel(_keys(params, position), vocabulary, dtype)
    drawn = jnp.argmax(jnp.where((logits >= lowest) & likely, scores, -jnp.inf), axis=1)
    return jnp.where(params.temperature > 0, drawn, jnp.argmax(logits, axis=1)).astype(jnp.int32)


def _asked(logits: Array, params: Sampling) -> tuple[Array, Array, Array, Array]:
    """Returns the arguments of pallas_kernels.sample between logits [R, V] and keys: temperature, top_k, top_p and
    min_p."""
    dtype = compute_dtype(logits.dtype)
    temperature, top_p, min_p = (x.astype(dtype) for x in (params.temperature, params.top_p, params.min_p))
    return temperature, params.top_k, top_p, min_p


def _keys(params: Sampling, position: Array) -> Array:
    """Returns u32[R, 4], the key of each row's noise without the token's id; see pallas_kernels.sample.noise."""
    parts = (params.seed, params.sample, position, jnp.zeros_like(position))  # all draws have one purpose
    return jnp.stack([jnp.asarray(x).astype(jnp.uint32) for x in parts], axis=1)


def words(vocab_size: int) -> int:
    """Returns the number of 32-bit words in a mask of a vocabulary."""
    return -(-vocab_size // 32)
