"""Measures claims into their files, and decides them."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from experiments.claims.claim import NOT_TESTED, Claim, Row, measured_rows
from experiments.claims.registry import TITLES
from experiments.result_file import ResultFile


def run(
    tested: Sequence[tuple[Claim, ResultFile]],
    toy: bool,
    show: Callable[[str], None],
    seconds: float | None = None,
    subject: Any = None,
    loads: Sequence[float] = (),
) -> None:
    """Measures claims into their files, a row of each in turn, so that shared runs alternate. Each is concluded when it
    has no more rows. `subject` is for claims whose model is chosen (None: the bundled one); their rows name it."""

    def measure(claim: Claim) -> Iterable[Row]:
        if claim.loads:
            return claim.measure(toy, seconds, loads)
        if claim.lasts:
            return claim.measure(toy, seconds)
        if not claim.chosen or subject is None:
            return claim.measure(toy)
        return ({"subject": subject.name, **row} for row in claim.measure(toy, subject))

    waiting = deque((claim, result, iter(measure(claim))) for claim, result in tested)
    while waiting:
        claim, result, rows = turn = waiting.popleft()
        if (row := next(rows, None)) is None:
            conclude(claim, result, toy)
        else:
            result.add({"claim": claim.id, **row})
            show("  ".join(f"{key}={value}" for key, value in row.items()))
            waiting.append(turn)


def conclude(claim: Claim, result: ResultFile, toy: bool) -> None:
    """Ends a claim's file. It gets a verdict if nothing failed; toys are too small to decide."""
    good = measured_rows(result.document)
    complete = len(good) == len(result.document["rows"])
    decided = {"verdict": verdict_of(claim, good)} if complete and not toy else {}
    result.finish(bars=[], complete=complete, **decided)


def verdict_of(claim: Claim, rows: list[Row]) -> dict[str, str]:
    """Returns the verdict of a claim's rows, in the form of its file."""
    direction, size = claim.holds(rows) if rows else (NOT_TESTED, "")
    measured, line = "nothing", "There is no measurement that decides it."
    if direction != NOT_TESTED:
        measured, line = claim.words(rows)
    return {
        "claim": claim.id, "title": TITLES[claim.id], "stated": claim.stated, "measured": measured,
        "direction": direction, "size": size, "line": line,
    }  # fmt: skip
