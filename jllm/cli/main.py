"""Runs `jllm generate`: prompts from the command line, standard input or a file go through one engine."""

import contextlib
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from jllm.cli.arguments import ENGINE_FLAGS, parse_args, sampling_params
from jllm.cli.display import Speed, write_stdout
from jllm.cli.generation_config import warn_of_ignored
from jllm.cli.interrupt import Interrupt, catch_interrupts
from jllm.cli.jsonl import Done, Job, nth_seed, read_jobs, read_results
from jllm.cli.process import (
    compile_cache,
    compiled,
    hooks_of,
    make_engine,
    note,
    open_model,
    open_streams,
    run_command,
)
from jllm.cli.run import drive, made_with, model_folder, output_file, run_identity, run_queue
from jllm.engine.request import SamplingParams
from jllm.errors import InputFileError, JllmError, OutputError, RequestError

if TYPE_CHECKING:
    import numpy as np

    from jllm.api import Prompt
    from jllm.distributed.replicas import Replicas
    from jllm.engine.engine import Engine
    from jllm.engine.inputs import Inputs
    from jllm.files.tokenizer import Tokenizer

    type Request = tuple[Prompt, SamplingParams, Inputs | None]

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
    """Runs the command. `closed` names the standard streams that were closed before it started."""
    if "stdout" in closed and (args.output is None or args.json):
        raise OutputError("standard output is closed; give --input and --output, or a place to print to")
    return _run(args, started, interrupt)


def _run(args: Namespace, started: float, interrupt: Interrupt) -> int:
    if args.version:
        return _print_version()
    jobs = _jobs(args, sampling_params(args))
    with output_file(args, interrupt) as file:
        model = model_folder(args)
        warn_of_ignored(model, sampling_params(args))
        if args.json or file is not None:
            run, brought = run_identity(model, args), _inputs_identity(args.inputs, jobs)
            jobs = [replace(job, run=run | brought.get(job.given.get("inputs"), {})) for job in jobs]
        done = Done({}, 0) if file is None else read_results(args.output, jobs)
        todo = done.missing(jobs)
        if not todo:
            all_jobs = "the prompt was" if len(jobs) == 1 else f"all {len(jobs)} prompts were"
            note(Speed(started).line(f"{all_jobs} done before"))
            return 0
        engine, requests, slots = _prepare(args, model, todo)
        from jllm.cli.sinks import Lines, Screen

        speed = Speed(started, compiled(engine))
        interrupt.deferred = True  # results exist from here on
        sink = Screen(args, jobs) if args.input is None else Lines(args, todo, done, len(jobs), speed, file)
        queue = ((job, *request) for job, request in zip(todo, requests))
        events = run_queue(engine, queue, 2 * slots, interrupt)
        return drive(events, sink, speed, interrupt, engine)


# What to run


def _jobs(args: Namespace, base: SamplingParams) -> list[Job]:
    """Returns all requests. It finds most mistakes without loading a model."""
    asked = made_with(args)
    if args.input is not None:
        return read_jobs(args.input, base, asked, args.max_new_tokens is None)
    prompts = args.prompts or args.prompt_ids or [_stdin_prompt()]
    jobs = []
    for i, prompt in enumerate(prompts):
        sampling = replace(base, seed=nth_seed(base.seed, i))
        where = "" if len(prompts) == 1 else f"prompt {i + 1}"
        jobs.append(Job(i, {"prompt": prompt}, sampling, where, asked, open_ended=args.max_new_tokens is None))
    return jobs


def _inputs_identity(folder: Path | None, jobs: Sequence[Job]) -> dict[object, dict[str, str]]:
    """Returns by name the identity of the arrays that jobs bring."""
    from jllm.files.run_identity import of_inputs

    names = {str(job.given["inputs"]) for job in jobs if "inputs" in job.given}
    return {} if folder is None else {name: {"inputs": of_inputs(folder, name)} for name in names}


def _stdin_prompt() -> str:
    if sys.stdin is None or sys.stdin.isatty():
        raise RequestError("no prompt: give one as an argument or on standard input (--help shows examples)")
    try:
        text = sys.stdin.read()
    except UnicodeDecodeError as error:
        raise InputFileError(f"standard input is not UTF-8 text: {error}") from None
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")  # as in a text file
    text = text.removesuffix("\n")  # echo adds it
    if not text:
        raise RequestError("no prompt: standard input is empty, and no argument gives one (--help shows examples)")
    return text


def _prepare(args: Namespace, path: Path, jobs: Sequence[Job]) -> "tuple[Engine | Replicas, list[Request], int]":
    """Returns an engine with compiled steps, the requests to submit, and its slots. All requests are checked; nothing
    has run."""
    cache = compile_cache(args)
    from jllm.engine.checks import fitted

    model = open_model(path, args)
    prompts = []
    for job in jobs:
        with _named(job):
            prompts.append(prompt_of(job, model.tokenizer, args.chat))
    options = _engine_options(args, jobs, prompts)
    engine = make_engine(model, path, args, **options, **hooks_of(args), executables=cache)
    requests: list[Request] = []
    for job, prompt in zip(jobs, prompts):
        sampling = job.sampling
        if job.open_ended:
            sampling = fitted(sampling, len(prompt), engine.most_tokens)
        with _named(job):
            engine.check(prompt, sampling)
            inputs = engine.check_inputs(_arrays_of(job, args.inputs))
        requests.append((prompt, sampling, inputs))
    engine.compile_ahead(sampling for _, sampling, _ in requests)
    return engine, requests, engine.slots


def _arrays_of(job: Job, folder: Path | None) -> "Mapping[str, np.ndarray] | None":
    """Returns the arrays that a line names, as their file has them."""
    name = job.given.get("inputs")
    if name is None:
        return None
    if folder is None:
        raise InputFileError("inputs are names of files in a folder: give it as --inputs DIR")
    from jllm.files.input_files import read_input_file

    return read_input_file(folder, name)


def prompt_of(job: Job, tokenizer: "Tokenizer | None", chat: bool) -> "Prompt":
    """Returns the prompt to submit: token ids if possible, else a prompt that the engine will refuse with a reason."""
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


def _engine_options(args: Namespace, jobs: Sequence[Job], prompts: "Sequence[Prompt]") -> dict[str, object]:
    """Returns the engine's options: the flags, and sizes that suit the run."""
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
