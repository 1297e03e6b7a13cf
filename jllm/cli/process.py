"""What surrounds a command: its exit status, its streams, lines on standard error, and what its engine did."""

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

BROKEN_PIPE = 141  # what shells report for SIGPIPE


def run_command(run: Callable[[], int]) -> int:
    """Returns the exit status of what a command runs: an error is one line, and status 2."""
    try:
        with plain_warnings():
            return run()
    except KeyboardInterrupt:
        note("interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # whoever read our output has seen enough
        return BROKEN_PIPE
    except JllmError as error:
        note(f"error: {error}")
        return 2
    except RuntimeError as error:
        from jllm.parallel.memory import out_of_memory  # which loads JAX, as whoever raised this did

        if not out_of_memory(error):
            raise
        reason = str(error).partition("\n")[0]
        note(f"error: out of memory; try fewer --num-pages or --max-slots, or a smaller --dtype ({reason})")
        return 2


def note(text: str) -> None:
    """One line on standard error, as far as that is there."""
    with contextlib.suppress(OSError):
        print(one_line(text), file=sys.stderr, flush=True)


@contextlib.contextmanager
def plain_warnings() -> Iterator[None]:
    """Yields each warning in one line, without the place in the code that gave it."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *where, **more: note(f"warning: {message}")
        yield


@contextlib.contextmanager
def open_streams() -> Iterator[list[str]]:
    """Yields Python has None for a standard stream that was closed before it started (`>&-`): the null device stands in
    for it, which also takes its file descriptor before a result file can get it. Yields the names of such streams."""
    closed = [name for name in ("stdout", "stderr") if getattr(sys, name) is None]
    with contextlib.ExitStack() as stack:
        for name in closed:
            setattr(sys, name, stack.enter_context(open(os.devnull, "w")))
            stack.callback(setattr, sys, name, None)
        yield closed


def compile_cache(args: Namespace) -> Path | None:
    """Returns the folder for compiled steps; none if there is to be none, or cannot be."""
    if args.no_compile_cache:
        return None
    from jllm.programs.folder import find_compile_cache

    return find_compile_cache(args.compile_cache)


def load_model(folder: Path, args: Namespace) -> "Model":
    """Loads the model in a folder, as the flags ask for it."""
    from jllm.files.load import load

    numbers = {"dtype": args.dtype, "quantize": args.quantize, "mesh": args.devices}
    return load(folder, **numbers, eos_token_ids=args.eos_token_id)


def make_engine(model: "Model", replicas: int | None, **options: Any) -> "Engine | Replicas":
    """Returns an engine; or several, each on a device, or on a mesh as the model is."""
    from jllm.distributed.replicas import Replicas
    from jllm.engine.engine import Engine

    return Engine(model, **options) if replicas is None else Replicas(model, replicas, **options)


def compiled(engine: "Engine | Replicas") -> str:
    """Returns what compiling ahead took."""
    m = engine.metrics()
    programs = f"{counted(m['compile_programs'], 'program')} compiled in {m['compile_seconds']:.1f} s"
    return f"{programs}, {m['compile_cache_hits'] + m['compile_loaded']} of them from the cache"


def drafted(engine: "Engine | Replicas") -> list[str]:
    """Returns what became of drafts; nothing without a drafter."""
    m = engine.metrics()
    if not m.get("draft_segments"):
        return ["no step had drafts"] if "draft_segments" in m else []
    shares = " ".join(f"{100 * share:.0f}" for share in m["draft_acceptance"].values())
    return [f"{m['draft_tokens_mean']:.2f} tokens a step with drafts, % accepted by depth: {shares}"]
