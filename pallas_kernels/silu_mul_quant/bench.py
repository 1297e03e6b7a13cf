"""Measures silu_mul_quant on the device, next to what XLA makes of the same formula.

    python -m pallas_kernels.silu_mul_quant.bench [--json] [--rows 1 128 8192] [--peers mosaic xla triton] [--record]

Bytes are what must move: gate and up in; the rows and their scales out.
"""

import sys
from collections.abc import Callable
from typing import Any

from pallas_kernels.bench import rows as row_bench
from pallas_kernels.bench.command import add_rows, make_parser, record
from pallas_kernels.silu_mul_quant.api import silu_mul_quant
from pallas_kernels.silu_mul_quant.cases import BENCH_CASES, Case

PEERS = ("mosaic", "xla")  # the kernel, and the plain formula
SINGLE = {11008: 3.0}  # F: most microseconds of one row


def ready(case: Case, peer: str) -> Callable[[], float]:
    def run(gate_up: Any) -> Any:
        return silu_mul_quant(gate_up, kind=case.kind, backend=peer)

    return row_bench.prepare(case, [(case.rows, 2 * case.width)], run)


def bars(rows: list[dict[str, Any]]) -> Any:
    return row_bench.bars(rows, "F", SINGLE)


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__)
    add_rows(parser, BENCH_CASES)
    parser.add_argument("--peers", nargs="+", choices=(*PEERS, "triton"), default=PEERS, help="backends that are timed")
    args = parser.parse_args(argv)
    cases = [case for rows in args.rows for case in BENCH_CASES if case.rows == rows]
    return record("silu_mul_quant", args, argv, row_bench.table("silu_mul_quant", cases, args.peers, ready), bars)


if __name__ == "__main__":
    sys.exit(main())
