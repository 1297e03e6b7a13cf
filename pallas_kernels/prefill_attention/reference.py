"""prefill_attention from its formula, one query at a time in float64 numpy."""

import numpy as np
from numpy.typing import ArrayLike

from pallas_kernels.kv_pages import KVPages
from pallas_kernels.reference_pages import read_sequence


def prefill_attention(
    q: ArrayLike,
    pages: KVPages,
    page_table: ArrayLike,
    cu_q_lens: ArrayLike,
    kv_lens: ArrayLike,
    scale: float,
    window: int | None,
) -> np.ndarray:
    """Arguments as api.py's, concrete -> float64 [C, H, D]. Raises ValueError for lengths and pages out of range."""
    q = np.asarray(q).astype(np.float64)
    page_table, bounds, kv_lens = np.asarray(page_table), np.asarray(cu_q_lens).tolist(), np.asarray(kv_lens).tolist()
    if bounds[0] != 0 or sorted(bounds) != bounds or bounds[-1] > len(q):
        raise ValueError(f"cu_q_lens is {bounds}, expected a nondecreasing list from 0 to at most {len(q)}")
    out = np.zeros(q.shape, np.float64)
    for b, kv_len in enumerate(kv_lens):
        q_len = bounds[b + 1] - bounds[b]
        if q_len == 0:
            continue
        if kv_len < q_len:
            raise ValueError(f"chunk {b} has {q_len} queries but only {kv_len} keys")
        first = kv_len - q_len if window is None else kv_len - q_len - window + 1
        first = max(first, 0) if window is not None else 0
        keys = read_sequence(pages.k, page_table[b], first, kv_len)
        values = read_sequence(pages.v, page_table[b], first, kv_len)
        for i in range(q_len):
            position = kv_len - q_len + i
            visible = [j for j in range(first, position + 1) if window is None or position - j < window]
            at = np.array(visible) - first
            for h in range(q.shape[1]):
                kv_head = h * keys.shape[1] // q.shape[1]
                logits = keys[at, kv_head] @ q[bounds[b] + i, h] * scale
                weights = np.exp(logits - logits.max())
                out[bounds[b] + i, h] = weights @ values[at, kv_head] / weights.sum()
    return out
