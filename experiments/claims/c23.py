"""C23: service quality: the first token within 2 s and at most 50 ms a token from there on, a request's mean.

First the whole workload at once, which says how many requests a second the engine serves at most; then requests of the
workload arrive for some seconds (Poisson, drawn with replacement) at a rate that is raised step by step, or over the
loads that are asked for (--loads), until fewer than GOOD of them are in time. The first third of the seconds, while the
engine fills, is not counted. STEADY seconds and more are called a steady state; a GPU, whose time is dear, measures
fewer unless it is told otherwise (--seconds).
"""

from collections.abc import Iterator, Sequence
from itertools import takewhile

from experiments.claims.claim import NOT_TESTED, Answer, Claim, Row, in_all, in_most, percents
from experiments.claims.loads import from_settled, server, simulates

FIRST, STEP, LAST = 0.8, 0.1, 1.5  # rates, of what is served all at once
SECONDS = {"measured": 45.0, "simulated": 300.0}
STEADY = 300.0
GOOD = 0.99  # of requests that must be in time
ENOUGH = 0.5  # of what is served all at once: completed while requests are in time


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
    """Returns the rows of rising rates until one fails: what passes above one that fails is luck."""
    at_rates = sorted((row for row in rows if row["load"] is not None), key=lambda row: row["rate"])
    return list(takewhile(lambda row: row["good_share"] >= GOOD, at_rates))


def holds(rows: list[Row]) -> Answer:
    """Decides by whether GOOD of the requests are in time at some rate; of the size, by what was completed there, which
    is to be ENOUGH of what is served all at once."""
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
