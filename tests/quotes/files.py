"""Rows of the newest result files."""

from functools import cache
from typing import Any

from experiments.report.documents import RESULTS, read_result
from experiments.report.judged import judged

ROOT = RESULTS.parents[1]
H100 = "h100-80gb-hbm3"
Rows = list[dict[str, Any]]


@cache
def result(experiment: str, device: str = "h200") -> dict[str, Any]:
    """The newest file of that name, as it is to be read: shares are of the floors of today."""
    return judged(read_result(sorted(RESULTS.glob(f"{experiment}-{'[0-9]' * 8}-{device}.json"))[-1]))


def rows(experiment: str, device: str = "h200", **wanted: Any) -> Rows:
    found = [row for row in result(experiment, device)["rows"] if wanted.items() <= row.items()]
    assert found, f"{experiment} has no row with {wanted}"
    return found


def only(experiment: str, device: str = "h200", **wanted: Any) -> dict[str, Any]:
    (row,) = rows(experiment, device, **wanted)
    return row


def spread(values: Any) -> tuple[float, float]:
    return min(values), max(values)
