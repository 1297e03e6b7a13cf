"""Writes the dated JSON file that every benchmark and experiment leaves."""

import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from pallas_kernels.bench.bars import asked_of
from pallas_kernels.bench.gpus import ask_gpus, device_kind
from pallas_kernels.one_writer import only_writer

OUTPUTS = ("--results", "--out")  # flags that name the place of a command's files
RECORD = "--record"  # the flag that puts results where they are committed
QUOTED = ("error", "report")  # fields of rows that quote other programs
FOLDERS = re.compile(r"(?<![\w.:/])/(?:[^\s/'\":]+/)+")  # of an absolute path, not of an address


class ResultFile(contextlib.AbstractContextManager):
    """Writes `{experiment}[-{label}]-{YYYYMMDD}-{device}.json` in a directory. Within its `with` block the file is
    incomplete, rewritten with every row, and written by no other process. An earlier file with rows is kept until the
    first row. Raises `error`, an OSError, if it cannot be written, or if another process writes it."""

    packages: ClassVar[tuple[str, ...]] = ("jax", "jaxlib", "numpy")  # whose versions are kept
    error: ClassVar[type[OSError]] = OSError

    def __init__(
        self, directory: str | Path, experiment: str, command: Sequence[str], label: str | None = None, **extra: Any
    ):
        device = device_kind()
        today = datetime.date.today()
        experiment = labelled(experiment, label)
        short = re.sub(r"\W+", "-", device.lower().removeprefix("nvidia ")).strip("-")
        self.path = Path(directory) / f"{experiment}-{today:%Y%m%d}-{short}.json"
        versions = {"python": platform.python_version()}
        self.document: dict[str, Any] = {
            "experiment": experiment,
            "date": today.isoformat(),
            "commit": commit_of(Path(__file__).parents[2]),
            "device": device,
            **gpu_of(device),
            "host": host_now(),
            "versions": versions | {name: importlib.metadata.version(name) for name in self.packages},
            "command": shlex.join(portable(command)),
            "complete": False,
            **extra,
            "bars": [],
            "rows": [],
        }

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                alone = stack.enter_context(only_writer(self.path.with_suffix(".lock")))
            except OSError as error:
                raise self.error(f"{self.path}: cannot be written: {error.strerror}") from None
            if not alone:
                raise self.error(f"{self.path}: another process writes it: wait for its end, or give another --label")
            self._begin()
            self._open = stack.pop_all()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, KeyboardInterrupt):
            error.add_note(self._left())
        self._open.close()

    def add(self, row: dict[str, Any]) -> None:
        """Adds one table row, a flat dict. Its quotes lose the folders of this machine's paths."""
        quoted = {key: FOLDERS.sub("", row[key]) for key in QUOTED if isinstance(row.get(key), str)}
        self.document["rows"].append(row | quoted if quoted else row)
        self._write()

    def finish(self, *, bars: list[dict[str, Any]], complete: bool, **extra: Any) -> None:
        """Writes the bars of this device, out of `bars` (bars.bar), and `extra`, further figures of the run."""
        rows = self.document.pop("rows")  # last, as they are long
        self.document |= gpu_of(self.document["device"])  # clocks are those of a device that was at work
        self.document["host"]["load_after"] = host_now()["load"]
        self.document |= {"complete": complete, "bars": asked_of(self.document["device"], bars), **extra, "rows": rows}
        self._write()

    def _begin(self) -> None:
        self._write()

    def _left(self) -> str:
        rows = len(self.document["rows"])
        return f"{self.path} has the rows so far ({rows})" if rows else "no row was finished"

    def _write(self) -> None:
        if not self.document["rows"] and (found := result_at(self.path)) and found["rows"]:
            return
        body = ",\n".join(f"  {json.dumps(key)}: {_layout(value)}" for key, value in self.document.items())
        partial = self.path.with_suffix(".partial")
        try:
            partial.write_text(f"{{\n{body}\n}}\n", encoding="utf-8")
            os.replace(partial, self.path)
        except OSError as error:
            raise self.error(f"{self.path}: cannot be written: {error.strerror}") from None


def result_at(path: Path) -> dict[str, Any] | None:
    """Returns a result, or None for any other file."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        return document if {"command", "versions", "complete", "rows"} <= document.keys() else None
    except (OSError, ValueError, AttributeError):
        return None


def commit_of(checkout: Path) -> str | None:
    """Returns the commit of a checkout, with a + if its sources were changed, or None outside of a checkout."""
    if not (checkout / ".git").exists():
        return None
    command = ["git", "-C", str(checkout), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def gpu_of(device: str) -> dict[str, Any]:
    """Returns the driver and the clocks in MHz, now and at most, of the first GPU of this process. The dict is
    empty if nvidia-smi reports nothing."""
    found = [] if device == "cpu" else ask_gpus("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem")
    if not found:
        return {}
    driver, *clocks = found[0]
    mhz = {name: int(word) for name, word in zip(("sm", "most_sm", "memory"), clocks) if word.isdecimal()}
    return {"driver": driver, "clocks_mhz": mhz}


def host_now() -> dict[str, Any]:
    """Returns the host's cores, the cores that this process may use, and its load where the system tells. Load is how
    many processes ran or waited for a core in the last minute."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None
    return {"cores": os.cpu_count(), "own_cores": own, "load": load}


def labelled(experiment: str, label: str | None) -> str:
    """Returns the name of a result, fit for a file."""
    return re.sub(r"[^\w.-]+", "-", experiment if label is None else f"{experiment}-{label}")


def portable(command: Sequence[str]) -> list[str]:
    """Returns a command without the folders of this machine. It leaves out where output went, and cuts other absolute
    paths to their last part."""
    kept: list[str] = []
    words = iter(command)
    for word in words:
        flag, equals, value = word.partition("=")
        if word == RECORD:
            continue
        if flag in OUTPUTS:
            if not equals:
                next(words, None)
        elif equals and flag.startswith("-") and Path(value).is_absolute():
            kept.append(f"{flag}={Path(value).name}")
        else:
            kept.append(Path(word).name if Path(word).is_absolute() else word)
    return kept


def _layout(value: Any) -> str:
    """Returns JSON with one row a line, so that diffs are easy to read."""
    if not isinstance(value, list) or not value:
        return json.dumps(value)
    return "[\n" + ",\n".join(f"    {json.dumps(row)}" for row in value) + "\n  ]"
