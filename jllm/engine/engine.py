"""Defines the engine: requests go in, events come out, from any thread. loop.py has the steps."""

import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from collections.abc import Sequence as List
from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Unpack, get_args

import jax

from jllm.engine.adapters import Given, read, with_adapters
from jllm.engine.checks import Prompt, check_urgency, checked
from jllm.engine.device import Device
from jllm.engine.draft_policy import DraftCounts
from jllm.engine.drafters import with_drafter
from jllm.engine.inputs import Inputs, read_inputs
from jllm.engine.loop import Beside, DeviceLost, Loop, first_line
from jllm.engine.metrics import Metrics
from jllm.engine.moved import Handover
from jllm.engine.options import EngineKeywords, make_options
from jllm.engine.request import Event, SamplingParams
from jllm.engine.reuse import known_tokens
from jllm.engine.samples import begun, go_on
from jllm.engine.scheduler import Scheduler
from jllm.engine.sequence import Sequence
from jllm.engine.tapped import Asked, Tokens, read_asked
from jllm.engine.turns import Turns, in_turn
from jllm.engine.weights import Weights
from jllm.errors import ConfigError, EngineClosed, EngineNotReady, RequestError, SnapshotError
from jllm.files.snapshot import SEVERAL, Snapshot, join
from jllm.guides.matcher import Guides
from jllm.model.hooks import Hooks
from jllm.model.params import Params
from jllm.model.taps import resolve_taps
from jllm.programs.sizes import EngineSizes
from jllm.speculative.drafter import Drafter

if TYPE_CHECKING:
    from jllm.model.model import Model

Running = Literal["recompute", "keep", "finish"]  # what becomes of samples that run when the weights change
RUNNING: tuple[Running, ...] = get_args(Running)


def check_running(running: object) -> None:
    """Raises ConfigError for a wrong `running` of an update."""
    if running not in RUNNING:
        raise ConfigError(f"running must be one of {', '.join(RUNNING)}, not {running!r}")


class Engine:
    """Serves requests by continuous batching.

    submit() queues a prompt, and step() advances everything by one merged step and returns the news. run() steps until
    nothing is left. `model` has config, params and tokenizer; EngineOptions has the options. `device` makes the
    object that runs the steps. `scheduler` makes the one that plans them, and `loop` the one that drives both.
    Experiments replace them. `beside` is a part of the loop that works beside its steps.

    Threads: one thread steps, with step() or run(); a second one inside step() gets EngineBusy. All other methods may
    be called from any thread, even during a step. They wait for its end, in the order of the calls.
    """

    def __init__(
        self,
        model: "Model",
        *,
        device: Callable[..., Device] = Device,
        scheduler: Callable[..., Scheduler] = Scheduler,
        loop: Callable[..., Loop] = Loop,
        beside: Beside | None = None,
        **options: Unpack[EngineKeywords],
    ):
        self._config, self._tokenizer = model.config, model.tokenizer
        self._options = make_options(with_adapters(with_drafter(options, model), model))
        self._device = device(model.config, model.params, self._options)
        self._loop = loop(model, self._options, self._device, scheduler, beside)
        self._taps = resolve_taps(self._options.taps or (), model.config.num_layers)
        self._scheduler, self._ledger = self._loop.scheduler, self._loop.ledger
        self._next_id = self._newest = 0  # the next request's id, and the version of the newest update
        self._closed: str | None = None
        self._last: tuple[Event, ...] = ()
        self._turns = Turns()
        for name, given in (self._options.adapters or {}).items():
            self.adapters.load(name, given)

    @property
    def has_work(self) -> bool:
        """Returns whether step() still has something to do or to report."""
        return self._loop.has_work

    @property
    def closed(self) -> bool:
        """Returns whether the engine takes no more work."""
        return self._closed is not None

    @property
    def sizes(self) -> EngineSizes:
        """Returns the limits and the compiled sizes, with all defaults filled in."""
        return self._device.sizes

    @property
    def slots(self) -> int:
        """Returns how many samples can run at once."""
        return self.sizes.limits.max_slots

    @property
    def most_tokens(self) -> int:
        """Returns the most tokens that one sample may have, with its prompt: the model's context, or fewer if the pool
        is smaller."""
        return self.sizes.most_tokens(self._config.context)

    @property
    def vocab_size(self) -> int:
        return self._config.vocab_size

    @property
    def kv_formats(self) -> tuple[str, str]:
        """Returns the names of the formats of K and V."""
        k, v = self._device.formats
        return k.name, v.name

    @property
    def fingerprint(self) -> str:
        """Returns the fingerprint of the model. Engines with equal ones can continue each other's requests."""
        self._check_open()
        return self._device.fingerprint

    def token_logprobs_options(self) -> dict[str, Any]:
        """Returns the options with which jllm.token_logprobs has this engine's log-probabilities. Raises ConfigError
        for weights whose codes it could not make again."""
        self._check_open()
        return self._device.token_logprobs_options()

    @property
    def guides(self) -> Guides:
        """Returns the object that compiles guides and caches recent ones. Any thread may use it at any time."""
        return self._loop.guides

    @property
    def adapters(self) -> "Adapters":
        """Returns the adapters, which requests take by name (SamplingParams.adapter)."""
        return Adapters(self)

    @property
    def last_events(self) -> tuple[Event, ...]:
        """Returns the events that step() had not returned when the engine closed; none while it is open.

        Each unfinished sample has its completion there. Its finish_reason is "error" if a step failed, otherwise
        "abort".
        """
        return self._last

    @in_turn
    def compile_ahead(self, samplings: Iterable[SamplingParams] = (), *, wait: bool = True) -> int:
        """Compiles every bucket in threads, with progress on stderr; returns how many there are.

        Each bucket serves requests like `samplings` (all of them together). A request that asks for more waits, while
        others run. It starts once its programs are compiled in the background. (On a mesh, temperature and filters
        count too.) With places for adapters there are steps with and without them. With wait=False it returns once the
        largest bucket is compiled. Steps then use the compiled buckets until the rest is ready. metrics() has seconds,
        programs and hits of the persistent cache.
        """
        self._check_open()
        return self._device.compile_ahead(self._loop.gate.ahead(list(samplings)), wait)

    def submit(
        self,
        prompt: Prompt,
        sampling: SamplingParams = SamplingParams(),
        *,
        priority: int = 0,
        deadline: float | None = None,
        inputs: Any = None,
        taps: List[str] = (),
        tokens: Tokens = "last",
    ) -> int:
        """Queues a prompt (text, or token ids, to which nothing is added); returns the id that its events carry.

        Requests of lower priority values are served first, equal ones in the order of arrival. Waiting requests never
        stop running ones (scheduler.py explains who starves). The first step after `deadline` seconds ends all
        unfinished samples, with finish_reason "deadline" and the tokens that they have. `inputs` are arrays of the
        request's own, as the engine's hooks declare them (Hooks.inputs).

        `taps` are names of values inside the forward pass, of those that Engine(taps=...) declares. The completion has
        them for "last", the rows that draw its tokens, for "all", or for a slice of token indices. Index i is of the
        row that reads token i of the prompt and what follows.
        """
        ids, own = tuple(self.check(prompt, sampling)), self.check_inputs(inputs)
        asked = self.check_taps(taps, tokens, sampling.n)
        check_urgency(priority, deadline, self._config)
        with self._turns.turn():
            return self._submit(ids, sampling, priority, deadline, own, asked=asked)

    def _submit(
        self,
        ids: tuple[int, ...],
        sampling: SamplingParams,
        priority: int,
        deadline: float | None,
        inputs: Inputs | None,
        snapshot: Snapshot | None = None,
        private: bool = False,
        asked: Asked | None = None,
    ) -> int:
        self._check_open()
        seed = secrets.randbits(32) if sampling.seed is None else sampling.seed
        request_id, longest = self._new_id(), self._max_length(ids, sampling)
        guided = len(ids) if snapshot is None or snapshot.guided is None else snapshot.guided
        own = ids, sampling, seed, longest
        seqs = [Sequence(request_id, sample, *own, inputs=inputs) for sample in range(sampling.n)]
        for seq in seqs:
            seq.taps = None if asked is None else asked.begin(len(ids))
        for seq in seqs if snapshot is not None and snapshot.length else ():
            seq.snapshot, seq.private = snapshot, private
        self._add(seqs, guided, priority, deadline)
        self._ledger.submitted(len(ids))
        return request_id

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    def _add(self, seqs: list[Sequence], guided: int, priority: int, deadline: float | None) -> None:
        """Adds the samples of a new request, which all begin like the first one."""
        for seq in seqs:
            seq.origin, seq.common = None if seq is seqs[0] else seqs[0], len(seq.prompt)
            seq.priority, seq.guided = priority, guided
        self._loop.add(seqs)
        if deadline is not None:
            self._ledger.end_after(seqs[0].request_id, deadline)

    @in_turn
    def take_in(self, given: Handover, *, priority: int = 0, deadline: float | None = None) -> int:
        """Continues a request that another engine has handed over; returns its id here."""
        self._check_open()
        if isinstance(given.kv, Snapshot):
            self._device.check_snapshot(given.kv, self._loop.adapters.of(given.sampling))
        own = given.prompt, given.sampling, given.seed, self._max_length(given.prompt, given.sampling)
        request_id = self._new_id()
        seqs = [go_on(Sequence(request_id, had.sample, *own, moved=True), had) for had in given.samples]
        seqs[0].snapshot = given.kv if given.version == self.version else None
        self._add(seqs, given.guided, priority, deadline)
        self._ledger.request(request_id).started = given.started
        return request_id

    def check(self, prompt: Prompt, sampling: SamplingParams = SamplingParams()) -> list[int]:
        """Returns the prompt's token ids, or raises the error that submit would raise. Compiles a guide, which may take
        seconds."""
        self._check_open()
        fits = self._scheduler.check_length
        self._loop.adapters.of(sampling)
        return checked(prompt, sampling, self._config, self._tokenizer, self.most_tokens, fits, self.guides)

    def check_inputs(self, inputs: Any) -> Inputs | None:
        """Returns a request's own arrays, or raises the error that submit would raise."""
        hooks = self._options.hooks
        return read_inputs(inputs, None if hooks is None else hooks.inputs)

    def check_taps(self, taps: List[str] | Asked, tokens: Tokens, samples: int) -> Asked | None:
        """Returns the values that a request of so many samples asks for, or raises the error that submit would
        raise."""
        return read_asked(taps, tokens, samples, self._taps, self.sizes.limits)

    def _max_length(self, ids: Collection[int], sampling: SamplingParams) -> int:
        return min(len(ids) + sampling.max_new_tokens, self._config.context)

    @in_turn
    def _take_adapter(self, name: str, value: Any, running: Running | None) -> int:
        """Takes a fitted adapter: a new one, or with `running` another one in its place. Returns the version."""
        self._check_open()
        places = self._loop.adapters
        if running is None:
            places.load(name, value)
            return self.version
        held = places.find(name)
        if running == "finish":  # it may wait, and the caller may donate its arrays meanwhile
            value = jax.device_get(value)
        self._newest += 1
        version = self._newest

        def change() -> None:
            places.change(held, value)
            self._device.version = self._number(version)

        self._loop.update(change, running, name)
        return version

    @in_turn
    def _drop_adapter(self, name: str) -> None:
        self._check_open()
        self._loop.adapters.unload(name)

    @in_turn
    def fork(self, request_id: int, sample: int = 0) -> int:
        """Continues a running sample as one more sample of its request; returns the new sample's index.

        The new sample starts from the tokens so far and draws with its own key. The two share full pages of their
        common tokens. The new sample gets a copy of the partial page after them.
        """
        self._check_open()
        seq, index = self._ledger.find(request_id, sample), self._ledger.request(request_id).started
        twin = go_on(Sequence(request_id, index, seq.prompt, seq.params, seq.seed, seq.max_length), begun(seq))
        twin.origin, twin.common, twin.snapshot, twin.private = seq, seq.length, seq.snapshot, seq.private
        twin.priority, twin.guided, twin.inputs = seq.priority, seq.guided, seq.inputs
        twin.taps = None if seq.taps is None else seq.taps.copy()
        twin.kept = seq.kept and not self._loop.stale(seq)  # what begins anew is kept no longer
        self._loop.add([twin])
        return index

    @in_turn
    def snapshot(self, request_id: int, sample: int = 0) -> Snapshot:
        """Returns the KV cache of a running sample as a value on the host (snapshot.py). It has the sample's tokens so
        far, prompt included.

        Waits for the device. A sample that waits for a slot has no K and V: its snapshot has length 0. So has one that
        an update makes begin anew. If a sample was kept over an update, only `replace(snapshot, weights=None)` can be
        resumed: its K and V are of several weights.
        """
        self._check_open()
        seq = self._ledger.find(request_id, sample)
        self._device.check_ready()
        begins_anew = seq.slot is None or self._loop.stale(seq)
        length = 0 if begins_anew else self._scheduler.sharing.whole(known_tokens(seq))
        pages = seq.pages[: self._scheduler.pool.pages_for(length)]
        value = join(self._device.read_pages(pages), seq.tokens, length)
        weights = SEVERAL if seq.kept and length else self._device.weights_with(seq.adapter)
        inputs = None if seq.inputs is None else seq.inputs.arrays
        return replace(value, weights=weights, guided=seq.guided if seq.params.guide else None, inputs=inputs)

    def resume(
        self,
        snapshot: Snapshot,
        sampling: SamplingParams = SamplingParams(),
        *,
        share: bool = False,
        priority: int = 0,
        deadline: float | None = None,
    ) -> int:
        """Queues a request that continues from a snapshot; returns its id. Takes options as submit() does.

        Its prompt is the snapshot's tokens. Its K and V are used as they are (`kivi`: in whole blocks), even if you
        edited them. Only samples and forks of this request share them. `share=True` promises that these tokens give
        exactly this K and V. Then the prefix cache may keep them for other requests.

        Inputs are those of the snapshot's sample. With its seed, its first sample continues as sample 0 would have, in
        its guide too. A guide begins here if the sample had none, or with `replace(snapshot, guided=None)`. Raises
        SnapshotError for a snapshot of other weights or another cache.
        """
        if not isinstance(snapshot, Snapshot):
            kind = type(snapshot).__name__
            raise SnapshotError(f"resume takes a Snapshot, of Engine.snapshot or load_snapshot, not {kind}")
        ids = tuple(self.check([int(token) for token in snapshot.tokens], sampling))
        if sampling.prompt_logprobs or sampling.counts_tokens:
            what = "prompt_logprobs" if sampling.prompt_logprobs else "penalties of tokens"
            raise RequestError(f"{what} need the prompt computed, and a snapshot takes its place: submit the tokens")
        check_urgency(priority, deadline, self._config)
        known, inputs = jax.device_get(snapshot), self.check_inputs(snapshot.inputs)
        with self._turns.turn():  # compiling a large schema above must not hold up steps
            self._check_open()
            self._device.check_snapshot(snapshot, self._loop.adapters.of(sampling))
            return self._submit(ids, sampling, priority, deadline, inputs, known, private=not share)

    @property
    def version(self) -> int:
        """Returns the version of the weights that steps take: 0 at first, and a higher one after each update."""
        return self._device.version

    def update(
        self,
        params: Params | None = None,
        *,
        running: Running = "recompute",
        copy: bool = False,
        quantize: str | None = None,
        drafter: Drafter | None = None,
        hooks: Hooks | None = None,
    ) -> int:
        """Takes other weights between two steps, from any thread, and compiles no step. Returns their version.

        The engine refers to `params`, and never donates or deletes them. If you donate them, call update() before the
        next step, else step() raises EngineNotReady and waits for that. With `copy` it makes a copy.

        `running` decides about samples that run. "recompute" computes their tokens again with the new weights.
        "keep" continues over their old K and V; such samples share no pages, and preemption ends this. "finish" lets
        all requests end first; later ones wait. A newer update replaces one that waits. If adapters are updated while
        it waits, its version is a later one than was returned.

        `quantize` rounds `params` by the scheme that made the engine's weights, in their memory: these are donated,
        also those of the model that the engine was made with. A quantized copy that drafts is made again. `drafter`
        replaces another drafter by one of the same shapes. `hooks` are the engine's functions with other arrays of the
        same shapes; they count as weights. Without `params` the weights stay. Raises WeightsError, with a leaf's name,
        for weights that the engine's programs cannot take.
        """
        self._check_open()
        return self.take_weights(self.fit_weights(params, copy, quantize, drafter, hooks), running)

    def fit_weights(
        self,
        params: Params | None,
        copy: bool = False,
        quantize: str | None = None,
        drafter: Drafter | None = None,
        hooks: Hooks | None = None,
        replaces: bool = False,
    ) -> Weights:
        """Returns weights for take_weights(). With `replaces` they will take the memory of the engine's, one array
        after the other: nobody else may hold these. Raises WeightsError as update() does."""
        return self._device.fit(params, copy, quantize, drafter, hooks, replaces)

    def lacks_room(self, size: int) -> bool:
        """Returns whether other weights of `size` bytes have no place beside the engine's."""
        return self._device.lacks_room(size)

    @in_turn
    def take_weights(self, weights: Weights, running: Running = "recompute") -> int:
        """Runs the second half of update(), which only a closed engine or a wrong `running` can fail. Weights that are
        gone by then make step() raise EngineNotReady."""
        self._check_open()
        check_running(running)
        self._newest += 1
        version = self._newest
        self._loop.update(lambda: self._rebind(weights, self._number(version)), running)
        return version

    def _number(self, version: int) -> int:
        """Returns the version of an update that takes effect now: a new one if an update that came later was first."""
        if version < self._device.version:
            version = self._newest = self._newest + 1
        return version

    def _rebind(self, weights: Weights, version: int) -> None:
        begin, counts = time.perf_counter(), self._ledger.counts
        self._device.rebind(weights, version)
        counts.update_bytes += weights.copied
        counts.update_seconds += weights.seconds + time.perf_counter() - begin

    @in_turn
    def sleep(self) -> None:
        """Gives the memory of pages and slots back until wake(). Weights and programs stay, prefixes are forgotten.

        What runs is computed again after wake(). Until then requests may come and go, and step() raises
        EngineNotReady.
        """
        self._check_open()
        if not self._device.asleep:
            self._loop.sleep()

    @in_turn
    def wake(self) -> None:
        """Takes the memory of pages and slots again. Raises NoRoomError if there is too little."""
        self._check_open()
        if self._device.asleep:
            self._device.wake()

    @in_turn
    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes; running requests continue."""
        self._scheduler.sharing.clear()

    @in_turn
    def abort(self, request_id: int) -> None:
        """Ends all samples of a request; their events follow with their tokens so far. Raises RequestError for an
        unknown or finished request."""
        self._check_open()
        self._loop.cut(self._ledger.request(request_id), "abort")

    def step(self) -> list[Event]:
        """Dispatches the next step, reads the one before, and returns the events, sometimes none.

        Text of many tokens is made while the next step runs, and comes with it. After an exception the engine is
        closed, and last_events has the ends of all requests.
        """
        with self._turns.turn(to_step=True):
            self._check_open()
            try:
                self._loop.advance()
                events = self._ledger.news(at_once=self._loop.in_flight is None)
                if self._loop.beside:
                    self._loop.beside.stepped(self._loop)
                return events
            except EngineNotReady:
                raise
            except DeviceLost as lost:
                self._close(str(lost), "error")
                raise self._refusal() from lost
            except BaseException as error:  # mostly Ctrl-C: a part of a step may be done, and it is unknown which
                interrupted = isinstance(error, KeyboardInterrupt)
                what = "was interrupted" if interrupted else f"failed ({type(error).__name__}: {first_line(error)})"
                self._close(f"a step {what} half-way", "abort" if interrupted else "error")
                raise

    def run(self):
        """Yields events as they come, and steps until nothing is left."""
        while self.has_work:
            yield from self.step()

    def metrics(self) -> dict[str, Any]:
        """Returns counters, gauges, and percentiles of times in seconds (see metrics.Metrics) as plain data."""
        return self.measured().as_dict()

    @in_turn
    def measured(self) -> Metrics:
        """Returns the metrics as a record, which can be joined with those of other engines."""
        waiting, device, drafting = len(self._loop.gate.waiting), self._device, self._loop.drafting
        drafts, ledger = None if drafting is None else drafting.counts, self._ledger
        parts = self._scheduler, waiting, device.version, device.programs, ledger.counts, ledger.times, drafts
        return deepcopy(Metrics.of(*parts))

    @in_turn
    def reset_metrics(self) -> None:
        """Resets counters and times, for example after a warm-up; running requests continue."""
        self._ledger.reset_metrics()
        if self._loop.drafting is not None:
            self._loop.drafting.counts = DraftCounts()
        self._scheduler.reset_counts()

    @in_turn
    def close(self, reason: str = "it was closed") -> None:
        """Drops the device state and ends all requests (see last_events). Later calls raise EngineClosed, but closing
        again does nothing."""
        self._close(reason, "abort")

    def _close(self, reason: str, ended: str) -> None:
        """Closes the engine. `ended` is the finish reason of unfinished samples."""
        if self._closed is not None:
            return
        self._closed = reason
        try:
            self._last = self._ledger.end_all(ended)
        finally:
            self._loop.close()

    def _check_open(self) -> None:
        if self._closed is not None:
            raise self._refusal()

    def _refusal(self) -> EngineClosed:
        return EngineClosed(f"this engine takes no more work: {self._closed}")


class Adapters:
    """Loads and changes the adapters of an engine between its steps, from any thread. No step is compiled anew."""

    def __init__(self, engine: Engine):
        self._engine = engine

    def __iter__(self) -> Iterator[str]:
        """Returns the names of the loaded ones."""
        return iter(tuple(self._engine._loop.adapters.held))

    def load(self, name: str, given: Given) -> None:
        """Takes a new adapter: a PEFT directory, or a pytree as init_adapter returns it. It goes to the device with its
        first request. Raises WeightsError for one that does not fit, and CheckpointError for a damaged file."""
        self._engine._loop.adapters.check_new(name)
        self._engine._take_adapter(name, self._fit(name, given), None)

    def update(self, name: str, given: Given, *, running: Running = "recompute") -> int:
        """Gives an adapter other values, and returns the version of the tokens that they draw. `running` is as in
        Engine.update, for the requests that use the adapter. With "finish" all requests end first."""
        check_running(running)
        self._engine._loop.adapters.find(name)
        return self._engine._take_adapter(name, self._fit(name, given), running)

    def unload(self, name: str) -> None:
        """Forgets an adapter. Raises WeightsError for one that requests use, or that is not loaded."""
        self._engine._drop_adapter(name)

    def _fit(self, name: str, given: Given) -> Any:
        self._engine._check_open()
        return self._engine._device.fit_adapter(name, read(given, self._engine._config))
