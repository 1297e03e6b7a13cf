"""Lays out paged K and V as all attention kernels share them. kv_formats.py has what is stored there.

One layer keeps K and V each as a pool of N pages: values [N, K, P, D]. So one page of one head is one contiguous copy.
Quantized formats add float16 scales [N, K, P * G], G = D / group. They are flat, because a copy engine wants every
stride but the last to be a multiple of 16 bytes. The scale of group g of a page's token p is at p * G + g. With zero
points each token has the zeros of its G groups after its scales: 2G numbers.
"""

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.formats.kv_formats import KVFormat, decode, encode


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pages:
    """Holds K or V of one layer."""

    values: jax.Array  # [N, K, P, D]; fp8: uint8 [N, K, P, D]; int4: uint8 [N, K, P, D/2]
    scales: jax.Array | None  # float16 [N, K, P*G] (with zero points [N, K, P*2G]), or None for float formats
    format: KVFormat = field(metadata={"static": True})

    @property
    def num_pages(self) -> int:
        return self.values.shape[0]

    @property
    def page_size(self) -> int:
        return self.values.shape[2]

    @property
    def head_dim(self) -> int:
        return self.values.shape[3] * 8 * self.values.dtype.itemsize // self.format.bits

    @property
    def as_stored(self) -> "Pages":
        """Returns the same arrays, which gather then does not rotate back where they lie rotated."""
        return replace(self, format=replace(self.format, hadamard=False))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowMap:
    """Maps each of a step's T rows to its sequence, and to its place among that sequence's rows."""

    slot: jax.Array  # i32[T], out of range for a row that is not in use
    index: jax.Array  # i32[T], the cache index
    start: jax.Array  # i32[T], that of its sequence's first row in the step
    stop: jax.Array  # i32[T], that after its last
    sequences: int = field(metadata={"static": True})  # at most


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tail:
    """Holds K and V of each slot's newest tokens as they were computed. It is a ring of W tokens: that of cache index i
    is at i % W."""

    k: Pages  # [S, K, W, D] of a float type: a page a slot
    v: Pages
    # While a layer computes a step: where its rows are, and their K and V [T, K, D] in the dtype of the rings.
    row_map: RowMap | None = None
    rows: tuple[jax.Array, jax.Array] | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVPages:
    """Holds the KV cache of one layer."""

    k: Pages
    v: Pages
    tail: Tail | None = field(default=None, kw_only=True)  # where K is stored as Kivi, while a step runs

    @property
    def narrow(self) -> bool:
        """Tells whether both are stored in 8 or 4 bits."""
        return all(part.values.dtype.itemsize == 1 for part in (self.k, self.v))


def allocate(
    num_pages: int, num_kv_heads: int, page_size: int, head_dim: int, k_format: KVFormat, v_format: KVFormat
) -> KVPages:
    """Returns the pages of one layer, all zero. For shapes alone: `jax.eval_shape(lambda: allocate(...))`."""

    def pool(fmt: KVFormat) -> Pages:
        values = jnp.zeros((num_pages, num_kv_heads, page_size, fmt.row(head_dim)), fmt.storage_dtype)
        numbers = fmt.numbers(head_dim)
        scales = jnp.zeros((num_pages, num_kv_heads, page_size * numbers), jnp.float16) if numbers else None
        return Pages(values, scales, fmt)

    return KVPages(pool(k_format), pool(v_format))


def write(pages: Pages, x: jax.Array, page: jax.Array, offset: jax.Array) -> Pages:
    """Encodes x [T, K, D] and stores row t at slot `offset[t]` of page `page[t]` (both i32[T]), no slot twice. A row
    whose page is outside of [0, N) is dropped."""
    return store(pages, *encode(x, pages.format), page, offset)


def store(pages: Pages, values: jax.Array, scales: jax.Array | None, page: jax.Array, offset: jax.Array) -> Pages:
    """Writes what is encoded: values [T, K, D] as stored, scales [T, K, numbers] of each token."""
    num_pages, num_heads, page_size, _ = pages.values.shape
    heads = jnp.arange(num_heads, dtype=jnp.int32)

    # Heads are indexed too: a scatter over leading dims never needs a transposed copy of the pool.
    def put(pool: jax.Array, rows: jax.Array) -> jax.Array:
        at = pool.at[page[:, None], heads[None, :], offset[:, None]]
        return at.set(rows, mode="drop", unique_indices=True, wrap_negative_indices=False)

    new = replace(pages, values=put(pages.values, values))
    if scales is None:
        return new
    assert pages.scales is not None
    rows = put(pages.scales.reshape(num_pages, num_heads, page_size, -1), scales)
    return replace(new, scales=rows.reshape(pages.scales.shape))


def gather(pages: Pages, page: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Returns the tokens of some pages, decoded: page i32[W, n] gives [W, K, n * P, D] of `dtype`. Pages are in
    range."""
    _, num_heads, page_size, _ = pages.values.shape
    heads = jnp.arange(num_heads, dtype=jnp.int32)

    def load(pool: jax.Array) -> jax.Array:  # heads indexed: the result needs no transposition
        rows = pool.at[page[:, None, :], heads[None, :, None]].get(mode="clip")
        return rows.reshape(page.shape[0], num_heads, page.shape[1] * page_size, -1)

    scales = None if pages.scales is None else load(pages.scales)
    return decode(load(pages.values), scales, pages.format, dtype)


def gather_tokens(pages: Pages, table: jax.Array, index: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Returns the tokens at cache indices i32[W, t] of sequences with page tables i32[W, M], decoded. The result is [W,
    K, t, D] of `dtype`. Indices past a table are any token's."""
    num_pages, num_heads, page_size, _ = pages.values.shape
    heads = jnp.arange(num_heads, dtype=jnp.int32)[None, :, None]
    page = jnp.take_along_axis(table, index // page_size, axis=1, mode="clip")
    at = page[:, None, :], heads, (index % page_size)[:, None, :]
    scales = None
    if pages.scales is not None:
        scales = pages.scales.reshape(num_pages, num_heads, page_size, -1).at[at].get(mode="clip")
    return decode(pages.values.at[at].get(mode="clip"), scales, pages.format, dtype)
