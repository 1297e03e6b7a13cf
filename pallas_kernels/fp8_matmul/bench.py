"""Measures fp8_matmul on the device at LLaMA-7B's shapes, next to int8_matmul, to itself with a scale a block, and to
XLA's and torch's fp8. python -m pallas_kernels.fp8_matmul.bench [--json] [--rows 1 128 4096] [--seconds 45] [--triton]
[--peers]"""

import sys
from functools import partial

from pallas_kernels.scaled_matmul import bench
from pallas_kernels.scaled_matmul.bench import IN_BLOCKS

bars = partial(bench.bars, "fp8_matmul")


def main(argv: list[str] | None = None) -> int:
    return bench.main("fp8_matmul", __doc__, ("int8_matmul", IN_BLOCKS, "xla fp8"), argv)


if __name__ == "__main__":
    sys.exit(main())
