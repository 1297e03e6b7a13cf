"""Holds the time to move bytes between devices, as measured data: configs/links/*.json, one file per kind of link.

A table has points [bytes, seconds] between a number of ranks. Seconds are interpolated between two points. Below the
first point they are its seconds. Beyond the last point they grow at its rate.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jllm.errors import ConfigError

LINKS = Path(__file__).parents[2] / "configs" / "links"


@dataclass(frozen=True)
class Table:
    """Measured seconds by bytes, between that number of ranks."""

    ranks: int
    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        sizes = [nbytes for nbytes, _ in self.points]
        good = self.ranks >= 2 and sizes and sizes == sorted(set(sizes)) and min(min(p) for p in self.points) > 0
        if not good:
            raise ConfigError(f"a link's table needs ranks >= 2 and points [bytes, seconds] in order: {self}")

    def seconds(self, nbytes: float) -> float:
        """Returns the seconds of one transfer or exchange of these bytes."""
        sizes, times = zip(*self.points)
        return float(np.interp(nbytes, sizes, times)) * max(1.0, nbytes / sizes[-1])


@dataclass(frozen=True)
class Link:
    """One kind of link between devices."""

    name: str
    copy: Table
    all_reduce: Mapping[str, Table]  # by backend
    source: str


def read_link(name: str) -> Link:
    """Returns the file configs/links/<name>.json. Raises ConfigError if it is missing or invalid."""
    path = LINKS / f"{name}.json"
    if not path.exists():
        known = ", ".join(sorted(found.stem for found in LINKS.glob("*.json")))
        raise ConfigError(f"no link is called {name!r}; known are {known}")
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
        tables = {backend: _table(table) for backend, table in given["all_reduce"].items()}
        return Link(given["name"], _table(given["copy"]), tables, given["source"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: not a link's file: {error}") from None


def _table(given: Any) -> Table:
    return Table(given["ranks"], tuple((nbytes, seconds) for nbytes, seconds in given["points"]))
