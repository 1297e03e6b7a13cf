"""Simulates several engines side by side. Requests are routed by the code of Replicas."""

from collections.abc import Iterable, Sequence

from experiments.simulation.requests import Arrival
from experiments.simulation.run import Simulation, Tally
from jllm.distributed.routing import route


def serve(engines: Sequence[Simulation], coming: Iterable[Arrival]) -> list[Tally]:
    """Returns each engine's tally after serving `coming`, in the order of time. Engines must have the same options."""
    for arrival in coming:
        for engine in engines:
            for _ in engine.until(arrival.at):
                pass
        loads = [engine.load for engine in engines]
        where, tokens = route(loads, arrival.sample.prompt, engines[0].max_new_tokens)
        engines[where].add(arrival, tokens)
    return [engine.run(()) for engine in engines]


def added(tallies: Sequence[Tally]) -> Tally:
    """Returns the tally of engines that run side by side."""
    total = Tally(seconds=max(tally.seconds for tally in tallies))
    for tally in tallies:
        for name in ("requests", "prompt_tokens", "output_tokens", "good", "rows", "tokens", "running_seconds"):
            setattr(total, name, getattr(total, name) + getattr(tally, name))
        total.first_token += tally.first_token
        total.inter_token += tally.inter_token
    return total
