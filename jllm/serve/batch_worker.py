"""Runs the shards of a batch job in a worker with its own engine. This module does not need Ray.

The worker imports JAX and loads the model when it is made. By then its process has been given its GPU.
"""

import os
import socket
import warnings
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jllm.cli.jsonl import Job, record, to_json
from jllm.engine.request import Event, SamplingParams
from jllm.errors import CheckpointError, JllmError, OutputError, RequestError
from jllm.files.run_identity import differing
from jllm.serve.batch_file import answer_line, parse
from jllm.serve.batch_rows import Row, Shard
from jllm.serve.errors import http_error

if TYPE_CHECKING:
    from jllm.engine.engine import Engine
    from jllm.serve.requests import Wanted

MOST_SAMPLES = 4096  # per request
Prompts = list[tuple[list[int], SamplingParams]]


def identify(args: Namespace) -> dict[str, str]:
    """Returns the identity of the model and its adapters, and the versions of packages. Raises CheckpointError if this
    machine lacks the model's files."""
    from jllm.cli.run import model_folder
    from jllm.files.run_identity import PACKAGES, of_adapters, of_model, of_scheme, version_of

    more = {} if args.quantize is None else {"scheme": of_scheme(args.quantize)}
    more |= {} if args.adapters is None else {"adapters": of_adapters(args.adapters)}
    return of_model(model_folder(args)) | more | {name: version_of(name) for name in PACKAGES}


class Worker:
    """Is a worker with one engine. It writes shards into `folder`, and `run` into each result."""

    def __init__(self, args: Namespace, run: dict[str, str], folder: Path):
        from jllm.cli.process import compile_cache, load_model
        from jllm.cli.run import model_folder
        from jllm.serve.arguments import served_name
        from jllm.serve.requests import Served

        if odd := differing(run, identify(args)):
            raise CheckpointError(f"{model_folder(args)} has another {odd[0]} here than where the job was started")
        self._args, self._run, self._folder = args, run, folder
        self._cache = compile_cache(args)  # shared by all workers of this machine, or of the cluster
        model = load_model(model_folder(args), args)
        self._model = model
        self._engine: Engine | None = None
        name, context, parser = served_name(args), model.config.context, args.tool_call_parser
        self._served = Served(
            name, model.tokenizer, context, MOST_SAMPLES, self._check, parser, adapters=tuple(args.adapters or ())
        )

    def do(self, shard: Shard) -> int:
        """Writes a shard's file, whole and under its own name. Returns how many of its rows were wrong. Raises
        OutputError if it cannot be written."""
        lines, wrong = self._lines(shard.rows)
        path = self._folder / shard.name
        own = path.with_suffix(f".{socket.gethostname()}-{os.getpid()}.partial")
        try:
            own.write_bytes("".join(lines).encode("utf-8", "backslashreplace"))
            os.replace(own, path)
        except OSError as error:
            own.unlink(missing_ok=True)
            raise OutputError(f"cannot write {path}: {error.strerror}") from None
        return wrong

    def _lines(self, rows: Iterable[Row]) -> tuple[list[str], int]:
        """Returns the lines of all rows, in order, and how many rows are wrong."""
        found: dict[str, list[str]] = {}
        ready: dict[str, tuple[Row, Prompts, Wanted | None]] = {}
        for row in rows:
            try:
                ready[row.id] = (row, *self._prepare(row))
            except JllmError as error:
                found[row.id] = [_error_line(row, error)]
        if not ready:  # no engine is made: its sizes should suit what runs
            return [line for row in rows for line in found[row.id]], len(found)
        from jllm.engine.checks import fitted

        engine = self._engine_for(ready.values())
        running: dict[int, tuple[Row, int]] = {}
        left: dict[str, int] = {}
        ends: dict[str, list[Event]] = {}
        for id, (row, prompts, wanted) in ready.items():
            open_ended = (
                row.asked.open_ended if isinstance(row.asked, Job) else wanted is not None and wanted.open_ended
            )
            if open_ended:
                prompts = [(ids, fitted(sampling, len(ids), engine.most_tokens)) for ids, sampling in prompts]
            try:
                for ids, sampling in prompts:
                    engine.check(ids, sampling)
            except JllmError as error:
                found[id] = [_error_line(row, error)]
                continue
            left[id] = sum(sampling.n for _, sampling in prompts)
            ends[id] = []
            priority = 0 if wanted is None else wanted.priority
            for place, (ids, sampling) in enumerate(prompts):
                running[engine.submit(ids, sampling, priority=priority)] = row, place
        wrong = len(found)
        for event in engine.run():
            if event.completion is None:
                continue
            row, place = running[event.id]
            ends[row.id].append(event._replace(id=place))
            left[row.id] -= 1
            if not left[row.id]:
                its = ends.pop(row.id)
                wrong += any(end.completion is not None and end.completion.finish_reason == "error" for end in its)
                found[row.id] = self._result_lines(row, its, ready[row.id][2])
        return [line for row in rows for line in found[row.id]], wrong

    def _prepare(self, row: Row) -> tuple[Prompts, "Wanted | None"]:
        """Returns the prompts to submit for a row, and the request of a task."""
        if isinstance(row.asked, Job):
            from jllm.cli.main import prompt_of

            job = row.asked
            if "inputs" in job.given:
                raise RequestError("inputs are not served here: jllm.generate takes them, with --inputs DIR")
            ids = self._check(prompt_of(job, self._model.tokenizer, False), job.sampling)
            return [(ids, self._seeded(job.sampling, row))], None
        wanted = parse(row.asked, self._served)
        return [(ids, self._seeded(wanted.sampling, row)) for ids in wanted.prompts], wanted

    def _seeded(self, sampling: SamplingParams, row: Row) -> SamplingParams:
        return sampling if sampling.seed is not None else replace(sampling, seed=row.seed)

    def _check(self, prompt: Any, sampling: SamplingParams) -> list[int]:
        from jllm.engine.checks import check_request, token_ids

        ids = token_ids(prompt, self._model.tokenizer)
        check_request(ids, sampling, self._model.config, self._model.tokenizer is not None)
        return ids

    def _engine_for(self, ready: Iterable[tuple[Row, Prompts, object]]) -> "Engine":
        """Returns the engine, whose sizes suit the first shard that runs."""
        from jllm.cli.arguments import ENGINE_FLAGS
        from jllm.engine.engine import Engine
        from jllm.engine.one_run import options_for_run

        if self._engine is None:
            prompts = [one for _, some, _ in ready for one in some]
            given = {name: getattr(self._args, name) for name in ENGINE_FLAGS}
            options = options_for_run([(len(ids), sampling) for ids, sampling in prompts], given)
            self._engine = Engine(self._model, **options, executables=self._cache)
            self._engine.compile_ahead((sampling for _, sampling in prompts), wait=False)
        return self._engine

    def _result_lines(self, row: Row, ends: list[Event], wanted: "Wanted | None") -> list[str]:
        if isinstance(row.asked, Job):
            job = replace(row.asked, run=self._run)
            samples = [(event.sample, event.completion) for event in sorted(ends) if event.completion is not None]
            return [to_json({"row": row.id, **record(job, sample, end)}) for sample, end in samples]
        from jllm.serve.responses import answer_to

        assert wanted is not None
        answer = answer_to(wanted, self._served)
        try:
            for event in ends:
                answer.add(event)
        except JllmError as error:
            return [_error_line(row, error)]
        return [answer_line(row.asked, row.id, 200, answer.whole())]


def _error_line(row: Row, error: JllmError) -> str:
    if isinstance(row.asked, Job):
        return to_json({"row": row.id, "index": row.asked.index, **row.asked.given, "error": str(error)})
    said = http_error(error)
    return answer_line(row.asked, row.id, said.status, said.body())


class ShardsOfTable:
    """Is a Worker with the interface of Ray Data. It takes tables of pickled shards, and returns a row per shard:
    counts, or the worker's error."""

    def __init__(self, args: Namespace, run: dict[str, str], folder: Path):
        self._worker: Worker | str
        warnings.simplefilter("ignore")  # they would be lost in a worker's log
        try:
            self._worker = Worker(args, run, folder)
        except JllmError as error:  # Ray would print pages, and restart the worker without end
            self._worker = str(error)

    def __call__(self, table: Any) -> Any:
        import pickle

        import pyarrow

        found = []
        for text in table["shard"].to_pylist():
            shard: Shard = pickle.loads(text)
            wrong, error = 0, self._worker if isinstance(self._worker, str) else ""
            if not isinstance(self._worker, str):
                try:
                    wrong = self._worker.do(shard)
                except JllmError as failure:
                    error = str(failure)
            where = f"worker {os.getpid()} on {socket.gethostname()}"
            found.append({"rows": len(shard.rows), "wrong": wrong, "error": error and f"{where}: {error}"})
        return pyarrow.Table.from_pylist(found)
