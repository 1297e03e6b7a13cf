"""Rounds weights to llama.cpp's types, for quant_accuracy and ptq_methods.

    python -m experiments.ptq_methods --models plain --schemes w4a16-g32 nf4 --scheme experiments.gguf_types:q8_0 \
        --scheme experiments.gguf_types:q6_k --scheme experiments.gguf_types:q4_k --scheme experiments.gguf_types:q4_0

The package gguf rounds to Q4_0, Q5_0 and Q8_0. The K types follow ggml-quants.c as it rounds without an
importance matrix: quantize_row_q4_K_ref and quantize_row_q6_K_ref. A row's last block of fewer than 256 values is
filled up with zeros, where llama.cpp takes another type. So a row of quant_accuracy is of one type alone.
"""

from collections.abc import Callable
from typing import Any

import gguf
import jax
import numpy as np

_BLOCK = 256
_SMALL = 1e-15  # GROUP_MAX_EPS: a group of no larger value is zero


def _typed(name: str, bits: float, rounded: Callable[[np.ndarray], np.ndarray]) -> Callable[[jax.Array], jax.Array]:
    """Returns a quantizer of weights [outputs, inputs]. It runs on the host, and takes tracers too."""

    def quantizer(w: jax.Array) -> jax.Array:
        shape = jax.ShapeDtypeStruct(w.shape, np.float32)
        return jax.pure_callback(lambda x: rounded(np.asarray(x, np.float32)), shape, w)

    found: Any = quantizer
    found.bits, found.__name__ = bits, name
    return found


def _by_package(kind: str) -> Callable[[np.ndarray], np.ndarray]:
    def rounded(w: np.ndarray) -> np.ndarray:
        own = gguf.GGMLQuantizationType[kind]
        return gguf.quants.dequantize(gguf.quants.quantize(w, own), own)

    return rounded


def _in_blocks(rounded: Callable[[np.ndarray], np.ndarray], group: int) -> Callable[[np.ndarray], np.ndarray]:
    """Returns a function of weights from one of groups, float32 [blocks, groups, group]."""

    def whole(w: np.ndarray) -> np.ndarray:
        wide = np.pad(w, ((0, 0), (0, -w.shape[1] % _BLOCK)))
        return rounded(wide.reshape(-1, _BLOCK // group, group)).reshape(wide.shape)[:, : w.shape[1]]

    return whole


def _half(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).astype(np.float32)


def _over(a: Any, b: np.ndarray) -> np.ndarray:
    """Returns a / b, and 0 where b is 0."""
    return np.divide(a, b, out=np.zeros(np.broadcast_shapes(np.shape(a), b.shape), np.float32), where=b != 0)


def _q6_k(x: np.ndarray) -> np.ndarray:
    """Rounds groups of 16 to 64 codes around zero, by 16 scales of 8 bits: quantize_row_q6_K_ref."""
    scales = _best_scale(x, 32)
    largest = np.take_along_axis(scales, np.abs(scales).argmax(axis=1, keepdims=True), axis=1)
    step = _over(-128, largest)
    stored = np.minimum(127, np.rint(step * scales))
    each = (_half(_over(1, step)) * stored)[..., None]
    return each * np.clip(np.rint(_over(x, np.broadcast_to(each, x.shape))), -32, 31)


def _best_scale(x: np.ndarray, most: int) -> np.ndarray:
    """Returns the scale of each group that has the least squared error weighted by x * x, among 19: make_qx_quants."""
    peak = np.take_along_axis(x, np.abs(x).argmax(axis=-1, keepdims=True), axis=-1)
    peak = np.where(np.abs(peak) < _SMALL, 0, peak)
    best, scale = np.full(x.shape[:-1], -1.0, np.float32), np.zeros(x.shape[:-1], np.float32)
    for tenths in (0, *range(-9, 0), *range(1, 10)):
        codes = np.clip(np.rint(_over(-(most + 0.1 * tenths), peak) * x), -most, most - 1)
        xl, ll = (x**3 * codes).sum(axis=-1), (x * x * codes * codes).sum(axis=-1)
        found = _over(xl * xl, ll)
        scale, best = np.where(found > best, _over(xl, ll), scale), np.maximum(found, best)
    return scale


def _q4_k(x: np.ndarray) -> np.ndarray:
    """Rounds groups of 32 to 16 codes above a minimum, by 8 scales and minima of 6 bits: quantize_row_q4_K_ref."""
    scales, minima = _best_scale_and_minimum(x, 15)
    each, below = (_in_six_bits(numbers) for numbers in (scales, minima))
    codes = np.clip(np.rint(_over(x + below, np.broadcast_to(each, x.shape))), 0, 15)
    return each * codes - below


def _in_six_bits(numbers: np.ndarray) -> np.ndarray:
    largest = numbers.max(axis=1, keepdims=True)
    stored = np.minimum(63, np.rint(_over(63, largest) * numbers))
    return (_half(largest / 63) * stored)[..., None]


def _best_scale_and_minimum(x: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the scale and the negated minimum of each group that have the least weighted squared error, among 22:
    make_qkx2_quants."""
    weights = np.sqrt((x * x).mean(axis=-1, keepdims=True)) + np.abs(x)
    low, high = np.minimum(x.min(axis=-1, keepdims=True), 0), x.max(axis=-1, keepdims=True)
    w, wx = weights.sum(axis=-1, keepdims=True), (weights * x).sum(axis=-1, keepdims=True)
    scale, minimum = (high - low) / most, low

    def coded(levels: float) -> np.ndarray:
        return np.clip(np.rint(_over(levels, high - low) * (x - low)), 0, most)

    def error(scale: np.ndarray, minimum: np.ndarray, codes: np.ndarray) -> np.ndarray:
        return (weights * (scale * codes + minimum - x) ** 2).sum(axis=-1, keepdims=True)

    best = error(scale, minimum, coded(most))
    for step in range(21):
        codes = coded(most - 1 + 0.1 * step)
        wl, wll, wxl = ((weights * y).sum(axis=-1, keepdims=True) for y in (codes, codes * codes, codes * x))
        whole = w * wll - wl * wl
        fitted, under = _over(w * wxl - wx * wl, whole), _over(wll * wx - wl * wxl, whole)
        fitted, under = np.where(under > 0, _over(wxl, wll), fitted), np.minimum(under, 0)
        found = error(fitted, under, codes)
        better = (whole > 0) & (found < best)
        scale, minimum = np.where(better, fitted, scale), np.where(better, under, minimum)
        best = np.where(better, found, best)
    return scale[..., 0], -minimum[..., 0]


q8_0 = _typed("q8_0", 8.5, _by_package("Q8_0"))
q5_0 = _typed("q5_0", 5.5, _by_package("Q5_0"))
q4_0 = _typed("q4_0", 4.5, _by_package("Q4_0"))
q6_k = _typed("q6_k", 6.5625, _in_blocks(_q6_k, 16))
q4_k = _typed("q4_k", 4.5, _in_blocks(_q4_k, 32))
