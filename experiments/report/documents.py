"""Reads result files, checks their schema, and finds the newest of each name and device."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from jllm.errors import InputFileError

RESULTS = Path(__file__).parents[1] / "results"
Document = dict[str, Any]
Row = dict[str, Any]
KEYS = {"experiment": str, "date": str, "device": str, "versions": dict, "command": str, "complete": bool}
BAR_KEYS = {"name", "value", "unit", "bar", "met"}


def read_result(path: Path) -> Document:
    """Returns a result file's document. Raises InputFileError with the broken rule of the schema."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputFileError(f"{path.name}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise InputFileError(f"{path.name}: not JSON: {error}") from None
    for problem in problems(document):
        raise InputFileError(f"{path.name}: {problem}")
    return document


def result_of(path: Path, experiment: str) -> Document:
    """Returns a result of that experiment, with any label. Raises InputFileError for any other file."""
    document = read_result(path)
    if not document["experiment"].startswith(experiment):
        raise InputFileError(f"{path.name}: a result of {document['experiment']}, not of {experiment}")
    return document


def problems(document: Any) -> Iterable[str]:
    """Yields each rule of the schema that a document breaks."""
    if not isinstance(document, dict):
        yield "not an object"
        return
    for key, kind in KEYS.items():
        if not isinstance(document.get(key), kind):
            yield f"{key} must be there, a {kind.__name__}, not {document.get(key)!r}"
    try:
        date.fromisoformat(str(document.get("date")))
    except ValueError:
        yield f"date must be YYYY-MM-DD, not {document.get('date')!r}"
    for key in ("rows", "bars"):
        entries = document.get(key)
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            yield f"{key} must be a list of objects"
            continue
        for i, entry in enumerate(entries):
            if key == "bars" and set(entry) != BAR_KEYS:
                yield f"bar {i} must have {', '.join(sorted(BAR_KEYS))}, not {', '.join(sorted(entry))}"
            if deep := next((name for name, value in entry.items() if not is_flat(value)), None):
                yield f"{key} {i}: {deep} must be a value or a list of values"


def is_flat(value: Any) -> bool:
    plain = (str, int, float, bool, type(None))
    return isinstance(value, plain) or (isinstance(value, list) and all(isinstance(x, plain) for x in value))


@dataclass(frozen=True)
class Entry:
    """The newest file of one name and device."""

    label: str  # name without date and device
    path: Path
    document: Document

    @property
    def device(self) -> str:
        return self.document["device"]

    @property
    def date(self) -> str:
        return self.document["date"]

    @property
    def rows(self) -> list[Row]:
        """Returns the measured rows."""
        return [row for row in self.document["rows"] if "error" not in row]


def read_all(directory: Path = RESULTS) -> list[Entry]:
    """Returns the newest file of each name and device, complete ones first."""
    found: dict[tuple[str, str], Entry] = {}
    for path in sorted(directory.glob("*.json")):
        entry = Entry(label_of(path), path, read_result(path))
        key = entry.label, entry.device
        if key not in found or _rank(found[key]) < _rank(entry):
            found[key] = entry
    return list(found.values())


def _rank(entry: Entry) -> tuple[bool, str]:
    return entry.document["complete"], entry.date


def label_of(path: Path) -> str:
    """Returns a file's name without date and device: matmul-many for matmul-many-20261122-h200.json."""
    return re.sub(r"-\d{8}-[^/]*$", "", path.stem)


def short(device: str) -> str:
    return device.replace("NVIDIA ", "").replace("cpu", "CPU")
