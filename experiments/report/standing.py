"""How results stand: which file answers a claim, which bar is missed by most, and what is stale."""

from collections.abc import Iterator
from datetime import date

from experiments.claims.registry import TITLES, claim_named
from experiments.report.commands import load, module_of, parses
from experiments.report.documents import Entry, Row
from experiments.report.figures import Results


def claim_rows(results: Results) -> list[tuple[str, Entry]]:
    """Each claim and the newest file that decides it, in order."""
    found: dict[str, Entry] = {}
    for entry in sorted(results.entries, key=lambda entry: entry.document["date"]):
        name = claim_named(entry.document["experiment"])
        if name and entry.document["rows"] and "verdict" in entry.document["rows"][-1]:
            found[name] = entry
    return [(name, found[name]) for name in TITLES if name in found]


def worst(entry: Entry) -> Row:
    """The missed bar that is the farthest from what was asked for."""

    def far(bar: Row) -> float:
        try:
            ratio = float(bar["value"]) / float(bar["bar"])
        except (TypeError, ValueError, ZeroDivisionError):
            return 0.0
        return max(ratio, 1 / ratio if ratio > 0 else 0.0)

    return max(entry.missed, key=far)


def stale(results: Results) -> Iterator[tuple[Entry, list[str]]]:
    """Entries that say less of today's code than others, and why, as far as the files alone tell."""
    newest = max((date.fromisoformat(entry.document["date"]) for entry in results.entries), default=date.min)
    for entry in results.entries:
        reasons = []
        module = module_of(entry.document["command"])
        if module is None and not entry.document["command"].startswith("python"):
            reasons.append("no command: a sweep while the kernel was built")
        elif module is not None and load(module) is None:
            reasons.append(f"{module} is gone")
        elif module is not None and not parses(entry.document["command"]):
            reasons.append("its command is refused today")
        if not entry.document["complete"] and not reasons:
            reasons.append("cut off before its end")
        if days := (newest - date.fromisoformat(entry.document["date"])).days:
            reasons.append(f"{days} day{'s' * (days > 1)} older than the newest")
        if reasons:
            yield entry, reasons
