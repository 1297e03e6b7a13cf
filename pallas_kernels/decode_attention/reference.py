"""Computes decode_attention from its formula, one query at a time in float64 numpy."""

import numpy as np
from numpy.typing import ArrayLike

from pallas_kernels.formats.kv_pages import KVPages
from pallas_kernels.formats.reference_pages import attended, of_layer, read_sequence, sinks_of, to_numpy


def decode_attention(
    q: ArrayLike,
    pages: KVPages,
    page_table: ArrayLike,
    lengths: ArrayLike,
    scale: float,
    window: int | None,
    rows: ArrayLike | None = None,
    ancestors: ArrayLike | None = None,
    softcap: float | None = None,
    sinks: ArrayLike | None = None,
) -> np.ndarray:
    """Returns float64 [R Q, H, D]. Arguments are api.py's, concrete, with the parts of Segments apart. Raises
    ValueError for lengths and pages out of range."""
    queries, tables = np.asarray(q).astype(np.float64), np.asarray(page_table)
    pages = of_layer(to_numpy(pages))
    of_heads = sinks_of(sinks, queries.shape[1])
    width = len(queries) // max(1, len(tables))
    out = np.zeros(queries.shape, np.float64)
    for r, length in enumerate(map(int, np.asarray(lengths))):
        used = width if rows is None else int(np.asarray(rows)[r])
        if length < 0:
            raise ValueError(f"row {r} has length {length}")
        if length == 0:
            continue
        if not 0 <= used <= min(width, length):
            raise ValueError(f"row {r} uses {used} rows of {width}, with {length} keys")
        committed = length - used
        masks = [(1 << i + 1) - 1 for i in range(used)]
        if ancestors is not None:  # words of 32 bits, the lowest first
            words = np.asarray(ancestors)[r, :used].tolist()
            masks = [sum(word << 32 * i for i, word in enumerate(each)) for each in words]
        position = {c: c for c in range(committed)}
        position |= {committed + i: committed + mask.bit_count() - 1 for i, mask in enumerate(masks)}
        for i, mask in enumerate(masks):
            seen = [c for c in range(length) if c < committed or mask >> (c - committed) & 1]
            here = position[committed + i]
            seen = [c for c in seen if position[c] <= here and (window is None or here - position[c] < window)]
            first = seen[0]
            keys = read_sequence(pages.k, tables[r], first, seen[-1] + 1)[np.array(seen) - first]
            values = read_sequence(pages.v, tables[r], first, seen[-1] + 1)[np.array(seen) - first]
            for h in range(queries.shape[1]):
                kv_head = h * keys.shape[1] // queries.shape[1]
                logits = keys[:, kv_head] @ queries[r * width + i, h] * scale
                out[r * width + i, h] = attended(logits, values[:, kv_head], softcap, of_heads[h])
    return out
