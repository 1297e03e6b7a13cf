"""Defines schedulers of static batches, of separate steps for prompts and decodes, and of padded prompts."""

from dataclasses import dataclass, fields
from typing import Any, Self

from jllm.engine.plan import PlanParts, StepPlan
from jllm.engine.scheduler import Scheduler
from jllm.engine.sequence import Sequence
from jllm.programs.sizes import NO_SIZES, Limits, StepSizes


@dataclass(frozen=True)
class LargerPlan(StepPlan):
    """A plan whose step is padded to a least number of rows of each kind."""

    least_decodes: int = 0
    least_tokens: int = 0

    @classmethod
    def of(cls, plan: StepPlan, **least: int) -> Self:
        """Returns the plan with some of these least numbers."""
        return cls(**{f.name: getattr(plan, f.name) for f in fields(plan)} | least)

    @property
    def size(self) -> tuple[int, int, int]:
        decodes, tokens, chunks = super().size
        return max(decodes, self.least_decodes), max(tokens, self.least_tokens), chunks


class StaticBatches(Scheduler):
    """Static batching, which continuous batching replaced. Up to max_slots sequences form a batch, which prefills and
    then decodes. It keeps a row for each member until the last one ends. Only then the next batch begins."""

    def __init__(self, limits: Limits, sizes: StepSizes = NO_SIZES, **options: Any):
        self.members = 0  # sequences of the batch
        self.joining = 0  # sequences of the batch that are not admitted yet
        super().__init__(limits, sizes, **options)

    def schedule(self) -> StepPlan | None:
        if not self.running and not self.draining:
            self.members = self.joining = min(len(self.waiting), len(self.free_slots))
        self.joining = min(self.joining, len(self.waiting))
        plan = super().schedule()
        return plan and LargerPlan.of(plan, least_decodes=self.members if plan.decodes else 0)

    def _nothing(self) -> StepPlan | None:
        if not self.joining or self.unread:
            return super()._nothing()
        self.joining = 0  # too few pages for the rest of the batch: it starts without it
        return self.schedule()

    def _decoding(self, prefills: list[Sequence]) -> list[Sequence]:
        return [] if prefills or self.joining else super()._decoding(prefills)

    def _trim(self, decodes: list[Sequence]) -> list[Sequence]:
        return decodes

    def _admit(self, seq: Sequence, parts: PlanParts) -> bool:
        admitted = self.joining > 0 and super()._admit(seq, parts)
        self.joining -= admitted
        return admitted


class SeparateSteps(Scheduler):
    """Separate steps, which chunked prefill in merged steps replaced. A step has prompts or decodes, never both.
    Decoding sequences wait while a step computes prompts."""

    def _most_rows(self, decodes: int, prompts: bool) -> int:
        return 1 if prompts else super()._most_rows(decodes, prompts)

    def _plan(self, decodes: list[Sequence], rows: tuple[int, ...], parts: PlanParts) -> StepPlan:
        return super()._plan([], (), parts) if parts.chunks else super()._plan(decodes, rows, parts)


class PaddedPrefill(Scheduler):
    """Padded prompts, which ragged rows replaced. Each chunk of a step counts as if it were as long as the longest.
    Only the first chunk is cut to fit."""

    def __init__(self, limits: Limits, sizes: StepSizes = NO_SIZES, **options: Any):
        self.budget = 0  # rows for prompts in the step being planned
        super().__init__(limits, StepSizes(decodes=sizes.decodes), **options)

    def schedule(self) -> StepPlan | None:
        plan = super().schedule()
        return plan and LargerPlan.of(plan, least_tokens=len(plan.chunks) * _longest(plan))

    def _prefill(self, running: list[Sequence], budget: int, parts: PlanParts) -> None:
        self.budget = budget
        super()._prefill(running, budget, parts)

    def _admit(self, seq: Sequence, parts: PlanParts) -> bool:
        return self._room(seq.length, parts) > 0 and super()._admit(seq, parts)

    def _chunk(self, seq: Sequence, budget: int, parts: PlanParts) -> int:
        return super()._chunk(seq, min(budget, self._room(seq.prefill_end - seq.computed, parts)), parts)

    def _room(self, tokens: int, parts: PlanParts) -> int:
        """Returns how many of `tokens` one more chunk may have. Only the first chunk may have a part of them."""
        if not parts.chunks:
            return min(tokens, self.budget)
        rows = (len(parts.chunks) + 1) * max(tokens, _longest(parts))
        return tokens if rows <= self.budget else 0


class StaticPadded(StaticBatches, PaddedPrefill):
    """Static batching with padded prompts."""


class SeparatePadded(SeparateSteps, PaddedPrefill):
    """Separate steps with padded prompts."""


def _longest(plan: StepPlan | PlanParts) -> int:
    """Returns the tokens of the longest chunk."""
    return max((len(chunk.tokens) for chunk in plan.chunks), default=0)
