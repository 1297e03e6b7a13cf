"""The pages of details, one a kind of experiment: what was asked, the bars, the rows, and how they came.

Of each experiment, as its command calls it, and device a page shows the newest file. Pictures that lie beside a file
under its name are shown with it. What is said about an experiment, and which columns of its rows are shown, is in
the folder sections.
"""

import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from experiments.claims.claim import SHEETS
from experiments.claims.registry import TITLES, claim_named, find
from experiments.report.documents import Document, Entry, Row, short
from experiments.report.markdown import escape, folded, markdown, show, shown_bar, slug
from experiments.report.sections import PAGES
from experiments.report.sections.section import Section, Table
from experiments.steps.peers import SCRIPT_OF

INCOMPLETE = "not all that it asks for was measured; bars are of what was"
Placed = list[tuple[Section, str, Entry]]  # an entry under its section, with its heading
Anchors = dict[Path, str]  # file -> its chapter


def pages(entries: list[Entry]) -> dict[str, str]:
    """Text of each page, by its name; a page without entries says so."""
    return {name: page(PAGES[name][0], found) for name, found in placed(entries).items()}


def anchors_of(entries: list[Entry]) -> Anchors:
    """Where RESULTS.md finds the chapter of each file."""
    every = placed(entries)
    return {e.path: f"results/{name}.md#{slug(title)}" for name, found in every.items() for _, title, e in found}


def placed(entries: list[Entry]) -> dict[str, Placed]:
    """Each page's chapters, in order."""
    left, found = list(entries), dict[str, Placed]()
    for name, (_, sections) in PAGES.items():
        found[name] = []
        for section in sections:
            of_section = [entry for entry in left if re.fullmatch(section.pattern, entry.name)]
            left = [entry for entry in left if entry not in of_section]
            of_section.sort(key=_natural)
            found[name] += [(section, heading(section, entry, of_section), entry) for entry in of_section]
    return found


def page(title: str, found: Placed) -> str:
    parts = [
        f"# {title}",
        "Written by `python -m experiments.results_page` from the files in this folder, never by hand; bars are by the "
        "rules of today. [RESULTS.md](../RESULTS.md) has the whole in short.",
        index(found) if found else "No results.",
    ]
    parts += [part for section, title, entry in found for part in chapter(section, title, entry)]
    return "\n\n".join(parts) + "\n"


def heading(section: Section, entry: Entry, entries: Sequence[Entry]) -> str:
    """The section's title, with what sets this one apart from others of the section: the name that its command gives
    it, or the file's where several have the same."""
    match = re.fullmatch(section.pattern, entry.name)
    assert match is not None
    title = section.title.format(*match.groups()) if section.title else f"{entry.name}, {short(entry.device)}"
    if entry.name.startswith("claims-"):
        title += f": {TITLES.get(match.group(1), entry.name)}"
    same = [other for other in entries if other is not entry and _groups(section, other.name) == match.groups()]
    if not section.title:
        return title
    if any((other.name, other.device) == (entry.name, entry.device) for other in same):
        title += f": {entry.label}"
    elif any(other.name != entry.name for other in same):
        title += f": {entry.name}"
    if all(other.device == entry.device for other in same):
        return title
    return f"{title} ({', '.join(map(short, dict.fromkeys((entry.device, *entry.devices))))})"


def _natural(entry: Entry) -> tuple[list[str | int], str]:
    """C2 before C10."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", entry.label)], entry.device


def _groups(section: Section, name: str) -> Sequence[str]:
    match = re.fullmatch(section.pattern, name)
    return () if match is None else match.groups()


def index(found: Placed) -> str:
    lines = []
    for section, title, entry in found:
        document, bars = entry.document, entry.document["bars"]
        met = f"{len(bars) - len(entry.missed)} of {len(bars)}" if bars else ""
        when = document["date"] + ("" if document["complete"] else ", incomplete")
        devices = ", ".join(map(short, entry.devices))
        lines.append([f"[{title}](#{slug(title)})", section.answer(document), met, devices, when])
    return markdown(["what", "in short", "bars met", "device", "date"], lines)


def chapter(section: Section, title: str, entry: Entry) -> list[str]:
    path, document = entry.path, entry.document
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    others = " and ".join(
        device if device == SHEETS else f"one {device}" for device in entry.devices if device != entry.device
    )
    about = [
        document["device"]
        + (f", figures of {others}" if others else "")
        + f", {document['date']}, {versions}"
        + "".join(f", {text}" for text in made_with(document))
        + ("" if document["complete"] else f"; **incomplete**: {INCOMPLETE}")
        + (
            f"; floors, their shares and bars are those of today, not the file's own: {floors}"
            if (floors := document.get("floors_again"))
            else ""
        )
        + ("; the verdict is that of its rows by the rule of today, not the file's own" * ("judged_again" in document))
        + (f"; {amended}" if (amended := document.get("amended")) else ""),
        f"`{document['command']}`" if document["command"].startswith("python") else document["command"],
        f"[{path.name}]({path.name})",
    ]
    if beside := ", ".join(dict.fromkeys(filter(None, map(peer_in_words, document["rows"])))):
        about.append(f"peers: {beside}")
    if (tables := path.with_suffix(".md")).exists():
        about.append(f"[tables and pictures]({tables.name})")
    parts = [f"## {title}", section.intro, *method(entry), "\n".join(f"- {line}" for line in about)]
    for picture in sorted([*path.parent.glob(f"{path.stem}*.svg"), *path.parent.glob(f"{path.stem}*.png")]):
        parts.append(f"![{title}]({picture.name})")
    if document["bars"]:
        parts.append(bars_table(document["bars"]))
    parts += rows_tables(section, document["rows"])
    return [part for part in parts if part]


def peer_in_words(row: Row) -> str:
    """Returns the system of a row that is none of ours, with the script that times it and the version that ran."""
    script = row.get("script") or SCRIPT_OF.get(row.get("peer", ""))
    link = f"[{script}](../peers/{script})"
    return f"{row['peer']} by {link} ({row.get('version', 'version not recorded')})" if script else ""


def method(entry: Entry) -> Iterator[str]:
    """How a claim is tested, and from which figures on what it says holds."""
    if claim := claim_named(entry.document["experiment"]):
        yield inspect.cleandoc(sys.modules[find(claim).measure.__module__].__doc__ or "").partition("\n\n")[2]
        yield f"Rule: {find(claim).rule}"


def made_with(document: Document) -> Iterator[str]:
    """The commit, of a GPU driver and clocks, and the host that a document was measured with, and which of the first it
    lacks."""
    known = {"commit": commit_in_words(document.get("commit"))}
    if document["device"].startswith("NVIDIA"):
        clocks = document.get("clocks_mhz") or {}
        mhz = f"{clocks.get('sm')} of {clocks.get('most_sm')} MHz, memory {clocks.get('memory')}"
        known |= {"driver": document.get("driver"), "clocks": mhz if clocks else None}
    yield from (f"{name} {value}" for name, value in known.items() if value)
    if host := document.get("host"):
        loads = [load for load in (host["load"], host.get("load_after")) if load is not None]
        yield f"on {host['own_cores']} of {host['cores']} cores" + (f", load {max(loads):g}" if loads else "")
    if lacking := [name for name, value in known.items() if not value]:
        first, last = ", ".join(lacking[:-1]), lacking[-1]
        yield f"no {f'{first} or {last}' if first else last} recorded"


def commit_in_words(commit: str | None) -> str | None:
    """Without what was changed beside it, but says so."""
    return None if commit is None else commit.replace("+", " with changes")


def bars_table(bars: list[Document]) -> str:
    cells = [[*shown_bar(bar), "✓" if bar["met"] else "✗"] for bar in bars]
    caption = f"{len(bars)} bars, {sum(not bar['met'] for bar in bars)} missed"
    return folded(markdown(["bar", "measured", "asked for", ""], cells), caption, len(bars))


def rows_tables(section: Section, rows: list[Row]) -> list[str]:
    parts, left = [], [row for row in rows if "error" not in row]
    for table in (*section.tables, Table(())):
        chosen = [row for row in left if table.where(row)]
        left = [row for row in left if not table.where(row)]
        for keys in [table.columns] if table.columns else list(dict.fromkeys(tuple(row) for row in chosen)):
            some = [row for row in chosen if table.columns or tuple(row) == keys]
            if some and not table.hidden:
                parts.append(rows_table(table, keys, some))
    reasons = [str(row["error"]) for row in rows if "error" in row]
    parts += [f"{reasons.count(reason)} not measured: {escape(reason)}" for reason in dict.fromkeys(reasons)]
    return parts


def head(row: Row, across: str) -> str:
    """A pivot's column: each variant of a peer has its own."""
    return ", ".join(str(row[key]) for key in (across, "variant") if key in row)


def rows_table(table: Table, keys: Sequence[str], rows: list[Row]) -> str:
    columns = [key for key in keys if any(key in row for row in rows)]
    if table.pivot is None:
        cells = [[show(row.get(key)) if key in row else "" for key in columns] for row in rows]
        return folded(markdown(columns, cells), table.caption, len(cells))
    across, value = table.pivot
    heads = list(dict.fromkeys(head(row, across) for row in rows))
    found: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        found.setdefault(tuple(show(row.get(key)) for key in columns), {})[head(row, across)] = show(row.get(value))
    cells = [[*key, *(by.get(head, "") for head in heads)] for key, by in found.items()]
    return folded(markdown([*columns, *heads], cells), table.caption, len(cells))
