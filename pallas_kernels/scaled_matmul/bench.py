"""Measures int8_matmul and fp8_matmul: how they are timed, next to what, and their bars. Each figure is of several
layers with weights of their own, so that no cache holds them, in one jit. Times are the profiler's, of the kernels
alone. With --peers all variants of torch run first (pallas_kernels/bench/peers.py)."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench import peers
from pallas_kernels.bench.bars import bar
from pallas_kernels.bench.command import Row, make_parser, record
from pallas_kernels.bench.measure import copy_bandwidth, device_us_of_each
from pallas_kernels.bench.numbers import positive, positive_number
from pallas_kernels.formats.weight_formats import BLOCK
from pallas_kernels.fp8_matmul import fp8_matmul
from pallas_kernels.int8_matmul import int8_matmul
from pallas_kernels.scaled_matmul.cases import BENCH_ROWS, BENCH_SHAPES, Case

OVER_TORCH = 1.1  # time
TOP_S = 1350  # at M of 1024 and above
FEW_ROWS = 64  # up to which bandwidth counts
BANDWIDTH = {True: 0.8, False: 0.6}  # of the run's best; by whether K * N is at least LARGE
LARGE = 45_000_000
OVER_INT8 = 1.05  # fp8's time
IN_BLOCKS = "fp8 in blocks"  # a scale for each block of w
OF_FP8 = 0.9  # the speed of blocks, beside a scale a row

Product = Callable[..., jax.Array]
PRODUCTS: dict[str, tuple[Product, str]] = {  # and their operands; the operations' own choose their backend
    "int8_matmul": (int8_matmul, "int8"),
    "fp8_matmul": (fp8_matmul, "float8_e4m3fn"),
    "xla int8": (partial(int8_matmul, backend="xla"), "int8"),
    "xla fp8": (partial(fp8_matmul, backend="xla"), "float8_e4m3fn"),
    IN_BLOCKS: (fp8_matmul, "float8_e4m3fn"),
    "triton int8": (partial(int8_matmul, backend="triton"), "int8"),
    "triton fp8": (partial(fp8_matmul, backend="triton"), "float8_e4m3fn"),
    "xla bf16": (lambda x, w, *_: jax.lax.dot_general(x, w, (((1,), (1,)), ((), ()))), "bfloat16"),
}
OPERATIONS = ("int8_matmul", "fp8_matmul")


def layers_for(case: Case) -> int:
    """Returns how many weights are more than caches hold, within reason."""
    return max(2, min(16, -(-(256 << 20) // (case.k * case.n))))


def moved_bytes(case: Case, operand: str) -> int:
    size = jnp.dtype(operand).itemsize
    return (case.k * (case.n + case.m)) * size + 2 * case.m * case.n + (4 * (case.m + case.n) if size == 1 else 0)


def codes(rng: np.random.Generator, shape: tuple[int, int], operand: str) -> np.ndarray:
    """Returns operands of both signs with all their bits in use: what they hold decides what power they take."""
    if operand == "float8_e4m3fn":
        return (rng.integers(0, 256, shape, np.uint8) & 0xBF).view(jnp.dtype(operand))  # below 2: no NaN
    return rng.integers(-127, 128, shape, np.int8).astype(jnp.dtype(operand))


def run_layers(product: Product, x: jax.Array, ws: Sequence[jax.Array], *scales: jax.Array) -> list[jax.Array]:
    return [product(x, w, *scales) for w in ws]


def compile_layers(case: Case, name: str) -> Any:
    product, operand = PRODUCTS[name]
    x, w = (jax.ShapeDtypeStruct((rows, case.k), operand) for rows in (case.m, case.n))
    scales = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in scale_shapes(case, name)]
    return jax.jit(partial(run_layers, product)).lower(x, [w] * layers_for(case), *scales).compile()


def scale_shapes(case: Case, name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shapes of x's and w's scales."""
    groups = case.k // BLOCK
    return ((case.m, groups), (groups, case.n)) if name == IN_BLOCKS else ((case.m,), (case.n,))


def measure(cases: Sequence[Case], name: str, pool: ThreadPoolExecutor) -> list[tuple[Case, float | Exception]]:
    """Returns the microseconds of one layer of each case, all of one (K, N)."""
    (n, k), layers, operand = (cases[0].n, cases[0].k), layers_for(cases[0]), PRODUCTS[name][1]
    # all before any is timed: XLA tries its own candidates on the device
    pending = [pool.submit(compile_layers, case, name) for case in cases]
    rng = np.random.default_rng(0)
    most = codes(rng, (max(case.m for case in cases), k), operand)
    ws = [jax.device_put(w) for w in [codes(rng, (n, k), operand)] * layers]  # where they lie counts, not what they are
    column = jax.device_put(rng.random(scale_shapes(cases[0], name)[1], np.float32))
    runs, found = {}, dict[Case, float | Exception]()
    for case, compiled in zip(cases, pending):
        row, x = jax.device_put((rng.random(scale_shapes(case, name)[0], np.float32), most[: case.m]))
        try:
            runs[case] = partial(compiled.result(), x, ws, row, column)
        except Exception as error:  # costs its own row
            found[case] = error
    try:
        found |= {case: us / layers for case, us in zip(runs, device_us_of_each(list(runs.values())))}
    except Exception as error:  # costs this shape's rows only
        found |= dict.fromkeys(runs, error)
    return [(case, found[case]) for case in cases]


def table(cases: Sequence[Case], names: Sequence[str], peer_rows: Sequence[int], seconds: float) -> Iterator[Row]:
    """Yields one row a case and product, the operation's own first, peers' at some M. One that fails or comes too late
    says so."""
    deadline = time.monotonic() + seconds
    yield {"kernel": "copy", "gb_s": round(copy_bandwidth() / 1e9)}
    shapes = {(case.k, case.n): [other for other in cases if (other.k, other.n) == (case.k, case.n)] for case in cases}
    with ThreadPoolExecutor(16) as pool:
        for name in names:
            for alike in shapes.values():
                if name not in OPERATIONS:
                    alike = [case for case in alike if case.m in peer_rows]
                if not alike:
                    continue
                found: list[tuple[Case, float | Exception]]
                if time.monotonic() > deadline:
                    found = [(case, RuntimeError(f"not measured within {seconds:.0f} s")) for case in alike]
                else:
                    found = measure(alike, name, pool)
                yield from (row_of(case, name, us) for case, us in found)


def row_of(case: Case, name: str, us: float | Exception) -> Row:
    row: Row = {"kernel": "scaled_matmul", "peer": name, "M": case.m, "K": case.k, "N": case.n}
    if isinstance(us, Exception):
        return row | {"error": (str(us) or repr(us)).splitlines()[0][:200]}
    operand = PRODUCTS[name][1]
    tflop_s, gb_s = 2 * case.m * case.k * case.n / us / 1e6, moved_bytes(case, operand) / us / 1e3
    return row | {"dtype": operand, "us": round(us, 2), "tflop_s": round(tflop_s), "gb_s": round(gb_s)}


def bars(operation: str, rows: list[Row]) -> Iterator[Row]:
    """Yields bars of the operation's own rows. They are torch's fp8 time where it ran, XLA's, the rate of many rows,
    and the bandwidth of few. Blocks have a share of the speed of one scale a row."""
    us = {(row["peer"], row["M"], row["K"], row["N"]): row["us"] for row in rows if "us" in row and "peer" in row}
    torch_fp8 = peers.best(rows, "torch fp8", ("M", "K", "N"))
    ceiling = max((row["gb_s"] for row in rows if "gb_s" in row), default=0)
    judged = (operation, IN_BLOCKS) if operation == "fp8_matmul" else (operation,)
    for row in rows:
        if row.get("peer") not in judged or "us" not in row:
            continue
        m, k, n = row["M"], row["K"], row["N"]
        name = f"(M, K, N)=({m}, {k}, {n})"
        if row["peer"] == IN_BLOCKS:
            limit = us.get(("fp8_matmul", m, k, n), float("inf")) / OF_FP8
            yield bar(f"{name} in blocks", row["us"], "us", round(limit, 3), most=True)
            continue
        if (m, k, n) in torch_fp8:
            limit = OVER_TORCH * torch_fp8[m, k, n]
            yield bar(f"{name} torch's fp8 + 10 %", row["us"], "us", round(limit, 3), most=True)
        for peer, slack in (("xla int8", 1.0), ("int8_matmul", OVER_INT8)):
            limit = slack * us.get((peer, m, k, n), float("inf"))
            if limit < float("inf") and peer != operation and not (operation == "fp8_matmul" and peer == "xla int8"):
                plus = " + 5 %" if slack > 1 else ""
                yield bar(f"{name} {peer}{plus}", row["us"], "us", round(limit, 3), most=True)
        if m >= 1024:
            yield bar(f"{name} rate", row["tflop_s"], "tflop_s", TOP_S)
        if m <= FEW_ROWS:
            yield bar(f"{name} bandwidth", round(row["gb_s"] / ceiling, 3), "1", BANDWIDTH[k * n >= LARGE])


def summarize(operation: str, rows: list[Row]) -> Iterator[Row]:
    """Adds each row's share of the run's best bandwidth, and yields the bars."""
    ceiling = max((row["gb_s"] for row in rows if "gb_s" in row), default=0)
    for row in rows:
        if "gb_s" in row and "us" in row:
            row["fraction"] = round(row["gb_s"] / ceiling, 3)
    return bars(operation, rows)


def main(operation: str, description: str | None, beside: Sequence[str], argv: list[str] | None) -> int:
    """Runs the command of one operation: others of PRODUCTS beside it."""
    parser = make_parser(description)
    parser.add_argument("--rows", type=positive, nargs="+", default=BENCH_ROWS, metavar="M", help="of x")
    parser.add_argument("--own-only", action="store_true", help="leave out XLA's")
    parser.add_argument("--triton", action="store_true", help="backend triton too")
    parser.add_argument(
        "--peer-rows", type=positive, nargs="+", default=BENCH_ROWS, metavar="M", help="where XLA's run"
    )
    parser.add_argument("--seconds", type=positive_number, default=600.0, help="time after which no measurement begins")
    peers.add_options(parser, "torch's products", 60)
    args = parser.parse_args(argv)
    by_torch = list(peers.products(args.peers, args.peer_seconds)) if peers.asked(parser, args) else []
    operand = PRODUCTS[operation][1]
    cases = [Case(m, n, k, operand) for k, n in BENCH_SHAPES for m in args.rows]
    names = [operation] + (["triton " + operation.removesuffix("_matmul")] if args.triton else [])
    names += [] if args.own_only else beside
    rows = chain(by_torch, table(cases, names, args.peer_rows, args.seconds))
    return record(operation, args, argv, rows, partial(summarize, operation))
