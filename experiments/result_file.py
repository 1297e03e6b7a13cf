"""The result file of experiments: that of the kernels' benchmarks, with the library's error and its packages."""

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from jllm.errors import JllmError, OutputError
from pallas_kernels import result_file
from pallas_kernels.bars import bar as bar


class ResultFile(result_file.ResultFile):
    """Raises OutputError where it cannot be written."""

    packages = (*result_file.ResultFile.packages, "optax", "sentencepiece")

    def _write(self) -> None:
        try:
            super()._write()
        except OSError as error:
            raise OutputError(str(error)) from None


def record(
    directory: Path,
    experiment: str,
    command: Sequence[str],
    rows: Iterable[dict[str, Any]],
    *,
    bars: Callable[[list[dict[str, Any]]], Iterable[dict[str, Any]]] = lambda rows: (),
    shown: Callable[[dict[str, Any]], bool] = lambda row: True,
    as_json: bool = False,
    **extra: Any,
) -> int:
    """Adds rows to a result file as they come and prints those that are `shown`, then the bars; as the last line, if
    asked, the whole document. Returns the exit status: 2, after a line that says why, where the library refuses."""
    try:
        result = ResultFile(directory, experiment, command, **extra)
        for row in rows:
            result.add(row)
            if shown(row):
                print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
        result.finish(bars=list(bars(result.document["rows"])), complete=True)
    except JllmError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if as_json:
        print(json.dumps(result.document))
    return 0


def rounded(row: dict[str, Any]) -> dict[str, Any]:
    """Floats to five digits."""
    return {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in row.items()}


def rows_before(directory: Path, experiment: str, setup: dict[str, Any]) -> list[dict[str, Any]]:
    """Of the latest run with the same setup (what its document says), if it was interrupted; else none."""
    for file in sorted(directory.glob(f"{experiment}-*.json"), reverse=True):
        try:
            document = json.loads(file.read_text(encoding="utf-8"))
            if all(document.get(key) == value for key, value in setup.items()):
                return [] if document["complete"] else document["rows"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # no result of ours, or one that nobody can go on with
    return []
