"""`jllm batch`: answers a file of requests in OpenAI's batch format, as the server would, without one; or rows of a
file by many workers."""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from jllm.cli.arguments import ENGINE_FLAGS, Parser, add_engine, add_numbers, add_replicas, check_drafts
from jllm.cli.display import Speed
from jllm.cli.generation_config import warn_of_ignored
from jllm.cli.interrupt import Interrupt, catch_interrupts
from jllm.cli.jsonl import NAMES
from jllm.cli.process import compile_cache, compiled, load_model, make_engine, note, open_streams, run_command
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

MOST_SAMPLES = 4096  # of one request
DESCRIPTION = """\
Answer a file of requests in OpenAI's batch format, as jllm.serve would, through one engine; with --workers such
requests, or rows with prompts, by an engine a GPU of a Ray cluster."""

EPILOG = """\
examples:
  python -m jllm.serve.batch --input requests.jsonl --output answers.jsonl
  python -m jllm.serve.batch --model ~/models/Llama-3.2-1B-Instruct --input requests.jsonl --output answers.jsonl
  python -m jllm.serve.batch --input prompts.parquet --output folder --workers ray://head:10001

input file: each line is {"custom_id": TEXT, "method": "POST", "url": "/v1/completions" or "/v1/chat/completions",
  "body": {...}}, with a custom_id of its own and a body as the server takes it, but for "stream". A line that is
  no such object is an error, and is reported with its number before anything runs.

output file: one line a request, {"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error": null},
  written as it is done. A request that is wrong is answered with its status and error, and the others run. Running
  the same command again resumes: what was answered is kept, errors too. Answers of other requests, models, numbers,
  devices or versions are not mixed, and a second command that writes to the file is refused: errors.

order: requests of a lower "priority" first, others as they stand in the file.

workers: --workers local starts a Ray cluster on this machine, another value is the address of one. The input may
  also have rows as jllm.generate takes them, {"prompt" or "messages", perhaps "id", perhaps sampling parameters}, as
  JSON lines or the columns of a .parquet file. --output is a folder that all workers see: each shard of rows appears
  there whole, as part-NAME.jsonl, a line an answer, or a result as jllm.generate writes it, with its "row". A worker
  that is lost loses the shards in its hands, which others do again; none is there twice. The same command resumes: rows
  that are there are not done again. A row that is wrong gets a line with its "error".

exit status: 0, also where requests were wrong; 2 after an error; 130 after Ctrl-C, with what was finished kept."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns its exit status."""
    started = time.perf_counter()
    with catch_interrupts() as interrupt, open_streams():
        args = parse_args(argv)
        return run_command(lambda: _run(args, started, interrupt))


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line; ends the process with status 2 and one line for a wrong one."""
    parser = Parser("jllm.serve.batch", EPILOG, usage="%(prog)s [options]", description=DESCRIPTION)
    what = parser.add_argument_group("what to run")
    takes = "requests, one a line (see below); - is standard input"
    what.add_argument("--input", type=Path, metavar="F.jsonl", help=takes)
    what.add_argument("--output", type=Path, metavar="F.jsonl|DIR", help="write answers there, or resume it")
    add_served_model(what)
    workers = parser.add_argument_group("workers (need the extra `ray`)")
    where = "spread the rows over a Ray cluster: its address, or local for one on this machine"
    workers.add_argument("--workers", metavar="ADDRESS", help=where)
    workers.add_argument("--actors", type=int, metavar="N", help="engines (default: one a GPU; without any, a CPU)")
    workers.add_argument("--shard-rows", type=int, metavar="N", help="rows of a shard (default: 256)")
    add_numbers(parser.add_argument_group("numbers"))
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
    """Returns what is wrong with the flags of workers, if anything."""
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
        interrupt.deferred = True  # from here on there is something to keep
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
    """Returns an engine with its steps compiled, what requests ask for, and what is wrong with the others."""
    cache = compile_cache(args)
    from jllm.engine.checks import check_request, token_ids
    from jllm.engine.one_run import options_for_run
    from jllm.serve.batch_file import parse
    from jllm.serve.requests import Served

    model = load_model(folder, args)

    def check(prompt: "Prompt", sampling: SamplingParams) -> list[int]:
        ids = token_ids(prompt, model.tokenizer)
        check_request(ids, sampling, model.config, model.tokenizer is not None)
        return ids

    name, context, parser = served_name(args), model.config.context, args.tool_call_parser
    served = Served(name, model.tokenizer, context, MOST_SAMPLES, check, parser)
    parsed, wrong = _try(lambda task: parse(task, served), todo)
    requests = [(len(ids), one.sampling) for one in parsed.values() for ids in one.prompts]
    options = options_for_run(requests, {name: getattr(args, name) for name in ENGINE_FLAGS})
    engine = make_engine(model, args.replicas, **options, executables=cache)

    def fitting(id: str) -> "Wanted":
        try:
            for request in parsed[id].requests(engine.most_tokens):
                engine.check(*request)
        except JllmError:
            parse(
                todo[id], replace(served, context=engine.most_tokens, check=engine.check)
            )  # says of which field it is
            raise
        return parsed[id]

    wanted, too_large = _try(fitting, {id: id for id in parsed})
    if wanted:
        engine.compile_ahead(one.sampling for one in wanted.values())
    return engine, served, wanted, wrong | too_large


def _try[A, B](function: Callable[[A], B], some: Mapping[str, A]) -> tuple[dict[str, B], dict[str, HttpError]]:
    """Returns what it makes of each, and the errors of the others."""
    made, wrong = {}, {}
    for id, one in some.items():
        try:
            made[id] = function(one)
        except JllmError as error:
            wrong[id] = http_error(error)
    return made, wrong


def _queue(wanted: "Mapping[str, Wanted]", most: int) -> "Iterator[tuple[PromptKey, list[int], SamplingParams]]":
    """Yields what to submit, the most urgent first."""
    for id, one in sorted(wanted.items(), key=lambda item: item[1].priority):
        for place, request in enumerate(one.requests(most)):
            yield (id, place), *request


if __name__ == "__main__":
    sys.exit(main())
