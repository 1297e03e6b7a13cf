"""Reads a recorded schedule (jllm.engine.trace) as typed values, for replays."""

import os
from dataclasses import dataclass, replace
from typing import Any

from jllm.engine.trace import Sink, read_trace
from jllm.errors import InputFileError
from jllm.programs.sizes import Limits
from jllm.step.buckets import Bucket


@dataclass(frozen=True)
class TracedRequest:
    """A sample of a request. Fields are None if the trace ended before."""

    request: int
    sample: int
    known: int  # tokens that it began with
    max_length: int
    arrival: float  # seconds
    output: int | None = None  # tokens; for a fork with those known at the start
    reason: str | None = None
    end: float | None = None  # seconds


@dataclass(frozen=True)
class TracedStep:
    """A step. jllm.engine.trace documents the fields."""

    step: int
    decodes: int
    keys: int
    chunks: tuple[tuple[int, int, int, int, bool], ...]
    bucket: Bucket
    pages: int
    copies: int
    preempted: tuple[tuple[int, int], ...]
    planned: float
    dispatched: float
    read: float | None

    @property
    def tokens(self) -> int:
        """Returns the prompt tokens of the step."""
        return sum(chunk[3] for chunk in self.chunks)


@dataclass(frozen=True)
class Trace:
    """A whole trace. `engine` is its first record."""

    engine: dict[str, Any]
    limits: Limits
    requests: tuple[TracedRequest, ...]  # in the order of arrival
    steps: tuple[TracedStep, ...]


def load_trace(source: Sink) -> Trace:
    """Returns the trace in a file or a list. Raises InputFileError, with the line's number, for anything else."""
    engine, *records = read_trace(source)
    requests: dict[tuple[int, int], TracedRequest] = {}
    steps: list[TracedStep] = []
    number = 1
    try:
        limits = Limits(**engine["limits"])
        for record in records:
            number += 1
            if record["type"] == "step":
                steps.append(_step(record))
            else:
                _request(requests, record)
    except (ValueError, KeyError, TypeError) as error:
        what = f"field {error} is missing" if isinstance(error, KeyError) else str(error)
        name = "trace" if isinstance(source, list) else os.fspath(source)
        raise InputFileError(f"{name}: line {number} is not of a trace: {what}") from None
    return Trace(engine, limits, tuple(requests.values()), tuple(steps))


def _step(record: dict[str, Any]) -> TracedStep:
    names = ("step", "decodes", "keys", "pages", "copies", "planned", "dispatched", "read")
    return TracedStep(
        chunks=tuple((r, s, start, n, bool(final)) for r, s, start, n, final in record["chunks"]),
        bucket=Bucket(*record["rung"]),
        preempted=tuple((r, s) for r, s in record["preempted"]),
        **{name: record[name] for name in names},
    )


def _request(requests: dict[tuple[int, int], TracedRequest], record: dict[str, Any]) -> None:
    key = record["request"], record["sample"]
    if record["type"] == "request":
        requests[key] = TracedRequest(*key, record["known"], record["max_length"], record["t"])
    elif key not in requests:
        raise ValueError(f"request {key[0]} sample {key[1]} ends and never came")
    else:
        requests[key] = replace(requests[key], output=record["output"], reason=record["reason"], end=record["t"])
