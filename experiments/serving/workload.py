"""Defines the requests of a workload, their results, and the rows of one run and of several."""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jllm.engine.metrics import nearest_rank
from jllm.errors import InputFileError

Row = dict[str, Any]
WORKLOAD = Path(__file__).parents[1] / "workloads" / "ppl_samples_1024.json"
FORMAT = '{"requests": [[prompt, output], ..]}'  # of a workload's file
FIRST_TOKEN, EACH_TOKEN = 2.0, 0.050  # seconds: the limits of goodput
PERCENTILES = (50, 90, 99)
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # Student's t, two-sided, 1 .. 9 degrees


@dataclass(frozen=True)
class Request:
    """One request of the workload."""

    prompt: int  # tokens
    output: int
    arrival: float  # seconds from the start


@dataclass(frozen=True)
class Served:
    """The times of a request: seconds from its arrival."""

    request: Request
    first_token: float
    total: float

    @property
    def good(self) -> bool:
        each = (self.total - self.first_token) / max(1, self.request.output - 1)
        return self.first_token <= FIRST_TOKEN and each <= EACH_TOKEN


def read_workload(path: Path, count: int | None, rate: float | None, seed: int) -> list[Request]:
    """Returns the first `count` requests of a file, with arrivals. Raises InputFileError for a file without a
    workload."""
    try:
        lengths = [(int(p), int(o)) for p, o in json.loads(path.read_text(encoding="utf-8-sig"))["requests"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputFileError(f"{path}: not a workload {FORMAT}: {error}") from None
    lengths = lengths[:count]
    if not lengths or min(min(pair) for pair in lengths) < 1:
        raise InputFileError(f"{path}: a workload needs requests, each of at least 1 prompt and 1 output token")
    gaps = np.zeros(len(lengths)) if rate is None else np.random.default_rng(seed).exponential(1 / rate, len(lengths))
    return [Request(p, o, float(at)) for (p, o), at in zip(lengths, np.cumsum(gaps) - gaps[0])]


def percentile(values: Sequence[float], p: float) -> float:
    """Returns the percentile of the nearest rank."""
    return sorted(values)[nearest_rank(p, len(values)) - 1]


def repeat_row(served: list[Served], seconds: float, metrics: dict[str, Any], cut: int) -> Row:
    """Returns the measures of one run of the workload."""
    between = {p: metrics["inter_token_s"][f"p{p}"] for p in PERCENTILES}
    names = (
        "slack", "preemptions", "recomputed_tokens", "steps", "pages_peak", "pages_total", "compiled_steps",
        "running_mean", "running_peak", "wasted_share", "fragmentation_mean",
    )  # fmt: skip
    return served_row(served, seconds, between, cut) | {name: metrics[name] for name in names}


def served_row(served: Sequence[Served], seconds: float, between: Mapping[int, float | None], cut: int) -> Row:
    """Returns the measures of a run's requests. `between` has percentiles of the seconds between tokens, by their
    number."""
    everything = [s.request for s in served]
    counted = sorted(served, key=lambda s: s.request.arrival)[cut:]
    row: Row = {
        "requests": len(served), "seconds": seconds, "qps": len(served) / seconds,
        "input_tokens_s": sum(r.prompt for r in everything) / seconds,
        "output_tokens_s": sum(r.output for r in everything) / seconds,
    }  # fmt: skip
    for p in PERCENTILES:
        row[f"ttft_ms_p{p}"] = 1e3 * percentile([s.first_token for s in counted], p)
    for p in PERCENTILES:
        at = between[p]
        row[f"itl_ms_p{p}"] = None if at is None else 1e3 * at
    for p in PERCENTILES:
        row[f"e2e_ms_p{p}"] = 1e3 * percentile([s.total for s in counted], p)
    good = sum(s.good for s in counted)
    return row | {"good_share": good / len(counted), "goodput": good / len(counted) * row["qps"]}


def summary(rows: Sequence[Row]) -> Row:
    """Returns means over the repeats. `<name>_ci` is half of the 95 % interval, or None for a single repeat."""
    found: Row = {"repeats": len(rows)}
    for name in rows[0]:
        values = [row[name] for row in rows]
        found[name] = None if None in values else statistics.fmean(values)
        if name in ("qps", "output_tokens_s", "ttft_ms_p50", "itl_ms_p99", "e2e_ms_p50", "goodput"):
            found[f"{name}_ci"] = None if None in values else half_interval(values)
    return found


def half_interval(values: Sequence[float]) -> float | None:
    """Returns half of Student's 95 % interval, or None for fewer than two values. Beyond ten values it uses nine
    degrees, which is slightly too wide."""
    n = len(values)
    if n < 2:
        return None
    return T_95[min(n - 1, len(T_95)) - 1] * statistics.stdev(values) / math.sqrt(n)
