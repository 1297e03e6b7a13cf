"""Says what the kernels support, and lists their tunables. Imports no Pallas."""

from dataclasses import dataclass

from pallas_kernels.checks import check_listed
from pallas_kernels.triton.triton_call import check_installed

VECTOR = 4  # logits that a thread loads at once
THREADS = 128  # of a warpgroup
PIECE = VECTOR * THREADS  # logits that a warpgroup loads at once
LARGEST = 1 << 24  # vocabulary; token ids are exact in float32
PART, MOST_PARTS = 4, 16  # chunks at least, and parts at most, of a row that blocks share
HOTTEST = 1e30  # that a temperature counts for on all backends: over an infinite one a ban would be NaN


def check_supported(dtype: str, rows: int, vocabulary: int) -> None:
    """Raises NotImplementedError for what the kernel does not do, naming what it does."""
    if dtype != "float32":
        raise NotImplementedError(f"logits of {dtype} are not supported by backend mosaic, which does float32")
    if vocabulary > LARGEST:
        raise NotImplementedError(f"V={vocabulary} is not supported by backend mosaic, which does up to {LARGEST}")
    if rows < 1:
        raise NotImplementedError("R=0 is not supported by backend mosaic, which does at least one row")


def padded(vocabulary: int) -> int:
    """Returns the logits of a row as the kernels read it: whole vectors, and one piece at least."""
    return max(-(-vocabulary // VECTOR) * VECTOR, PIECE)


@dataclass(frozen=True)
class Config:
    """Says how a row is cut, and what of it is held."""

    warpgroups: int = 4  # that share a row
    pieces: int = 4  # of 512 logits that a warpgroup loads before it waits
    held: int = 16  # pieces that it may hold in registers; rows of more are searched in what their parts keep
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
        """Returns how many parts a row is cut into, and of how many chunks each is: a row's length alone decides it."""
        chunks = -(-vocabulary // self.chunk)
        each = max(PART, -(-chunks // MOST_PARTS))
        return -(-chunks // each), each

    def cuts(self, vocabulary: int) -> bool:
        """Returns whether a row with filters is searched in what its parts keep: again, its length alone decides."""
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
