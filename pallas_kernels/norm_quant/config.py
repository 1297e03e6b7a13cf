"""What the Mosaic GPU kernel supports. Light to import.

There is nothing to tune: four warps to a row were as fast as eight or faster, and one row to a block as fast as two or
faster, from 1 to 8192 rows of 4096 and 8192 values (H200). So a row is computed in one way whatever the others are.
"""

from pallas_kernels.checks import check_whole_rows

LARGEST_WIDTH = 16384


def check_supported(dtype: str, rows: int, width: int) -> None:
    """Raises NotImplementedError for what the kernel does not do, naming what it does."""
    check_whole_rows("E", dtype, rows, width, LARGEST_WIDTH)
