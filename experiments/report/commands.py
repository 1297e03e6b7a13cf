"""What the command of a result says: which module ran, and how it calls what it measured."""

import argparse
import contextlib
import importlib
import io
import shlex
from collections.abc import Collection
from types import ModuleType
from typing import Any

from jllm.errors import JllmError
from pallas_kernels.bench.peers import OF_PEERS
from pallas_kernels.bench.result_file import labelled

ROOMS = ("experiments.", "pallas_kernels.")
PEERS = ("--peers", *(f"--{name.replace('_', '-')}" for name in OF_PEERS))  # whose folder may be gone
BESIDE = (*PEERS, "--label")  # options with values, which no name is made of
SEVERAL = ("--peer-names",)  # of these, options with any number of values


def module_of(command: str) -> str | None:
    """experiments.qps of `python -m experiments.qps --rate 2`; None where a file says in words how it came about."""
    words = command.split()
    return words[2] if words[:2] == ["python", "-m"] and len(words) > 2 and words[2].startswith(ROOMS) else None


def name_of(document: dict[str, Any]) -> str:
    """What a document's command calls its experiment, label included: a renamed file may say otherwise.
    Its own word counts where there is no such command or no longer, and for claims, several of which share one."""
    module = module_of(document["command"])
    if module in (None, "experiments.claims"):
        return document["experiment"]
    options, beside = _options(document["command"])
    name = _name(module, options)
    return document["experiment"] if name is None else labelled(name, beside.get("--label"))


def arguments_of(command: str) -> argparse.Namespace | None:
    """The options of a command, as its module reads them today. None where it has no such module or options."""
    module = module_of(command)
    loaded = load(module) if module else None
    if loaded is None or not hasattr(loaded, "parse_args"):
        return None
    return _parsed(loaded, _options(command)[0])


def _options(command: str, others: Collection[str] = BESIDE) -> tuple[list[str], dict[str, str]]:
    """The words of a command that are not about `others`, and each of these with its value, the last of several."""
    beside: dict[str, str] = {}
    options: list[str] = []
    waiting = ""  # one of the others, whose value comes next
    for word in shlex.split(command)[3:]:
        flag, equals, value = word.partition("=")
        if flag in others:
            beside[flag], waiting = value, "" if equals else flag
        elif waiting and not word.startswith("--"):
            beside[waiting], waiting = word, waiting if waiting in SEVERAL else ""
        else:
            options.append(word)
            waiting = ""
    return options, beside


def _parsed(module: ModuleType, options: list[str]) -> argparse.Namespace | None:
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            return module.parse_args(options)
    except (SystemExit, JllmError):
        return None


def load(module: str) -> ModuleType | None:
    """A module by its name; None for one that is gone."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        return None


def parses(command: str) -> bool:
    """Whether the module of a command still takes its options. Those about peers, whose folder may be gone, are left
    out, and an --out is tried as well, which a result's command does not name."""
    module = module_of(command)
    parse = getattr(load(module), "parse_args", None) if module else None
    if parse is None:
        return True
    kept, _ = _options(command, PEERS)
    for output in ([], ["--out", "out"]):
        with contextlib.suppress(SystemExit, JllmError), contextlib.redirect_stderr(io.StringIO()):
            parse([*kept, *output])
            return True
    return False


def _name(module: str, options: list[str]) -> str | None:
    """The module's own, or what it makes of its options. None for options that it has no longer and files that are
    gone."""
    name = module.removesuffix(".bench").rpartition(".")[2]
    loaded = load(module)
    if loaded is None or not hasattr(loaded, "name_of"):
        return name
    args = _parsed(loaded, options)
    try:
        return None if args is None else loaded.name_of(args)
    except JllmError:
        return None
