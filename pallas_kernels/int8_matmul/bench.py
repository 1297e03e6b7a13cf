"""Measures int8_matmul on the device at LLaMA-7B's shapes, next to XLA's s8 and bf16 matmuls, and torch's. python -m
pallas_kernels.int8_matmul.bench [--json] [--rows 1 128 4096] [--seconds 45] [--triton] [--peers]"""

import sys
from functools import partial

from pallas_kernels.scaled_matmul import bench

bars = partial(bench.bars, "int8_matmul")


def main(argv: list[str] | None = None) -> int:
    return bench.main("int8_matmul", __doc__, ("xla int8", "xla bf16"), argv)


if __name__ == "__main__":
    sys.exit(main())
