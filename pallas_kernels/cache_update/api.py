"""cache_update: rotate Q and K, quantize K and V, write them into pages."""

import jax
import jax.numpy as jnp

from pallas_kernels.backends import choose_backend
from pallas_kernels.cache_update import reference, xla
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
    is in place. Raises ValueError where shapes or dtypes disagree.
    """
    chosen = choose_backend(backend)
    sizes = bind_shapes(
        q=(q, "T H D"), k=(k, "T K D"), v=(v, "T K D"), cos=(cos, "T D/2"), sin=(sin, "T D/2"),
        page=(page, "T"), offset=(offset, "T"),
    )  # fmt: skip
    check_floats(q=q, k=k, v=v)
    check_int32(page=page, offset=offset)
    check_heads(sizes["H"], sizes["K"])
    check_pages(pages, sizes["K"], sizes["D"])
    if chosen == "reference":
        check_concrete(q, k, v, cos, sin, pages, page, offset)
        rotated, pages = reference.cache_update(q, k, v, cos, sin, pages, page, offset)
        return jnp.asarray(rotated).astype(q.dtype), jax.tree.map(jnp.asarray, pages)
    return xla.cache_update(q, k, v, cos, sin, pages, page, offset)
