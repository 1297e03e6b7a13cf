"""Schedulers of static batches, of prompts and decodes in steps of their own, and of padded prompts."""

from dataclasses import dataclass, fields
from typing import Any, Self

from jllm.engine.plan import PlanParts, StepPlan
from jllm.engine.scheduler import Scheduler
from jllm.engine.sequence import Sequence
from jllm.programs.sizes import Limits


@dataclass(frozen=True)
class LargerPlan(StepPlan):
    """A plan whose step computes padding: at least this number of rows of each kind."""

    least_decodes: int = 0
    least_tokens: int = 0

    @classmethod
    def of(cls, plan: StepPlan, **least: int) -> Self:
        """Returns the plan with some of its least numbers of rows."""
        return cls(**{f.name: getattr(plan, f.name) for f in fields(plan)} | least)

    @property
    def size(self) -> tuple[int, int, int]:
        decodes, tokens, chunks = super().size
        return max(decodes, self.least_decodes), max(tokens, self.least_tokens), chunks


class StaticBatches(Scheduler):
    """Sequences are admitted in batches of max_slots; a batch prefills, then decodes, in as many rows as it has members
    until the last of them has ended, and only then comes the next. That is what continuous batching replaced."""

    def __init__(self, limits: Limits, *sizes: tuple[int, ...], **options: Any):
        self.members = 0  # of the batch
        self.joining = 0  # of these, how many are still to be admitted
        super().__init__(limits, *sizes, **options)

    def schedule(self) -> StepPlan | None:
        if not self.running and not self.draining:
            self.members = self.joining = min(len(self.waiting), len(self.free_slots))
        self.joining = min(self.joining, len(self.waiting))
        plan = super().schedule()
        return plan and LargerPlan.of(plan, least_decodes=self.members if plan.decodes else 0)

    def _nothing(self) -> StepPlan | None:
        if not self.joining or self.unread:
            return super()._nothing()
        self.joining = 0  # pages are too few for the rest of the batch: it goes without
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
    """A step has prompts or decodes, never both: whoever decodes sits out the steps that compute prompts. That is what
    chunked prefill in merged steps replaced."""

    def _most_rows(self, decodes: int, prompts: bool) -> int:
        return 1 if prompts else super()._most_rows(decodes, prompts)

    def _plan(self, decodes: list[Sequence], rows: tuple[int, ...], parts: PlanParts) -> StepPlan:
        return super()._plan([], (), parts) if parts.chunks else super()._plan(decodes, rows, parts)


class PaddedPrefill(Scheduler):
    """The chunks of a step count as if each were as long as the longest, and none but the first is cut to fit. That is
    what a step without ragged rows computes."""

    def __init__(
        self,
        limits: Limits,
        prompt_sizes: tuple[int, ...] = (),
        decode_sizes: tuple[int, ...] = (),
        **options: Any,
    ):
        self.budget = 0  # rows for prompts in the step that is being planned
        super().__init__(limits, (), decode_sizes, **options)

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
        """Returns how many of `tokens` one more chunk may have: all of them or none, but for the first chunk."""
        if not parts.chunks:
            return min(tokens, self.budget)
        rows = (len(parts.chunks) + 1) * max(tokens, _longest(parts))
        return tokens if rows <= self.budget else 0


class StaticPadded(StaticBatches, PaddedPrefill):
    """Both at once."""


class SeparatePadded(SeparateSteps, PaddedPrefill):
    """Both at once."""


def _longest(plan: StepPlan | PlanParts) -> int:
    """Returns tokens of the longest chunk."""
    return max((len(chunk.tokens) for chunk in plan.chunks), default=0)
