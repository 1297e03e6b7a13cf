"""Times decode attention for claims. One jit has several layers, whose pages exceed all caches. All is compiled
first."""

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from experiments.claims.claim import microseconds
from pallas_kernels.decode_attention import bench_runs
from pallas_kernels.decode_attention.bench_runs import Run, moved_bytes
from pallas_kernels.decode_attention.bench_runs import cudnn as contiguous
from pallas_kernels.decode_attention.cases import Case

__all__ = ["Run", "compiled", "contiguous", "moved_bytes", "paged", "size"]


@dataclass(frozen=True)
class Compiled(Run):
    """A case with its compiled `attend`."""

    def timed(self) -> tuple[float, jax.Array]:
        """Returns the microseconds of one layer, and the last result."""
        arguments = self.make(bench_runs.random_key())
        return microseconds(partial(self.attend, *arguments)) / self.layers, self.attend(*arguments)


def size(case: Case) -> dict[str, Any]:
    """Returns the fields of a row that describe a case."""
    lengths, heads = case.lengths, case.heads
    return {"R": len(lengths), "length": lengths[0], "H": heads[0], "K": heads[1], "D": case.head_dim}


def paged(case: Case, dequantize: int = 1) -> Run:
    """Returns a run of the Mosaic kernel over shuffled pages, with one work list."""
    return bench_runs.paged(case, "mosaic", dequantize=dequantize)


def compiled(runs: Sequence[Run], free: Callable[[], Any] = lambda: None) -> list[Compiled]:
    """Compiles all runs before anything is timed, as that takes most of the time. `free` returns once the device is
    free, since compiling may run kernels there. Tracing before that is the host's work alone."""

    def note(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    shapes = [jax.eval_shape(run.make, bench_runs.random_key()) for run in runs]
    lowered = [jax.jit(run.attend).lower(*arguments) for run, arguments in zip(runs, shapes)]
    note(f"traced {len(runs)} runs of decode attention")
    free()
    with ThreadPoolExecutor(8) as pool:
        attends = list(pool.map(lambda each: each.compile(), lowered))
    note("compiled them")
    return [Compiled(run.make, attend, run.layers) for run, attend in zip(runs, attends)]
