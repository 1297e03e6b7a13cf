"""Measures a device's ceilings: the best rates of memory, matmuls and causal attention that anything here reaches.

    python -m experiments.ceilings
    python -m experiments.ceilings --keep experiments/results/ceilings-20261126-h200.json

Each row is one kernel, or the few kernels that XLA makes of one function. Operands exceed all caches, and the device's
profiler gives the times. The best rate of each quantity is "measured" in configs/devices/*.json, where --keep writes
it. Then the best function of each quantity runs without a pause. Its rate in the second half of --sustained seconds is
"sustained" there, since a device that draws its most power lowers its clock. Floors are computed from these rates
(experiments/steps/floors.py).
"""

import json
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from experiments.arguments import claim_memory
from experiments.report.documents import result_of
from experiments.result_file import Row, command_line, record, refusing
from experiments.steps.devices import KINDS, SHEETS, device_sheets
from experiments.steps.timer import compile_ahead
from jllm.errors import ConfigError
from jllm.programs.compiler import Recipe
from pallas_kernels.bench.command import Parser, add_result_options
from pallas_kernels.bench.measure import device_us
from pallas_kernels.bench.numbers import positive, positive_number
from pallas_kernels.fp8_matmul import fp8_matmul
from pallas_kernels.int8_matmul import int8_matmul
from pallas_kernels.matmul import matmul

Function = Callable[..., jax.Array]
SCALED: dict[str, tuple[Function, str]] = {  # operations with 8-bit operands
    "int8": (int8_matmul, "int8"),
    "fp8": (fp8_matmul, "float8_e4m3fn"),
}
QUEUED = 8  # calls that wait on the device
UNITS = {"bandwidth": "bytes/s"}  # operations/s for all other quantities


@dataclass(frozen=True)
class Sizes:
    """The sizes of timed operations."""

    rows: int = 1 << 15  # rows of a sum, in 16 bits: 4 GiB
    columns: int = 1 << 16
    sequences: int = 128  # decoding sequences
    keys: int = 2048  # keys per sequence
    tokens: int = 16_384  # tokens of one causal prompt
    heads: int = 32
    head_dim: int = 128
    products: tuple[tuple[int, int, int], ...] = (  # M, N, K
        (4096, 12288, 4096),
        (8192, 22016, 4096),
        (8192, 4096, 11008),
        (8192, 8192, 8192),
    )


@dataclass(frozen=True)
class Subject:
    """One function on operands of these shapes, with the bytes or operations that count."""

    quantity: str  # bandwidth, attention, or a kind of matmul
    what: str
    amount: int
    run: Function
    operands: tuple[jax.ShapeDtypeStruct, ...]


def subjects(sizes: Sizes, attention: str = "cudnn") -> Iterator[Subject]:
    """Yields all timed functions, with this implementation of jax.nn.dot_product_attention."""
    table = jax.ShapeDtypeStruct((sizes.rows, sizes.columns), jnp.bfloat16)
    yield Subject("bandwidth", "row sums by XLA", _nbytes(table), _row_sums, (table,))
    attend = partial(jax.nn.dot_product_attention, implementation=attention)

    def heads(count: int, length: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((count, length, sizes.heads, sizes.head_dim), jnp.bfloat16)

    one, many = heads(sizes.sequences, 1), heads(sizes.sequences, sizes.keys)
    yield Subject("bandwidth", f"decode attention by {attention}", 2 * _nbytes(many), attend, (one, many, many))
    prompt, pairs = heads(1, sizes.tokens), sizes.tokens * (sizes.tokens + 1) // 2
    operations = 4 * sizes.heads * sizes.head_dim * pairs
    causal = partial(attend, is_causal=True)
    yield Subject("attention", f"causal attention by {attention}", operations, causal, (prompt,) * 3)
    for m, n, k in sizes.products:
        where = f"M={m} N={n} K={k}"
        plain = tuple(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((m, k), (n, k)))
        yield Subject("bf16", f"{where} by matmul", 2 * m * n * k, matmul, plain)
        for kind, (product, dtype) in SCALED.items():
            codes = tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in ((m, k), (n, k)))
            scales = tuple(jax.ShapeDtypeStruct((size,), jnp.float32) for size in (m, n))
            yield Subject(kind, f"{where} by {kind}_matmul", 2 * m * n * k, product, codes + scales)


def measure(subjects: list[Subject], threads: int, seconds: float) -> Iterator[Row]:
    """Yields a row per function, with its rate or its error. Then yields the rate that the best of each quantity holds
    for `seconds`. Everything is compiled before the first is timed, as XLA tries candidates on the device."""
    recipes = {subject: Recipe(partial(jax.jit(subject.run).lower, *subject.operands)) for subject in subjects}
    steps, fastest = compile_ahead(recipes, threads), dict[str, tuple[float, Subject]]()
    for subject, compiled in steps.items():
        row: Row = {"quantity": subject.quantity, "what": subject.what}
        try:
            us = device_us(_run(subject, compiled), repeats=10)
        except Exception as error:  # it loses only its own row
            yield row | {"error": (str(error) or repr(error)).splitlines()[0][:200]}
        else:
            found = _rate(subject, us)
            fastest[subject.quantity] = max(
                fastest.get(subject.quantity, (0.0, subject)), (found["rate"], subject), key=lambda each: each[0]
            )
            yield row | found
    for _, subject in fastest.values() if seconds else ():
        us = sustained_us(_run(subject, steps[subject]), seconds)
        yield {"quantity": subject.quantity, "what": subject.what, "seconds": seconds} | _rate(subject, us)


def _rate(subject: Subject, us: float) -> Row:
    rate = float(f"{1e6 * subject.amount / us:.4g}")
    return {"us": round(us, 1), "rate": rate, "unit": UNITS.get(subject.quantity, "operations/s")}


def sustained_us(run: Callable[[], jax.Array], seconds: float) -> float:
    """Returns the microseconds of a call in the second half of these seconds of calls without a pause."""
    queued, calls, middle = deque[jax.Array](), 0, 0.0
    start = time.perf_counter()
    while (now := time.perf_counter()) < start + seconds:
        if not middle and now >= start + seconds / 2:
            calls, middle = 0, now
        queued.append(run())
        if len(queued) > QUEUED:
            jax.block_until_ready(queued.popleft())
            calls += 1
    return 1e6 * (time.perf_counter() - middle) / max(1, calls)


def best(rows: list[Row], sustained: bool = False) -> dict[str, float]:
    """Returns the best rate of each quantity, or the one that it holds for seconds."""
    found: dict[str, float] = {}
    for row in rows:
        if "rate" in row and ("seconds" in row) == sustained:
            found[row["quantity"]] = max(found.get(row["quantity"], 0.0), row["rate"])
    return found


def keep(path: Path, sheets: Path = SHEETS) -> Path:
    """Writes the best rates of a result to its device's sheet, and returns the sheet's path. Raises InputFileError if
    the file is no such result. Raises ConfigError if the device has no sheet, or if the result lacks a rate that the
    maker states: floors would lack it too."""
    document = result_of(path, "ceilings")
    found, device = best(document["rows"]), document["device"]
    of = next((each for each in device_sheets(sheets).items() if each[1].device_kind == device), None)
    if of is None:
        raise ConfigError(f"{path.name}: no data sheet of {sheets.name}/ has the device_kind {device!r}")
    name, own = of
    if lacking := {"bandwidth", "attention", "bf16", *own.dense_tflops} - found.keys():
        raise ConfigError(f"{path.name}: has no rate of {', '.join(sorted(lacking))}")
    measured = {
        "bandwidth_gb_s": round(found["bandwidth"] / 1e9),
        "dense_tflops": {kind: round(found[kind] / 1e12, 1) for kind in KINDS if kind in found},
        "attention_tflops": round(found["attention"] / 1e12, 1),
        "source": f"experiments/results/{path.name}",
    }
    sheet = sheets / f"{name}.json"
    given = json.loads(sheet.read_text(encoding="utf-8")) | {"measured": measured}
    if held := best(document["rows"], sustained=True):
        given["sustained"] = {
            "bandwidth_gb_s": round(held["bandwidth"] / 1e9),
            "dense_tflops": {kind: round(held[kind] / 1e12, 1) for kind in KINDS if kind in held},
            "source": measured["source"],
        }
    sheet.write_text(json.dumps(given, indent=2) + "\n", encoding="utf-8")
    return sheet


def _row_sums(table: jax.Array) -> jax.Array:
    return table.sum(1, dtype=jnp.float32)


def _nbytes(shape: jax.ShapeDtypeStruct) -> int:
    return math.prod(shape.shape) * shape.dtype.itemsize


def _run(subject: Subject, compiled: Future[Any]) -> Callable[[], jax.Array]:
    keys = jax.random.split(jax.random.key(0), len(subject.operands))
    operands = [_random(key, shape.shape, shape.dtype) for key, shape in zip(keys, subject.operands)]
    return partial(compiled.result(), *operands)


@partial(jax.jit, static_argnums=(1, 2))
def _random(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Returns operands with random bits everywhere, as their contents affect power."""
    if dtype == jnp.int8:
        return jax.random.randint(key, shape, -127, 128, jnp.int8)
    if dtype == jnp.float8_e4m3fn:  # magnitudes below 2, so that none is NaN
        return jax.lax.bitcast_convert_type(jax.random.bits(key, shape, jnp.uint8) & 0xBF, dtype)
    return jax.random.normal(key, shape, dtype)


@refusing
def main(argv: list[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.add_argument("--threads", type=positive, default=16, help="number of threads that compile")
    held = "seconds for which each quantity's best function runs without a pause"
    parser.add_argument("--sustained", type=positive_number, default=6.0, metavar="SECONDS", help=held)
    parser.add_argument(
        "--keep", type=Path, metavar="FILE", help="store a result's best rates in configs/devices, and measure nothing"
    )
    add_result_options(parser)
    args = parser.parse_args(argv)
    if args.keep:
        print(f"{args.keep.name} -> {keep(args.keep)}")
        return 0
    claim_memory()
    rows = measure(list(subjects(Sizes())), args.threads, args.sustained)
    return record(args, "ceilings", command_line("ceilings", argv), rows)


if __name__ == "__main__":
    sys.exit(main())
