"""causal_attention from its formula, one query at a time in float64 numpy, and its analytic gradient."""

import numpy as np
from numpy.typing import ArrayLike


def _visible(segments: np.ndarray, i: int, window: int | None) -> np.ndarray:
    return np.array([j for j in range(i + 1) if segments[j] == segments[i] and (window is None or i - j < window)])


def causal_attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, segments: ArrayLike, scale: float, window: int | None
) -> np.ndarray:
    """Arguments as api.py's, concrete -> float64 [T, H, D]."""
    q, k, v = (np.asarray(array).astype(np.float64) for array in (q, k, v))
    segments = np.asarray(segments)
    out = np.zeros(q.shape, np.float64)
    for i, h in np.ndindex(q.shape[:2]):
        at, kv_head = _visible(segments, i, window), h * k.shape[1] // q.shape[1]
        logits = scale * k[at, kv_head] @ q[i, h]
        weights = np.exp(logits - logits.max())
        out[i, h] = weights @ v[at, kv_head] / weights.sum()
    return out


def causal_attention_grad(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    segments: ArrayLike,
    scale: float,
    window: int | None,
    dout: ArrayLike,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gradients of sum(out * dout) by q, k and v, float64."""
    q, k, v, dout = (np.asarray(array).astype(np.float64) for array in (q, k, v, dout))
    segments = np.asarray(segments)
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for i, h in np.ndindex(q.shape[:2]):
        at, kv_head = _visible(segments, i, window), h * k.shape[1] // q.shape[1]
        logits = scale * k[at, kv_head] @ q[i, h]
        weights = np.exp(logits - logits.max())
        weights /= weights.sum()
        dweights = v[at, kv_head] @ dout[i, h]
        dlogits = weights * (dweights - weights @ dweights)
        dq[i, h] = scale * dlogits @ k[at, kv_head]
        dk[at, kv_head] += scale * np.outer(dlogits, q[i, h])
        dv[at, kv_head] += np.outer(weights, dout[i, h])
    return dq, dk, dv
