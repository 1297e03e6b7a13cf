"""How long silu_mul_quant takes on the device, next to what XLA makes of the same formula.

    python -m pallas_kernels.silu_mul_quant.bench [--json] [--rows 1 128 8192] [--results experiments/results]

Bytes are those that must move: gate and up in; the rows and their scales out.
"""

import sys
from typing import Any

from pallas_kernels import row_bench
from pallas_kernels.bench_command import make_parser, record
from pallas_kernels.silu_mul_quant.api import silu_mul_quant
from pallas_kernels.silu_mul_quant.cases import BENCH_CASES, Case
from pallas_kernels.silu_mul_quant.config import mosaic_wins

SINGLE = {11008: 3.0}  # F: most microseconds of one row


def time(case: Case, backend: str) -> float:
    def run(gate_up: Any) -> Any:
        return silu_mul_quant(gate_up, kind=case.kind, backend=backend)

    return row_bench.measure(case, [(case.rows, 2 * case.width)], run)


def bars(rows: list[dict[str, Any]]) -> Any:
    def chosen(row: dict[str, Any]) -> str:
        kind = None if row["kind"] == "none" else row["kind"]
        return "mosaic" if mosaic_wins(row["T"], row["F"], kind) else "xla"

    return row_bench.bars(rows, "F", SINGLE, chosen)


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=sorted({case.rows for case in BENCH_CASES}))
    args = parser.parse_args(argv)
    cases = [case for case in BENCH_CASES if case.rows in args.rows]
    return record("silu_mul_quant", args, argv, row_bench.table("silu_mul_quant", "F", cases, time), bars)


if __name__ == "__main__":
    sys.exit(main())
