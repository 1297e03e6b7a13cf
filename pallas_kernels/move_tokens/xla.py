"""Runs move_tokens in plain jnp: a gather and a scatter for each array, in place where the caller donates the pools."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.formats.kv_pages import KVPages, Pages


@jax.jit
def move_tokens(
    pools: tuple[KVPages, ...], page_table: jax.Array, source: jax.Array, target: jax.Array
) -> tuple[KVPages, ...]:
    """Returns the pools; see api.py. Takes page_table i32[R, M], source, target i32[R, Q]."""
    if not pools:
        return pools
    num_pages, page_size = pools[0].k.num_pages, pools[0].k.page_size

    def slot(index: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns page and offset; page -1 beyond the page table."""
        page = jnp.take_along_axis(page_table, index // page_size, axis=1, mode="fill", fill_value=-1)
        return jnp.where(index < 0, -1, page), index % page_size

    (page, offset), (new_page, new_offset) = slot(source), slot(target)
    kept = (source != target) & (page >= 0) & (page < num_pages) & (new_page >= 0)
    new_page = jnp.where(kept, new_page, num_pages)  # a scatter drops what is out of range

    def move(pages: Pages, pool: jax.Array) -> jax.Array:
        """Moves within each array as it is stored: XLA makes two copies on a GPU of a reshaped one that is read and
        written."""
        heads = jnp.arange(pool.shape[1], dtype=jnp.int32)

        # Heads are indexed too: a scatter over leading dims never needs a transposed copy of the pool.
        def at(page: jax.Array, offset: jax.Array) -> tuple[jax.Array, ...]:
            row = pages.rows_of_all(page)
            if pool.ndim == 4:
                return row[..., None], heads, offset[..., None]
            numbers = pool.shape[2] // page_size  # of a token, side by side: scales and zero points
            number = jnp.add.outer(offset * numbers, jnp.arange(numbers, dtype=jnp.int32))
            return row[..., None, None], heads[:, None], number[..., None, :]

        found = pool.at[at(page, offset)].get(mode="clip")
        to = pool.at[at(new_page, new_offset)]
        return to.set(found, mode="drop", unique_indices=True, wrap_negative_indices=False)

    def moved(part: Pages) -> Pages:
        return jax.tree.map(partial(move, part), part)

    return tuple(replace(pages, k=moved(pages.k), v=moved(pages.v)) for pages in pools)
