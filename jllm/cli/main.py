"""The command that people run: prompts from the command line, standard input or a file, through one engine."""

import contextlib
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jllm.cli.arguments import ENGINE_FLAGS, parse_args, sampling_params
from jllm.cli.display import Speed, write_stdout
from jllm.cli.generation_config import warn_of_ignored
from jllm.cli.interrupt import INTERRUPTED, Interrupt, catch_interrupts
from jllm.cli.jsonl import Done, Job, ResultsFile, nth_seed, read_jobs, read_results
from jllm.cli.process import compile_cache, compiled, drafted, make_engine, note, open_streams, run_command
from jllm.engine.request import SamplingParams
from jllm.errors import InputFileError, JllmError, OutputError, RequestError

if TYPE_CHECKING:
    from jllm.api import Prompt
    from jllm.cli.sinks import Sink
    from jllm.engine.loop import Engine
    from jllm.engine.replicas import Replicas
    from jllm.engine.request import Event
    from jllm.tokenizer import Tokenizer

WITHOUT_TOKENIZER = (
    "put its tokenizer.json or tokenizer.model beside its weights, or give token ids: "
    '--prompt-ids "5 6 7", or lines {"prompt": [5, 6, 7]} of an --input file'
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns its exit status."""
    started = time.perf_counter()
    with catch_interrupts() as interrupt, open_streams() as closed:
        args = parse_args(argv)
        return run_command(lambda: _main(args, started, interrupt, closed))


def _main(args: Namespace, started: float, interrupt: Interrupt, closed: Sequence[str]) -> int:
    """`closed` names the standard streams that this process was started without."""
    if "stdout" in closed and (args.output is None or args.json):
        raise OutputError("standard output is closed; give --input and --output, or a place to print to")
    return _run(args, started, interrupt)


def _run(args: Namespace, started: float, interrupt: Interrupt) -> int:
    if args.version:
        return _print_version()
    jobs = _jobs(args, sampling_params(args))
    with _output(args, interrupt) as file:
        model = _find_model(args)
        warn_of_ignored(model, sampling_params(args))
        if args.json or file is not None:
            run = _run_identity(model, args)
            jobs = [replace(job, run=run) for job in jobs]
        done = Done({}, 0) if file is None else read_results(args.output, jobs)
        todo = done.missing(jobs)
        if not todo:
            note(Speed(started).line(f"all {len(jobs)} prompts were done before"))
            return 0
        engine, prompts, slots = _prepare(args, model, todo)
        from jllm.cli.sinks import Lines, Screen

        speed = Speed(started, compiled(engine))
        interrupt.deferred = True  # from here on there is something to keep
        sink = Screen(args, jobs) if args.input is None else Lines(args, todo, done, len(jobs), speed, file)
        events = _serve(engine, todo, prompts, 2 * slots, interrupt)
        return _drive(events, sink, speed, interrupt, lambda: drafted(engine))


@contextlib.contextmanager
def _output(args: Namespace, interrupt: Interrupt) -> Iterator[ResultsFile | None]:
    if args.output is None:
        yield None
        return
    with contextlib.closing(ResultsFile(args.output)) as file:
        interrupt.tidy = file.close
        yield file


def _drive(
    events: "Iterable[tuple[Job, Event]]",
    sink: "Sink",
    speed: Speed,
    interrupt: Interrupt,
    drafted: Callable[[], list[str]],
) -> int:
    """Runs the engine until nothing is left or Ctrl-C is pressed, and says how fast that was and what `drafted` has."""
    broken = 0
    try:
        for job, event in events:
            speed.count(event)
            sink.take(job, event)
            broken += event.completion is not None and event.completion.finish_reason == "error"
    except KeyboardInterrupt:  # the second Ctrl-C, or one that came where no handler of ours is
        interrupt.asked = True
    finally:
        sink.close()
    note(speed.line(*drafted(), *sink.notes(), *(["interrupted"] if interrupt.asked else [])))
    if broken:
        note(f"error: the logits of {broken} completions were not finite; another --dtype or --kv-cache may help")
    return INTERRUPTED if interrupt.asked else 2 if broken else 0


# What to run


def _jobs(args: Namespace, base: SamplingParams) -> list[Job]:
    """All requests. No model is needed to find most mistakes."""
    made_with = _made_with(args)
    if args.input is not None:
        return read_jobs(args.input, base, made_with)
    prompts = args.prompts or args.prompt_ids or [_stdin_prompt()]
    jobs = []
    for i, prompt in enumerate(prompts):
        sampling = replace(base, seed=nth_seed(base.seed, i))
        where = "" if len(prompts) == 1 else f"prompt {i + 1}"
        jobs.append(Job(i, {"prompt": prompt}, sampling, where, made_with))
    return jobs


def _made_with(args: Namespace) -> dict[str, Any]:
    """What decides results besides prompts and sampling parameters, as it was asked for."""
    made_with = {"model": "bundled" if args.model is None else args.model}
    numbers = {name: getattr(args, name) for name in ("dtype", "quantize", "kv_cache")}
    made_with |= {name: value for name, value in numbers.items() if value is not None}
    if args.acceptance == "rejection":
        made_with |= {name: getattr(args, name) for name in ("acceptance", "speculate", "drafts")}
    made_with |= {} if args.devices is None else {"devices": args.devices}  # sums are rounded in other places
    return made_with | ({"chat": True} if args.chat else {})


def _find_model(args: Namespace) -> Path:
    """The directory that is meant, downloaded where it has to be."""
    from jllm.checkpoint_files import find_model
    from jllm.pretrained import BUNDLED

    return find_model(BUNDLED if args.model is None else args.model)


def _run_identity(model: Path, args: Namespace) -> dict[str, str]:
    """What `made_with` is here and now."""
    from jllm.run_identity import of_machine, of_model, of_scheme

    scheme = {} if args.quantize is None else {"scheme": of_scheme(args.quantize)}
    return of_model(model) | scheme | of_machine()


def _stdin_prompt() -> str:
    if sys.stdin is None or sys.stdin.isatty():
        raise RequestError("no prompt: give one as an argument or on standard input (--help shows examples)")
    try:
        text = sys.stdin.read()
    except UnicodeDecodeError as error:
        raise InputFileError(f"standard input is not UTF-8 text: {error}") from None
    text = text.removesuffix("\n")  # the one that echo adds
    if not text:
        raise RequestError("no prompt: standard input is empty, and no argument gives one (--help shows examples)")
    return text


def _prepare(args: Namespace, path: Path, jobs: Sequence[Job]) -> "tuple[Engine | Replicas, list[Prompt], int]":
    """An engine with its steps compiled, what to submit to it, and its slots. All is checked, and nothing has run."""
    cache = compile_cache(args)
    from jllm.pretrained import load

    model = load(path, dtype=args.dtype, quantize=args.quantize, mesh=args.devices)
    prompts = []
    for job in jobs:
        with _named(job):
            prompts.append(_prompt(job, model.tokenizer, args.chat))
    options = _engine_options(args, jobs, prompts)
    engine = make_engine(model, args.replicas, **options, executables=cache)
    for job, prompt in zip(jobs, prompts):
        with _named(job):
            engine.check(prompt, job.sampling)
    engine.compile_ahead(job.sampling for job in jobs)
    return engine, prompts, engine.slots


def _serve(
    engine: "Engine | Replicas", jobs: Sequence[Job], prompts: "Sequence[Prompt]", ahead: int, interrupt: Interrupt
) -> "Iterator[tuple[Job, Event]]":
    """Runs everything, or up to the step in which Ctrl-C was pressed. The engine sees only `ahead` requests of a long
    queue: timings begin when it has them."""
    queue = zip(jobs, prompts)
    running: dict[int, Job] = {}
    unfinished: dict[int, int] = {}  # samples

    def feed(count: int) -> None:
        for job, prompt in islice(queue, count):
            id = engine.submit(prompt, job.sampling)
            running[id], unfinished[id] = job, job.sampling.n

    feed(ahead)
    while engine.has_work and not interrupt.asked:
        for event in engine.step():
            yield running[event.id], event
            unfinished[event.id] -= event.completion is not None
            if not unfinished[event.id]:
                del running[event.id], unfinished[event.id]
                feed(1)


def _prompt(job: Job, tokenizer: "Tokenizer | None", chat: bool) -> "Prompt":
    """What to submit: token ids where possible, else what the engine will refuse with a reason."""
    prompt, messages = job.given.get("prompt", ""), job.given.get("messages")
    chat = chat or messages is not None
    if not chat and not isinstance(prompt, str):
        return prompt
    if tokenizer is None:
        what = "a chat needs a tokenizer with a chat template" if chat else "a text prompt needs a tokenizer"
        raise RequestError(f"{what}, and this model has none: {WITHOUT_TOKENIZER}")
    if not chat:
        return tokenizer.encode(prompt) if prompt else prompt
    if messages is None:
        if not isinstance(prompt, str):
            raise RequestError("--chat needs text or messages, not token ids")
        messages = [{"role": "user", "content": prompt}]
    return tokenizer.encode(tokenizer.chat(messages), add_bos=False)


def _engine_options(args: Namespace, jobs: Sequence[Job], prompts: "Sequence[Prompt]") -> dict[str, Any]:
    """Flags, and sizes that suit the run."""
    from jllm.engine.one_run import options_for_run

    given = {name: getattr(args, name) for name in ENGINE_FLAGS}
    return options_for_run([(len(prompt), job.sampling) for job, prompt in zip(jobs, prompts)], given)


@contextlib.contextmanager
def _named(job: Job) -> Iterator[None]:
    try:
        yield
    except JllmError as error:
        if not job.where:
            raise
        raise type(error)(f"{job.where}: {error}") from None


def _print_version() -> int:
    from importlib.metadata import version

    write_stdout(f"jllm {version('jllm')}, jax {version('jax')}\n")
    return 0
