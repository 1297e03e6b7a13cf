"""Computes weight_only_matmul from its formula, float64 numpy, decoding included."""

import numpy as np
from numpy.typing import ArrayLike

from pallas_kernels.formats.quantized_weights import QuantizedWeight

# QLoRA, arXiv 2305.14314, appendix E.
_NORMAL_FLOAT = np.array([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
])  # fmt: skip
# OCP Microscaling Formats (MX) v1.0, section 5.3.3: a sign, two bits of exponent with bias 1, one of mantissa.
_FLOAT_4 = np.array([0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4])  # bitsandbytes' FP4, of positive codes
_FLOAT_4 = np.concatenate([_FLOAT_4, -_FLOAT_4])
_INTEGERS = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]  # llama.cpp's IQ4_NL
_E2M1 = np.array([
    (-1.0) ** sign * (2.0 ** (exponent - 1) * (1 + mantissa / 2) if exponent else mantissa / 2)
    for sign in (0, 1) for exponent in range(4) for mantissa in (0, 1)
])  # fmt: skip


def decoded(w: QuantizedWeight) -> np.ndarray:
    """Returns float64 [N, K'], columns as stored."""
    rows = w.shape[0]
    values = np.asarray(w.values)[:rows]
    if w.format.codes in ("int4", "nf4", "fp4", "e2m1", "iq4nl"):
        words = np.ascontiguousarray(values).view("<u4")  # each 32 columns 8p + 2c + i: nibble 4i + p of word c
        column = np.arange(2 * values.shape[1])
        p, c, i = column % 32 // 8, column % 8 // 2, column % 2
        codes = (words[:, column // 32 * 4 + c] >> (4 * (4 * i + p)).astype(np.uint32)) & 15
        signed = np.where(codes > 7, codes.astype(np.int64) - 16, codes)
        tables = {"nf4": _NORMAL_FLOAT, "fp4": _FLOAT_4, "e2m1": _E2M1, "iq4nl": np.array(_INTEGERS, np.float64)}
        numbers = tables[w.format.codes][codes] if w.format.codes in tables else signed.astype(np.float64)
    else:
        numbers = values.astype(np.float64)

    def by_column(x: np.ndarray) -> np.ndarray:
        x = x.astype(np.float64)[..., :rows]
        return x[:, None] if x.ndim == 1 else x[np.arange(numbers.shape[1]) * len(x) // numbers.shape[1]].T

    if w.zeros is not None:
        numbers = numbers - by_column(np.asarray(w.zeros))
    return numbers * by_column(_scales(w))


def _scales(w: QuantizedWeight) -> np.ndarray:
    """Returns scales as the kernel takes them. Those of a doubly quantized weight are mean + code * step, rounded to
    float16. E8M0's are powers of two of their exponents. E4M3's, in units of a float32 a row, are rounded to float32.
    """
    stored = np.asarray(w.scales)
    if w.format.scale_codes == "e8m0":
        return 2.0 ** (stored.astype(np.float64) - 127)
    if w.format.scale_codes == "e4m3":
        return stored.astype(np.float32) * np.asarray(w.scale_steps)[None, :]
    if w.scale_steps is None:
        return stored
    mean, *steps = np.asarray(w.scale_steps, np.float32)
    by_row = stored.T  # blocks of 256 run along a row's groups, then the next row's
    step = np.asarray(steps, np.float32)[np.arange(by_row.size).reshape(by_row.shape) // 256]
    limits = np.finfo(np.float16)
    scales = np.clip(mean + by_row.astype(np.float32) * step, float(limits.tiny), float(limits.max))
    return scales.astype(np.float16).T


def weight_only_matmul(
    x: ArrayLike, w: QuantizedWeight, bias: ArrayLike | None, residual: ArrayLike | None
) -> np.ndarray:
    """Returns float64 [..., N] of x [..., K], bias [N] and residual [..., N]."""
    weight = decoded(w)[:, : w.shape[1]]
    inputs = np.asarray(x).astype(np.float64)
    if w.columns is not None:
        inputs = inputs[..., np.asarray(w.columns)]
    y = inputs @ weight.T
    for term in (bias, residual):
        if term is not None:
            y = y + np.asarray(term).astype(np.float64)
    return y
