"""Says what the kernels support. Imports no Pallas. Mosaic's kernel has nothing to tune. On an H200, four warps to a
row were never slower than eight, nor one row to a block than two. So a row is computed in one way whatever the others
are."""

from pallas_kernels.checks import check_whole_rows
from pallas_kernels.triton.triton_call import check_rows

LARGEST_WIDTH = 16384


def check_supported(dtype: str, rows: int, width: int) -> None:
    """Raises NotImplementedError for what the Mosaic kernel does not do, naming what it does."""
    check_whole_rows("E", dtype, rows, width, LARGEST_WIDTH)


def check_triton(dtype: str, rows: int, width: int) -> None:
    """Raises NotImplementedError for what the Triton kernel does not do, naming what it does."""
    check_rows("E", dtype, rows, width, LARGEST_WIDTH)
