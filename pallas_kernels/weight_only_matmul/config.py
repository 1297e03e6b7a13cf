"""Says how the Hopper kernel of weight_only_matmul cuts its work, and when it runs. Imports no Pallas."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from pallas_kernels.checks import check_listed
from pallas_kernels.formats.weight_formats import TABLES, WeightFormat
from pallas_kernels.hopper.hopper import SMS
from pallas_kernels.triton.triton_call import check_installed

# Weights that share a scale, by codes, as the kernel knows them; and codes that may have zero points.
ROW = "a row"
GROUPS = {"int8": (ROW, 32, 64, 128), "fp8": (ROW,), "int4": (32, 64, 128), "nf4": (32, 64, 128)}
WITH_ZEROS = ("int8", "int4")
WIDE = 8192  # rows of a weight
WARP_ROWS = 16  # of a weight in a product of a single warp: kernels of such products take multiples


@dataclass(frozen=True)
class Config:
    """Holds a tile's size: `rows` weights' rows by `tokens` of x; CTAs are persistent.

    - tokens: of a tile, 8 to 256.
    - fold: parts of K that lie side by side in a tile, so that few rows of the weight fill the 64 rows of wgmma. Each
      has its own columns for x.
    - warpgroups: that compute, each its own rows. row_tiles: of 64 rows, of a warpgroup.
    - split: parts of K that are summed after the kernel.
    - width: bytes of a weight's row that a stage holds of a part.
    - stages: in flight, at most: as many as shared memory holds. ctas: that run.
    - by_warp: products of codes of 4 bits are those of single warps, for up to `tokens` rows of x (warp_sm90.py), or
      for blocks of as many where rows are in groups. A warpgroup has 16 row_tiles rows, and a stage 256 columns of
      each of `fold` parts; width is not its.

    Only fold, split, width and by_warp change bits.
    """

    tokens: int = 8
    fold: int = 1
    warpgroups: int = 2
    row_tiles: int = 1
    split: int = 1
    width: int = 128
    stages: int = 8
    ctas: int = SMS
    by_warp: bool = False

    def __post_init__(self) -> None:
        if self.tokens % 8 or not 8 <= self.tokens * self.fold <= 256:
            raise ValueError(f"tokens is {self.tokens}, expected a multiple of 8, up to 256 / fold={self.fold}")
        if self.fold not in (1, 2, 4) or (self.fold > 1 and self.row_tiles > 1 and not self.by_warp):
            raise ValueError(f"fold is {self.fold}, expected 1, or 2 or 4 with row_tiles=1 (not {self.row_tiles})")
        if self.width not in (64, 128):
            raise ValueError(f"width is {self.width}, expected 64 or 128")
        if self.warpgroups not in (1, 2, 3):
            raise ValueError(f"warpgroups is {self.warpgroups}, expected 1, 2 or 3")
        if not 2 <= self.stages <= 32:  # barriers of an array
            raise ValueError(f"stages is {self.stages}, expected 2 to 32")
        for name in ("row_tiles", "split", "ctas"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 1")
        if self.split > 1 and self.tokens > 64 and self.warpgroups == 3:
            raise ValueError(
                f"split is {self.split} with {self.tokens} tokens and 3 warpgroups, expected 1: a GPU stopped at an "
                "illegal instruction"
            )
        if self.by_warp and (self.fold > 2 or self.tokens > 32 or self.width != 128):
            raise ValueError(
                f"fold is {self.fold}, tokens {self.tokens} and width {self.width}, expected 1 or 2, 8 to 32 and 128 "
                "by warp"
            )
        if self.rows > 256:  # of one copy
            raise ValueError(f"a tile of {self.rows} rows of the weight is more than a copy brings, at most 256")

    @property
    def rows(self) -> int:
        """Counts the rows of the weight in a tile."""
        return (WARP_ROWS if self.by_warp else 64 // self.fold) * self.warpgroups * self.row_tiles


@dataclass(frozen=True)
class RowConfig:
    """Configures the kernel for one row of x (row_sm90.py).

    - rows: of the weight, that a block of four warps has; of a gated product half of them are gate's. They don't change
      bits.
    - across: warps that share a row's columns. Those of a short row would have none for some of four. A warp has four
      rows at least.
    """

    rows: int = 16
    across: int = 4

    def __post_init__(self) -> None:
        if self.rows not in (8, 16, 32):
            raise ValueError(f"rows is {self.rows}, expected 8, 16 or 32")
        if self.across not in (1, 2, 4) or self.rows * self.across < 16:
            raise ValueError(f"across is {self.across}, expected 1, 2 or 4, and 16 / rows={self.rows} at least")


ONE_ROW = RowConfig()


@dataclass(frozen=True)
class StreamConfig:
    """Configures the kernel for up to 8 rows of x and codes of 8 bits, which go straight into registers
    (stream_sm90.py). stages: chunks of 128 columns that a warp has in flight. They don't change bits."""

    stages: int = 8

    def __post_init__(self) -> None:
        if self.stages < 1:
            raise ValueError(f"stages is {self.stages}, expected at least 1")


AnyConfig = Config | RowConfig | StreamConfig


def takes_one_row(n: int, fmt: WeightFormat, gated: bool = False, config: RowConfig = ONE_ROW) -> bool:
    """Returns whether the kernel for one row of x takes a weight of that many rows as stored, or of two such halves."""
    halves = 2 if gated else 1
    known = fmt.block_kind == "mxfp4" or (fmt.codes in GROUPS and (fmt.group or ROW) in GROUPS[fmt.codes])
    return known and config.rows >= 8 * halves and n % config.rows == 0


def choose_config(m: int, n: int, k: int, fmt: WeightFormat) -> AnyConfig:
    """Returns the configuration for x [M, K] and a weight [N, K] of a format."""
    return candidates(m, n, k, fmt)[0]


def candidates(m: int, n: int, k: int, fmt: WeightFormat) -> tuple[AnyConfig, ...]:
    """Yields configurations worth measuring for x [M, K] and a weight [N, K]: the first is the one that runs.

    One row has a kernel of its own. Codes of 4 bits with few rows of x are multiplied by single warps (`by_warp`).
    Codes of 8 bits stream with up to 8 rows, which is faster than the ring. The ring and wgmma do the rest.

    Rows of x are cut as evenly as tiles of at most 128 allow. K is cut into parts where SMs would have no tile
    (`in_parts`). A weight of 4096 rows has tiles of 128 rows then, a wide one of 192. With up to 16 rows of x these
    have 96. Up to 128 rows of x, tiles of a wide one have half of them, rather than leave SMs without any. Above 1024
    rows of x tiles of 256 rows of the weight read x less often.
    """
    wide, warps = n >= WIDE, for_warps(m, n, k, fmt)
    if m == 1 and takes_one_row(n, fmt):
        return (ONE_ROW,)
    if m <= 16 and warps:
        return warps
    if m <= 8:
        return (Config(fold=4, stages=12) if fmt.packed or n % WARP_ROWS else StreamConfig(),)
    base = Config(tokens=even_tokens(m, 128))
    if m <= 16:
        return (replace(base, fold=2, warpgroups=3) if wide else in_parts(base, m, n),)
    if m <= 64:
        in_two = (replace(base, warpgroups=3, split=2),) if wide and m <= 32 else ()
        return *warps, in_parts(base, m, n), *in_two
    base = replace(base, width=64)
    if m > 1024:
        return (replace(base, row_tiles=2),)
    if not wide:
        return (in_parts(base, m, n),)
    base = replace(base, warpgroups=3)
    if m > 128:
        return (base,)
    half = replace(base, tokens=even_tokens(m, 64))  # twice the work of decoding, but on SMs that would have no tile
    return half, base, replace(half, width=128)


def for_warps(m: int, n: int, k: int, fmt: WeightFormat) -> tuple[Config, ...]:
    """Returns the configuration of single warps, where an H100 was fastest with it.

    That was for codes of 4 bits and up to 16 rows of x (experiments/results, weight_only_matmul-warp). It was up to 32
    where int4 codes have groups of 128, and the weight is wide or has at most 6144 columns. Finer groups need too many
    registers. Tiles of a narrow weight have all of K. With 32 rows of x that beats the ring's parts of K where the
    weight has few columns, and loses where it has many.
    """
    few = 32 if fmt.codes == "int4" and fmt.group == 128 and (n >= WIDE or k <= 6144) else 16
    if not fmt.packed or m > few or n % WARP_ROWS:
        return ()
    return (Config(tokens=-(-m // 8) * 8, fold=2, row_tiles=3 if n >= WIDE else 1, by_warp=True),)


def in_one_order(m: int, n: int) -> Config:
    """Returns a configuration for x [M, K] and a weight [N, K] with the fold, split and width of all others that this
    gives."""
    return Config(tokens=even_tokens(m, 128), warpgroups=3 if n >= WIDE else 2, width=64)


def even_tokens(m: int, most: int) -> int:
    """Returns the rows of x of a tile: multiples of 16, as few tiles as `most` allows, none much emptier than
    others."""
    tiles = -(-m // most)
    return -(-m // (16 * tiles)) * 16


def in_parts(config: Config, m: int, n: int, most: int = 4) -> Config:
    """Returns `config` with as many parts of K as there are SMs for each tile; each costs a pass over float32 sums."""
    tiles = -(-n // config.rows) * -(-m // config.tokens)
    return replace(config, split=min(max(SMS // tiles, 1), most))


def check_supported(x_dtype: jax.typing.DTypeLike, m: int, n: int, k: int, fmt: WeightFormat) -> None:
    """Raises NotImplementedError for what the kernel does not do, naming what it does."""
    if str(x_dtype) not in ("bfloat16", "float16"):
        raise NotImplementedError(f"the mosaic kernel has no {jnp.dtype(x_dtype)} inputs; supported: bfloat16, float16")
    check_listed(
        ("codes", fmt.codes, tuple(GROUPS)),
        (f"{fmt.codes} in groups of", fmt.group or ROW, GROUPS.get(fmt.codes, ())),
    )
    if fmt.zero_point:
        check_listed(("a zero point for", fmt.codes, WITH_ZEROS))
    multiple = 256 if fmt.packed else 128
    if k % multiple:
        raise NotImplementedError(f"the mosaic kernel has no K={k} for {fmt.name}; supported: multiples of {multiple}")


# The most rows of x with which the kernel runs unasked, by codes. XLA writes the decoded weight to memory and reads it
# again, on top of a matmul of 16-bit weights. With 1024 rows the kernel was faster on an H200 at all four shapes of a
# 7B layer. With 4096 rows int4 was faster, nf4 as fast as XLA, and int8 slower in sum.
MOST_ROWS = {"int4": 4096, "nf4": 4096, "int8": 1024, "fp8": 1024}


def check_faster(x_dtype: jax.typing.DTypeLike, m: int, n: int, k: int, fmt: WeightFormat) -> None:
    """Raises NotImplementedError where the kernel is not supported, or is not known to be faster than XLA."""
    check_supported(x_dtype, m, n, k, fmt)
    most = MOST_ROWS[fmt.codes]
    if m > most:
        raise NotImplementedError(f"the mosaic kernel takes up to {most} rows of {fmt.name} unless named, not M={m}")


@dataclass(frozen=True)
class TritonConfig:
    """Holds a tile of the Triton kernels: `rows` of x (1: no tensor cores) by `columns` of the result. It goes in steps
    of `depth` columns of x (a group at most; with one row, four words a thread), which `parts` programs share. rows and
    columns don't change bits. Whether rows is 1 does, and parts."""

    rows: int
    columns: int
    depth: int = 128
    warps: int = 4
    stages: int = 4
    parts: int = 1


# The largest M, and a tile that fits the shared memory of compute capability 8.6.
TRITON = (
    (1, TritonConfig(1, 8)),
    (16, TritonConfig(16, 64)),
    (64, TritonConfig(64, 64)),
    (1 << 30, TritonConfig(64, 64, stages=3)),
)
PROGRAMS = 256  # about as many as the largest GPUs run at a time
MOST_PARTS = 8


def triton_config(m: int, k: int, n: int, codes: str) -> TritonConfig:
    """Returns the configuration for M rows of x [M, K] and N results. With up to 64 rows, few columns of the result are
    shared by several programs."""
    config = next(config for most, config in TRITON if m <= most)
    if m == 1 and codes in (*TABLES, "e2m1"):  # tables take registers
        return replace(config, columns=config.columns // 4)
    if m == 1 and codes == "int4" and n >= 2 * PROGRAMS * config.columns:
        return replace(config, columns=2 * config.columns)
    if m > 64 and codes in ("int8", "fp8"):
        return TritonConfig(128, 128, depth=64, warps=8, stages=3)
    if not 1 < m <= 64:
        return config
    programs = -(-n // config.columns)
    parts = next((p for p in (1, 2, 4, MOST_PARTS) if p * programs >= PROGRAMS), MOST_PARTS)
    return replace(config, parts=max(1, min(parts, k // (4 * config.depth))))


def check_triton(x_dtype: jax.typing.DTypeLike, fmt: WeightFormat) -> None:
    """Raises NotImplementedError for what the Triton kernels do not do, naming what they do."""
    check_installed()
    check_listed(
        ("x of", str(x_dtype), ("bfloat16", "float16")),
        ("codes", fmt.codes, ("int8", "fp8", "int4", *TABLES, "e2m1")),
        ("groups of", fmt.group or ROW, (32, 64, 128) if fmt.packed else (ROW, 32, 64, 128)),
        backend="triton",
    )
