"""Says what the Hopper kernel of ragged_matmul supports, and how it cuts its work. Imports no Pallas."""

import jax
import jax.numpy as jnp

from pallas_kernels.checks import check_listed
from pallas_kernels.formats.quantized_rows import QuantizedRows
from pallas_kernels.formats.quantized_weights import QuantizedWeight
from pallas_kernels.hopper.gemm_sm90.skinny_config import (
    FROM_MEMORY,
    INTO_SM,
    LAST,
    OPERATIONS,
    Config,
    most_stages,
    stage_bytes,
)

PIECE = 64  # columns: rows of a result go out one by one, from places in shared memory that are multiples of 128 bytes


def check_supported(
    x: jax.Array | QuantizedRows, w: jax.Array | QuantizedWeight, groups: int, gated: bool, out_dtype: jnp.dtype
) -> None:
    """Raises NotImplementedError for what the kernel does not do, naming what it does."""
    check_listed(("out_dtype", str(out_dtype), ("bfloat16", "float16", "float32")))
    if isinstance(w, QuantizedWeight):
        plain = w.columns is None and w.scales.shape == (w.values.shape[0],)
        codes = isinstance(x, QuantizedRows) and x.scales.ndim == 1 and x.values.dtype == w.values.dtype
        if not (plain and codes):
            raise NotImplementedError("the mosaic kernel multiplies rows of codes by weights with a scale a row alone")
    elif isinstance(x, QuantizedRows) or str(x.dtype) not in ("bfloat16", "float16") or w.dtype != x.dtype:
        kind = "codes" if isinstance(x, QuantizedRows) else x.dtype
        raise NotImplementedError(f"the mosaic kernel has no {kind} product; supported: bfloat16, float16")
    n, k = (w.values if isinstance(w, QuantizedWeight) else w).shape
    n = n // groups // (2 if gated else 1)
    if n % PIECE or k % 32 or not n or not k:
        raise NotImplementedError(
            f"weights are [{n}, {k}]; the mosaic kernel supports N % {PIECE} == 0 and K % 32 == 0"
        )


def choose_config(m: int, groups: int, n: int, k: int, itemsize: int, gated: bool) -> Config:
    """Returns the configuration with the least estimated time for M rows in X groups. n: of the result."""
    parts = 2 if gated else 1
    choices = [
        config
        for rows in (64, 128, 256)
        for columns in range(PIECE * parts, 257, PIECE * parts)
        if rows * columns <= 256 * 192
        for config in (Config(rows, columns, stage_bytes(rows, columns)),)
        if most_stages(config, itemsize, 4, config.step // itemsize) >= 3
    ]
    return min(choices, key=lambda config: estimate(config, m, groups, n * parts, k, itemsize))


def estimate(config: Config, m: int, groups: int, n: int, k: int, itemsize: int) -> tuple[float, float]:
    """Returns the microseconds that the product should take if every group has rows, and the busiest SM's."""
    blocks = -(-m // config.rows)
    tiles = min(m, blocks + min(groups, m) - 1) * -(-n // config.columns)
    waves = max(1.0, tiles / config.ctas) if tiles > 4 * config.ctas else -(-tiles // config.ctas)
    intake = (min(-(-m // 8) * 8, config.rows) + config.columns) * k * itemsize / INTO_SM
    compute = 2 * config.rows * config.columns * k / OPERATIONS[itemsize]
    busiest = waves * (max(intake, compute) + LAST)
    return max(min(m, groups) * n * k * itemsize / FROM_MEMORY, busiest), busiest
