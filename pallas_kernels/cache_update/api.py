"""cache_update: rotate Q and K, quantize K and V, write them into pages."""

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.backends import choose_backend
from pallas_kernels.cache_update import reference, xla
from pallas_kernels.cache_update.config import check_supported
from pallas_kernels.checks import bind_shapes, check_concrete, check_floats, check_heads, check_int32, check_pages
from pallas_kernels.kv_pages import KVPages


def cache_update(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    pages: KVPages,
    page: jax.Array,
    offset: jax.Array,
    *,
    backend: str | None = None,
) -> tuple[jax.Array, KVPages]:
    """Rotates q [T, H, D] and k [T, K, D] by cos, sin [T, D/2], and stores row t of k and v [T, K, D] in pages.

    Row t goes to slot `offset[t]` of page `page[t]` (i32[T]); no two rows share a slot, and a row whose page is not
    in [0, N) is dropped. Rotation is in promote_types(q.dtype, float32), and K is encoded from there without an
    intermediate rounding. Returns q rotated, in its dtype, and the pages; under jit with the pages donated the update
    is in place. Raises ValueError where shapes or dtypes disagree, and NotImplementedError for what a backend that was
    named doesn't do.
    """
    sizes = bind_shapes(
        q=(q, "T H D"), k=(k, "T K D"), v=(v, "T K D"), cos=(cos, "T D/2"), sin=(sin, "T D/2"),
        page=(page, "T"), offset=(offset, "T"),
    )  # fmt: skip
    check_floats(q=q, k=k, v=v)
    check_int32(page=page, offset=offset)
    check_heads(sizes["H"], sizes["K"])
    check_pages(pages, sizes["K"], sizes["D"])
    chosen = _choose(backend, q, sizes["D"], pages)
    if chosen == "mosaic":
        from pallas_kernels.cache_update import mosaic_sm90  # imports all of Pallas

        return mosaic_sm90.cache_update(q, k, v, cos, sin, pages, page, offset)
    if chosen == "reference":
        check_concrete(q, k, v, cos, sin, pages, page, offset)
        rotated, pages = reference.cache_update(q, k, v, cos, sin, pages, page, offset)
        return jnp.asarray(rotated).astype(q.dtype), jax.tree.map(jnp.asarray, pages)
    return xla.cache_update(q, k, v, cos, sin, pages, page, offset)


def cache_update_fused(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    pages: KVPages,
    page: jax.Array,
    offset: jax.Array,
    *,
    backend: str | None = None,
) -> tuple[jax.Array, KVPages]:
    """cache_update of one projection's output qkv [T, (H + 2K) D]: Q's heads, then K's, then V's.

    K and N are the pages', D is twice the width of cos, sin [T, D/2], and H what is left. The mosaic backend reads qkv
    where it is, while slices would be copied first.
    """
    sizes = bind_shapes(
        qkv=(qkv, "T X"), cos=(cos, "T D/2"), sin=(sin, "T D/2"), page=(page, "T"), offset=(offset, "T")
    )
    width, dim, num_kv_heads = sizes["X"], sizes["D"], pages.k.values.shape[1]
    num_heads = width // dim - 2 * num_kv_heads
    if width % dim or num_heads < 1:
        raise ValueError(f"qkv has shape {qkv.shape}, expected [T, (H + 2K) D] with K={num_kv_heads}, D={dim}")
    split = qkv.reshape(-1, width // dim, dim)
    if _choose(backend, qkv, dim, pages) != "mosaic":
        q, k, v = jnp.split(split, (num_heads, num_heads + num_kv_heads), axis=1)
        return cache_update(q, k, v, cos, sin, pages, page, offset, backend=backend)
    check_int32(page=page, offset=offset)
    check_heads(num_heads, num_kv_heads)
    check_pages(pages, num_kv_heads, dim)
    from pallas_kernels.cache_update import mosaic_sm90

    first = (0, num_heads, num_heads + num_kv_heads)
    return mosaic_sm90.cache_update(
        split, split, split, cos, sin, pages, page, offset, first=first, num_heads=num_heads
    )


def _choose(backend: str | None, q: jax.Array, head_dim: int, pages: KVPages) -> str:
    stored = pages.k.format.dtype, pages.v.format.dtype
    return choose_backend(backend, partial(check_supported, str(q.dtype), head_dim, *stored))
