"""Tests C1: dynamic batching vs. static batches, which wait for their longest member.

One engine runs under two policies (contest.py). Either requests join and leave at every step, or they come in batches
of as many as there are slots. A static batch prefills, then decodes as many rows as it has members until the last one
ends.

How much that wins depends on slots and on requests. A GPU measures three such points: the contest's, in rounds, and two
that run once. A curve over more of them is simulated. On another machine the measured points are those of the newest
file.
"""

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np

from experiments.claims.claim import (
    NOT_TESTED,
    RESULTS,
    Answer,
    Claim,
    Interval,
    Row,
    change_of,
    in_all,
    in_most,
    percents,
)
from experiments.claims.contest import NOISE, SAMPLING, contest, contest_of, gain_holds, gain_words
from experiments.claims.loads import MODEL, simulate
from experiments.claims.recorded import newest, source_of
from experiments.claims.serving import served, workload
from experiments.serving.workload import Request
from experiments.simulate import make_costs
from pallas_kernels.backends import on_hopper

POLICIES = {"dynamic": "usual", "static": "static"}
BATCHING = {"dynamic": "merge", "static": "static"}
ONCE = ((32, 512), (256, 1024))  # slots and requests of the points that run once
SLOTS, COUNTS = (32, 128, 256, 512), (512, 1024, 4096)
STATED = 1.0, 2.0  # growth, from and to
SIDES = {"yes": True, "more": True, "no": False, "open": None}
WHO = "Dynamic batching"


def measure(toy: bool) -> Iterator[Row]:
    if not (toy or on_hopper()):
        yield from recorded(RESULTS)
    else:
        for row in contest(toy, POLICIES):
            yield {"source": "measured", **row}
    if toy:
        return
    for slots, count in ONCE if on_hopper() else ():
        for policy, batching in BATCHING.items():
            contest_of(toy).free()  # an engine of another size has pages of its own
            found = served(toy, count, slots=slots, batching=batching, **SAMPLING)
            yield {"source": "measured", "policy": policy, "slots": slots, **found}
    costs = make_costs(MODEL, None, None)
    for slots, count in product(SLOTS, COUNTS):
        for policy, batching in BATCHING.items():
            found = simulate(costs, repeated(count), slots=slots, batching=batching)
            yield {"policy": policy, "slots": slots, **found}


def repeated(count: int) -> list[Request]:
    """Returns the workload's first requests, all at once. Beyond its end they are drawn from it."""
    known = workload(False)
    drawn = np.random.default_rng(0).integers(len(known), size=max(0, count - len(known)))
    return [*known[:count], *(known[i] for i in drawn)]


def recorded(results: Path) -> Iterator[Row]:
    """Yields what the newest file of each GPU measured. Rows of older files don't say that they were."""
    for document, file in newest(results, "claims-C1"):
        for row in document["rows"] if document["device"] != "cpu" else ():
            if row.get("source", "measured") == "measured":
                yield {"source": "measured", **row, **source_of(document, file)}


def gains(rows: list[Row]) -> list[tuple[Row, Interval]]:
    """Returns the gain at each point of slots and requests, with one of its rows, first the measured ones."""
    cells: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        about = (row.get(name) for name in ("source", "slots", "requests", "measured_on"))
        cells.setdefault(tuple(map(str, about)), []).append(row)
    found = []
    for some in cells.values():
        ours, other = ([row for row in some if row["policy"] == name] for name in POLICIES)
        noise = 0.0 if some[0].get("source") == "simulated" else NOISE
        if (gain := change_of(ours, other, "qps", noise)) is not None:
            found.append((some[0], gain))
    return sorted(found, key=lambda each: each[0].get("source", ""))


def holds(rows: list[Row]) -> Answer:
    """Decides point by point, by the measured ones where there are any."""
    found = [gain_holds(gain, *STATED) for gain in decisive(rows)]
    if not found:
        return NOT_TESTED, ""
    directions, sizes = ([SIDES[side] for side in sides] for sides in zip(*found))
    more = all(size == "more" for _, size in found)
    return in_most(directions), "more" if more else in_all(sizes)


def decisive(rows: list[Row]) -> list[Interval]:
    found = gains(rows)
    return [gain for row, gain in found if row.get("source") != "simulated"] or [gain for _, gain in found]


def words(rows: list[Row]) -> tuple[str, str]:
    simulated = [gain.mean for row, gain in gains(rows) if row.get("source") == "simulated"]
    found = decisive(rows)
    if not simulated and len(found) == 1:
        return gain_words(WHO, found[0], *STATED)
    curve = f"{percents(simulated)} more requests a second, by slots and requests"
    if len(found) == len(simulated):
        return f"{percents(simulated)} more requests a second, simulated", f"Simulated: {WHO.lower()} serves {curve}."
    measured, line = gain_words(WHO, found[0], *STATED)
    if len(found) > 1:
        measured = f"{percents(gain.mean for gain in found)} more requests a second"
        line = f"{WHO} serves {measured}, by slots and requests."
    return f"{measured}; simulated {percents(simulated)}", f"{line} Simulated: {curve}."


CLAIM = Claim(
    id="C1",
    stated="+100 % requests a second, elsewhere +100 to +200 %",
    measure=measure,
    holds=holds,
    words=words,
    serves=True,
    alternates=True,
    computed=True,
)
