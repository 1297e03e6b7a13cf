"""What the Mosaic GPU kernel supports, its tunables, and the values measured best. Light to import."""

from dataclasses import dataclass

DTYPES = ("bfloat16", "float16")
LARGEST_WIDTH = 16384


def check_supported(dtype: str, rows: int, width: int) -> None:
    """Raises NotImplementedError for what the kernel does not do, naming what it does."""
    if dtype not in DTYPES:
        raise NotImplementedError(f"dtype {dtype} is not supported by backend mosaic, which does {', '.join(DTYPES)}")
    if width % 128 or not 128 <= width <= LARGEST_WIDTH:
        raise NotImplementedError(
            f"E={width} is not supported by backend mosaic, which does multiples of 128 up to {LARGEST_WIDTH}"
        )
    if rows < 1:
        raise NotImplementedError("T=0 is not supported by backend mosaic, which does at least one row")


@dataclass(frozen=True)
class Config:
    """How rows are cut into blocks of threads."""

    warpgroups: int = 1  # that share a row; a power of two
    rows: int = 1  # that a block handles, all loaded before the first is stored

    def __post_init__(self) -> None:
        for name, value in (("warpgroups", self.warpgroups), ("rows", self.rows)):
            if value not in (1, 2, 4, 8):
                raise ValueError(f"{name} is {value}, expected a power of two from 1 to 8")

    def check(self, width: int) -> None:
        """Raises ValueError for a row of `width` values that cannot be cut so."""
        if width % (8 * self.warpgroups):
            raise ValueError(f"E={width} cannot be split among {self.warpgroups} warpgroups in whole vectors of 8")


def choose_config(rows: int, width: int, kind: str | None, residual: bool) -> Config:
    """The configuration for `rows` rows."""
    return Config()  # as fast as more warpgroups or faster, from 1 to 8192 rows of 4096 and 8192 values (H200)


def mosaic_wins(rows: int, width: int, kind: str | None, residual: bool) -> bool:
    """Whether the kernel was measured faster than what XLA makes of the formula."""
    return True
