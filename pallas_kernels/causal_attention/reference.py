"""Computes causal_attention from its formula, one query at a time in float64 numpy, and its analytic gradient."""

import numpy as np
from numpy.typing import ArrayLike


def _visible(segments: np.ndarray, i: int, window: int | None) -> list[int]:
    return [j for j in range(i + 1) if segments[j] == segments[i] and (window is None or i - j < window)]


def causal_attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, segments: ArrayLike, scale: float, window: int | None
) -> np.ndarray:
    """Returns float64 [T, H, D]. Arguments are api.py's, concrete."""
    queries, keys, values = (np.asarray(array).astype(np.float64) for array in (q, k, v))
    out = np.zeros(queries.shape, np.float64)
    for i, h in np.ndindex(queries.shape[:2]):
        visible, kv_head = _visible(np.asarray(segments), i, window), h * keys.shape[1] // queries.shape[1]
        logits = scale * keys[visible, kv_head] @ queries[i, h]
        weights = np.exp(logits - logits.max())
        out[i, h] = weights @ values[visible, kv_head] / weights.sum()
    return out


def causal_attention_grad(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, segments: ArrayLike, scale: float, window: int | None, dout: ArrayLike
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the gradients of sum(out * dout) by q, k and v, float64."""
    queries, keys, values, douts = (np.asarray(array).astype(np.float64) for array in (q, k, v, dout))
    dq, dk, dv = np.zeros_like(queries), np.zeros_like(keys), np.zeros_like(values)
    for i, h in np.ndindex(queries.shape[:2]):
        visible, kv_head = _visible(np.asarray(segments), i, window), h * keys.shape[1] // queries.shape[1]
        logits = scale * keys[visible, kv_head] @ queries[i, h]
        weights = np.exp(logits - logits.max())
        weights /= weights.sum()
        dweights = values[visible, kv_head] @ douts[i, h]
        dlogits = weights * (dweights - weights @ dweights)
        dq[i, h] = scale * dlogits @ keys[visible, kv_head]
        dk[visible, kv_head] += scale * np.outer(dlogits, queries[i, h])
        dv[visible, kv_head] += np.outer(weights, douts[i, h])
    return dq, dk, dv
