"""cache_update from its definition, one slot at a time in float64 numpy."""

import numpy as np
from numpy.typing import ArrayLike

from pallas_kernels.kv_pages import KVPages
from pallas_kernels.reference_pages import to_numpy, write_row


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
    """Arguments as api.py's, concrete -> q rotated float64 [T, H, D], pages as numpy. Raises ValueError for a slot
    that doesn't exist or is written twice."""
    q, k, v, cos, sin = (np.asarray(array).astype(np.float64) for array in (q, k, v, cos, sin))
    # Pair i of a row is the complex number x[i] + j x[i + D/2]; rotating multiplies it by cos + j sin.
    half = q.shape[-1] // 2
    turn = (cos + 1j * sin)[:, None, :]

    def rotated(x: np.ndarray) -> np.ndarray:
        turned = (x[..., :half] + 1j * x[..., half:]) * turn
        return np.concatenate([turned.real, turned.imag], axis=-1)

    k = rotated(k)
    pages = to_numpy(pages)
    written = set()
    for t, (p, o) in enumerate(zip(np.asarray(page).tolist(), np.asarray(offset).tolist())):
        if not 0 <= p < pages.k.num_pages:
            continue
        if not 0 <= o < pages.k.page_size:
            raise ValueError(f"row {t} has offset {o}, but pages hold {pages.k.page_size} tokens")
        if (p, o) in written:
            raise ValueError(f"row {t} writes page {p} offset {o} again")
        written.add((p, o))
        for head in range(k.shape[1]):
            write_row(pages.k, p, head, o, k[t, head])
            write_row(pages.v, p, head, o, v[t, head])
    return rotated(q), pages
