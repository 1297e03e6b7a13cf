"""How long a 16-bit matmul of few rows takes on the device, next to XLA's.

    python -m pallas_kernels.matmul.bench [--json] [--rows 1 16 64] [--results experiments/results]

Each figure is of several layers with weights of their own, so that no cache holds them, in one jit. Times are the
profiler's, of the kernels alone. The ceiling is the best rate of the run.
"""

import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.bench_command import Row, make_parser, record
from pallas_kernels.matmul import matmul
from pallas_kernels.matmul.cases import BENCH_CASES, BENCH_ROWS, Case
from pallas_kernels.measure import copy_bandwidth, device_us_of_each

BACKENDS = ("mosaic", "xla")
FEW_ROWS, BANDWIDTH = 64, 0.85  # up to which rows, at least this share of the run's best bandwidth
PEAK_TFLOP_S = 780  # XLA's best of large matmuls on an H200


def rows_of(case: Case) -> int:
    return case.leading[0]


def moved_bytes(case: Case) -> int:
    size = jnp.dtype(case.dtype).itemsize
    result = jnp.dtype(case.out_dtype or case.dtype).itemsize * rows_of(case) * case.n
    return size * case.k * (case.n + rows_of(case)) + result


def layers_for(case: Case) -> int:
    """Weights that are more than caches hold."""
    return max(3, -(-(256 << 20) // (2 * case.k * case.n)))


def run_layers(case: Case, backend: str, x: jax.Array, ws: Sequence[jax.Array]) -> list[jax.Array]:
    return [matmul(x, w, out_dtype=case.out_dtype, backend=backend) for w in ws]


def compile_layers(case: Case, backend: str) -> Any:
    x, w = (jax.ShapeDtypeStruct((rows, case.k), case.dtype) for rows in (rows_of(case), case.n))
    return jax.jit(partial(run_layers, case, backend)).lower(x, [w] * layers_for(case)).compile()


def measure(compiled: dict[tuple[Case, str], Any]) -> list[float]:
    """Microseconds of one layer of each product, all of one N and K."""
    cases = [case for case, _ in compiled]
    n, k, dtype = cases[0].n, cases[0].k, jnp.dtype(cases[0].dtype)
    make = jax.jit(partial(jax.random.normal, dtype=dtype), static_argnums=1)
    x, *keys = jax.random.split(jax.random.key(0), layers_for(cases[0]) + 1)
    rows, ws = make(x, (max(map(rows_of, cases)), k)), [make(key, (n, k)) for key in keys]
    runs = [partial(run, rows[: rows_of(case)], ws) for (case, _), run in compiled.items()]
    return [us / len(ws) for us in device_us_of_each(runs)]


def table(cases: Sequence[Case], backends: Sequence[str]) -> Iterator[Row]:
    """One row a case and backend; one that fails says why."""
    yield {"kernel": "copy", "gb_s": round(copy_bandwidth() / 1e9)}
    with ThreadPoolExecutor(8) as pool:  # all before any is timed: XLA tries its own candidates on the device
        pending = {(case, name): pool.submit(compile_layers, case, name) for case in cases for name in backends}
    for shape in dict.fromkeys((case.n, case.k) for case in cases):
        compiled: dict[tuple[Case, str], Any] = {}
        for (case, name), future in pending.items():
            if (case.n, case.k) == shape:
                try:
                    compiled[case, name] = future.result()
                except Exception as error:  # a failure costs its own row only
                    yield row_of(case, name) | {"error": str(error).splitlines()[0][:200]}
        try:
            times = measure(compiled)
        except Exception as error:
            yield from (row_of(*key) | {"error": str(error).splitlines()[0][:200]} for key in compiled)
            continue
        for (case, name), us in zip(compiled, times):
            tflop_s, gb_s = 2 * rows_of(case) * case.k * case.n / us / 1e6, moved_bytes(case) / us / 1e3
            yield row_of(case, name) | {"us": round(us, 2), "tflop_s": round(tflop_s), "gb_s": round(gb_s)}


def row_of(case: Case, name: str) -> Row:
    return {"kernel": "matmul", "peer": name, "M": rows_of(case), "K": case.k, "N": case.n, "dtype": case.dtype}


def summarize(rows: list[Row]) -> Iterator[Row]:
    """Adds each row's share of the run's best bandwidth, and of the floor that bandwidth and peak rate set; yields
    the bars: XLA's time, and for few rows the bandwidth."""
    ceiling = max((row["gb_s"] for row in rows if "gb_s" in row), default=0)
    measured = [row for row in rows if "us" in row]
    us = {(row["peer"], row["M"], row["K"], row["N"]): row["us"] for row in measured}
    for row in measured:
        row["fraction"] = round(row["gb_s"] / ceiling, 3)
        row["floor_fraction"] = round(max(row["gb_s"] / ceiling, row["tflop_s"] / PEAK_TFLOP_S), 3)
        m, k, n = row["M"], row["K"], row["N"]
        if row["peer"] != "mosaic":
            continue
        limit = us.get(("xla", m, k, n))
        if limit is not None:
            met = row["us"] <= limit
            yield {"name": f"(M, K, N)=({m}, {k}, {n}) xla", "value": row["us"], "unit": "us", "bar": limit, "met": met}
        if m <= FEW_ROWS:
            share = row["fraction"]
            name = f"(M, K, N)=({m}, {k}, {n}) bandwidth"
            yield {"name": name, "value": share, "unit": "1", "bar": BANDWIDTH, "met": share >= BANDWIDTH}


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=BENCH_ROWS, metavar="M")
    parser.add_argument("--own-only", action="store_true", help="leave out XLA")
    args = parser.parse_args(argv)
    cases = [case for case in BENCH_CASES if rows_of(case) in args.rows]
    return record("matmul", args, argv, table(cases, BACKENDS[:1] if args.own_only else BACKENDS), summarize)


if __name__ == "__main__":
    sys.exit(main())
