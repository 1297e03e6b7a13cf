"""decode_attention from its formula, one query at a time in float64 numpy."""

import numpy as np
from numpy.typing import ArrayLike

from pallas_kernels.kv_pages import KVPages
from pallas_kernels.reference_pages import read_sequence


def decode_attention(
    q: ArrayLike, pages: KVPages, page_table: ArrayLike, lengths: ArrayLike, scale: float, window: int | None
) -> np.ndarray:
    """Arguments as api.py's, concrete -> float64 [R, H, D]. Raises ValueError for lengths and pages out of range."""
    q = np.asarray(q).astype(np.float64)
    page_table, lengths = np.asarray(page_table), np.asarray(lengths).tolist()
    out = np.zeros(q.shape, np.float64)
    for r, length in enumerate(lengths):
        if length < 0:
            raise ValueError(f"row {r} has length {length}")
        if length == 0:
            continue
        start = 0 if window is None else max(0, length - window)
        keys = read_sequence(pages.k, page_table[r], start, length)
        values = read_sequence(pages.v, page_table[r], start, length)
        for h in range(q.shape[1]):
            kv_head = h * keys.shape[1] // q.shape[1]
            logits = keys[:, kv_head] @ q[r, h] * scale
            weights = np.exp(logits - logits.max())
            out[r, h] = weights @ values[:, kv_head] / weights.sum()
    return out
