"""Tests C23: service quality. A request must get its first token within 2 s, and later tokens at 50 ms or less on
average.

First the whole workload starts at once, which gives the highest throughput. Then requests arrive for some seconds
(Poisson, drawn with replacement). Their rate rises, by steps or over --loads, until too few of them are in time. The
first third of the seconds, while the engine fills, does not count. Long enough runs are called a steady state. A GPU
measures fewer seconds by default (--seconds), as its time is expensive.
"""

from collections.abc import Iterator, Sequence
from itertools import takewhile

from experiments.claims.claim import NOT_TESTED, Answer, Claim, Row, in_all, in_most, percents
from experiments.claims.loads import from_settled, server, simulates

FIRST, STEP, LAST = 0.8, 0.1, 1.5  # rates, as shares of the throughput of all at once
SECONDS = {"measured": 45.0, "simulated": 300.0}
STEADY = 300.0
GOOD = 0.99  # share of requests that must be in time
ENOUGH = 0.5  # share of the throughput of all at once that must complete in time


def measure(toy: bool, seconds: float | None = None, loads: Sequence[float] = ()) -> Iterator[Row]:
    serve = server(toy)
    most = serve()
    yield {"load": None, "rate": None} | most
    seconds = seconds or SECONDS["simulated" if simulates(toy) else "measured"]
    rising = [round(FIRST + i * STEP, 2) for i in range(1 if toy else round((LAST - FIRST) / STEP) + 1)]
    for load in sorted(loads) or rising:
        row = from_settled(serve, toy, round(load * most["qps"], 2), seconds)
        yield {"load": load} | row
        if row["good_share"] < GOOD:
            return


def in_time(rows: list[Row]) -> list[Row]:
    """Returns the rows of rising rates until one fails. A pass above a failure is luck."""
    at_rates = sorted((row for row in rows if row["load"] is not None), key=lambda row: row["rate"])
    return list(takewhile(lambda row: row["good_share"] >= GOOD, at_rates))


def holds(rows: list[Row]) -> Answer:
    """Decides by whether enough requests are in time at some rate. The size needs ENOUGH of the highest throughput
    there."""
    if not any(row["load"] is not None for row in rows):
        return NOT_TESTED, ""
    most, good = next((row["qps"] for row in rows if row["load"] is None), None), in_time(rows)
    enough = bool(good) and most is not None and good[-1]["qps"] >= ENOUGH * most
    return in_most([bool(good)]), in_all([enough])


def words(rows: list[Row]) -> tuple[str, str]:
    good, of = in_time(rows), f"{percents([GOOD])} of requests"
    if not good:
        return f"{of} in time at no rate", f"{of} are in time at no rate that was measured."
    top = good[-1]
    when = "simulated " * (top.get("source") == "simulated") + ("seconds" if is_steady(top) else "seconds of a burst")
    line = f"{of} are in time at up to {top['rate']:.1f} arrivals a second, in {top['arrivals_s']:.0f} {when}."
    return f"{of} in time up to {top['rate']:.1f} a second", line


def is_steady(row: Row) -> bool:
    return row["arrivals_s"] >= STEADY


CLAIM = Claim(
    id="C23",
    stated="first token within 2 s, 50 ms a token",
    measure=measure,
    holds=holds,
    words=words,
    serves=True,
    computed=True,
    lasts=True,
    loads=True,
)
