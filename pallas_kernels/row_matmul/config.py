"""Says what the Hopper kernels of row_matmul support, and how they cut their work. Imports no Pallas."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.hopper.gemm_sm90.gemv_config import CHUNK, VECTOR, WARPS
from pallas_kernels.hopper.gemm_sm90.skinny_config import Config, most_stages
from pallas_kernels.hopper.gemm_sm90.support import OUT_DTYPES
from pallas_kernels.ragged_matmul.config import estimate

MOST_ROWS = 256  # that each read their own matrix, if only from the cache: more are multiplied in blocks
ALIKE = 4  # rows that one block computes if they share a matrix
LANES = 32
PIECE = 128  # bytes: rows of a result of many rows go out one by one, from places that are multiples of it
SHORT = (8, 16, 32, 64)  # K of the kernel whose threads hold parts of a row of w
VALUES = 8192  # of w that a block of the short kernel reads


@dataclass(frozen=True)
class Long:
    """Says how a block of four warps cuts w [N, K] of large K. It has `rows` rows of w, and `ahead` chunks of them are
    on their way at once."""

    rows: int = 4
    ahead: int = 8


@dataclass(frozen=True)
class Short:
    """Says that a block of four warps has `columns` of the result, of small K."""

    columns: int


def check_supported(
    x: jax.Array,
    w: jax.Array,
    scale: jax.Array | None,
    residual: jax.Array | None,
    parts: tuple[int, ...],
    out_dtype: jnp.dtype,
) -> None:
    """Raises NotImplementedError for what the kernels do not do, naming what they do."""
    rows, k, kind = x.shape[0], w.shape[3], str(w.dtype)
    if kind not in ("bfloat16", "float16") or str(x.dtype) not in (kind, "float32") or str(out_dtype) not in OUT_DTYPES:
        what = f"{x.dtype} times {kind} to {out_dtype}"
        raise NotImplementedError(f"the mosaic kernel has no {what}; it takes w of bfloat16 or float16")
    if rows > MOST_ROWS:
        if k % 16 or not many_configs(columns_of(parts, residual, out_dtype), k, out_dtype):
            piece = PIECE // out_dtype.itemsize
            raise NotImplementedError(
                f"w is {w.shape} of parts {parts}; the mosaic kernel of {rows} rows supports K % 16 == 0 and parts in "
                f"multiples of {piece}"
            )
        return
    if k in SHORT:
        if short_config(parts, k) is None:
            step = WARPS * LANES * VECTOR // k
            raise NotImplementedError(f"parts are {parts}; the mosaic kernel supports multiples of {step} with K = {k}")
        return
    alone = scale is None and residual is None and len(parts) == 1
    if k % (CHUNK * VECTOR) or w.shape[2] % Long.rows or not alone:
        raise NotImplementedError(
            f"w is {w.shape}; the mosaic kernel supports K of {SHORT}, and without scale, residual and parts also "
            f"K % {CHUNK * VECTOR} == 0 with N % {Long.rows} == 0"
        )


def columns_of(parts: tuple[int, ...], residual: jax.Array | None, out_dtype: jnp.dtype) -> tuple[int, ...]:
    """Returns the columns of each part that the kernel of many rows computes: of a single part a few more than there
    are, so that rows of the result are whole pieces."""
    piece = PIECE // out_dtype.itemsize
    return parts if len(parts) > 1 or residual is not None else (-(-parts[0] // piece) * piece,)


def many_configs(columns: tuple[int, ...], k: int, out_dtype: jnp.dtype) -> list[Config]:
    """Returns the configurations of many rows whose tiles are within one part of the columns."""
    piece = PIECE // out_dtype.itemsize
    return [
        config
        for rows in (64, 128, 256)
        for width in range(piece, 257, piece)
        if rows * width <= 256 * 192 and (len(columns) == 1 or not math.gcd(*columns) % width)
        for config in (Config(rows, width),)
        if not math.gcd(*columns) % piece and most_stages(config, 2, out_dtype.itemsize, config.step // 2) >= 3
    ]


def many_config(m: int, runs: int, columns: tuple[int, ...], k: int, out_dtype: jnp.dtype) -> Config:
    """Returns the configuration with the least estimated time for M rows in runs that share a matrix each."""
    choices = many_configs(columns, k, out_dtype)
    return min(choices, key=lambda config: estimate(config, m, runs, sum(columns), k, 2))


def check_unasked(*_: object) -> None:
    """Raises NotImplementedError: no device has measured the kernels yet."""
    raise NotImplementedError("the mosaic kernel runs where it is named: no device has measured it yet")


def short_config(parts: tuple[int, ...], k: int) -> Short | None:
    """Returns how blocks cut the columns, each within one part; None where they cannot."""
    columns = VALUES // k
    while math.gcd(*parts) % columns:
        columns //= 2
    return Short(columns) if columns * k >= WARPS * LANES * VECTOR else None
