"""Decodes the blocks of GGUF tensors, in numpy. A row of a tensor is a sequence of blocks, of one type.

| type | values | bytes | block |
|---|---|---|---|
| F32, F16, BF16 | 1 | 4, 2, 2 | the value |
| Q4_0, Q5_0, Q8_0 | 32 | 18, 22, 34 | scale f16, (high bits,) codes |
| Q4_1, Q5_1 | 32 | 20, 24 | scale f16, minimum f16, (high bits,) codes |
| Q4_K, Q5_K | 256 | 144, 176 | f16 of scales and of minima, 8 scales and minima of 6 bits, (high bits,) codes |
| Q6_K | 256 | 210 | low bits, high bits, 16 scales i8, f16 of scales |
| IQ4_NL | 32 | 18 | scale f16, indices into a table |
| MXFP4 | 32 | 17 | scale E8M0, codes E2M1 |

Values equal ggml's to_float bit for bit: the same float32 operations in the same order.
"""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from pallas_kernels.formats.block_floats import E2M1
from pallas_kernels.formats.weight_formats import IQ4NL

Blocks = np.ndarray  # uint8 [n, bytes of a block]
_HIGH = np.arange(8, dtype=np.uint8)


def nibbles(octets: np.ndarray) -> np.ndarray:
    """Returns codes of 4 bits, uint8 [n, 2 B] of octets [n, B]: all low halves, then all high ones."""
    return np.concatenate([octets & np.uint8(15), octets >> np.uint8(4)], axis=1)


def half(octets: np.ndarray) -> np.ndarray:
    """Returns two bytes a block as float16 [n, 1]."""
    return np.ascontiguousarray(octets).view(np.float16)


def _wide(octets: np.ndarray) -> np.ndarray:
    return half(octets).astype(np.float32)


def _fifth(octets: np.ndarray) -> np.ndarray:
    """Returns the fifth bits of 32 codes, in place: uint8 [n, 32] of [n, 4]."""
    return np.unpackbits(np.ascontiguousarray(octets), axis=1, bitorder="little") << np.uint8(4)


def _q8_0(b: Blocks) -> np.ndarray:
    return np.ascontiguousarray(b[:, 2:]).view(np.int8).astype(np.float32) * _wide(b[:, :2])


def _q4_0(b: Blocks) -> np.ndarray:
    return _wide(b[:, :2]) * (nibbles(b[:, 2:]).astype(np.float32) - 8)


def _q4_1(b: Blocks) -> np.ndarray:
    return _wide(b[:, :2]) * nibbles(b[:, 4:]).astype(np.float32) + _wide(b[:, 2:4])


def _q5_0(b: Blocks) -> np.ndarray:
    return _wide(b[:, :2]) * ((nibbles(b[:, 6:]) | _fifth(b[:, 2:6])).astype(np.float32) - 16)


def _q5_1(b: Blocks) -> np.ndarray:
    return _wide(b[:, :2]) * (nibbles(b[:, 8:]) | _fifth(b[:, 4:8])).astype(np.float32) + _wide(b[:, 2:4])


def _scales_and_minima(b: Blocks) -> tuple[np.ndarray, np.ndarray]:
    """Returns 8 scales and 8 minima of a K block, float32 [n, 8, 1] each. The first four of each are the low 6 bits of
    a byte; the others have their high 2 bits there, and their low 4 in the last 4 bytes."""
    scale, minimum, rest = (b[:, 4 + 4 * i : 8 + 4 * i] for i in range(3))
    scales = np.concatenate([scale & 63, (rest & 15) | (scale >> 6) << 4], axis=1)
    minima = np.concatenate([minimum & 63, (rest >> 4) | (minimum >> 6) << 4], axis=1)
    return (_wide(b[:, :2]) * scales)[:, :, None], (_wide(b[:, 2:4]) * minima)[:, :, None]


def _by_64(octets: np.ndarray) -> np.ndarray:
    """Returns codes of 4 bits in groups of 32: uint8 [n, 8, 32] of [n, 128]. 32 bytes hold two groups."""
    return nibbles(octets.reshape(-1, 32)).reshape(len(octets), 8, 32)


def _q4_k(b: Blocks) -> np.ndarray:
    scales, minima = _scales_and_minima(b)
    return (scales * _by_64(b[:, 16:]).astype(np.float32) - minima).reshape(len(b), 256)


def _q5_k(b: Blocks) -> np.ndarray:
    scales, minima = _scales_and_minima(b)
    high = (b[:, None, 16:48] >> _HIGH[:, None] & 1) << np.uint8(4)  # bit i of each byte is of group i
    return (scales * (_by_64(b[:, 48:]) | high).astype(np.float32) - minima).reshape(len(b), 256)


def _q6_k(b: Blocks) -> np.ndarray:
    low = nibbles(b[:, :128].reshape(-1, 64)).reshape(len(b), 8, 32)
    high = (b[:, 128:192].reshape(-1, 2, 1, 32) >> _HIGH[::2, None] & 3).reshape(len(b), 8, 32) << np.uint8(4)
    scales = _wide(b[:, 208:]) * np.ascontiguousarray(b[:, 192:208]).view(np.int8).astype(np.float32)
    codes = ((low | high).astype(np.float32) - 32).reshape(len(b), 16, 16)
    return (scales[:, :, None] * codes).reshape(len(b), 256)


def _iq4_nl(b: Blocks) -> np.ndarray:
    return _wide(b[:, :2]) * np.asarray(IQ4NL, np.float32)[nibbles(b[:, 2:])]


def _mxfp4(b: Blocks) -> np.ndarray:
    values = np.asarray((*E2M1, *(0.0 - x for x in E2M1)), np.float32)[nibbles(b[:, 1:])]  # ggml has no -0
    return np.ldexp(values, b[:, :1].astype(np.int32) - 127)


def _floats(dtype: Any) -> Callable[[Blocks], np.ndarray]:
    return lambda b: b.view(dtype).astype(np.float32)


TYPES: dict[str, tuple[int, int, Callable[[Blocks], np.ndarray]]] = {  # values and bytes of a block; its float32 values
    "F32": (1, 4, _floats(np.float32)),
    "F16": (1, 2, _floats(np.float16)),
    "BF16": (1, 2, _floats(ml_dtypes.bfloat16)),
    "Q4_0": (32, 18, _q4_0),
    "Q4_1": (32, 20, _q4_1),
    "Q5_0": (32, 22, _q5_0),
    "Q5_1": (32, 24, _q5_1),
    "Q8_0": (32, 34, _q8_0),
    "Q4_K": (256, 144, _q4_k),
    "Q5_K": (256, 176, _q5_k),
    "Q6_K": (256, 210, _q6_k),
    "IQ4_NL": (32, 18, _iq4_nl),
    "MXFP4": (32, 17, _mxfp4),
}


def decode(octets: np.ndarray, kind: str) -> np.ndarray:
    """Returns the float32 values of rows of blocks: uint8 [..., bytes] gives [..., values]."""
    values, size, decoded = TYPES[kind]
    blocks = np.ascontiguousarray(octets).reshape(-1, size)
    with np.errstate(invalid="ignore", over="ignore"):  # a damaged scale may be NaN; other code refuses it
        return decoded(blocks).reshape(*octets.shape[:-1], octets.shape[-1] // size * values)
