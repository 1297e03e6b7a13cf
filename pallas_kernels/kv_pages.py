"""Paged KV storage: the layout that all attention kernels share, its formats, and their encoding.

One layer keeps K and V each as a pool of N pages: values [N, K, P, D], so that one page of one head is one contiguous
copy. Quantized formats add float16 scales [N, K, P * G], G = D / group: flat, because a copy engine wants every stride
but the last to be a multiple of 16 bytes; the scale of group g of a page's token p is at p * G + g. With zero points
each token has the zeros of its G groups after its scales: 2G numbers. int4 packs two values a byte along D, the even
one in the low nibble (the order of `bitcast_convert_type` to int4): values are uint8 [N, K, P, D / 2]. fp8 is stored as
its bits, uint8 too: where XLA has no native fp8 (the CPU), a gather or scatter of it converts the whole pool.

What a format with `hadamard` stores is rotated along D (hadamard.turn). Attention then rotates its queries instead of
all keys, and its result instead of all values.
"""

import re
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.hadamard import turn
from pallas_kernels.numerics import compute_dtype

FP8 = "float8_e4m3fn"
FLOATS = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64", "fp8": FP8}
LARGEST_CODE = {"int8": 127, "int4": 7}  # symmetric: -128 and -8 are written with zero points only


@dataclass(frozen=True)
class KVFormat:
    """How K or V is stored: a float type, or "int8"/"int4" with one scale per `group` values along D.

    A format of one's own is a frozen dataclass that inherits from this one, with its own `bits`, `encode` and `decode`,
    and what of the rest differs: `dtype` is then that of the values array. Plain jnp stores and reads it; kernels list
    the formats that they know, and refuse it.
    """

    dtype: str
    group: int | None = None
    zero_point: bool = False  # a group has its least value beside its scale, and all 256 or 16 codes
    hadamard: bool = False  # what is stored is rotated

    @property
    def name(self) -> str:
        """What parse_format makes this of."""
        floats = {dtype: name for name, dtype in FLOATS.items()}
        name = floats.get(self._kind, self._kind) if self.group is None else f"{self._kind}-g{self.group}"
        return name + self._suffix

    @property
    def codes(self) -> str:
        """What kernels list: the name less its group's size."""
        return self._kind + self._suffix

    @property
    def _kind(self) -> str:
        return self.dtype if type(self) is KVFormat else type(self).__name__

    @property
    def _suffix(self) -> str:
        return "-zp" * self.zero_point + "-h" * self.hadamard

    @property
    def storage_dtype(self) -> jnp.dtype:
        """The dtype of the values array."""
        return jnp.dtype("uint8" if self.dtype in ("int4", FP8) else self.dtype)

    @property
    def bits(self) -> int:
        """Of a value along D, as stored."""
        return 4 if self.dtype == "int4" else 8 * self.storage_dtype.itemsize

    def row(self, head_dim: int) -> int:
        """Entries of the values array per token and head."""
        return head_dim * self.bits // (8 * self.storage_dtype.itemsize)

    def fits(self, head_dim: int) -> bool:
        """Whether a head is whole entries, and whole groups."""
        return head_dim * self.bits % (8 * self.storage_dtype.itemsize) == 0 == head_dim % (self.group or 1)

    def encode(self, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Values and scales of x [..., D], as the function `encode` returns them, but for the rotation."""
        return _encode(x, self)

    def decode(self, values: jax.Array, scales: jax.Array | None, dtype: DTypeLike) -> jax.Array:
        """The reverse: [..., D] of `dtype`."""
        return _decode(values, scales, self, dtype)

    def groups(self, head_dim: int) -> int:
        """Groups per token and head (0 for float formats)."""
        return 0 if self.group is None else head_dim // self.group

    def numbers(self, head_dim: int) -> int:
        """Entries of the scales array per token and head: scales, and zeros where there are any."""
        return self.groups(head_dim) * (2 if self.zero_point else 1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pages:
    """K or V of one layer."""

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
        """The same arrays, of which gather does not rotate back what lies there rotated."""
        return replace(self, format=replace(self.format, hadamard=False))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVPages:
    """The KV cache of one layer."""

    k: Pages
    v: Pages

    @property
    def narrow(self) -> bool:
        """Whether both are stored in 8 or 4 bits."""
        return all(part.values.dtype.itemsize == 1 for part in (self.k, self.v))


def parse_format(name: str, head_dim: int) -> KVFormat:
    """The format called `name`: bf16, f16, f32, f64, fp8 (e4m3), int8-gN[-zp] or int4-gN[-zp] with groups of N values
    along D; each also with -h, rotated.

    Raises ValueError for an unknown name, and for a group that isn't a multiple of 8 dividing `head_dim`.
    """
    base, hadamard = name.removesuffix("-h"), name.endswith("-h")
    if base in FLOATS:
        return KVFormat(FLOATS[base], hadamard=hadamard)
    match = re.fullmatch(r"(int8|int4)-g([1-9][0-9]*)(-zp)?", base)
    if match is None:
        raise ValueError(
            f"unknown KV format {name!r}; formats: {', '.join(FLOATS)}, int8-gN, int4-gN (N = 8, 16, ..), these two "
            "also with -zp, and all with -h"
        )
    group = int(match[2])
    if group % 8 or group > head_dim or head_dim % group:
        raise ValueError(
            f"KV format {name!r}: group {group} must be a multiple of 8 that divides the head dim {head_dim}"
        )
    return KVFormat(match[1], group, match[3] is not None, hadamard)


def allocate(
    num_pages: int, num_kv_heads: int, page_size: int, head_dim: int, k_format: KVFormat, v_format: KVFormat
) -> KVPages:
    """The pages of one layer, all zero. Their shapes alone: `jax.eval_shape(lambda: allocate(...))`."""

    def pool(fmt: KVFormat) -> Pages:
        values = jnp.zeros((num_pages, num_kv_heads, page_size, fmt.row(head_dim)), fmt.storage_dtype)
        numbers = fmt.numbers(head_dim)
        scales = jnp.zeros((num_pages, num_kv_heads, page_size * numbers), jnp.float16) if numbers else None
        return Pages(values, scales, fmt)

    return KVPages(pool(k_format), pool(v_format))


def bytes_per_token(head_dim: int, num_kv_heads: int, k_format: KVFormat, v_format: KVFormat) -> int:
    """Bytes of K and V that one token takes in one layer, scales included."""

    def row(fmt: KVFormat) -> int:
        values = fmt.row(head_dim) * fmt.storage_dtype.itemsize
        return values + fmt.numbers(head_dim) * jnp.dtype(jnp.float16).itemsize

    return num_kv_heads * (row(k_format) + row(v_format))


def encode(x: jax.Array, fmt: KVFormat) -> tuple[jax.Array, jax.Array | None]:
    """Stores x [..., D] as `fmt`: values [..., D] (int4: [..., D/2]) and scales f16 [..., G], or None for floats; with
    zero points f16 [..., 2G], the scales and then the zeros.

    Symmetric groups: scale = absmax / 127 (int4: 7), rounded to float16 within its normal range; values are x over
    the *rounded* scale, to nearest even, clipped. With zero points: zero = the least value, rounded to float16 (to 0
    below its normal range), and scale = (the largest - zero) / 255 (int4: 15), rounded as above; values are
    (x - zero) / scale, less 128 (int4: 8). fp8 saturates at 448. With `hadamard` all that is of x rotated, in float32
    at least.
    """
    if fmt.hadamard:
        x = turn(x.astype(compute_dtype(x.dtype)))
    return fmt.encode(x)


def _encode(x: jax.Array, fmt: KVFormat) -> tuple[jax.Array, jax.Array | None]:
    if fmt.dtype == FP8:
        limit = float(jnp.finfo(jnp.float8_e4m3fn).max)
        return jax.lax.bitcast_convert_type(jnp.clip(x, -limit, limit).astype(FP8), jnp.uint8), None
    if fmt.group is None:
        return x.astype(fmt.dtype), None
    largest = LARGEST_CODE[fmt.dtype]
    x = x.astype(compute_dtype(x.dtype))
    groups = x.reshape(*x.shape[:-1], -1, fmt.group)
    f16 = jnp.finfo(jnp.float16)
    zeros = None
    if fmt.zero_point:
        least = jnp.min(groups, axis=-1)
        least = jnp.where(jnp.abs(least) < float(f16.smallest_normal), jnp.zeros_like(least), least)
        zeros = _to_float16(jnp.clip(least, float(f16.min), float(f16.max)))
        groups = groups - zeros.astype(x.dtype)[..., None]
        scales = jnp.max(groups, axis=-1) / (2 * largest + 1)
    else:
        scales = jnp.max(jnp.abs(groups), axis=-1) / largest
    scales = _to_float16(jnp.clip(scales, float(f16.smallest_normal), float(f16.max)))
    codes = jnp.round(groups / scales.astype(x.dtype)[..., None])
    if zeros is not None:
        codes = jnp.clip(codes, 0, 2 * largest + 1) - (largest + 1)
        scales = jnp.concatenate([scales, zeros], axis=-1)
    else:
        codes = jnp.clip(codes, -largest, largest)
    codes = codes.astype(jnp.int8).reshape(x.shape)
    if fmt.dtype == "int4":
        low, high = codes[..., 0::2], codes[..., 1::2]
        codes = jax.lax.bitcast_convert_type((high << 4) | (low & 0xF), jnp.uint8)
    return codes, scales


def _to_float16(x: jax.Array) -> jax.Array:
    """XLA on a GPU drops a conversion there and back, and would go on with what was not rounded."""
    return jax.lax.reduce_precision(x, exponent_bits=5, mantissa_bits=10).astype(jnp.float16)


def decode(values: jax.Array, scales: jax.Array | None, fmt: KVFormat, dtype: DTypeLike) -> jax.Array:
    """What `encode` stored, as `dtype`. values [..., D] (int4: [..., D/2]), scales [..., G] (with zero points
    [..., 2G]) -> [..., D]."""
    x = fmt.decode(values, scales, dtype)
    return turn(x.astype(compute_dtype(dtype))).astype(dtype) if fmt.hadamard else x


def _decode(values: jax.Array, scales: jax.Array | None, fmt: KVFormat, dtype: DTypeLike) -> jax.Array:
    if fmt.dtype == FP8:
        values = jax.lax.bitcast_convert_type(values, jnp.float8_e4m3fn)
    if fmt.group is None:
        return values.astype(dtype)
    assert scales is not None
    if fmt.dtype == "int4":
        packed = jax.lax.bitcast_convert_type(values, jnp.int8)
        low, high = (packed << 4) >> 4, packed >> 4  # arithmetic shifts extend the sign
        values = jnp.stack([low, high], axis=-1).reshape(*values.shape[:-1], -1)
    groups = values.reshape(*values.shape[:-1], -1, fmt.group).astype(dtype)
    scales = scales.astype(dtype)[..., None]
    if not fmt.zero_point:
        return (groups * scales).reshape(values.shape)
    scales, zeros = jnp.split(scales, 2, axis=-2)
    return ((groups + (LARGEST_CODE[fmt.dtype] + 1)) * scales + zeros).reshape(values.shape)


def write(pages: Pages, x: jax.Array, page: jax.Array, offset: jax.Array) -> Pages:
    """Encodes x [T, K, D] and stores row t at slot `offset[t]` of page `page[t]` (both i32[T]), no slot twice.

    A row whose page is outside of [0, N) is dropped.
    """
    values, scales = encode(x, pages.format)
    num_pages, num_heads, page_size, _ = pages.values.shape
    heads = jnp.arange(num_heads, dtype=jnp.int32)

    # Heads are indexed too: a scatter over leading dims never needs a transposed copy of the pool.
    def store(pool: jax.Array, rows: jax.Array) -> jax.Array:
        at = pool.at[page[:, None], heads[None, :], offset[:, None]]
        return at.set(rows, mode="drop", unique_indices=True, wrap_negative_indices=False)

    new = replace(pages, values=store(pages.values, values))
    if scales is None:
        return new
    assert pages.scales is not None
    rows = store(pages.scales.reshape(num_pages, num_heads, page_size, -1), scales)
    return replace(new, scales=rows.reshape(pages.scales.shape))


def gather(pages: Pages, page: jax.Array, dtype: DTypeLike) -> jax.Array:
    """The tokens of some pages, decoded: page i32[W, n] -> [W, K, n * P, D] of `dtype`. Pages are in range."""
    _, num_heads, page_size, _ = pages.values.shape
    heads = jnp.arange(num_heads, dtype=jnp.int32)

    def load(pool: jax.Array) -> jax.Array:  # heads indexed: the result needs no transposition
        rows = pool.at[page[:, None, :], heads[None, :, None]].get(mode="clip")
        return rows.reshape(page.shape[0], num_heads, page.shape[1] * page_size, -1)

    scales = None if pages.scales is None else load(pages.scales)
    return decode(load(pages.values), scales, pages.format, dtype)
