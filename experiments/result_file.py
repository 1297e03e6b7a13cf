"""The result file of experiments: that of the kernels' benchmarks, with the library's error and its packages."""

import json
from pathlib import Path
from typing import Any

from jllm.errors import OutputError
from pallas_kernels import result_file


class ResultFile(result_file.ResultFile):
    """Raises OutputError where it cannot be written."""

    packages = (*result_file.ResultFile.packages, "optax", "sentencepiece")

    def _write(self) -> None:
        try:
            super()._write()
        except OSError as error:
            raise OutputError(str(error)) from None


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
