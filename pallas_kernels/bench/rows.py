"""Measures norm_quant and silu_mul_quant: one case's time on each backend, and the bars. Each figure is over several
layers in one jit. Each has inputs of its own, so that large ones are in no cache. Layers run in turn, each behind a
barrier that keeps XLA from merging them. They are compiled ahead, many at once."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from pallas_kernels.bench.bars import bar
from pallas_kernels.bench.measure import copy_bandwidth, device_us

COMPILERS = 12  # threads


class Case(Protocol):
    """Describes the properties that cases of both operations have."""

    @property
    def dtype(self) -> str: ...
    @property
    def labels(self) -> dict[str, Any]: ...
    @property
    def moved_bytes(self) -> int: ...


def prepare(case: Case, shapes: Sequence[tuple[int, ...]], run: Callable[..., Any]) -> Callable[[], float]:
    """Compiles run(*inputs) for standard normal inputs of `shapes`. Returns a function that measures its
    microseconds."""
    layers = max(4, min(16, -(-(256 << 20) // case.moved_bytes)))
    dtype = jnp.dtype(case.dtype)

    def step(inputs: list[list[jax.Array]]) -> list[Any]:
        layer = jax.jit(run)
        outs: list[Any] = []
        for arrays in inputs:
            arrays, *_ = jax.lax.optimization_barrier((arrays, *outs[-1:]))
            outs.append(layer(*arrays))
        return outs

    types = [[jax.ShapeDtypeStruct(shape, dtype) for shape in shapes] for _ in range(layers)]
    compiled = jax.jit(step).lower(types).compile()

    def measure() -> float:
        keys = iter(jax.random.split(jax.random.key(0), layers * len(shapes)))
        inputs = [[jax.random.normal(next(keys), shape, dtype) for shape in shapes] for _ in range(layers)]
        return device_us(lambda: compiled(inputs), repeats=3) / layers

    return measure


def table[C: Case](
    operation: str, cases: Iterable[C], peers: Sequence[str], ready: Callable[[C, str], Callable[[], float]]
) -> Iterator[dict[str, Any]]:
    """Yields one row a case and peer, which `ready` prepares to be measured; the run's ceiling first."""
    ceiling = copy_bandwidth()
    yield {"kernel": "copy", "gb_s": round(ceiling / 1e9)}
    with ThreadPoolExecutor(COMPILERS) as pool:
        pairs = [(case, peer) for case in cases for peer in peers]
        for (case, peer), measure in zip(pairs, pool.map(lambda pair: ready(*pair), pairs)):
            us, moved = measure(), case.moved_bytes
            yield {
                "kernel": operation, "peer": peer, **case.labels, "dtype": case.dtype, "us": round(us, 2),
                "gb_s": round(moved / us / 1e3), "fraction": round(moved / us * 1e6 / ceiling, 3),
            }  # fmt: skip


def bars(rows: list[dict[str, Any]], letter: str, single: dict[int, float]) -> Iterator[dict[str, Any]]:
    """Yields the bars of the peer "mosaic"; `letter` is that of a row's width. One row of the widths in `single` has a
    bar in microseconds, 8192 rows a share of the copy rate. XLA's time is a bar everywhere."""

    def name(row: dict[str, Any]) -> str:
        residual = {True: " with residual", False: "", None: ""}[row.get("residual")]
        return f"T={row['T']} {letter}={row[letter]} {row['kind']}{residual}"

    measured = [row for row in rows if "us" in row]
    xla = {name(row): row["us"] for row in measured if row["peer"] == "xla"}
    for row in (row for row in measured if row["peer"] == "mosaic"):
        if row["T"] == 1 and row[letter] in single:
            yield bar(name(row), row["us"], "us", single[row[letter]], most=True)
        if row["T"] == 8192:
            yield bar(name(row), row["fraction"], "fraction", 0.8)
        if name(row) in xla:
            yield bar(f"{name(row)}: XLA", row["us"], "us", xla[name(row)], most=True)
