"""Says what the kernels support, and lists the Mosaic one's tunables with the values measured best. Imports no
Pallas."""

from dataclasses import dataclass

from pallas_kernels.checks import check_whole_rows
from pallas_kernels.triton.triton_call import check_rows

# The kinds for which the kernel runs by default on Hopper, whatever the number of rows: that must not show in a row's
# bits. The kernel is faster than XLA at quantizing to int8. In 16 bits XLA makes one pass too, over more blocks, and is
# faster.
DEFAULT_KINDS = ("int8", "fp8")

LARGEST_WIDTH = 32768


def check_supported(dtype: str, rows: int, width: int) -> None:
    """Raises NotImplementedError for what the Mosaic kernel does not do, naming what it does."""
    check_whole_rows("F", dtype, rows, width, LARGEST_WIDTH)


def check_triton(kind: str | None, dtype: str, rows: int, width: int) -> None:
    """Raises NotImplementedError, which says what is supported, for rows that the Triton kernel lacks. It does every
    kind."""
    check_rows("F", dtype, rows, width, LARGEST_WIDTH)


def check_faster(kind: str | None, dtype: str, rows: int, width: int) -> None:
    """Raises NotImplementedError for kinds that XLA's own pass does as fast."""
    check_supported(dtype, rows, width)
    if kind not in DEFAULT_KINDS:
        raise NotImplementedError(f"the mosaic kernel was not seen to be faster for rows of {kind or dtype}")


@dataclass(frozen=True)
class Config:
    """Says how a row is cut."""

    warpgroups: int = 1  # that share a row; a power of two

    def __post_init__(self) -> None:
        if self.warpgroups not in (1, 2, 4, 8):
            raise ValueError(f"warpgroups is {self.warpgroups}, expected 1, 2, 4 or 8")

    def check(self, width: int) -> None:
        """Raises ValueError for a row of `width` values that cannot be cut so."""
        if width % (8 * self.warpgroups):
            raise ValueError(f"F={width} cannot be split among {self.warpgroups} warpgroups in whole vectors of 8")


def choose_config(rows: int, width: int) -> Config:
    """Returns the configuration for `rows` rows of `width` values: the fastest of those that ran on an H200."""
    return Config(warpgroups=4 if rows < 256 and width > 16384 else 1)
