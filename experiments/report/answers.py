"""What a result says in short, from its document: a line of the indices of the pages of details."""

import re
from collections.abc import Callable
from typing import Any

Row = dict[str, Any]


def nothing(document: Row) -> str:
    return ""


def times_of_bar(whose: str, pattern: str = "") -> Callable[[Row], str]:
    """In how many cells a time stays under a peer's, which is the bar."""

    def answer(document: Row) -> str:
        bars = [bar for bar in document["bars"] if re.search(pattern, bar["name"])]
        if not bars:
            return ""
        ratios = [bar["value"] / bar["bar"] for bar in bars]
        least = sum(bool(bar["met"]) for bar in bars)
        return f"{least} of {len(bars)} cells at {whose} or under it: {min(ratios):.2f} to {max(ratios):.2f} times it"

    return answer


def of_bars(text: str, pattern: str = "") -> Callable[[Row], str]:
    """Between which values the bars of a name lie."""

    def answer(document: Row) -> str:
        values = [bar["value"] for bar in document["bars"] if re.search(pattern, bar["name"])]
        return text.format(min(values), max(values)) if values else ""

    return answer


def verdict(document: Row) -> str:
    row = document["rows"][-1] if document["rows"] else {}
    return f"{row['verdict']}: {row['measured']}" if "verdict" in row else ""


def last_values(text: str, *names: str) -> Callable[[Row], str]:
    """Values of our own last row that has all of these keys."""

    def answer(document: Row) -> str:
        own = [row for row in document["rows"] if "peer" not in row]
        rows = [row for row in own if all(row.get(name) is not None for name in names)]
        return text.format(*(rows[-1][name] for name in names)) if rows else ""

    return answer


def lowest(text: str, name: str) -> Callable[[Row], str]:
    """The lowest value of all rows: what a training keeps is its best model, which need not be the last."""

    def answer(document: Row) -> str:
        values = [row[name] for row in document["rows"] if row.get(name) is not None]
        return text.format(min(values)) if values else ""

    return answer


def starts(document: Row) -> str:
    """The slowest of each kind, as bars count it; of cold ones by how many other processes traced."""
    slowest: dict[str, float] = {}
    for row in document["rows"]:
        beside = row["start"] == "cold" and row.get("processes")
        kind = f"{row['start']} with {beside} processes" if beside else row["start"]
        slowest[kind] = max(row["start_s"], slowest.get(kind, 0.0))
    return ", ".join(f"{seconds:.1f} s {kind}" for kind, seconds in slowest.items())


def estimated_within(document: Row) -> str:
    """How far estimates are from measured steps, by device and backend."""
    rows = [row for row in document["rows"] if row.get("part") == "error"]
    found = [f"{row['largest']:.0%} ({row['device'].removeprefix('NVIDIA ')}, {row['backend']})" for row in rows]
    return "measured steps are within " + ", ".join(found) + " of the estimate" if found else ""
