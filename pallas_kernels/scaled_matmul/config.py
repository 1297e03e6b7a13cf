"""Says what the kernels of scaled matmuls support, and chooses a configuration. Imports no Pallas."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import backends
from pallas_kernels.checks import check_listed
from pallas_kernels.formats.weight_formats import BLOCK
from pallas_kernels.hopper.gemm_sm90 import skinny_config, tall_config
from pallas_kernels.hopper.gemm_sm90.support import check_result
from pallas_kernels.triton.triton_call import check_installed

Config = tall_config.Config | skinny_config.Config
MULTIPLE = 32  # of N and K


def is_skinny(config: Config) -> bool:
    """Returns whether a configuration is of the kernel for few rows."""
    return isinstance(config, skinny_config.Config)


def check_supported(n: int, k: int, scale_dtype: jnp.dtype, out_dtype: jnp.dtype, residual: jax.Array | None) -> None:
    """Raises NotImplementedError for what the kernels do not do, naming what they do."""
    for name, size in (("N", n), ("K", k)):
        if size < MULTIPLE or size % MULTIPLE:
            raise NotImplementedError(f"{name}={size} is not supported by backend mosaic, which does multiples of 32")
    if scale_dtype != jnp.float32:
        raise NotImplementedError(f"scales of {scale_dtype} are not supported by backend mosaic, which does float32")
    check_result(out_dtype, residual)


def check_blocks(n: int, k: int, *rest: Any) -> None:
    """Checks as check_supported, for a scale a block of w."""
    if k % BLOCK:
        raise NotImplementedError(
            f"K={k} is not supported by backend mosaic, which does multiples of {BLOCK} in blocks"
        )
    check_supported(n, k, *rest)


def choose_config(m: int, n: int, k: int) -> Config:
    """Returns the configuration for x [M, K] and w [N, K], both of eight bits. It is the tuned one
    for (K, N) and M, or else the one with the fewest clocks by `estimate`."""
    if m <= FEW_ROWS:
        return skinny_config.choose_config(m, n, k, 1)
    return next((config for most, config in TUNED.get((k, n), ()) if m <= most), estimate(m, n, k))


def choose_blocks(m: int, n: int, k: int) -> Config:
    """Returns the configuration for x [M, K] and w [N, K] with a scale a block. Each block of a stage has an
    accumulator beside the sums. So tiles are smaller for many rows, and for few rows stages have as many blocks as
    registers allow."""
    if m > FEW_ROWS:
        return estimate(m, n, k, BLOCK_TILES)
    config = skinny_config.choose_config(m, n, k, 1)
    return replace(config, step=BLOCK * (4 if config.columns <= 32 else 2 if config.columns <= 96 else 1))


def estimate(m: int, n: int, k: int, among: tuple[tall_config.Config, ...] = ()) -> tall_config.Config:
    """Returns the tile that takes the fewest clocks by a count. An SM multiplies 4096 pairs of bytes and takes in 64
    bytes a clock. A tile's beginning and end cost some 3000."""

    def clocks(config: tall_config.Config) -> int:
        tiles = -(-m // config.tile_m) * -(-n // config.tile_n)
        step = max(config.tile_m * config.tile_n // 32, 2 * (config.tile_m + config.tile_n))
        return -(-tiles // config.ctas) * (-(-k // 128) * step + 3000)

    return min(among or TILES, key=clocks)


FEW_ROWS = 64  # up to so many rows the bytes of w bound the product, and skinny.py computes it
ALL = 1 << 30
_tall = tall_config.Config
TILES = tuple(
    _tall(rows, n, 8) for rows, widths in ((256, (192, 128)), (128, (256, 192, 128, 96, 64, 32))) for n in widths
)
BLOCK_TILES = tuple(_tall(128, n, 8) for n in (160, 128, 96, 64, 32))

# By (K, N): the largest M of each configuration, the best one with int8 on an H200 (experiments/LOG.md). Tiles are as
# wide as one wave allows. float8 takes the same configurations.
TUNED: dict[tuple[int, int], tuple[tuple[int, Config], ...]] = {
    (4096, 12288): (
        (128, _tall(128, 96, 7)), (256, _tall(128, 192, 5)), (512, _tall(256, 192, 3)), (1024, _tall(256, 128)),
        (ALL, _tall(256, 192, 3)),
    ),
    (4096, 22016): ((128, _tall(128, 192)), (512, _tall(256, 176)), (ALL, _tall(256, 128))),
    (4096, 4096): (
        (128, _tall(128, 32, 8)), (256, _tall(128, 64, 8)), (512, _tall(128, 128, 6)), (ALL, _tall(256, 128)),
    ),
    (11008, 4096): (
        (128, _tall(128, 32, 8)), (256, _tall(128, 64, 8)), (512, _tall(128, 128, 6)), (1024, _tall(128, 256)),
        (ALL, _tall(256, 128)),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class TritonConfig:
    """Holds a tile of the Triton kernel: sums of int8 are exact, so that nothing here changes their bits."""

    rows: int
    columns: int
    depth: int  # of a step
    warps: int = 4
    stages: int = 4


# The largest M, and a tile that fits the shared memory of compute capability 8.6; the last for 9.0 is deeper.
TRITON = (
    (16, TritonConfig(16, 32, 256)),
    (64, TritonConfig(64, 64, 128)),
    (ALL, TritonConfig(128, 128, 64, warps=8)),
)
TRITON_HOPPER = (*TRITON[:-1], (ALL, TritonConfig(128, 128, 128, warps=8, stages=3)))


def triton_config(m: int, hopper: bool, in_blocks: bool = False) -> TritonConfig:
    """Returns the configuration for M rows on a device of compute capability 9.0, or of 8.0 to 8.9. Where a block of w
    has a scale, a step is a block's."""
    config = next(config for most, config in (TRITON_HOPPER if hopper else TRITON) if m <= most)
    return replace(config, depth=BLOCK, stages=min(config.stages, 3)) if in_blocks else config


def check_triton(n: int, k: int, scale_dtype: jnp.dtype, out_dtype: jnp.dtype, residual: jax.Array | None) -> None:
    """Raises NotImplementedError for what the Triton kernel does not do, naming what it does."""
    check_installed()
    narrow = ("bfloat16", "float16", "float32")
    check_listed(
        ("scales of", str(scale_dtype), ("float32",)), ("results of", str(out_dtype), narrow),
        ("a residual of", "float32" if residual is None else str(residual.dtype), narrow), backend="triton",
    )  # fmt: skip


def check_triton_fp8(*arguments) -> None:
    """Checks as check_triton, for float8, which GPUs before compute capability 8.9 do not multiply."""
    check_triton(*arguments)
    if (found := backends.capability()) in backends.WITHOUT_FLOAT8:
        raise NotImplementedError(f"float8 is not supported by backend triton on {found}, but from 8.9 on")
