"""Measures products of rows with matrices of their own on the device: those of low-rank adapters of LLaMA-2-7B.

    python -m pallas_kernels.row_matmul.bench [--json] [--rows 64] [--record]

Each figure is of several layers with adapters of their own, so that no cache holds them, in one jit. Times are the
profiler's, of the kernels alone. Bytes are those of the adapters that rows use, of the rows and of the results. The
ceiling is the best rate of the run.
"""

import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.bench.bars import bar
from pallas_kernels.bench.command import Row, add_rows, make_parser, record
from pallas_kernels.bench.layers import Subject, add_fractions, table
from pallas_kernels.row_matmul.api import row_matmul
from pallas_kernels.row_matmul.cases import BENCH_CASES, Case

BACKENDS = ("mosaic", "xla")
BANDWIDTH = 0.67  # at least this share of the run's best, where every row has an adapter of its own


def subject(case: Case, backend: str) -> Subject:
    def run(x: jax.Array, w: jax.Array) -> jax.Array:
        more: dict[str, Any] = {"parts": case.parts, "out_dtype": case.out_dtype, "backend": backend, "runs": case.used}
        return row_matmul(x, w, jnp.int32(0), case.group, **more)

    return Subject(
        labels={"kernel": "row_matmul", "peer": backend, "product": name_of(case)},
        x=case.x,
        w=case.w(),
        run=run,
        moved_bytes=case.moved_bytes,
        flops=2 * case.rows * case.w().shape[2] * case.w().shape[3],
    )


def name_of(case: Case) -> str:
    half = "a" if case.shrink else "b"
    return f"{case.target}.{half} M={case.rows} rank={case.rank}, {case.used} of {case.adapters} adapters"


def bars(rows: list[Row]) -> Iterator[Row]:
    """Completes the rows; yields the bars: XLA's time, and the bandwidth where all adapters are read."""
    measured = add_fractions(rows)
    us = {row["product"]: row["us"] for row in measured if row["peer"] == "xla"}
    alone = {name_of(case) for case in BENCH_CASES if case.used == case.rows > 1}
    for row in measured:
        if row["peer"] != "mosaic":
            continue
        if row["product"] in us:
            yield bar(f"{row['product']} xla", row["us"], "us", us[row["product"]], most=True)
        if row["product"] in alone:
            yield bar(f"{row['product']} bandwidth", row["fraction"], "1", BANDWIDTH)


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__)
    add_rows(parser, BENCH_CASES)
    args = parser.parse_args(argv)
    chosen = [case for case in BENCH_CASES if case.rows in args.rows]
    subjects = [subject(case, backend) for case in chosen for backend in BACKENDS]
    return record("row_matmul", args, argv, table(subjects), bars)


if __name__ == "__main__":
    sys.exit(main())
