"""How decode_attention's kernel holds K and V in shared memory, and turns what is stored into what wgmma multiplies."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kv_pages import FP8, KVFormat, Pages

_SCALES = 64  # of one copy, at least: 128 bytes

# Which elements of a [tile, columns] array a thread holds: runs of 4 (of 2 where groups are that narrow), its warp's 16
# rows by 8 (4) columns at a time, so that any group is whole registers.
_RUNS_OF_4 = plgpu.Layout.TILED(plgpu.Tiling(((64, 8), (16, 8), (4,))), (-5,), (-3, -2), -1)
_RUNS_OF_2 = plgpu.Layout.TILED(plgpu.Tiling(((64, 4), (16, 4), (2,))), (-5,), (-3, -2), -1)


def tiled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory in which rows of 32, 64 or 128 bytes are swizzled: what TMA writes and wgmma reads."""
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = min(128, shape[-1] * itemsize)
    transforms = (plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle))  # type: ignore[abstract]
    return plgpu.SMEM(shape, dtype, transforms=transforms)


@dataclass(frozen=True)
class Storage:
    """K or V of a kernel: tiles of `tile` tokens, copied in `parts` of up to a page."""

    format: KVFormat
    dtype: Any  # of the product
    head_dim: int
    kv_heads: int
    page_size: int
    tile: int
    interpreted: bool  # by the GPU interpreter, which cannot reshape what is in shared memory
    repeat: int = 1  # times that integers are dequantized, to the same bits: what an experiment asks for

    @property
    def direct(self) -> bool:
        """Whether the product reads tiles as they are copied."""
        return self.format.storage_dtype == self.dtype

    @property
    def tokens(self) -> int:
        """Of one part."""
        return min(self.page_size, self.tile)

    @property
    def parts(self) -> int:
        return self.tile // self.tokens

    @property
    def row(self) -> int:
        """Stored elements a token."""
        return self.head_dim // 2 if self.format.dtype == "int4" else self.head_dim

    @property
    def groups(self) -> int:
        return self.format.groups(self.head_dim)

    @property
    def permuted(self) -> bool:
        """Whether `read` yields the even dims first, then the odd ones: how int4 unpacks at no cost."""
        return self.format.dtype == "int4"

    @property
    def by_token(self) -> bool:
        """Whether scales are copied as [tokens, G]: TMA wants such rows to be multiples of 16 bytes."""
        return self.groups >= 8 or self.interpreted

    @property
    def scales(self) -> int:
        """Copied with each part: its own, and where those are few, some of its neighbours'."""
        own = self.tokens * self.groups
        return own if self.by_token or not own else max(own, _SCALES)

    @property
    def packed(self) -> bool:
        """Whether the scales of a tile lie one after the other."""
        return self.scales == self.tokens * self.groups

    def scale_rows(self, scales: jax.Array) -> jax.Array:
        """The pool of scales [N, K, P * G] such that a part's copy is one slice of a page."""
        if self.by_token:
            return scales.reshape(scales.shape[0], -1, self.groups)
        if self.packed:
            return scales.reshape(scales.shape[0], -1, _SCALES)
        rows = scales.reshape(scales.shape[0], -1)
        missing = _SCALES - rows.shape[1]  # only in toys: one KV head, small pages and one or two groups
        return rows if missing <= 0 else jnp.pad(rows, ((0, 0), (0, missing)))

    def scale_slice(self, kv_head: jax.Array, offset: Any) -> tuple[Any, jax.Array]:
        """What to copy of a page, for tokens from `offset` of it on, and where in the copy they are."""
        token = kv_head * self.page_size + offset
        if self.by_token:
            return pl.ds(token, self.tokens), jnp.int32(0)
        start = token * self.groups
        if self.packed:
            return pl.ds(start // _SCALES, self.scales // _SCALES), jnp.int32(0)
        begin = jnp.minimum(start, max(self.kv_heads * self.page_size * self.groups, _SCALES) - self.scales)
        return pl.ds(begin, self.scales), start - begin

    def scale_part(self, i: int) -> Any:
        """Where part i's scales are copied to, in a slot."""
        return pl.ds(i * self.tokens, self.tokens) if self.by_token else i

    def scratch(self, name: str, stages: int) -> dict[str, Any]:
        """The shared memory of one of both, by name."""
        buffers = {name: tiled((stages, self.tile, self.row), self.format.storage_dtype)}
        if self.groups:
            shape: tuple[int, ...] = (self.parts, self.scales)
            if self.by_token:
                shape = (self.tile, self.groups)
            elif self.packed:
                shape = (self.parts, self.scales // _SCALES, _SCALES)
            buffers[f"{name}_scales"] = plgpu.SMEM((stages, *shape), jnp.float16)
            if not self.packed:
                buffers[f"{name}_packed"] = plgpu.SMEM((self.parts, self.tokens * self.groups), jnp.float16)
        if not self.direct:
            buffers[f"{name}_tile"] = tiled((self.tile, self.head_dim), self.dtype)
        return buffers

    def stage_bytes(self) -> int:
        return self.tile * self.row * self.format.storage_dtype.itemsize + self.parts * self.scales * 2

    def other_bytes(self) -> int:
        converted = 0 if self.direct else self.tile * self.head_dim * self.dtype.itemsize
        return converted + self.tile * self.groups * 2

    def read(self, stored: Any, scales: Any, packed: Any, shift: jax.Array) -> jax.Array:
        """A tile [tile, D] for the product, from the slot that holds it; `shift` is scale_slice's."""
        width = self.row // max(self.groups, 1)
        layout = _RUNS_OF_4 if width % 8 == 0 else _RUNS_OF_2
        values = plgpu.load(stored, layout=layout, optimized=False)
        if not self.groups:
            return self._float(values)
        if not self.packed:
            self._pack(scales, packed, shift)
            scales = packed
        if not self.by_token:
            scales = scales.reshape(self.tile, self.groups)
        tile = self._dequantize(values, scales, layout)
        for _ in range(self.repeat - 1):  # the barrier hides from the compiler that it is the same again
            values = lax.optimization_barrier(values)
            tile = jnp.maximum(tile, self._dequantize(values, scales, layout))
        return tile

    def _dequantize(self, values: jax.Array, scales: Any, layout: Any) -> jax.Array:
        """[tile, D] from the codes in registers and their scales [tile, G] in shared memory."""
        width = self.row // self.groups
        halves = self._integers(values)
        columns: list[list[jax.Array]] = [[] for _ in halves]
        for group in range(self.groups):
            scale = plgpu.load(scales.at[:, group], layout=layout.reduce(1), optimized=False).astype(jnp.float32)
            shape = (self.tile, width)
            spread = plgpu.layout_cast(lax.broadcast_in_dim(scale, shape, [0]), layout)
            for half, column in zip(halves, columns):
                codes = half(lax.slice(values, (0, group * width), (self.tile, (group + 1) * width)))
                column.append((codes * spread).astype(self.dtype))
        return jnp.concatenate([part for column in columns for part in column], axis=1)

    def _float(self, values: jax.Array) -> jax.Array:
        if self.format.dtype == FP8:  # ptxas has no conversion to bfloat16
            values = lax.bitcast_convert_type(values, jnp.float8_e4m3fn).astype(jnp.float16)
        if values.dtype != self.dtype:
            values = values.astype(jnp.float32).astype(self.dtype)
        return values

    def _integers(self, values: jax.Array) -> list[Any]:
        """Functions from a slice of stored values to float32 codes: one, or int4's even and odd dims."""

        def exact(x: jax.Array) -> jax.Array:  # int8 to bfloat16 has a fast path
            return x.astype(jnp.bfloat16).astype(jnp.float32)

        def byte(x: jax.Array) -> jax.Array:
            return lax.bitcast_convert_type(x, jnp.int8)

        if self.format.dtype == "int8":
            return [exact]
        # The low nibble, its sign bit flipped, is 8 more than the code; the high one alone 16 times the code.
        return [
            lambda x: exact((byte(x) & jnp.int8(15)) ^ jnp.int8(8)) - 8.0,
            lambda x: exact(byte(x) & jnp.int8(-16)) * 0.0625,
        ]

    def _pack(self, scales: Any, packed: Any, shift: jax.Array) -> None:
        """Moves a tile's own scales together."""
        size = self.tokens * self.groups
        rows = 32 // size
        layout = plgpu.Layout.TILED(
            plgpu.Tiling(((rows, size), (1,))), (plgpu.Replicated(4),), (-3, -2) if rows > 1 else (-2,), -1
        )
        packed[...] = plgpu.load(scales.at[:, pl.ds(shift, size)], layout=layout, optimized=False)


def storage(pages: Pages, dtype: Any, head_dim: int, tile: int, interpreted: bool, repeat: int = 1) -> Storage:
    """How a kernel of such tiles holds K or V. All but bfloat16 is multiplied in float16: bfloat16 would round it as
    much as the results are, and float16 holds what float16 scales are for (past 65504 it overflows)."""
    if pages.format.dtype != "bfloat16":
        dtype = jnp.float16
    kv_heads, page_size = pages.values.shape[1:3]
    return Storage(pages.format, jnp.dtype(dtype), head_dim, kv_heads, page_size, tile, interpreted, repeat)


def even_dims_first(x: jax.Array) -> jax.Array:
    """[..., D] -> [..., D]: dims 0, 2, 4, .., then 1, 3, 5, .."""
    return x.reshape(*x.shape[:-1], -1, 2).swapaxes(-1, -2).reshape(x.shape)


def dims_in_order(x: jax.Array) -> jax.Array:
    """The inverse of even_dims_first."""
    return x.reshape(*x.shape[:-1], 2, -1).swapaxes(-1, -2).reshape(x.shape)


def shared_bytes_left(per_sm: int) -> int:
    """Of an SM of compute capability 9.0, for each of its CTAs, without reductions, barriers and alignment."""
    return 227 * 1024 // per_sm - 8 * 1024
