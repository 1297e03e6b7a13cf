"""Lays out paged K and V as all attention kernels share them. kv_formats.py has what is stored there.

K and V are each a pool of N pages for each of L layers, in one array: values [L N, K, P, D]. Page n of layer l is row l
N + n, and one page of one head is one contiguous copy. Page tables count from 0 in every layer, and a page outside of
[0, N) is none of a layer's: bounds come before the layer's first row is added. Quantized formats add float16 scales [L
N, K, P * G], G = D / group. They are flat, because a copy engine wants every stride but the last to be a multiple of 16
bytes. The scale of group g of a page's token p is at p * G + g. With zero points each token has the zeros of its G
groups after its scales: 2G numbers.
"""

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.formats.kv_formats import KVFormat, decode, encode


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pages:
    """Holds K or V of L layers. With `layer` it stands for the pages of that one."""

    values: jax.Array  # [L N, K, P, D]; fp8: uint8 [L N, K, P, D]; int4: uint8 [L N, K, P, D/2]
    scales: jax.Array | None  # float16 [L N, K, P*G] (with zero points [L N, K, P*2G]), or None for float formats
    format: KVFormat = field(metadata={"static": True})
    layers: int = field(default=1, metadata={"static": True})  # L
    layer: jax.Array | None = None  # i32[], in [0, L); None: all of them

    @property
    def num_pages(self) -> int:
        """Returns N, the pages of one layer."""
        return self.values.shape[0] // self.layers

    @property
    def layer_operand(self) -> jax.Array:
        """Returns the layer as kernels read it, i32[1]. Raises ValueError where none of several is chosen."""
        if self.layer is None:
            if self.layers > 1:
                raise ValueError(f"the pages are of {self.layers} layers: choose one with pages.at_layer(i)")
            return jnp.zeros(1, jnp.int32)
        return jnp.reshape(self.layer, 1)

    def rows_read(self, page: jax.Array) -> jax.Array:
        """Returns the rows of the layer's pages. A page outside of [0, N) becomes the nearest one."""
        return jnp.clip(page, 0, self.num_pages - 1) + self.layer_operand[0] * self.num_pages

    def rows_written(self, page: jax.Array) -> jax.Array:
        """Returns the rows of the layer's pages. A page outside of [0, N) gets L N, which no pool has."""
        inside = (page >= 0) & (page < self.num_pages)
        return jnp.where(inside, page + self.layer_operand[0] * self.num_pages, self.values.shape[0])

    def rows_of_all(self, page: jax.Array) -> jax.Array:
        """Returns the rows of pages i32[...] in each layer, i32[L, ...]. A page outside of [0, N) gets L N."""
        first = self.num_pages * jnp.arange(self.layers, dtype=jnp.int32).reshape(-1, *(1,) * page.ndim)
        inside = (page >= 0) & (page < self.num_pages)
        return jnp.where(inside[None], page[None] + first, self.values.shape[0])

    def at_layer(self, layer: int | None) -> "Pages":
        """Returns the same arrays, which stand for the pages of one layer, or (None) of all."""
        return replace(self, layer=None if layer is None else jnp.int32(layer))

    def __getitem__(self, layer: int) -> "Pages":
        """Returns the pages of one layer alone, in arrays of their own. Raises IndexError for a layer that is not
        there."""
        rows = slice(layer % self.layers * self.num_pages, (layer % self.layers + 1) * self.num_pages)
        if not -self.layers <= layer < self.layers:
            raise IndexError(f"layer {layer} of {self.layers}")
        return Pages(self.values[rows], None if self.scales is None else self.scales[rows], self.format)

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

    k: Pages  # [L S, K, W, D] of a float type: a page a slot
    v: Pages
    # While a layer computes a step: where its rows are, and their K and V [T, K, D] in the dtype of the rings.
    row_map: RowMap | None = None
    rows: tuple[jax.Array, jax.Array] | None = None

    def at_layer(self, layer: int | None) -> "Tail":
        """Returns the rings of one layer, or (None) of all, as Pages.at_layer does."""
        return replace(self, k=self.k.at_layer(layer), v=self.v.at_layer(layer))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVPages:
    """Holds the KV cache of L layers. `cache[i]` has layer i in arrays of its own, for those who read it outside of a
    step."""

    k: Pages
    v: Pages
    tail: Tail | None = field(default=None, kw_only=True)  # where K is stored as Kivi, while a step runs

    @property
    def narrow(self) -> bool:
        """Tells whether both are stored in 8 or 4 bits."""
        return all(part.values.dtype.itemsize == 1 for part in (self.k, self.v))

    def at_layer(self, layer: int | None) -> "KVPages":
        """Returns the same arrays, which stand for the pages of one layer, or (None) of all."""
        tail = None if self.tail is None else self.tail.at_layer(layer)
        return KVPages(self.k.at_layer(layer), self.v.at_layer(layer), tail=tail)

    def __getitem__(self, layer: int) -> "KVPages":
        return KVPages(self.k[layer], self.v[layer])

    def __len__(self) -> int:
        return self.k.layers


def allocate(
    num_pages: int,
    num_kv_heads: int,
    page_size: int,
    head_dim: int,
    k_format: KVFormat,
    v_format: KVFormat,
    *,
    layers: int = 1,
) -> KVPages:
    """Returns N pages for each of L layers, all zero. For shapes alone: `jax.eval_shape(lambda: allocate(...))`."""

    def pool(fmt: KVFormat) -> Pages:
        leading, numbers = (layers * num_pages, num_kv_heads), fmt.numbers(head_dim)
        values = jnp.zeros((*leading, page_size, fmt.row(head_dim)), fmt.storage_dtype)
        scales = jnp.zeros((*leading, page_size * numbers), jnp.float16) if numbers else None
        return Pages(values, scales, fmt, layers)

    return KVPages(pool(k_format), pool(v_format))


def apart[T](pools: T) -> T:
    """Returns the pools for a kernel that writes several of them in place, each as an operand of its own.

    XLA makes one operand of equal arrays, such as the zeros of a new K and V. If the kernel also reads a slice, XLA
    fuses both (JAX 0.11.2). The fusion takes the operand once, and gives both results its place. A barrier keeps equal
    arrays apart until then.
    """
    return jax.lax.optimization_barrier(pools)


def write(pages: Pages, x: jax.Array, page: jax.Array, offset: jax.Array) -> Pages:
    """Encodes x [T, K, D] and stores row t at slot `offset[t]` of page `page[t]` (both i32[T]), no slot twice. A row
    whose page is outside of [0, N) is dropped."""
    return store(pages, *encode(x, pages.format), page, offset)


def store(pages: Pages, values: jax.Array, scales: jax.Array | None, page: jax.Array, offset: jax.Array) -> Pages:
    """Writes what is encoded: values [T, K, D] as stored, scales [T, K, numbers] of each token."""
    count, num_heads, page_size, _ = pages.values.shape
    heads, row = jnp.arange(num_heads, dtype=jnp.int32), pages.rows_written(page)

    # Heads are indexed too: a scatter over leading dims never needs a transposed copy of the pool.
    def put(pool: jax.Array, rows: jax.Array) -> jax.Array:
        at = pool.at[row[:, None], heads[None, :], offset[:, None]]
        return at.set(rows, mode="drop", unique_indices=True, wrap_negative_indices=False)

    new = replace(pages, values=put(pages.values, values))
    if scales is None:
        return new
    assert pages.scales is not None
    rows = put(pages.scales.reshape(count, num_heads, page_size, -1), scales)
    return replace(new, scales=rows.reshape(pages.scales.shape))


def gather(pages: Pages, page: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Returns the tokens of some pages, decoded: page i32[W, n] gives [W, K, n * P, D] of `dtype`. Pages are in
    range."""
    _, num_heads, page_size, _ = pages.values.shape
    heads, row = jnp.arange(num_heads, dtype=jnp.int32), pages.rows_read(page)

    def load(pool: jax.Array) -> jax.Array:  # heads indexed: the result needs no transposition
        rows = pool.at[row[:, None, :], heads[None, :, None]].get(mode="clip")
        return rows.reshape(page.shape[0], num_heads, page.shape[1] * page_size, -1)

    scales = None if pages.scales is None else load(pages.scales)
    return decode(load(pages.values), scales, pages.format, dtype)


def padded_scales(pages: Pages, least: int) -> jax.Array:
    """Returns the scales of the layer's pages alone, padded to `least` a page: [N, least]."""
    assert pages.scales is not None
    first = pages.layer_operand[0] * pages.num_pages
    rows = jax.lax.dynamic_slice_in_dim(pages.scales, first, pages.num_pages).reshape(pages.num_pages, -1)
    return jnp.pad(rows, ((0, 0), (0, least - rows.shape[1])))


def gather_tokens(pages: Pages, table: jax.Array, index: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Returns the tokens at cache indices i32[W, t] of sequences with page tables i32[W, M], decoded. The result is [W,
    K, t, D] of `dtype`. Indices past a table are any token's."""
    count, num_heads, page_size, _ = pages.values.shape
    heads = jnp.arange(num_heads, dtype=jnp.int32)[None, :, None]
    row = pages.rows_read(jnp.take_along_axis(table, index // page_size, axis=1, mode="clip"))
    at = row[:, None, :], heads, (index % page_size)[:, None, :]
    scales = None
    if pages.scales is not None:
        scales = pages.scales.reshape(count, num_heads, page_size, -1).at[at].get(mode="clip")
    return decode(pages.values.at[at].get(mode="clip"), scales, pages.format, dtype)
