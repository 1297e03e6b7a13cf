"""Counts an engine's work as plain data: counters, and histograms of times that give percentiles."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import reduce
from operator import add
from typing import Any, Self

from jllm.engine.draft_policy import DraftCounts
from jllm.engine.plan import ScheduleCounts
from jllm.engine.prefix_cache import PrefixCounts
from jllm.engine.scheduler import Scheduler
from jllm.programs.compiler import Compiled
from jllm.programs.programs import Programs

PERCENTILES = (50, 90, 95, 99)


def nearest_rank(p: float, count: int) -> int:
    """Returns the rank, from 1, of the p-th percentile among `count` ascending values: the least value that at least p
    % of all do not exceed."""
    return max(1, math.ceil(p * count / 100 - 1e-9 * count))  # 99.9 % of 5000 is 4995, but 4995.000000000001 in floats


@dataclass
class Histogram:
    """Counts non-negative values in buckets, each a given ratio wide, so that its size is bounded.

    Count, sum, least and largest are exact. A percentile is by nearest rank, with an error of at most half a bucket:
    0.5 % of itself.
    """

    WIDTH = math.log(1.01)
    LEAST = 1e-7  # seconds; smaller values count as this one

    count: int = 0
    total: float = 0.0
    least: float = math.inf
    largest: float = 0.0
    _buckets: Counter[int] = field(default_factory=Counter)

    def add(self, value: float, times: int = 1) -> None:
        self.count += times
        self.total += value * times
        self.least, self.largest = min(self.least, value), max(self.largest, value)
        self._buckets[math.floor(math.log(max(value, self.LEAST)) / self.WIDTH)] += times

    def __add__(self, other: "Histogram") -> "Histogram":
        """Returns the histogram of the values of both."""
        least, largest = min(self.least, other.least), max(self.largest, other.largest)
        both = self._buckets + other._buckets
        return Histogram(self.count + other.count, self.total + other.total, least, largest, both)

    def percentile(self, p: float) -> float | None:
        """Returns the value at the p-th percentile, 0 < p <= 100; None if there are no values."""
        if not 0 < p <= 100:
            raise ValueError(f"a percentile must be in (0, 100], not {p}")
        rank, seen = nearest_rank(p, self.count), 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if seen >= rank:
                middle = math.exp((bucket + 0.5) * self.WIDTH)
                return min(max(middle, self.least), self.largest)
        return None

    def summary(self) -> dict[str, float | int | None]:
        """Returns count, mean, p50 .. p99 and max; each is None without values, except count."""
        some = self.count > 0
        found: dict[str, float | int | None] = {"count": self.count, "mean": self.total / self.count if some else None}
        found |= {f"p{p}": self.percentile(p) for p in PERCENTILES}
        return found | {"max": self.largest if some else None}


@dataclass
class RequestCounts:
    """Counts requests, steps and tokens since the engine was made, or its metrics were reset."""

    requests: int = 0  # submitted requests
    requests_finished: int = 0  # without aborted ones
    requests_aborted: int = 0  # by abort(), by their deadline, or since the engine closed before their end
    prompt_tokens: int = 0  # of submitted requests, once a request, however many samples it has
    prefill_tokens: int = 0  # computed prompt tokens of each sample; recomputed ones count again
    output_tokens: int = 0
    steps: int = 0
    tokens: int = 0  # tokens that steps had to compute: decodes, with rows for drafts, and prompt tokens
    rows: int = 0  # rows that steps computed: the sizes of their buckets
    device_errors: int = 0
    updates: int = 0  # times that the engine took other weights
    update_bytes: int = 0  # of the model's weights that updates copied
    update_seconds: float = 0.0  # of the host for these updates, without their waits for steps
    pages_peak: int = 0  # most pages in use at once


@dataclass
class Times:
    """Holds times in seconds of all samples so far."""

    first_token: Histogram = field(default_factory=Histogram)  # from submission
    inter_token: Histogram = field(default_factory=Histogram)  # between reads of a sample's tokens
    end_to_end: Histogram = field(default_factory=Histogram)  # from submission to the end, without aborted samples


@dataclass(frozen=True)
class Metrics:
    """Holds all metrics of an engine at one moment."""

    running: int
    waiting: int
    pages_free: int  # includes pages that only the prefix cache holds
    pages_used: int
    pages_total: int
    page_size: int  # tokens
    fragmentation: float  # share of pages_free outside of their longest run; 0 if a policy needs no runs
    empty_tokens: int  # free token places in the pages of samples
    cached_pages: int  # pages that the prefix cache keeps, free and used ones
    sharing: PrefixCounts  # tokens that did not need computing
    version: int  # of the weights
    compiled_steps: int  # number of different steps that this engine needed
    compiled: Compiled  # programs compiled ahead of requests, in the background, and at a step's first use
    scheduled: ScheduleCounts  # the scheduler's counts
    counts: RequestCounts
    times: Times
    drafts: DraftCounts | None  # None without a drafter

    @classmethod
    def of(
        cls,
        scheduler: Scheduler,
        outside: int,
        version: int,
        programs: Programs,
        counts: RequestCounts,
        times: Times,
        drafts: DraftCounts | None,
    ) -> Self:
        """Returns the metrics of this moment. `outside` is the number of sequences that wait for programs to be
        compiled."""
        pool, sharing = scheduler.pool, scheduler.sharing
        return cls(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + outside,
            pages_free=pool.num_available,
            pages_used=pool.num_used,
            pages_total=pool.num_pages,
            page_size=pool.page_size,
            fragmentation=pool.scattered(),
            empty_tokens=scheduler.empty,
            cached_pages=sharing.num_pages,
            sharing=sharing.counts,
            version=version,
            compiled_steps=len(programs.used),
            compiled=programs.compiled,
            scheduled=scheduler.counts,
            counts=counts,
            times=times,
            drafts=drafts,
        )

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Returns the metrics of several engines: counts and peaks are added up, and times cover all samples."""
        free = sum(part.pages_free for part in parts)
        scattered = sum(part.fragmentation * part.pages_free for part in parts) / max(1, free)
        same = {"page_size": parts[0].page_size, "version": max(part.version for part in parts)}
        return replace(_added(parts), **same, fragmentation=scattered)

    @property
    def slack(self) -> float:
        """Returns the share of padding among computed rows."""
        return (self.counts.rows - self.counts.tokens) / self.counts.rows if self.counts.rows else 0.0

    def memory(self) -> dict[str, Any]:
        """Returns counts and means of the page pool.

        Means are over planned steps. wasted_share is of the pages in use. fragmentation_mean is of the pages that
        neither a sample nor the prefix cache holds.
        """
        s = self.scheduled
        steps, used = max(1, s.steps), s.page_steps * self.page_size
        return {
            "preemptions": s.preempted,
            "preemptions_by_cause": dict(s.preempted_by),
            "recomputed_tokens": s.recomputed,
            "drains": s.drains,  # steps that waited for a read because pages were short
            "outgrown": s.outgrown,  # times that a sample that needed a page was longer than predicted
            "moves": s.moved,
            "copied_pages": s.copied_pages,
            "running_peak": s.running_peak,
            "running_mean": s.running_steps / steps,
            "pages_mean": s.page_steps / steps,
            "wasted_share": s.empty_steps / used if used else 0.0,
            "fragmentation_mean": s.fragmentation / steps,
        }

    def as_dict(self) -> dict[str, Any]:
        """Returns one level of counters and gauges, and a table of each kind of time in seconds, fit for json.dumps."""
        parts = ("compiled", "scheduled", "sharing", "counts", "times", "drafts")
        gauges: Mapping[str, Any] = {k: v for k, v in vars(self).items() if k not in parts}
        times = {f"{name}_s": histogram.summary() for name, histogram in vars(self.times).items()}
        shared = {f"prefix_{name}": count for name, count in vars(self.sharing).items()}
        ahead = {f"compile_{name}": value for name, value in vars(self.compiled).items()}
        found = {**gauges, **ahead, **self.memory(), **shared, **vars(self.counts), "slack": self.slack, **times}
        return found if self.drafts is None else found | self.drafts.as_dict()


def _added(values: Sequence[Any]) -> Any:
    """Returns the sum of numbers, Counters and Histograms, or of each field of records of them."""
    first = values[0]
    if not is_dataclass(first) or isinstance(first, Histogram):
        return first if first is None else reduce(add, values)
    return type(first)(**{f.name: _added([getattr(value, f.name) for value in values]) for f in fields(first)})  # type: ignore[misc]
