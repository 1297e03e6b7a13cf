"""C23: service quality: the first token within 2 s and at most 50 ms a token from there on.

First the whole workload at once, which says how many requests a second the engine serves at most; then its first
requests by Poisson arrivals at shares of that rate, and how many of them were served in time. The first few find the
engine empty and do not count. A few hundred requests are a burst of some seconds and no steady state: by the time that
the last one arrives, the first ones have hardly ended. So it is judged by the rate at which requests were completed.
"""

from collections.abc import Iterator
from typing import Any

from experiments.claims.claim import Claim, Row, Verdict
from experiments.claims.serving import served

LOADS = (0.5, 0.7, 0.9)  # of what is served all at once
REQUESTS, CUT = 384, 64
GOOD = 0.99  # of requests that must be in time
ENOUGH = 0.5  # of what is served all at once: completed while requests are in time


def measure(toy: bool) -> Iterator[Row]:
    most = served(toy)
    yield {"load": None, "rate": None} | most
    for load in LOADS[:1] if toy else LOADS:
        rate = round(load * most["qps"], 2)
        yield {"load": load, "rate": rate} | served(toy, REQUESTS, rate=rate, cut=0 if toy else CUT)


def judge(rows: list[Row]) -> Verdict:
    most = next((row["qps"] for row in rows if row["load"] is None), None)
    at_rates = [row for row in rows if row["load"] is not None]
    good = [row for row in at_rates if row["good_share"] >= GOOD]
    if not good:
        best = max((row["good_share"] for row in at_rates), default=0.0)
        return Verdict("no", f"at no rate are {GOOD:.0%} of requests in time, at most {best:.1%}")
    top = max(good, key=lambda row: row["rate"])
    of_most = f", where {most:.4g} are when all are there at once" if most else ""
    measured = (
        f"{GOOD:.0%} of requests are in time in a burst of {top['requests'] / top['rate']:.0f} s of up to "
        f"{top['rate']:.4g} arrivals a second, no steady state: {top['qps']:.4g} a second were completed{of_most}; "
        f"first token p99 {top['ttft_ms_p99']:.4g} ms, between tokens p99 {top['itl_ms_p99']:.4g} ms"
    )
    return Verdict("yes" if most and top["qps"] >= ENOUGH * most else "partly", measured)


def draw(figure: Any, rows: list[Row]) -> None:
    left, right = figure.subplots(1, 2)
    found = [row for row in rows if row["load"] is not None]
    rates = [row["rate"] for row in found]
    left.plot(rates, [row["good_share"] for row in found], "o-")
    left.axhline(GOOD, color="black", linestyle="--", linewidth=1)
    left.set_xlabel("arrivals a second, in a burst")
    left.set_ylabel("share in time")
    for name, limit, color in (("ttft_ms_p99", 2000, "C0"), ("itl_ms_p99", 50, "C1")):
        right.semilogy(rates, [row[name] for row in found], "o-", color=color, label=name)
        right.axhline(limit, color=color, linestyle="--", linewidth=1)
    right.set_xlabel("arrivals a second, in a burst")
    right.set_ylabel("ms")
    right.legend()


CLAIM = Claim(
    id="C23",
    stated="first token within 2 to 3 s, at most 50 ms a token",
    measure=measure,
    judge=judge,
    draw=draw,
    serves=True,
)
