"""Simulates serving: the engine's own scheduler and policies plan, and a cost model gives the time of each step.

Time follows jllm/engine/loop.py. A step is dispatched before the tokens of the previous one are read. The device runs
steps in order, and the host plans meanwhile.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from experiments.serving.workload import EACH_TOKEN, FIRST_TOKEN, PERCENTILES
from experiments.simulation.requests import Arrival
from experiments.steps.cost_model import CostModel
from experiments.steps.floors import work_of
from jllm.config import LlamaConfig
from jllm.distributed.routing import Load
from jllm.engine.metrics import Histogram
from jllm.engine.options import EngineOptions, resolve
from jllm.engine.plan import StepPlan
from jllm.engine.request import SamplingParams
from jllm.engine.scheduler import Scheduler
from jllm.engine.sequence import Sequence
from jllm.kv_policies.length import Oracle
from jllm.programs.sizes import EngineSizes
from jllm.step.buckets import choose_bucket

Row = dict[str, Any]
NO_PREFIX = 1 << 62  # page size of a load without prefixes, which the scheduler lacks here
TIMED = 16  # one in this many turns of the loop is timed, since reading a thread's clock takes time


@dataclass
class Truth:
    """Finds the output length of each unfinished request by its seed."""

    outputs: dict[int, int] = field(default_factory=dict)

    def oracle(self) -> Oracle:
        return Oracle(lambda prompt, params: self.outputs[params.seed or 0])


@dataclass
class Tally:
    """The simulated clock's measurements, in bounded memory."""

    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    good: int = 0
    seconds: float = 0.0  # until the last token
    rows: int = 0  # rows computed by steps
    tokens: int = 0  # tokens requested of steps
    running_seconds: float = 0.0  # sum of held sequences times seconds
    host_seconds: float = 0.0  # this machine's time in the scheduler, in the timed turns of the loop
    host_turns: int = 0  # running sequences in these turns
    first_token: Histogram = field(default_factory=Histogram)
    inter_token: Histogram = field(default_factory=Histogram)

    def figures(self) -> Row:
        """Returns throughput and tail latencies of a finished run."""
        row: Row = {"requests": self.requests, "seconds": self.seconds, "qps": self.requests / self.seconds}
        row |= {"output_tokens_s": self.output_tokens / self.seconds, "goodput": self.good / self.seconds}
        for name, times in (("ttft", self.first_token), ("itl", self.inter_token)):
            found = {p: times.percentile(p) for p in PERCENTILES}
            row |= {f"{name}_ms_p{p}": None if at is None else 1e3 * at for p, at in found.items()}
        return row | {"itl_ms_max": 1e3 * self.inter_token.largest}


@dataclass
class _Live:
    """An unfinished request."""

    seq: Sequence
    output: int
    arrived: float
    tokens: int  # of the engine's load
    first: float = -1.0
    last: float = -1.0  # when its newest token was read


class Simulation:
    """An engine without a device. Every request allows `max_new_tokens`, and makes its own output, which is at most
    that. `truth` gives an Oracle among the options the length. `context` is the most tokens of prompt and output
    (default: the model's)."""

    def __init__(
        self,
        config: LlamaConfig,
        options: EngineOptions,
        cost: CostModel,
        max_new_tokens: int,
        *,
        truth: Truth | None = None,
        host_us: float = 0.0,
        context: int | None = None,
        scheduler: Callable[..., Scheduler] = Scheduler,
    ):
        assert options.num_pages is not None
        self.sizes: EngineSizes = resolve(options, config, options.num_pages)
        self.context, self.cost, self.max_new_tokens = context or config.context, cost, max_new_tokens
        self.truth = truth or Truth()
        self.host_us = host_us  # simulated: per running sequence and step
        self.scheduler = scheduler(
            self.sizes.limits,
            self.sizes.steps,
            policy=options.make_policy(),
        )
        self.tally = Tally()
        self.load = Load(NO_PREFIX, 0)
        self.host = self._device = 0.0  # when each is free
        self._live: dict[int, _Live] = {}
        self._before: tuple[StepPlan, float] | None = None  # the unread step, and when it ends
        self._turns = 0

    def run(self, coming: Iterable[Arrival]) -> Tally:
        """Returns the tally after serving `coming`, in the order of time."""
        for _ in self.steps(coming):
            pass
        return self.tally

    def steps(self, coming: Iterable[Arrival]) -> Iterator[tuple[StepPlan, float]]:
        """Yields each step's plan and seconds at its dispatch, and serves like `run`."""
        for arrival in coming:
            yield from self.until(arrival.at)
            self.add(arrival)
        yield from self.until(math.inf)

    def until(self, at: float) -> Iterator[tuple[StepPlan, float]]:
        """Yields the steps until the host is free at `at` or later, for requests that come then."""
        while self.host < at and (self._live or self._before is not None):
            yield from self._turn()
        if at < math.inf:
            self.host = max(self.host, at)

    def _turn(self) -> Iterator[tuple[StepPlan, float]]:
        """Dispatches a step, then reads the previous one."""
        scheduler, tally = self.scheduler, self.tally
        self._turns += 1
        clock = time.thread_time if self._turns % TIMED == 0 else _no_time
        start = clock()
        plan = scheduler.schedule()
        tally.host_seconds += clock() - start
        unread, self._before = self._before, None
        running = len(scheduler.running)
        tally.host_turns += running * (self._turns % TIMED == 0)
        assert plan is not None or unread is not None, "nothing runs, but requests are unfinished"
        if plan is not None:
            self.host += 1e-6 * self.host_us * running
            seconds = self.seconds(plan)
            self._device = max(self._device, self.host) + seconds
            tally.running_seconds += running * seconds
            self._before = (plan, self._device)
            yield plan, seconds
        if unread is not None:
            self.host = max(self.host, unread[1])
            self._read(unread[0], self.host, clock)

    def seconds(self, plan: StepPlan) -> float:
        """Returns the device's seconds for a plan, in the compiled size that holds it."""
        work = work_of(plan)
        bucket = choose_bucket(self.sizes.buckets, *plan.size)
        self.tally.rows += bucket.size
        self.tally.tokens += work.decodes + work.tokens
        copied = len(plan.copies) * self.sizes.limits.page_size * self.cost.token_bytes
        return self.cost.seconds(work, bucket.size) + 2 * copied / self.cost.floor.bandwidth

    def add(self, arrival: Arrival, tokens: int = 0) -> None:
        """Queues a request that comes now. Its load already counts `tokens`."""
        sample, number = arrival.sample, self.tally.requests
        longest = min(self.max_new_tokens, self.context - len(sample.prompt))
        output = min(sample.output, longest)
        self.truth.outputs[number] = output
        params = SamplingParams(max_new_tokens=longest, stop=sample.stop, seed=number)
        seq = Sequence(number, 0, sample.prompt, params, number, len(sample.prompt) + longest)
        self._live[number] = _Live(seq, output, arrival.at, tokens)
        self.scheduler.add(seq)
        self.tally.requests += 1
        self.tally.prompt_tokens += len(sample.prompt)
        self.tally.output_tokens += output

    def _read(self, plan: StepPlan, now: float, clock: Callable[[], float]) -> None:
        """Reads the tokens of a step at `now`: each sampled sequence gets one more."""
        live, scheduler, ended = self._live, self.scheduler, []
        newest: Counter[float] = Counter()
        sampled = [*plan.decodes, *(c.seq for c in plan.chunks if c.final)]
        start = clock()
        for seq in sampled:
            scheduler.on_tokens(seq, [1])
        host = clock() - start
        for seq in sampled:
            one = live.get(seq.request_id)
            if one is None:  # surplus of a sequence that has ended
                continue
            if one.last < 0:
                one.first = now
                self.tally.first_token.add(now - one.arrived)
            else:
                newest[one.last] += 1
            one.last = now
            if one.tokens:
                one.tokens -= 1
                self.load.tokens -= 1
            if len(seq.output) == one.output:
                ended.append(one)
        for last, times in newest.items():
            self.tally.inter_token.add(now - last, times)
        start = clock()
        for one in ended:
            scheduler.finish(one.seq, "length" if one.seq.length == one.seq.max_length else "stop")
        scheduler.step_read(plan.step)
        self.tally.host_seconds += host + clock() - start
        for one in ended:
            self._end(one, now)

    def _end(self, one: _Live, now: float) -> None:
        del self._live[one.seq.request_id]
        del self.truth.outputs[one.seq.request_id]
        self.load.tokens -= one.tokens
        self.tally.seconds = now
        pace = (now - one.first) / max(1, one.output - 1)
        self.tally.good += one.first - one.arrived <= FIRST_TOKEN and pace <= EACH_TOKEN

    def row(self) -> Row:
        """Returns the measures of a finished run."""
        tally, counts, limits = self.tally, self.scheduler.counts, self.sizes.limits
        steps, pages = max(1, counts.steps), max(1, counts.page_steps)
        return {
            "source": "simulated", **tally.figures(),
            "held_mean": tally.running_seconds / tally.seconds, "held_peak": counts.running_peak,
            "preemption_rate": counts.preempted / tally.requests,
            "recomputed_share": counts.recomputed / (tally.prompt_tokens + tally.output_tokens),
            "fragmentation": counts.fragmentation / steps,
            "wasted_pages": counts.empty_steps / (pages * limits.page_size),
            "pages_used": counts.page_steps / steps / limits.num_pages,
            "copied_pages": counts.copied_pages,
            "slack": (tally.rows - tally.tokens) / tally.rows, "steps": counts.steps,
            "host_us": 1e6 * tally.host_seconds / max(1, tally.host_turns),
        }  # fmt: skip


def _no_time() -> float:
    return 0.0
