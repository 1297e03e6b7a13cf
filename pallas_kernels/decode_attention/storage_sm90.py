"""Holds K and V in decode_attention's shared memory, and turns what is stored into what wgmma multiplies."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode_attention.config import ROWS, Config
from pallas_kernels.decode_attention.unpack_sm90 import (
    BY_8_ROWS,
    BY_16_ROWS,
    Grouping,
    operand,
    operand_order,
    scaled,
    to_float16,
)
from pallas_kernels.formats.kv_formats import LARGEST_CODE, KVFormat
from pallas_kernels.formats.kv_pages import Pages, padded_scales
from pallas_kernels.hopper.hopper import SHARED_MEMORY
from pallas_kernels.hopper.smem_sm90 import swizzled

_SCALES = 64  # of one copy, at least: 128 bytes


@dataclass(frozen=True)
class Storage:
    """Describes K or V of a kernel. In a tile each warpgroup has 64 tokens of its head, copied in `parts` of up to a
    page."""

    format: KVFormat
    dtype: Any  # of the product
    head_dim: int
    kv_heads: int
    page_size: int
    computing: int  # warpgroups
    through_registers: bool  # to wgmma, if it can
    by_warps: bool  # or to mma, each warp its own tokens
    repeat: int  # times that integers are dequantized, to the same bits: what an experiment asks for

    @property
    def direct(self) -> bool:
        """Tells whether the product reads tiles as they are copied."""
        return self.format.storage_dtype == self.dtype

    @property
    def tokens(self) -> int:
        """Counts the tokens of one part."""
        return min(self.page_size, ROWS)

    @property
    def parts(self) -> int:
        return ROWS // self.tokens

    @property
    def row(self) -> int:
        """Counts stored elements a token."""
        return self.head_dim // 2 if self.format.dtype == "int4" else self.head_dim

    def token_bytes(self, name: str) -> int:
        """Counts the bytes of a token's values, or of its scales, as `name` says."""
        return 2 * self.numbers if name.endswith("scales") else self.row * self.format.storage_dtype.itemsize

    @property
    def by_lanes(self) -> bool:
        """Tells whether lanes copy, not TMA."""
        return self.by_warps

    def rows(self, values: jax.Array) -> jax.Array:
        """Returns the pool of values [L N, K, P, ..] in the rows of which tiles consist, one KV head's after the
        other's."""
        return values.reshape(values.shape[0], -1, self.row)

    def value_slice(self, kv_head: jax.Array, offset: Any) -> Any:
        """Returns what to copy of a page, for tokens from `offset` of it on."""
        return pl.ds(kv_head * self.page_size + offset, self.tokens)

    def value_part(self, i: int) -> Any:
        """Returns where part i's values are copied to, in a slot."""
        return pl.ds(i * self.tokens, self.tokens)

    @property
    def groups(self) -> int:
        return self.format.groups(self.head_dim)

    @property
    def numbers(self) -> int:
        """Counts a token's scales, and zeros where there are any."""
        return self.format.numbers(self.head_dim)

    @property
    def by_factor(self) -> bool:
        """Tells whether a token's only scale multiplies its logit, or its weight, instead of its values. Its only zero
        then adds to the logit, times the query's sum. Or it adds to all dims of the result, times the weight."""
        return self.by_warps and self.groups == 1

    @property
    def middle(self) -> int:
        """Returns what stored codes are too small by, where there are zeros."""
        return LARGEST_CODE[self.format.dtype] + 1

    @property
    def in_registers(self) -> bool:
        """Tells whether it goes from its stored form to the product through registers."""
        return self.format.storage_dtype.itemsize == 1 and self.through_registers and not self.by_warps

    def queries(self, q: jax.Array) -> jax.Array:
        """Returns queries [.., D], their dims in the order in which K's are multiplied."""
        if self.by_warps:
            return q
        if self.in_registers:
            return operand_order(q, self.format.dtype)
        return even_dims_first(q) if self.format.dtype == "int4" else q

    def results(self, out: jax.Array) -> jax.Array:
        """Returns results [.., D] in their order, from that of V's dims: int4's even ones first."""
        if self.by_warps:
            return out
        return dims_in_order(out) if self.format.dtype == "int4" else out

    @property
    def by_token(self) -> bool:
        """Tells whether scales are copied as [tokens, numbers]: TMA wants such rows to be multiples of 16 bytes."""
        return self.numbers >= 8

    @property
    def scales(self) -> int:
        """Counts the scales copied with each part: its own, and where those are few, some of its neighbours'."""
        own = self.tokens * self.numbers
        return own if self.by_token or self.by_lanes or not own else max(own, _SCALES)

    @property
    def packed(self) -> bool:
        """Tells whether the scales of a tile lie one after the other."""
        return self.scales == self.tokens * self.numbers

    @property
    def padded(self) -> bool:
        """Tells whether a copy takes more than a page's scales: with one KV head, small pages and one or two groups."""
        own = self.by_token or self.by_lanes or self.packed
        return not own and self.kv_heads * self.page_size * self.numbers < _SCALES

    def scale_rows(self, pages: Pages) -> jax.Array:
        """Returns the pool of scales [L N, K, P * numbers] such that a part's copy is one slice of a page. Padded ones
        are the layer's alone."""
        assert pages.scales is not None
        scales = pages.scales.reshape(pages.scales.shape[0], -1)
        if self.by_token or self.by_lanes:
            return scales.reshape(scales.shape[0], -1, self.numbers)
        if self.packed:
            return scales.reshape(scales.shape[0], -1, _SCALES)
        return padded_scales(pages, _SCALES) if self.padded else scales

    def scale_slice(self, kv_head: jax.Array, offset: Any) -> tuple[Any, jax.Array]:
        """Returns what to copy of a page, for tokens from `offset` of it on, and where in the copy they are."""
        token = kv_head * self.page_size + offset
        if self.by_token:
            return pl.ds(token, self.tokens), jnp.int32(0)
        start = token * self.numbers
        if self.packed:
            return pl.ds(start // _SCALES, self.scales // _SCALES), jnp.int32(0)
        begin = jnp.minimum(start, max(self.kv_heads * self.page_size * self.numbers, _SCALES) - self.scales)
        return pl.ds(begin, self.scales), start - begin

    def scratch(self, name: str, stages: int) -> dict[str, Any]:
        """Returns the shared memory of K or V, by name."""
        every = (stages, self.computing)
        buffers = {name: swizzled((*every, ROWS, self.row), self.format.storage_dtype)}
        if self.groups:
            shape: tuple[int, ...] = (self.parts, self.scales)
            if self.by_token and not self.by_lanes:
                shape = (self.parts, self.tokens, self.numbers)
            elif self.packed and not self.by_lanes:
                shape = (self.parts, self.scales // _SCALES, _SCALES)
            buffers[f"{name}_scales"] = plgpu.SMEM((*every, *shape), jnp.float16)
            if not (self.packed or self.by_warps):
                packed = (self.computing, self.parts, self.tokens * self.numbers)
                buffers[f"{name}_packed"] = plgpu.SMEM(packed, jnp.float16)
        if not (self.direct or self.in_registers or self.by_warps):
            buffers[f"{name}_tile"] = swizzled((self.computing, ROWS, self.head_dim), self.dtype)
        return buffers

    def read(self, stored: Any, scales: Any, packed: Any, shift: jax.Array) -> jax.Array:
        """Reads a warpgroup's tokens [64, D] for the product, from where they are stored; `shift` is scale_slice's."""

        def tile(parts: list[jax.Array], scales: Any, grouping: Grouping) -> jax.Array:
            return jnp.concatenate(scaled(grouping, parts, scales) if self.groups else parts, axis=1)

        return self._converted(tile, BY_16_ROWS, stored, scales, packed, shift)

    def read_k(self, stored: Any, scales: Any, packed: Any, shift: jax.Array) -> jax.Array:
        """Reads them into registers, as the product's left operand, its dims in operand_order."""

        def k(parts: list[jax.Array], scales: Any, grouping: Grouping) -> jax.Array:
            return operand(grouping, parts, scales)

        return self._converted(k, BY_8_ROWS, stored, scales, packed, shift)

    def _converted(
        self, convert: Callable[..., jax.Array], layout: Any, stored: Any, scales: Any, packed: Any, shift: jax.Array
    ) -> jax.Array:
        values = plgpu.load(stored, layout=layout, optimized=False)
        if self.groups and not self.packed:
            self._pack(scales, packed, shift)
            scales = packed

        def converted(values: jax.Array) -> jax.Array:
            if self.format.storage_dtype.itemsize == 2:
                return values.astype(jnp.float32).astype(self.dtype)
            parts = to_float16(values, self.format.dtype, layout, self.format.zero_point)
            return convert(parts, scales, Grouping(self.format.group or 0, self.groups, self.numbers))

        tile = converted(values)
        for _ in range(self.repeat - 1):  # the barrier hides from the compiler that it is the same again
            values = lax.optimization_barrier(values)
            tile = jnp.maximum(tile, converted(values))
        return tile

    def _pack(self, scales: Any, packed: Any, shift: jax.Array) -> None:
        """Moves a tile's own scales together."""
        size = self.tokens * self.numbers
        rows = 32 // size
        layout = plgpu.Layout.TILED(
            plgpu.Tiling(((rows, size), (1,))), (plgpu.Replicated(4),), (-3, -2) if rows > 1 else (-2,), -1
        )
        packed[...] = plgpu.load(scales.at[:, pl.ds(shift, size)], layout=layout, optimized=False)


def storage(
    pages: Pages, dtype: Any, head_dim: int, config: Config, through_registers: bool, by_warps: bool
) -> Storage:
    """Returns how a kernel of such tiles holds K or V. All but bfloat16 is multiplied in float16. bfloat16 would round
    it as much as the results are. float16 holds what float16 scales are for; past 65504 it overflows."""
    if pages.format.dtype != "bfloat16":
        dtype = jnp.float16
    kv_heads, page_size = pages.values.shape[1:3]
    return Storage(
        format=pages.format,
        dtype=jnp.dtype(dtype),
        head_dim=head_dim,
        kv_heads=kv_heads,
        page_size=page_size,
        computing=config.computing,
        through_registers=through_registers,
        by_warps=by_warps,
        repeat=config.dequantize,
    )


def even_dims_first(x: jax.Array) -> jax.Array:
    """Orders [..., D] as dims 0, 2, 4, .., then 1, 3, 5, .."""
    return x.reshape(*x.shape[:-1], -1, 2).swapaxes(-1, -2).reshape(x.shape)


def dims_in_order(x: jax.Array) -> jax.Array:
    """Reverses even_dims_first."""
    return x.reshape(*x.shape[:-1], 2, -1).swapaxes(-1, -2).reshape(x.shape)


def shared_bytes_of_worker(per_sm: int) -> int:
    """Returns what each of per_sm CTAs of a multiprocessor may have; 1 KB is taken for each."""
    return (SHARED_MEMORY + 1024) // per_sm - 1024
