"""Defines the scheduler's output: the plan of a step, and counts of events."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from jllm.engine.pages import PagePool
from jllm.engine.sequence import Sequence


def most_deltas(max_slots: int, max_step_tokens: int, page_size: int, short_rows: int = 1) -> int:
    """Returns the most page table changes that a step may ask for.

    Each slot may change the pages of a short segment, which ends with a page for the token after it. Each prompt chunk
    may change its pages, of which the first and the last may be partial.
    """
    return max_slots * (1 + -(-(short_rows + 1) // page_size)) + -(-max_step_tokens // page_size)


@dataclass(frozen=True)
class Chunk:
    """Tokens of seq at positions start, start + 1, ...; the device samples after a final chunk."""

    seq: Sequence
    start: int
    tokens: tuple[int, ...]
    final: bool  # it has the last known token


@dataclass(frozen=True)
class StepPlan:
    """One step.

    Each decode computes the K and V of its slot's newest token, and of the drafts in its other rows. Then it samples.
    The host knows the index of its first row as an interval. The interval begins at seq.computed - 1, and ends at
    seq.computed + seq.ahead - rows. No row at or past max_length - 1 is written.

    Copies come first, all at once (no page is both read and written), and after all earlier steps. Rarely a plan has
    only page table changes.
    """

    step: int
    decodes: tuple[Sequence, ...]
    rows: tuple[int, ...]  # rows of each decode, 1 .. Q
    chunks: tuple[Chunk, ...]
    deltas: tuple[tuple[int, int, int], ...]  # (slot, index, page): page table changes to apply before the step
    copies: tuple[tuple[int, int], ...] = ()  # (from, to): pages to copy before the step
    loads: tuple[Sequence, ...] = ()  # sequences whose snapshot goes to their first pages before all copies
    skips: tuple[tuple[Sequence, int], ...] = ()  # (admitted sequence, first tokens that no step computes)
    preempted: tuple[Sequence, ...] = ()  # since the previous plan

    @property
    def prompt_tokens(self) -> int:
        return sum([len(chunk.tokens) for chunk in self.chunks])

    @property
    def size(self) -> tuple[int, int, int]:
        """Returns decodes, prompt tokens and chunks that a compiled size must have room for."""
        return len(self.decodes), self.prompt_tokens, len(self.chunks)

    @property
    def most_rows(self) -> int:
        """Returns the most rows of a decode."""
        return max(self.rows, default=1)


@dataclass
class PlanParts:
    """The parts of the next plan, to which several methods add."""

    chunks: list[Chunk] = field(default_factory=list)
    deltas: list[tuple[int, int, int]] = field(default_factory=list)
    copies: dict[int, int] = field(default_factory=dict)  # to: from
    loads: list[Sequence] = field(default_factory=list)
    skips: list[tuple[Sequence, int]] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        return not (self.chunks or self.deltas or self.copies or self.loads)

    def copy(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Adds pages to copy (from, to). Copies happen all at once, so a page that another copy overwrites is still
        unchanged."""
        for source, target in pairs:
            self.copies[target] = self.copies.get(source, source)


@dataclass
class ScheduleCounts:
    """Counts events since the scheduler was made, or its counts were reset."""

    added: int = 0
    admitted: int = 0  # readmissions included
    preempted: int = 0
    preempted_by: Counter[str] = field(default_factory=Counter)  # by why a page was needed: kv_policy.Policy.cause
    finished: int = 0
    recomputed: int = 0  # tokens of readmitted sequences whose K and V were lost, by preemption or with the device
    drains: int = 0  # times that a shortage of pages had to wait for the step in flight
    outgrown: int = 0  # times that a sequence that needed a page was longer than predicted
    moved: int = 0  # times that such a sequence moved to a longer extent
    copied_pages: int = 0  # pages copied on the device, by moves and for shared partial pages
    running_peak: int = 0  # most sequences that ran at once
    # These are sums over planned steps, for means:
    steps: int = 0
    running_steps: int = 0
    page_steps: int = 0  # pages in use
    empty_steps: int = 0  # free token places in pages of running sequences
    fragmentation: float = 0.0  # PagePool.fragmentation

    def planned(self, pool: PagePool, running: int, copies: int, empty: int) -> None:
        """Counts one more step, of `running` sequences, with `copies` pages to copy and `empty` free token places."""
        self.steps += 1
        self.copied_pages += copies
        self.running_peak = max(self.running_peak, running)
        self.running_steps += running
        self.page_steps += pool.num_used
        self.empty_steps += empty
        self.fragmentation += pool.fragmentation
