"""Lets only requests whose steps are compiled through to the scheduler; others wait for a compiler.

A request may ask for more than the compiled programs can do (log-probabilities, penalties). It waits outside while its
programs are compiled in the background, and requests that ask for less overtake it. Then it takes its place by its
arrival. If nothing was compiled ahead and nothing runs, it goes in at once, and its first steps wait for the compiler.
A request whose adapter has no place on the device waits likewise.

A step in which no row takes an adapter is the program of an engine without places. One kind of program has one rounding
of each product, so with `adapted` all steps take adapters: an engine needs this for bits that no company changes.

On a mesh, steps that draw in fewer ways are separate programs (Draws). Only those compiled ahead are used: programs
compiled for requests as they come draw in all ways.

Several processes that share a model each have a compiler, and must take the same programs. So all requests go in at
once there, and their first steps wait (Programs.in_step).
"""

import logging
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import fields, replace
from functools import reduce
from operator import or_

from jllm.engine.adapters import Places
from jllm.engine.plan import StepPlan
from jllm.engine.request import SamplingParams
from jllm.engine.scheduler import Scheduler
from jllm.engine.sequence import Sequence
from jllm.model.sampling import Draws
from jllm.programs.programs import Programs
from jllm.step.state import Variant

SLOW = 2.0  # seconds that requests wait, before the log reports it
LOG = logging.getLogger(__name__)
PATIENCE = 0.05  # seconds that a step waits for the compiler where there is nothing else to do


class Gate:
    """Admits sequences to one scheduler once their steps are compiled."""

    def __init__(
        self,
        programs: Programs,
        scheduler: Scheduler,
        places: Places,
        *,
        by_draws: bool = False,
        taps: tuple[str, ...] = (),
        adapted: bool = False,
    ):
        self._programs, self._scheduler, self._by_draws, self._taps = programs, scheduler, by_draws, taps
        self._places, self._adapted = places, adapted
        self._inside: Counter[Variant] = Counter()  # how many unfinished sequences ask for each variant
        self.waiting: dict[Sequence, Variant] = {}  # by sequence, the variant that it asks for, in the order of arrival
        self._since, self._told = 0.0, False  # when the first of them came, and whether it was logged
        self._later: set[Sequence] | None = None  # those of `waiting` that wait for release(), if hold() was called

    @property
    def inside(self) -> Variant:
        """Returns the variant that steps of the sequences inside may need."""
        return reduce(or_, self._inside, Variant(draws=Draws.GREEDY if self._by_draws else Draws.FILTERED))

    def need(self, plan: StepPlan) -> Variant:
        """Returns the variant that a step needs. Penalties and guides count if any sequence inside asks for them, other
        features if the step's own sequences do."""
        inside = self.inside
        if not (inside.breadth or self._by_draws or self._adapted):  # then it need not look at each
            return inside
        seqs = [*plan.decodes, *(c.seq for c in plan.chunks)]
        return replace(
            self.wants([seq.params for seq in seqs], tapped=any(seq.taps is not None for seq in seqs)),
            penalties=inside.penalties,
            guided=inside.guided,
            prompt_logprobs=any(c.seq.params.prompt_logprobs and c.start < len(c.seq.prompt) - 1 for c in plan.chunks),
        )

    def wants(self, samplings: Collection[SamplingParams], tapped: bool = False) -> Variant:
        """Returns the variant that serves all of these at once. `tapped` is whether one asks for values."""
        found = variant_for(samplings, by_draws=self._by_draws)
        found = replace(found, adapters=True) if self._adapted else found
        return replace(found, taps=self._taps) if tapped else found

    def ahead(self, samplings: Collection[SamplingParams]) -> list[Variant]:
        """Returns the variants that serve requests like these without waiting. The first has values and adapters where
        the engine has some. The others lack these, since most steps may need neither."""
        plain = self.wants(samplings)
        adapted = replace(plain, adapters=self._places.count > 0)
        tapped = replace(adapted, taps=self._taps)
        return list(dict.fromkeys((tapped, adapted, plain)))

    def _wanted_by(self, seq: Sequence) -> Variant:
        return self.wants([seq.params], tapped=seq.taps is not None)

    def hold(self) -> None:
        """Makes sequences of new requests wait outside until release()."""
        self._later = set() if self._later is None else self._later

    def release(self) -> None:
        self._later = None

    @property
    def drained(self) -> bool:
        """Returns whether all sequences have ended, apart from those that wait for release()."""
        return not self._inside and self._later is not None and self.waiting.keys() == self._later

    def add(self, seq: Sequence) -> None:
        """Adds a new sequence, which goes in at once if its steps can run. Raises RequestError if it could never
        run."""
        self._scheduler.arrive(seq)
        wants = self._wanted_by(seq)
        # Forks continue a request that is inside, unless what they continue waits too.
        later = self._later is not None and (seq.origin is None or seq.origin in self._later)
        if later:
            assert self._later is not None
            self._later.add(seq)
        if not later and self._places.ask(seq) and self._may_enter(wants):
            self._let_in(seq, wants)
        else:
            if not self.waiting:
                self._since, self._told = time.perf_counter(), False
            self.waiting[seq] = wants
        if seq.adapter is not None:
            seq.adapter.requests += 1

    def open(self) -> list[tuple[Sequence, BaseException]]:
        """Lets in the sequences whose steps are compiled by now, and starts to compile the missing steps of others.
        Returns sequences whose steps cannot be compiled, and the errors."""
        if not self.waiting:
            return []
        failed, errors = [], self._programs.take_failures()
        refused: dict[Variant, Variant] = {}  # in this pass: the variant asked for, and the one compiled for it
        for seq, wants in list(self.waiting.items()):
            if (self._later is not None and seq in self._later) or not self._places.ask(seq):
                continue
            if wants not in refused:
                if self._may_enter(wants):
                    self._let_in(seq, wants)
                    del self.waiting[seq]
                    continue
                before = (asked for asked, wanted in refused.items() if wanted not in errors)  # wants runs beside these
                refused[wants] = reduce(or_, before, self.inside | wants | Variant())
                if refused[wants] not in errors:
                    self._programs.prepare(refused[wants])
            if refused[wants] in errors:
                failed.append((seq, errors[refused[wants]]))
        self._tell()
        return failed

    def _tell(self) -> None:
        """Logs once that requests have waited long, and once that they wait no longer."""
        seconds = time.perf_counter() - self._since
        held_back = self._later or ()
        compiling = [w for seq, w in self.waiting.items() if seq not in held_back and self._places.has_room(seq)]
        if compiling and not self._told and seconds > SLOW:
            what = ", ".join(sorted({name for wants in compiling for name in _asked(wants)}))
            LOG.info("requests (%s) wait until their steps are compiled; others go on", what)
        elif not self.waiting and self._told:
            LOG.info("the steps that requests waited for are compiled, after %.1f s", seconds)
        self._told = self._told or seconds > SLOW

    def wait(self) -> None:
        """Waits for the compiler if there is nothing else to do. The wait is short if requests may come whose programs
        were compiled ahead."""
        if self.waiting:
            self._programs.wait(PATIENCE if self._programs.ahead else None)

    def finish(self, seq: Sequence, reason: str) -> None:
        """Ends a sequence, inside or not."""
        if seq.adapter is not None:
            seq.adapter.requests -= 1
        if self.waiting.pop(seq, None) is not None:
            self._places.forget(seq)
            if self._later is not None:
                self._later.discard(seq)
            seq.finish_reason, seq.origin, seq.snapshot = reason, None, None
            return
        self._places.leave(seq)
        wants = self._wanted_by(seq)
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
        self._places.enter(seq)  # it fails if the device does, and then nothing has changed
        self._inside[wants] += 1
        self._scheduler.add(seq)


def variant_for(samplings: Collection[SamplingParams], *, by_draws: bool = False) -> Variant:
    """Returns the step that serves all of these at once, their prompts included. by_draws: steps that draw in fewer
    ways are programs of their own (see gate.py)."""
    variant = Variant(
        penalties=any(p.penalizes for p in samplings),
        logprobs=any(p.logprobs is not None for p in samplings),
        tempered=any(p.logprobs is not None and p.logprobs_mode == "tempered" for p in samplings),
        prompt_logprobs=any(p.prompt_logprobs for p in samplings),
        guided=any(p.guide is not None for p in samplings),
        adapters=any(p.adapter is not None for p in samplings),
    )
    if not by_draws or variant.takes_rows or not samplings:
        return variant
    return replace(variant, draws=max(p.draws for p in samplings))


def _asked(variant: Variant) -> list[str]:
    """Returns the names of the fields that a variant has beyond plain steps."""
    return [field.name for field in fields(variant) if getattr(variant, field.name) is True] or ["sampling"]
