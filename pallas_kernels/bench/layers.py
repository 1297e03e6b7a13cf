"""Times matmuls as a model runs them: several layers in one jit, each with weights of its own. The weights are more
than caches hold. The profiler times the kernels alone."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from pallas_kernels.bench.command import Row
from pallas_kernels.bench.measure import copy_bandwidth, device_us_of_each

CACHES = 256 << 20  # bytes: more than the caches of any GPU hold


@dataclass(frozen=True)
class Subject:
    """Describes a timed function: run(x, w) for each of several w. moved_bytes and flops are of one layer."""

    labels: Row
    x: jax.ShapeDtypeStruct
    w: jax.ShapeDtypeStruct
    run: Callable[[jax.Array, jax.Array], jax.Array]
    moved_bytes: int
    flops: int


def layers_for(w: jax.ShapeDtypeStruct) -> int:
    """Returns a number of weights that caches cannot hold together."""
    return max(3, -(-CACHES // (w.size * w.dtype.itemsize)))


def table(subjects: Sequence[Subject]) -> Iterator[Row]:
    """Yields the rate of a copy, then one row a subject: "us", "tflop_s" and "gb_s"; or "error" of one that fails."""
    yield {"kernel": "copy", "gb_s": round(copy_bandwidth() / 1e9)}
    with ThreadPoolExecutor(8) as pool:  # before any is timed, since XLA tries its candidates on the device
        pending = [(subject, pool.submit(_compile, subject)) for subject in subjects]
    for w in dict.fromkeys(subject.w for subject in subjects):
        yield from _rows_of_weights(w, [(subject, future) for subject, future in pending if subject.w == w])


def _rows_of_weights(w: jax.ShapeDtypeStruct, pending: list[tuple[Subject, Future]]) -> Iterator[Row]:
    compiled: list[tuple[Subject, Any]] = []
    for subject, future in pending:
        try:
            compiled.append((subject, future.result()))
        except Exception as error:  # a failure costs its own row only
            yield subject.labels | _failure(error)
    try:
        times = _measure(w, compiled)
    except Exception as error:
        yield from (subject.labels | _failure(error) for subject, _ in compiled)
        return
    for (subject, _), us in zip(compiled, times):
        tflop_s, gb_s = subject.flops / us / 1e6, subject.moved_bytes / us / 1e3
        yield subject.labels | {"us": round(us, 2), "tflop_s": round(tflop_s), "gb_s": round(gb_s)}


def _compile(subject: Subject) -> Any:
    def layers(xs: Sequence[jax.Array], ws: Sequence[jax.Array]) -> list[jax.Array]:
        return [subject.run(x, w) for x, w in zip(xs, ws)]  # with a single x, XLA would join small products into one

    count = layers_for(subject.w)
    return jax.jit(layers).lower([subject.x] * count, [subject.w] * count).compile()


def _measure(w: jax.ShapeDtypeStruct, compiled: list[tuple[Subject, Any]]) -> list[float]:
    make = jax.jit(partial(jax.random.normal, dtype=w.dtype), static_argnums=1)
    first, *keys = jax.random.split(jax.random.key(0), layers_for(w) + 1)
    largest = max((subject.x for subject, _ in compiled), key=lambda x: x.shape[0], default=w)
    rows, ws = make(first, largest.shape), [make(key, w.shape) for key in keys]
    runs = [partial(run, [rows[: subject.x.shape[0]]] * len(ws), ws) for subject, run in compiled]
    return [us / len(ws) for us in device_us_of_each(runs)]


def _failure(error: Exception) -> Row:
    return {"error": str(error).splitlines()[0][:200] if str(error) else type(error).__name__}


def add_fractions(rows: list[Row]) -> list[Row]:
    """Adds to each measured row its share of the run's best bandwidth; returns the measured ones."""
    ceiling = max((row["gb_s"] for row in rows if "gb_s" in row), default=0)
    measured = [row for row in rows if "us" in row]
    for row in measured:
        row["fraction"] = round(row["gb_s"] / ceiling, 3)
    return measured
