"""Serves at a load, for claims about policies and formats. A Hopper GPU measures. Elsewhere the engine's own scheduler
runs the same settings and requests on steps with computed costs.

A row's `source` shows which of the two it is. The simulator ignores work between steps. experiments.simulation_error
measures how much too fast that makes it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from experiments.baselines import BASELINES, SCHEDULERS
from experiments.claims.claim import Row
from experiments.claims.serving import KEPT, served, settings, workload
from experiments.result_file import rounded
from experiments.serving.engines import pages_of_h200
from experiments.serving.workload import PERCENTILES, Request, Served, served_row
from experiments.simulate import Costs, make_costs
from experiments.simulation.requests import Arrival, Sample
from experiments.simulation.run import Simulation
from jllm.engine.options import EngineOptions
from pallas_kernels.backends import on_hopper

Serve = Callable[..., Row]  # takes count= or seconds= of the workload, and settings of experiments.qps; returns a row
MODEL = "llama-2-7b"


def simulates(toy: bool) -> bool:
    return not (toy or on_hopper())


def server(toy: bool, costs: Costs | None = None) -> Serve:
    """Returns the function that serves. `costs` are those of simulated steps (default: bf16 weights and K and V)."""
    if not simulates(toy):
        return partial(measured, toy)
    return partial(simulated, costs or make_costs(MODEL, None, None))


def measured(toy: bool, **asked: Any) -> Row:
    return {"source": "measured"} | served(toy, **asked)


def simulated(costs: Costs, count: int | None = None, seconds: float | None = None, **changes: Any) -> Row:
    """Returns the row that serving.served would measure with these step costs. Without `num_pages`, the pool is an
    H200's."""
    rate = changes.get("rate")
    return simulate(costs, workload(False, count, rate, seconds), **changes)


def simulate(costs: Costs, requests: list[Request], **changes: Any) -> Row:
    """Returns the row of a simulation of the given requests. Raises ValueError for a setting that is not simulated."""
    args = settings(False, **changes)
    for name in ("sampling", "host"):
        if getattr(args, name) != BASELINES[name][0]:
            raise ValueError(f"{name} {getattr(args, name)} is not simulated, but {BASELINES[name][0]} alone")
    pages = args.num_pages or pages_of_h200(costs.model, args.page_size, args.kv_cache, args.slots)
    options = EngineOptions(
        max_slots=args.slots, page_size=args.page_size, num_pages=pages, max_step_tokens=args.max_step_tokens,
        kv_cache=args.kv_cache,
    )  # fmt: skip
    scheduler = SCHEDULERS[args.batching, args.prefill]
    longest = max(request.output for request in requests)
    run = Recorded(costs.model.config, options, costs.cost, longest, scheduler=scheduler)
    tally = run.run(Arrival(Sample((1,) * r.prompt, r.output), r.arrival) for r in requests)
    between = {p: tally.inter_token.percentile(p) for p in PERCENTILES}
    row = served_row(run.served, tally.seconds, between, args.cut)
    counts = run.scheduler.counts
    row |= {"slack": 1 - tally.tokens / tally.rows, "steps": counts.steps, "preemptions": counts.preempted}
    return {"source": "simulated"} | rounded({name: row[name] for name in KEPT if name in row})


def from_settled(serve: Serve, toy: bool, rate: float, seconds: float, **changes: Any) -> Row:
    """Returns the row of requests that arrive for some seconds at a rate. Those of the first third find the engine
    emptier than later ones. They count only for throughput and times between tokens."""
    early = sum(request.arrival < seconds / 3 for request in workload(toy, None, rate, seconds))
    about = {"rate": rate, "arrivals_s": seconds}
    return about | serve(seconds=seconds, rate=rate, cut=0 if toy else early, **changes)


class Recorded(Simulation):
    """A simulation that records each request's course."""

    def __init__(self, *given: Any, **more: Any):
        super().__init__(*given, **more)
        self.served: list[Served] = []

    def _end(self, one: Any, now: float) -> None:
        request = Request(len(one.seq.prompt), one.output, one.arrived)
        self.served.append(Served(request, one.first - one.arrived, now - one.arrived))
        super()._end(one, now)
