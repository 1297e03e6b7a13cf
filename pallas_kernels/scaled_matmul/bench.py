"""What the benchmarks of int8_matmul and fp8_matmul share: how they are timed, next to what, and their bars.

Each figure is of several layers with weights of their own, so that no cache holds them, in one jit. Times are the
profiler's, of the kernels alone; torch's are a CUDA graph's by CUDA events, which has the gaps between kernels in it.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.bench_command import Row, make_parser, record
from pallas_kernels.fp8_matmul import fp8_matmul
from pallas_kernels.int8_matmul import int8_matmul
from pallas_kernels.measure import copy_bandwidth, device_us
from pallas_kernels.scaled_matmul.cases import BENCH_ROWS, BENCH_SHAPES, Case

# torch's fp8 _scaled_mm with one scale a tensor (cuBLASLt), us on an H200, at M of BENCH_ROWS: (K, N).
TORCH_FP8 = {
    (4096, 12288): (15.9, 16.3, 15.9, 17.1, 21.5, 38.7, 73.3, 277),
    (4096, 4096): (7.7, 7.6, 7.7, 8.2, 10.3, 14.5, 25.1, 94.3),
    (4096, 22016): (25.3, 25.7, 27.5, 29.8, 35.8, 66.6, 138, 531),
    (11008, 4096): (16.6, 17.1, 15.1, 17.1, 22.5, 33.0, 61.5, 245),
}
OVER_TORCH = 1.1  # time
TOP_S = 1350  # at M of 1024 and above
FEW_ROWS = 64  # up to which bandwidth counts
BANDWIDTH = {True: 0.8, False: 0.6}  # of the run's best; by whether K * N is at least LARGE
LARGE = 45_000_000
OVER_INT8 = 1.05  # fp8's time

Product = Callable[..., jax.Array]
PRODUCTS: dict[str, tuple[Product, str]] = {  # and their operands
    "int8_matmul": (partial(int8_matmul, backend="mosaic"), "int8"),
    "fp8_matmul": (partial(fp8_matmul, backend="mosaic"), "float8_e4m3fn"),
    "xla int8": (partial(int8_matmul, backend="xla"), "int8"),
    "xla fp8": (partial(fp8_matmul, backend="xla"), "float8_e4m3fn"),
    "xla bf16": (lambda x, w, *_: jax.lax.dot_general(x, w, (((1,), (1,)), ((), ()))), "bfloat16"),
}


def layers_for(case: Case) -> int:
    """Weights that are more than caches hold, within reason."""
    return max(2, min(16, -(-(256 << 20) // (case.k * case.n))))


def moved_bytes(case: Case, operand: str) -> int:
    size = jnp.dtype(operand).itemsize
    return (case.k * (case.n + case.m)) * size + 2 * case.m * case.n + (4 * (case.m + case.n) if size == 1 else 0)


@partial(jax.jit, static_argnums=(1, 2))
def codes(key: jax.Array, shape: tuple[int, int], operand: str) -> jax.Array:
    """Zero-mean operands with all their bits in use: what they hold decides what power they take."""
    if operand == "int8":
        return jax.random.randint(key, shape, -127, 128, jnp.int8)
    return jax.random.normal(key, shape, jnp.bfloat16).astype(operand)


def run_layers(product: Product, x: jax.Array, ws: Sequence[jax.Array], *scales: jax.Array) -> list[jax.Array]:
    return [product(x, w, *scales) for w in ws]


def compile_layers(case: Case, name: str) -> Any:
    product, operand = PRODUCTS[name]
    x, w = (jax.ShapeDtypeStruct((rows, case.k), operand) for rows in (case.m, case.n))
    scales = [jax.ShapeDtypeStruct((rows,), jnp.float32) for rows in (case.m, case.n)]
    return jax.jit(partial(run_layers, product)).lower(x, [w] * layers_for(case), *scales).compile()


def measure(case: Case, name: str, pending: "Future[Any]") -> float:
    """Microseconds of one layer."""
    compiled = pending.result()
    keys, operand = jax.random.split(jax.random.key(0), layers_for(case) + 3), PRODUCTS[name][1]
    x, *ws = (codes(key, (case.m if i == 0 else case.n, case.k), operand) for i, key in enumerate(keys[2:]))
    scales = [jax.random.uniform(key, (rows,), jnp.float32) for key, rows in zip(keys, (case.m, case.n))]
    return device_us(lambda: compiled(x, ws, *scales), repeats=3) / len(ws)


def measure_torch(case: Case, kind: str) -> float:
    """Microseconds of torch's own product with one scale a tensor ("fp8") or none ("int8")."""
    import torch

    device, layers = torch.device("cuda"), layers_for(case)

    def operand(rows: int) -> Any:
        if kind == "int8":
            return torch.randint(-127, 128, (rows, case.k), dtype=torch.int8, device=device)
        return torch.randn(rows, case.k, dtype=torch.bfloat16, device=device).to(torch.float8_e4m3fn)

    x, ws, one = operand(case.m), [operand(case.n) for _ in range(layers)], torch.ones((), device=device)

    def run() -> None:
        for w in ws:
            if kind == "int8":
                torch._int_mm(x, w.t())
            else:
                torch._scaled_mm(x, w.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            run()
        times = []
        for _ in range(5):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record(stream)
            graph.replay()
            stop.record(stream)
            stop.synchronize()
            times.append(start.elapsed_time(stop) * 1e3 / layers)
    del graph
    return sorted(times)[len(times) // 2]


def table(cases: Sequence[Case], names: Sequence[str], torch_kind: str | None) -> Iterator[Row]:
    """One row a case and product; one that fails says why."""
    yield {"kernel": "copy", "gb_s": round(copy_bandwidth() / 1e9)}
    with ThreadPoolExecutor(8) as pool:
        pending: dict[tuple[Case, str], Future[Any]] = {
            (case, name): pool.submit(compile_layers, case, name) for case in cases for name in names
        }
        for case in cases:
            for name in names:
                yield timed(case, name, partial(measure, case, name, pending.pop((case, name))))
            if torch_kind is not None and (torch_kind == "fp8" or case.m > 16):  # _int_mm takes no fewer rows
                yield timed(case, f"torch {torch_kind}", partial(measure_torch, case, torch_kind))


def timed(case: Case, name: str, run: Callable[[], float]) -> Row:
    row: Row = {"kernel": "scaled_matmul", "peer": name, "M": case.m, "K": case.k, "N": case.n}
    operand = PRODUCTS[name][1] if name in PRODUCTS else "int8"
    try:
        us = run()
    except Exception as error:  # a peer that is missing costs its own rows only
        return row | {"error": str(error).splitlines()[0][:200]}
    tflop_s, gb_s = 2 * case.m * case.k * case.n / us / 1e6, moved_bytes(case, operand) / us / 1e3
    return row | {"dtype": operand, "us": round(us, 2), "tflop_s": round(tflop_s), "gb_s": round(gb_s)}


def bars(operation: str, rows: list[Row]) -> Iterator[Row]:
    """Of the operation's own rows: torch's fp8 figures, XLA's time, the rate of many rows, the bandwidth of few."""
    us = {(row["peer"], row["M"], row["K"], row["N"]): row["us"] for row in rows if "us" in row and "peer" in row}
    ceiling = max((row["gb_s"] for row in rows if "gb_s" in row), default=0)
    for row in rows:
        if row.get("peer") != operation or "us" not in row:
            continue
        m, k, n = row["M"], row["K"], row["N"]
        name = f"(M, K, N)=({m}, {k}, {n})"

        def bar(what: str, key: str, value: Any, limit: float, met: bool, name: str = name) -> Row:
            return {"name": f"{name} {what}", "value": value, "unit": key, "bar": round(limit, 3), "met": met}

        if m in BENCH_ROWS and (k, n) in TORCH_FP8:
            limit = OVER_TORCH * TORCH_FP8[k, n][BENCH_ROWS.index(m)]
            yield bar("torch's fp8 + 10 %", "us", row["us"], limit, row["us"] <= limit)
        for peer, slack in (("xla int8", 1.0), ("int8_matmul", OVER_INT8)):
            limit = slack * us.get((peer, m, k, n), float("inf"))
            if limit < float("inf") and peer != operation and not (operation == "fp8_matmul" and peer == "xla int8"):
                yield bar(peer + (" + 5 %" if slack > 1 else ""), "us", row["us"], limit, row["us"] <= limit)
        if m >= 1024:
            yield bar("rate", "tflop_s", row["tflop_s"], TOP_S, row["tflop_s"] >= TOP_S)
        if m <= FEW_ROWS:
            share, limit = round(row["gb_s"] / ceiling, 3), BANDWIDTH[k * n >= LARGE]
            yield bar("bandwidth", "1", share, limit, share >= limit)


def summarize(operation: str, rows: list[Row]) -> Iterator[Row]:
    """Adds each row's share of the run's best bandwidth, and yields the bars."""
    ceiling = max((row["gb_s"] for row in rows if "gb_s" in row), default=0)
    for row in rows:
        if "us" in row:
            row["fraction"] = round(row["gb_s"] / ceiling, 3)
    return bars(operation, rows)


def main(operation: str, description: str | None, peers: Sequence[str], kind: str, argv: list[str] | None) -> int:
    """The command of one operation: `peers` of PRODUCTS beside it, and torch's product of `kind`."""
    parser: argparse.ArgumentParser = make_parser(description)
    parser.add_argument("--rows", type=int, nargs="+", default=BENCH_ROWS, metavar="M")
    parser.add_argument("--own-only", action="store_true", help="leave out the peers")
    args = parser.parse_args(argv)
    operand = PRODUCTS[operation][1]
    cases = [Case(m, n, k, operand) for k, n in BENCH_SHAPES for m in args.rows]
    names = [operation] if args.own_only else [operation, *peers]
    rows = table(cases, names, None if args.own_only else kind)
    return record(operation, args, argv, rows, partial(summarize, operation))
