"""Surrounds a command: sets its exit status and streams, prints its notes, and reports on its engine."""

import contextlib
import os
import sys
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from jllm.cli.display import one_line
from jllm.cli.interrupt import INTERRUPTED
from jllm.errors import ConfigError, JllmError, counted

if TYPE_CHECKING:
    from jllm.config import LlamaConfig
    from jllm.distributed.replicas import Replicas
    from jllm.engine.engine import Engine
    from jllm.files.load import Head
    from jllm.model.model import Model
    from jllm.model.params import Params

BROKEN_PIPE = 141  # the exit status of shells for SIGPIPE


def run_command(run: Callable[[], int]) -> int:
    """Runs a command, and returns its exit status. An error prints one line and returns 2."""
    try:
        with plain_warnings():
            return run()
    except KeyboardInterrupt:
        note("interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has closed it
        return BROKEN_PIPE
    except JllmError as error:
        note(f"error: {error}")
        return 2
    except RuntimeError as error:
        from jllm.parallel.memory import out_of_memory  # imports JAX, which must be loaded if this was raised

        if not out_of_memory(error):
            raise
        reason = str(error).partition("\n")[0]
        note(f"error: out of memory; try fewer --num-pages or --max-slots, or a smaller --dtype ({reason})")
        return 2


def note(text: str) -> None:
    """Prints one line on standard error, if that is open."""
    with contextlib.suppress(OSError):
        print(one_line(text), file=sys.stderr, flush=True)


@contextlib.contextmanager
def plain_warnings() -> Iterator[None]:
    """Prints each warning in the block as one line, without its place in the code."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *where, **more: note(f"warning: {message}")
        yield


@contextlib.contextmanager
def open_streams() -> Iterator[list[str]]:
    """Yields the names of standard streams that were closed before Python started (`>&-`). Python sets them to None.
    The null device replaces them, so no result file gets their file descriptor."""
    closed = [name for name in ("stdout", "stderr") if getattr(sys, name) is None]
    with contextlib.ExitStack() as stack:
        for name in closed:
            setattr(sys, name, stack.enter_context(open(os.devnull, "w")))
            stack.callback(setattr, sys, name, None)
        yield closed


def compile_cache(args: Namespace) -> Path | None:
    """Returns the folder for compiled steps, or None if it is disabled or not possible."""
    if args.no_compile_cache:
        return None
    from jllm.programs.folder import find_compile_cache

    return find_compile_cache(args.compile_cache)


def load_model(folder: Path, args: Namespace) -> "Model":
    """Loads the model in a folder, with the flags' options."""
    from jllm.files.load import load

    return load(folder, **_how(args))


def open_model(folder: Path, args: Namespace) -> "Model | Head":
    """Loads what this process needs of the model in a folder. With --replicas the engines' processes load its
    weights."""
    if args.replicas is None:
        return load_model(folder, args)
    leave_gpus_to_engines(args)
    from jllm.files.load import load_head

    return load_head(folder, eos_token_ids=args.eos_token_id)


def read_weights(folder: Path, args: Namespace) -> "tuple[LlamaConfig, Params | Callable[[], Model]]":
    """Returns the config and the weights in a folder as update() takes them. With --replicas the engines' processes
    load them."""
    from jllm.files.load import load
    from jllm.model.model import Model

    model = open_model(folder, args)
    return model.config, model.params if isinstance(model, Model) else partial(load, folder, **_how(args))


def leave_gpus_to_engines(args: Namespace) -> None:
    """Keeps this process off the GPUs if --replicas gives them to others. Call it before JAX looks at its devices."""
    if args.replicas is not None:
        from pallas_kernels.bench.gpus import leave_gpus

        leave_gpus()


def hooks_of(args: Namespace) -> "dict[str, Any]":
    """Returns the engine's option for --hooks, if it is given. Raises ConfigError for a name of nothing."""
    if args.hooks is None:
        return {}
    try:
        return {"hooks": resolve_name(args.hooks)}
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"--hooks must be MODULE:NAME of a jllm.Hooks, not {args.hooks}: {error}") from None


def make_engine(model: "Model | Head", folder: Path, args: Namespace, **options: Any) -> "Engine | Replicas":
    """Returns an engine with the model of open_model, or several. Each has one device, or --devices of them."""
    from jllm.distributed.replicas import Replicas
    from jllm.engine.engine import Engine
    from jllm.files.load import load
    from jllm.model.model import Model

    if isinstance(model, Model):
        return Engine(model, **options)
    return Replicas(partial(load, folder, **_how(args)), args.replicas, mesh=args.devices, **options)


def _how(args: Namespace) -> dict[str, Any]:
    """Returns the options of load that the flags give."""
    numbers = {"dtype": args.dtype, "quantize": args.quantize, "mesh": args.devices}
    return numbers | {"expert_parallel": args.expert_parallel, "eos_token_ids": args.eos_token_id}


def compiled(engine: "Engine | Replicas") -> str:
    """Returns a note on the steps compiled ahead."""
    m = engine.metrics()
    programs = f"{counted(m['compile_programs'], 'program')} compiled in {m['compile_seconds']:.1f} s"
    return f"{programs}, {m['compile_cache_hits'] + m['compile_loaded']} of them from the cache"


def drafted(engine: "Engine | Replicas") -> list[str]:
    """Returns notes on drafts, or nothing without a drafter."""
    m = engine.metrics()
    if not m.get("draft_segments"):
        return ["no step had drafts"] if "draft_segments" in m else []
    shares = " ".join(f"{100 * share:.0f}" for share in m["draft_acceptance"].values())
    return [f"{m['draft_tokens_mean']:.2f} tokens a step with drafts, % accepted by depth: {shares}"]
