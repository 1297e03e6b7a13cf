"""What the kernels support. Light to import.

In Mosaic's kernel there is nothing to tune: four warps to a row were as fast as eight or faster, and one row to a block
as fast as two or faster, from 1 to 8192 rows of 4096 and 8192 values (H200). So a row is computed in one way whatever
the others are.
"""

from pallas_kernels.checks import check_whole_rows
from pallas_kernels.triton_call import check_rows

LARGEST_WIDTH = 16384


def check_supported(dtype: str, rows: int, width: int) -> None:
    """Raises NotImplementedError for what the Mosaic kernel does not do, naming what it does."""
    check_whole_rows("E", dtype, rows, width, LARGEST_WIDTH)


def check_triton(dtype: str, rows: int, width: int) -> None:
    """The same for the Triton kernel."""
    check_rows("E", dtype, rows, width, LARGEST_WIDTH)
