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
RECORDED = Path(__file__).parents[2] / "experiments" / "results"  # what is committed and shown by the results page
UNREAD = 141  # what shells report for SIGPIPE


class Parser(argparse.ArgumentParser):
    """Prints the description as it is written, and each option's default. `given` holds what the command line that was
    parsed last gives, also where its value is the default."""

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
        """Ends the command where the command line gives one of these options; `why` has a place for it."""
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
    where.add_argument("--results", type=Path, default=LOCAL, metavar="DIR", help="of results (default: %(default)s)")
    if RECORDED.is_dir():
        text = "keep results in experiments/results, which are committed"
        where.add_argument(RECORD, dest="results", action="store_const", const=RECORDED, help=text)


def add_result_options(parser: argparse.ArgumentParser) -> None:
    """Adds where the result file goes, what it is called, and --json."""
    add_results_folder(parser)
    parser.add_argument("--label", type=label, help="to tell runs apart: a part of the result's name")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object on the last line")


def add_rows(parser: argparse.ArgumentParser, cases: Iterable[Any]) -> None:
    """Adds --rows, which chooses the measured cases by their rows."""
    rows = sorted({case.rows for case in cases})
    parser.add_argument("--rows", type=int, nargs="+", choices=rows, default=rows, help="those of cases (default: all)")


def label(text: str) -> str:
    """Returns a part of a file's name. Raises argparse's error for another text."""
    if not re.fullmatch(r"\w[\w.-]*", text):
        raise argparse.ArgumentTypeError(f"{text!r} must be letters, digits, '.', '_' and '-' alone")
    return text


def interruptible(main: Callable[..., int]) -> Callable[..., int]:
    """Wraps a command so that Ctrl-C ends it with a line that says what is left and how to go on. The exception's notes
    say it. The command ends quietly where the reader of its output has ended, like `head`."""

    @functools.wraps(main)
    def wrapped(*args: Any, **options: Any) -> int:
        raise_interrupts()
        try:
            try:
                return main(*args, **options)
            finally:
                print(end="", flush=True)  # nothing is left for Python to say of it at its exit
        except KeyboardInterrupt as error:
            print("; ".join(["interrupted", *getattr(error, "__notes__", ())]), file=sys.stderr)
            return INTERRUPTED
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left to print goes nowhere
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
    """Measures `rows` one by one; `summarize` may complete them and gives the bars. A row with "error" makes the
    result incomplete. Returns the exit status."""
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
    parser.add_argument("--triton", action="store_true", help="backend triton too, as configured")
    for each in fields(config):
        option = f"--triton-{each.name.replace('_', '-')}"
        parser.add_argument(option, type=positive, nargs="+", default=[], help="all combinations of such numbers, too")


def triton_changes(args: argparse.Namespace, config: type) -> list[dict[str, int]]:
    """Returns what is to be changed in backend triton's configuration, for each run of it that was asked for."""
    asked = {each.name: values for each in fields(config) if (values := getattr(args, f"triton_{each.name}"))}
    changed = [dict(zip(asked, values)) for values in product(*asked.values())] if asked else []
    return [{}] * args.triton + changed


def triton_name(changes: dict[str, int]) -> str:
    """Returns what a run of backend triton is called."""
    return " ".join(["triton", *(f"{name}={value}" for name, value in changes.items())])
