"""Runs many requests through one engine, from a command's flags to its last line."""

import contextlib
from argparse import Namespace
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from jllm.cli.display import Speed
from jllm.cli.interrupt import INTERRUPTED, Interrupt
from jllm.cli.jsonl import ResultsFile
from jllm.cli.process import drafted, leave_gpus_to_engines, note
from jllm.engine.request import SamplingParams
from jllm.errors import counted

if TYPE_CHECKING:
    from jllm.api import Prompt
    from jllm.cli.sinks import Sink
    from jllm.distributed.replicas import Replicas
    from jllm.engine.engine import Engine
    from jllm.engine.inputs import Inputs
    from jllm.engine.request import Event


def made_with(args: Namespace) -> dict[str, object]:
    """Returns the flags that decide results, beside prompts and sampling parameters."""
    asked = {"model": "bundled" if args.model is None else args.model}
    numbers = {name: getattr(args, name) for name in ("dtype", "quantize", "kv_cache")}
    for name in ("tool_call_parser", "hooks"):  # flags of some commands
        numbers[name] = getattr(args, name, None)
    asked |= {name: value for name, value in numbers.items() if value is not None}
    asked |= {} if args.eos_token_id is None else {"eos_token_id": args.eos_token_id}
    asked |= {} if args.adapters is None else {"adapters": {name: str(path) for name, path in args.adapters.items()}}
    for name in ("devices", "expert_parallel"):  # a sum over several devices rounds differently
        asked |= {} if getattr(args, name) is None else {name: getattr(args, name)}
    return asked | ({"chat": True} if getattr(args, "chat", False) else {})


def model_folder(args: Namespace) -> Path:
    """Returns the directory of the model, after downloading it if necessary."""
    from jllm.files.find import find_model
    from jllm.files.load import BUNDLED

    return find_model(BUNDLED if args.model is None else args.model)


def run_identity(model: Path, args: Namespace) -> dict[str, str]:
    """Returns the identity of the contents that `made_with` names on this machine."""
    from jllm.files.run_identity import of_adapters, of_machine, of_model, of_scheme

    leave_gpus_to_engines(args)
    more = {} if args.quantize is None else {"scheme": of_scheme(args.quantize)}
    more |= {} if args.adapters is None else {"adapters": of_adapters(args.adapters)}
    return of_model(model) | more | of_machine()


@contextlib.contextmanager
def output_file(args: Namespace, interrupt: Interrupt) -> Iterator[ResultsFile | None]:
    """Yields the file of --output, if there is one. Ctrl-C leaves it whole."""
    if args.output is None:
        yield None
        return
    with contextlib.closing(ResultsFile(args.output)) as file:
        interrupt.tidy = file.close
        yield file


def run_queue[J](
    engine: "Engine | Replicas",
    queue: "Iterable[tuple[J, Prompt, SamplingParams, Inputs | None]]",
    ahead: int,
    interrupt: Interrupt,
) -> "Iterator[tuple[J, Event]]":
    """Runs the whole queue, or stops after the step in which Ctrl-C was pressed. Yields each event with its job. The
    engine has only `ahead` requests of a long queue at once, so timings start when a request enters it."""
    queue = iter(queue)
    running: dict[int, J] = {}
    unfinished: dict[int, int] = {}  # unfinished samples by request

    def feed(count: int) -> None:
        for job, prompt, sampling, inputs in islice(queue, count):
            id = engine.submit(prompt, sampling, inputs=inputs)
            running[id], unfinished[id] = job, sampling.n

    feed(ahead)
    while engine.has_work and not interrupt.asked:
        for event in engine.step():
            yield running[event.id], event
            unfinished[event.id] -= event.completion is not None
            if not unfinished[event.id]:
                del running[event.id], unfinished[event.id]
                feed(1)


def drive[J](
    events: "Iterable[tuple[J, Event]]",
    sink: "Sink[J]",
    speed: Speed,
    interrupt: Interrupt,
    engine: "Engine | Replicas",
) -> int:
    """Takes all events, or those before Ctrl-C. Reports speed and drafts at the end. Returns the exit status."""
    broken = 0
    try:
        for job, event in events:
            speed.count(event)
            sink.take(job, event)
            broken += event.completion is not None and event.completion.finish_reason == "error"
    except KeyboardInterrupt:  # the second Ctrl-C, or one outside of our own handler
        interrupt.asked = True
    finally:
        sink.close()
    note(speed.line(*drafted(engine), *sink.notes(), *(["interrupted"] if interrupt.asked else [])))
    if broken:
        some = counted(broken, "completion")
        note(f"error: the logits of {some} were not finite; another --dtype or --kv-cache may help")
    return INTERRUPTED if interrupt.asked else 2 if broken else 0
