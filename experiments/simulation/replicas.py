"""Several engines side by side, simulated: each request goes where Replicas sends it, by the same code."""

from collections.abc import Iterable, Sequence

from experiments.simulation.requests import Arrival
from experiments.simulation.run import Simulation, Tally
from jllm.distributed.routing import route


def serve(engines: Sequence[Simulation], coming: Iterable[Arrival]) -> list[Tally]:
    """Serves all of `coming`, in the order of their times, on engines with the same options; the tally of each."""
    for arrival in coming:
        for engine in engines:
            for _ in engine.until(arrival.at):
                pass
        loads = [engine.load for engine in engines]
        where, tokens = route(loads, arrival.sample.prompt, engines[0].max_new_tokens)
        engines[where].add(arrival, tokens)
    return [engine.run(()) for engine in engines]


def added(tallies: Sequence[Tally]) -> Tally:
    """Of engines that run side by side."""
    total = Tally(seconds=max(tally.seconds for tally in tallies))
    for tally in tallies:
        for name in ("requests", "prompt_tokens", "output_tokens", "good", "rows", "tokens", "running_seconds"):
            setattr(total, name, getattr(total, name) + getattr(tally, name))
        total.first_token += tally.first_token
        total.inter_token += tally.inter_token
    return total
