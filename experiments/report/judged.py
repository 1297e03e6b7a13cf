"""What a result's rows say by the rules of today: shares of floors, its bars, and a claim's verdict."""

from typing import Any

from experiments.claims.claim import measured_rows
from experiments.claims.registry import claim_named, find
from experiments.report.commands import arguments_of, load, module_of
from experiments.report.floors_today import ceilings_read, with_floors
from experiments.steps.bars import OWN
from pallas_kernels.bench.bars import asked_of

Document = dict[str, Any]


def bars_of(document: Document) -> list[Document]:
    """The bars of a document's rows, by the function `bars` of the module its command names, or by its claim, those
    of other devices too. None where there is no such function or no row, and of runs of a few layers, which are too
    small to decide anything."""
    if claim := claim_of(document):
        return list(find(claim).verdict(measured_rows(document)).bars)
    module = module_of(document["command"])
    if module is None or not document["rows"] or "--layers" in document["command"].split():
        return []
    rule = getattr(load(module), "bars", None)
    return [] if rule is None else list(rule([dict(row) for row in document["rows"]]))


def bars_today(document: Document) -> list[Document]:
    """What a document's device has to reach by the rules of today, and bars that no rule makes of its rows alone."""
    made = bars_of(document)
    names = {each["name"] for each in made}
    kept = [each for each in document["bars"] if not (each["name"] in names or "floors_again" in document)]
    return asked_of(document["device"], made + kept)


def claim_of(document: Document) -> str | None:
    """The claim that a document decides. A toy's rows and those of which some failed decide none."""
    decided = document["rows"] and document["rows"][-1].get("verdict") in ("yes", "partly", "no", "open")
    return claim_named(document["experiment"]) if decided else None


def judged(document: Document) -> Document:
    """A document as it is to be read: floors and shares are those of today's limits; bars, and a claim's verdict, are
    what its rows say by the rules of today, of a run that was cut off as well."""
    document = with_backend(document)
    if (rows := with_floors(document)) is not document["rows"]:
        document = document | {"rows": rows, "floors_again": ceilings_read(document).rates}
    if claim := claim_of(document):
        verdict = find(claim).verdict(measured_rows(document))
        last = document["rows"][-1] | {"measured": verdict.measured, "verdict": verdict.verdict}
        changed = {} if last == document["rows"][-1] else {"judged_again": True}
        return document | {"rows": [*document["rows"][:-1], last], "bars": list(verdict.bars)} | changed
    if document["complete"] or document["bars"]:
        return document | {"bars": bars_today(document) if document["bars"] else []}
    if (claim := claim_named(document["experiment"])) and (rows := measured_rows(document)):  # cut off
        so_far = _so_far(claim, rows) if document.get("size") == "full" else ""
        last = {"stated": find(claim).stated, "measured": f"so far: {so_far}", "verdict": "incomplete"}
        return document | {"rows": [*document["rows"], last] if so_far else document["rows"]}
    return document | {"bars": bars_today(document)}


def with_backend(document: Document) -> Document:
    """Rows name the backend that their command asked for, which older files leave to it."""
    asked = getattr(arguments_of(document["command"]), "backend", None)
    one = asked[0] if isinstance(asked, list) and len(asked) == 1 else asked
    if not isinstance(one, str) or one == OWN[0]:
        return document
    return document | {"rows": [row if "peer" in row else {"backend": one} | row for row in document["rows"]]}


def _so_far(claim: str, rows: list[Document]) -> str:
    """What a claim's first rows say; nothing, where its rule needs rows that are not there yet."""
    try:
        return find(claim).verdict(rows).measured
    except (LookupError, ValueError, ZeroDivisionError):
        return ""
