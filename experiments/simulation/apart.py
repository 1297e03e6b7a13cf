"""Simulates prefill and decode on separate devices. One engine computes prompts. Another decodes, and gets each
prompt's pages some time after its first token."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from experiments.simulation.replicas import added, serve
from experiments.simulation.requests import Arrival, Sample
from experiments.simulation.run import Simulation, Tally, _Live
from jllm.distributed.handover import JOINING
from jllm.engine.moved import DevicePages
from jllm.engine.request import SamplingParams
from jllm.engine.scheduler import Scheduler
from jllm.engine.sequence import Sequence as Sampled

Make = Callable[..., Simulation]  # takes the class and changed options; returns an engine


@dataclass(frozen=True)
class Prefilled(Arrival):
    """A request whose prompt another engine computed. Its pages arrive at `at`."""

    arrived: float = 0.0  # when it was sent
    first: float = 0.0  # when its first token was read


class Prompts(Simulation):
    """An engine that ends requests at their first token."""

    def __init__(self, *given: Any, **more: Any):
        super().__init__(*given, **more)
        self.done: list[Prefilled] = []
        self._samples: dict[int, Sample] = {}

    def add(self, arrival: Arrival, tokens: int = 0) -> None:
        self._samples[self.tally.requests] = arrival.sample
        super().add(replace(arrival, sample=replace(arrival.sample, output=1)), tokens)

    def _end(self, one: _Live, now: float) -> None:
        sample = self._samples.pop(one.seq.request_id)
        self.done.append(Prefilled(sample, now, one.arrived, now))
        super()._end(one, now)


class Decodes(Simulation):
    """An engine that receives computed prompts."""

    def __init__(self, *given: Any, **more: Any):
        super().__init__(*given, scheduler=partial(Scheduler, most_joining=JOINING), **more)

    def add(self, arrival: Arrival, tokens: int = 0) -> None:
        assert isinstance(arrival, Prefilled)
        sample, number = arrival.sample, self.tally.requests
        longest = min(self.max_new_tokens, self.context - len(sample.prompt))
        output = min(sample.output, longest)
        self.truth.outputs[number] = output
        params = SamplingParams(max_new_tokens=longest, stop=sample.stop, seed=number)
        seq = Sampled(number, 0, sample.prompt, params, number, len(sample.prompt) + longest, output=[1])
        seq.snapshot = DevicePages(len(sample.prompt), ())
        self._live[number] = _Live(seq, output, arrival.arrived, tokens, arrival.first, arrival.first)
        self.scheduler.add(seq)
        self.tally.requests += 1
        self.tally.output_tokens += output - 1


def merged(make: Make, coming: Iterable[Arrival], engines: int) -> Tally:
    """Returns the tally of engines that compute prompts and decode in the same steps."""
    return added(serve([make(Simulation) for _ in range(engines)], coming))


def apart(make: Make, coming: Iterable[Arrival], prefill: int, decode: int, copy: Callable[[int], float]) -> Tally:
    """Returns the tally of `prefill` engines for prompts and `decode` engines for the rest. copy(tokens) returns the
    seconds to move their pages."""
    first: list[Any] = [make(Prompts) for _ in range(prefill)]
    tallies = serve(first, coming)
    done = [replace(each, at=each.at + copy(len(each.sample.prompt))) for engine in first for each in engine.done]
    long = sorted((each for each in done if each.sample.output > 1), key=lambda each: each.at)
    then = serve([make(Decodes) for _ in range(decode)], long)
    both = added([*tallies, *then])
    both.requests, both.good = len(done), sum(tally.good for tally in then) + len(done) - len(long)
    return both
