"""Makes calls of ragged_matmul that kernels of several backends compute."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from pallas_kernels.formats.quantized_rows import quantize_rows
from pallas_kernels.formats.quantized_weights import decode, encode
from pallas_kernels.formats.weight_formats import parse_weight_format
from pallas_kernels.ragged_matmul import reference

CODES = {"int8": "w8a8", "fp8": "fp8"}  # of rows of codes, by their kind


def arguments(kind: str, sizes: tuple[int, ...], m: int, n: int, k: int, gated: bool) -> tuple[tuple, np.ndarray]:
    """Returns arguments of the kernel, with NaN where nothing may be read, and what the formula makes of them."""
    rng, parts = np.random.default_rng(0), 2 if gated else 1
    x = jnp.asarray(rng.normal(size=(m, k)), "bfloat16")
    w = jnp.asarray(rng.normal(size=(len(sizes) * parts * n, k)) / k**0.5, "bfloat16")
    used = np.repeat(np.asarray(sizes) > 0, parts * n)
    if kind not in CODES:
        x = x.at[sum(sizes) :].set(jnp.nan)
        wide = np.nan_to_num(np.asarray(x, np.float64)), np.asarray(w, np.float64)
        if kind == "bfloat16":
            w = jnp.where(used[:, None], w, jnp.nan)
        else:
            w = encode(w, parse_weight_format(kind))
            wide = wide[0], np.asarray(decode(w))
            infinite = 255 if w.scales.dtype == jnp.uint8 else jnp.nan
            used = np.pad(used, (0, w.scales.shape[1] - len(used)))
            w = replace(w, scales=jnp.where(used[None, :], w.scales, jnp.asarray(infinite, w.scales.dtype)))
    else:
        x, w = quantize_rows(x, kind), encode(w, parse_weight_format(CODES[kind]))
        wide = np.asarray(x.values, np.float64) * np.asarray(x.scales, np.float64)[:, None], np.asarray(decode(w))
    blocks = wide[1].reshape(len(sizes), parts, n, k)
    products = [reference.ragged_matmul(wide[0], blocks[:, part], sizes) for part in range(parts)]
    expected = products[0] / (1 + np.exp(-products[0])) * products[1] if gated else products[0]
    return (x, w, sizes_of(*sizes), gated, jnp.dtype("bfloat16")), expected


def sizes_of(*sizes):
    return jnp.asarray(sizes, jnp.int32)


def operands(kind: str, m: int, n: int, k: int) -> tuple:
    """Returns x [M, K] and a weight [N, K] of a kind of arguments()."""
    x, w = jnp.zeros((m, k), "bfloat16"), jnp.zeros((n, k), "bfloat16")
    if kind == "bfloat16":
        return x, w
    return quantize_rows(x, kind) if kind in CODES else x, encode(w, parse_weight_format(CODES.get(kind, kind)))
