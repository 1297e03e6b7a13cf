"""Samples from its definition, in float64 numpy: filters by sorting, noise from Philox written out."""

import numpy as np
from numpy.typing import ArrayLike

from pallas_kernels.sample.config import HOTTEST


def sample(
    logits: ArrayLike,
    temperature: ArrayLike,
    top_k: ArrayLike,
    top_p: ArrayLike,
    min_p: ArrayLike,
    keys: ArrayLike,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns tokens i32[R], finite bool[R] in numpy; see api.py. Takes logits [R, V], keys u32[R, 4], the rest [R]."""
    raw = np.asarray(logits)
    x = clean(raw)
    rows = zip(x, *(np.asarray(a) for a in (temperature, top_k, top_p, min_p, keys)))
    tokens = [int(np.argmax(row if not asked[0] > 0 else scores(row, *asked))) for row, *asked in rows]
    return np.asarray(tokens, np.int32), np.isfinite(raw.astype(np.float64)).all(axis=1)


def clean(logits: ArrayLike) -> np.ndarray:
    """Returns float64 logits of a float type: NaN is -inf, and +inf the largest number of the type, float32's at
    least."""
    raw = np.asarray(logits)
    x = raw.astype(np.float64)
    largest = np.finfo(np.float64 if raw.dtype == np.float64 else np.float32).max
    return np.where(np.isnan(x), -np.inf, np.minimum(x, np.float64(largest)))


def probabilities(x: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Returns float64 [V] of one row of clean logits with a temperature, after all filters; all 0 for a row of bans."""
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


def scores(x: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float, keys: np.ndarray) -> np.ndarray:
    """Returns float64 [V] of one row of clean logits with a temperature: logit and noise of kept tokens, else -inf."""
    p = probabilities(x, temperature, top_k, top_p, min_p)
    bounded = min(max(float(temperature), float(np.finfo(np.float32).tiny)), HOTTEST)
    if not p.any():
        return np.full(x.size, -np.inf)
    below = np.where(p > 0, x - x.max(), 0) / bounded
    return np.where(p > 0, below + gumbel(keys, x.size), -np.inf)


def gumbel(keys: ArrayLike, size: int) -> np.ndarray:
    """Returns float64 [size]: the noise of all tokens of a row with keys (seed, sample, index, purpose)."""
    return -np.log(-np.log1p(-(bits(keys, size) + 0.5) / 2.0**32))


def bits(keys: ArrayLike, size: int) -> np.ndarray:
    """Returns u32[size]: a token's word id % 4 of Philox at counter (id // 4, index, purpose, 0) and key (seed,
    sample)."""
    seed, sample, index, purpose = (int(key) for key in np.asarray(keys))
    ids = np.arange(size)
    zeros = np.zeros_like(ids)
    words = philox([ids // 4, zeros + index, zeros + purpose, zeros], [zeros + seed, zeros + sample])
    return words[ids % 4, ids].astype(np.uint32)


def philox(counter: ArrayLike, key: ArrayLike) -> np.ndarray:
    """Computes Philox4x32-10 (Salmon et al. 2011): counter [4, ..] and key [2, ..] of integers give words u64[4,
    ..]."""
    c0, c1, c2, c3 = np.asarray(counter).astype(np.uint64)
    k0, k1 = np.asarray(key).astype(np.uint64)
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    for _ in range(10):
        product, other = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (other >> half) ^ c1 ^ k0, other & low, (product >> half) ^ c3 ^ k1, product & low
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
    return np.stack([c0, c1, c2, c3])
