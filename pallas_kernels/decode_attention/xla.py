"""decode_attention in plain jnp: a tile of one query row a sequence."""

from functools import partial

import jax

from pallas_kernels.kv_pages import KVPages
from pallas_kernels.tiled_attention import attend, check_page_size


@partial(jax.jit, static_argnames=("scale", "window"))
def decode_attention(
    q: jax.Array, pages: KVPages, page_table: jax.Array, lengths: jax.Array, scale: float, window: int | None
) -> jax.Array:
    """q [R, H, D], page_table i32[R, M], lengths i32[R] -> [R, H, D]; see api.py."""
    check_page_size(pages.k.page_size)
    if q.shape[0] == 0:
        return q
    out = attend(q[:, None], pages, page_table, lengths[:, None] - 1, scale, window)
    return out[:, 0].astype(q.dtype)
