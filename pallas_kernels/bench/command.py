"""Builds command lines of benchmarks and experiments: where results go, and rows measured, printed and kept."""

import argparse
import functools
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import Any

from pallas_kernels.bench.numbers import positive
from pallas_kernels.bench.result_file import RECORD, ResultFile
from pallas_kernels.starting import INTERRUPTED as INTERRUPTED
from pallas_kernels.starting import raise_interrupts

Row = dict[str, Any]
LOCAL = Path("results")  # in the working directory
RECORDED = Path(__file__).parents[2] / "experiments" / "results"  # committed, and shown by the results page
UNREAD = 141  # the exit status of shells for SIGPIPE


class Parser(argparse.ArgumentParser):
    """Prints the description as it is written, and each option's default. `given` has the arguments of the command line
    that was parsed last, even those that give a default."""

    def __init__(self, description: str | None = None, **options: Any):
        super().__init__(description=description, formatter_class=_Help, **options)
        self.given: list[argparse.Action] = []

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # which parse_args calls
        self.given = []
        return super().parse_known_args(args, namespace)

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        self.given.append(action)
        return super()._get_values(action, arg_strings)

    def refuse(self, among: Collection[str], why: str) -> None:
        """Ends the command with the error `why` if one of these options was given. `{}` in `why` becomes its name."""
        for action in self.given:
            if action.option_strings and action.dest in among:
                self.error(why.format(action.option_strings[0]))


class _Help(argparse.RawDescriptionHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str | None:
        text, default = action.help, action.default
        if not text or "default" in text or isinstance(default, bool) or default in (None, [], argparse.SUPPRESS):
            return text
        values = default if isinstance(default, list | tuple) else [default]
        shown = " ".join(os.path.relpath(value) if isinstance(value, Path) else str(value) for value in values)
        return f"{text} (default: {shown})"


def add_results_folder(parser: argparse.ArgumentParser) -> None:
    """Adds --results, and in a checkout of the repository --record."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--results", type=Path, default=LOCAL, metavar="DIR", help="their folder (default: %(default)s)")
    if RECORDED.is_dir():
        text = "keep results in experiments/results, which are committed"
        where.add_argument(RECORD, dest="results", action="store_const", const=RECORDED, help=text)


def add_result_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options for the result file's folder and name, and --json."""
    add_results_folder(parser)
    parser.add_argument("--label", type=label, help="to tell runs apart: a part of the result's name")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object on the last line")


def add_rows(parser: argparse.ArgumentParser, cases: Iterable[Any]) -> None:
    """Adds --rows, which chooses the measured cases by their rows."""
    rows = sorted({case.rows for case in cases})
    parser.add_argument("--rows", type=int, nargs="+", choices=rows, default=rows, help="rows of cases (default: all)")


def label(text: str) -> str:
    """Returns a text that may be a part of a file's name. Raises argparse's error for any other text."""
    if not re.fullmatch(r"\w[\w.-]*", text):
        raise argparse.ArgumentTypeError(f"{text!r} must be letters, digits, '.', '_' and '-' alone")
    return text


def interruptible(main: Callable[..., int]) -> Callable[..., int]:
    """Wraps a command so that Ctrl-C ends it with one line, which has the notes of the exception: what was kept, and
    how to go on. The command ends quietly if the reader of its output has ended, as `head` does."""

    @functools.wraps(main)
    def wrapped(*args: Any, **options: Any) -> int:
        raise_interrupts()
        try:
            try:
                return main(*args, **options)
            finally:
                print(end="", flush=True)  # a broken pipe is raised here, not at Python's exit
        except KeyboardInterrupt as error:
            print("; ".join(["interrupted", *getattr(error, "__notes__", ())]), file=sys.stderr)
            return INTERRUPTED
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # drops the rest of the output
            return UNREAD

    return wrapped


def make_parser(description: str | None) -> Parser:
    """Returns a parser with the options of all benchmarks."""
    parser = Parser(description)
    add_result_options(parser)
    return parser


@interruptible
def record(
    operation: str,
    args: argparse.Namespace,
    argv: Sequence[str] | None,
    rows: Iterable[Row],
    summarize: Callable[[list[Row]], Iterable[Row]],
) -> int:
    """Writes each of `rows` once it is measured. `summarize` may complete the rows, and returns the bars. A row with
    "error" makes the result incomplete. Returns the exit status."""
    command = ["python", "-m", f"pallas_kernels.{operation}.bench", *(sys.argv[1:] if argv is None else argv)]
    try:
        with ResultFile(args.results, operation, command, args.label) as result:
            for row in rows:
                result.add(row)
                print(row, flush=True)
            measured = result.document["rows"]
            bars = list(summarize(measured))
            result.finish(bars=bars, complete=not any("error" in row for row in measured))
    except BrokenPipeError:  # of standard output
        raise
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(result.document))
    return 0


def add_triton(parser: argparse.ArgumentParser, config: type) -> None:
    """Adds --triton, and an option for each number of backend triton's configuration, such as --triton-warps."""
    parser.add_argument("--triton", action="store_true", help="measure backend triton too")
    for each in fields(config):
        option = f"--triton-{each.name.replace('_', '-')}"
        parser.add_argument(option, type=positive, nargs="+", default=[], help="and all combinations of such numbers")


def triton_changes(args: argparse.Namespace, config: type) -> list[dict[str, int]]:
    """Returns the changes of backend triton's configuration, by field, for each of the runs that were asked for."""
    asked = {each.name: values for each in fields(config) if (values := getattr(args, f"triton_{each.name}"))}
    changed = [dict(zip(asked, values)) for values in product(*asked.values())] if asked else []
    return [{}] * args.triton + changed


def triton_name(changes: dict[str, int]) -> str:
    """Returns the name of a run of backend triton."""
    return " ".join(["triton", *(f"{name}={value}" for name, value in changes.items())])
