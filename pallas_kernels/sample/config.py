"""Says what the kernels support, and lists their tunables. Imports no Pallas."""

from dataclasses import dataclass

from pallas_kernels.checks import check_listed
from pallas_kernels.triton.triton_call import check_installed

VECTOR = 4  # logits that a thread loads at once
THREADS = 128  # of a warpgroup
PIECE = VECTOR * THREADS  # logits that a warpgroup loads at once
LARGEST = 1 << 24  # the largest vocabulary: its token ids are exact in float32
PART, MOST_PARTS = 4, 16  # least chunks of a part, and most parts of a row
HOTTEST = 1e30  # larger temperatures count as this one: divided by infinity, a ban would be NaN


def check_supported(dtype: str, rows: int, vocabulary: int) -> None:
    """Raises NotImplementedError for what the kernel does not do, naming what it does."""
    if dtype != "float32":
        raise NotImplementedError(f"logits of {dtype} are not supported by backend mosaic, which does float32")
    if vocabulary > LARGEST:
        raise NotImplementedError(f"V={vocabulary} is not supported by backend mosaic, which does up to {LARGEST}")
    if rows < 1:
        raise NotImplementedError("R=0 is not supported by backend mosaic, which does at least one row")


def padded(vocabulary: int) -> int:
    """Returns the number of logits that the kernels read of a row: whole vectors, and at least one piece."""
    return max(-(-vocabulary // VECTOR) * VECTOR, PIECE)


@dataclass(frozen=True)
class Config:
    """Says how a row is cut, and how much of it is held in registers."""

    warpgroups: int = 4  # that share a row
    pieces: int = 4  # of 512 logits that a warpgroup loads before it waits
    held: int = 16  # pieces that it may hold in registers; of longer rows it searches what their parts keep
    kept: int = 4  # pieces that each part of such a row keeps; 0: none, the row is read again for each pass

    def __post_init__(self) -> None:
        if self.warpgroups not in (1, 2, 4, 8):
            raise ValueError(f"warpgroups is {self.warpgroups}, expected 1, 2, 4 or 8")
        if self.pieces < 1:
            raise ValueError(f"pieces is {self.pieces}, expected at least 1")
        if self.kept % self.warpgroups:
            raise ValueError(f"kept is {self.kept}, expected a multiple of the {self.warpgroups} warpgroups")

    @property
    def chunk(self) -> int:
        """Counts the logits that the block loads at once."""
        return self.warpgroups * self.pieces * PIECE

    def parts(self, vocabulary: int) -> tuple[int, int]:
        """Returns the number of a row's parts, and the chunks of each part. The row's length alone decides both."""
        chunks = -(-vocabulary // self.chunk)
        each = max(PART, -(-chunks // MOST_PARTS))
        return -(-chunks // each), each

    def cuts(self, vocabulary: int) -> bool:
        """Returns whether filters search only what a row's parts keep. The row's length alone decides it."""
        return self.kept > 0 and -(-vocabulary // self.chunk) * self.pieces > self.held

    def check(self, vocabulary: int) -> None:
        """Raises ValueError for a row of `vocabulary` logits that cannot be cut so."""
        if vocabulary < self.chunk:
            raise ValueError(f"V={vocabulary} is less than the {self.chunk} logits that {self} loads at once")


CONFIGS = (Config(), Config(pieces=2), Config(pieces=1), Config(2, 1), Config(1, 1))


def choose_config(vocabulary: int) -> Config:
    """Returns the configuration for rows of that many logits: the largest chunks that they fill."""
    return next(config for config in CONFIGS if config.chunk <= vocabulary)


@dataclass(frozen=True)
class TritonConfig:
    """Says how the Triton kernels cut a row: `block` decides the order of sums."""

    part: int = 4096  # logits of a program
    warps: int = 8
    block: int = 8192  # that the program of a row with filters reads at once
    row_warps: int = 16


TRITON = TritonConfig()


def check_triton(dtype: str, rows: int, vocabulary: int) -> None:
    """Raises NotImplementedError for what the Triton kernels do not do, naming what they do."""
    check_installed()
    check_listed(("logits of", dtype, ("float32", "bfloat16", "float16")), backend="triton")
    if rows < 1 or vocabulary > LARGEST:
        raise NotImplementedError(
            f"[R, V]=[{rows}, {vocabulary}] is not supported by backend triton, which does at least one row, and up to "
            f"{LARGEST} logits"
        )
