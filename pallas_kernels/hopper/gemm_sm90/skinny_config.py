"""Says how the Hopper matmul for few rows cuts its work. Imports no Pallas."""

from dataclasses import dataclass

from pallas_kernels.hopper.hopper import SHARED_MEMORY, SMS

UNIT = 64  # rows of one wgmma
MOST_ROWS = 512  # the kernel is meant for up to so many rows, but takes any number
STEP = 128  # bytes: the widest swizzle
MOST_STAGES = 32  # barriers of an array

# What an H200 does in a microsecond: bytes from memory, bytes into one SM, and operations of an SM on operands of one
# and two bytes. Then the microseconds from a tile's last operation to the next tile's first.
FROM_MEMORY, INTO_SM = 4.2e6, 113e3
OPERATIONS = {1: 10.6e6, 2: 5.9e6}
LAST = 0.7


@dataclass(frozen=True)
class Config:
    """Holds a tile's size: `rows` rows of x by `columns` rows of w. rows: 64, 128 or 256. columns: a multiple of 16, at
    most 256. step: bytes of K of a stage, a multiple of 128. stages: in flight, or as many as shared memory holds.
    ctas: the most CTAs that run."""

    rows: int
    columns: int
    step: int = STEP
    stages: int = MOST_STAGES
    ctas: int = SMS

    def __post_init__(self) -> None:
        if self.rows not in (64, 128, 256):
            raise ValueError(f"rows is {self.rows}, expected 64, 128 or 256")
        if not 16 <= self.columns <= 256 or self.columns % 16:
            raise ValueError(f"columns is {self.columns}, expected a multiple of 16 up to 256")
        if self.rows * self.columns > 256 * 192:
            raise ValueError(f"{self.rows} x {self.columns} sums are more than registers hold, which is 256 x 192")
        if self.step < STEP or self.step % STEP:
            raise ValueError(f"step is {self.step} bytes, expected a multiple of {STEP}")
        if not 2 <= self.stages <= MOST_STAGES or self.ctas < 1:
            raise ValueError(f"stages={self.stages} and ctas={self.ctas}, expected 2 to {MOST_STAGES}, and at least 1")


# By N, K and bytes of an element: a range of M, and the best configuration tried on an H200 (experiments/LOG.md).
TUNED: dict[tuple[int, int, int], tuple[tuple[int, int, Config], ...]] = {
    (12288, 4096, 1): ((1, 16, Config(64, 48, 256)), (17, 64, Config(64, 96))),
    (4096, 4096, 1): ((1, 64, Config(64, 32, 256)),),
    (4096, 11008, 1): ((1, 64, Config(64, 32, 256)),),
    (12288, 4096, 2): ((1, 64, Config(64, 96)), (65, 128, Config(128, 96))),
    (4096, 4096, 2): ((1, 64, Config(64, 32, 256)), (65, 96, Config(128, 32, 256)), (97, 128, Config(64, 64))),
    (4096, 11008, 2): ((1, 64, Config(64, 32, 256)),),
    (22016, 4096, 2): ((1, 64, Config(64, 176, 256)), (129, 256, Config(256, 176))),
    (28672, 4096, 2): ((65, 128, Config(64, 224)), (193, 256, Config(256, 112))),
    (4096, 14336, 2): ((97, 128, Config(64, 64)),),
}


def choose_config(m: int, n: int, k: int, itemsize: int, out_itemsize: int = 2) -> Config:
    """Returns the configuration for M, N, K and the bytes of an operand's and a result's element. It is a measured one,
    or else the one with the least `estimate`."""
    for low, high, config in TUNED.get((n, k, itemsize), ()):
        if low <= m <= high:
            return config
    choices = [
        config
        for rows in (64, 128, 256)
        for columns in range(16, 257, 16)
        if rows * columns <= 256 * 192
        for config in (Config(rows, columns, stage_bytes(rows, columns)),)
        if most_stages(config, itemsize, out_itemsize, config.step // itemsize) >= 3
    ]
    return min(choices, key=lambda config: estimate(config, m, n, k, itemsize))


def stage_bytes(rows: int, columns: int) -> int:
    """Returns the bytes of K that a stage holds: so many that the cost of waiting for a stage is small."""
    return 2 * STEP if (rows + columns) * STEP < 20_000 else STEP


def estimate(config: Config, m: int, n: int, k: int, itemsize: int) -> tuple[float, float, float]:
    """Returns the microseconds that the matmul should take. For ties, the busiest SM's and its intake's follow."""
    tiles = -(-m // config.rows) * -(-n // config.columns)
    waves = -(-tiles // config.ctas)
    intake = (min(-(-m // 8) * 8, config.rows) + config.columns) * k * itemsize / INTO_SM
    compute = 2 * config.rows * config.columns * k / OPERATIONS[itemsize]
    busiest = waves * (max(intake, compute) + LAST)
    return max(n * k * itemsize / FROM_MEMORY, busiest), busiest, waves * intake


def most_stages(config: Config, itemsize: float, out_itemsize: int, step: int) -> int:
    """Returns how many stages of `step` elements of K shared memory holds beside the rest."""
    vectors = 4 * (config.rows + 2 * (config.columns + 48))
    results = min(config.rows, 2 * UNIT) * config.columns * out_itemsize
    return int((SHARED_MEMORY - 3072 - vectors - results) // ((config.rows + config.columns) * step * itemsize))
