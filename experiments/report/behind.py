"""results/behind.md: bars that further results miss, and results that are stale, with what measures them again."""

from collections.abc import Iterable, Iterator

from experiments.campaign import Command
from experiments.report.asked import ASKED
from experiments.report.details import Anchors, anchors_of
from experiments.report.documents import Entry, short
from experiments.report.figures import Results
from experiments.report.standing import lines_of, stale
from pallas_kernels.bench.bars import H200


def page(results: Results) -> str:
    """The page's text."""
    anchors = {path: where.removeprefix("results/") for path, where in anchors_of(results.entries).items()}
    parts = [
        "# What is behind",
        "Written by `python -m experiments.results_page` from the files in this folder, never by hand. "
        "[RESULTS.md](../RESULTS.md) has the whole in short, and the bars that are asked for.",
        "## Bars that further results miss",
        "Some of these are older runs.",
        "\n".join(f"- {link(entry, anchors)}: {text}" for entry, text in missed(results)) or "None.",
        "## What is stale",
        *_stale(results, anchors),
    ]
    return "\n\n".join(parts) + "\n"


def missed(results: Results) -> Iterator[tuple[Entry, str]]:
    """Results that miss bars of their own, which are none of those asked for (asked.py), and how many of these."""
    of_these = {(entry.path, each["name"]) for asked in ASKED for entry, each in asked.found(results.entries)}
    for entry in results.entries:
        own = [each for each in entry.document["bars"] if (entry.path, each["name"]) not in of_these]
        if count := sum(not each["met"] for each in own):
            yield entry, f"{count} of {len(own)}"


def _stale(results: Results, anchors: Anchors) -> Iterator[str]:
    found: dict[str, list[Entry]] = {}
    for entry, reason in stale(results):
        found.setdefault(reason, []).append(entry)
    if not found:
        yield "Nothing: every figure is of a commit of this history, and the command that its file names works today."
        return
    every = [entry for entries in found.values() for entry in entries]
    again = {line.name: line for entry in every for line in lines_of(entry)}
    left = [entry.label for entry in every if entry.device != "cpu" and not lines_of(entry)]
    yield (
        "Figures that cannot be traced to a commit, or that the command of their file does not give today. On a GPU "
        f"{_measured_by(again.values())} again{', but for ' * bool(left)}{', '.join(left)}:"
    )
    yield "\n".join(
        f"- {reason}: {', '.join(link(entry, anchors) for entry in entries)}"
        for reason, entries in sorted(found.items())
    )


def _measured_by(lines: Iterable[Command]) -> str:
    """The commands that measure these lines, one for each number of GPUs."""
    by: dict[int, list[str]] = {}
    for line in lines:
        by.setdefault(line.gpus, []).append(line.name)
    commands = [
        f"`measure_all --only {' '.join(names)}{f' --gpus {gpus}' * (gpus > 1)}`" for gpus, names in sorted(by.items())
    ]
    return f"{' and '.join(commands)} measure{'s' * (len(commands) == 1)} them"


def link(entry: Entry, anchors: Anchors) -> str:
    """Its name, and its device where that is no H200, leading to its chapter."""
    device = "" if entry.device == H200 else f", {short(entry.device)}"
    return f"[{entry.label}{device}]({anchors[entry.path]})"
