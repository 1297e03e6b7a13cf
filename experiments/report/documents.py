"""Result files: their schema, and the newest of each name and device."""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

from experiments.claims.claim import devices_of
from experiments.claims.registry import claim_named
from experiments.report.commands import name_of
from experiments.report.judged import judged
from jllm.errors import InputFileError

RESULTS = Path(__file__).parents[1] / "results"
Document = dict[str, Any]
Row = dict[str, Any]
KEYS = {"experiment": str, "date": str, "device": str, "versions": dict, "command": str, "complete": bool}
BAR_KEYS = {"name", "value", "unit", "bar", "met"}


def read_result(path: Path) -> Document:
    """A result file. Raises InputFileError, with what is wrong, for one that does not keep to the schema."""
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
    """A result of that experiment, under any label. InputFileError for what is none."""
    document = read_result(path)
    if not document["experiment"].startswith(experiment):
        raise InputFileError(f"{path.name}: a result of {document['experiment']}, not of {experiment}")
    return document


def problems(document: Any) -> Iterable[str]:
    """What of the schema of results a document breaks."""
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

    label: str  # its name, without date and device
    path: Path
    document: Document

    @property
    def device(self) -> str:
        return self.document["device"]

    @property
    def devices(self) -> list[str]:
        """Those whose figures it has: a claim's rows may be of other results, or simulated."""
        return devices_of(self.document) or [self.device]

    @property
    def rows(self) -> list[Row]:
        """Those that were measured."""
        return [row for row in self.document["rows"] if "error" not in row]

    @property
    def missed(self) -> list[Row]:
        return [bar for bar in self.document["bars"] if not bar["met"]]

    @cached_property
    def name(self) -> str:
        """What its command calls it, whatever the file was renamed to."""
        return name_of(self.document)


def read_all(directory: Path = RESULTS) -> list[Entry]:
    """Returns the newest file of each name and device, of claims the newest complete one, where there is one. Bars and
    verdicts are judged.py's."""
    found: dict[tuple[str, str], Entry] = {}
    for path in sorted(directory.glob("*.json")):
        document = judged(read_result(path))
        key = label_of(path), document["device"]
        if key not in found or _rank(found[key].document) < _rank(document):
            found[key] = Entry(key[0], path, document)
    return list(found.values())


def _rank(document: Document) -> tuple[bool, str]:
    return document["complete"] or claim_named(document["experiment"]) is None, document["date"]


def superseded(directory: Path = RESULTS) -> Iterator[Path]:
    """Files of which a newer one of the same name and device is there."""
    newest = {entry.path for entry in read_all(directory)}
    yield from (path for path in sorted(directory.glob("*.json")) if path not in newest)


def label_of(path: Path) -> str:
    """matmul-many of matmul-many-20261122-h200.json."""
    return re.sub(r"-\d{8}-[^/]*$", "", path.stem)


def short(device: str) -> str:
    return device.replace("NVIDIA ", "").replace("cpu", "CPU")
