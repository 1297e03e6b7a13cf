"""What the Mosaic GPU kernel supports. Light to import.

There is nothing to tune: four warps to a row were as fast as eight or faster, and one row to a block as fast as two or
faster, from 1 to 8192 rows of 4096 and 8192 values (H200). So a row is computed in one way whatever the others are.
"""

from pallas_kernels.checks import check_whole_rows

# The kinds that backend=None gives the kernel, whatever the number of rows, as that must not show in a row's bits. It
# takes a third of XLA's time to quantize to int8 (H200, 1 to 8192 rows). In 16 bits the two were not compared: in a 7B
# decode step XLA's norms take 1.9 us at batch 64 and 2.7 at 256, the kernel 2.2 and 3.9 for int8 and a residual.
DEFAULT_KINDS = ("int8", "fp8")

LARGEST_WIDTH = 16384


def check_supported(dtype: str, rows: int, width: int) -> None:
    """Raises NotImplementedError for what the kernel does not do, naming what it does."""
    check_whole_rows("E", dtype, rows, width, LARGEST_WIDTH)
