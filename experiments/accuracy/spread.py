"""Runs the jobs of a sweep on the workers of a Ray cluster. Each worker loads the model once, on its own GPU."""

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from jllm.errors import JllmError, RemoteError
from jllm.serve.batch_ray import called, cluster, mapped, worker_count

Make = Callable[[], list[Any]]  # makes jobs (quant_accuracy.Job) of a model that it loads


@dataclass(frozen=True)
class Workers:
    """The workers of one cluster."""

    ray: Any
    actors: int
    gpus: int  # per worker
    make: Make

    def jobs(self) -> list[Any]:
        """Returns the jobs. Workers start when the first job is read, and compute rows in the order of reading."""
        named = called(self.ray, _named, self.make, gpus=self.gpus)
        found = _Rows(self)
        jobs = [replace(job, make=partial(found.of, i)) for i, job in enumerate(named)]
        found.count = len(jobs)
        return jobs


class _Rows:
    """The rows of jobs. Reading the first one starts all later jobs at once."""

    def __init__(self, workers: Workers):
        self._workers, self.count = workers, 0
        self._there: dict[int, list[Any]] = {}
        self._coming: Iterator[tuple[int, list[Any]]] | None = None

    def of(self, job: int) -> Iterable[Any]:
        if self._coming is None:
            self._coming = self._run(range(job, self.count))
        while job not in self._there:
            i, rows = next(self._coming)
            self._there[i] = rows
        return self._there.pop(job)

    def _run(self, jobs: Iterable[int]) -> Iterator[tuple[int, list[Any]]]:
        w = self._workers
        items = [{"job": i} for i in jobs]
        for found in mapped(w.ray, items, Worker, (w.make,), min(w.actors, len(items)), w.gpus):
            if found["error"]:
                raise RemoteError(found["error"])
            yield found["job"], json.loads(found["rows"])


class Worker:
    """A worker with the interface of Ray Data. It takes job numbers, and returns their rows as JSON."""

    def __init__(self, make: Make):
        self._jobs: list[Any] | str
        try:
            self._jobs = make()
        except JllmError as error:
            self._jobs = f"worker {os.getpid()}: {error}"

    def __call__(self, table: Any) -> Any:
        import pyarrow

        found = []
        for i in table["job"].to_pylist():
            rows, error = [], self._jobs if isinstance(self._jobs, str) else ""
            if not isinstance(self._jobs, str):
                try:
                    rows = list(self._jobs[i].make())
                except JllmError as failure:
                    error = str(failure)
            found.append({"job": i, "rows": json.dumps(rows), "error": error})
        return pyarrow.Table.from_pylist(found)


def _named(make: Make) -> list[Any]:
    """Returns the jobs without their data."""
    return [replace(job, make=_nothing) for job in make()]


def _nothing() -> list[Any]:
    return []


@contextlib.contextmanager
def workers(address: str, actors: int | None, make: Make) -> Iterator[Workers]:
    """Yields the workers of the cluster at an address. This process takes no memory on its own device, which it asks
    only for a name."""
    with cluster(address, actors) as ray:
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        count, gpus = worker_count(ray, actors, 1)
        yield Workers(ray, count, gpus, make)
