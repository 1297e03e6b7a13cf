"""How long norm_quant takes on the device, with a residual, next to what XLA makes of the same formula.

    python -m pallas_kernels.norm_quant.bench [--json] [--rows 1 128 8192] [--results experiments/results]

Bytes are those that must move: x and the residual in; their sum, the rows and their scales out; the weight.
"""

import sys
from typing import Any

from pallas_kernels import row_bench
from pallas_kernels.bench_command import make_parser, record
from pallas_kernels.norm_quant.api import norm_quant
from pallas_kernels.norm_quant.cases import BENCH_CASES, Case
from pallas_kernels.norm_quant.config import mosaic_wins

SINGLE = {4096: 2.5}  # E: most microseconds of one row


def time(case: Case, backend: str) -> float:
    def run(x: Any, weight: Any, residual: Any) -> Any:
        return norm_quant(x, weight, residual=residual, backend=backend, **case.options())

    shape = (case.rows, case.width)
    return row_bench.measure(case, (shape, shape[1:], shape), run)


def bars(rows: list[dict[str, Any]]) -> Any:
    def chosen(row: dict[str, Any]) -> str:
        kind = None if row["kind"] == "none" else row["kind"]
        return "mosaic" if mosaic_wins(row["T"], row["E"], kind, True) else "xla"

    return row_bench.bars(rows, "E", SINGLE, chosen)


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=sorted({case.rows for case in BENCH_CASES}))
    args = parser.parse_args(argv)
    cases = [case for case in BENCH_CASES if case.rows in args.rows]
    return record("norm_quant", args, argv, row_bench.table("norm_quant", "E", cases, time), bars)


if __name__ == "__main__":
    sys.exit(main())
