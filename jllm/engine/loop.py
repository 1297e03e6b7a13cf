"""The continuous-batching loop: plans a step, dispatches it, and reads the tokens of the step before.

Step t + 1 is dispatched before the tokens of step t are read, so the host works while the device does.
"""

import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as List
from contextlib import contextmanager
from itertools import repeat
from typing import TYPE_CHECKING, Protocol

import jax

from jllm.engine.device import Device, InFlight
from jllm.engine.draft_policy import drafting_of
from jllm.engine.gate import Gate
from jllm.engine.guiding import Proposed, guided_samples
from jllm.engine.ledger import Ledger
from jllm.engine.options import EngineOptions
from jllm.engine.plan import StepPlan
from jllm.engine.samples import Live, Samples, take_prompt_scores
from jllm.engine.scheduler import Scheduler
from jllm.engine.sequence import Sequence
from jllm.engine.trace import Recorder
from jllm.guides.matcher import guides_of
from jllm.parallel.memory import out_of_memory
from jllm.step.state import Outputs

if TYPE_CHECKING:
    from jllm.model.model import Model


class DeviceLost(Exception):
    """The device failed, and there is no going on; the text says why."""


class Beside(Protocol):
    """A part that does something beside a loop's steps, in the turn of whoever steps."""

    def dispatched(self, loop: "Loop", plan: StepPlan) -> None:
        """Is called right behind the dispatch of a step, before the tokens of the one before it are read."""

    def stepped(self, loop: "Loop") -> None:
        """Is called once all is told that is new."""

    def close(self) -> None:
        """Drops what it has on devices."""


class Loop:
    """The steps of one engine: what it runs, and what it has to tell of them. One caller at a time.

    `device` runs the steps and `scheduler` makes what plans them; `ledger` has the samples, `gate` lets them in, and
    `guides` say what they may draw.
    """

    def __init__(
        self,
        model: "Model",
        options: EngineOptions,
        device: Device,
        scheduler: Callable[..., Scheduler] = Scheduler,
        beside: Beside | None = None,
    ):
        config, sizes = model.config, device.sizes
        self.device, self.drafting = device, drafting_of(options, sizes.limits)
        self.scheduler = scheduler(
            sizes.limits,
            sizes.prompt_sizes,
            sizes.decode_sizes,
            policy=options.make_policy(),
            prefix_cache=options.prefix_cache,
            draft_rows=None if self.drafting is None else self.drafting.rows,
        )
        self.ledger = Ledger(config, model.tokenizer)
        self.gate = Gate(device.programs, self.scheduler, by_draws=config.mesh is not None)
        self.guides = guides_of(model.tokenizer, config.vocab_size, model.eos_ids)
        self.trace: Recorder | None = None
        if options.trace is not None:
            self.trace = Recorder(options.trace, sizes.limits, sizes.buckets, options.memory)
        self.beside = beside
        self.in_flight: InFlight | None = None
        self._proposed: Proposed | None = None  # drafts of the step in flight, for guided samples
        self._failures = 0  # device errors since the last step that was read
        self._last_read: float | None = None  # when the step before was read, if the device went on at once

    @property
    def has_work(self) -> bool:
        """Returns whether there is something to compute, to read or to tell."""
        return bool(self.ledger.has_samples or self.in_flight or self.ledger.has_news)

    def add(self, seq: Sequence) -> Live:
        guide = seq.params.guide
        matcher = None if guide is None else self.guides.matcher(guide, seq.prompt[seq.guided :])
        live = self.ledger.add(seq, matcher)
        try:
            self.gate.add(seq)
        except BaseException:
            self.ledger.forget(live)
            raise
        if self.trace:
            self.trace.request(seq)
        return live

    @contextmanager
    def all_or_none(self) -> Iterator[list[Live]]:
        """Drops the samples that a block adds, and puts into this list, where it raises: nobody would know of them."""
        added: list[Live] = []
        try:
            yield added
        except BaseException:
            for live in added:
                self.drop(live, "error")
            raise

    def drop(self, live: Live, reason: str) -> None:
        """Ends a sample of which no event tells."""
        self.gate.finish(live.seq, reason)
        self.ledger.forget(live)

    def cut(self, request: Samples, reason: str) -> None:
        """Ends all samples of a request."""
        for live in list(request.unfinished.values()):
            self._finish(live, reason, time.perf_counter())

    def advance(self) -> None:
        """One turn, or what goes on after a device error. Raises DeviceLost."""
        try:
            self.turn()
        except jax.errors.JaxRuntimeError as error:
            self.recover(error)
        if self.trace and not self.ledger.has_samples:
            self.trace.flush()

    def turn(self) -> None:
        """Plans and dispatches a step, then reads the one before it."""
        if self.trace:
            self.trace.planning()
        for request in self.ledger.late():
            self.cut(request, "deadline")
        for seq, error in self.gate.open():
            self._refuse(seq, error)
        plan = self.scheduler.schedule()
        before, self.in_flight = self.in_flight, None
        if plan is not None:
            self.in_flight = self.dispatch(plan)
        if before is not None:
            self.read(before)
        elif plan is None:
            self.gate.wait()
        if self.in_flight is not None and self.in_flight.outputs is None:
            self.in_flight = self._complete(self.in_flight)

    def dispatch(self, plan: StepPlan) -> InFlight:
        step, pages = self.device.dispatch(plan, self.gate.need(plan)), self.scheduler.pool.num_used
        if self.trace:
            self.trace.dispatched(plan, step.bucket, pages)
        decoded = sum(plan.rows) if step.bucket.rows > 1 else len(plan.rows)
        self.ledger.step_dispatched(plan.prompt_tokens, decoded, step.bucket.size, pages)
        _forget_moved(plan.loads)
        if self.beside:
            self.beside.dispatched(self, plan)
        return step

    def _complete(self, step: InFlight) -> InFlight:
        """Dispatches the second half of a guided step, whose first half runs, once the step before it was read: what a
        guided sample may draw depends on its tokens up to then."""
        lives, samples = guided_samples(step, self.ledger.sample, self._proposed)
        shapes = self.device.shapes
        if samples:
            allowed = self.guides.masks(samples, shapes.tree(step.bucket))
            coming = self.guides.coming(samples, shapes.tree(), self.device.wants_drafts(step))
            self.device.guide([live.seq.slot for live in lives if live.seq.slot is not None], allowed, coming)
            for live, possible in zip(lives, allowed[:, 0].any(axis=1).tolist(), strict=True):
                if not possible:
                    self._abandon(live, "its guide allows none of the model's tokens")
        return self.device.complete(step)

    def read(self, step: InFlight) -> None:
        """Takes in what a step drew, and waits for it."""
        assert step.outputs is not None
        outputs = jax.device_get(step.outputs)
        self._failures, self._proposed = 0, outputs.drafts
        if outputs.prompt_logprobs is not None:
            take_prompt_scores(step.plan, outputs, self.ledger.sample)
        now = time.perf_counter()
        for live, rows, kept, reason in self.ledger.take(step.drawn(outputs), outputs, now):
            if kept:
                self.scheduler.on_tokens(live.seq, kept, rows)
            if reason is not None:
                self._finish(live, reason, now, kept[:-1] if reason == "stop" else kept)
        if self.drafting is not None:
            self._learn(step, outputs, now)
        self.scheduler.step_read(step.plan.step)
        if self.trace:
            self.trace.read(step.plan.step)

    def _learn(self, step: InFlight, outputs: Outputs, now: float) -> None:
        """Tells what a step with drafts gained and cost. Its time is known where the device had no pause before it."""
        assert self.drafting is not None
        seconds, self._last_read = (None if self._last_read is None else now - self._last_read), now
        if self.in_flight is None:
            self._last_read = None
        if step.plan.chunks:
            return
        drafts = repeat(0) if outputs.drafted is None else outputs.drafted.tolist()
        advanced = [(n, sum(token >= 0 for token in some)) for n, (*_, some) in zip(drafts, step.drawn(outputs))]
        self.drafting.observe(step.bucket, [each for each in advanced if each[1]], seconds)

    def _finish(self, live: Live, reason: str, now: float, tokens: List[int] = ()) -> None:
        """See Ledger.end."""
        reason = self.ledger.end(live, reason, now, tokens)
        self.gate.finish(live.seq, reason)
        if self.trace:
            self.trace.end(live.seq, reason)

    def _refuse(self, seq: Sequence, error: BaseException) -> None:
        """Ends a sequence whose steps could not be compiled."""
        why = f"{type(error).__name__}: {first_line(error)}"
        self._abandon(self.ledger.find(seq.request_id, seq.sample), f"its steps could not be compiled ({why})")

    def _abandon(self, live: Live, why: str) -> None:
        warnings.warn(f"request {live.seq.request_id} ends: {why}", stacklevel=2)
        self._finish(live, "error", time.perf_counter())

    def recover(self, error: Exception) -> None:
        """A device error loses the donated pool: makes a new one, and what runs is recomputed. DeviceLost the second
        time in a row, or where a new one has no room."""
        self.ledger.device_failed()
        self._failures += 1
        self.in_flight = None
        if self._failures > 1:
            hint = "; take fewer pages (num_pages), so that steps have room" if out_of_memory(error) else ""
            raise DeviceLost(f"the device failed again right after recovery: {first_line(error)}{hint}")
        error.__traceback__ = None  # its frames hold what was on the device
        # A copy from another device that has failed would make this one fail again.
        _forget_moved((*self.scheduler.waiting, *self.scheduler.running, *self.gate.waiting))
        try:
            self.device.renew()
        except jax.errors.JaxRuntimeError as again:
            raise DeviceLost(f"there is no room for a new state after a device error: {first_line(again)}") from again
        self.scheduler.reset()
        if self.trace:
            self.trace.lost()

    def close(self) -> None:
        """Drops the device state, and ends what runs beside the loop."""
        self.in_flight = None
        if self.beside:
            self.beside.close()
        self.device.close()
        self.ledger.close()
        if self.trace:
            self.trace.close()


def _forget_moved(sequences: Iterable[Sequence]) -> None:
    """Drops K and V that came from another engine: whoever loses their pages computes them."""
    for seq in sequences:
        if seq.moved:
            seq.snapshot = None


def first_line(error: BaseException) -> str:
    """Returns what an error says, for a message of one line."""
    return str(error).partition("\n")[0]
