"""cache_update in plain jnp: one scatter a pool, in place where the caller donates the pages."""

import jax

from pallas_kernels import kv_tail
from pallas_kernels.kv_formats import Kivi
from pallas_kernels.kv_pages import KVPages, write
from pallas_kernels.numerics import compute_dtype
from pallas_kernels.rotary import rotate


@jax.jit
def cache_update(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    pages: KVPages,
    page: jax.Array,
    offset: jax.Array,
) -> tuple[jax.Array, KVPages]:
    """q [T, H, D], k, v [T, K, D], cos, sin [T, D/2], page, offset i32[T] -> q rotated, pages; see api.py."""
    compute = compute_dtype(k.dtype)
    k = rotate(k, cos, sin, compute)
    if isinstance(pages.k.format, Kivi):
        return rotate(q, cos, sin), kv_tail.update(pages, k, v, page, offset)
    return rotate(q, cos, sin), KVPages(write(pages.k, k, page, offset), write(pages.v, v, page, offset))
