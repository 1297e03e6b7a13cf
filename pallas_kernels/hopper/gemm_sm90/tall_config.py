"""Says how the Hopper matmul for many rows cuts its work. Imports no Pallas."""

from dataclasses import dataclass

from pallas_kernels.hopper.hopper import SMS


@dataclass(frozen=True)
class Config:
    """Holds how the result is cut: two warpgroups of one CTA compute a tile; CTAs are persistent. tile_m, tile_n: rows
    and columns of a tile; each warpgroup has half of its rows. stages: K steps of 128 bytes in flight, or as many as
    shared memory holds. group: tiles along M that are done before the next ones along N (L2 locality). ctas: the most
    CTAs that run."""

    tile_m: int = 128
    tile_n: int = 256
    stages: int = 4
    group: int = 8
    ctas: int = SMS

    def __post_init__(self) -> None:
        if self.tile_m not in (128, 256):
            raise ValueError(f"tile_m is {self.tile_m}, expected 128 or 256")
        if not 16 <= self.tile_n <= 256 or self.tile_n % 16:
            raise ValueError(f"tile_n is {self.tile_n}, expected a multiple of 16 up to 256")
        if self.tile_m * self.tile_n > 256 * 192:
            raise ValueError(f"a tile of {self.tile_m}x{self.tile_n} is more than registers hold, at most 256x192")
        if self.stages < 2 or self.ctas < 1 or self.group < 1:
            raise ValueError(
                f"stages={self.stages}, ctas={self.ctas} and group={self.group}, expected at least 2, 1 and 1"
            )
