"""Measures a 16-bit matmul of few rows on the device, next to XLA's.

    python -m pallas_kernels.matmul.bench [--json] [--rows 1 16] [--shapes 4096x11008] [--record]

Each figure is of several layers with weights of their own, so that no cache holds them, in one jit. Times are the
profiler's, of the kernels alone. The ceiling is the best rate of the run.
"""

import sys
from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.bench.bars import bar
from pallas_kernels.bench.command import Row, make_parser, record
from pallas_kernels.bench.layers import Subject, add_fractions, table
from pallas_kernels.bench.numbers import positive
from pallas_kernels.matmul import matmul
from pallas_kernels.matmul.cases import BENCH_ROWS, BENCH_SHAPES, Case, bench_case

BACKENDS = ("mosaic", "xla")
SHAPES = {f"{n}x{k}": (n, k) for n, k in BENCH_SHAPES}
FEW_ROWS, BANDWIDTH = 64, 0.85  # up to which rows, at least this share of the run's best bandwidth


def rows_of(case: Case) -> int:
    return case.leading[0]


def moved_bytes(case: Case) -> int:
    size = jnp.dtype(case.dtype).itemsize
    result = jnp.dtype(case.out_dtype or case.dtype).itemsize * rows_of(case) * case.n
    return size * case.k * (case.n + rows_of(case)) + result


def subject(case: Case, backend: str) -> Subject:
    m, dtype = rows_of(case), jnp.dtype(case.dtype)
    return Subject(
        labels={"kernel": "matmul", "peer": backend, "M": m, "K": case.k, "N": case.n, "dtype": case.dtype},
        x=jax.ShapeDtypeStruct((m, case.k), dtype),
        w=jax.ShapeDtypeStruct((case.n, case.k), dtype),
        run=partial(matmul, out_dtype=case.out_dtype, backend=backend),
        moved_bytes=moved_bytes(case),
        flops=2 * m * case.k * case.n,
    )


def bars(rows: list[Row]) -> Iterator[Row]:
    """Completes the rows; yields the bars: XLA's time, and for few rows the bandwidth."""
    measured = add_fractions(rows)
    us = {(row["peer"], row["M"], row["K"], row["N"]): row["us"] for row in measured}
    for row in measured:
        m, k, n = row["M"], row["K"], row["N"]
        if row["peer"] != "mosaic":
            continue
        limit = us.get(("xla", m, k, n))
        if limit is not None:
            yield bar(f"(M, K, N)=({m}, {k}, {n}) xla", row["us"], "us", limit, most=True)
        if m <= FEW_ROWS:
            yield bar(f"(M, K, N)=({m}, {k}, {n}) bandwidth", row["fraction"], "1", BANDWIDTH)


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=positive, nargs="+", default=BENCH_ROWS, metavar="M", help="of x")
    parser.add_argument(
        "--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), metavar="NxK", help=", ".join(SHAPES)
    )
    parser.add_argument("--own-only", action="store_true", help="leave out XLA")
    args = parser.parse_args(argv)
    backends = BACKENDS[:1] if args.own_only else BACKENDS
    cases = [bench_case(m, *SHAPES[name]) for name in args.shapes for m in args.rows]
    return record("matmul", args, argv, table([subject(case, name) for case in cases for name in backends]), bars)


if __name__ == "__main__":
    sys.exit(main())
