"""Runs `jllm batch`. It answers a file of requests in OpenAI's batch format without a server, or rows of a file with
many workers."""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from jllm.cli.arguments import ENGINE_FLAGS, START, Parser, add_engine, add_numbers, add_replicas, check_drafts
from jllm.cli.display import Speed
from jllm.cli.generation_config import warn_of_ignored
from jllm.cli.interrupt import Interrupt, catch_interrupts
from jllm.cli.jsonl import NAMES
from jllm.cli.process import compile_cache, compiled, make_engine, note, open_model, open_streams, run_command
from jllm.cli.run import drive, made_with, model_folder, output_file, run_identity, run_queue
from jllm.engine.request import SamplingParams
from jllm.errors import JllmError
from jllm.serve.arguments import add_served_model, served_name
from jllm.serve.errors import HttpError, http_error

if TYPE_CHECKING:
    from jllm.distributed.replicas import Replicas
    from jllm.engine.checks import Prompt
    from jllm.engine.engine import Engine
    from jllm.serve.batch_answers import PromptKey
    from jllm.serve.batch_file import Task
    from jllm.serve.requests import Served, Wanted

MOST_SAMPLES = 4096  # per request
DESCRIPTION = """\
Answer a file of requests in OpenAI's batch format, as jllm.serve would, with one engine. With --workers,
an engine per GPU of a Ray cluster answers such requests, or rows with prompts."""

EPILOG = """\
examples:
  python -m jllm.serve.batch --input requests.jsonl --output answers.jsonl
  python -m jllm.serve.batch --model ~/models/Llama-3.2-1B-Instruct --input requests.jsonl --output answers.jsonl
  python -m jllm.serve.batch --input prompts.parquet --output folder --workers ray://head:10001

input file: each line is {"custom_id": TEXT, "method": "POST", "url": "/v1/completions" or "/v1/chat/completions",
  "body": {...}}. Each custom_id is unique. The body is one that the server takes, without "stream". Any other line is
  an error, reported with its number before anything runs.

output file: one line per request, written when it ends: {"id", "custom_id", "response": {"status_code", "request_id",
  "body"}, "error": null}. A wrong request is answered with its status and error, and the others run. The same command
  resumes: answers in the file are kept, errors too. Answers of another input, model, dtype, scheme, device or version
  are an error. So is a second command that writes to the same file.

order: requests with a lower "priority" run first, others in the order of the file.

workers: --workers local starts a Ray cluster on this machine; any other value is a cluster's address. The input may
  also have jllm.generate's rows, {"prompt" or "messages", optional "id" and sampling parameters}, as JSON lines or as
  columns of a .parquet file. --output is a folder that all workers see. Each shard of rows appears there whole, as
  part-NAME.jsonl. A line is an answer, or a result of jllm.generate with its "row". If a worker is lost, others run
  its shards again; no row appears twice. The same command resumes: rows in the folder do not run again. A wrong row
  gets a line with its "error".

exit status: 0, even with wrong requests; 2 after an error; 130 after Ctrl-C, which keeps finished answers."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns its exit status."""
    started = time.perf_counter()
    with catch_interrupts() as interrupt, open_streams():
        args = parse_args(argv)
        return run_command(lambda: _run(args, started, interrupt))


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line. Ends the process with status 2 and one line if it is wrong."""
    parser = Parser("jllm.serve.batch", EPILOG + START, usage="%(prog)s [options]", description=DESCRIPTION)
    what = parser.add_argument_group("what to run")
    takes = "file of requests, one per line (see below); - is standard input"
    what.add_argument("--input", type=Path, metavar="F.jsonl", help=takes)
    what.add_argument("--output", type=Path, metavar="F.jsonl|DIR", help="file of the answers, new or to resume")
    add_served_model(what)
    workers = parser.add_argument_group("workers (need the extra `ray`)")
    where = "address of a Ray cluster that runs the rows; local starts one on this machine"
    workers.add_argument("--workers", metavar="ADDRESS", help=where)
    workers.add_argument("--actors", type=int, metavar="N", help="number of engines (default: one per GPU or CPU)")
    workers.add_argument("--shard-rows", type=int, metavar="N", help="rows per shard (default: 256)")
    add_numbers(parser.add_argument_group("precision and devices"))
    engine = parser.add_argument_group("engine")
    add_engine(engine)
    add_replicas(engine)
    other = parser.add_argument_group("other")
    other.add_argument("-h", "--help", action="help", help="show this text")
    args = parser.parse_args(argv)
    if args.input is None or args.output is None:
        parser.error("give --input FILE and --output FILE")
    if args.input.resolve() == args.output.resolve():
        parser.error("--input and --output are the same file")
    if problem := check_drafts(args) or _check_workers(args):
        parser.error(problem)
    return args


def _check_workers(args: argparse.Namespace) -> str | None:
    """Returns the error in the flags of workers, or None."""
    for name in ("actors", "shard_rows"):
        value = getattr(args, name)
        if value is not None and args.workers is None:
            return f"--{name.replace('_', '-')} needs --workers ADDRESS"
        if value is not None and value < 1:
            return f"--{name.replace('_', '-')} must be at least 1, not {value}"
    if args.workers is not None and args.replicas is not None:
        return "--workers has an engine in each worker: leave --replicas out"
    return None


def _run(args: argparse.Namespace, started: float, interrupt: Interrupt) -> int:
    if args.workers is not None:
        from jllm.serve.batch_ray import run_on_workers

        return run_on_workers(args, started)
    from jllm.serve.batch_file import read_answers, read_tasks

    tasks = read_tasks(args.input)
    with output_file(args, interrupt) as file:
        assert file is not None
        folder = model_folder(args)
        warn_of_ignored(folder)
        asked = {name: value for name, value in made_with(args).items() if name not in NAMES}
        run = asked | run_identity(folder, args)
        ids = [task.id(run) for task in tasks]
        done, size = read_answers(args.output, tasks, ids)
        todo = {id: task for id, task in zip(ids, tasks) if id not in done}
        if not todo:
            note(Speed(started).line(f"all {len(tasks)} requests were answered before"))
            return 0
        engine, served, wanted, wrong = _prepare(args, folder, todo)
        speed = Speed(started, compiled(engine))
        interrupt.deferred = True  # results exist from here on
        file.begin(size)
        from jllm.serve.batch_answers import Answers

        sink = Answers(file, todo, wanted, served, len(tasks))
        for id, error in wrong.items():
            sink.end(id, error.status, error.body())
        events = run_queue(engine, _queue(wanted, engine.most_tokens), 2 * engine.slots, interrupt)
        return drive(events, sink, speed, interrupt, engine)


def _prepare(
    args: argparse.Namespace, folder: Path, todo: "Mapping[str, Task]"
) -> "tuple[Engine | Replicas, Served, dict[str, Wanted], dict[str, HttpError]]":
    """Returns an engine that can begin, the valid requests, and the errors of all others."""
    cache = compile_cache(args)
    from jllm.engine.checks import check_request, token_ids
    from jllm.engine.one_run import options_for_run
    from jllm.serve.batch_file import parse
    from jllm.serve.requests import Served

    model = open_model(folder, args)

    def check(prompt: "Prompt", sampling: SamplingParams) -> list[int]:
        ids = token_ids(prompt, model.tokenizer)
        check_request(ids, sampling, model.config, model.tokenizer is not None)
        return ids

    name, context, parser = served_name(args), model.config.context, args.tool_call_parser
    served = Served(name, model.tokenizer, context, MOST_SAMPLES, check, parser, adapters=tuple(args.adapters or ()))
    parsed, wrong = _try(lambda task: parse(task, served), todo)
    requests = [(len(ids), one.sampling) for one in parsed.values() for ids in one.prompts]
    options = options_for_run(requests, {name: getattr(args, name) for name in ENGINE_FLAGS})
    engine = make_engine(model, folder, args, **options, executables=cache)

    def fitting(id: str) -> "Wanted":
        try:
            for request in parsed[id].requests(engine.most_tokens):
                engine.check(*request)
        except JllmError:
            parse(
                todo[id], replace(served, context=engine.most_tokens, check=engine.check)
            )  # reports the field that is too large
            raise
        return parsed[id]

    wanted, too_large = _try(fitting, {id: id for id in parsed})
    if wanted:
        engine.compile_ahead((one.sampling for one in wanted.values()), wait=False)
    return engine, served, wanted, wrong | too_large


def _try[A, B](function: Callable[[A], B], some: Mapping[str, A]) -> tuple[dict[str, B], dict[str, HttpError]]:
    """Returns the function's result for each value, and the errors of the rest."""
    made, wrong = {}, {}
    for id, one in some.items():
        try:
            made[id] = function(one)
        except JllmError as error:
            wrong[id] = http_error(error)
    return made, wrong


def _queue(wanted: "Mapping[str, Wanted]", most: int) -> "Iterator[tuple[PromptKey, list[int], SamplingParams, None]]":
    """Yields the requests to submit, the most urgent first."""
    for id, one in sorted(wanted.items(), key=lambda item: item[1].priority):
        for place, request in enumerate(one.requests(most)):
            yield (id, place), *request, None


if __name__ == "__main__":
    sys.exit(main())
