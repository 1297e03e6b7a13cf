"""Writes the result files of experiments. They have the format of the kernels' benchmarks, with the library's errors
and packages."""

import argparse
import functools
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from jllm.errors import JllmError, OutputError
from jllm.files.run_identity import differing
from pallas_kernels.bench import result_file
from pallas_kernels.bench.bars import bar as bar
from pallas_kernels.bench.command import interruptible
from pallas_kernels.bench.result_file import result_at

Row = dict[str, Any]
Bars = Callable[[list[Row]], Iterable[Row]]  # from all rows


class ResultFile(result_file.ResultFile):
    """A result file being written. Raises OutputError if it cannot be written."""

    packages = (*result_file.ResultFile.packages, "optax", "sentencepiece")
    error: ClassVar[type[OSError]] = OutputError

    def fill(
        self,
        rows: Iterable[Row],
        bars: Bars = lambda rows: (),
        *,
        shown: Callable[[Row], bool] = lambda row: True,
    ) -> None:
        """Adds rows as they come, then the bars. It prints `shown` rows. A run is incomplete if one of its own rows has
        an "error"."""
        for row in rows:
            self.add(row)
            if shown(row):
                print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
        found = list(self.document["rows"])
        failed = any("error" in row and "peer" not in row for row in found)
        self.finish(bars=list(bars(found)), complete=not failed)


class ResumedFile(ResultFile):
    """A result that resumes an interrupted run of the same command, versions and `run`. `run` has all else that decides
    its rows (jllm.files.run_identity).

    Within its `with` block `before` has the existing rows. The file is replaced once the new one has as many. Raises
    OutputError if it would replace rows of another run.
    """

    def __init__(
        self,
        directory: str | Path,
        experiment: str,
        command: Sequence[str],
        label: str | None = None,
        *,
        run: Row,
        **extra: Any,
    ):
        super().__init__(directory, experiment, command, label, run=run, **extra)
        self.before: list[Row] = []

    def go_on(self, rows: Callable[[list[Row]], Iterable[Row]], bars: Bars = lambda rows: ()) -> None:
        """Runs everything. `rows` gets the existing rows, which it need not compute again, and yields the others."""
        with self:
            self.fill(rows(self.before), bars)

    def _begin(self) -> None:
        if (found := result_at(self.path)) and found["rows"] and (names := differing(_decides(found), self._decides)):
            raise OutputError(
                f"{self.path}: has rows of another run ({', '.join(names[:3])} differ): give this one a --label, or "
                "other --results, or remove that file"
            )
        pattern = f"{self.document['experiment']}-{'[0-9]' * 8}-*.json"
        for file in sorted(self.path.parent.glob(pattern), reverse=True):
            if (found := result_at(file)) and _decides(found) == self._decides:
                self.before = [] if found["complete"] else found["rows"]
                return

    @property
    def _decides(self) -> Row:
        return _decides(self.document)

    def _left(self) -> str:
        return f"run the same command again to go on with row {max(len(self.document['rows']), len(self.before)) + 1}"

    def _write(self) -> None:
        if len(self.document["rows"]) >= len(self.before):
            super()._write()


def _decides(document: Row) -> Row:
    """Returns what two runs must share to reuse each other's rows."""
    named = {"command": document["command"], "versions": document["versions"]}
    return named | document.get("run", {})


def command_line(experiment: str, argv: Sequence[str] | None) -> list[str]:
    """Returns the command line for a result: argv, or this process's own."""
    return ["python", "-m", f"experiments.{experiment}", *(sys.argv[1:] if argv is None else argv)]


def refusing(main: Callable[..., int]) -> Callable[..., int]:
    """Returns a command that handles the library's errors: it prints one line and returns 2. It handles Ctrl-C like all
    `interruptible` commands."""

    @interruptible
    @functools.wraps(main)
    def wrapped(*args: Any, **options: Any) -> int:
        try:
            return main(*args, **options)
        except (JllmError, NotImplementedError) as error:  # the second: from a kernel, for shapes that it lacks
            print(f"error: {error}", file=sys.stderr)
            return 2

    return wrapped


def check_output(path: str | Path) -> None:
    """Raises OutputError, before hours of work, for a file that could not be written at their end."""
    path = Path(path)
    if path.is_dir():
        raise OutputError(f"{path}: cannot be written: it is a folder, give a file")
    if not path.parent.is_dir():
        raise OutputError(f"{path}: cannot be written: there is no folder {path.parent}")


def make_folder(path: Path) -> None:
    """Makes a folder for results of long work. Raises OutputError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{path}: cannot be made a folder: {error.strerror}") from None


def told(args: argparse.Namespace, result: ResultFile) -> int:
    """Ends a successful command, and returns its exit status. If requested, it prints the whole document as the last
    line."""
    if args.json:
        print(json.dumps(result.document))
    return 0


@refusing
def record(
    args: argparse.Namespace,
    experiment: str,
    command: Sequence[str],
    rows: Iterable[Row],
    *,
    bars: Bars = lambda rows: (),
    shown: Callable[[Row], bool] = lambda row: True,
    **extra: Any,
) -> int:
    """Writes rows and bars to a result file (ResultFile.fill), and ends the command. args: those of add_result_options.
    Returns the exit status."""
    with ResultFile(args.results, experiment, command, args.label, **extra) as result:
        result.fill(rows, bars, shown=shown)
    return told(args, result)


def rounded(row: Row) -> Row:
    """Returns a row with floats of five digits."""
    return {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in row.items()}
