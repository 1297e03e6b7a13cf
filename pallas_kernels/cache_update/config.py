"""Says what the kernels support, and lists their tunables with the values measured best. Imports no Pallas."""

from dataclasses import dataclass

from pallas_kernels.checks import check_paged
from pallas_kernels.formats.kv_formats import FP8
from pallas_kernels.formats.kv_pages import KVPages
from pallas_kernels.triton.triton_call import check_installed

STORED = ("bfloat16", "float16", "float32", FP8, "int8", "int4", "int8-zp", "int4-zp")
FORMATS = (*STORED, *(f"{name}-h" for name in STORED))
TRITON_FORMATS = STORED
TRITON_VALUES = 1024  # of a program's heads; sensible for compute capability 8.0 to 9.0


def check_supported(dtype: str, head_dim: int, pages: KVPages) -> None:
    """Raises NotImplementedError for what the Mosaic kernel does not do, naming what it does."""
    check_paged(dtype, head_dim, pages, FORMATS)


def check_triton(dtype: str, head_dim: int, pages: KVPages) -> None:
    """Raises NotImplementedError for what the Triton kernel does not do, naming what it does."""
    check_installed()
    check_paged(dtype, head_dim, pages, TRITON_FORMATS, backend="triton")


@dataclass(frozen=True)
class Config:
    """Says how rows and heads are cut into blocks of one warpgroup each."""

    heads: int = 16  # most heads in a block; a power of two
    tokens: int = 1  # rows that a block handles, all loaded before the first is stored
    vector: int = 8  # most values of one half of a head that a thread loads at once

    def __post_init__(self) -> None:
        for name, value, largest in (
            ("heads", self.heads, 64),
            ("tokens", self.tokens, 8),
            ("vector", self.vector, 8),
        ):
            least = 2 if name == "vector" else 1
            if value not in {2**i for i in range(largest.bit_length())} or value < least:
                raise ValueError(f"{name} is {value}, expected a power of two from {least} to {largest}")


# From that many rows and KV heads on; the first that fits serves. H200, D=128, H=32: 1 to 8192 rows, all formats.
TUNED = (
    (2048, 16, Config(heads=32, tokens=2)),
    (2048, 1, Config(heads=8, tokens=4)),
    (128, 1, Config(heads=16)),
    (0, 1, Config(heads=8)),
)


def choose_config(rows: int, num_kv_heads: int) -> Config:
    """Returns the configuration for a step of `rows` tokens."""
    return next(config for least, heads, config in TUNED if rows >= least and num_kv_heads >= heads)
