"""C23: service quality: the first token within 2 s and at most 50 ms a token from there on, a request's mean.

First the whole workload at once, which says how many requests a second the engine serves at most; then requests of the
workload arrive for some seconds (Poisson, drawn with replacement) at a rate that is raised step by step, or over the
loads that are asked for (--loads), until fewer than GOOD of them are in time. The first third of the seconds, while the
engine fills, is not counted. STEADY seconds and more are called a steady state; a GPU, whose time is dear, measures
fewer unless it is told otherwise (--seconds).
"""

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any

from experiments.claims.claim import Claim, Part, Row, Verdict, verdict_of
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


def judge(rows: list[Row]) -> Verdict:
    most = next((row["qps"] for row in rows if row["load"] is None), None)
    at_rates = sorted((row for row in rows if row["load"] is not None), key=lambda row: row["rate"])
    good = list(takewhile(lambda row: row["good_share"] >= GOOD, at_rates))  # what passes above one that fails is luck
    fails = at_rates[len(good)] if len(good) < len(at_rates) else None
    then = f"at {fails['rate']:.4g} arrivals {fails['good_share']:.1%} are" if fails else "no rate failed"
    if not good:
        said = f"{GOOD:.0%} of requests are in time at no rate: {then}" if fails else "no rate was measured"
        return verdict_of([Part(said, False)])
    top = good[-1]
    of_most = f", where {most:.4g} are when all are there at once" if most else ""
    in_time = (
        f"{GOOD:.0%} of requests are in time in {period(top)} of "
        f"up to {top['rate']:.4g} arrivals a second{'' if is_steady(top) else ', no steady state'}"
    )
    enough = f"{top['qps']:.4g} a second were completed{of_most}"
    parts = [Part(in_time, True), Part(enough, most is not None and top["qps"] >= ENOUGH * most)]
    waits = f"first token p99 {top['ttft_ms_p99']:.4g} ms, between tokens p99 {top['itl_ms_p99']:.4g} ms"
    return verdict_of(parts, waits, then, how="Simulated" if top.get("source") == "simulated" else "")


def is_steady(row: Row) -> bool:
    return row["arrivals_s"] >= STEADY


def period(row: Row) -> str:
    return f"a {'steady state' if is_steady(row) else 'burst'} of {row['arrivals_s']:.0f} s"


def draw(figure: Any, rows: list[Row]) -> None:
    left, right = figure.subplots(1, 2)
    found = [row for row in rows if row["load"] is not None]
    rates = [row["rate"] for row in found]
    left.plot(rates, [row["good_share"] for row in found], "o-")
    left.axhline(GOOD, color="black", linestyle="--", linewidth=1)
    left.set_xlabel("arrivals a second")
    left.set_ylabel("share in time")
    for name, limit, color in (("ttft_ms_p99", 2000, "C0"), ("itl_ms_p99", 50, "C1")):
        right.semilogy(rates, [row[name] for row in found], "o-", color=color, label=name)
        right.axhline(limit, color=color, linestyle="--", linewidth=1)
    right.set_xlabel("arrivals a second")
    right.set_ylabel("ms")
    right.legend()


CLAIM = Claim(
    id="C23",
    rule=(
        f"{GOOD:.0%} of the requests that arrive are in time, as qps counts goodput, and those completed a "
        f"second are at least {ENOUGH:.0%} of what is served all at once."
    ),
    stated="first token within 2 to 3 s, at most 50 ms a token",
    measure=measure,
    judge=judge,
    draw=draw,
    serves=True,
    computed=True,
    lasts=True,
    loads=True,
)
