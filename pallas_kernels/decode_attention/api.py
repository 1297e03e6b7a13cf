"""decode_attention: one query token a sequence."""

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.backends import choose_backend
from pallas_kernels.checks import (
    bind_shapes,
    check_concrete,
    check_floats,
    check_heads,
    check_int32,
    check_pages,
    check_window,
)
from pallas_kernels.debug import check_decode_values
from pallas_kernels.decode_attention import reference, xla
from pallas_kernels.decode_attention.config import check_proven, check_supported
from pallas_kernels.decode_attention.work import Work, make_work
from pallas_kernels.kv_pages import KVPages


def decode_attention(
    q: jax.Array,
    pages: KVPages,
    page_table: jax.Array,
    lengths: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    work: Work | None = None,
    backend: str | None = None,
    debug: bool = False,
) -> jax.Array:
    """softmax(scale * q k^T) v of one query a sequence, over K and V as stored. q [R, H, D] -> [R, H, D].

    lengths i32[R] counts a row's visible keys, its own included (the query is at position length - 1); a row of
    length 0 is unused and comes out zero. Token j of row r is in page page_table[r, j // P] (i32[R, M]); entries past
    the length, or wholly before the window, are never read. With a window, key j is visible to query i iff
    0 <= i - j < window. `work` is `plan`'s for the same arguments, which all layers of a step share; without it each
    call makes its own. `debug` reads the values first, outside of jit only, and raises ValueError for a row whose
    length or pages are out of range. Raises ValueError where shapes or dtypes disagree, NotImplementedError for sizes,
    dtypes and formats that the backend lacks.
    """
    sizes = bind_shapes(q=(q, "R H D"), page_table=(page_table, "R M"), lengths=(lengths, "R"))
    check_floats(q=q)
    check_int32(page_table=page_table, lengths=lengths)
    check_pages(pages, None, sizes["D"])
    check_heads(sizes["H"], pages.k.values.shape[1])
    check_window(window)
    if debug:
        check_decode_values(page_table, lengths, window, pages)
    chosen = _choose(backend, q, pages)
    if chosen == "mosaic":
        from pallas_kernels.decode_attention import mosaic_sm90  # imports all of Pallas

        return mosaic_sm90.decode_attention(q, pages, page_table, lengths, scale, window, work)
    if chosen == "reference":
        check_concrete(q, pages, page_table, lengths)
        return jnp.asarray(reference.decode_attention(q, pages, page_table, lengths, scale, window)).astype(q.dtype)
    return xla.decode_attention(q, pages, page_table, lengths, scale, window)


def plan(
    q: jax.Array | jax.ShapeDtypeStruct,
    pages: KVPages,
    lengths: jax.Array,
    *,
    window: int | None = None,
    backend: str | None = None,
) -> Work | None:
    """The work list of decode_attention with these arguments, where the kernel that has one is chosen. It depends on
    lengths i32[R], sizes and dtypes alone, so that the layers of a step share it; of q [R, H, D] and pages the shapes
    and dtypes are enough."""
    if _choose(backend, q, pages) != "mosaic":
        return None
    sizes = q.shape[1], pages.k.values.shape[1], q.shape[2]
    return make_work(lengths, *sizes, window=window, narrow=pages.narrow)


def _choose(backend: str | None, q: jax.Array | jax.ShapeDtypeStruct, pages: KVPages) -> str:
    return choose_backend(backend, partial(check_supported, q, pages), partial(check_proven, q, pages))
