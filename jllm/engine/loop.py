"""Runs continuous batching: plans a step, dispatches it, and reads the tokens of the step before.

Step t + 1 is dispatched before the tokens of step t are read, so the host works while the device does.
"""

import time
import warnings
from collections.abc import Callable, Iterable
from collections.abc import Sequence as List
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any, Protocol

import jax

from jllm.engine.adapters import Places
from jllm.engine.device import Device, InFlight
from jllm.engine.draft_policy import drafting_of
from jllm.engine.gate import Gate
from jllm.engine.ledger import Ledger, Samples
from jllm.engine.options import EngineOptions
from jllm.engine.plan import StepPlan
from jllm.engine.samples import take_prompt_scores
from jllm.engine.scheduler import Scheduler
from jllm.engine.sequence import Sequence
from jllm.engine.tapped import take_drawn, take_prompts
from jllm.engine.trace import Recorder
from jllm.guides.matcher import Guided, guides_of
from jllm.model.taps import resolve_taps
from jllm.parallel.memory import out_of_memory
from jllm.step.state import Outputs

if TYPE_CHECKING:
    from jllm.model.model import Model


Of = Callable[[Sequence], bool] | None  # which samples; None: all


class DeviceLost(Exception):
    """Is raised when the device has failed for good. Its text says why."""


class Beside(Protocol):
    """Works beside a loop's steps, in the thread that steps."""

    def dispatched(self, loop: "Loop", plan: StepPlan) -> None:
        """Runs right after the dispatch of a step, before the tokens of the one before it are read."""

    def stepped(self, loop: "Loop") -> None:
        """Runs once all news of a step was returned."""

    def stop(self) -> None:
        """Drops what it has on devices."""


class Loop:
    """Runs the steps of one engine. It takes one caller at a time.

    `device` runs the steps, and `scheduler` makes the object that plans them. `ledger` has the samples, `gate` lets
    them in, and `guides` say what they may draw.
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
            sizes.steps,
            policy=options.make_policy(),
            prefix_cache=options.prefix_cache,
            draft_rows=None if self.drafting is None else self.drafting.rows,
        )
        self.ledger = Ledger(config, model.tokenizer)
        self.adapters = Places(device, options.adapter_places)
        gated: dict[str, Any] = {"by_draws": config.mesh is not None}
        gated["taps"] = resolve_taps(options.taps or (), config.num_layers)
        gated["adapted"] = options.deterministic and options.adapter_places > 0
        self.gate = Gate(device.programs, self.scheduler, self.adapters, **gated)
        self.guides = guides_of(model.tokenizer, config.vocab_size, model.eos_ids)
        self.trace: Recorder | None = None
        if options.trace is not None:
            self.trace = Recorder(options.trace, sizes.limits, sizes.buckets, options.memory)
        self.beside = beside
        self.in_flight: InFlight | None = None
        self._stale: list[Of] = []  # whose K and V are of other weights, so that they are to begin anew; None: all
        self._coming: dict[str | None, Callable[[], None]] = {}  # take other weights, once what runs has ended
        self._proposed: tuple[Any, Any] | None = None  # Outputs.drafts of the step read last, on the host
        self._failures = 0  # device errors since the last step that was read
        self._last_read: float | None = None  # when the step before was read, if the device went on at once

    @property
    def has_work(self) -> bool:
        """Returns whether there is something to compute, to read or to return."""
        return bool(self.ledger.has_samples or self.in_flight or self.ledger.has_news or self._coming)

    def stale(self, seq: Sequence) -> bool:
        """Returns whether K and V of a sample are of other weights, and it is to begin anew."""
        return any(of is None or of(seq) for of in self._stale)

    def add(self, seqs: Iterable[Sequence]) -> None:
        """Adds samples: all, or none where one fails, since no caller would know of the others."""
        added: list[Sequence] = []
        try:
            for seq in seqs:
                self._add(seq)
                added.append(seq)
        except BaseException:
            for seq in added:
                self.drop(seq, "error")
            raise

    def _add(self, seq: Sequence) -> None:
        guide, seq.adapter = seq.params.guide, self.adapters.of(seq.params)
        seq.matcher = None if guide is None else self.guides.matcher(guide, seq.prompt[seq.guided :])
        self.ledger.add(seq)
        try:
            self.gate.add(seq)
        except BaseException:
            self.ledger.forget(seq)
            raise
        if self.trace:
            self.trace.request(seq)

    def drop(self, seq: Sequence, reason: str) -> None:
        """Ends a sample without an event."""
        self.gate.finish(seq, reason)
        self.ledger.forget(seq)

    def cut(self, request: Samples, reason: str) -> None:
        """Ends all samples of a request."""
        for seq in list(request.unfinished.values()):
            self._finish(seq, reason, time.perf_counter())

    def update(self, rebind: Callable[[], None], running: str, adapter: str | None = None) -> None:
        """Calls `rebind`, which makes the device take other weights: the model's, or those of an adapter. `running` is
        as in Engine.update. It replaces an update of the same weights that waits."""
        of = None if adapter is None else partial(_takes, adapter)
        self._coming.pop(adapter, None)
        if running == "finish":
            self.gate.hold()
            if not self.gate.drained:
                self._coming[adapter] = partial(self.update, rebind, "recompute", adapter)
                return
        if not self._coming:
            self.gate.release()
        rebind()
        self.ledger.counts.updates += 1
        outside = [seq for seq in self.gate.waiting if of is None or of(seq)]
        for seq in (*self.scheduler.waiting, *self.scheduler.running, *outside):
            if of is None or of(seq):
                seq.snapshot = None
        if self.beside:
            self.beside.stop()
        if running == "keep" and None not in self._stale:
            self.scheduler.keep_on(of)
            for seq in outside:
                seq.origin = None
        else:
            self._stale.append(of)

    def sleep(self) -> None:
        """Frees pages and slots, once the step in flight is read. What ran waits again."""
        if self.in_flight is not None:
            self._read_last()
        if self.beside:
            self.beside.stop()
        self.scheduler.reset()
        self.device.sleep()

    def advance(self) -> None:
        """Takes one turn, and goes on after a device error. Raises DeviceLost, and EngineNotReady where the device
        sleeps or lacks its weights."""
        if self._coming and self.gate.drained:
            for update in list(self._coming.values()):
                update()
        self.device.check_ready()
        try:
            self.turn()
        except jax.errors.JaxRuntimeError as error:
            self.recover(error)
        except RuntimeError:
            if not self.device.lacks_weights:
                raise
            self._renew()  # they were donated during the turn, and a part of it is done
            self.device.check_ready()
        if self.trace and not self.ledger.has_samples:
            self.trace.flush()

    def turn(self) -> None:
        """Plans and dispatches a step, then reads the one before it."""
        if self.trace:
            self.trace.planning()
        if self._stale:
            if self.in_flight is not None:
                self._read_last()
            for of in self._stale:
                self.scheduler.start_over(of)
            self._stale.clear()
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

    def _read_last(self) -> None:
        """Reads the step in flight, after which none is."""
        assert self.in_flight is not None
        step, self.in_flight = self.in_flight, None
        self.read(step)

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
        """Dispatches the second half of a guided step, once the step before it was read: what a guided sample may draw
        depends on its tokens up to then."""
        shapes, most = self.device.shapes, step.bucket.rows  # which may be fewer than were planned
        drawing = [*zip(step.plan.decodes, step.plan.rows), *((c.seq, 1) for c in step.plan.chunks if c.final)]
        guided = {
            seq: Guided(seq.matcher, seq.output, self._drafts(seq, min(rows, most) - 1))
            for seq, rows in drawing
            if seq.live and seq.matcher is not None
        }
        if guided:
            allowed = self.guides.masks([*guided.values()], shapes.tree(step.bucket))
            coming = self.guides.coming([*guided.values()], shapes.tree(), self.device.wants_drafts(step))
            self.device.guide([seq.slot for seq in guided if seq.slot is not None], allowed, coming)
            for seq, possible in zip(guided, allowed[:, 0].any(axis=1).tolist(), strict=True):
                if not possible:
                    self._abandon(seq, "its guide allows none of the model's tokens")
        return self.device.complete(step)

    def _drafts(self, seq: Sequence, most: int) -> list[int]:
        """Returns the drafts, at most this many, that the step read last proposed for a sequence."""
        if self._proposed is None:
            return []
        tokens, count = self._proposed
        return tokens[seq.slot, : min(int(count[seq.slot]), most)].tolist()

    def read(self, step: InFlight) -> None:
        """Waits for a step, and takes in what it drew."""
        assert step.outputs is not None
        outputs = jax.device_get(step.outputs)
        self._failures, self._proposed = 0, outputs.drafts
        if outputs.prompt_logprobs is not None:
            take_prompt_scores(step.plan, outputs)
        take_prompts(step.tapped, outputs)
        segments = {seq: i for i, seq in enumerate(step.plan.decodes) if seq in step.tapped} if step.tapped else {}
        now, on_tokens = time.perf_counter(), self.scheduler.on_tokens
        for seq, rows, kept, reason in self.ledger.take(step.drawn(outputs), outputs, step.version, now):
            if kept:
                if segments and seq in segments:
                    take_drawn(seq, step.tapped[seq][0], outputs, segments[seq], len(kept))
                on_tokens(seq, kept, rows)
            if reason is not None:
                self._finish(seq, reason, now, kept[:-1] if reason == "stop" else kept)
        if self.drafting is not None:
            self._learn(step, outputs, now)
        self.scheduler.step_read(step.plan.step)
        if self.trace:
            self.trace.read(step.plan.step)

    def _learn(self, step: InFlight, outputs: Outputs, now: float) -> None:
        """Reports what a step with drafts gained and cost. Its time is known if the device had no pause before it."""
        assert self.drafting is not None
        seconds, self._last_read = (None if self._last_read is None else now - self._last_read), now
        if self.in_flight is None:
            self._last_read = None
        if step.plan.chunks:
            return
        drafts = repeat(0) if outputs.drafted is None else outputs.drafted.tolist()
        advanced = [(n, sum(token >= 0 for token in some)) for n, (*_, some) in zip(drafts, step.drawn(outputs))]
        self.drafting.observe(step.bucket, [each for each in advanced if each[1]], seconds)

    def _finish(self, seq: Sequence, reason: str, now: float, tokens: List[int] = ()) -> None:
        """Ends a sample: see Ledger.end."""
        reason = self.ledger.end(seq, reason, now, tokens)
        self.gate.finish(seq, reason)
        if self.trace:
            self.trace.end(seq, reason)

    def _refuse(self, seq: Sequence, error: BaseException) -> None:
        """Ends a sequence whose steps could not be compiled."""
        self._abandon(seq, f"its steps could not be compiled ({type(error).__name__}: {first_line(error)})")

    def _abandon(self, seq: Sequence, why: str) -> None:
        warnings.warn(f"request {seq.request_id} ends: {why}", stacklevel=2)
        self._finish(seq, "error", time.perf_counter())

    def recover(self, error: Exception) -> None:
        """Makes a new page pool after a device error, which loses the donated one. What runs is computed again.

        Raises DeviceLost the second time in a row, or where there is no room for a new pool."""
        self.ledger.device_failed()
        self._failures += 1
        if self._failures > 1:
            hint = "; take fewer pages (num_pages), so that steps have room" if out_of_memory(error) else ""
            raise DeviceLost(f"the device failed again right after recovery: {first_line(error)}{hint}")
        error.__traceback__ = None  # its frames hold what was on the device
        try:
            self._renew()
        except jax.errors.JaxRuntimeError as again:
            raise DeviceLost(f"there is no room for a new state after a device error: {first_line(again)}") from again

    def _renew(self) -> None:
        """Makes a new page pool. What runs waits again."""
        self.in_flight = None
        # A copy from another device that has failed would make this one fail again.
        _forget_moved((*self.scheduler.waiting, *self.scheduler.running, *self.gate.waiting))
        self.device.renew()
        self.scheduler.reset()
        if self.trace:
            self.trace.lost()

    def close(self) -> None:
        """Drops the device state, and ends what runs beside the loop."""
        self.in_flight = None
        self._coming.clear()
        if self.beside:
            self.beside.stop()
        self.device.close()
        self.ledger.join()
        if self.trace:
            self.trace.stop()


def _takes(adapter: str, seq: Sequence) -> bool:
    return seq.params.adapter == adapter


def _forget_moved(sequences: Iterable[Sequence]) -> None:
    """Drops K and V that came from another engine: sequences that lose their pages compute these again."""
    for seq in sequences:
        if seq.moved:
            seq.snapshot = None


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's text."""
    return str(error).partition("\n")[0]
