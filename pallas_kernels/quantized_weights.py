"""Quantized weights: the layouts that all matmul kernels share, their formats, and their encoding.

A weight [N, K] (out, in) becomes codes with one scale a row, or one for every `group` values along K:

| codes | values | w = |
|---|---|---|
| int8 | int8 [N, K] | (code - zero) * scale |
| fp8 | float8_e4m3fn [N, K] | code * scale |
| int4 | uint8 [N, K/2], two signed codes a byte, in the order of pack4 | (code - zero) * scale |
| nf4, fp4 | uint8 [N, K/2], likewise two indices | NF4[code] * scale, FP4[code] * scale |
| e2m1 | uint8 [N, K/2], likewise two codes of block_floats.py | E2M1[code] * scale |
| e5m2 | float8_e5m2 [N, K] | code * scale |

Scales of rows are float32 [N]; scales of groups are float16 [K/group, N], so that a tile of rows is contiguous; those
of block_floats.py are E8M0 (uint8) or E4M3 [K/group, N], these in units of a float32 a row, equal in all of a tensor.
Formats whose names have an -h hold blocks of block_floats.py times a Hadamard matrix of the block's size, as are the
blocks of inputs that meet them. N and K are padded to multiples of 32 once, here; `shape` keeps the logical sizes.
Unsigned codes with a zero point (the textbook's, AWQ's and GPTQ's) are stored less 128 or 8, and so are their zeros.
"""

import math
import re
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_kernels.block_floats import (
    KINDS,
    decode_e8m0,
    element_values,
    encode_e8m0,
    mx_scales,
    round_elements,
    split_scales,
    wanted_scales,
)
from pallas_kernels.hadamard import turn
from pallas_kernels.numerics import compute_dtype
from pallas_kernels.rounding import to_float8

# NormalFloat4: quantiles of a normal distribution, one exact zero, in [-1, 1] (QLoRA, arXiv 2305.14314, appendix E).
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
# FP4 of bitsandbytes (functional.py, get_4bit_type): floats of a sign, two bits of exponent and one of mantissa, which
# are no E2M1: code 1 is a ninety-sixth of what E2M1 has there.
FP4 = tuple(sign * x / 12 for sign in (1.0, -1.0) for x in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0))
TABLES = {"nf4": NF4, "fp4": FP4}  # what codes that are indices stand for, in [-1, 1]
MULTIPLE = 32  # of N and K as stored
STORED = {  # dtypes of values, by codes
    "int8": "int8", "fp8": "float8_e4m3fn", "e5m2": "float8_e5m2", "int4": "uint8", "nf4": "uint8", "fp4": "uint8",
    "e2m1": "uint8",
}  # fmt: skip
LLM_INT8 = "llm-int8"
THRESHOLD = 6.0  # of LLM.int8's outliers, where none is given (arXiv 2208.07339, section 3.2)
_BLOCK = 256  # scales that share a step when they are quantized themselves
_FP8_MAX = 448.0


@dataclass(frozen=True)
class WeightFormat:
    """How a weight is stored, and what its inputs are quantized to when they meet it."""

    codes: str  # "int8", "fp8", "int4", "nf4", "fp4", "e2m1" or "e5m2"
    group: int | None = None  # values along K that share a scale; None: a row's
    zero_point: bool = False
    double_quant: bool = False  # scales are stored as int8 themselves
    activations: str | None = None  # "int8" or "fp8", one scale a token as it comes, or input_scale; None: 16 bits.
    # Or a kind of block_floats.py: rounded to it, and multiplied as numbers
    per_tensor: bool = False  # one activation scale for all tokens, for experiments: not batch-invariant
    scale_codes: str | None = None  # "e8m0" or "e4m3", as block_floats.py has them
    outliers: float | None = None  # inputs of this magnitude or more stay in 16 bits, token by token (LLM.int8)
    rotated: bool = False  # groups of the weight, and of its inputs before they are rounded, are times hadamard(group)
    row_group: int | None = None  # inputs that share an activation scale of a token; None: all of them

    @property
    def block_kind(self) -> str | None:
        """The name in block_floats.KINDS of what is stored so."""
        own = self.codes, self.group, self.scale_codes
        return next((name for name, k in KINDS.items() if (k.codes, k.block, k.scale) == own), None)

    @property
    def row_codes(self) -> str | None:
        """What inputs are quantized to with a scale a row, if they are: the product then takes them as codes."""
        return None if self.activations in KINDS else self.activations

    @property
    def scales_together(self) -> bool:
        """Whether what a scale is stored as depends on the others."""
        return self.double_quant or self.scale_codes == "e4m3"

    @property
    def code_dtype(self) -> str:
        """The dtype of codes before two of them are packed."""
        return "int8" if self.packed else STORED[self.codes]

    @property
    def packed(self) -> bool:
        """Whether two codes share a byte."""
        return self.codes in ("int4", "nf4", "fp4", "e2m1")

    @property
    def storage_dtype(self) -> jnp.dtype:
        """The dtype of the values array."""
        return jnp.dtype(STORED[self.codes])

    @property
    def scale_dtype(self) -> jnp.dtype:
        """The dtype of the scales array as stored."""
        if self.scale_codes is not None:
            return jnp.dtype("uint8" if self.scale_codes == "e8m0" else "float8_e4m3fn")
        return jnp.dtype("int8" if self.double_quant else "float32" if self.group is None else "float16")

    @property
    def name(self) -> str:
        """What parse_weight_format reads."""
        if self.scale_codes is not None:
            return f"{self.block_kind}{'-h' * self.rotated}{'' if self.activations else '-weight'}"
        group = "" if self.group is None else f"-g{self.group}"
        if self.codes in TABLES:
            return self.codes + (group if self.group != 64 else "") + ("-dq" if self.double_quant else "")
        if self.codes == "fp8":
            return "fp8" if self.activations else "fp8-weight"
        if self.codes == "int8" and self.zero_point and not group:
            return "uint8-zp"
        if self.outliers is not None:
            return LLM_INT8 if self.outliers == THRESHOLD else f"{LLM_INT8}-t{self.outliers!r}".removesuffix(".0")
        bits = "w4a16" if self.codes == "int4" else "w8a8" if self.activations else "w8a16"
        of_inputs = "-tensor" if self.per_tensor else "" if self.row_group is None else f"-act-g{self.row_group}"
        return bits + group + ("-zp" if self.zero_point else "") + of_inputs


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedWeight:
    """A weight [N, K] in a format; N' and K' are the padded sizes."""

    values: jax.Array  # [N', K'], or uint8 [N', K'/2] where two codes share a byte; a format may have groups rotated
    scales: jax.Array  # float32 [N'], or float16 [K'/group, N'] (double_quant: int8; e8m0: uint8; e4m3: itself)
    zeros: jax.Array | None  # int8, shaped as scales are
    # double_quant: float32 [1 + blocks of 256 scales]: their mean, each block's step; e4m3: float32 [N'], scales' unit
    scale_steps: jax.Array | None
    columns: jax.Array | None  # int32 [K]: stored column i multiplies input columns[i]; None: in order
    shape: tuple[int, int] = field(metadata={"static": True})  # (N, K)
    format: WeightFormat = field(metadata={"static": True})
    input_scale: jax.Array | None = None  # float32 [1], of every input token, found ahead; None: each has its own

    @property
    def takes_plain_inputs(self) -> bool:
        """Whether inputs meet the weight as it is stored: in order, and not rotated."""
        return self.columns is None and not self.format.rotated


# Formats whose names have no numbers.
NAMED = {
    "w8a8": WeightFormat("int8", activations="int8"),
    "w8a8-tensor": WeightFormat("int8", activations="int8", per_tensor=True),
    "fp8": WeightFormat("fp8", activations="fp8"),
    "fp8-weight": WeightFormat("fp8"),
    "uint8-zp": WeightFormat("int8", zero_point=True),
    **{codes: WeightFormat(codes, 64) for codes in TABLES},
    **{f"{codes}-dq": WeightFormat(codes, 64, double_quant=True) for codes in TABLES},
    "w8a16": WeightFormat("int8"),
    LLM_INT8: WeightFormat("int8", activations="int8", outliers=THRESHOLD),
    **{
        f"{name}{'-h' * rotated}{end}": WeightFormat(
            k.codes, k.block, activations=None if end else name, scale_codes=k.scale, rotated=rotated
        )
        for rotated in (False, True)
        for end in ("", "-weight")
        for name, k in KINDS.items()
    },
}


def parse_weight_format(name: str) -> WeightFormat:
    """The format called `name`: w8a8, w8a8-tensor, w8a8-act-gN, w8a16[-gN][-zp], w4a16-gN[-zp], nf4[-gN][-dq],
    fp4[-gN][-dq], fp8, fp8-weight, uint8-zp, llm-int8[-tX], or a kind of block_floats.py[-h][-weight], N a multiple of
    8 (of 32 for inputs), X a positive threshold. Raises ValueError for others.
    """
    if name in NAMED:
        return NAMED[name]
    threshold = re.fullmatch(rf"{LLM_INT8}-t([0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)", name)
    if threshold is not None and 0 < float(threshold[1]) < math.inf:
        return replace(NAMED[LLM_INT8], outliers=float(threshold[1]))
    if (of_inputs := re.fullmatch(r"w8a8-act-g([1-9][0-9]*)", name)) and int(of_inputs[1]) % MULTIPLE == 0:
        return replace(NAMED["w8a8"], row_group=int(of_inputs[1]))
    match = re.fullmatch(r"(w8a16|w4a16|nf4|fp4)-g([1-9][0-9]*)(-zp|-dq)?", name)
    suffixes = {"w8a16": (None, "-zp"), "w4a16": (None, "-zp"), "nf4": (None, "-dq"), "fp4": (None, "-dq")}
    if match is None or int(match[2]) % 8 or match[3] not in suffixes[match[1]]:
        raise ValueError(
            f"unknown weight format {name!r}; formats: {', '.join(NAMED)}, w8a16-gN[-zp], w4a16-gN[-zp], nf4-gN[-dq], "
            f"fp4-gN[-dq] (N = 8, 16, ..), w8a8-act-gN (N = {MULTIPLE}, {2 * MULTIPLE}, ..), llm-int8-tX (X > 0)"
        )
    codes = {"w8a16": "int8", "w4a16": "int4"}.get(match[1], match[1])
    return WeightFormat(codes, int(match[2]), match[3] == "-zp", match[3] == "-dq")


def padded(size: int) -> int:
    """`size` rounded up to what is stored."""
    return -(-size // MULTIPLE) * MULTIPLE


def check_shape(shape: tuple[int, int], fmt: WeightFormat) -> None:
    """Raises ValueError where groups don't divide K, the weight's or its inputs', or K is empty."""
    if len(shape) != 2 or 0 in shape:
        raise ValueError(f"a weight of shape {tuple(shape)} cannot be quantized: expected [N, K]")
    if fmt.group is not None and (shape[1] % fmt.group or padded(shape[1]) != shape[1]):
        raise ValueError(
            f"{fmt.name} cannot hold shape {tuple(shape)}: K must be a multiple of {math.lcm(fmt.group, MULTIPLE)}"
        )
    if fmt.row_group is not None and shape[1] % fmt.row_group:
        raise ValueError(f"{fmt.name} cannot hold shape {tuple(shape)}: K must be a multiple of {fmt.row_group}")


def encode(w: jax.Array, fmt: WeightFormat) -> QuantizedWeight:
    """Rounds w [N, K], finite, to the nearest of what the format holds: no format holds NaN or infinity, which callers
    refuse.

    Symmetric int8 steps are absmax / 127 and symmetric int4 ones absmax / 7.5 (all 16 codes: -absmax and absmax are
    half a step away); with a zero point, the range of w and 0 is cut into 255 or 15 steps. fp8: absmax / 448. Scales of
    groups are rounded up to float16 within its normal range, so that nothing is clipped by more than half a step, and
    values are divided by the rounded scale. What block_floats.py defines is as it says there. Raises ValueError where
    the shape does not fit.
    """
    return encode_with(w, *fit_scales(rotate_groups(grouped(w, fmt), fmt), fmt), fmt)


def encode_with(
    w: jax.Array, scales: jax.Array, zeros: jax.Array | None, fmt: WeightFormat, *, columns: jax.Array | None = None
) -> QuantizedWeight:
    """encode with scales and zeros [N', groups] that the caller chose: storable ones, as fit_scales gives them. Values
    beyond the largest code are clipped. With columns, an order i32[K], groups are of w's columns in that order."""
    ordered = w if columns is None else jnp.take(w, columns, axis=1)
    x = rotate_groups(grouped(ordered, fmt), fmt)
    scales, stored, steps = store_scales(scales.astype(x.dtype), fmt)
    codes = round_codes(x / scales[..., None], None if zeros is None else zeros[..., None], fmt)
    return assemble(codes.reshape(codes.shape[0], -1), stored, zeros, steps, w.shape, fmt, columns=columns)  # type: ignore[arg-type]


def assemble(
    codes: jax.Array,
    stored: jax.Array,
    zeros: jax.Array | None,
    steps: jax.Array | None,
    shape: tuple[int, int],
    fmt: WeightFormat,
    *,
    columns: jax.Array | None = None,
) -> QuantizedWeight:
    """The weight of codes [N', K'] as round_codes makes them, zeros [N', groups], and scales as store_scales does."""
    by_row = fmt.group is None
    if columns is not None and fmt.rotated:
        raise ValueError(f"{fmt.name} rotates groups of inputs in their order: its columns must be None")
    return QuantizedWeight(
        values=pack4(codes) if fmt.packed else codes,
        scales=stored[:, 0] if by_row else stored.T,
        zeros=None if zeros is None else (zeros[:, 0] if by_row else zeros.T).astype(jnp.int8),
        scale_steps=steps,
        columns=columns,
        shape=shape,
        format=fmt,
    )


def grouped(w: jax.Array, fmt: WeightFormat) -> jax.Array:
    """w [N, K], padded, in float32 at least: [N', groups, group]. Raises ValueError where the shape does not fit."""
    check_shape(w.shape, fmt)  # type: ignore[arg-type]
    N, K = w.shape
    x = w.astype(compute_dtype(w.dtype))
    x = jnp.pad(x, ((0, padded(N) - N), (0, padded(K) - K)))
    return x.reshape(x.shape[0], -1, fmt.group or x.shape[1])


def rotate_groups(x: jax.Array, fmt: WeightFormat) -> jax.Array:
    """x [..., K] or [..., group], each group times hadamard(group) where the format has them rotated; twice is x."""
    if not fmt.rotated:
        return x
    assert fmt.group is not None, "rows with one scale are not rotated"
    wide = x.astype(compute_dtype(x.dtype)).reshape(*x.shape[:-1], -1, fmt.group)
    return turn(wide).reshape(x.shape).astype(x.dtype)


def decode(w: QuantizedWeight, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """The weight [N, K] that the codes stand for, computed in float32 at least."""
    N, K = w.shape
    zeros = None if w.zeros is None else w.zeros[..., :N]
    return _decode_rows(w, w.values[:N], group_scales(w)[..., :N], zeros, dtype)[:, :K]


def decode_padded(w: QuantizedWeight, dtype: DTypeLike) -> jax.Array:
    """The weight [N', K'] as it is stored: columns in their order, groups rotated, padding included."""
    ordered = replace(w, columns=None, format=replace(w.format, rotated=False))
    return _decode_rows(ordered, w.values, group_scales(w), w.zeros, dtype)


def take_rows(w: QuantizedWeight, rows: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Rows of the weight, as of an embedding: i32[...] -> [..., K]. Indices out of range are clipped."""
    flat = jnp.clip(rows.reshape(-1), 0, w.shape[0] - 1)  # never the padding

    def take(x: jax.Array, axis: int) -> jax.Array:
        return jnp.take(x, flat, axis=axis, mode="clip")

    zeros = None if w.zeros is None else take(w.zeros, -1)
    out = _decode_rows(w, take(w.values, 0), take(group_scales(w), -1), zeros, dtype)
    return out[:, : w.shape[1]].reshape(*rows.shape, w.shape[1])


def _decode_rows(
    w: QuantizedWeight, values: jax.Array, scales: jax.Array, zeros: jax.Array | None, dtype: DTypeLike
) -> jax.Array:
    """Some rows of w's values, with their scales and zeros: [rows, K']."""
    compute = compute_dtype(dtype)
    if w.format.packed:
        values = unpack4(values, signed=w.format.codes == "int4")
    zeros = None if zeros is None else _spread(zeros.astype(compute), values.shape[1])
    x = code_values(values, zeros, w.format, compute)
    x = rotate_groups(x * _spread(scales.astype(compute), x.shape[1]), w.format)
    if w.columns is not None:
        x = jnp.zeros_like(x).at[:, w.columns].set(x[:, : w.shape[1]])
    return x.astype(dtype)


def group_scales(w: QuantizedWeight) -> jax.Array:
    """Scales as the kernels take them: float32 [N'] or float16 [K'/group, N'], decoded where they are quantized (those
    of block_floats.py to float32)."""
    if w.format.scale_codes == "e8m0":
        return decode_e8m0(w.scales)
    if w.format.scale_codes == "e4m3":
        assert w.scale_steps is not None
        return w.scales.astype(jnp.float32) * w.scale_steps[None, :]
    if w.scale_steps is None:
        return w.scales
    return decode_scales(w.scales.T, w.scale_steps).T


def pack4(codes: jax.Array) -> jax.Array:
    """Two codes of 4 bits a byte: [..., K] of any integers -> uint8 [..., K/2], K a multiple of 32.

    Each 32 columns 8p + 2c + i are stored as nibble 4i + p of 32-bit word c, p and c below 4 and i below 2: so word c
    is what one thread in four gives to wgmma's 16-bit left operand, whose pairs (i) are 16 bits apart.
    """
    if codes.shape[-1] % 32:
        raise ValueError(f"{codes.shape[-1]} codes cannot be packed: expected a multiple of 32")
    parts = jnp.moveaxis(codes.astype(jnp.uint8).reshape(*codes.shape[:-1], -1, 4, 4, 2), -3, -1)  # [.., c, i, p]
    low, high = parts[..., 0::2], parts[..., 1::2]
    return ((low & jnp.uint8(15)) | (high << jnp.uint8(4))).reshape(*codes.shape[:-1], -1)


def unpack4(packed: jax.Array, *, signed: bool) -> jax.Array:
    """Inverse of pack4: uint8 [..., K/2] -> int8 [..., K] in -8..7, or in 0..15."""
    pairs = jnp.stack([packed & jnp.uint8(15), packed >> jnp.uint8(4)], axis=-1).astype(jnp.int8)
    codes = jnp.moveaxis(pairs.reshape(*packed.shape[:-1], -1, 4, 2, 4), -1, -3).reshape(*packed.shape[:-1], -1)
    return (codes ^ jnp.int8(8)) - jnp.int8(8) if signed else codes


def _spread(x: jax.Array, columns: int) -> jax.Array:
    """[rows] or [groups, rows] -> [rows, columns] or [rows, 1]."""
    return x[:, None] if x.ndim == 1 else jnp.repeat(x.T, columns // x.shape[0], axis=1)


def fit_scales(x: jax.Array, fmt: WeightFormat) -> tuple[jax.Array, jax.Array | None]:
    """The scales that encode gives x [N', groups, group], as they will be stored, and zeros: [N', groups]."""
    low, high = jnp.min(x, axis=-1), jnp.max(x, axis=-1)
    absmax = jnp.maximum(high, -low)
    if fmt.scale_codes is not None:
        return mx_scales(absmax, fmt.codes) if fmt.scale_codes == "e8m0" else wanted_scales(absmax), None
    if fmt.zero_point:
        low, high = jnp.minimum(low, 0), jnp.maximum(high, 0)
        scales = storable((high - low) / (15 if fmt.packed else 255), fmt)
        return scales, jnp.round(-low / scales) - (8 if fmt.packed else 128)
    return storable(absmax / {"int8": 127, "int4": 7.5, "nf4": 1, "fp4": 1, "fp8": _FP8_MAX}[fmt.codes], fmt), None


def storable(scales: jax.Array, fmt: WeightFormat) -> jax.Array:
    """Scales in their own dtype, rounded to what holds them: never zero, float16 ones never down."""
    dtype = jnp.finfo(jnp.float32 if fmt.group is None else jnp.float16)
    scales = jnp.clip(scales, jnp.asarray(dtype.tiny, scales.dtype), jnp.asarray(dtype.max, scales.dtype))
    if fmt.group is None:
        return scales.astype(jnp.float32).astype(scales.dtype)
    rounded = jax.lax.reduce_precision(scales, exponent_bits=5, mantissa_bits=10)  # XLA may drop a pair of conversions
    up = rounded * (1 + 1.25 * 2.0**-11)  # 0.6 to 1.25 float16 steps more: rounds to the next one
    up = jax.lax.reduce_precision(up, exponent_bits=5, mantissa_bits=10)
    return jnp.minimum(jnp.where(rounded < scales, up, rounded), jnp.asarray(dtype.max, scales.dtype))


def round_codes(x: jax.Array, zeros: jax.Array | None, fmt: WeightFormat) -> jax.Array:
    """Codes of x in units of scales, clipped: int8 in range, indices of TABLES or E2M1, or floats of 8 bits. zeros is
    shaped as x is, or broadcasts to it."""
    if fmt.codes in ("e2m1", "e5m2"):
        return round_elements(x, fmt.codes)
    if fmt.codes == "fp8":
        return to_float8(jnp.clip(x, -_FP8_MAX, _FP8_MAX), jnp.float8_e4m3fn)
    if fmt.codes in TABLES:
        table, order = np.unique(TABLES[fmt.codes], return_index=True)
        middles = jnp.asarray((table[1:] + table[:-1]) / 2, x.dtype)
        above = x[..., None] > middles.reshape((1,) * x.ndim + (-1,))
        return jnp.asarray(order, jnp.int8)[jnp.sum(above.astype(jnp.int8), axis=-1, dtype=jnp.int8)]
    low, high = (-8, 7) if fmt.packed else (-128, 127)
    if zeros is None:
        return jnp.clip(jnp.round(x), low if fmt.packed else -127, high).astype(jnp.int8)
    return jnp.clip(jnp.round(x) + zeros, low, high).astype(jnp.int8)


def code_values(codes: jax.Array, zeros: jax.Array | None, fmt: WeightFormat, dtype: DTypeLike) -> jax.Array:
    """What codes stand for in units of scales; zeros as round_codes takes them, in `dtype`."""
    if fmt.codes in ("e2m1", "e5m2"):
        return element_values(codes, fmt.codes, dtype)
    x = jnp.asarray(TABLES[fmt.codes], dtype)[codes] if fmt.codes in TABLES else codes.astype(dtype)
    return x if zeros is None else x - zeros


def store_scales(scales: jax.Array, fmt: WeightFormat) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """What becomes of storable scales [N', groups]: what will be decoded, in their dtype; what is stored; and the steps
    of scales that are quantized themselves."""
    if fmt.scale_codes == "e8m0":
        return scales, encode_e8m0(scales), None
    if fmt.scale_codes == "e4m3":
        stored, tensor = split_scales(scales, jnp.max(scales))
        decoded = stored.astype(jnp.float32) * tensor
        return decoded.astype(scales.dtype), stored, jnp.broadcast_to(tensor, scales.shape[:1])
    if not fmt.double_quant:
        return scales, scales.astype(jnp.float32 if fmt.group is None else jnp.float16), None
    stored, steps = _quantize_scales(scales)
    return decode_scales(stored, steps).astype(scales.dtype), stored, steps


def _quantize_scales(scales: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Scales [N', groups] as int8 around their mean, in blocks of 256 (QLoRA's double quantization, with a linear
    code): int8 [N', groups], float32 [1 + blocks]."""
    flat = scales.reshape(-1)
    mean = jnp.mean(flat).astype(jnp.float32)
    blocks = jnp.pad(flat - mean.astype(flat.dtype), (0, -flat.size % _BLOCK)).reshape(-1, _BLOCK)
    tiny = jnp.asarray(jnp.finfo(jnp.float32).tiny, flat.dtype)
    steps = jnp.maximum(jnp.max(jnp.abs(blocks), axis=1) / 127, tiny).astype(jnp.float32)
    codes = jnp.round(blocks / steps[:, None].astype(flat.dtype)).astype(jnp.int8)
    return codes.reshape(-1)[: flat.size].reshape(scales.shape), jnp.concatenate([mean[None], steps])


def decode_scales(codes: jax.Array, steps: jax.Array) -> jax.Array:
    """What _quantize_scales stored, as float16 within its normal range: int8 [N', groups] -> [N', groups]."""
    block = jnp.arange(codes.size, dtype=jnp.int32) // _BLOCK
    scales = steps[0] + codes.reshape(-1).astype(jnp.float32) * steps[1:][block]
    limits = jnp.finfo(jnp.float16)
    scales = jnp.clip(scales, float(limits.tiny), float(limits.max))
    return scales.reshape(codes.shape).astype(jnp.float16)
