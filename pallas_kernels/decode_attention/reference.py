"""decode_attention from its formula, one query at a time in float64 numpy."""

import numpy as np
from numpy.typing import ArrayLike

from pallas_kernels.kv_pages import KVPages
from pallas_kernels.reference_pages import read_sequence, to_numpy


def decode_attention(
    q: ArrayLike, pages: KVPages, page_table: ArrayLike, lengths: ArrayLike, scale: float, window: int | None
) -> np.ndarray:
    """Arguments as api.py's, concrete -> float64 [R, H, D]. Raises ValueError for lengths and pages out of range."""
    queries, tables = np.asarray(q).astype(np.float64), np.asarray(page_table)
    pages = to_numpy(pages)
    out = np.zeros(queries.shape, np.float64)
    for r, length in enumerate(map(int, np.asarray(lengths))):
        if length < 0:
            raise ValueError(f"row {r} has length {length}")
        if length == 0:
            continue
        start = 0 if window is None else max(0, length - window)
        keys = read_sequence(pages.k, tables[r], start, length)
        values = read_sequence(pages.v, tables[r], start, length)
        for h in range(queries.shape[1]):
            kv_head = h * keys.shape[1] // queries.shape[1]
            logits = keys[:, kv_head] @ queries[r, h] * scale
            weights = np.exp(logits - logits.max())
            out[r, h] = weights @ values[:, kv_head] / weights.sum()
    return out
