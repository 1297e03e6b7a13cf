"""How results stand: which file answers a claim, how far a figure is behind its bar, and what is stale."""

import math
from collections.abc import Iterator

from experiments.campaign import TOPICS, Command
from experiments.claims.accuracy import BUNDLED_SUBJECT, subject_of
from experiments.claims.registry import TITLES, claim_named
from experiments.report.commands import load, module_of, name_of, parses
from experiments.report.documents import Entry, Row
from experiments.report.figures import Results


def claim_rows(results: Results) -> list[tuple[str, Entry]]:
    """Returns the claims in order, each with the newest complete file of each device, the newest first; where all have
    one verdict the newest alone. Files that simulate count only where no other does, and incomplete ones where none is
    complete. Of claims about any model those of the bundled one count."""
    found: dict[str, dict[str, Entry]] = {}
    for name, subject, entry in reversed([*_answers(results)]):
        if subject == BUNDLED_SUBJECT.name:
            of = found.setdefault(name, {})
            if all(_kind(other) == _kind(entry) for other in of.values()):
                of.setdefault(entry.device, entry)
    each = {name: list(of.values()) for name, of in found.items()}
    alike = {name for name, some in each.items() if len({_verdict(entry) for entry in some}) == 1}
    return [(name, entry) for name in TITLES for entry in each.get(name, [])[: 1 if name in alike else None]]


def _verdict(entry: Entry) -> str:
    return str(entry.document["rows"][-1]["verdict"])


def of_other_models(results: Results) -> dict[str, dict[str, Entry]]:
    """Of claims about any model, by claim and model: such a file about each model but the bundled one."""
    found: dict[str, dict[str, Entry]] = {}
    for name, subject, entry in _answers(results):
        if subject != BUNDLED_SUBJECT.name:
            found.setdefault(name, {})[subject] = entry
    return found


def _answers(results: Results) -> Iterator[tuple[str, str, Entry]]:
    """(claim, model, file) of each file that has a verdict, so sorted that the last of a claim and a model counts:
    files that are not complete come first, then those that simulate, which are made again with every step that they are
    costed by, and of either kind the oldest."""

    for entry in sorted(results.entries, key=lambda entry: (_kind(entry), entry.document["date"])):
        name, rows = claim_named(entry.document["experiment"]), entry.document["rows"]
        if name and rows and "verdict" in rows[-1]:
            yield name, subject_of(rows), entry


def _kind(entry: Entry) -> tuple[bool, bool]:
    """Returns whether a file is complete, and whether it simulates nothing."""
    return entry.document["complete"], not any(device.startswith("simulated") for device in entry.devices)


def shortfall(bar: Row) -> float:
    """How far a figure is behind its bar: over 1 where it misses, under 1 where it meets it."""
    try:
        ratio = float(bar["value"]) / float(bar["bar"])
    except (TypeError, ValueError, ZeroDivisionError):
        return 0.0
    further = max(ratio, 1 / ratio) if ratio > 0 else math.inf
    return 1 / further if bar["met"] else further


def stale(results: Results) -> Iterator[tuple[Entry, str]]:
    """Entries whose figures cannot be traced to a commit, or made again as they were, and why."""
    for entry in results.entries:
        command, commit = entry.document["command"], entry.document.get("commit")
        module = module_of(command)
        if module is None and not command.startswith("python"):
            yield entry, "no command: a sweep while the kernel was built"
        elif module is not None and load(module) is None:
            yield entry, f"{module} is gone"
        elif module is not None and not parses(command):
            yield entry, "its command is refused today"
        elif commit is None:
            yield entry, "measured before commits were recorded"
        elif commit.endswith("+"):
            yield entry, "measured with changes that its commit does not have"
        elif not entry.document["complete"]:
            yield entry, "cut off before its end"


def lines_of(entry: Entry) -> list[Command]:
    """The line of campaign.py that measures it again, the first of several, if there is one."""
    if entry.device == "cpu":
        return []
    return [line for lines in TOPICS.values() for line in lines if entry.name in _results_of(line)][:1]


def _results_of(line: Command) -> list[str]:
    """The names of what a line of the campaign measures."""
    command = f"python {line.line}".replace(" --results {results}", "")
    if module_of(command) == "experiments.claims":
        return [f"claims-{claim}" for claim in command.split()[3:]]
    return [name_of({"command": command, "experiment": line.name})]
