"""C28: dynamic batching lowers latency against static batches at the same load.

The same requests of the QPS workload arrive at the same rates (Poisson), to the same engine under its two policies.
Static: whoever waits when a batch has ended makes the next one, so that a batch is never waited for, and it decodes
until its longest member has ended. Of the first third of the seconds times between tokens count alone. What becomes of
latency where there is more to do than either can serve is C1's.
"""

from collections.abc import Iterator
from typing import Any

from experiments.claims.claim import Claim, Part, Row, Verdict, interval_of, verdict_of
from experiments.claims.contest import NOISE
from experiments.claims.loads import from_settled, server, simulates

POLICIES = {"dynamic": "merge", "static": "static"}
RATES = {"measured": (8.0, 16.0), "simulated": (2.0, 4.0, 8.0, 12.0, 16.0, 20.0)}  # requests a second
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
    """A latency under static batches over that of dynamic ones, by rate."""
    of = {(row["policy"], row["rate"]): row[name] for row in rows}
    both = [rate for policy, rate in of if policy == "dynamic" and ("static", rate) in of]
    return {rate: of["static", rate] / of["dynamic", rate] for rate in both}


def lower(worst: float, source: str) -> bool | None:
    """Whether dynamic batches have the lower latency at the rate whose ratio is the worst; None where two runs could
    say otherwise, as two simulations never do."""
    return worst > 1.0 if source == "simulated" else interval_of([worst], NOISE).reaches(1.0)


def judge(rows: list[Row]) -> Verdict:
    found = {name: list(ratios(rows, name).values()) for name in LATENCIES}
    rates = list(ratios(rows, "e2e_ms_p50"))
    if not rates:
        return verdict_of([Part("no rate was measured under both", False)])
    texts = {name: f"{said} {min(found[name]):.2f} to {max(found[name]):.2f} times" for name, said in LATENCIES.items()}
    source = rows[0]["source"]
    parts = [Part(text, lower(min(found[name]), source)) for name, text in texts.items()]
    seconds = f" in {rows[0]['arrivals_s']:g} s of arrivals" if "arrivals_s" in rows[0] else ""
    how = f"{source.capitalize()}{seconds}, what static batches take over dynamic ones"
    return verdict_of(parts, f"at {min(rates):g} to {max(rates):g} arrivals a second", how=how)


def draw(figure: Any, rows: list[Row]) -> None:
    for axes, name, label in zip(
        figure.subplots(1, 3),
        ("e2e_ms_p50", "ttft_ms_p50", "itl_ms_p99"),
        ("whole request, p50", "first token, p50", "between tokens, p99"),
    ):
        for policy in POLICIES:
            found = [row for row in rows if row["policy"] == policy]
            axes.semilogy([row["rate"] for row in found], [row[name] for row in found], "o-", label=policy)
        axes.set_xlabel("arrivals a second")
        axes.set_title(f"{label}, ms", fontsize=8)
    axes.legend()


CLAIM = Claim(
    id="C28",
    rule=(
        "Lower is lower at every rate, for each of the latencies. Measured within "
        f"{NOISE:.0%} at the worst rate it is open: by so much two runs of one policy have differed in requests a "
        "second. Simulated rows have no noise and no such margin: equal is not lower."
    ),
    stated="latency is lower",
    measure=measure,
    judge=judge,
    draw=draw,
    serves=True,
    computed=True,
    lasts=True,
)
