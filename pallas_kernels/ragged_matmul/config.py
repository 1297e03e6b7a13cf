"""Says what the Hopper kernels of ragged_matmul support, and how they cut their work. Imports no Pallas."""

import math

import jax
import jax.numpy as jnp

from pallas_kernels import backends
from pallas_kernels.checks import check_listed
from pallas_kernels.formats.quantized_rows import QuantizedRows
from pallas_kernels.formats.quantized_weights import QuantizedWeight
from pallas_kernels.formats.weight_formats import TABLES
from pallas_kernels.hopper.gemm_sm90 import gemv_config
from pallas_kernels.hopper.gemm_sm90.skinny_config import (
    FROM_MEMORY,
    INTO_SM,
    LAST,
    OPERATIONS,
    Config,
    most_stages,
    stage_bytes,
)
from pallas_kernels.scaled_matmul.config import TritonConfig
from pallas_kernels.triton.triton_call import check_installed
from pallas_kernels.weight_only_matmul.config import Config as CodesConfig
from pallas_kernels.weight_only_matmul.config import RowConfig

# Weights that share a scale, by codes that plain rows are multiplied by, and what N and K are multiples of.
GROUPS = {"int4": (32, 64, 128), "nf4": (32, 64, 128), "e2m1": (32,)}
CODES_PIECE = 32, 64
# Codes that an SM turns into operands in a microsecond, by the warpgroups that do: an estimate, not measured.
DECODED = {1: 45e3, 2: 75e3}
# The same of single warps, by the rows of a block: an estimate too.
WARPS_DECODED = {8: 80e3, 16: 65e3}
# Microseconds that kernels of single rows save if no weight is read twice: an estimate, by bytes of an element.
SAVED: dict[int | str, float] = {1: 2.0, 2: 2.5, "codes": 4.0}
LANES_BYTES = 512  # of codes that a warp loads of a row at once
BLOCKS, CODES_BLOCKS = (64, 128, 256), (8, 16, 32, 64, 128)  # rows
PIECE = 64  # columns: rows of a result go out one by one, from places in shared memory that are multiples of 128 bytes


def check_supported(
    x: jax.Array | QuantizedRows, w: jax.Array | QuantizedWeight, groups: int, gated: bool, out_dtype: jnp.dtype
) -> None:
    """Raises NotImplementedError for what the kernels do not do, naming what they do."""
    check_listed(("out_dtype", str(out_dtype), ("bfloat16", "float16", "float32")))
    (n, k), multiples = w.shape, (PIECE, 32)
    n = n // groups // (2 if gated else 1)
    if isinstance(x, QuantizedRows):
        k = _check_of_codes(x, w).values.shape[1]
    elif isinstance(w, QuantizedWeight):
        _check_codes(x, w)
        multiples = CODES_PIECE
    elif str(x.dtype) not in ("bfloat16", "float16") or w.dtype != x.dtype:
        raise NotImplementedError(f"the mosaic kernel has no {x.dtype} product; supported: bfloat16, float16")
    if n % multiples[0] or k % multiples[1] or not n or not k:
        named = " and ".join(f"{name} % {size} == 0" for name, size in zip("NK", multiples))
        raise NotImplementedError(f"weights are [{n}, {k}]; the mosaic kernel supports {named}")


def _check_of_codes(x: QuantizedRows, w: jax.Array | QuantizedWeight, backend: str = "mosaic") -> QuantizedWeight:
    """Checks a product of rows of codes, and returns the weight."""
    if (
        isinstance(w, QuantizedWeight)
        and w.columns is None
        and w.scales.shape == (w.values.shape[0],)
        and (w.values.dtype, 1) == (x.values.dtype, x.scales.ndim)
    ):
        return w
    raise NotImplementedError(
        f"the {backend} kernel multiplies rows of codes by weights of such codes with a scale a row alone"
    )


def _check_codes(x: jax.Array, w: QuantizedWeight, backend: str = "mosaic", more: tuple[str, ...] = ()) -> None:
    """Checks a product of plain rows by codes of 4 bits. `more` are tables of such codes beside NF4."""
    fmt, groups = w.format, dict.fromkeys(more, GROUPS["nf4"]) | GROUPS
    check_listed(
        ("rows of", str(x.dtype), ("bfloat16", "float16")),
        ("codes", fmt.codes, tuple(groups)),
        (f"{fmt.codes} in groups of", fmt.group, groups.get(fmt.codes, ())),
        ("scales in", str(w.scales.dtype), ("uint8" if fmt.scale_codes == "e8m0" else "float16",)),
        backend=backend,
    )
    if not w.takes_plain_inputs:
        raise NotImplementedError(f"the {backend} kernel takes weights whose columns are in order, and not rotated")


def block_rows(
    m: int, w: jax.Array | QuantizedWeight, groups: int, gated: bool, chosen: int = 1, backend: str | None = None
) -> tuple[int, bool]:
    """Returns the rows of a block of the Hopper kernels, and whether blocks are apart, for M rows and weights
    w [X N, K]. Each `chosen` rows are of different groups."""
    one_order = backend == backends.DETERMINISTIC
    if choose_rows(m, w, groups, gated, chosen, one_order=one_order) is not None:
        return 1, False
    n = w.shape[0] // (groups * (2 if gated else 1))
    if isinstance(w, QuantizedWeight) and w.format.row_codes is None:
        config = choose_codes_config(m, groups, n, w.shape[1], gated, one_order=one_order)
        return config.tokens, config.by_warp
    stored = w.values if isinstance(w, QuantizedWeight) else w
    itemsize = min(stored.dtype.itemsize, max(OPERATIONS))  # no kernel has more
    return choose_config(m, groups, n, stored.shape[1], itemsize, gated).rows, False


def choose_rows(
    m: int, w: jax.Array | QuantizedWeight, groups: int, gated: bool, chosen: int = 1, block: int | None = None,
    one_order: bool = False,
) -> gemv_config.Config | RowConfig | None:  # fmt: skip
    """Returns the configuration of the kernels in which every row reads its group's weight; None where others run.

    They run for at most as many rows as there are groups, by an estimate of what several rows of a group read again.
    Each `chosen` rows are of different groups. block: of a schedule, which says what was chosen when it was made. These
    kernels add in an order of their own. So they never run with one_order.
    """
    stored = w.values if isinstance(w, QuantizedWeight) else w
    (rows, k), itemsize = stored.shape, stored.dtype.itemsize
    n, by_codes = rows // (groups * (2 if gated else 1)), isinstance(w, QuantizedWeight) and w.format.row_codes is None
    if one_order or not m or block not in (None, 1) or (stored.dtype != jnp.int8 and not by_codes and itemsize != 2):
        return None
    used = groups * (1 - (1 - min(chosen / groups, 1)) ** (m / chosen))  # groups with rows, if these choose at random
    again = (m - used) * n * (2 if gated else 1) * k * itemsize / FROM_MEMORY
    if block is None and (m > groups or again > SAVED["codes" if by_codes else itemsize]):
        return None
    return row_config(k * itemsize) if by_codes else gemv_config.for_groups(n, k, itemsize, gated)


def row_config(row_bytes: int) -> RowConfig:
    """Returns the configuration for single rows of x and rows of codes of so many bytes. It leaves the fewest lanes
    without codes, and then has the most rows to a warp."""

    def busy(config: RowConfig) -> tuple[float, int]:
        step = config.across * LANES_BYTES
        return row_bytes / (-(-row_bytes // step) * step), config.across

    return max((RowConfig(across=across) for across in (1, 2, 4)), key=busy)


def choose_codes_config(
    m: int, groups: int, n: int, k: int, gated: bool, block: tuple[int, bool] | None = None, one_order: bool = False
) -> CodesConfig:
    """Returns the configuration with the least estimated time for M rows in X groups and codes of 4 bits. n: of the
    result. block: what block_rows gave for a schedule, which the configuration has too if it can.

    Whether products are by_warp changes bits, so M does. In one_order they never are. Nothing else that is chosen
    changes bits. By wgmma K is not cut, and products go in its order. By warp a stage of it is cut into parts, in the
    same way whatever M is."""
    whole = [
        CodesConfig(tokens, 1, warpgroups, 2 if gated else 1, width=128 if tokens <= 32 else 64, stages=16)
        for warpgroups in DECODED
        for tokens in CODES_BLOCKS
    ]
    fold = 2 if -(-k // 256) % 2 == 0 else 1  # no stage has a part that is past the end of K
    by_warp = [
        CodesConfig(tokens, fold, warpgroups, row_tiles, stages=16, by_warp=True)
        for tokens in WARPS_DECODED
        for warpgroups in (3, 2)
        for row_tiles in (4, 2)
    ]
    choices = whole if one_order else [*by_warp, *whole]
    fitting = [config for config in choices if block == (config.tokens, config.by_warp)]
    return min(fitting or choices, key=lambda config: _estimate_codes(config, m, groups, n * (2 if gated else 1), k))


def _estimate_codes(config: CodesConfig, m: int, groups: int, n: int, k: int) -> tuple[float, float]:
    if config.by_warp:
        pairs, decoded = _blocks_apart(m, groups, config.tokens), WARPS_DECODED[config.tokens]
    else:
        pairs, decoded = min(m, -(-m // config.tokens) + min(groups, m) - 1), DECODED[config.warpgroups]
    waves = -(-pairs * -(-n // config.rows) // config.ctas)
    intake = (2 * config.tokens + config.rows / 2) * k / INTO_SM
    compute = 2 * config.rows * config.tokens * k / OPERATIONS[2]
    busiest = waves * (max(intake, compute, config.rows * k / decoded) + LAST)
    return max(min(m, groups) * n * k / 2 / FROM_MEMORY, busiest), busiest


def _blocks_apart(m: int, groups: int, rows: int) -> int:
    """Returns about how many blocks there are that begin with a group's rows, if M rows choose groups at random."""
    mean = m / groups
    if mean > 16 * rows:  # then every remainder is as likely; of larger means exp(-mean) is 0
        return math.ceil(groups * (mean + (rows - 1) / 2) / rows)
    found, chance = 0.0, math.exp(-mean)  # of a group with no rows; a group may have any number
    for size in range(1, int(mean + 8 * mean**0.5) + 8):
        chance *= mean / size
        found += chance * -(-size // rows)
    return min(m, math.ceil(found * groups))


def choose_config(m: int, groups: int, n: int, k: int, itemsize: int, gated: bool, block: int | None = None) -> Config:
    """Returns the configuration with the least estimated time for M rows in X groups. n: of the result. block: rows of
    a block of a schedule."""
    parts = 2 if gated else 1
    choices = [
        config
        for rows in ((block,) if block in BLOCKS else BLOCKS)
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


def check_triton(
    x: jax.Array | QuantizedRows, w: jax.Array | QuantizedWeight, groups: int, gated: bool, out_dtype: jnp.dtype
) -> None:
    """Raises NotImplementedError for what the Triton kernels do not do, naming what they do."""
    check_installed()
    check_listed(("out_dtype", str(out_dtype), ("bfloat16", "float16", "float32")), backend="triton")
    if isinstance(x, QuantizedRows):
        _check_of_codes(x, w, backend="triton")
        if x.values.dtype != jnp.int8 and (found := backends.capability()) in backends.WITHOUT_FLOAT8:
            raise NotImplementedError(f"float8 is not supported by backend triton on {found}, but from 8.9 on")
    elif isinstance(w, QuantizedWeight):
        _check_codes(x, w, backend="triton", more=tuple(TABLES))
    else:
        check_listed(("rows of", str(x.dtype), ("bfloat16", "float16")), backend="triton")
        check_listed(("weights of", str(w.dtype), (str(x.dtype),)), backend="triton")


def triton_config(m: int, groups: int, gated: bool, float8: bool = False) -> TritonConfig:
    """Returns the configuration for M rows in X groups, by an estimate. depth: in bytes. Rows and columns change no
    bits: Hopper sums products of float8 in another way from 64 rows on, so those have 64 at least."""
    rows = next((rows for rows in ((64,) if float8 else (16, 64)) if m <= rows * groups), 128)
    return TritonConfig(rows, 64 if gated or rows < 128 else 128, 128, warps=8 if rows == 128 else 4, stages=3)
