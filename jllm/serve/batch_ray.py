"""Runs a batch job on Ray Data. This process spreads rows over workers and waits for their shards. It needs no JAX."""

import contextlib
import logging
import math
import os
import pickle
import time
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from jllm.cli.process import note
from jllm.errors import ConfigError, JllmError, OutputError, RemoteError, how_to_install
from jllm.serve.batch_rows import Shard, read_done, read_rows, shards_of, with_ids
from pallas_kernels.one_writer import only_writer

SHARD_ROWS = 256
TRIES = 3  # starts of a cluster, since a busy machine may time out
LOSSES = 5  # workers lost over one item before the job fails: the item may be what kills them


def run_on_workers(args: Namespace, started: float) -> int:
    """Computes the rows of --input that --output lacks. Returns the exit status."""
    made_with = _asked(args)
    asked = read_rows(args.input, made_with)
    folder = _folder(args.output)
    with only_writer(folder / ".lock") as alone:
        if not alone:
            raise OutputError(f"another process spreads work into {folder}: wait for its end")
        with cluster(args.workers, args.actors) as ray:
            from jllm.serve.batch_worker import ShardsOfTable, identify

            run = called(ray, identify, args)
            rows = with_ids(asked, run, made_with)
            done = read_done(folder, rows)
            shards = shards_of([row for row in rows if row.id not in done], args.shard_rows or SHARD_ROWS)
            if not shards:
                note(f"all {len(rows)} rows were done before")
                return 0
            wrong = _spread(ray, args, shards, ShardsOfTable, (args, run, folder))
        for partial in folder.glob("part-*.partial"):  # left by lost workers
            partial.unlink(missing_ok=True)
        missing = len(rows) - len(read_done(folder, rows))
    if missing:
        raise OutputError(f"{folder} lacks {missing} of {len(rows)} rows: do all workers see it? Run the command again")
    before = f", {len(done)} of them before" if done else ""
    errors = f", {wrong} with an error" if wrong else ""
    note(f"{len(rows)} rows done{before}{errors}, in {time.perf_counter() - started:.0f} s")
    return 0


def _asked(args: Namespace) -> dict[str, object]:
    from jllm.cli.jsonl import NAMES
    from jllm.cli.run import made_with

    return {name: value for name, value in made_with(args).items() if name not in NAMES}


def _folder(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"--output {path} cannot be a folder: {error.strerror}") from None
    return path.absolute()


def _spread(ray: ModuleType, args: Namespace, shards: Sequence[Shard], kind: type, given: tuple[object, ...]) -> int:
    """Runs a worker of this kind for each place in the cluster. Returns how many rows were wrong."""
    from tqdm import tqdm

    workers, gpus = worker_count(ray, args.actors, args.devices or 1)
    items = [{"shard": pickle.dumps(shard)} for shard in shards]
    wrong = 0
    with tqdm(total=sum(len(shard.rows) for shard in shards), unit=" rows", delay=2, disable=None) as bar:
        for found in mapped(ray, items, kind, given, min(workers, len(shards)), gpus):
            if found["error"]:
                raise RemoteError(found["error"])
            bar.update(found["rows"])
            wrong += found["wrong"]
    return wrong


@contextlib.contextmanager
def cluster(address: str, cpus: int | None = None) -> Iterator[ModuleType]:
    """Yields the module ray, connected to the cluster at an address. "local" starts one on this machine, with `cpus`
    CPUs (None: all). Usage statistics are off. Raises ConfigError if Ray is not installed, and RemoteError if the
    cluster is not reachable."""
    if find_spec("ray") is None:
        raise ConfigError(f"--workers needs Ray: {how_to_install('ray')}")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # workers without a GPU keep the variables
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # under `uv run` no worker would start
    import ray
    import ray.data

    logging.getLogger("ray").setLevel(logging.ERROR)
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # its errors fill pages, and are raised too
    own: dict[str, Any] = {"num_cpus": cpus, "include_dashboard": False} if address == "local" else {}
    for left in reversed(range(TRIES)):
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **own)
            break
        except Exception as error:  # Ray raises plain exceptions too
            ray.shutdown()
            if not (left and own and "timed out" in str(error)):  # Ray waits 30 s for its parts, even on a busy machine
                raise RemoteError(f"no Ray cluster at {address}: {_last_line(error)}") from None
    try:
        yield ray
    finally:
        ray.shutdown()


def worker_count(ray: ModuleType, wanted: int | None, gpus: int) -> tuple[int, int]:
    """Returns the number of workers and the GPUs of each. A worker has `gpus` GPUs, or 0 if the cluster has none. The
    number is `wanted`, or as many as fit. Raises ConfigError if they do not fit."""
    there = ray.cluster_resources()
    gpus = gpus if there.get("GPU", 0) else 0
    room = math.floor(there.get("GPU", 0) / gpus if gpus else there.get("CPU", 1))
    if room < 1 or (wanted is not None and wanted > room):
        what = f"{gpus} GPUs each" if gpus else "a CPU each"
        raise ConfigError(f"{wanted or 1} workers with {what} asked for, and the cluster has room for {room}")
    return wanted or room, gpus


def mapped(
    ray: ModuleType, items: list[dict[str, Any]], kind: type, given: tuple[object, ...], workers: int, gpus: int
) -> Iterator[dict[str, Any]]:
    """Yields the results of items as they arrive. `workers` workers of this kind run on `gpus` GPUs each, and take
    tables of one item. A lost worker is replaced, and its item runs again. Raises RemoteError if a worker fails without
    a message, or an item loses too many workers."""
    if ray.util.client.ray.is_connected():  # connected by ray://, where Ray Data does not work
        there = ray.remote(num_cpus=0)(Mapped).remote(items, kind, given, workers, gpus)
        try:
            while (found := ray.get(there.next.remote())) is not None:
                yield found
        except ray.exceptions.RayError as error:
            raise _failed(error) from None
        return
    ray.data.DataContext.get_current().enable_progress_bars = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # max_task_retries is deprecated but has no successor yet
        data = ray.data.from_items(items, override_num_blocks=len(items)).map_batches(
            kind, fn_constructor_args=given, concurrency=workers, batch_size=1, batch_format="pyarrow",
            num_gpus=gpus, num_cpus=0 if gpus else 1, max_task_retries=LOSSES - 1,
        )  # fmt: skip
    try:
        yield from data.iter_rows()
    except ray.exceptions.RayActorError:
        raise RemoteError(f"a worker was lost {LOSSES} times over one item: it may be what ends them") from None
    except ray.exceptions.RayError as error:
        raise _failed(error) from None


class Mapped:
    """Yields the results of `mapped` one at a time, in a process of the cluster."""

    def __init__(self, *given: Any):
        import ray
        import ray.data

        self._found = mapped(ray, *given)

    def next(self) -> dict[str, Any] | None:
        return next(self._found, None)


def called[T](ray: ModuleType, function: Callable[..., T], *given: object) -> T:
    """Returns the result of a function that runs in a worker without a GPU. Raises RemoteError if it fails."""
    try:
        return ray.get(ray.remote(num_cpus=0)(function).remote(*given))
    except ray.exceptions.RayError as error:
        raise _failed(error) from None


def _failed(error: BaseException) -> RemoteError:
    cause = getattr(error, "cause", None)
    if isinstance(cause, RemoteError):  # from the process that spread the work
        return cause
    return RemoteError(f"a worker failed: {cause if isinstance(cause, JllmError) else _last_line(error)}")


def _last_line(error: BaseException) -> str:
    """Returns the last line of an error. Ray's errors contain the worker's traceback."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__
