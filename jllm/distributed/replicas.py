"""Runs several engines with the same weights, one a GPU or a mesh of GPUs, behind the interface of one."""

import itertools
import queue
import secrets
import shutil
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from jllm.distributed.processes import (
    EngineProcess,
    Source,
    drop_weights,
    end_processes,
    fit_processes,
    start_processes,
)
from jllm.distributed.replica import News, Refused, Replica, Request
from jllm.distributed.routing import route
from jllm.engine.checks import Prompt, check_urgency
from jllm.engine.drafters import with_drafter
from jllm.engine.engine import Engine, Running, check_running
from jllm.engine.inputs import Inputs
from jllm.engine.metrics import Metrics
from jllm.engine.options import EngineKeywords
from jllm.engine.placement import Placement, copy_to, find_placements, name_of
from jllm.engine.request import Event, SamplingParams
from jllm.engine.tapped import Asked, Tokens
from jllm.errors import ConfigError, EngineClosed, EngineNotReady, RequestError, WeightsError
from jllm.files.snapshot import Snapshot
from jllm.guides.matcher import Guides
from jllm.model.hooks import Hooks
from jllm.model.model import Model
from jllm.model.params import Params
from jllm.programs.sizes import EngineSizes
from jllm.speculative.drafter import Drafter

type AnyReplica = Replica | EngineProcess


class Replicas:
    """Serves requests by one engine a GPU, or a mesh of GPUs, each with all the weights. It is used as an Engine is.

    Each request goes to the engine with the least remaining work. Prompt tokens that the prefix cache there should have
    don't count. Each engine steps in its own process while it has work; step() waits until one has news.

    When a step fails for good or a process ends, its requests begin again on the others with the same seeds. Text
    already returned is not repeated. Except for near ties, the tokens are the same. Samples that fork() made then end
    with "error". So do samples whose tokens came from weights before an update, and a request that an engine could not
    begin or abort. step() raises only when the last engine has failed.

    Threads: as with an Engine.
    """

    _drop_folder: Callable[[], object]  # of the steps that these engines share

    def __init__(
        self,
        model: Source,
        devices: int | Sequence[Placement] | None = None,
        *,
        mesh: int | None = None,
        make: Callable[..., Engine] = Engine,
        threads: bool = False,
        **options: Unpack[EngineKeywords],
    ):
        """Makes `devices` engines with the same options; None means as many as fit. Each has a GPU, or `mesh` of them.

        `model` is a directory, a Hub id, "package.module:NAME", or a function that makes a Model. Each process calls
        it, and this process opens no GPU. It may also be a Model on the host, whose arrays all processes share. Options
        and `make`, which makes each engine, are pickled. `make` takes the model and options, also some that were not
        given: executables, compile_processes and progress. Without GPUs the processes share the CPU. One engine
        compiles each step, and the others load it from a file.

        With threads=True the engines are threads of this process, as tests need it. `model` is then a Model. `devices`
        may have one device for each engine, or one mesh if the model is on a mesh.

        Raises ConfigError for too few devices, for values that cannot be pickled, and for a trace, which belongs to one
        engine. Raises RemoteError if a process cannot start, and WeightsError if their weights differ.
        """
        if options.get("trace") is not None:
            raise ConfigError("a trace records one engine: leave it out with replicas")
        self._begin_empty()
        try:
            if threads:
                self._start_threads(model, devices, mesh, make, options)
            else:
                folder = Path(tempfile.mkdtemp(prefix="jllm-steps-"))
                self._drop_folder = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
                weakref.finalize(self, end_processes, self._all)
                head = start_processes(model, devices, mesh, make, options, self._news, self._all, folder)
                self._has_text = head.tokenizer is not None
        except BaseException:
            self.close()
            raise

    def _start_threads(
        self, model: Source, devices: Any, mesh: int | None, make: Callable[..., Engine], options: EngineKeywords
    ) -> None:
        if not isinstance(model, Model) or mesh is not None:
            raise ConfigError("engines in threads take a Model, on a mesh if each is to have one")
        self._has_text = model.tokenizer is not None
        placements = find_placements(devices, model.config)
        given = with_drafter(options, model)
        for where in placements:
            self._all.append(Replica(name_of(where), make(copy_to(where, model), **given), self._news))

    def _begin_empty(self, has_text: bool = False) -> None:
        """Sets the fields of an instance without engines."""
        self._news: queue.SimpleQueue[News] = queue.SimpleQueue()
        self._lock, self._updating = threading.RLock(), threading.Lock()
        self._updates = 0  # of the weights
        self._requests: dict[int, tuple[Request, AnyReplica]] = {}
        self._next_id = itertools.count()
        self._closed: str | None = None
        self._last: tuple[Event, ...] = ()
        self._drop_folder = lambda: None
        self._all: list[AnyReplica] = []
        self._has_text = has_text

    @property
    def has_work(self) -> bool:
        """Returns whether step() still has something to report. The failure of all engines is that too."""
        return bool(self._requests) or (self._closed is None and self._all_failed())

    def _all_failed(self) -> bool:
        return bool(self._all) and all(replica.engine.closed for replica in self._all)

    @property
    def sizes(self) -> EngineSizes:
        """Returns the sizes of one engine. All have the same options, and on equal devices the same sizes."""
        return self._all[0].engine.sizes

    @property
    def slots(self) -> int:
        """Returns how many samples can run at once, on all devices together."""
        return sum(replica.engine.slots for replica in self._all)

    @property
    def most_tokens(self) -> int:
        """Returns the least Engine.most_tokens of all engines: a sample may run on any."""
        return min(replica.engine.most_tokens for replica in self._all)

    @property
    def vocab_size(self) -> int:
        return self._all[0].engine.vocab_size

    @property
    def last_events(self) -> tuple[Event, ...]:
        """Returns the events that step() had not returned at the close, as Engine.last_events does."""
        return self._last

    def compile_ahead(self, samplings: Iterable[SamplingParams] = (), *, wait: bool = True) -> int:
        """Compiles steps as Engine.compile_ahead does, on all devices at once."""
        samplings, alive = list(samplings), self._alive()

        def compile_one(replica: AnyReplica) -> int:
            return replica.engine.compile_ahead(samplings, wait=wait)

        with ThreadPoolExecutor(len(alive)) as threads:
            return max(threads.map(compile_one, alive))

    def check(self, prompt: Prompt, sampling: SamplingParams = SamplingParams()) -> list[int]:
        """Returns the prompt's token ids, or raises the error that submit would raise. The request has to fit the
        engine with the fewest pages, since it may run on any."""
        while True:
            least = min(self._alive(), key=lambda replica: replica.engine.sizes.limits.num_pages)
            with suppress(EngineClosed):  # it is failing right now, and another engine can check as well
                return least.engine.check(prompt, sampling)

    def check_inputs(self, inputs: Any) -> Inputs | None:
        """Returns a request's own arrays, or raises the error that submit would raise."""
        return self._alive()[-1].engine.check_inputs(inputs)

    def check_taps(self, taps: Sequence[str] | Asked, tokens: Tokens, samples: int) -> Asked | None:
        """Returns the values that a request asks for, or raises the error that submit would raise."""
        return self._alive()[-1].engine.check_taps(taps, tokens, samples)

    @property
    def guides(self) -> Guides:
        """Returns Engine.guides. Each process has its own; these check requests here."""
        return self._alive()[-1].engine.guides

    def submit(
        self,
        prompt: Prompt,
        sampling: SamplingParams = SamplingParams(),
        *,
        priority: int = 0,
        deadline: float | None = None,
        inputs: Any = None,
        taps: Sequence[str] = (),
        tokens: Tokens = "last",
    ) -> int:
        """Queues a prompt as Engine.submit does. Priorities order the requests of one engine."""
        ids, own = self.check(prompt, sampling), self.check_inputs(inputs)
        asked = self.check_taps(taps, tokens, sampling.n)
        check_urgency(priority, deadline)
        return self._begin(ids, sampling, priority, deadline, inputs=own, taps=asked)[0]

    def resume(
        self,
        snapshot: Snapshot,
        sampling: SamplingParams = SamplingParams(),
        *,
        share: bool = False,
        priority: int = 0,
        deadline: float | None = None,
    ) -> int:
        """Continues from a snapshot as Engine.resume does."""
        check_urgency(priority, deadline)
        ids = [int(token) for token in snapshot.tokens]
        name, done = self._begin(ids, sampling, priority, deadline, snapshot, share, awaited=True)
        try:
            with suppress(EngineClosed):  # its engine has just failed, and step() begins it again on another
                done.result()
        except BaseException:
            with self._lock:
                if name in self._requests:
                    self._drop(*self._requests.pop(name))
            raise
        with self._lock:
            if name in self._requests:
                self._requests[name][0].awaited = False
        return name

    def fork(self, request_id: int, sample: int = 0) -> int:
        """Forks a sample as Engine.fork does."""
        return self._call("fork", request_id, sample)

    def snapshot(self, request_id: int, sample: int = 0) -> Snapshot:
        """Returns Engine.snapshot; any of the engines can resume it."""
        return self._call("snapshot", request_id, sample)

    def _call(self, method: str, request_id: int, sample: int) -> Any:
        request, replica = self._find(request_id)
        if sample not in request.left:
            raise RequestError(f"request {request_id} has no running sample {sample}")
        try:
            return getattr(replica, method)(request, sample)
        except EngineClosed:
            self._alive()
            why = "its device failed, and the next step() begins it again on another"
            raise RequestError(f"request {request_id} is not running now: {why}") from None

    def abort(self, request_id: int) -> None:
        """Ends all samples of a request; their events follow with their tokens so far. Raises RequestError for an
        unknown or finished request."""
        with self._lock:
            request, replica = self._find(request_id)
            request.unwanted = True
            replica.abort(request)

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes; running requests continue."""
        for replica in self._alive():
            with self._lock:  # routing holds it too
                replica.load.forget_prefixes()
            replica.engine.reset_prefix_cache()

    def step(self) -> list[Event]:
        """Waits until an engine has news, or for wake(), and returns the events of all. After an exception all engines
        are closed, and last_events has the ends of all requests. (After EngineNotReady none is.)"""
        self._check_open()
        events: list[Event] = []
        try:
            woken = False
            while True:
                stands: list[News] = []
                first = [self._news.get()] if self.has_work else []
                for replica, news in itertools.chain(first, self._waiting()):
                    woken = woken or news == []
                    if isinstance(news, EngineNotReady):
                        stands += [(replica, news)] * replica.stands
                    else:
                        events += self._hear(replica, news)
                for replica, news in stands:
                    if events:
                        self._news.put((replica, news))  # for the next call
                    elif isinstance(news, EngineNotReady) and self.has_work:
                        raise news
                if events or woken or not self.has_work:
                    return events
        except EngineNotReady:
            raise
        except BaseException as error:
            interrupted = isinstance(error, KeyboardInterrupt)
            what = "was interrupted" if interrupted else f"failed ({_line(error)})"
            for more in self._close(f"a step {what} half-way", "abort" if interrupted else "error"):
                error.add_note(f"and closing failed ({_line(more)})")
            self._last = (*events, *self._last)
            raise

    def interrupt(self) -> None:
        """Ends a step() that waits in any thread. Otherwise the next step() returns, even without events."""
        self._news.put((self._all[0], []))

    @property
    def version(self) -> int:
        """Returns the version of the weights that all engines have, or a newer one."""
        return min(replica.engine.version for replica in self._alive())

    def update(
        self,
        params: Params | Source | None = None,
        *,
        running: Running = "recompute",
        copy: bool = False,
        quantize: str | None = None,
        drafter: Drafter | None = None,
        hooks: Hooks | None = None,
    ) -> int:
        """Takes other weights as Engine.update does, on all devices, or after a WeightsError on none. Each engine takes
        them between two of its own steps.

        Engines in processes copy the weights, whatever `copy` says: they pass through one file on the host. Instead of
        Params they take what Replicas() takes as a model, and each process loads it. On a mesh, Params may be whole. If
        a device fails later, samples whose tokens you have from older weights end with "error". Raises EngineClosed if
        no engine took the weights.
        """
        check_running(running)
        with self._updating:
            alive = self._alive()
            take = self._fit(alive, params, copy, quantize, drafter, hooks)
            self._updates += 1
            versions = []
            try:
                for replica, own in zip(alive, take):
                    self._set_weights(replica, object())  # requests may begin before it takes them, or after
                    if running != "finish":
                        self._meet_update(replica)
                    with suppress(EngineClosed):  # it has just failed, and its requests begin again on others
                        versions.append(own(running))
                        self._set_weights(replica, self._updates)
                    replica.go_on()
            except BaseException:
                drop_weights(alive)
                raise
            if not versions:
                self._check_open()
                raise EngineClosed("no engine took the weights: all have failed, and step() raises the reason")
            return versions[-1]

    def _meet_update(self, replica: AnyReplica) -> None:
        with self._lock:
            for request, where in self._requests.values():
                if where is replica:
                    request.meet_update()

    def _set_weights(self, replica: AnyReplica, weights: object) -> None:
        with self._lock:
            replica.weights = weights
            replica.load.forget_prefixes()

    def _fit(
        self,
        alive: list[AnyReplica],
        params: Params | Source | None,
        copy: bool,
        quantize: str | None,
        drafter: Drafter | None,
        hooks: Hooks | None,
    ) -> list[Callable[[Running], int]]:
        """Returns for each engine a function that lets it take the weights, which fit all."""
        if processes := [replica for replica in alive if isinstance(replica, EngineProcess)]:
            return fit_processes(processes, params, quantize, drafter, hooks)
        if not isinstance(params, Params | None):
            raise WeightsError(f"engines in threads take Params, not {type(params).__name__}")
        engines = [replica.engine for replica in alive if isinstance(replica, Replica)]
        fitted = [engine.fit_weights(params, copy, quantize, drafter, hooks) for engine in engines]
        return [partial(engine.take_weights, weights) for engine, weights in zip(engines, fitted)]

    def sleep(self) -> None:
        """Gives the memory of pages and slots back on all devices, as Engine.sleep does."""
        for replica in self._alive():
            replica.engine.sleep()

    def wake(self) -> None:
        """Takes the memory again on all devices, as Engine.wake does."""
        for replica in self._alive():
            replica.engine.wake()
            replica.go_on()

    def run(self) -> Iterator[Event]:
        """Yields events as they come, and steps until nothing is left."""
        while self.has_work:
            yield from self.step()

    def metrics(self) -> dict[str, Any]:
        """Returns Engine.metrics of all engines together; means over steps are of one engine. Adds `replicas`, their
        number, and `replicas_failed`."""
        found = Metrics.joined([replica.engine.measured() for replica in self._all]).as_dict()
        failed = sum(each.failed or (each.engine.closed and self._closed is None) for each in self._all)
        return found | {"replicas": len(self._all), "replicas_failed": failed}

    def reset_metrics(self) -> None:
        """Resets the metrics of all engines, as Engine.reset_metrics does."""
        for replica in self._alive():
            replica.engine.reset_metrics()

    def close(self, reason: str = "it was closed") -> None:
        """Closes all engines, and ends all requests (see last_events). Closing again does nothing. Raises the first
        error of closing, once everything is closed."""
        for error in self._close(reason, "abort"):
            raise error

    def _close(self, reason: str, ended: str) -> list[Exception]:
        """Closes everything, and returns the errors. `ended` is the finish reason of unfinished samples."""
        with self._lock:
            if self._closed is not None:
                return []
            self._closed = reason
        failed: list[Exception] = []
        try:
            for replica in self._all:
                with _noted(failed):
                    replica.begin_to_close(reason)
            for replica in self._all:
                with _noted(failed):
                    replica.close(reason)
        except BaseException:  # a second Ctrl+C
            end_processes(self._all)
            raise
        finally:
            self._drop_folder()
            self._end_requests(ended, failed)
        return failed

    def _end_requests(self, ended: str, failed: list[Exception]) -> None:
        """Ends all requests of closed engines."""
        events: list[Event] = []
        for replica, news in self._waiting():
            with _noted(failed):
                events += self._take(replica, self._named(replica, news)) if isinstance(news, list) else []
        for replica in self._all:
            with _noted(failed):
                events += self._take(replica, self._named(replica, replica.engine.last_events))
        for request, _ in self._requests.values():
            events += [request.end(sample, ended, self._has_text) for sample in sorted(request.left)]
        self._requests.clear()
        self._last = tuple(events)
        if self._all:
            self.interrupt()

    def _check_open(self) -> None:
        if self._closed is not None:
            raise EngineClosed(f"these engines take no more work: {self._closed}")

    def _alive(self) -> list[AnyReplica]:
        """Returns the engines that take work. Raises EngineClosed if there are none."""
        self._check_open()
        alive = [replica for replica in self._all if not replica.engine.closed]
        if not alive:
            raise EngineClosed("these engines take no more work: all have failed, and step() raises the reason")
        return alive

    def _find(self, request_id: int) -> tuple[Request, AnyReplica]:
        self._check_open()
        try:
            return self._requests[request_id]
        except KeyError:
            raise RequestError(f"request {request_id} is not running: it has ended or was never submitted") from None

    def _waiting(self) -> Iterator[News]:
        with suppress(queue.Empty):  # close() may read them in another thread
            while True:
                yield self._news.get_nowait()

    # Where requests run

    def _begin(
        self,
        ids: Sequence[int],
        sampling: SamplingParams,
        priority: int,
        deadline: float | None,
        snapshot: Snapshot | None = None,
        share: bool = False,
        awaited: bool = False,
        inputs: Inputs | None = None,
        taps: Asked | None = None,
    ) -> tuple[int, Future]:
        if sampling.seed is None:  # it is drawn here, so that every engine uses the same one
            sampling = replace(sampling, seed=secrets.randbits(32))
        with self._lock:
            self._check_open()
            name, left, now = next(self._next_id), set(range(sampling.n)), time.perf_counter()
            prompt, deadline = tuple(map(int, ids)), None if deadline is None else float(deadline)
            request = Request(name, prompt, sampling, snapshot, share, now, left, int(priority), deadline)
            request.awaited, request.inputs, request.taps = awaited, inputs, taps
            return name, self._place(request)

    def _place(self, request: Request) -> Future:
        """Gives a request to the engine with the fewest tokens to compute."""
        alive = self._alive()
        prompt = request.prompt if request.snapshot is None else ()
        output = request.sampling.n * request.sampling.max_new_tokens
        inputs, adapter = request.inputs, request.sampling.adapter
        key = None if inputs is None and adapter is None else (inputs and inputs.key, adapter)
        index, request.tokens = route([replica.load for replica in alive], prompt, output, key)
        best = alive[index]
        request.weights = best.weights
        self._requests[request.id] = request, best
        try:
            return best.submit(request)
        except BaseException:
            del self._requests[request.id]
            best.load.tokens -= request.tokens
            raise

    def _hear(self, replica: AnyReplica, news: list[Event] | Refused | BaseException) -> list[Event]:
        """Takes in the news of an engine, and returns the events that step() returns of it."""
        if isinstance(news, Refused):
            return self._refuse(replica, news)
        if isinstance(news, BaseException):
            return self._move(replica, news)
        return self._take(replica, self._named(replica, news))

    def _named(self, replica: AnyReplica, events: Iterable[Event]) -> Iterator[Event]:
        """Yields the events of an engine with the ids and indices of Replicas."""
        for event in replica.named(events):
            request, _ = self._requests.get(event.id, (None, None))
            if request is not None and request.lost_forks and isinstance(event, Event):
                event = event._replace(sample=request.sample_of(event.sample))
            yield event

    def _refuse(self, replica: AnyReplica, refused: Refused) -> list[Event]:
        """Ends a request after a failed call, and returns the ends of its samples."""
        with self._lock:
            request, where = self._requests.get(refused.id, (None, None))
            if request is None or where is not replica:
                return []  # it has ended, or runs elsewhere
            if replica.engine.closed:  # all its requests move
                return self._move(replica, refused.error)
            if request.awaited:
                return []  # the waiting caller ends it
            self._drop(*self._requests.pop(request.id))
            warnings.warn(
                f"request {request.id} ends: {replica.name} failed at it ({_line(refused.error)})",
                RuntimeWarning,
                stacklevel=4,
            )
            return [request.end(sample, "error", self._has_text) for sample in sorted(request.left)]

    def _take(self, replica: AnyReplica, events: Iterable[Event]) -> list[Event]:
        """Returns events of an engine as step() returns them."""
        found = []
        with self._lock:
            for event in events:
                request, where = self._requests.get(event.id, (None, None))
                if request is None or where is not replica or event.sample not in request.left:
                    continue  # it runs elsewhere, or had ended before it began again
                event = request.take(event)
                done = min(len(event.token_ids), request.tokens)
                request.tokens -= done
                replica.load.tokens -= done
                if not request.left:
                    del self._requests[request.id]
                    self._drop(request, replica)
                if event.token_ids or event.text or event.completion is not None:
                    found.append(event)
        return found

    def _drop(self, request: Request, replica: AnyReplica) -> None:
        replica.load.tokens -= request.tokens
        if self._closed is None:
            replica.forget(request)

    def _move(self, replica: AnyReplica, error: BaseException) -> list[Event]:
        """Begins the requests of a failed engine again on the others. Returns the ends of samples that cannot begin
        again. Raises the error if there are no others."""
        with self._lock:
            known, replica.failed = replica.failed, True
            mine = [request for request, where in self._requests.values() if where is replica]
            if self._all_failed():
                raise error
            if known and not mine:
                return []
            last = {(event.id, event.sample): event for event in self._named(replica, replica.engine.last_events)}
            weights = {replica.weights, *(one.weights for one in self._alive())}
            lost = [end for r in mine for end in r.ends_of_lost(self._has_text, weights)]
            ends = self._take(replica, [last.get((end.id, end.sample), end) for end in lost])
            mine = [request for request in mine if request.left]
            what = f"each of its {len(mine)} requests begins again elsewhere"
            warnings.warn(f"{replica.name} failed ({_line(error)}): {what}", RuntimeWarning, stacklevel=3)
            for request in mine:
                request.begin_again()
                self._place(request)
            return ends


@contextmanager
def _noted(failed: list[Exception]) -> Iterator[None]:
    """Adds an exception of its block to `failed`, and continues behind the block."""
    try:
        yield
    except Exception as error:
        failed.append(error)


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
