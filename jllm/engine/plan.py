"""Holds what the scheduler decides: the plan of a step, its buffer for the device, and counts."""

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as List
from dataclasses import dataclass, field, fields

import numpy as np

from jllm.engine.pages import PagePool
from jllm.engine.request import SamplingParams
from jllm.engine.sequence import Sequence
from jllm.model.paged import NOWHERE
from jllm.model.sampling import STOP_IDS, Penalties, Sampling
from jllm.programs.packed_step import Layout
from jllm.step.batch import PromptChunk, fill_batch

# Fields that users set and the device reads. The host reads the others.
NAMES = {f.name for f in (*fields(Sampling), *fields(Penalties))} & {f.name for f in fields(SamplingParams)}
NAMES -= {"adapter"}  # the user gives its name, and the device takes its place


def most_deltas(max_slots: int, max_step_tokens: int, page_size: int, short_rows: int = 1) -> int:
    """Returns the most page table changes that a step may ask for.

    A slot may need pages for a short segment and the token after it. A prompt chunk needs its own pages, of which the
    first and the last may be filled in part."""
    return max_slots * (1 + -(-(short_rows + 1) // page_size)) + -(-max_step_tokens // page_size)


@dataclass(frozen=True)
class Chunk(PromptChunk):
    """Holds a prompt chunk, as the device reads it, and its sequence."""

    seq: Sequence = field(kw_only=True)


def next_chunk(seq: Sequence, tokens: int, page_size: int) -> Chunk:
    """Returns the next tokens of a sequence as a chunk. The sequence has a slot, and pages for them."""
    assert seq.slot is not None
    start, stop, asked = seq.computed, seq.computed + tokens, seq.params
    bias = asked.logit_bias or {}
    sampling = {name: getattr(asked, name) for name in NAMES} | {
        "top_k": min(asked.top_k, NOWHERE),
        "seed": seq.seed,
        "sample": seq.sample,
        "max_length": seq.max_length,
        "stop_ids": sorted(seq.stop_ids)[:STOP_IDS],
        "bias_ids": list(bias),
        "bias_values": list(bias.values()),
        "adapter": -1 if seq.adapter is None else seq.adapter.place,
    }
    return Chunk(
        seq.slot,
        seq.slice(start, stop),
        start,
        stop == seq.prefill_end,
        prompt_len=len(seq.prompt),
        targets=seq.prompt[start + 1 : stop + 1] if asked.prompt_logprobs else (),
        room=seq.mapped * page_size,
        sampling=sampling,
        seq=seq,
    )


@dataclass(frozen=True)
class StepPlan:
    """Holds one step. Each decode computes the KV of its slot's newest token, and samples.

    A decode of several rows also computes the KV of the drafts in its other rows. The host knows the index of its first
    row as an interval: it begins at seq.computed - 1, and ends at seq.computed + seq.ahead - rows. No row at or past
    max_length - 1 is written. The device samples after a final chunk too.

    Copies come before the step, all at once: no page is both read and written. They come after all steps that were
    dispatched before. Rarely a plan has page table changes and nothing else.
    """

    step: int
    decodes: tuple[Sequence, ...]
    rows: tuple[int, ...]  # rows of each decode, 1 .. Q
    chunks: tuple[Chunk, ...]
    deltas: tuple[tuple[int, int, int], ...]  # (slot, index, page): page table changes to apply before the step
    copies: tuple[tuple[int, int], ...] = ()  # (from, to): pages to copy before the step
    loads: tuple[Sequence, ...] = ()  # sequences whose snapshot goes to their first pages before all copies
    begun: tuple[tuple[Sequence, int], ...] = ()  # admitted ones, and how many of their first tokens no step computes
    preempted: tuple[Sequence, ...] = ()  # since the plan before

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


def pack_plan(layout: Layout, plan: StepPlan, page_size: int, tapped: List[int] = ()) -> np.ndarray:
    """Returns the buffer of a planned step, which the device reads. `tapped` are the rows whose values it returns."""
    buffer, batch = layout.pack()
    batch.tapped[: len(tapped)] = tapped
    R = len(plan.decodes)
    batch.decode_rows[:R] = plan.rows
    batch.decode_room[:R] = [seq.mapped * page_size for seq in plan.decodes]
    fill_batch(batch, plan.chunks, [seq.slot for seq in plan.decodes if seq.slot is not None], plan.deltas)
    return buffer


@dataclass
class PlanParts:
    """Collects the parts of the next plan that several hands add to."""

    chunks: list[Chunk] = field(default_factory=list)
    deltas: list[tuple[int, int, int]] = field(default_factory=list)
    copies: dict[int, int] = field(default_factory=dict)  # to: from
    loads: list[Sequence] = field(default_factory=list)
    begun: list[tuple[Sequence, int]] = field(default_factory=list)
    tapped: int = 0  # rows of chunks that requests ask for, beyond those that each running sequence may have

    @property
    def empty(self) -> bool:
        return not (self.chunks or self.deltas or self.copies or self.loads)

    def copy(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Adds pages to copy (from, to). All are copied at once: what is itself to be copied is still where it was."""
        for source, target in pairs:
            self.copies[target] = self.copies.get(source, source)


@dataclass
class ScheduleCounts:
    """Counts what happened since the scheduler was made, or its counts were reset."""

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
