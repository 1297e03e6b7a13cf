"""Which requests the scheduler sees: those whose steps are compiled. Only those that ask for more wait for a compiler.

A request that asks for more than the programs at hand can do (log-probabilities, penalties) waits outside while theirs
are compiled in the background, and those that ask for less overtake it. Then it takes its place by its arrival.
Where nothing was compiled ahead and nothing runs, it goes in at once, and its first steps wait for the compiler.

On a mesh steps that draw in fewer ways are programs of their own (Draws). Only those that were compiled ahead are used:
what is compiled for requests as they come draws in all ways.

Several processes that share a model each have a compiler, and must take the same programs: there all requests go in at
once, and their first steps wait (Programs.in_step).
"""

import logging
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import fields, replace
from functools import reduce
from operator import or_

from jllm.engine.plan import StepPlan
from jllm.engine.request import SamplingParams
from jllm.engine.samples import variant_for
from jllm.engine.scheduler import Scheduler
from jllm.engine.sequence import Sequence
from jllm.model.sampling import Draws
from jllm.programs.programs import Programs
from jllm.step.state import Variant

SLOW = 2.0  # seconds that requests wait, after which the log says so
LOG = logging.getLogger(__name__)
PATIENCE = 0.05  # seconds that a step waits for the compiler where there is nothing else to do


class Gate:
    """Stands before one scheduler."""

    def __init__(self, programs: Programs, scheduler: Scheduler, *, by_draws: bool = False):
        self._programs, self._scheduler, self._by_draws = programs, scheduler, by_draws
        self._inside: Counter[Variant] = Counter()  # what unfinished sequences ask for, each for itself
        self.waiting: dict[Sequence, Variant] = {}  # what each asks for, in the order of arrival
        self._since, self._told = 0.0, False  # when the first of them came, and whether the log has it

    @property
    def inside(self) -> Variant:
        """Returns what steps of the sequences inside may have to do."""
        return reduce(or_, self._inside, Variant(draws=Draws.GREEDY if self._by_draws else Draws.FILTERED))

    def need(self, plan: StepPlan) -> Variant:
        """Returns what a step has to do: of penalties and guides what any sequence inside asks for, else what its own
        ask for."""
        inside, sampled = self.inside, []
        if inside.breadth or self._by_draws:  # else there is no need to ask each
            sampled = [s.params for s in (*plan.decodes, *(c.seq for c in plan.chunks))]
        return replace(
            self.wants(sampled),
            penalties=inside.penalties,
            guided=inside.guided,
            prompt_logprobs=any(c.seq.params.prompt_logprobs and c.start < len(c.seq.prompt) - 1 for c in plan.chunks),
        )

    def wants(self, samplings: Collection[SamplingParams]) -> Variant:
        """Returns the step that serves all of these at once."""
        return variant_for(samplings, by_draws=self._by_draws)

    def add(self, seq: Sequence) -> None:
        """A new sequence, which goes in at once where its steps can. RequestError when it could never run."""
        self._scheduler.arrive(seq)
        wants = self.wants([seq.params])
        if self._may_enter(wants):
            self._let_in(seq, wants)
        else:
            if not self.waiting:
                self._since, self._told = time.perf_counter(), False
            self.waiting[seq] = wants

    def open(self) -> list[tuple[Sequence, BaseException]]:
        """Lets in those whose steps are compiled by now, and has those of the others compiled; returns those whose
        steps cannot be, and why."""
        if not self.waiting:
            return []
        failed, errors = [], self._programs.take_failures()
        refused: dict[Variant, Variant] = {}  # of this pass: what was asked for, perhaps by many, and what is compiled
        for seq, wants in list(self.waiting.items()):
            if wants not in refused:
                if self._may_enter(wants):
                    del self.waiting[seq]
                    self._let_in(seq, wants)
                    continue
                before = (asked for asked, wanted in refused.items() if wanted not in errors)  # it runs beside these
                refused[wants] = reduce(or_, before, self.inside | wants | Variant())
                if refused[wants] not in errors:
                    self._programs.prepare(refused[wants])
            if refused[wants] in errors:
                failed.append((seq, errors[refused[wants]]))
        self._tell()
        return failed

    def _tell(self) -> None:
        """Logs what waits long, once, and that it does no more."""
        seconds = time.perf_counter() - self._since
        if self.waiting and not self._told and seconds > SLOW:
            what = ", ".join(sorted({name for wants in self.waiting.values() for name in _asked(wants)}))
            LOG.info("requests (%s) wait until their steps are compiled; others go on", what)
        elif not self.waiting and self._told:
            LOG.info("the steps that requests waited for are compiled, after %.1f s", seconds)
        self._told = self._told or seconds > SLOW

    def wait(self) -> None:
        """For the compiler, where there is nothing else to do: not for long where requests may come for which all was
        compiled ahead."""
        if self.waiting:
            self._programs.wait(PATIENCE if self._programs.ahead else None)

    def finish(self, seq: Sequence, reason: str) -> None:
        """Ends a sequence, inside or not."""
        if self.waiting.pop(seq, None) is not None:
            seq.finish_reason, seq.origin, seq.snapshot = reason, None, None
            return
        wants = self.wants([seq.params])
        self._inside[wants] -= 1
        self._inside += Counter()  # drops entries whose count is 0
        self._scheduler.finish(seq, reason)

    def _may_enter(self, wants: Variant) -> bool:
        if self._programs.in_step:
            if not self._programs.serves(self.inside | wants):
                self._programs.permit(self.inside | wants | Variant())
            return True
        if not (self._programs.ahead or self._programs.compiling or self._scheduler.active):
            self._programs.permit(wants | Variant())
            self._programs.permit(self.inside | wants | Variant())
        return self._programs.serves(self.inside | wants)

    def _let_in(self, seq: Sequence, wants: Variant) -> None:
        self._inside[wants] += 1
        self._scheduler.add(seq)


def _asked(variant: Variant) -> list[str]:
    """Returns what a variant has beyond plain steps, by the names of its fields."""
    return [field.name for field in fields(variant) if getattr(variant, field.name) is True] or ["sampling"]
