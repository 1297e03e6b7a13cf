"""Computes cache_update from its definition, one slot at a time in float64 numpy."""

import numpy as np
from numpy.typing import ArrayLike

from pallas_kernels.formats.kv_pages import KVPages
from pallas_kernels.formats.reference_pages import of_layer, to_numpy, write_row


def cache_update(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    cos: ArrayLike,
    sin: ArrayLike,
    pages: KVPages,
    page: ArrayLike,
    offset: ArrayLike,
) -> tuple[np.ndarray, KVPages]:
    """Returns q rotated, float64 [T, H, D], and the pages in numpy. Arguments are api.py's, concrete. Raises ValueError
    for an offset outside of its page and for a slot that is written twice."""
    queries, keys, values = (np.asarray(array).astype(np.float64) for array in (q, k, v))
    turn = (np.asarray(cos).astype(np.float64) + 1j * np.asarray(sin).astype(np.float64))[:, None, :]
    half = turn.shape[-1]

    def rotated(x: np.ndarray) -> np.ndarray:  # pair i is the complex number x[i] + j x[i + D/2]
        turned = (x[..., :half] + 1j * x[..., half:]) * turn
        return np.concatenate([turned.real, turned.imag], axis=-1)

    keys = rotated(keys)
    pages = to_numpy(pages)
    own, written = of_layer(pages), set()
    for t, (p, o) in enumerate(zip(map(int, np.asarray(page)), map(int, np.asarray(offset)))):
        if not 0 <= p < own.k.num_pages:
            continue
        if not 0 <= o < own.k.page_size:
            raise ValueError(f"row {t} has offset {o}, but pages hold {own.k.page_size} tokens")
        if (p, o) in written:
            raise ValueError(f"row {t} writes page {p} offset {o} again")
        written.add((p, o))
        for head in range(keys.shape[1]):
            write_row(own.k, p, head, o, keys[t, head])
            write_row(own.v, p, head, o, values[t, head])
    return rotated(queries), pages
