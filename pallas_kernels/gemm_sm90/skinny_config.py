"""How the Hopper product for few rows cuts its work. Light to import."""

from dataclasses import dataclass

SHARED_MEMORY = 227 * 1024  # bytes a CTA may have
SMS = 132  # of an H200
MOST_ROWS = 256


@dataclass(frozen=True)
class Config:
    """A tile is all rows of x by `columns` rows of w.

    columns: of a tile, at most 256 and a multiple of 16 times `split`. split: CTAs of a cluster that share a tile's K
    axis; then all tiles must be in one wave. step: bytes of K of a stage, a multiple of 128. stages: in flight, or as
    many as shared memory holds. ctas: the most CTAs that run. early: starts to copy weights before the kernels ahead of
    this one have finished (programmatic dependent launch): none of them may still be writing w.
    """

    columns: int
    split: int = 1
    step: int = 256
    stages: int = 64
    ctas: int = SMS
    early: bool = False

    def __post_init__(self) -> None:
        if self.split not in (1, 2, 4, 8):
            raise ValueError(f"split is {self.split}, expected 1, 2, 4 or 8")
        if not 16 <= self.columns <= 256 or self.columns % (16 * self.split):
            raise ValueError(f"columns is {self.columns}, expected a multiple of {16 * self.split} up to 256")
        if self.step < 128 or self.step % 128:
            raise ValueError(f"step is {self.step} bytes, expected a multiple of 128")
        if self.stages < 2 or self.ctas < self.split:
            raise ValueError(f"stages={self.stages} and ctas={self.ctas}, expected at least 2 and {self.split}")


TUNED: dict[tuple[int, int, int], tuple[tuple[int, Config], ...]] = {}


def choose_config(m: int, n: int, k: int, itemsize: int) -> Config:
    """The configuration for M, N, K and bytes of an element."""
    widest = 256 if m <= 64 else 128
    waves = -(-n // (widest * SMS))
    columns = -(-n // (waves * SMS * 16)) * 16
    return Config(columns, step=128 if m > 64 or columns > 128 else 256)
