"""Makes the table of claims from each file's own verdict."""

import re
from collections.abc import Iterable, Iterator

from experiments.report.documents import Entry, Row, short
from experiments.report.markdown import markdown

COLUMNS = ("", "claim", "stated", "measured", "direction", "size", "in a line")


def claims_table(entries: Iterable[Entry]) -> Iterator[str]:
    """Yields the meaning of the columns, and a row for each claim. A claim whose files differ has further rows."""
    cells = [_cells(name, entry, several) for name, entry, several in answers(entries)]
    if cells:
        yield (
            "Direction says whether the claimed effect is there in most cases. Size says whether it is as large as "
            "stated: `mostly` means in most cases, and `more` means larger. `open`: noise does not let us decide. A "
            "claim links to the file that answers it."
        )
        yield markdown(COLUMNS, cells)


def answers(entries: Iterable[Entry]) -> list[tuple[str, Entry, bool]]:
    """Returns claims in order, each with its best file and with others whose answers differ, and whether it has
    several. Complete files are best, then measured ones, then those of the bundled model, then the newest."""
    found: dict[str, list[Entry]] = {}
    for entry in sorted(entries, key=_rank, reverse=True):
        if name := re.match(r"claims-(C\d+)", entry.document["experiment"]):
            of = found.setdefault(name[1], [])
            as_good = of and _rank(entry)[:2] == _rank(of[0])[:2]
            if not of or (as_good and answer_of(entry) not in map(answer_of, of)):
                of.append(entry)
    ordered = sorted(found, key=lambda name: int(name[1:]))
    return [(name, entry, len(found[name]) > 1) for name in ordered for entry in found[name]]


def _rank(entry: Entry) -> tuple[bool, bool, bool, str]:
    sources = {row.get("source") for row in entry.document["rows"]}
    return (
        entry.document["complete"],
        "measured" in sources or "simulated" not in sources,
        "-subject" not in entry.label,
        entry.date,
    )


def verdict_of(entry: Entry) -> Row:
    found: Row = entry.document.get("verdict") or {}
    return found


def answer_of(entry: Entry) -> tuple[str, str]:
    """Returns a file's two answers."""
    verdict = verdict_of(entry)
    return verdict.get("direction", ""), verdict.get("size", "")


def _cells(name: str, entry: Entry, several: bool) -> list[str]:
    verdict = verdict_of(entry)
    device = short(entry.device).partition(" ")[0]
    on = f", {'a larger model' if '-subject' in entry.label else device}" if several else ""
    link = f"[{name}](results/{entry.path.name}){on}"
    if not verdict:
        return [link, "", "", "", "", "", f"Its file has no verdict: run `python -m experiments.claims {name}`."]
    return [link, *(verdict[key] for key in ("title", "stated", "measured", "direction", "size", "line"))]
