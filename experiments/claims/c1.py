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


def gains(rows: list[Row]) -> tuple[list[Interval], list[Interval]]:
    """Returns the gain at each point of slots and requests: the measured ones, and the simulated ones."""
    cells: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        about = (row.get(name) for name in ("source", "slots", "requests", "measured_on"))
        cells.setdefault(tuple(map(str, about)), []).append(row)
    measured: list[Interval] = []
    simulated: list[Interval] = []
    for (source, *_), some in cells.items():
        ours, other = ([row for row in some if row["policy"] == name] for name in POLICIES)
        noise, found = (0.0, simulated) if source == "simulated" else (NOISE, measured)
        if (gain := change_of(ours, other, "qps", noise)) is not None:
            found.append(gain)
    return measured, simulated


def holds(rows: list[Row]) -> Answer:
    """Decides point by point, by the measured ones where there are any."""
    measured, simulated = gains(rows)
    found = [gain_holds(gain, *STATED) for gain in measured or simulated]
    if not found:
        return NOT_TESTED, ""
    directions, sizes = ([SIDES[side] for side in sides] for sides in zip(*found))
    more = all(size == "more" for _, size in found)
    return in_most(directions), "more" if more else in_all(sizes)


def words(rows: list[Row]) -> tuple[str, str]:
    measured, simulated = gains(rows)
    some, every = ("" if not found else percents(gain.mean for gain in found) for found in (measured, simulated))
    more = "more requests a second"
    if not measured:
        return f"{every} {more}, simulated", f"Simulated: {WHO.lower()} serves {every} {more}, by slots and requests."
    figure, line = gain_words(WHO, measured[0], *STATED)
    if len(measured) > 1:
        figure, line = f"{some} {more}", f"{WHO} serves {some} {more}, by slots and requests."
    if not simulated:
        return figure, line
    return f"{figure}; simulated {every}", f"{line} Simulated: {every} {more}, by slots and requests."


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
