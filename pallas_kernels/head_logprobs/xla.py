"""Runs head_logprobs in plain jnp: a loop over tiles of the vocabulary, forward and again backward."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_kernels.formats.numerics import compute_dtype

TILE = 4096  # tokens of the vocabulary

Sums = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
Kept = tuple[jax.Array, ...]  # what the backward pass needs: the arguments, log-sum-exp [T] and entropies [T]


def _dot(a: jax.Array, b: jax.Array, axes: tuple[int, int], dtype: DTypeLike) -> jax.Array:
    contract = (((axes[0],), (axes[1],)), ((), ()))
    return jax.lax.dot_general(a, b, contract, precision="highest", preferred_element_type=dtype)


def _tiles(vocabulary: int) -> tuple[int, jax.Array]:
    """Returns the size of a tile, and the first token of each. The last tile overlaps the one before where the size
    does not divide the vocabulary."""
    size = min(TILE, vocabulary)
    return size, jnp.minimum(jnp.arange(-(-vocabulary // size), dtype=jnp.int32) * size, vocabulary - size)


def _logits(
    x: jax.Array,
    w: jax.Array,
    temperature: jax.Array,
    i: jax.Array,
    first: jax.Array,
    size: int,
    softcap: float | None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns tile i's rows of w, its logits [T, size], their derivatives by x w^T, and its tokens. Logits that an
    earlier tile has are -inf."""
    rows = jax.lax.dynamic_slice_in_dim(w, first, size)
    token = first + jnp.arange(size, dtype=jnp.int32)
    logits, slope = _dot(x, rows, (1, 1), temperature.dtype), 1 / temperature[:, None]
    if softcap is not None:
        bounded = jnp.tanh(logits / softcap)
        logits, slope = softcap * bounded, slope * (1 - bounded**2)
    logits = logits / temperature[:, None]
    return rows, jnp.where((token >= i * size)[None, :], logits, -jnp.inf), slope, token


def _forward(
    x: jax.Array, w: jax.Array, tokens: jax.Array, temperature: jax.Array, softcap: float | None
) -> tuple[tuple[jax.Array, jax.Array], Kept]:
    size, starts = _tiles(w.shape[0])
    temperature = temperature.astype(compute_dtype(x.dtype))

    def tile(carry: Sums, at: tuple[jax.Array, jax.Array]) -> tuple[Sums, None]:
        peak, total, moment, chosen = carry  # moment: the sum of exp(logit - peak) * logit
        _, logits, _, token = _logits(x, w, temperature, *at, size, softcap)
        highest = jnp.maximum(peak, logits.max(axis=1))
        decay, p = jnp.exp(peak - highest), jnp.exp(logits - highest[:, None])
        own = jnp.where(token[None, :] == tokens[:, None], logits, -jnp.inf).max(axis=1)
        weighted = jnp.where(p > 0, p * logits, 0).sum(axis=1)
        return (highest, total * decay + p.sum(axis=1), moment * decay + weighted, jnp.maximum(chosen, own)), None

    zeros = jnp.zeros_like(temperature)
    begin = zeros + jnp.finfo(zeros.dtype).min, zeros, zeros, zeros - jnp.inf
    (peak, total, moment, chosen), _ = jax.lax.scan(tile, begin, (jnp.arange(len(starts), dtype=jnp.int32), starts))
    whole = peak + jnp.log(total)
    entropies = whole - moment / total
    return (chosen - whole, entropies), (x, w, tokens, temperature, whole, entropies)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def head_logprobs(
    x: jax.Array, w: jax.Array, tokens: jax.Array, temperature: jax.Array, softcap: float | None = None
) -> tuple[jax.Array, jax.Array]:
    """Returns log-probabilities [T] and entropies [T] of x [T, E], w [V, E], tokens i32[T] and temperature [T]; see
    api.py."""
    return _forward(x, w, tokens, temperature, softcap)[0]


def _backward(softcap: float | None, kept: Kept, of: tuple[jax.Array, jax.Array]):
    """Returns the gradients by x and w. Products take the logits' gradients in x's dtype."""
    x, w, tokens, temperature, whole, entropies = kept
    of_logprobs, of_entropies = (each.astype(temperature.dtype)[:, None] for each in of)
    size, starts = _tiles(w.shape[0])

    def tile(carry: tuple[jax.Array, jax.Array], at: tuple[jax.Array, jax.Array]):
        dx, dw = carry
        rows, logits, slope, token = _logits(x, w, temperature, *at, size, softcap)
        logp = logits - whole[:, None]
        p = jnp.exp(logp)
        hot = (token[None, :] == tokens[:, None]) & (logp > -jnp.inf)
        spread = jnp.where(p > 0, p * (logp + entropies[:, None]), 0)
        dz = of_logprobs * (hot.astype(p.dtype) - p) - of_entropies * spread
        dz = (dz * slope).astype(x.dtype)
        of_rows = _dot(dz, x, (0, 0), temperature.dtype).astype(w.dtype)
        old = jax.lax.dynamic_slice_in_dim(dw, at[1], size)
        dw = jax.lax.dynamic_update_slice_in_dim(dw, old + of_rows, at[1], 0)
        return (dx + _dot(dz, rows, (1, 0), temperature.dtype), dw), None

    begin = jnp.zeros(x.shape, temperature.dtype), jnp.zeros_like(w)
    (dx, dw), _ = jax.lax.scan(tile, begin, (jnp.arange(len(starts), dtype=jnp.int32), starts))
    return dx.astype(x.dtype), dw, np.zeros(tokens.shape, jax.dtypes.float0), jnp.zeros_like(temperature)


head_logprobs.defvjp(_forward, _backward)
