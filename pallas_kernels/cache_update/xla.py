"""Runs cache_update in plain jnp: one scatter a pool, in place where the caller donates the pages."""

from functools import partial

import jax

from pallas_kernels.formats import kv_tail
from pallas_kernels.formats.kv_formats import Kivi, encode
from pallas_kernels.formats.kv_pages import KVPages, store
from pallas_kernels.formats.numerics import compute_dtype
from pallas_kernels.one_order import Run, plainly
from pallas_kernels.rotary import rotate

type Encoded = tuple[jax.Array, jax.Array | None]  # values and scales, as stored


@partial(jax.jit, static_argnames="apart")
def cache_update(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    pages: KVPages,
    page: jax.Array,
    offset: jax.Array,
    apart: Run = plainly,
) -> tuple[jax.Array, KVPages]:
    """Returns q [T, H, D] rotated, and the pages with k, v [T, K, D]; see api.py. Takes cos, sin [T, D/2] and page,
    offset i32[T]. `apart` runs what is each row's own."""
    compute = compute_dtype(k.dtype)

    def turned(q: jax.Array, k: jax.Array, cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, jax.Array]:
        return rotate(q, cos, sin), rotate(k, cos, sin, compute)

    def encoded(q: jax.Array, k: jax.Array, v: jax.Array, *angles: jax.Array) -> tuple[jax.Array, Encoded, Encoded]:
        q, k = turned(q, k, *angles)
        return q, encode(k, pages.k.format), encode(v, pages.v.format)

    if isinstance(pages.k.format, Kivi):
        q, k = apart(turned, q, k, cos, sin)
        return q, kv_tail.update(pages, k, v, page, offset, apart)
    of_k: Encoded
    of_v: Encoded
    q, of_k, of_v = apart(encoded, q, k, v, cos, sin)
    return q, KVPages(store(pages.k, *of_k, page, offset), store(pages.v, *of_v, page, offset))
