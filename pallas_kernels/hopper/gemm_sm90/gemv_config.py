"""Says how the Hopper matmul of one row cuts its work, and which it takes. Imports no Pallas."""

from dataclasses import dataclass

from pallas_kernels.checks import WHOLE_ROWS

WARPS, VECTOR = 4, 8
CHUNK = 32  # vectors of 8 columns of w that a warp loads at once: one to a lane


@dataclass(frozen=True)
class Config:
    """Says how a block of four warps cuts its work. It has `rows` rows of w, or of each half if the product is gated: a
    multiple of 4. `ahead` chunks of these rows are on their way at once."""

    rows: int = 8
    ahead: int = 4

    def __post_init__(self) -> None:
        if self.rows < WARPS or self.rows % WARPS or self.ahead < 1:
            raise ValueError(f"rows={self.rows} and ahead={self.ahead}, expected a multiple of {WARPS}, and at least 1")


# The best of those tried on an H200 (experiments/LOG.md).
PLAIN, GATED = Config(), Config(rows=4)
INT8, INT8_LONG = Config(ahead=8), Config(rows=16, ahead=8)
SHORT = 1024  # columns that come at once anyway
LONG = 8192  # a row of more columns takes time to quantize, so fewer blocks do it


def fits(config: Config, n: int, k: int, multiple: int = WHOLE_ROWS) -> bool:
    """Returns whether w [n, k], or each half of it, is a whole number of blocks. k must be at least a chunk, and a
    multiple of `multiple`: by default of what a norm needs."""
    return n % config.rows == 0 and k % multiple == 0 and k >= CHUNK * VECTOR


def for_groups(n: int, k: int, itemsize: int, gated: bool) -> Config | None:
    """Returns the configuration for rows that each meet a matrix of their own of [n, k], or two such halves; None where
    there is none. Few columns take more rows to a block."""
    rows = GATED.rows if gated else PLAIN.rows
    config = Config(rows if k > SHORT else 2 * rows, PLAIN.ahead if itemsize == 2 else INT8.ahead)
    return config if fits(config, n, k, VECTOR if itemsize == 2 else CHUNK * VECTOR) else None


def for_int8(n: int, k: int) -> Config | None:
    """Returns the configuration for w int8 [n, k], or each half of it; None where it does not fit."""
    config = INT8_LONG if k > LONG else INT8
    return config if fits(config, n, k, CHUNK * VECTOR) else None
