"""Tests C28: dynamic batching lowers latency vs. static batches at the same load.

The same requests of the QPS workload arrive at the same rates (Poisson), at one engine under two policies. With static
batching, all that wait when a batch ends form the next one. So a batch never waits for more members. It decodes until
its longest member ends. In the first third of the seconds only times between tokens count. C1 tests loads that neither
policy can serve.
"""

from collections.abc import Iterator

from experiments.claims.claim import Answer, Claim, Row, in_all, in_most, interval_of, spread
from experiments.claims.contest import NOISE
from experiments.claims.loads import from_settled, server, simulates

POLICIES = {"dynamic": "merge", "static": "static"}
RATES = {"measured": (8.0, 16.0), "simulated": (2.0, 4.0, 8.0, 12.0, 16.0, 20.0)}  # requests per second
TOY_RATES = (20.0,)
SECONDS = {"measured": 15.0, "simulated": 300.0}
LATENCIES = {
    "e2e_ms_p50": "whole request p50", "e2e_ms_p99": "whole request p99", "ttft_ms_p50": "first token p50",
    "itl_ms_p50": "between tokens p50", "itl_ms_p99": "between tokens p99",
}  # fmt: skip


def measure(toy: bool, seconds: float | None = None) -> Iterator[Row]:
    serve, source = server(toy), "simulated" if simulates(toy) else "measured"
    for rate in TOY_RATES if toy else RATES[source]:
        for policy, batching in POLICIES.items():
            found = from_settled(serve, toy, rate, seconds or SECONDS[source], batching=batching)
            yield {"policy": policy, **found}


def ratios(rows: list[Row], name: str) -> dict[float, float]:
    """Returns a latency under static batches over that of dynamic ones, by rate."""
    of = {(row["policy"], row["rate"]): row[name] for row in rows}
    both = [rate for policy, rate in of if policy == "dynamic" and ("static", rate) in of]
    return {rate: of["static", rate] / of["dynamic", rate] for rate in both}


def lower(worst: float, source: str) -> bool | None:
    """Returns whether dynamic batches have the lower latency at the rate with the worst ratio. Returns None if two runs
    could disagree, which simulations never do."""
    return worst > 1.0 if source == "simulated" else interval_of([worst], NOISE).reaches(1.0)


def worst(rows: list[Row]) -> dict[str, float]:
    """Returns each latency's least ratio over the rates."""
    return {name: min(found.values()) for name in LATENCIES if (found := ratios(rows, name))}


def holds(rows: list[Row]) -> Answer:
    """Decides by each latency, which must be lower at every rate."""
    sides = [lower(times, rows[0]["source"]) for times in worst(rows).values()]
    return in_most(sides), in_all(sides)


def words(rows: list[Row]) -> tuple[str, str]:
    sides = [lower(times, rows[0]["source"]) for times in worst(rows).values()]
    fewer = f"{sum(side is True for side in sides)} of {len(sides)} latencies"
    times = spread(ratios(rows, "e2e_ms_p50").values())
    line = f"Static batches take {times} times as long for a request; dynamic ones lower {fewer}."
    return f"{fewer} lower, a request {times} times", line


CLAIM = Claim(
    id="C28",
    stated="latency is lower",
    measure=measure,
    holds=holds,
    words=words,
    serves=True,
    computed=True,
    lasts=True,
)
