"""What the Mosaic GPU kernel supports, its tunables, and the values measured best. Light to import."""

from dataclasses import dataclass

DTYPES = ("bfloat16", "float16")
LARGEST_WIDTH = 32768
MOST_VECTORS = 32  # of eight values that a thread holds of one row


def check_supported(dtype: str, rows: int, width: int) -> None:
    """Raises NotImplementedError for what the kernel does not do, naming what it does."""
    if dtype not in DTYPES:
        raise NotImplementedError(f"dtype {dtype} is not supported by backend mosaic, which does {', '.join(DTYPES)}")
    if width % 128 or not 128 <= width <= LARGEST_WIDTH:
        raise NotImplementedError(
            f"F={width} is not supported by backend mosaic, which does multiples of 128 up to {LARGEST_WIDTH}"
        )
    if rows < 1:
        raise NotImplementedError("T=0 is not supported by backend mosaic, which does at least one row")


@dataclass(frozen=True)
class Config:
    """How rows are cut into blocks of threads."""

    warpgroups: int = 1  # that share a row; a power of two
    rows: int = 1  # that a block handles, all loaded before the first is stored
    splits: int = 1  # blocks that share a row, where nothing is quantized

    def __post_init__(self) -> None:
        for name, value, most in (
            ("warpgroups", self.warpgroups, 8),
            ("rows", self.rows, 8),
            ("splits", self.splits, 64),
        ):
            if value not in {2**i for i in range(most.bit_length())}:
                raise ValueError(f"{name} is {value}, expected a power of two from 1 to {most}")

    def check(self, width: int, kind: str | None) -> None:
        """Raises ValueError for a row of `width` values that cannot be cut so."""
        parts = self.warpgroups * self.splits
        if width % (8 * parts):
            raise ValueError(f"F={width} cannot be split in {parts} parts of whole vectors of 8")
        if kind is not None and self.splits > 1:
            raise ValueError(f"splits is {self.splits}, but a block quantizes whole rows: expected 1 for {kind}")


def choose_config(rows: int, width: int, kind: str | None) -> Config:
    """The configuration for `rows` rows."""
    if rows >= 256:
        return Config()
    return Config(warpgroups=4 if width > 16384 else 2)


def mosaic_wins(rows: int, width: int, kind: str | None) -> bool:
    """Whether the kernel was measured faster than what XLA makes of the formula."""
    return True
