"""sample from its definition, in float64 numpy, by sorting."""

import numpy as np
from numpy.typing import ArrayLike

from pallas_kernels.sample.config import HOTTEST


def sample(
    logits: ArrayLike,
    temperature: ArrayLike,
    top_k: ArrayLike,
    top_p: ArrayLike,
    min_p: ArrayLike,
    uniform: ArrayLike,
) -> tuple[np.ndarray, np.ndarray]:
    """logits [R, V], the rest [R] -> tokens i32[R], finite bool[R] in numpy; see api.py."""
    raw = np.asarray(logits)
    x = clean(raw)
    tokens = [
        int(np.argmax(row)) if not t > 0 else draw(probabilities(row, t, k, p, m), u)
        for row, t, k, p, m, u in zip(x, *(np.asarray(a) for a in (temperature, top_k, top_p, min_p, uniform)))
    ]
    return np.asarray(tokens, np.int32), np.isfinite(raw.astype(np.float64)).all(axis=1)


def clean(logits: ArrayLike) -> np.ndarray:
    """float64 logits of a float type: NaN is -inf, and +inf the largest number of the type, float32's at least."""
    raw = np.asarray(logits)
    x = raw.astype(np.float64)
    largest = np.finfo(np.float64 if raw.dtype == np.float64 else np.float32).max
    return np.where(np.isnan(x), -np.inf, np.minimum(x, np.float64(largest)))


def probabilities(x: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """float64 [V] of one row of clean logits with a temperature, after all filters; all 0 for a row of bans."""
    top = x.max()
    if top == -np.inf:
        return np.zeros_like(x)
    bounded = min(max(float(temperature), float(np.finfo(np.float32).tiny)), HOTTEST)
    p = np.exp(np.maximum((x - top) / bounded, -1e4))
    p = np.where(x == -np.inf, 0, p)
    likely = p >= min(min_p, 1.0) if min_p > 0 else True  # the largest is 1
    if 0 < top_k < x.size:
        p = np.where(x >= np.sort(x)[-top_k], p, 0)
    if top_p < 1:
        order = np.argsort(-x, kind="stable")
        reached = np.cumsum(p[order]) >= top_p * p.sum()
        p = np.where(x >= x[order][np.argmax(reached)], p, 0)
    p = np.where(likely, p, 0)
    return p / p.sum() if p.any() else p


def draw(p: np.ndarray, uniform: float) -> int:
    """The first token at which the running sum of p [V] exceeds `uniform`; the last with weight where none does."""
    if not p.any():
        return 0
    exceeds = np.flatnonzero((np.cumsum(p) > uniform * p.sum()) & (p > 0))
    return int(exceeds[0]) if exceeds.size else int(np.flatnonzero(p)[-1])
