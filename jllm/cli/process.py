"""Surrounds a command: sets its exit status and streams, prints its notes, and reports on its engine."""

import contextlib
import os
import sys
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jllm.cli.display import one_line
from jllm.cli.interrupt import INTERRUPTED
from jllm.errors import JllmError, counted

if TYPE_CHECKING:
    from jllm.distributed.replicas import Replicas
    from jllm.engine.engine import Engine
    from jllm.model.model import Model

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

    numbers = {"dtype": args.dtype, "quantize": args.quantize, "mesh": args.devices}
    return load(folder, **numbers, eos_token_ids=args.eos_token_id)


def make_engine(model: "Model", replicas: int | None, **options: Any) -> "Engine | Replicas":
    """Returns an engine, or several replicas. Each is on one device, or on a mesh like the model's."""
    from jllm.distributed.replicas import Replicas
    from jllm.engine.engine import Engine

    return Engine(model, **options) if replicas is None else Replicas(model, replicas, **options)


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
