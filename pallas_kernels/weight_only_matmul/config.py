"""How the Hopper kernel of weight_only_matmul cuts its work, and when it runs. Light to import."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from pallas_kernels.hopper import SHARED_MEMORY, SMS
from pallas_kernels.quantized_weights import WeightFormat

GROUPS = (32, 64, 128)  # that the kernel knows


@dataclass(frozen=True)
class Config:
    """A tile is `rows` weights' rows by `tokens` of x; CTAs are persistent.

    tokens: of a tile, 8 to 256, or 1. fold: parts of K that lie side by side in a tile, so that few rows of the weight
    fill the 64 rows of wgmma; each has its own columns for x. warpgroups: that compute, each its own rows. row_tiles:
    of 64 rows, of a warpgroup. split: parts of K that are summed after the kernel. width: bytes of a weight's row that
    a stage holds of a part. stages: in flight, at most: as many as shared memory holds. overlap: products run on while
    operands of the next stage are made. ctas: that run. Only fold, split and width change bits.

    stream: another kernel, for up to `tokens` rows of x, whose codes go straight into registers (stream_sm90.py). CTAs
    have 64 row_tiles / fold rows and their own number; fold times warpgroups parts of K, which change bits; stages of
    128 columns that a warp has in flight. split, width, overlap and ctas are not its.

    resident: a third one, for up to `tokens` rows of x, which stay in shared memory, a `split`th of K in each CTA,
    beside a ring of codes (resident_sm90.py). Tiles have 16 rows; a stage is 128 columns for each warp, and warps'
    parts of K are added in order. fold is 4; row_tiles, width and overlap are not its.
    """

    tokens: int = 8
    fold: int = 1
    warpgroups: int = 2
    row_tiles: int = 1
    split: int = 1
    width: int = 128
    stages: int = 8
    overlap: bool = False
    ctas: int = SMS
    stream: bool = False
    resident: bool = False

    def __post_init__(self) -> None:
        if self.tokens != 1 and (self.tokens % 8 or not 8 <= self.tokens * self.fold <= 256):
            raise ValueError(f"tokens is {self.tokens}, expected 1 or a multiple of 8, up to 256 / fold={self.fold}")
        if self.fold not in (1, 2, 4) or (self.fold > 1 and self.row_tiles > 1 and not self.stream):
            raise ValueError(f"fold is {self.fold}, expected 1, or 2 or 4 with row_tiles=1 (not {self.row_tiles})")
        if self.width not in (64, 128):
            raise ValueError(f"width is {self.width}, expected 64 or 128")
        if self.warpgroups not in (1, 2, 3) and not self.resident:
            raise ValueError(f"warpgroups is {self.warpgroups}, expected 1, 2 or 3")
        if not 2 <= self.stages <= 32:  # barriers of an array
            raise ValueError(f"stages is {self.stages}, expected 2 to 32")
        for name in ("row_tiles", "split", "ctas"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 1")
        if self.resident:
            self._check_resident()
        if self.stream:
            if self.tokens not in (8, 16):
                raise ValueError(f"tokens is {self.tokens}, but a streaming kernel has 8 or 16")
            for name in ("split", "width", "overlap", "ctas"):
                if getattr(self, name) != getattr(Config, name):
                    raise ValueError(
                        f"{name} is {getattr(self, name)}, but a streaming kernel has {getattr(Config, name)}"
                    )
        if self.rows > 256:  # of one copy
            raise ValueError(f"a tile of {self.rows} rows of the weight is more than a copy brings, at most 256")

    def _check_resident(self) -> None:
        for name, values in (
            ("tokens", (8, 16)), ("fold", (4,)), ("warpgroups", (2, 4)), ("row_tiles", (1,)), ("width", (128,)),
            ("overlap", (False,)), ("stream", (False,)),
        ):  # fmt: skip
            if getattr(self, name) not in values:
                expected = " or ".join(map(str, values))
                raise ValueError(f"{name} is {getattr(self, name)}, expected {expected} where x is resident")

    @property
    def rows(self) -> int:
        """Rows of the weight in a tile."""
        if self.stream or self.resident:
            return 64 * self.row_tiles // self.fold
        return 64 * self.warpgroups * self.row_tiles // self.fold


def choose_config(m: int, n: int, k: int, fmt: WeightFormat) -> Config:
    """The configuration for x [M, K] and a weight [N, K] of a format."""
    return candidates(m, n, k, fmt)[0]


def candidates(m: int, n: int, k: int, fmt: WeightFormat) -> tuple[Config, ...]:
    """Configurations worth measuring for x [M, K] and a weight [N, K]: the first is the one that runs.

    They follow from a count of tiles, which should fill 132 SMs evenly: of 32 rows, or of 128 over a quarter of K, for
    a weight of 4096 rows; of 32 or 96 rows for one of 12288. Parts of K cost a pass over float32 sums. Up to 8 rows of
    x stream: an H200 was fastest with CTAs as small as can be, at every size and format of the benchmark. Resident
    ones were not measured yet, so they are not the first.
    """
    wide = n >= 8192
    if m <= 8:
        stream = Config(fold=4, warpgroups=1, stream=True)
        tokens = 1 if m == 1 and k % (2048 if fmt.packed else 1024) == 0 else 8
        return stream, *resident(m, k, fmt), Config(tokens=tokens, fold=4, stages=12)
    base = Config(tokens=min(-(-m // 16) * 16, 128))
    if m <= 16:
        split, folded = replace(base, split=4), replace(base, fold=2, warpgroups=3)
        narrow = replace(base, fold=4, warpgroups=3 if wide else 2)
        narrow_first = split, narrow, replace(base, fold=2, split=2)
        return *((folded, narrow) if wide else narrow_first), *resident(m, k, fmt)
    if m <= 64:
        halved = replace(base, warpgroups=3, split=2)
        return (base, halved) if wide else (replace(base, split=4), replace(halved, split=6))
    base = replace(base, width=64)
    if m > 1024:
        return (replace(base, row_tiles=2),)
    base = replace(base, warpgroups=3) if wide else base
    return base, replace(base, overlap=True)


def resident(m: int, k: int, fmt: WeightFormat) -> tuple[Config, ...]:
    """For up to 16 rows of x, with as few parts of K as leave room for 40 KB of codes in flight beside x: what memory's
    bandwidth wants of each multiprocessor. None where no number of parts up to 8 does."""
    tokens, stage = 8 if m <= 8 else 16, 16 * (1024 if fmt.packed else 2048)
    beside = (3 if fmt.zero_point else 2) * 16 * (2048 // fmt.group) if fmt.group else 0  # of a stage
    fixed = 2048 * tokens + (32768 if fmt.codes == "nf4" else 0) + 512
    for split in range(1, 9):
        x = -(-k // (256 * split)) * 512 * m
        stages = (SHARED_MEMORY - fixed - x) // (stage + beside)
        if (stages - 1) * stage >= 40 * 1024:
            return (Config(tokens=tokens, fold=4, warpgroups=4, split=split, stages=min(stages, 16), resident=True),)
    return ()


def check_supported(x_dtype: jax.typing.DTypeLike, m: int, n: int, k: int, fmt: WeightFormat) -> None:
    """Raises NotImplementedError for what the kernel does not do, naming what it does."""
    if str(x_dtype) not in ("bfloat16", "float16"):
        raise NotImplementedError(f"the mosaic kernel has no {jnp.dtype(x_dtype)} inputs; supported: bfloat16, float16")
    if fmt.group is not None and fmt.group not in GROUPS:
        raise NotImplementedError(f"the mosaic kernel has no groups of {fmt.group}; supported: 32, 64, 128")
    multiple = 256 if fmt.packed else 128
    if k % multiple:
        raise NotImplementedError(f"the mosaic kernel has no K={k} for {fmt.name}; supported: multiples of {multiple}")


# The most rows of x with which the kernel runs unasked. XLA writes the decoded weight to memory and reads it again, on
# top of a product of 16-bit weights. On an H200 the kernel took less than such a product alone wherever it was measured
# with few rows (1.16 to 2.3 times as fast: w4a16-g128 with 1, 16 and 64, w8a16 with 1 and 16, nf4 and fp8-weight with
# 1), and with 512 and w4a16-g128 0.43 to 0.56 of XLA's time. Other codes were not measured with as many.
MOST_ROWS = 64
MOST_ROWS_INT4 = 512


def check_faster(x_dtype: jax.typing.DTypeLike, m: int, n: int, k: int, fmt: WeightFormat) -> None:
    """Raises NotImplementedError where the kernel is not supported, or is not known to be faster than XLA."""
    check_supported(x_dtype, m, n, k, fmt)
    most = MOST_ROWS_INT4 if fmt.codes == "int4" else MOST_ROWS
    if m > most:
        raise NotImplementedError(f"the mosaic kernel takes up to {most} rows of {fmt.name} unless named, not M={m}")
