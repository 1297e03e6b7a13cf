"""Runs an engine for asyncio. One thread steps it, and each request is an asynchronous iterator of its events."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

from jllm.distributed.replicas import Replicas
from jllm.engine.checks import Prompt, check_urgency
from jllm.engine.engine import Engine
from jllm.engine.inputs import Inputs
from jllm.engine.request import Event, SamplingParams
from jllm.engine.tapped import Asked, Tokens
from jllm.errors import EngineClosed, EngineNotReady, QueueFull, RequestError
from jllm.guides.guide import Guide
from jllm.guides.guide_trials import MOST

Request = tuple[Prompt, SamplingParams]
PATIENCE = 1.0  # seconds until an idle thread looks whether the processes of all engines have gone
REST = 0.05  # seconds between looks at an engine that sleeps or lacks its weights


class Stream:
    """Yields the events of one or several requests that were submitted together. An event's id is the place of its
    request in that list. The end of each sample is an event too, with its completion.

    Close a stream that you stop reading early; `async with` does so. A task that is cancelled while it waits for an
    event closes the stream too. The pages are free again within two steps.
    """

    def __init__(self, engine: "AsyncEngine", samples: int, ends_only: bool):
        self.samples, self.ends_only = samples, ends_only
        self._engine, self._left = engine, samples
        self._events: deque[Event] = deque()
        self._error: Exception | None = None
        self._news = asyncio.Event()

    @property
    def ended(self) -> bool:
        """Returns whether no further events will arrive, beside those that were not read yet."""
        return self._left == 0 or self._error is not None

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> Event:
        await self._wait()
        if not self._events:
            raise StopAsyncIteration
        return self._events.popleft()

    async def take(self) -> list[Event]:
        """Waits for an event, and returns all events there are. Returns an empty list once all samples have ended."""
        await self._wait()
        events = list(self._events)
        self._events.clear()
        return events

    async def _wait(self) -> None:
        try:
            while not self._events and not self.ended:
                self._news.clear()
                await self._news.wait()
        except asyncio.CancelledError:
            self.close()
            raise
        if not self._events and self._error is not None:
            raise self._error

    async def __aenter__(self) -> "Stream":
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.close()

    def abort(self) -> None:
        """Ends the request. Its last events follow, with what was generated."""
        self._engine._end(self)

    def close(self) -> None:
        """Ends the request if it runs, and drops its events."""
        self.abort()
        self._events.clear()
        self._fail(EngineClosed("this stream was closed"))

    def _put(self, event: Event) -> None:
        self._left -= event.completion is not None
        if self._error is None:
            self._events.append(event)
            self._news.set()

    def _fail(self, error: Exception) -> None:
        if not self.ended:
            self._error = error
            self._news.set()


class AsyncEngine:
    """Serves the requests of one event loop through an Engine or Replicas. It owns the engine, and closes it.

    A thread steps while there is work. Between two steps it takes in new requests and aborts. It hands the events of a
    step over in one call. So the event loop never waits for a step, and a step never waits for the loop. While the
    engine sleeps or lacks its weights, all streams wait for its wake() or update().

    Threads: make an AsyncEngine in its event loop, and call it and its streams from that thread. check(), metrics() and
    update() may be called from any thread; they wait for the end of a step.
    """

    def __init__(self, engine: Engine | Replicas, *, max_waiting: int = 256):
        """Starts the thread. max_waiting: most samples in the queue; submitting more raises QueueFull."""
        self.limit = engine.slots + max_waiting
        self.check, self.metrics, self.update = engine.check, engine.metrics, engine.update
        self.check_inputs = engine.check_inputs
        self.most_tokens = engine.most_tokens  # of one sample, its prompt included
        self.vocab_size = engine.vocab_size
        self._engine, self._loop = engine, asyncio.get_running_loop()
        self._guides, self._guides_waiting = ThreadPoolExecutor(MOST, "guides"), 0
        self._open: set[Stream] = set()  # streams whose requests have not ended
        self._refused: str | None = None  # reason why submit() takes nothing more
        self._changed = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()  # actions for the thread, before its next step
        self._stop = False
        self._ids: dict[Stream, set[int]] = {}  # unfinished requests; used by the thread alone, as is the next
        self._requests: dict[int, list] = {}  # by request: its stream, its place there, and its unfinished samples
        self._finished = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def unfinished(self) -> int:
        """Returns the number of samples of unfinished requests."""
        return sum(stream.samples for stream in self._open)

    @property
    def refused(self) -> str | None:
        """Returns why nothing more can be submitted, or None."""
        return self._refused

    async def submit(
        self,
        prompt: Prompt,
        sampling: SamplingParams = SamplingParams(),
        *,
        priority: int = 0,
        deadline: float | None = None,
        inputs: Any = None,
        taps: Sequence[str] = (),
        tokens: Tokens = "last",
        ends_only: bool = False,
    ) -> Stream:
        """Queues a prompt as Engine.submit does, and checks it in a separate thread. With ends_only, the stream has
        only the end of each sample; this spares the event loop a wake-up per token.

        Raises RequestError for a bad prompt, QueueFull if the queue is full, and EngineClosed after close().
        """
        plain = replace(sampling, guide=None) if isinstance(sampling, SamplingParams) else sampling

        def check() -> tuple[list[int], Inputs | None, Asked | None]:
            values = self._engine.check_taps(taps, tokens, plain.n) if taps or tokens != "last" else None
            return self.check(prompt, plain), self.check_inputs(inputs), values

        ids, own, values = await asyncio.to_thread(check)
        await self.check_guide(sampling.guide)
        asked: dict[str, Any] = {"priority": priority, "deadline": deadline, "ends_only": ends_only}
        return self.submit_all([(ids, sampling)], **asked, inputs=own, taps=values)

    async def check_guide(self, guide: Guide | None) -> None:
        """Compiles a guide, if there is one, in threads that nothing else waits for. Raises RequestError for a bad
        guide, QueueFull if too many wait, and EngineClosed after close()."""
        if guide is None:
            return
        if self._refused is not None:
            raise EngineClosed(f"this engine takes no more work: {self._refused}")
        if self._guides_waiting >= self.limit:
            raise QueueFull(f"{self._guides_waiting} guides wait to be compiled: try again later")
        guides = self._engine.guides
        if guides.has(guide):
            guides.matcher(guide)
            return
        job, self._guides_waiting = self._guides.submit(guides.matcher, guide), self._guides_waiting + 1
        try:
            await asyncio.wrap_future(job)
        except asyncio.CancelledError:
            if self._stop:  # close() has dropped what had not begun
                raise EngineClosed(f"this engine takes no more work: {self._refused}") from None
            raise
        finally:
            self._guides_waiting -= 1

    def prepare_guides(self) -> None:
        """Begins to build what the first guide needs. If guides are not possible, each request with a guide reports
        why."""
        self._guides.submit(self._engine.guides.prepare)

    def submit_all(
        self,
        requests: Iterable[Request],
        *,
        priority: int = 0,
        deadline: float | None = None,
        inputs: Inputs | None = None,
        taps: Asked | None = None,
        ends_only: bool = False,
    ) -> Stream:
        """Queues all requests or none. All must have passed check(). If one must end, they all end. `inputs` and
        `taps` are those of all, as check_inputs() and Engine.check_taps() return them."""
        check_urgency(priority, deadline)
        requests = list(requests)
        samples = sum(sampling.n for _, sampling in requests)
        if self._refused is not None:
            raise EngineClosed(f"this engine takes no more work: {self._refused}")
        if samples > self.limit:
            raise RequestError(f"{samples} samples at once are too many: at most {self.limit} may run and wait")
        if self.unfinished + samples > self.limit:
            raise QueueFull(f"{self.unfinished} samples run or wait, of at most {self.limit}: try again later")
        stream = Stream(self, samples, ends_only)
        self._open.add(stream)
        asked: dict[str, Any] = {"priority": priority, "deadline": deadline, "inputs": inputs}
        asked |= {} if taps is None else {"taps": taps}
        self._ask(lambda: self._submit(stream, requests, asked))
        return stream

    def refuse(self, reason: str = "it is being closed") -> None:
        """Makes submit() raise EngineClosed from now on. Requests that were submitted continue."""
        self._refused = self._refused or reason

    async def close(self, grace: float = 0.0) -> int:
        """Takes no new requests, and closes the engine once all have ended, or after `grace` seconds. Samples that
        still run end with the finish reason "abort". Returns their number."""
        self.refuse("it was closed")
        with suppress(TimeoutError):
            async with asyncio.timeout(grace):
                while self._open and not self._finished.is_set():
                    await asyncio.sleep(min(0.02, grace))
        with self._changed:
            self._stop = True
            self._wake()
        await self._finished.wait()
        self._thread.join()
        self._guides.shutdown(wait=False, cancel_futures=True)
        ends = (event.completion for event in self._engine.last_events)  # the last step may have ended others
        return sum(end is not None and end.finish_reason == "abort" for end in ends)

    # Called by streams, in the event loop's thread

    def _end(self, stream: Stream) -> None:
        if stream in self._open and not stream.ended:
            self._ask(lambda: self._abort(stream))

    def _ask(self, action: Callable[[], None]) -> None:
        with self._changed:
            self._inbox.append(action)
            self._wake()

    def _wake(self) -> None:
        self._changed.notify()
        if isinstance(self._engine, Replicas):  # a busy replica would keep idle ones waiting
            self._engine.interrupt()

    def _deliver(self, news: list[tuple[Stream, Event | Exception]]) -> None:
        for stream, one in news:
            if isinstance(one, Event):
                stream._put(one)
            else:
                stream._fail(one)
            if stream._left == 0 or not isinstance(one, Event):
                self._open.discard(stream)

    # The thread

    def _run(self) -> None:
        try:
            while self._next():
                if self._engine.has_work:
                    try:
                        self._hand_over(self._of_streams(self._engine.step()))
                    except EngineNotReady:
                        self._rest()
            self._engine.close()
            self._hand_over(self._of_streams(self._engine.last_events))
            self._call(lambda: self._end_all("it was closed", None))
        except BaseException as error:  # the engine has usually closed itself
            reason, cause = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}", error
            try:
                self._engine.close()
                self._hand_over(self._of_streams(event for event in self._engine.last_events if _stands(event)))
            except BaseException as more:
                cause.add_note(f"and closing failed ({type(more).__name__}: {more})")
            finally:
                self._call(lambda: self._end_all(reason, cause))

    def _next(self) -> bool:
        """Runs all queued actions, and waits if there is nothing to do. Returns False once the thread should end."""
        with self._changed:
            while not (self._stop or self._inbox or self._engine.has_work):
                self._changed.wait(PATIENCE)
            asked, self._inbox = self._inbox, deque()
            stop = self._stop
        for action in asked:
            action()
        return not stop

    def _rest(self) -> None:
        """Waits a moment for the engine, which sleeps or lacks its weights. Any thread may wake it or update it."""
        with self._changed:
            if not (self._stop or self._inbox):
                self._changed.wait(REST)

    def _submit(self, stream: Stream, requests: Sequence[Request], asked: Mapping[str, Any]) -> None:
        """Submits the requests of a stream, with these options of submit()."""
        for place, (prompt, sampling) in enumerate(requests):
            try:
                request = self._engine.submit(prompt, sampling, **asked)
            except Exception as error:  # concerns this request alone: the engine goes on
                self._abort(stream)
                self._hand_over([(stream, error)])
                break
            self._ids.setdefault(stream, set()).add(request)
            self._requests[request] = [stream, place, sampling.n]

    def _abort(self, stream: Stream) -> None:
        for request in self._ids.get(stream, ()):
            with suppress(RequestError):  # it has ended, and its last event is on its way
                self._engine.abort(request)

    def _of_streams(self, events: Iterable[Event]) -> Iterator[tuple[Stream, Event | Exception]]:
        """Yields each event with its stream, and forgets requests that have ended."""
        for event in events:
            request = self._requests[event.id]
            stream, place, left = request
            if event.completion is not None or not stream.ends_only:
                yield stream, event._replace(id=place)
            if event.completion is not None:
                request[2] = left - 1
                if left == 1:
                    del self._requests[event.id]
                    self._ids[stream].discard(event.id)
                    if not self._ids[stream]:
                        del self._ids[stream]

    def _hand_over(self, news: Iterable[tuple[Stream, Event | Exception]]) -> None:
        if some := list(news):
            self._call(lambda: self._deliver(some))

    def _call(self, function: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the event loop has ended, and no one waits
            self._loop.call_soon_threadsafe(function)

    def _end_all(self, reason: str, cause: BaseException | None) -> None:
        """Fails all open streams. Runs in the event loop's thread, after the engine's thread has finished."""
        self._refused = reason
        for stream in list(self._open):
            error = EngineClosed(f"this engine takes no more work: {reason}")
            error.__cause__ = cause
            stream._fail(error)
            self._open.discard(stream)
        self._finished.set()


def _stands(event: Event) -> bool:
    """Returns whether an event stays valid after the engine fails. Only ends that the failure caused do not."""
    return event.completion is None or event.completion.finish_reason not in ("error", "abort")
