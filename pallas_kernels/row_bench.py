"""What the benchmarks of norm_quant and silu_mul_quant share: one case's time on each backend, and the bars.

Each figure is over several layers with inputs of their own in one jit, so that large inputs are in no cache; layers run
in turn, each behind a barrier that keeps XLA from merging them.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from pallas_kernels.measure import copy_bandwidth, device_us

BACKENDS = ("mosaic", "xla")


class Case(Protocol):
    """What a case of either operation has."""

    @property
    def rows(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def kind(self) -> str | None: ...
    @property
    def moved_bytes(self) -> int: ...


def measure(case: Case, shapes: Sequence[tuple[int, ...]], run: Callable[..., Any]) -> float:
    """Microseconds of run(*inputs), where inputs are standard normal arrays of `shapes`."""
    layers = max(4, min(16, -(-(256 << 20) // case.moved_bytes)))
    keys = iter(jax.random.split(jax.random.key(0), layers * len(shapes)))
    inputs = [[jax.random.normal(next(keys), shape, jnp.dtype(case.dtype)) for shape in shapes] for _ in range(layers)]

    def step(inputs: list[list[jax.Array]]) -> list[Any]:
        layer = jax.jit(run)
        outs: list[Any] = []
        for arrays in inputs:
            arrays, *_ = jax.lax.optimization_barrier((arrays, *outs[-1:]))
            outs.append(layer(*arrays))
        return outs

    compiled = jax.jit(step)
    return device_us(lambda: compiled(inputs)) / layers


def table[C: Case](
    operation: str, letter: str, cases: Iterable[C], time: Callable[[C, str], float]
) -> Iterator[dict[str, Any]]:
    """One row a case and backend, whose microseconds `time` measures; the run's ceiling first. `letter` is that of a
    row's width."""
    ceiling = copy_bandwidth()
    yield {"kernel": "copy", "gb_s": round(ceiling / 1e9)}
    for case in cases:
        for backend in BACKENDS:
            us, moved = time(case, backend), case.moved_bytes
            yield {
                "kernel": operation, "peer": backend, "T": case.rows, letter: case.width, "dtype": case.dtype,
                "kind": case.kind or "none", "us": round(us, 2), "gb_s": round(moved / us / 1e3),
                "fraction": round(moved / us * 1e6 / ceiling, 3),
            }  # fmt: skip


def bars(
    rows: list[dict[str, Any]],
    letter: str,
    single: dict[int, float],
    chosen: Callable[[dict[str, Any]], str],
) -> Iterator[dict[str, Any]]:
    """For one row of the widths in `single`, microseconds; for 8192 rows, 80 % of the copy rate; and at every size the
    backend that `chosen` names is no more than 5 % slower than the other."""
    times = {(row["T"], row[letter], row["kind"], row["peer"]): row for row in rows if "us" in row}
    for (count, width, kind, peer), row in times.items():
        name = f"T={count} {letter}={width} {kind}"
        if peer == "mosaic" and count == 1 and width in single:
            yield {
                "name": name,
                "value": row["us"],
                "unit": "us",
                "bar": single[width],
                "met": row["us"] <= single[width],
            }
        if peer == "mosaic" and count == 8192:
            yield {
                "name": name,
                "value": row["fraction"],
                "unit": "fraction",
                "bar": 0.8,
                "met": row["fraction"] >= 0.8,
            }
        if peer == chosen(row):
            best = min(times[count, width, kind, backend]["us"] for backend in BACKENDS)
            met = row["us"] <= 1.05 * best
            yield {
                "name": f"default for {name}",
                "value": row["us"],
                "unit": "us",
                "bar": round(1.05 * best, 2),
                "met": met,
            }
