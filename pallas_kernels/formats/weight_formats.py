"""Defines formats of quantized weights, as data: what a weight [N, K] (out, in) is stored as, and the formats' names.

A weight becomes codes with one scale a row, or one for every `group` values along K:

| codes | values | w = |
|---|---|---|
| int8 | int8 [N, K] | (code - zero) * scale |
| fp8 | float8_e4m3fn [N, K] | code * scale |
| int4 | uint8 [N, K/2], two signed codes a byte, in the order of pack4 | (code - zero) * scale |
| nf4, fp4, iq4nl | uint8 [N, K/2], likewise two indices | NF4[code] * scale, likewise FP4 and IQ4NL |
| e2m1 | uint8 [N, K/2], likewise two codes of block_floats.py | E2M1[code] * scale |
| e5m2 | float8_e5m2 [N, K] | code * scale |

Scales of rows are float32 [N]. Scales of groups are float16 [K/group, N], so that a tile of rows is contiguous. Those
of block_floats.py are E8M0 (uint8) or E4M3 [K/group, N]. The latter are in units of a float32 a row, equal in all of a
tensor. Those of fp8 in blocks of 128 x 128 are float32 [K'/128, N]: 128 rows of a block share one, and each has it. So
rows are cut and merged wherever a matrix is, and merged modules keep the blocks of each. Formats whose names have an -h
hold blocks of block_floats.py times a Hadamard matrix of the block's size. The blocks of inputs that meet them are
rotated too. N and K are padded to multiples of 32 (K of blocks to 128) once, by encode; `shape` keeps the logical
sizes. Unsigned codes with a zero point (the textbook's, AWQ's and GPTQ's) are stored less 128 or 8, and so are their
zeros.
"""

import math
import re
from dataclasses import dataclass, replace

import jax.numpy as jnp

from pallas_kernels.formats.block_floats import KINDS

# NormalFloat4: quantiles of a normal distribution, one exact zero, in [-1, 1] (QLoRA, arXiv 2305.14314, appendix E).
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
# FP4 of bitsandbytes (functional.py, get_4bit_type): floats of a sign, two bits of exponent and one of mantissa. They
# are no E2M1: code 1 is a ninety-sixth of what E2M1 has there.
FP4 = tuple(sign * x / 12 for sign in (1.0, -1.0) for x in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0))
# ggml's kvalues_iq4nl (ggml-common.h): integers, so that a product with a scale of 16 bits is exact in float32.
IQ4NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
TABLES = {"nf4": NF4, "fp4": FP4, "iq4nl": tuple(map(float, IQ4NL))}  # what codes that are indices stand for
MULTIPLE = 32  # of N and K as stored
BLOCK = 128  # rows and columns of fp8 that share a scale
STORED = {  # dtypes of values, by codes
    "int8": "int8", "fp8": "float8_e4m3fn", "e5m2": "float8_e5m2", "int4": "uint8", "nf4": "uint8", "fp4": "uint8",
    "iq4nl": "uint8", "e2m1": "uint8",
}  # fmt: skip
LLM_INT8 = "llm-int8"
THRESHOLD = 6.0  # of LLM.int8's outliers, where none is given (arXiv 2208.07339, section 3.2)


@dataclass(frozen=True)
class WeightFormat:
    """Says how a weight is stored, and how its inputs are quantized before the product."""

    codes: str  # "int8", "fp8", "int4", a key of TABLES, "e2m1" or "e5m2"
    group: int | None = None  # values along K that share a scale; None: a row's
    zero_point: bool = False
    double_quant: bool = False  # scales are stored as int8 themselves
    activations: str | None = None  # "int8" or "fp8", with a scale for each token, or input_scale; None: 16 bits.
    # Or a kind of block_floats.py, to which inputs are rounded before they are multiplied as numbers
    per_tensor: bool = False  # one activation scale for all tokens, for experiments: not batch-invariant
    scale_codes: str | None = None  # "e8m0" or "e4m3", as block_floats.py has them
    outliers: float | None = None  # inputs of this magnitude or more stay in 16 bits, token by token (LLM.int8)
    rotated: bool = False  # groups of the weight, and of its inputs before they are rounded, are times hadamard(group)
    row_group: int | None = None  # inputs that share an activation scale of a token; None: all of them

    @property
    def block_kind(self) -> str | None:
        """Returns the name in block_floats.KINDS of a format with these codes, groups and scales, or None."""
        own = self.codes, self.group, self.scale_codes
        return next((name for name, k in KINDS.items() if (k.codes, k.block, k.scale) == own), None)

    @property
    def row_codes(self) -> str | None:
        """Returns "int8" or "fp8" if the matmul takes its inputs as codes with scales of rows, else None."""
        return None if self.activations in KINDS else self.activations

    @property
    def in_blocks(self) -> bool:
        """Tells whether BLOCK rows share each scale of a group."""
        return self.codes == "fp8" and self.group is not None and self.scale_codes is None

    @property
    def scales_together(self) -> bool:
        """Tells whether the stored form of a scale depends on other scales."""
        return self.double_quant or self.scale_codes == "e4m3" or self.in_blocks

    @property
    def code_dtype(self) -> str:
        """Returns the dtype of codes before two of them are packed."""
        return "int8" if self.packed else STORED[self.codes]

    @property
    def packed(self) -> bool:
        """Tells whether two codes share a byte."""
        return self.codes in ("int4", "e2m1", *TABLES)

    @property
    def storage_dtype(self) -> jnp.dtype:
        """Returns the dtype of the values array."""
        return jnp.dtype(STORED[self.codes])

    @property
    def scale_dtype(self) -> jnp.dtype:
        """Returns the dtype of the scales array as stored."""
        if self.scale_codes is not None:
            return jnp.dtype("uint8" if self.scale_codes == "e8m0" else "float8_e4m3fn")
        wide = self.group is None or self.in_blocks
        return jnp.dtype("int8" if self.double_quant else "float32" if wide else "float16")

    def columns(self, inputs: int) -> int:
        """Returns how many columns are stored for so many inputs."""
        multiple = BLOCK if self.in_blocks else MULTIPLE
        return -(-inputs // multiple) * multiple

    @property
    def name(self) -> str:
        """Returns the name that parse_weight_format reads."""
        if self.scale_codes is not None:
            return f"{self.block_kind}{'-h' * self.rotated}{'' if self.activations else '-weight'}"
        group = "" if self.group is None else f"-g{self.group}"
        if self.codes in TABLES:
            return self.codes + (group if self.group != 64 else "") + ("-dq" if self.double_quant else "")
        if self.codes == "fp8":
            return f"fp8-b{BLOCK}" if self.in_blocks else "fp8" if self.activations else "fp8-weight"
        if self.codes == "int8" and self.zero_point and not group:
            return "uint8-zp"
        if self.outliers is not None:
            return LLM_INT8 if self.outliers == THRESHOLD else f"{LLM_INT8}-t{self.outliers!r}".removesuffix(".0")
        bits = "w4a16" if self.codes == "int4" else "w8a8" if self.activations else "w8a16"
        of_inputs = "-tensor" if self.per_tensor else "" if self.row_group is None else f"-act-g{self.row_group}"
        return bits + group + ("-zp" if self.zero_point else "") + of_inputs


# Formats whose names have no numbers.
NAMED = {
    "w8a8": WeightFormat("int8", activations="int8"),
    "w8a8-tensor": WeightFormat("int8", activations="int8", per_tensor=True),
    "fp8": WeightFormat("fp8", activations="fp8"),
    "fp8-weight": WeightFormat("fp8"),
    "fp8-b128": WeightFormat("fp8", BLOCK, activations="fp8", row_group=BLOCK),
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
    """Returns the format called `name`. Raises ValueError for others. Names are w8a8, w8a8-tensor, w8a8-act-gN,
    w8a16[-gN][-zp], w4a16-gN[-zp], nf4[-gN][-dq], fp4[-gN][-dq], iq4nl[-gN][-dq], fp8, fp8-weight, fp8-b128, uint8-zp,
    llm-int8[-tX], or a kind of block_floats.py[-h][-weight]. N is a multiple of 8 (of 32 for inputs), X a positive
    threshold."""
    if name in NAMED:
        return NAMED[name]
    threshold = re.fullmatch(rf"{LLM_INT8}-t([0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)", name)
    if threshold is not None and 0 < float(threshold[1]) < math.inf:
        return replace(NAMED[LLM_INT8], outliers=float(threshold[1]))
    if (of_inputs := re.fullmatch(r"w8a8-act-g([1-9][0-9]*)", name)) and int(of_inputs[1]) % MULTIPLE == 0:
        return replace(NAMED["w8a8"], row_group=int(of_inputs[1]))
    match = re.fullmatch(r"(w8a16|w4a16|nf4|fp4|iq4nl)-g([1-9][0-9]*)(-zp|-dq)?", name)
    suffixes = {"w8a16": (None, "-zp"), "w4a16": (None, "-zp"), **dict.fromkeys(TABLES, (None, "-dq"))}
    if match is None or int(match[2]) % 8 or match[3] not in suffixes[match[1]]:
        raise ValueError(
            f"unknown weight format {name!r}; formats: {', '.join(NAMED)}, w8a16-gN[-zp], w4a16-gN[-zp], nf4-gN[-dq], "
            f"fp4-gN[-dq], iq4nl-gN[-dq] (N = 8, 16, ..), w8a8-act-gN (N = {MULTIPLE}, {2 * MULTIPLE}, ..), "
            "llm-int8-tX (X > 0)"
        )
    codes = {"w8a16": "int8", "w4a16": "int4"}.get(match[1], match[1])
    return WeightFormat(codes, int(match[2]), match[3] == "-zp", match[3] == "-dq")


def padded(size: int) -> int:
    """Rounds `size` up to what is stored."""
    return -(-size // MULTIPLE) * MULTIPLE


def check_shape(shape: tuple[int, int], fmt: WeightFormat) -> None:
    """Raises ValueError where groups don't divide K, the weight's or its inputs', or K is empty."""
    if len(shape) != 2 or 0 in shape:
        raise ValueError(f"a weight of shape {tuple(shape)} cannot be quantized: expected [N, K]")
    if fmt.in_blocks:
        return  # the last ones may be smaller
    if fmt.group is not None and (shape[1] % fmt.group or padded(shape[1]) != shape[1]):
        raise ValueError(
            f"{fmt.name} cannot hold shape {tuple(shape)}: K must be a multiple of {math.lcm(fmt.group, MULTIPLE)}"
        )
    if fmt.row_group is not None and shape[1] % fmt.row_group:
        raise ValueError(f"{fmt.name} cannot hold shape {tuple(shape)}: K must be a multiple of {fmt.row_group}")
