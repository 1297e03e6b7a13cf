"""Runs one of several engines with the same weights in a thread, and keeps requests that may change engines."""

import queue
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from jllm.distributed.routing import Load
from jllm.engine.engine import Engine
from jllm.engine.inputs import Inputs
from jllm.engine.moved import Handover
from jllm.engine.request import Completion, Event, SamplingParams, Timings
from jllm.engine.tapped import Asked
from jllm.errors import EngineClosed, EngineNotReady, RequestError
from jllm.files.snapshot import Snapshot


class Refused(NamedTuple):
    """Reports a call for a request that an engine could not carry out."""

    id: int  # the request's id in Replicas
    error: BaseException


# The events of a step, which Replica.named names; or a call that failed; or the error of a step.
News = tuple[Any, list[Event] | Refused | BaseException]


@dataclass
class Sent:
    """Counts a sample's text and tokens that the caller has. So each token comes only once, even if the sample begins
    again."""

    tokens: int = 0
    letters: int = 0
    first: float | None = None  # when the first token came
    again_tokens: int = 0  # tokens that will come a second time, and are dropped
    again_letters: int = 0
    drawn_again: bool = False  # whether another engine has to draw them as the first one did
    mixed: bool = False  # whether other weights draw them

    def begin_again(self) -> None:
        self.again_tokens, self.again_letters = self.tokens, self.letters

    def rest(self, event: Event) -> Event:
        """Returns the part of an event that is new."""
        if self.again_tokens or self.again_letters:
            event = self._cut(event)
        self.tokens += len(event.token_ids)
        self.letters += len(event.text)
        if self.first is None and event.token_ids:
            self.first = time.perf_counter()
        return event

    def _cut(self, event: Event) -> Event:
        tokens, letters = min(self.again_tokens, len(event.token_ids)), min(self.again_letters, len(event.text))
        self.again_tokens -= tokens
        self.again_letters -= letters
        ids, text, logprobs = event.token_ids[tokens:], event.text[letters:], event.logprobs[tokens:]
        return event._replace(token_ids=ids, text=text, logprobs=logprobs)


@dataclass(eq=False)
class Request:
    """A request that has not ended, with everything that it takes to begin it again."""

    id: int
    prompt: tuple[int, ...]
    sampling: SamplingParams  # with its seed
    snapshot: Snapshot | Handover | None
    share: bool  # whether other requests may use the snapshot's K and V
    submitted: float
    left: set[int]  # samples that have not ended
    priority: int = 0
    deadline: float | None = None  # seconds, from `submitted` on
    inputs: Inputs | None = None
    taps: Asked | None = None
    tokens: int = 0  # most tokens that are still to be computed
    moved: bool = False  # whether it has begun again
    weights: object = 0  # Replica.weights where it began
    forks: int = 0  # samples that fork() has made
    lost_forks: int = 0  # of them, samples that no engine has known since the request began again
    unwanted: bool = False  # whether it was aborted
    awaited: bool = False  # whether a caller waits for its beginning, and gets its error
    sent: defaultdict[int, Sent] = field(default_factory=lambda: defaultdict(Sent))  # by sample

    def urgency(self) -> dict[str, Any]:
        """Returns the priority and the rest of the deadline, for an engine that begins it now."""
        deadline = self.deadline
        if deadline is not None:
            deadline = max(0.0, self.submitted + deadline - time.perf_counter())
        return {"priority": self.priority, "deadline": deadline}

    def own(self) -> dict[str, Any]:
        """Returns the arrays that it brings and the values that it asks for, if there are any."""
        given = {"inputs": self.inputs, "taps": self.taps}
        return {name: value for name, value in given.items() if value is not None}

    def hand_over(self) -> None:
        """Lets another engine have it with all its samples. Text and tokens that were sent are not sent again."""
        self.moved, self.awaited = True, False
        for sent in self.sent.values():
            sent.begin_again()

    def begin_again(self) -> None:
        """Makes it begin again in another engine, without forks. What was sent is not sent again."""
        self.hand_over()
        self.lost_forks = self.forks
        for sent in self.sent.values():
            sent.drawn_again = True

    def meet_update(self) -> None:
        """Lets samples end with "error" whose sent tokens other weights are going to draw again."""
        for sent in self.sent.values():
            sent.mixed = sent.mixed or (sent.drawn_again and sent.again_tokens > 0)

    def add_fork(self, local: int) -> int:
        """Adds a sample that has this index in its engine, and returns its index."""
        self.forks += 1
        sample = self.sample_of(local)
        self.left.add(sample)
        return sample

    def sample_of(self, local: int) -> int:
        """Returns the index of a sample by that in its engine, which counts anew where the request begins again."""
        return local if local < self.sampling.n else local + self.lost_forks

    def local_of(self, sample: int) -> int:
        """Returns a sample's index in its engine."""
        return sample if sample < self.sampling.n else sample - self.lost_forks

    def take(self, event: Event) -> Event:
        """Returns an event as the caller gets it."""
        event = self.sent[event.sample].rest(event)
        if event.completion is None:
            return event
        self.left.discard(event.sample)
        if not self.moved:
            return event
        sent, total = self.sent[event.sample], time.perf_counter() - self.submitted
        first = None if sent.first is None else sent.first - self.submitted
        timings = replace(event.completion.timings, first_token=first, total=total)
        reason = "error" if sent.mixed else event.completion.finish_reason
        return event._replace(completion=replace(event.completion, timings=timings, finish_reason=reason))

    def end(self, sample: int, reason: str, with_text: bool) -> Event:
        """Returns the end of a sample that no engine has."""
        first, total = self.sent[sample].first, time.perf_counter() - self.submitted
        timings = Timings(None if first is None else first - self.submitted, total, len(self.prompt), 0)
        text, seed = "" if with_text else None, self.sampling.seed or 0
        return Event(self.id, sample, completion=Completion((), text, reason, None, None, timings, seed))

    def ends_of_lost(self, with_text: bool, weights: set[object]) -> list[Event]:
        """Returns the ends of samples that cannot begin again when the request does.

        The first tokens of a fork came from another sample. Other weights would not draw the tokens again that the
        caller has. `weights` are those of its engine and of all that may begin it.
        """
        stale = weights != {self.weights}
        lost = [s for s in sorted(self.left) if s >= self.sampling.n or (stale and self.sent[s].tokens)]
        return [self.end(sample, "error", with_text) for sample in lost]


class Replica:
    """Calls one engine in one thread, between two steps. The results go to `news`."""

    def __init__(self, name: str, engine: Engine, news: "queue.SimpleQueue[News]"):
        self.name, self.engine, self.failed = name, engine, False  # `name` is the name of its place
        limits = engine.sizes.limits
        self.load = Load(limits.page_size, limits.num_pages)  # other threads may read it at any time
        self.ids: dict[int, int] = {}  # ids in the engine, by ids in Replicas
        self.names: dict[int, int] = {}  # ids in Replicas, by ids in the engine
        self._news, self._stepping, self._closing = news, False, False
        self.stands = False  # whether its engine has work, and sleeps or lacks its weights
        self.weights: object = 0  # equal where engines have the same weights; unlike all others while it takes some
        self._closed: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"replica {name}")

    def submit(self, request: Request) -> Future[None]:
        """Begins a request. Its error in the thread is news too."""
        done = self.ask(partial(self._submit, request), request)
        if request.unwanted:  # it was aborted in an engine that did not get to it
            self.abort(request)
        return done

    def abort(self, request: Request) -> None:
        def abort() -> None:
            with suppress(RequestError):  # it has ended, and its last event is on its way
                self.engine.abort(self.ids.get(request.id, -1))

        self.ask(abort, request)

    def fork(self, request: Request, sample: int) -> int:
        """Returns Engine.fork. The new sample joins the request before it can have an event, whichever thread takes
        that."""

        return self.ask(lambda: request.add_fork(self.of_sample("fork", request.id, request.local_of(sample)))).result()

    def snapshot(self, request: Request, sample: int) -> Snapshot:
        """Returns Engine.snapshot."""
        return self.ask(lambda: self.of_sample("snapshot", request.id, request.local_of(sample))).result()

    def of_sample(self, method: str, name: int, sample: int) -> Any:
        """Returns a result of the engine for a sample. An error names the request as Replicas does."""
        local = self.ids.get(name, -1)
        try:
            return getattr(self.engine, method)(local, sample)
        except RequestError as error:
            raise RequestError(str(error).replace(f"request {local} ", f"request {name} ")) from None

    def go_on(self) -> None:
        """Begins to step again after the engine was not ready."""
        self.stands = False
        with suppress(EngineClosed):
            self.ask(self._begin_to_step)

    def forget(self, request: Request) -> None:
        """Forgets a request that has ended."""
        with suppress(EngineClosed):
            self.ask(lambda: self.names.pop(self.ids.pop(request.id, -1), None))

    def named(self, events: Iterable[Event]) -> list[Event]:
        """Returns events of the engine under the ids of Replicas. Drops events of forgotten requests."""
        found = ((self.names.get(event.id), event) for event in events)  # in one look-up: the engine's thread forgets
        return [event._replace(id=name) for name, event in found if name is not None]

    def begin_to_close(self, reason: str) -> None:
        """Lets the engine close, once all earlier calls are done."""
        if self._closed is None:
            self._closing, self._closed = True, self._thread.submit(self.engine.close, reason)

    def close(self, reason: str) -> None:
        """Closes the engine, and waits for that. Raises the error of closing it."""
        self.begin_to_close(reason)
        assert self._closed is not None
        self._thread.shutdown()
        self._closed.result()

    def ask[T](self, work: Callable[[], T], request: Request | None = None) -> Future[T]:
        """Runs `work` in the thread. Its error goes to the Future, and to the news if it was for a request."""
        try:
            done = self._thread.submit(work)
        except RuntimeError as error:  # close() is under way
            raise EngineClosed(f"{self.name} takes no more work: {error}") from error
        if request is not None:
            done.add_done_callback(partial(self._tell, request.id))
        return done

    def _tell(self, name: int, done: Future[Any]) -> None:
        if error := done.exception():
            self._news.put((self, Refused(name, error)))

    def _submit(self, request: Request) -> None:
        if request.snapshot is None:
            local = self.engine.submit(request.prompt, request.sampling, **request.urgency(), **request.own())
        elif isinstance(request.snapshot, Handover):
            local = self.engine.take_in(request.snapshot, **request.urgency())
        else:
            snapshot, share = request.snapshot, request.share
            local = self.engine.resume(snapshot, request.sampling, share=share, **request.urgency())
        self.ids[request.id], self.names[local] = local, request.id
        self._begin_to_step()

    def _begin_to_step(self) -> None:
        if not self._stepping and self.engine.has_work:
            self._stepping = True
            self._thread.submit(self._step)

    def _step(self) -> None:
        """Runs one step, then queues the next one behind the calls that came meanwhile."""
        if self._closing:
            return
        try:
            if events := self.engine.step():
                self._news.put((self, events))
            self._stepping = self.engine.has_work
            if self._stepping:
                with suppress(RuntimeError):  # close() is under way, and the thread takes no more work
                    self._thread.submit(self._step)
        except EngineNotReady as error:
            self._stepping, self.stands = False, True
            self._news.put((self, error))
        except BaseException as error:
            with suppress(Exception):  # the engine has closed itself if its step failed
                self.engine.close("the work after its step failed")
            self._news.put((self, error))
