"""Defines the formats that K and V are stored in: their names, and what becomes of rows [..., D] in each.

A row is D values of a float type, or codes of 8, 4 or 2 bits in G = D / group groups, each with a float16 scale. int4
packs two values a byte along D, the even one in the low nibble (the order of `bitcast_convert_type` to int4). int2
packs four likewise. fp8 is stored as its bits, uint8 too. Where XLA has no native fp8 (the CPU), a gather or scatter of
it converts the whole pool.

What a format with `hadamard` stores is rotated along D (hadamard.turn). Attention then rotates its queries instead of
all keys, and its result instead of all values.

Kivi stores K in groups of tokens, channel by channel. So the newest tokens, which are no whole group yet, lie
elsewhere: see kv_pages.Tail, and kv_tail.py.
"""

import re
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.formats.hadamard import turn
from pallas_kernels.formats.numerics import compute_dtype
from pallas_kernels.formats.rounding import to_float8

FP8 = "float8_e4m3fn"
FLOATS = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64", "fp8": FP8}
# The largest codes of symmetric groups. Only groups with zero points have -128, -8 and -2; int2 always has them.
LARGEST_CODE = {"int8": 127, "int4": 7, "int2": 1}
RESIDUAL = 128  # tokens: the paper's
LARGEST_PAGE = 128  # tokens of the largest page that any backend reads


@dataclass(frozen=True)
class KVFormat:
    """Says how K or V is stored: a float type, or "int8"/"int4"/"int2" with one scale per `group` values along D.

    A format of the caller's own is a frozen dataclass that inherits from this one. It defines `bits`, `encode` and
    `decode`, and overrides other members that differ. Its `dtype` is that of the values array. Plain jnp stores and
    reads it. Kernels refuse it, since each lists the formats that it knows."""

    dtype: str
    group: int | None = None
    zero_point: bool = False  # a group has its least value beside its scale, and all 256, 16 or 4 codes
    hadamard: bool = False  # stored values are rotated

    @property
    def name(self) -> str:
        """Returns the name that parse_format reads."""
        floats = {dtype: name for name, dtype in FLOATS.items()}
        name = floats.get(self._kind, self._kind) if self.group is None else f"{self._kind}-g{self.group}"
        return name + self._suffix

    @property
    def codes(self) -> str:
        """Returns the name without the group's size, as kernels list it."""
        return self._kind + self._suffix

    @property
    def _kind(self) -> str:
        return self.dtype if type(self) is KVFormat else type(self).__name__

    @property
    def _suffix(self) -> str:
        return "-zp" * self.zero_point + "-h" * self.hadamard

    @property
    def storage_dtype(self) -> jnp.dtype:
        """Returns the dtype of the values array."""
        return jnp.dtype("uint8" if self.dtype in ("int4", "int2", FP8) else self.dtype)

    @property
    def bits(self) -> int:
        """Counts the bits of a value along D, as stored."""
        return {"int4": 4, "int2": 2}.get(self.dtype) or 8 * self.storage_dtype.itemsize

    def row(self, head_dim: int) -> int:
        """Counts entries of the values array per token and head."""
        return head_dim * self.bits // (8 * self.storage_dtype.itemsize)

    def fits(self, head_dim: int) -> bool:
        """Returns whether a head is whole entries, and whole groups."""
        return head_dim * self.bits % (8 * self.storage_dtype.itemsize) == 0 == head_dim % (self.group or 1)

    def encode(self, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Returns values and scales of x [..., D], as the function `encode` does, without the rotation."""
        if self.dtype == FP8:
            limit = float(jnp.finfo(jnp.float8_e4m3fn).max)
            x = jnp.clip(x.astype(compute_dtype(x.dtype)), -limit, limit)
            return jax.lax.bitcast_convert_type(to_float8(x, FP8), jnp.uint8), None
        if self.group is None:
            return x.astype(self.dtype), None
        codes, scales = _quantize(x, self)
        return _pack(codes, self.bits), scales

    def decode(self, values: jax.Array, scales: jax.Array | None, dtype: DTypeLike) -> jax.Array:
        """Reverses encode: [..., D] of `dtype`."""
        if self.dtype == FP8:
            values = jax.lax.bitcast_convert_type(values, jnp.float8_e4m3fn)
        if self.group is None:
            return values.astype(dtype)
        assert scales is not None
        values = _unpack(values, self.bits)
        groups = values.reshape(*values.shape[:-1], -1, self.group).astype(dtype)
        scales = scales.astype(dtype)[..., None]
        if not self.zero_point:
            return (groups * scales).reshape(values.shape)
        scales, zeros = jnp.split(scales, 2, axis=-2)
        return ((groups + (LARGEST_CODE[self.dtype] + 1)) * scales + zeros).reshape(values.shape)

    def groups(self, head_dim: int) -> int:
        """Counts groups per token and head (0 for float formats)."""
        return 0 if self.group is None else head_dim // self.group

    def numbers(self, head_dim: int) -> int:
        """Counts entries of the scales array per token and head: scales, and zeros where there are any."""
        return self.groups(head_dim) * (2 if self.zero_point else 1)


@dataclass(frozen=True)
class Kivi(KVFormat):
    """Stores K per channel (KIVI, arXiv 2402.02750): `group` tokens of a channel share a scale and a zero point. Codes
    lie where those of other formats do. The scales of a group's D channels and then their zeros are 2 D numbers. They
    take the places of its tokens one after another, 2 D / group each. A sequence's tokens come in blocks of `residual`.
    A query reads its own block, as far as it sees it, as it was computed (Tail). It reads all blocks before as they are
    stored. So what it reads follows from its place alone, and whole blocks need nothing but their pages."""

    zero_point: bool = True
    residual: int = RESIDUAL

    @property
    def name(self) -> str:
        return f"{self.codes}-g{self.group}" + (f"-r{self.residual}" if self.residual != RESIDUAL else "")

    @property
    def codes(self) -> str:
        return f"kivi{self.bits}"

    def fits(self, head_dim: int) -> bool:
        group = self.group or 0
        whole = group > 0 and self.residual > 0 == self.residual % group == 2 * head_dim % group
        known = self.dtype in ("int4", "int2") and self.zero_point and not self.hadamard
        return whole and known and head_dim * self.bits % 8 == 0

    def numbers(self, head_dim: int) -> int:
        return 2 * head_dim // (self.group or 1)

    def of_values(self) -> KVFormat:
        """Returns the format of V beside it: per token."""
        return KVFormat(self.dtype, self.group, zero_point=True)

    def encode(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns values [..., t, D bits / 8] and scales float16 [..., t, 2 D / group] of x [..., t, D] of whole
        groups."""
        codes, numbers = _quantize(x.swapaxes(-1, -2), self)  # [..., D, t], [..., D, 2 G]
        numbers = numbers.reshape(*numbers.shape[:-1], 2, -1).swapaxes(-1, -3)  # [..., G, 2, D]
        return _pack(codes.swapaxes(-1, -2), self.bits), numbers.reshape(*x.shape[:-1], -1)

    def decode(self, values: jax.Array, scales: jax.Array | None, dtype: DTypeLike) -> jax.Array:
        assert scales is not None
        codes, leading = _unpack(values, self.bits).astype(dtype), values.shape[:-2]
        dim = codes.shape[-1]
        numbers = scales.astype(dtype).reshape(*leading, -1, 2, 1, dim)
        groups = codes.reshape(*leading, -1, self.group or 1, dim) + (LARGEST_CODE[self.dtype] + 1)
        return (groups * numbers[..., 0, :, :] + numbers[..., 1, :, :]).reshape(codes.shape)


def parse_format(name: str, head_dim: int) -> KVFormat:
    """Returns the format called `name`.

    Names are bf16, f16, f32, f64, fp8 (e4m3), int8-gN[-zp], int4-gN[-zp] and int2-gN-zp with groups of N values along
    D. Each may end with -h, rotated. K alone has kivi4-gN[-rR] and kivi2-gN[-rR], with groups of N tokens and blocks of
    R.

    Raises ValueError for an unknown name, and for a group that isn't a multiple of 8 dividing `head_dim`. Kivi's group
    divides R and 2 `head_dim`.
    """
    if name.startswith("kivi"):
        return _parse_kivi(name, head_dim)
    base, hadamard = name.removesuffix("-h"), name.endswith("-h")
    if base in FLOATS:
        return KVFormat(FLOATS[base], hadamard=hadamard)
    match = re.fullmatch(r"(int8|int4|int2(?=.*-zp))-g([1-9][0-9]*)(-zp)?", base)
    if match is None:
        raise ValueError(
            f"unknown KV format {name!r}; formats: {', '.join(FLOATS)}, int8-gN, int4-gN (N = 8, 16, ..), these two "
            "also with -zp, int2-gN-zp, all these with -h, and kivi4-gN, kivi2-gN"
        )
    group = int(match[2])
    if group % 8 or group > head_dim or head_dim % group:
        raise ValueError(
            f"KV format {name!r}: group {group} must be a multiple of 8 that divides the head dim {head_dim}"
        )
    return KVFormat(match[1], group, match[3] is not None, hadamard)


def _parse_kivi(name: str, head_dim: int) -> Kivi:
    match = re.fullmatch(r"kivi([24])-g([1-9][0-9]*)(?:-r([1-9][0-9]*))?", name)
    if match is None:
        raise ValueError(
            f"unknown KV format {name!r}: kivi2 and kivi4 have groups of N tokens (-gN) and blocks of R (-rR, by "
            f"default {RESIDUAL}), as in kivi2-g32"
        )
    fmt = Kivi(f"int{match[1]}", int(match[2]), residual=int(match[3] or RESIDUAL))
    if int(match[2]) % 8 or LARGEST_PAGE % int(match[2]) or not fmt.fits(head_dim):
        raise ValueError(
            f"KV format {name!r}: its group must be 8, 16, 32, 64 or {LARGEST_PAGE} and divide its block of "
            f"{fmt.residual} tokens and twice the head dim {head_dim}"
        )
    return fmt


def dim_of(name: str, entries: int) -> int:
    """Returns the head dim whose row in the format called `name`, none of the caller's own, has `entries` entries."""
    return entries * {"4": 2, "2": 4}.get(name.removeprefix("int").removeprefix("kivi")[:1], 1)


def bytes_per_token(head_dim: int, num_kv_heads: int, k_format: KVFormat, v_format: KVFormat) -> int:
    """Returns the bytes of K and V that one token takes in one layer, scales included."""

    def row(fmt: KVFormat) -> int:
        values = fmt.row(head_dim) * fmt.storage_dtype.itemsize
        return values + fmt.numbers(head_dim) * jnp.dtype(jnp.float16).itemsize

    return num_kv_heads * (row(k_format) + row(v_format))


def encode(x: jax.Array, fmt: KVFormat) -> tuple[jax.Array, jax.Array | None]:
    """Stores x [..., D] as `fmt`: values [..., D] (int4: [..., D/2]) and scales f16 [..., G], or None for floats.

    With zero points there are f16 [..., 2G], the scales and then the zeros. With `hadamard` all that is of x rotated,
    in float32 at least. fp8 saturates at 448.

    - Symmetric groups: scale = absmax / 127 (int4: 7), rounded to float16 within its normal range. Values are x over
      the *rounded* scale, to nearest even, clipped.
    - With zero points: zero = the least value, rounded to float16 (to 0 below its normal range). The scale is (the
      largest - zero) / 255 (int4: 15, int2: 3), rounded as above. Values are (x - zero) / scale, less 128 (int4: 8,
      int2: 2).
    """
    if fmt.hadamard:
        x = turn(x.astype(compute_dtype(x.dtype)))
    return fmt.encode(x)


def decode(values: jax.Array, scales: jax.Array | None, fmt: KVFormat, dtype: DTypeLike) -> jax.Array:
    """Returns what `encode` stored, as `dtype`: [..., D]. Takes values [..., D] (int4: [..., D/2]) and scales [..., G]
    (with zero points [..., 2G])."""
    x = fmt.decode(values, scales, dtype)
    return turn(x.astype(compute_dtype(dtype))).astype(dtype) if fmt.hadamard else x


def _quantize(x: jax.Array, fmt: KVFormat) -> tuple[jax.Array, jax.Array]:
    """Returns codes int8 [..., n] of x [..., n] in groups along the last axis, and their scales [..., G], zeros after
    them."""
    largest = LARGEST_CODE[fmt.dtype]
    x = x.astype(compute_dtype(x.dtype))
    groups = x.reshape(*x.shape[:-1], -1, fmt.group or x.shape[-1])
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
    return codes.astype(jnp.int8).reshape(x.shape), scales


def _pack(codes: jax.Array, bits: int) -> jax.Array:
    """Packs codes int8 [..., D] of fewer bits several in a byte, the first in its lowest bits."""
    if bits == 8:
        return codes
    mask, each = (1 << bits) - 1, 8 // bits
    byte = codes[..., 0::each] & mask
    for i in range(1, each):
        byte |= (codes[..., i::each] & mask) << (bits * i)
    return jax.lax.bitcast_convert_type(byte, jnp.uint8)


def _unpack(values: jax.Array, bits: int) -> jax.Array:
    if bits == 8:
        return values
    packed = jax.lax.bitcast_convert_type(values, jnp.int8)
    # Arithmetic shifts extend the sign.
    parts = [(packed << (8 - bits * (i + 1))) >> (8 - bits) for i in range(8 // bits)]
    return jnp.stack(parts, axis=-1).reshape(*values.shape[:-1], -1)


def _to_float16(x: jax.Array) -> jax.Array:
    """Rounds to float16. XLA on a GPU drops a conversion there and back, and would go on with what was not rounded."""
    return jax.lax.reduce_precision(x, exponent_bits=5, mantissa_bits=10).astype(jnp.float16)
