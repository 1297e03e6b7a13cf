"""The continuous-batching loop: plans a step, dispatches it, and reads the tokens of the step before.

Step t + 1 is dispatched before the tokens of step t are read, so the host works while the device does.
"""

import secrets
import time
import warnings
from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as List
from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

import jax

from jllm.engine.checks import Prompt, check_request, check_urgency, token_ids
from jllm.engine.device import Device, Halfway
from jllm.engine.drafters import with_drafter
from jllm.engine.drafting import DraftCounts, drafting_of
from jllm.engine.gate import Gate
from jllm.engine.guides import Guides
from jllm.engine.guiding import Proposed, guided_samples
from jllm.engine.ledger import Ledger
from jllm.engine.live import InFlight, Live, Samples, take_prompt_scores, variant_for
from jllm.engine.metrics import Metrics
from jllm.engine.options import EngineKeywords, EngineSizes, make_options
from jllm.engine.packing import pack_plan
from jllm.engine.plan import StepPlan
from jllm.engine.request import Event, SamplingParams
from jllm.engine.scheduler import Scheduler
from jllm.engine.sequence import Sequence
from jllm.engine.sharing import known_tokens
from jllm.engine.trace import Recorder
from jllm.engine.turns import Turns, in_turn
from jllm.errors import EngineClosed, RequestError, SnapshotError
from jllm.kv_policies.options import with_learned
from jllm.snapshot import Snapshot, join
from jllm.state import Outputs, Variant

if TYPE_CHECKING:
    from jllm.pretrained import Model


class Engine:
    """Serves requests by continuous batching.

    submit() queues a prompt, step() advances everything by one merged step and returns what is new, run() steps until
    nothing is left. `model` has config, params and tokenizer; options are those of EngineOptions. `device` makes what
    runs the steps, and `scheduler` what plans them: experiments put others in their place.

    Threads: one thread steps, with step() or run(); a second one inside step() gets EngineBusy. All other methods may
    be called from any thread, while a step runs too: they wait for its end, in the order of the calls.
    """

    def __init__(
        self,
        model: "Model",
        *,
        device: Callable[..., Device] = Device,
        scheduler: Callable[..., Scheduler] = Scheduler,
        **options: Unpack[EngineKeywords],
    ):
        self._config, self._tokenizer = model.config, model.tokenizer
        self._options = make_options(with_drafter(with_learned(options, model), model))
        self._device = device(model.config, model.params, self._options)
        sizes = self._device.sizes
        self._drafting = drafting_of(self._options, sizes.limits)
        self._guides = Guides(model.tokenizer, model.config.vocab_size, model.config.eos_ids)
        self._scheduler = scheduler(
            sizes.limits,
            sizes.prompt_sizes,
            sizes.decode_sizes,
            policy=self._options.make_policy(),
            prefix_cache=self._options.prefix_cache,
            draft_rows=None if self._drafting is None else self._drafting.rows,
        )
        self._gate = Gate(self._device.programs, self._scheduler)
        self._trace = None
        if self._options.trace is not None:
            about = self._options.memory
            self._trace = Recorder(self._options.trace, sizes.limits, sizes.buckets, about)
        self._ledger = Ledger(model.config, model.tokenizer)
        self._in_flight: InFlight | None = None
        self._proposed: Proposed | None = None  # drafts of the step in flight, for guided samples
        self._next_id = 0
        self._failures = 0  # device errors since the last step that was read
        self._closed: str | None = None
        self._last: tuple[Event, ...] = ()
        self._turns = Turns()
        self._last_read: float | None = None  # when the step before was read, if the device went on at once

    @property
    def has_work(self) -> bool:
        """Whether step() still has something to do or to report."""
        return bool(self._ledger.live or self._in_flight or self._ledger.has_news)

    @property
    def closed(self) -> bool:
        """Whether it takes no more work."""
        return self._closed is not None

    @property
    def sizes(self) -> EngineSizes:
        """The options made definite: limits, and the compiled sizes."""
        return self._device.sizes

    @property
    def slots(self) -> int:
        """Samples that can run at once."""
        return self.sizes.limits.max_slots

    @property
    def vocab_size(self) -> int:
        return self._config.vocab_size

    @property
    def last_events(self) -> tuple[Event, ...]:
        """What step() had not returned when the engine closed: each sample that was left has its completion there,
        with finish_reason "error" where a step failed, or else "abort". Nothing while the engine is open."""
        return self._last

    @in_turn
    def compile_ahead(self, samplings: Iterable[SamplingParams] = (), *, wait: bool = True) -> int:
        """Compiles every bucket in threads, with progress on stderr; returns how many there are.

        Each bucket for requests like `samplings` (all of them together). A request that asks for more waits, while
        others run, until the programs for it are compiled in the background. Without wait it returns once the largest
        bucket is there, and steps do with the buckets that there are until the rest is. metrics() has seconds, programs
        and hits of the persistent cache.
        """
        self._check_open()
        variant = variant_for(list(samplings))
        if wait:
            return self._device.compile_ahead(variant)
        self._device.start_compiling(variant)
        return len(self.sizes.buckets)

    def submit(
        self,
        prompt: Prompt,
        sampling: SamplingParams = SamplingParams(),
        *,
        priority: int = 0,
        deadline: float | None = None,
    ) -> int:
        """Queues a prompt (text, or token ids, to which nothing is added); returns the id that its events carry.

        Requests of lower priority values are served first, equal ones as they come, and what runs is not stopped for
        what waits (scheduler.py says who starves). In the first step after `deadline` seconds all of its samples that
        have not ended do, with finish_reason "deadline" and what they have."""
        ids = tuple(self.check(prompt, sampling))
        check_urgency(priority, deadline, self._config)
        with self._turns.take():
            return self._submit(ids, sampling, priority, deadline)

    def _submit(
        self,
        ids: tuple[int, ...],
        sampling: SamplingParams,
        priority: int,
        deadline: float | None,
        snapshot: Snapshot | None = None,
        private: bool = False,
    ) -> int:
        self._check_open()
        seed = secrets.randbits(32) if sampling.seed is None else sampling.seed
        request_id, self._next_id = self._next_id, self._next_id + 1
        first = None
        for sample in range(sampling.n):
            seq = Sequence(request_id, sample, ids, sampling, seed, self._max_length(ids, sampling))
            seq.origin, seq.common, seq.priority = first, len(ids), priority
            if snapshot is not None and snapshot.length:
                seq.snapshot, seq.private = snapshot, private
            seq.guided = len(ids) if snapshot is None or snapshot.guided is None else snapshot.guided
            first = first or seq
            self._add(seq)
        if deadline is not None:
            self._ledger.end_after(request_id, deadline)
        self._ledger.counts.requests += 1
        self._ledger.counts.prompt_tokens += len(ids)
        return request_id

    def check(self, prompt: Prompt, sampling: SamplingParams = SamplingParams()) -> list[int]:
        """The prompt's token ids, if submit would take it; else the error that submit would raise."""
        self._check_open()
        ids = token_ids(prompt, self._tokenizer)
        check_request(ids, sampling, self._config, self._tokenizer is not None)
        if sampling.guide is not None:
            self._guides.matcher(sampling.guide)
        self._scheduler.check(len(ids), self._max_length(ids, sampling))
        return ids

    def _max_length(self, ids: Collection[int], sampling: SamplingParams) -> int:
        return min(len(ids) + sampling.max_new_tokens, self._config.context)

    @in_turn
    def fork(self, request_id: int, sample: int = 0) -> int:
        """Continues a running sample as one more sample of its request, from its tokens so far and with a key of its
        own; returns the new sample's index. The two share full pages of what they have in common, and the new one gets
        a copy of the page after these."""
        self._check_open()
        live = self._ledger.find(request_id, sample)
        seq = live.seq
        index = self._ledger.requests[request_id].started
        twin = Sequence(request_id, index, seq.prompt, seq.params, seq.seed, seq.max_length, output=list(seq.output))
        twin.origin, twin.common, twin.snapshot, twin.private = seq, seq.length, seq.snapshot, seq.private
        twin.priority, twin.guided = seq.priority, seq.guided
        new = self._add(twin)
        for token in seq.output:
            new.output.push(token)
        new.submitted, new.first_token, new.logprobs = live.submitted, live.first_token, list(live.logprobs)
        new.last_token = live.last_token
        return index

    @in_turn
    def snapshot(self, request_id: int, sample: int = 0) -> Snapshot:
        """The KV cache of a running sample as a value on the host, and its tokens so far, prompt included (see
        snapshot.py). Waits for the device. What waits for a slot has no K and V: a snapshot of length 0."""
        self._check_open()
        seq = self._ledger.find(request_id, sample).seq
        length = 0 if seq.slot is None else self._scheduler.sharing.whole(known_tokens(seq))
        pages = seq.pages[: self._scheduler.pool.pages_for(length)]
        value = join(self._device.read_pages(pages), seq.tokens, length)
        return replace(value, weights=self._device.weights, guided=seq.guided if seq.params.guide else None)

    def resume(
        self,
        snapshot: Snapshot,
        sampling: SamplingParams = SamplingParams(),
        *,
        share: bool = False,
        priority: int = 0,
        deadline: float | None = None,
    ) -> int:
        """Queues a request, as submit() does, whose prompt is the snapshot's tokens, and whose K and V, as far as they
        are in it (`kivi`: whole blocks), are taken as they are: edited ones too, so they are never shared but with
        samples and forks of this request; unless `share` says that they are what these tokens give, and they may go to
        the prefix cache. Returns its id. With the seed of the sample that was snapshot, its first sample goes on as
        sample 0 would have, in its guide too if it had one; a guide begins here if it had none, or with
        `replace(snapshot, guided=None)`. SnapshotError for one of other weights or another cache."""
        if not isinstance(snapshot, Snapshot):
            raise SnapshotError(f"resume takes a Snapshot, of Engine.snapshot or snapshot.load, not {snapshot!r}")
        ids = tuple(self.check([int(token) for token in snapshot.tokens], sampling))
        if sampling.prompt_logprobs or sampling.counts_tokens:
            what = "prompt_logprobs" if sampling.prompt_logprobs else "penalties of tokens"
            raise RequestError(f"{what} need the prompt computed, and a snapshot takes its place: submit the tokens")
        check_urgency(priority, deadline, self._config)
        known = jax.device_get(snapshot)
        with self._turns.take():  # not before: a large schema, which is compiled above, does not hold up steps
            self._check_open()
            self._device.check_snapshot(snapshot)
            return self._submit(ids, sampling, priority, deadline, known, private=not share)

    @in_turn
    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes; what runs goes on."""
        self._scheduler.sharing.clear()

    @in_turn
    def abort(self, request_id: int) -> None:
        """Ends all samples of a request; their events follow with what they had. Unknown or finished: RequestError."""
        self._check_open()
        self._cut(self._ledger.request(request_id), "abort")

    def _cut(self, request: Samples, reason: str) -> None:
        for live in list(request.unfinished.values()):
            self._finish(live, reason, time.perf_counter())

    def step(self) -> list[Event]:
        """Dispatches the next step, reads the one before, and returns what is new (an empty list at times). Text of
        many tokens is made while the next step runs, and comes with it. After an exception the engine is closed, and
        last_events has the ends of all requests."""
        with self._turns.take(to_step=True):
            self._check_open()
            try:
                self._advance()
                return self._ledger.news(at_once=self._in_flight is None)
            except BaseException as error:  # above all Ctrl-C: half a step may be done, and it is unknown which half
                interrupted = isinstance(error, KeyboardInterrupt)
                what = "was interrupted" if interrupted else f"failed ({type(error).__name__}: {_first_line(error)})"
                self._close(f"a step {what} half-way", "abort" if interrupted else "error")
                raise

    def _advance(self) -> None:
        try:
            self._turn()
        except jax.errors.JaxRuntimeError as error:
            self._recover(error)
        if self._trace and not self._ledger.live:
            self._trace.flush()

    def _turn(self) -> None:
        """Plans and dispatches a step, then reads the one before it."""
        if self._trace:
            self._trace.planning()
        for request in self._ledger.late():
            self._cut(request, "deadline")
        for seq, error in self._gate.open():
            self._refuse(seq, error)
        plan = self._scheduler.schedule()
        before, self._in_flight = self._in_flight, None
        if plan is not None:
            self._in_flight = self._dispatch(plan)
        if before is not None:
            self._read(before)
        elif plan is None:
            self._gate.wait()
        if self._in_flight is not None and self._in_flight.half is not None:
            self._in_flight = self._complete(self._in_flight, self._in_flight.half)

    def run(self):
        """Steps until nothing is left; yields events as they come."""
        while self.has_work:
            yield from self.step()

    def metrics(self) -> dict[str, Any]:
        """Counters, gauges, and percentiles of times in seconds (see metrics.Metrics) as plain data."""
        return self.measured().as_dict()

    @in_turn
    def measured(self) -> Metrics:
        """What metrics() tells, as a record of its own: those of several engines can be joined."""
        waiting, programs = len(self._gate.waiting), self._device.programs
        drafts = None if self._drafting is None else self._drafting.counts
        return deepcopy(Metrics.of(self._scheduler, waiting, programs, self._ledger.counts, self._ledger.times, drafts))

    @in_turn
    def reset_metrics(self) -> None:
        """Counters and times begin anew, after a warm-up say; what runs goes on."""
        self._ledger.reset_metrics()
        if self._drafting is not None:
            self._drafting.counts = DraftCounts()
        self._scheduler.reset_counts()

    @in_turn
    def close(self, reason: str = "it was closed") -> None:
        """Drops the device state and ends all requests (see last_events); later calls raise EngineClosed, but to close
        again is no mistake."""
        self._close(reason, "abort")

    def _close(self, reason: str, ended: str) -> None:
        """`ended`: the finish reason of what is left."""
        if self._closed is not None:
            return
        self._closed = reason
        self._in_flight = None
        try:
            self._last = self._ledger.end_all(ended)
        finally:
            self._device.close()
            self._ledger.close()
            if self._trace:
                self._trace.close()

    def _check_open(self) -> None:
        if self._closed is not None:
            raise EngineClosed(f"this engine takes no more work: {self._closed}")

    def _add(self, seq: Sequence) -> Live:
        guide = seq.params.guide
        matcher = None if guide is None else self._guides.matcher(guide, seq.prompt[seq.guided :])
        self._gate.add(seq)
        if self._trace:
            self._trace.request(seq)
        return self._ledger.add(seq, matcher)

    # One step

    def _dispatch(self, plan: StepPlan) -> InFlight:
        sampled = [*plan.decodes, *(c.seq for c in plan.chunks)]
        need = Variant(
            penalties=self._gate.inside.penalties,
            guided=self._gate.inside.guided,
            logprobs=any(s.params.logprobs is not None for s in sampled),
            prompt_logprobs=any(c.seq.params.prompt_logprobs and c.start < len(c.seq.prompt) - 1 for c in plan.chunks),
        )
        tokens, pool = plan.prompt_tokens, self._scheduler.pool
        bucket, variant = self._device.programs.choose(need, *plan.size, plan.most_rows)
        layout = self._device.layout(bucket, variant)
        buffer = pack_plan(layout, plan, pool.page_size, self._config.vocab_size, self._stop_ids)
        for seq in plan.loads:
            assert seq.snapshot is not None
            self._device.load(seq.pages[: pool.pages_for(seq.snapshot.length)], seq.snapshot)
        if plan.copies:
            self._device.copy_pages(plan.copies)
        if self._drafting is not None or self._options.hooks is not None:
            for seq, skipped in plan.skips:
                assert seq.slot is not None
                self._device.remember(seq.slot, seq.slice(0, skipped))
        half = self._device.forward(buffer, layout, variant) if variant.guided else None
        outputs = None if variant.guided else self._device.run(buffer, layout, variant)
        counts = self._ledger.counts
        if self._trace:
            self._trace.dispatched(plan, bucket, pool.num_used)
        counts.steps += 1
        counts.tokens += tokens + (sum(plan.rows) if bucket.rows > 1 else len(plan.rows))
        counts.rows += bucket.size
        counts.prefill_tokens += tokens
        counts.pages_peak = max(counts.pages_peak, pool.num_used)
        return InFlight(plan, bucket, outputs, half)

    def _complete(self, step: InFlight, half: Halfway) -> InFlight:
        """Dispatches the second half of a guided step, whose first half runs, once the step before it was read: what a
        guided sample may draw depends on its tokens up to then."""
        lives, samples = guided_samples(step.plan, step.bucket.rows, self._ledger.live.get, self._proposed)
        if samples:
            allowed = self._guides.masks(samples, self._device.tree(step.bucket))
            wanted = half.layout.wanted and self._drafting is not None
            coming = self._guides.coming(samples, self._device.tree(), wanted)
            self._device.guide([live.seq.slot for live in lives if live.seq.slot is not None], allowed, coming)
            for live, possible in zip(lives, allowed[:, 0].any(axis=1).tolist(), strict=True):
                if not possible:
                    self._abandon(live, "its guide allows none of the model's tokens")
        return InFlight(step.plan, step.bucket, self._device.sample(half))

    def _stop_ids(self, seq: Sequence) -> frozenset[int]:
        return self._ledger.live[seq].stop_ids

    def _read(self, step: InFlight) -> None:
        assert step.outputs is not None
        live, outputs = self._ledger.live, jax.device_get(step.outputs)
        self._failures, self._proposed = 0, outputs.drafts
        if outputs.prompt_logprobs is not None:
            take_prompt_scores(step.plan, outputs, live.get)
        plan, bucket, now = step.plan, step.bucket, time.perf_counter()
        short = len(outputs.tokens) - bucket.chunks  # rows before those of chunks
        most = short // bucket.decodes if bucket.decodes else 1
        tokens = outputs.tokens[:short].reshape(-1, most).tolist()
        for i, (seq, rows, some) in enumerate(zip(plan.decodes, plan.rows, tokens)):
            if seq.finish_reason is None:  # else: ended by an earlier token or an abort; the surplus is dropped
                self._take(live[seq], some, rows, outputs, i * most, now)
        for row, chunk in enumerate(plan.chunks, short):
            if chunk.final and chunk.seq.finish_reason is None:
                self._take(live[chunk.seq], [int(outputs.tokens[row])], 1, outputs, row, now)
        self._ledger.step_read(now)
        if self._drafting is not None:
            self._learn(step, outputs, tokens, now)
        self._scheduler.step_read(step.plan.step)
        if self._trace:
            self._trace.read(step.plan.step)

    def _learn(self, step: InFlight, outputs: Outputs, tokens: list[list[int]], now: float) -> None:
        """Tells what a step with drafts gained and cost. Its time is known where the device had no pause before it."""
        assert self._drafting is not None
        seconds, self._last_read = (None if self._last_read is None else now - self._last_read), now
        if self._in_flight is None:
            self._last_read = None
        if step.plan.chunks:
            return
        drafts = [0] * len(tokens) if outputs.drafted is None else outputs.drafted.tolist()
        advanced = [(n, sum(token >= 0 for token in some)) for n, some in zip(drafts, tokens)]
        self._drafting.observe(step.bucket, [each for each in advanced if each[1]], seconds)

    def _take(self, live: Live, tokens: list[int], rows: int, outputs: Outputs, row: int, now: float) -> None:
        """Takes in what a sequence's `rows` rows of a step drew, from `row` on, read at `now`."""
        kept, reason = self._ledger.take(live, tokens, outputs, row, now)
        if kept:
            self._scheduler.on_tokens(live.seq, kept, rows)
        elif reason is None:
            raise AssertionError(f"request {live.seq.request_id}: the device ended a sequence that the host runs")
        if reason is None:
            self._ledger.tell(live, kept)
        else:
            self._finish(live, reason, now, kept[:-1] if reason == "stop" else kept)

    def _finish(self, live: Live, reason: str, now: float, tokens: List[int] = ()) -> None:
        """See Ledger.end."""
        reason = self._ledger.end(live, reason, now, tokens)
        self._gate.finish(live.seq, reason)
        if self._trace:
            self._trace.end(live.seq, reason)

    def _refuse(self, seq: Sequence, error: BaseException) -> None:
        """Ends a sequence whose steps could not be compiled."""
        why = f"{type(error).__name__}: {_first_line(error)}"
        self._abandon(self._ledger.live[seq], f"its steps could not be compiled ({why})")

    def _abandon(self, live: Live, why: str) -> None:
        warnings.warn(f"request {live.seq.request_id} ends: {why}", stacklevel=2)
        self._finish(live, "error", time.perf_counter())

    def _recover(self, error: Exception) -> None:
        """A device error loses the donated pool: make a new one and recompute what runs; twice in a row closes."""
        self._ledger.counts.device_errors += 1
        self._failures += 1
        self._in_flight = None
        if self._failures > 1:
            self._close(f"the device failed again right after recovery: {_first_line(error)}", "error")
            self._check_open()
        error.__traceback__ = None  # its frames hold what was on the device
        try:
            self._device.renew()
        except jax.errors.JaxRuntimeError as again:
            self._close(f"there is no room for a new state after a device error: {_first_line(again)}", "error")
            self._check_open()
        self._scheduler.reset()
        if self._trace:
            self._trace.lost()


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
