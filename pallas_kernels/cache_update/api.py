"""Rotates Q and K, quantizes K and V, and writes them into pages."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.backends import DETERMINISTIC, Backend, choose, on_hopper
from pallas_kernels.cache_update import xla
from pallas_kernels.cache_update.config import check_supported, check_triton
from pallas_kernels.checks import bind_shapes, check_floats, check_heads, check_int32, check_pages
from pallas_kernels.formats.kv_pages import KVPages
from pallas_kernels.one_order import fenced, in_tiles
from pallas_kernels.rms_norm import HeadNorms, norm_heads


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
    debug: bool = False,
) -> tuple[jax.Array, KVPages]:
    """Rotates q [T, H, D] and k [T, K, D] by cos, sin [T, D/2], and stores row t of k and v [T, K, D] in pages.

    Row t goes to slot `offset[t]` of page `page[t]` (i32[T]). No two rows share a slot, and a row whose page is not in
    [0, N) is dropped. Rotation is in promote_types(q.dtype, float32), and K is encoded from there without an
    intermediate rounding. Returns q rotated, in its dtype, and the pages. Under jit with the pages donated the update
    is in place.

    `debug` reads the values first, outside of jit only. It raises ValueError for a row whose offset is out of range or
    whose slot is taken. Raises ValueError where shapes or dtypes disagree, and NotImplementedError for what a named
    backend doesn't do.
    """
    sizes = bind_shapes(
        q=(q, "T H D"), k=(k, "T K D"), v=(v, "T K D"), cos=(cos, "T D/2"), sin=(sin, "T D/2"),
        page=(page, "T"), offset=(offset, "T"),
    )  # fmt: skip
    check_floats(q=q, k=k, v=v)
    check_floats(cos=cos, sin=sin)
    check_int32(page=page, offset=offset)
    check_heads(sizes["H"], sizes["K"])
    check_pages(pages, sizes["K"], sizes["D"])
    if debug:
        _check_slots(page, offset, pages)
    chosen = choose(BACKENDS, backend, str(q.dtype), sizes["D"], pages)
    return chosen.run(q, k, v, cos, sin, pages, page, offset)


def cache_update_fused(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    pages: KVPages,
    page: jax.Array,
    offset: jax.Array,
    *,
    norms: HeadNorms | None = None,
    backend: str | None = None,
    debug: bool = False,
) -> tuple[jax.Array, KVPages]:
    """Runs cache_update on one projection's output qkv [T, (H + 2K) D]: Q's heads, then K's, then V's. K and N are the
    pages', D is twice the width of cos, sin [T, D/2], and H is what is left. Kernels read qkv where it is, while slices
    would be copied first. With `norms` each head of Q and K is normed before, and rounded to qkv's dtype. Backend
    "mosaic" does it in the same pass, where the order of sums depends on T. So there are no norms with a deterministic
    backend on Hopper."""
    sizes = bind_shapes(
        qkv=(qkv, "T X"), cos=(cos, "T D/2"), sin=(sin, "T D/2"), page=(page, "T"), offset=(offset, "T")
    )
    check_floats(qkv=qkv)
    check_floats(cos=cos, sin=sin)
    if norms is not None:
        bind_shapes(q_norm=(norms.q, "D"), k_norm=(norms.k, "D"), cos=(cos, "T D/2"))
        if backend == DETERMINISTIC and on_hopper():
            raise NotImplementedError("sums of norms have no one order here: norm q and k before a cache_update")
    width, dim, num_kv_heads = sizes["X"], sizes["D"], pages.k.values.shape[1]
    num_heads = width // dim - 2 * num_kv_heads
    if width % dim or num_heads < 1:
        raise ValueError(f"qkv has shape {qkv.shape}, expected [T, (H + 2K) D] with K={num_kv_heads}, D={dim}")
    check_int32(page=page, offset=offset)
    check_heads(num_heads, num_kv_heads)
    check_pages(pages, num_kv_heads, dim)
    if debug:
        _check_slots(page, offset, pages)
    chosen = choose(FUSED, backend, str(qkv.dtype), dim, pages)
    return chosen.run(qkv.reshape(-1, width // dim, dim), num_heads, norms, cos, sin, pages, page, offset)


def _check_slots(page: jax.Array, offset: jax.Array, pages: KVPages) -> None:
    """Raises ValueError for a row that writes outside of its page, or where another row does."""
    if isinstance(page, jax.core.Tracer) or isinstance(offset, jax.core.Tracer):
        raise NotImplementedError("debug=True reads values: call it outside jit, vmap and grad")
    num_pages, page_size = pages.k.num_pages, pages.k.page_size
    taken: dict[tuple[int, int], int] = {}
    for row, slot in enumerate(zip(np.asarray(page).tolist(), np.asarray(offset).tolist())):
        if not 0 <= slot[0] < num_pages:
            continue
        if not 0 <= slot[1] < page_size:
            raise ValueError(f"row {row} has offset {slot[1]}, but pages hold {page_size} tokens")
        if slot in taken:
            raise ValueError(f"row {row} writes page {slot[0]} offset {slot[1]}, as row {taken[slot]} does")
        taken[slot] = row


def _mosaic(*args, **options) -> tuple[jax.Array, KVPages]:
    from pallas_kernels.cache_update import mosaic_sm90  # imports all of Pallas

    return mosaic_sm90.cache_update(*args, **options)


def _triton(*args, **options) -> tuple[jax.Array, KVPages]:
    from pallas_kernels.cache_update import triton  # imports Triton

    return triton.cache_update(*args, **options)


def _in_place(run: Callable[..., tuple[jax.Array, KVPages]], qkv: jax.Array, num_heads: int, *args, **more):
    num_kv_heads = (qkv.shape[1] - num_heads) // 2
    first = (0, num_heads, num_heads + num_kv_heads)
    return run(qkv, qkv, qkv, *args, first=first, num_heads=num_heads, **more)


def _with_norms(qkv: jax.Array, num_heads: int, norms: HeadNorms | None, *args, **more):
    if norms is not None:
        more |= {"gains": (norms.q, norms.k), "eps": norms.eps, "gain_offset": norms.offset}
    return _in_place(_mosaic, qkv, num_heads, *args, **more)


def _split(run: Callable[..., tuple[jax.Array, KVPages]], qkv: jax.Array, num_heads: int, *args):
    num_kv_heads = (qkv.shape[1] - num_heads) // 2
    return run(*jnp.split(qkv, (num_heads, num_heads + num_kv_heads), axis=1), *args)


def _after_norms(
    update: Callable[..., tuple[jax.Array, KVPages]],
    qkv: jax.Array,
    num_heads: int,
    norms: HeadNorms | None,
    *args,
    backend: str | None = None,
):
    """Norms heads in a pass of its own."""
    if norms is not None:
        qkv = fenced(backend, partial(norm_heads, num_heads=num_heads, norms=norms), qkv)
    return update(qkv, num_heads, *args)


_one_order = partial(xla.cache_update, apart=in_tiles)


BACKENDS = {
    "mosaic": Backend(_mosaic, check_supported),
    "triton": Backend(_triton, check_triton),
    "xla": Backend(xla.cache_update),
    DETERMINISTIC: Backend(_one_order, for_xla=True),
}
FUSED = {
    "mosaic": Backend(_with_norms, check_supported),
    "triton": Backend(partial(_after_norms, partial(_in_place, _triton)), check_triton),
    "xla": Backend(partial(_after_norms, partial(_split, xla.cache_update))),
    DETERMINISTIC: Backend(partial(_after_norms, partial(_split, _one_order), backend=DETERMINISTIC), for_xla=True),
}
