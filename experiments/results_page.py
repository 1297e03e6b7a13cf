"""The results page, experiments/RESULTS.md, from the files of experiments/results and nothing else.

    python -m experiments.results_page           # writes the page; --check only says whether it is what it would write

Of each experiment, as its command calls it, and device it shows the newest file: what was asked, the bars and whether
they are met, the rows, and under what versions, when and by which command they came. Pictures that lie beside a file
under its name are shown with it. Bars of a run that was cut off are those of its rows, and verdicts of claims what
their rows say by the rules of today (report/judged.py). What is said about an experiment, and which columns of its rows
are shown, is in report/sections.py.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

from experiments.claims.registry import TITLES
from experiments.report.commands import name_of
from experiments.report.judged import judged
from experiments.report.sections import FALLBACK, GROUPS, Section, Table
from jllm.errors import InputFileError
from pallas_kernels.bench.command import interruptible

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parent / "RESULTS.md"
Document = dict[str, Any]
KEYS = {"experiment": str, "date": str, "device": str, "versions": dict, "command": str, "complete": bool}
BAR_KEYS = {"name", "value", "unit", "bar", "met"}
INCOMPLETE = "not all that it asks for was measured; bars are of what was"
LONG = 16  # rows; a longer table is folded away


def read_result(path: Path) -> Document:
    """A result file. Raises InputFileError, with what is wrong, for one that does not keep to the schema."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputFileError(f"{path.name}: not JSON: {error}") from None
    for problem in problems(document):
        raise InputFileError(f"{path.name}: {problem}")
    return document


def problems(document: Any) -> Iterable[str]:
    """What of the schema of results a document breaks."""
    if not isinstance(document, dict):
        yield "not an object"
        return
    for key, kind in KEYS.items():
        if not isinstance(document.get(key), kind):
            yield f"{key} must be there, a {kind.__name__}, not {document.get(key)!r}"
    try:
        date.fromisoformat(str(document.get("date")))
    except ValueError:
        yield f"date must be YYYY-MM-DD, not {document.get('date')!r}"
    for key in ("rows", "bars"):
        entries = document.get(key)
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            yield f"{key} must be a list of objects"
            continue
        for i, entry in enumerate(entries):
            if key == "bars" and set(entry) != BAR_KEYS:
                yield f"bar {i} must have {', '.join(sorted(BAR_KEYS))}, not {', '.join(sorted(entry))}"
            if deep := next((name for name, value in entry.items() if not is_flat(value)), None):
                yield f"{key} {i}: {deep} must be a value or a list of values"


def is_flat(value: Any) -> bool:
    plain = (str, int, float, bool, type(None))
    return isinstance(value, plain) or (isinstance(value, list) and all(isinstance(x, plain) for x in value))


@dataclass(frozen=True)
class Entry:
    """The files of one name and device, the newest first."""

    label: str  # their name, without date and device
    files: list[tuple[Path, Document]]

    @property
    def document(self) -> Document:
        return self.files[0][1]

    @property
    def device(self) -> str:
        return self.document["device"]

    @cached_property
    def name(self) -> str:
        """What the newest's command calls it, whatever the file was renamed to."""
        return name_of(self.document)


def read_all(directory: Path) -> list[Entry]:
    found: dict[tuple[str, str], list[tuple[Path, Document]]] = {}
    for path in sorted(directory.glob("*.json")):
        document = judged(read_result(path))
        found.setdefault((label_of(path), document["device"]), []).append((path, document))
    for files in found.values():
        files.sort(key=lambda file: file[1]["date"], reverse=True)
    return [Entry(label, files) for (label, _), files in found.items()]


def label_of(path: Path) -> str:
    """matmul-many of matmul-many-20261122-h200.json."""
    return re.sub(r"-\d{8}-[^/]*$", "", path.stem)


# Markdown


def page(directory: Path = RESULTS) -> str:
    """The whole page."""
    found = read_all(directory)
    placed: list[tuple[str, list[tuple[Section, str, Entry]]]] = []
    left = list(found)
    for group, sections in GROUPS:
        entries = []
        for section in sections:
            of_section = [entry for entry in left if re.fullmatch(section.pattern, entry.name)]
            left = [entry for entry in left if entry not in of_section]
            of_section.sort(key=_natural)
            entries += [(section, heading(section, entry, of_section), entry) for entry in of_section]
        placed.append((group, entries))
    placed.append(("Other", [(FALLBACK, f"{entry.name}, {short(entry.device)}", entry) for entry in left]))
    parts = [
        "# Results",
        "Written by `python -m experiments.results_page` from [the files of results](results), never by hand. "
        "A bar is what a figure had to reach; ✓ met, ✗ missed. What was expected and learned on the way is in "
        "[LOG.md](LOG.md).",
        index(placed),
    ]
    for group, entries in placed:
        if entries:
            parts.append(f"## {group}")
            parts += [part for section, title, entry in entries for part in chapter(section, title, entry.files)]
    return "\n\n".join(parts) + "\n"


def heading(section: Section, entry: Entry, entries: Sequence[Entry]) -> str:
    """The section's title, with what sets this one apart from others of the section: the name that its command gives
    it, or the file's where several have the same."""
    match = re.fullmatch(section.pattern, entry.name)
    assert match is not None
    title = section.title.format(*match.groups())
    if entry.name.startswith("claims-"):
        title += f": {TITLES.get(match.group(1), entry.name)}"
    same = [other for other in entries if other is not entry and _groups(section, other.name) == match.groups()]
    if any((other.name, other.device) == (entry.name, entry.device) for other in same):
        title += f": {entry.label}"
    elif any(other.name != entry.name for other in same):
        title += f": {entry.name}"
    return f"{title} ({short(entry.device)})" if any(other.device != entry.device for other in same) else title


def _natural(entry: Entry) -> tuple[list[str | int], str]:
    """C2 before C10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", entry.label)], entry.device


def _groups(section: Section, name: str) -> Sequence[str]:
    match = re.fullmatch(section.pattern, name)
    return () if match is None else match.groups()


def short(device: str) -> str:
    return device.removeprefix("NVIDIA ").replace("cpu", "CPU")


def index(placed: Sequence[tuple[str, Sequence[tuple[Section, str, Entry]]]]) -> str:
    lines = ["| what | in short | bars met | device | date |", "|---|---|---|---|---|"]
    for group, entries in placed:
        if entries:
            lines.append(f"| **{group}** | | | | |")
        for section, title, entry in entries:
            document = entry.document
            bars = document["bars"]
            met = f"{sum(bool(bar['met']) for bar in bars)} of {len(bars)}" if bars else ""
            state = "" if document["complete"] else ", incomplete"
            cells = (f"[{title}](#{slug(title)})", section.answer(document), met, short(document["device"]))
            lines.append(f"| {' | '.join(escape(cell) for cell in cells)} | {document['date']}{state} |")
    return "\n".join(lines)


def slug(title: str) -> str:
    """GitHub's anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def chapter(section: Section, title: str, files: list[tuple[Path, Document]]) -> list[str]:
    path, document = files[0]
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    about = [
        f"{document['device']}, {document['date']}, {versions}"
        + ("" if document["complete"] else f"; **incomplete**: {INCOMPLETE}")
        + ("; the verdict is that of its rows by the rule of today, not the file's own" * ("judged_again" in document)),
        f"`{document['command']}`" if document["command"].startswith("python") else document["command"],
        f"[{path.name}](results/{path.name})"
        + "".join(f", earlier [{old['date']}](results/{other.name})" for other, old in files[1:]),
    ]
    parts = [f"### {title}", section.intro, "\n".join(f"- {line}" for line in about)]
    for picture in sorted([*path.parent.glob(f"{path.stem}*.svg"), *path.parent.glob(f"{path.stem}*.png")]):
        parts.append(f"![{title}](results/{picture.name})")
    if document["bars"]:
        parts.append(bars_table(document["bars"]))
    parts += rows_tables(section, document["rows"])
    return [part for part in parts if part]


def bars_table(bars: list[Document]) -> str:
    cells = []
    for bar in bars:
        unit = "" if bar["unit"] in ("1", "fraction") else f" {bar['unit']}"
        cells.append([bar["name"], f"{show(bar['value'])}{unit}", show(bar["bar"]), "✓" if bar["met"] else "✗"])
    caption = f"{len(bars)} bars, {sum(not bar['met'] for bar in bars)} missed"
    return folded(markdown(["bar", "measured", "asked for", ""], cells), caption, len(bars))


def rows_tables(section: Section, rows: list[Document]) -> list[str]:
    parts, left = [], [row for row in rows if "error" not in row]
    for table in (*section.tables, Table(())):
        chosen = [row for row in left if table.where(row)]
        left = [row for row in left if not table.where(row)]
        for keys in row_kinds(chosen) if not table.columns else [table.columns]:
            some = [row for row in chosen if table.columns or tuple(row) == keys]
            if some and not table.hidden:
                parts.append(rows_table(table, keys, some))
    reasons = [str(row["error"]) for row in rows if "error" in row]
    parts += [f"{reasons.count(reason)} not measured: {escape(reason)}" for reason in dict.fromkeys(reasons)]
    return parts


def row_kinds(rows: list[Document]) -> list[tuple[str, ...]]:
    return list(dict.fromkeys(tuple(row) for row in rows))


def rows_table(table: Table, keys: Sequence[str], rows: list[Document]) -> str:
    columns = [key for key in keys if any(key in row for row in rows)]
    if table.pivot is None:
        cells = [[show(row.get(key)) if key in row else "" for key in columns] for row in rows]
        return folded(markdown(columns, cells), table.caption, len(cells))
    across, value = table.pivot
    heads = list(dict.fromkeys(str(row[across]) for row in rows))
    found: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        found.setdefault(tuple(show(row.get(key)) for key in columns), {})[str(row[across])] = show(row.get(value))
    cells = [[*key, *(by.get(head, "") for head in heads)] for key, by in found.items()]
    return folded(markdown([*columns, *heads], cells), table.caption, len(cells))


def markdown(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *cells]
    return "\n".join(f"| {' | '.join(escape(cell) for cell in line)} |" for line in lines)


def folded(table: str, caption: str, rows: int) -> str:
    """Under its caption, and closed if it is long."""
    if rows <= LONG:
        return f"{caption}\n\n{table}" if caption else table
    return f"<details><summary>{caption or 'rows'} ({rows})</summary>\n\n{table}\n\n</details>"


def show(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    if isinstance(value, list):
        if len(value) > 1 and len(set(map(str, value))) == 1:
            return f"{len(value)} x {show(value[0])}"
        return ", ".join(map(show, value))
    return str(value)


def escape(cell: str) -> str:
    return cell.replace("|", "\\|").replace("\n", " ")


@interruptible
def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if the page is another")
    args = parser.parse_args(argv)
    try:
        text = page()
    except InputFileError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.check:
        same = PAGE.exists() and PAGE.read_text(encoding="utf-8") == text
        print(f"{PAGE.name} is {'what the results say' if same else 'stale: python -m experiments.results_page'}")
        return 0 if same else 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
