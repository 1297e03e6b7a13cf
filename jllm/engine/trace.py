"""Records the schedule as a small trace: what each step computed and when. Replays and simulations need no device.

`Engine(trace="run.jsonl")` writes JSON lines as they come. `trace=[]` appends the same dicts to a list. read_trace
reads both. The fields depend on the "type":

    engine   comes first, once: version, limits (sizes.Limits), ladder (buckets), and options that decide about memory
    request  a sample was added: request, sample, known (tokens that it begins with), max_length, t
    step     a step was read, or lost with its device (then read is null): step (its number), decodes, keys (tokens of
             KV that decodes read), chunks as [request, sample, start, tokens, final], rung (its bucket) as [decodes,
             tokens, chunks], pages in use, copies, preempted as [request, sample], planned, dispatched, read
    end      a sample ended: request, sample, output (the number of its tokens), reason, t

Times are seconds since the trace began, on a monotonic clock. Steps are in the order in which they ran.
"""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jllm.engine.plan import StepPlan
from jllm.engine.sequence import Sequence
from jllm.errors import InputFileError, OutputError
from jllm.programs.sizes import Limits
from jllm.step.buckets import Bucket

VERSION = 1
KINDS = ("engine", "request", "step", "end")
LINES = 1024  # most lines that wait in memory
Record = dict[str, Any]
Sink = str | os.PathLike | list


class Recorder:
    """Writes a trace; the engine calls it at each event."""

    def __init__(self, sink: Sink, limits: Limits, buckets: tuple[Bucket, ...], options: Record):
        self._start = time.perf_counter()
        self._planned = 0.0
        self._steps: dict[int, Record] = {}  # dispatched and not read
        self._sink = sink
        self._lines: list[str] = []  # lines that are not in the file yet
        sizes = [[b.decodes, b.tokens, b.chunks] for b in buckets]
        self._add({"type": "engine", "version": VERSION, "limits": asdict(limits), "ladder": sizes, **options})
        self.flush(mode="w")

    def request(self, seq: Sequence) -> None:
        about = {"known": seq.length, "max_length": seq.max_length, "t": self._now()}
        self._add({"type": "request", **_name(seq), **about})

    def planning(self) -> None:
        """Takes note that planning of the next step begins."""
        self._planned = self._now()

    def dispatched(self, plan: StepPlan, bucket: Bucket, pages: int) -> None:
        self._steps[plan.step] = {
            "type": "step",
            "step": plan.step,
            "decodes": len(plan.decodes),
            "keys": sum(seq.computed for seq in plan.decodes),
            "chunks": [[c.seq.request_id, c.seq.sample, c.start, len(c.tokens), c.final] for c in plan.chunks],
            "rung": [bucket.decodes, bucket.tokens, bucket.chunks],
            "pages": pages,
            "copies": len(plan.copies),
            "preempted": [[seq.request_id, seq.sample] for seq in plan.preempted],
            "planned": self._planned,
            "dispatched": self._now(),
            "read": None,
        }

    def read(self, step: int) -> None:
        self._add({**self._steps.pop(step), "read": self._now()})

    def lost(self) -> None:
        """Records the loss of the device, with all steps in flight."""
        for step in sorted(self._steps):
            self._add(self._steps.pop(step))

    def end(self, seq: Sequence, reason: str) -> None:
        self._add({"type": "end", **_name(seq), "output": len(seq.output), "reason": reason, "t": self._now()})

    def flush(self, mode: str = "a") -> None:
        """Writes waiting lines to the file, which is open only meanwhile: engines are not always closed."""
        if isinstance(self._sink, list):
            return
        try:
            with open(self._sink, mode, encoding="utf-8") as file:
                file.writelines(self._lines)
        except OSError as error:
            raise OutputError(f"trace: {os.fspath(self._sink)} cannot be written: {error.strerror}") from None
        self._lines.clear()

    def stop(self) -> None:
        self.lost()
        self.flush()

    def _now(self) -> float:
        return round(time.perf_counter() - self._start, 7)

    def _add(self, record: Record) -> None:
        if isinstance(self._sink, list):
            self._sink.append(record)
            return
        self._lines.append(json.dumps(record, separators=(",", ":"), default=_plain) + "\n")
        if len(self._lines) == LINES:
            self.flush()


def _plain(number: Any) -> Any:
    """Returns a NumPy scalar, which options may be, as Python's number."""
    return number.item()


def _name(seq: Sequence) -> Record:
    return {"request": seq.request_id, "sample": seq.sample}


def read_trace(source: Sink) -> list[Record]:
    """Returns the records of a trace in a file or a list. Raises InputFileError, with the line's number, for anything
    else."""
    name, number, records = "trace" if isinstance(source, list) else os.fspath(source), 0, []
    try:
        for number, record in enumerate(source if isinstance(source, list) else _lines(source), 1):
            if (record["type"] == "engine") != (number == 1):
                raise ValueError("the first record, and no other, must be of type engine")
            if number == 1 and record["version"] != VERSION:
                raise ValueError(f"version {record['version']}, this reads {VERSION}")
            if record["type"] not in KINDS:
                raise ValueError(f"unknown type {record['type']!r}")
            records.append(record)
    except OSError as error:
        raise InputFileError(f"{name}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        what = f"field {error} is missing" if isinstance(error, KeyError) else str(error)
        raise InputFileError(f"{name}: line {max(1, number)} is not of a trace: {what}") from None
    if not records:
        raise InputFileError(f"{name}: an empty trace")
    return records


def _lines(path: str | os.PathLike) -> Iterator[Record]:
    return map(json.loads, Path(path).read_text(encoding="utf-8").splitlines())
