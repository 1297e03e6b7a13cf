"""Runs first in a command (`python -m NAME`), before JAX, which takes seconds to load. Ctrl-C then ends the command
with one line. A command that needs a GPU, and finds none, says so and ends with status 2."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

INTERRUPTED = 130  # the exit status of shells for SIGINT
OURS = ("experiments", "jllm", "pallas_kernels")
HELP = ("-h", "--help")
DEVICES, GPU_FILES = Path("/dev"), ("nvidia[0-9]*", "nvhost-ctrl*", "dxg", "kfd")
PLUGINS = "jax_plugins"  # the package of JAX's plugins, for all devices but the CPU


def command() -> str:
    """Returns the module that this process is about to run as a command, or nothing."""
    if sys.argv[:1] != ["-m"]:  # Python sets this while it looks for the module
        return ""
    place = next(i for i, word in enumerate(sys.orig_argv) if i and word.startswith("-m"))
    return sys.orig_argv[place].removeprefix("-m") or sys.orig_argv[place + 1]


def start() -> None:
    """Prepares the process if it runs one of our commands."""
    name = command()
    if name.partition(".")[0] in OURS:
        end_at_interrupts()
    if name.startswith("pallas_kernels.") and name.endswith(".bench"):
        need_gpu({name: ()})


def end_at_interrupts() -> None:
    """Lets Ctrl-C end the process in one line. A KeyboardInterrupt would come out of a half-done import."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGINT, _end)


def raise_interrupts() -> None:
    """Lets Ctrl-C raise KeyboardInterrupt again, if `end_at_interrupts` changed that."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(signum: int, frame: FrameType | None) -> None:
    with contextlib.suppress(OSError):
        os.write(2, b"\ninterrupted\n" if os.isatty(2) else b"interrupted\n")
    os._exit(INTERRUPTED)


def need_gpu(commands: Mapping[str, Iterable[str]]) -> None:
    """Ends the process if its command needs a GPU and there is none. The keys of `commands` are modules, or a module
    and an argument. The values are options with which the command needs no GPU."""
    given = {word.partition("=")[0] for word in sys.argv[1:]}
    for line, without in commands.items():
        name, _, argument = line.partition(" ")
        if name == command() and (not argument or argument in given) and not given & {*HELP, *without}:
            instead = f"; without one: {', '.join(without)}" if without else ""
            _refuse_unless(sees_gpu(), f"{line} needs a GPU, and JAX has none here{instead} (see --help)")


def need_package(package: str, commands: Iterable[str], how: str) -> None:
    """Ends the process if its command needs a package that is missing. `how` says how to install it."""
    if command() in commands and not {*HELP} & {*sys.argv[1:]}:
        _refuse_unless(_is_there(package), f"{command()} needs {package}: {how}")


def refuse_gone(commands: Mapping[str, str]) -> None:
    """Ends a command that was removed. `commands` has a successor for each."""
    name = command()
    _refuse_unless(name not in commands, f"{name} is gone: {commands.get(name)}")


def _refuse_unless(right: bool, why: str) -> None:
    if not right:
        print(f"error: {why}", file=sys.stderr)
        sys.exit(2)


def sees_gpu() -> bool:
    """Tells whether JAX should find a GPU: there is one, JAX has the means to use it, and the environment lets it."""
    platforms = os.environ.get("JAX_PLATFORMS") or os.environ.get("JAX_PLATFORM_NAME")
    if platforms and not {"cuda", "gpu", "rocm"} & set(platforms.lower().split(",")):
        return False
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return False
    return _is_there(PLUGINS) and any(any(DEVICES.glob(each)) for each in GPU_FILES)


def _is_there(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ImportError:
        return False
