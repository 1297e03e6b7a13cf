"""Computes prefill_attention from its formula, one query at a time in float64 numpy."""

import numpy as np
from numpy.typing import ArrayLike

from pallas_kernels.formats.kv_pages import KVPages
from pallas_kernels.formats.reference_pages import attended, of_layer, read_sequence, sinks_of, to_numpy


def prefill_attention(
    q: ArrayLike,
    pages: KVPages,
    page_table: ArrayLike,
    cu_q_lens: ArrayLike,
    kv_lens: ArrayLike,
    scale: float,
    window: int | None,
    softcap: float | None = None,
    sinks: ArrayLike | None = None,
) -> np.ndarray:
    """Returns float64 [C, H, D]. Arguments are api.py's, concrete. Raises ValueError for lengths and pages out of
    range."""
    queries, tables, bounds = np.asarray(q).astype(np.float64), np.asarray(page_table), np.asarray(cu_q_lens)
    pages = of_layer(to_numpy(pages))
    of_heads = sinks_of(sinks, queries.shape[1])
    if bounds[0] != 0 or np.any(np.diff(bounds) < 0) or bounds[-1] > len(queries):
        raise ValueError(f"cu_q_lens is {bounds}, expected nondecreasing from 0 to at most {len(queries)}")
    out = np.zeros(queries.shape, np.float64)
    for b, kv_len in enumerate(map(int, np.asarray(kv_lens))):
        q_len = int(bounds[b + 1] - bounds[b])
        if q_len == 0:
            continue
        if kv_len < q_len:
            raise ValueError(f"chunk {b} has {q_len} queries but only {kv_len} keys")
        first = 0 if window is None else max(0, kv_len - q_len - window + 1)
        keys = read_sequence(pages.k, tables[b], first, kv_len)
        values = read_sequence(pages.v, tables[b], first, kv_len)
        for i in range(q_len):
            position = kv_len - q_len + i
            visible = [j - first for j in range(first, position + 1) if window is None or position - j < window]
            for h in range(queries.shape[1]):
                kv_head = h * keys.shape[1] // queries.shape[1]
                logits = keys[visible, kv_head] @ queries[bounds[b] + i, h] * scale
                out[bounds[b] + i, h] = attended(logits, values[visible, kv_head], softcap, of_heads[h])
    return out
