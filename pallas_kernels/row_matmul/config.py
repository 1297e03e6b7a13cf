"""Says what the Hopper kernels of row_matmul and low_rank support, and how they cut their work. Imports no Pallas."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.hopper.gemm_sm90.gemv_config import CHUNK, VECTOR, WARPS
from pallas_kernels.hopper.gemm_sm90.skinny_config import FROM_MEMORY, INTO_SM, Config, most_stages
from pallas_kernels.hopper.gemm_sm90.support import OUT_DTYPES
from pallas_kernels.hopper.hopper import SHARED_MEMORY, SMS
from pallas_kernels.ragged_matmul.config import estimate

MOST_ROWS = 256  # that each read their own matrix, if only from the cache: more are multiplied in blocks
ALIKE = 4  # rows that one block computes if they share a matrix
LANES = 32
PIECE = 128  # bytes: rows of a result of many rows go out one by one, from places that are multiples of it
SHORT = (8, 16, 32, 64)  # K of the kernel whose threads hold parts of a row of w
VALUES = 8192  # of w that a block of the short kernel reads
LOW_RANK_CHUNK = 256  # columns of a that a warpgroup multiplies at once
LOW_RANK_VALUES = 4096  # of a and b in a slot of the ring
LOW_RANK_REST = 4096  # bytes of shared memory beside the rings and x, at most
SPREAD_ROWS, SPREAD_PIECE = 128, 64  # of a tile of the second product of many rows, whose pieces are columns
FEWEST = 8  # rows of one kernel for a and b: fewer leave most SMs idle while a is multiplied
FROM_CACHE = 6e6  # bytes a microsecond that all SMs read from the second-level cache: an estimate


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


@dataclass(frozen=True)
class LowRank:
    """Says how low_rank cuts its work. Each part's columns are in `splits` shares, one to a CTA. A slot holds `rows`
    rows of a chunk of a, or b's rows of `columns` columns. Slots are a multiple of those of all `warpgroups`, so that
    each warpgroup meets the same slots again."""

    splits: int
    warpgroups: int
    rows: int
    columns: int
    a_stages: int
    b_stages: int

    @property
    def stages(self) -> dict[str, int]:
        return {"a": self.a_stages, "b": self.b_stages}


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


def spreads(m: int, parts: tuple[int, ...], k: int, residual: Any, out_dtype: jnp.dtype, gated: bool = False) -> bool:
    """Returns whether the kernel for many rows of small K multiplies them. gated: SiLU of the first of two parts times
    the second."""
    plain = str(out_dtype) in ("bfloat16", "float16") and (residual is None or residual.dtype == out_dtype)
    fits = math.gcd(*parts) % (SPREAD_PIECE if gated else 2 * SPREAD_PIECE) == 0
    halves = not gated or (len(parts) == 2 and parts[0] == parts[1])
    return m > MOST_ROWS and m % 8 == 0 and k in (16, 32, 64) and plain and fits and halves


def check_unasked(x: jax.Array, *rest: object) -> None:
    """Raises NotImplementedError for what the kernels do not do, and for one row, which XLA multiplies faster."""
    check_supported(x, *rest)  # type: ignore[arg-type]
    if x.shape[0] == 1:
        raise NotImplementedError("the mosaic kernel of one row runs only where it is named: XLA's is faster")


def fits_low_rank(
    x: jax.Array,
    a: jax.Array,
    b: jax.Array,
    residual: jax.Array | None,
    parts: tuple[int, ...],
    runs: int | None,
    out_dtype: jnp.dtype,
    gated: bool = False,
) -> bool:
    """Returns whether one kernel multiplies by a and b, and is expected to be faster than two. Rows of few runs are
    not: two kernels read an adapter once for several rows."""
    m, k, r = x.shape[0], x.shape[1], b.shape[3]
    kinds = {str(each.dtype) for each in (x, a, b)}
    added = residual is None or residual.dtype == out_dtype
    plain = kinds <= {"bfloat16"} or kinds <= {"float16"}
    few = FEWEST <= m <= MOST_ROWS and (runs is None or ALIKE * runs >= m)
    cut = low_rank_config(m, parts, k, r, gated)
    return few and plain and added and str(out_dtype) in OUT_DTYPES and cut is not None


def low_rank_config(m: int, parts: tuple[int, ...], k: int, r: int, gated: bool = False) -> LowRank | None:
    """Returns the configuration with the least estimated time for M rows with adapters of their own; None where the
    kernel does not fit. gated: each CTA has both of two parts."""
    if r not in SHORT or k % LOW_RANK_CHUNK or (gated and (len(parts) != 2 or parts[0] != parts[1])):
        return None
    rows = min(r, LOW_RANK_VALUES // LOW_RANK_CHUNK)
    columns = min(LOW_RANK_VALUES // r, 256)
    pieces = 2 if gated else 1
    several = pieces * r // rows  # slots of one chunk of a, whose sums are in registers
    if math.gcd(*parts) % columns or several > 4:
        return None

    def estimated(splits: int) -> tuple[float, int, int]:
        """Returns microseconds: those of memory, of the cache, or of the busiest SM. For ties few waves follow, and
        small CTAs."""
        waves = -(-len(parts) // pieces * splits * m // SMS)
        read = m * 2 * r * (len(parts) * k + sum(parts))
        again = m * 2 * r * len(parts) * k * (splits - 1)
        cta = pieces * 2 * r * (k + max(parts) / splits) / INTO_SM
        return max(read / FROM_MEMORY, (read + again) / FROM_CACHE, cta * waves), waves, -splits

    splits = min(range(1, min(parts) // columns + 1), key=estimated)
    if len(parts) // pieces * splits * m > SMS:  # two CTAs of an SM share its registers and memory
        warpgroups, rings = 2, [(6 if several == 1 else 8, 4)]
    else:
        warpgroups, rings = 4 if several == 1 else 2, [(16, 8), (16, 4), (8, 4)]  # each has several sums in registers
    room = SHARED_MEMORY - LOW_RANK_REST - 2 * k  # a long x leaves less to the rings
    fitting = (ring for ring in rings if 2 * (ring[0] * rows * LOW_RANK_CHUNK + ring[1] * columns * r) <= room)
    return next((LowRank(splits, warpgroups, rows, columns, *ring) for ring in fitting), None)


def short_config(parts: tuple[int, ...], k: int) -> Short | None:
    """Returns how blocks cut the columns, each within one part; None where they cannot."""
    columns = VALUES // k
    while math.gcd(*parts) % columns:
        columns //= 2
    return Short(columns) if columns * k >= WARPS * LANES * VECTOR else None
