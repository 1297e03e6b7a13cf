"""Measures norm_quant on the device, with and without a residual, next to what XLA makes of the same formula.

    python -m pallas_kernels.norm_quant.bench [--json] [--rows 1 128 8192] [--peers mosaic xla triton] [--record]

Bytes are what must move: x and the residual in; their sum, the rows and their scales out; the weight.
"""

import sys
from collections.abc import Callable
from typing import Any

from pallas_kernels.bench import rows as row_bench
from pallas_kernels.bench.command import add_rows, make_parser, record
from pallas_kernels.norm_quant.api import norm_quant
from pallas_kernels.norm_quant.cases import BENCH_CASES, Case

PEERS = ("mosaic", "xla")
SINGLE = {4096: 2.5}  # E: most microseconds of one row


def ready(case: Case, peer: str) -> Callable[[], float]:
    def run(x: Any, weight: Any, residual: Any = None) -> Any:
        rows, summed = norm_quant(x, weight, residual=residual, backend=peer, **case.options())
        return (rows, summed) if case.residual else rows  # else the sum is x, which XLA would copy

    shape = (case.rows, case.width)
    shapes = (shape, shape[1:], shape) if case.residual else (shape, shape[1:])
    return row_bench.prepare(case, shapes, run)


def bars(rows: list[dict[str, Any]]) -> Any:
    return row_bench.bars(rows, "E", SINGLE)


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__)
    add_rows(parser, BENCH_CASES)
    parser.add_argument("--peers", nargs="+", choices=(*PEERS, "triton"), default=PEERS, help="backends that are timed")
    args = parser.parse_args(argv)
    cases = [case for rows in args.rows for case in BENCH_CASES if case.rows == rows]
    return record("norm_quant", args, argv, row_bench.table("norm_quant", cases, args.peers, ready), bars)


if __name__ == "__main__":
    sys.exit(main())
