"""Converts codes, scales and zero points of other projects' checkpoints to QuantizedWeight, in numpy.

Nothing is requantized: codes, zero points and scales keep their values, with one exception. Scales of groups are
float16 here. A checkpoint's float32 scales are rounded (relative error 2^-11, absolute 2^-25 below 6e-5).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from jllm.errors import CheckpointError
from pallas_kernels.formats.block_floats import nan_scales
from pallas_kernels.formats.quantized_weights import QuantizedWeight
from pallas_kernels.formats.weight_codes import pack4
from pallas_kernels.formats.weight_formats import BLOCK, NAMED, WeightFormat, check_shape, padded

_SPLIT = (128, 64, 32)  # group sizes for which one scale of a whole row is repeated


def groups_of(module: str, columns: int, group: int) -> int:
    """Returns the number of groups of `group` values in the columns (-1: one group of all). Raises CheckpointError for
    a remainder."""
    if group == -1:
        return 1
    if columns % group:
        raise CheckpointError(f"{module}: its {columns} columns are not a multiple of the group size {group}")
    return columns // group


def unpack_words(words: np.ndarray, bits: int) -> np.ndarray:
    """Returns unsigned codes of 4 or 8 bits from int32 words, lowest bits first: [..., W] -> uint8 [..., 32 W /
    bits]."""
    octets = np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)
    if bits == 8:
        return octets
    return np.stack([octets & np.uint8(15), octets >> np.uint8(4)], axis=-1).reshape(*octets.shape[:-1], -1)


def signed(codes: np.ndarray, bits: int) -> np.ndarray:
    """Returns unsigned codes minus half their range: uint8 -> int8."""
    return (codes - np.uint8(1 << (bits - 1))).view(np.int8)


def input_order(name: str, g_idx: np.ndarray, group: int) -> np.ndarray | None:
    """Returns the order of inputs by group, int32 [K], or None if they are in that order already. Raises
    CheckpointError if g_idx, stored as tensor `name`, does not put `group` inputs into each group."""
    groups = len(g_idx) // group
    inside = (g_idx >= 0).all() and (g_idx < groups).all()
    if not inside or (np.bincount(g_idx, minlength=groups) != group).any():
        raise CheckpointError(f"tensor {name} does not put {group} inputs into each of {groups} groups")
    order = np.argsort(g_idx, kind="stable").astype(np.int32)
    return None if np.array_equal(order, np.arange(len(order))) else order


def int_weight(
    module: str,
    codes: np.ndarray,
    scales: np.ndarray,
    zeros: np.ndarray | None,
    bits: int,
    *,
    columns: np.ndarray | None = None,
) -> QuantizedWeight:
    """Returns (code - zero) * scale for 16-bit inputs: codes int8 [N, K], scales of any float and zeros int8 [N, G].

    int8 codes with one scale for each row (G = 1) keep it as float32. 4-bit codes always have scales of groups, so one
    scale is repeated. Zero points that are all zero are left out. Raises CheckpointError for values that the format
    cannot hold.
    """
    if zeros is not None and not zeros.any():
        zeros = None
    if scales.shape[1] == 1 and bits == 8:
        fmt = WeightFormat("int8", zero_point=zeros is not None)
        return row_weight(module, codes, scales[:, 0], fmt, zeros=None if zeros is None else zeros[:, 0])
    if scales.shape[1] == 1:
        group = next((group for group in _SPLIT if codes.shape[1] % group == 0), codes.shape[1])
        scales = np.repeat(scales, codes.shape[1] // group, axis=1)
        zeros = None if zeros is None else np.repeat(zeros, scales.shape[1], axis=1)
    fmt = WeightFormat("int4" if bits == 4 else "int8", codes.shape[1] // scales.shape[1], zeros is not None)
    return group_weight(module, codes, scales, fmt, zeros=zeros, columns=columns)


def group_weight(
    module: str,
    codes: np.ndarray,
    scales: np.ndarray,
    fmt: WeightFormat,
    *,
    zeros: np.ndarray | None = None,
    columns: np.ndarray | None = None,
) -> QuantizedWeight:
    """Returns a weight with scales of groups: codes [N, K], scales of any float and zeros int8 [N, G]. `columns` are as
    in QuantizedWeight. Raises CheckpointError for a shape or scales that the format cannot hold."""
    N, K = codes.shape
    try:
        check_shape((N, K), fmt)
    except ValueError as error:
        raise CheckpointError(f"{module}: {error}") from None
    pads = ((0, padded(N) - N), (0, 0))
    values = np.pad(codes, pads)
    if fmt.packed:
        values = pack4(values)
    half = np.pad(_finite(module, scales, np.float16), pads)
    zeros = None if zeros is None else np.pad(zeros, pads).T
    return _assemble(values, half.T, zeros, (N, K), fmt, columns)


def block_weight(
    module: str,
    codes: np.ndarray,
    scales: np.ndarray,
    fmt: WeightFormat,
    *,
    tensor: np.ndarray | None = None,
    input_scale: np.ndarray | None = None,
) -> QuantizedWeight:
    """Returns a weight of block_floats.py. Codes are int8 (0 to 15) or float8_e4m3fn [N, K], scales uint8 or
    float8_e4m3fn [N, G]. `tensor` is the float32 [1] unit of the scales. `input_scale` is the scale of inputs. Raises
    CheckpointError for NaN, and for a shape that the format cannot hold."""
    N, K = codes.shape
    try:
        check_shape((N, K), fmt)
    except ValueError as error:
        raise CheckpointError(f"{module}: {error}") from None
    if not is_finite(codes) or nan_scales(scales):
        raise CheckpointError(f"{module}: its weight or weight_scale holds NaN")
    pads = ((0, padded(N) - N), (0, 0))
    values = np.pad(codes, pads)
    if fmt.packed:
        values = pack4(values)
    steps = None if tensor is None else np.full(padded(N), tensor[0])
    return _assemble(values, np.pad(scales, pads).T, None, (N, K), fmt, input_scale=input_scale, steps=steps)


def blocks_weight(module: str, codes: np.ndarray, scales: np.ndarray) -> QuantizedWeight:
    """Returns a weight of fp8 in blocks of 128 x 128: codes float8_e4m3fn [N, K], and scales of any float, one a block.
    The last blocks may be smaller. Raises CheckpointError for NaN and infinity."""
    (N, K), fmt = codes.shape, NAMED["fp8-b128"]
    if not is_finite(codes):
        raise CheckpointError(f"tensor {module}.weight holds NaN")
    values = np.pad(codes, ((0, padded(N) - N), (0, fmt.columns(K) - K)))
    rows = np.repeat(_finite(module, scales, np.float32), BLOCK, axis=0)[:N]
    return _assemble(values, np.pad(rows, ((0, padded(N) - N), (0, 0))).T, None, (N, K), fmt)


def row_weight(
    module: str,
    codes: np.ndarray,
    scales: np.ndarray,
    fmt: WeightFormat,
    *,
    zeros: np.ndarray | None = None,
    input_scale: np.ndarray | None = None,
) -> QuantizedWeight:
    """Returns (code - zero) * scale: codes int8 or float8_e4m3fn [N, K], scales of any float and zeros int8 [N].
    `input_scale` is one scale of all inputs, of any float. Raises CheckpointError for NaN and infinity."""
    N, K = codes.shape
    if not is_finite(codes):
        raise CheckpointError(f"tensor {module}.weight holds NaN")
    values = np.zeros((padded(N), padded(K)), codes.dtype)
    values[:N, :K] = codes
    if zeros is not None:
        values[:N, K:] = zeros[:, None]  # padding stands for zero
    pads = (0, padded(N) - N)
    single = np.pad(_finite(module, scales, np.float32), pads)
    zeros = None if zeros is None else np.pad(zeros, pads)
    if input_scale is not None:
        input_scale = positive_scale(f"{module}.input_scale", input_scale)
    return _assemble(values, single, zeros, (N, K), fmt, input_scale=input_scale)


def scale_rows(w: QuantizedWeight, factors: np.ndarray, inputs: np.float32 | None = None) -> QuantizedWeight:
    """Returns a weight with scales times factors float32 [N], and its one input scale times a factor. The weight has
    one scale for each row, or is one of NVFP4. Codes stay. Both are products of float32 scales, rounded once."""
    assert w.format.group is None or w.format.scale_codes == "e4m3", "scales of these groups are not any number"
    padded_factors: Any = np.pad(factors, (0, w.values.shape[0] - len(factors)), constant_values=1)
    of_inputs: Any = w.input_scale
    if of_inputs is not None and inputs is not None:
        of_inputs = positive_scale("input_scale", of_inputs * inputs)
    if w.format.group is None:
        return replace(w, scales=w.scales * padded_factors, input_scale=of_inputs)
    assert w.scale_steps is not None
    return replace(w, scale_steps=w.scale_steps * padded_factors, input_scale=of_inputs)


def is_finite(array: np.ndarray) -> bool:
    """Returns whether no value is NaN or infinite, without a wider copy."""
    if array.dtype.name == "float8_e4m3fn":  # it has no infinity
        return not (array.view(np.uint8) & 0x7F == 0x7F).any()
    return array.dtype.kind in "iu" or bool(np.isfinite(array).all())


def positive_scale(name: str, scale: np.ndarray) -> np.ndarray:
    """Returns the one scale in tensor `name`, float32 [1]. Raises CheckpointError if it is not a positive, finite
    divisor."""
    single = scale.astype(np.float32).reshape(1)
    if not (np.isfinite(single) & (single >= np.finfo(np.float32).tiny)).all():
        raise CheckpointError(f"tensor {name} holds {single[0]:g}, expected a positive number, 1.2e-38 or more")
    return single


def merge(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Returns weights stacked along N. They have the same columns in the same order, and one format. Zero points may
    differ: a weight without them gets zeros if others have them. The weights share their inputs, which get the largest
    of their scales, as in vLLM."""
    first, counts = parts[0], [w.shape[0] for w in parts]

    def stack(arrays: Sequence[Any], axis: int) -> np.ndarray:
        joined = np.concatenate([a[:n] if axis == 0 else a[..., :n] for a, n in zip(arrays, counts, strict=True)], axis)
        pads = [(0, 0)] * joined.ndim
        pads[axis] = (0, padded(sum(counts)) - sum(counts))
        return np.pad(joined, pads)

    zeros = None
    if any(w.zeros is not None for w in parts):
        zeros = stack([np.zeros(w.scales.shape, np.int8) if w.zeros is None else w.zeros for w in parts], -1)
    fmt = replace(first.format, zero_point=zeros is not None)
    values, scales = stack([w.values for w in parts], 0), stack([w.scales for w in parts], -1)
    of_inputs = [w.input_scale for w in parts if w.input_scale is not None]
    largest = np.max(of_inputs, axis=0) if of_inputs else None
    steps = None if first.scale_steps is None else stack([w.scale_steps for w in parts], 0)
    return _assemble(values, scales, zeros, (sum(counts), first.shape[1]), fmt, first.columns, largest, steps)


def _assemble(
    values: Any,
    scales: Any,
    zeros: Any,
    shape: tuple[int, int],
    fmt: WeightFormat,
    columns: Any = None,
    input_scale: Any = None,
    steps: Any = None,
) -> QuantizedWeight:
    """Returns a QuantizedWeight of numpy arrays. The caller decides when they go to a device."""
    return QuantizedWeight(values, scales, zeros, steps, columns, shape, fmt, input_scale)


def _finite(module: str, scales: np.ndarray, dtype: type) -> np.ndarray:
    if not np.isfinite(scales).all():
        raise CheckpointError(f"{module}: its scales hold NaN or infinity")
    with np.errstate(over="ignore"):
        out: np.ndarray = scales.astype(dtype)
    if not np.isfinite(out).all():
        largest = float(np.abs(scales).max())
        raise CheckpointError(f"{module}: its scales reach {largest:.4g}, which is beyond {np.dtype(dtype).name}")
    return out
