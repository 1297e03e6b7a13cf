"""Lets another process compute prompts, on this machine or another: K and V come over a socket as snapshots.

Snapshots fit pages of any size.

    # one process, or several: each computes prompts for one other at a time
    serve_prefills(PrefillEngine(model), socket.create_server(("127.0.0.1", 7001)))

    # the other one
    engine = Disaggregated.over(RemotePrefill("127.0.0.1:7001"), DecodeEngine(model, max_slots=64))

Both must have the same model and KV formats, which is checked when they connect. Nothing is encrypted, and no peer is
authenticated. Use it only on networks whose machines trust each other.
"""

import queue
import socket
import threading
import time
import warnings
from contextlib import suppress
from dataclasses import asdict, fields
from typing import Any

import numpy as np

from jllm.distributed.channel import Channel, connect, encoded
from jllm.distributed.handover import PrefillEngine
from jllm.engine.engine import Engine
from jllm.engine.moved import Begun, DevicePages, Handover
from jllm.engine.request import Completion, Event, SamplingParams, Timings, TokenLogprob
from jllm.errors import EngineClosed, JllmError, RemoteError, RequestError, TooLongError, WeightsError
from jllm.files.snapshot import Snapshot, as_arrays, from_arrays
from jllm.guides.guide import Guide
from jllm.programs.sizes import EngineSizes, Limits

POLL = 0.005  # seconds that a step waits for news
PATIENCE = 30.0  # seconds for the other process to answer a new connection


def serve_prefills(engine: PrefillEngine, listener: socket.socket) -> None:
    """Computes prompts for each process that connects, one after another, until the listener is closed. `engine` must
    have no device to send pages to."""
    about = identity(engine)
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        known: dict[int, int] = {}  # by id in the engine, the request's id in the other process
        with connection:
            try:
                _serve(engine, about, Channel(connection), known)
            except RemoteError as error:
                if known:
                    warnings.warn(f"{error}; its {len(known)} requests end", stacklevel=2)
        for own in known:
            with suppress(RequestError):
                engine.abort(own)
        while engine.has_work:
            engine.step()


def _serve(engine: PrefillEngine, about: dict[str, Any], channel: Channel, known: dict[int, int]) -> None:
    sizes, left_of = engine.sizes, dict[int, int]()  # samples of each request that have not ended
    channel.send({"limits": asdict(sizes.limits), "max_pages": sizes.max_pages, **about})
    while True:
        while channel.waiting(0 if engine.has_work else None):
            message, _ = channel.receive()
            if "abort" in message:
                for own in [own for own, theirs in known.items() if theirs == message["abort"]]:
                    with suppress(RequestError):
                        engine.abort(own)
            elif "forget" in message:
                engine.reset_prefix_cache()
            else:
                name = message.get("id", -1)
                try:
                    prompt, params, priority = _asked(message)
                    own = engine.submit(prompt, params, priority=priority)
                    known[own], left_of[own] = name, params.n
                except RemoteError:
                    raise
                except Exception as error:  # it concerns this request alone
                    channel.send({"refused": name, "why": f"{type(error).__name__}: {error}"})
                    if not isinstance(error, JllmError):
                        warnings.warn(f"a request is refused ({type(error).__name__}: {error})", stacklevel=2)
        for one in engine.step():
            if isinstance(one, Event) and one.id not in known:
                continue  # late text, which the other process makes again
            if isinstance(one, Event):
                event = [known[one.id], *one[1:4], _logprobs(one.logprobs)]
                channel.send({"event": event, "completion": _plain(one.completion)})
            else:
                assert not isinstance(one.kv, DevicePages)
                arrays, metadata = ({}, {}) if one.kv is None else as_arrays(one.kv)
                left = {"id": known[one.id], "seed": one.seed, "started": one.started}
                left["samples"] = [_begun(begun) for begun in one.samples]
                channel.send({"left": left, "about": metadata}, arrays)
                del known[one.id], left_of[one.id]
            if isinstance(one, Event) and one.completion is not None:
                left_of[one.id] -= 1
                if not left_of[one.id]:
                    del known[one.id], left_of[one.id]


def _asked(message: dict[str, Any]) -> tuple[list[int], SamplingParams, int]:
    """Returns the prompt, the sampling parameters and the priority that a message asks for."""
    try:
        return message["prompt"], _params(message["sampling"]), message["priority"]
    except JllmError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise RemoteError(f"invalid message from the other process: {error!r}") from error


def identity(engine: Engine) -> dict[str, Any]:
    """Returns the values that must be equal in two engines for one to continue requests of the other."""
    return {"model": engine.fingerprint, "formats": list(engine.kv_formats)}


class RemotePrefill:
    """A PrefillEngine in another process, as Disaggregated needs it: submit, abort and step.

    Events and handovers are the same, and a step waits a moment for them. The constructor or a step raises RemoteError
    where the process cannot be reached or has gone. Its requests are then computed on the decoding engine.
    """

    last_events: tuple[Event, ...] = ()

    def __init__(self, address: str):
        self._channel, self.address = connect(address, PATIENCE), address
        if not self._channel.waiting(PATIENCE):
            raise RemoteError(f"{address} sends nothing: it may be busy with another process")
        hello, _ = self._channel.receive()
        try:
            self.sizes = EngineSizes(Limits(**hello.pop("limits")), hello.pop("max_pages"), ())
            self.identity = {name: hello[name] for name in ("model", "formats")}
        except (KeyError, TypeError, ValueError) as error:
            raise RemoteError(f"{address} must be a process that runs serve_prefills: {error}") from None
        self.closed = False
        self.most_tokens = self.sizes.limits.num_pages * self.sizes.limits.page_size + 1
        self.slots = self.sizes.limits.max_slots
        self._known: dict[int, tuple[tuple[int, ...], SamplingParams, float]] = {}
        self._left: dict[int, int] = {}  # samples that have not ended
        self._next_id = 0
        # Another thread sends. With a single thread, both processes could wait for each other to read.
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._unsent: BaseException | None = None  # the error that ended sending
        self._sender = threading.Thread(target=self._send_all, daemon=True)
        self._sender.start()

    @property
    def has_work(self) -> bool:
        return bool(self._known)

    def check(self, prompt: Any, sampling: SamplingParams = SamplingParams()) -> Any:
        """Returns token ids. Raises RequestError if the request needs more pages than there are."""
        limits = self.sizes.limits
        need = -(-(len(prompt) + sampling.max_new_tokens - 1) // limits.page_size)
        if need > limits.num_pages == self.sizes.max_pages:  # with more pages, the context ends the request first
            raise TooLongError(f"{self.address} has {limits.num_pages} pages, and the request needs {need}")
        return prompt

    def submit(self, prompt: Any, sampling: SamplingParams, *, priority: int = 0, deadline: float | None = None) -> int:
        """Queues a prompt as Engine.submit does. The decoding engine enforces a deadline."""
        self._check_open()
        name, self._next_id = self._next_id, self._next_id + 1
        given = {"id": name, "prompt": list(prompt), "sampling": _said(sampling), "priority": priority}
        text = encoded(given)  # in this thread, so that its errors reach the caller
        self._known[name] = tuple(prompt), sampling, time.perf_counter()
        self._left[name] = sampling.n
        self._outbox.put(text)
        return name

    def resume(self, snapshot: Any, *given: Any, **more: Any) -> int:
        raise RequestError("another process computes prompts, and takes no snapshot")

    def fork(self, request_id: int, sample: int = 0) -> int:
        raise RequestError(f"request {request_id} is with another process until its first token has come")

    def snapshot(self, request_id: int, sample: int = 0) -> Snapshot:
        raise RequestError(f"request {request_id} is with another process until its first token has come")

    def abort(self, request_id: int) -> None:
        self._outbox.put(encoded({"abort": request_id}))

    def fit_weights(self, *given: Any) -> Any:
        raise WeightsError(f"{self.address} computes prompts with weights of its own: start both anew with others")

    def reset_prefix_cache(self) -> None:
        self._outbox.put(encoded({"forget": True}))

    def compile_ahead(self, samplings: Any = (), *, wait: bool = True) -> int:
        """Returns 0: the other process compiles its own steps."""
        return 0

    def warm_up(self) -> None:
        pass

    def reset_metrics(self) -> None:
        pass

    def close(self, reason: str = "it was closed") -> None:
        if not self.closed:
            self.closed = True
            self._outbox.put(None)
            self._channel.close()

    def step(self) -> list[Any]:
        """Returns news of the other process, if any comes within a moment."""
        self._check_open()
        try:
            news: list[Any] = []
            wait = POLL
            while self._channel.waiting(wait):
                news += self._take(*self._channel.receive())
                wait = 0.0
            return news
        except (JllmError, LookupError, TypeError, ValueError) as error:
            self.close()
            why = self._unsent or error
            raise RemoteError(f"{self.address}: {why}") from why

    def _check_open(self) -> None:
        if self.closed:
            raise EngineClosed("the other process computes no more prompts: it has gone, or was closed")

    def _send_all(self) -> None:
        """Sends messages until None comes. An error ends the connection, and the next step raises it."""
        try:
            while (message := self._outbox.get()) is not None:
                self._channel.send(message)
        except BaseException as error:
            self._unsent = error
        finally:
            self._channel.end()

    def _take(self, message: dict[str, Any], arrays: dict[str, np.ndarray]) -> list[Any]:
        if "event" in message:
            return [self._event(message)]
        if "refused" in message:  # the whole request runs where it is decoded
            name = message["refused"]
            _, sampling, submitted = self._known[name]
            begun = tuple(Begun(i, (), (), (), {}, submitted, None, 0.0) for i in range(sampling.n))
            return [self._handover(name, sampling.seed or 0, begun, sampling.n, None)]
        left, now = message["left"], time.perf_counter()
        submitted = self._known[left["id"]][2]
        samples = tuple(
            Begun(
                begun["sample"],
                tuple(begun["output"]),
                tuple(_logprob(*one) for one in begun["logprobs"]),
                tuple(begun["versions"]),
                {place: _score(*score) for place, score in begun["scores"]},
                submitted,
                now - submitted,
                now,
            )
            for begun in left["samples"]
        )
        kv = from_arrays(arrays, message["about"]) if arrays else None
        return [self._handover(left["id"], left["seed"], samples, left["started"], kv)]

    def _handover(
        self, name: int, seed: int, samples: tuple[Begun, ...], started: int, kv: Snapshot | None
    ) -> Handover:
        prompt, sampling, _ = self._known.pop(name)
        del self._left[name]
        return Handover(name, prompt, sampling, seed, samples, started, len(prompt), 0, kv)

    def _event(self, message: dict[str, Any]) -> Event:
        name, sample, text, ids, logprobs = message["event"]
        end = message["completion"]
        if end is not None:
            end = _completion(end)
            self._left[name] -= 1
            if not self._left[name]:
                del self._left[name], self._known[name]
        return Event(name, sample, text, tuple(ids), end, tuple(_logprob(*one) for one in logprobs))


# Values as JSON


def _said(params: SamplingParams) -> dict[str, Any]:
    """Returns the fields that differ from the default, as JSON values."""
    default = SamplingParams()
    found = {f.name: getattr(params, f.name) for f in fields(params)}
    found = {name: value for name, value in found.items() if value != getattr(default, name)}
    if "logit_bias" in found:
        found["logit_bias"] = list(found["logit_bias"].items())
    if "guide" in found:
        found["guide"] = found["guide"].as_json()
    return found


def _params(said: dict[str, Any]) -> SamplingParams:
    given = dict(said)
    if "logit_bias" in given:
        given["logit_bias"] = {int(token): bias for token, bias in given["logit_bias"]}
    if "guide" in given:
        given["guide"] = Guide.parse(given["guide"])
    return SamplingParams(**given)


def _plain(completion: Completion | None) -> dict[str, Any] | None:
    return None if completion is None else asdict(completion)


def _begun(begun: Begun) -> dict[str, Any]:
    return {**begun._asdict(), "logprobs": _logprobs(begun.logprobs), "scores": list(begun.scores.items())}


def _logprobs(some: tuple[TokenLogprob, ...]) -> list[Any]:
    return [[one.token_id, one.logprob, one.top] for one in some]


def _logprob(token_id: int, logprob: float, top: list[Any]) -> TokenLogprob:
    return TokenLogprob(token_id, logprob, tuple((id, p) for id, p in top))


def _score(logprob: float, rank: int, best: list[Any]) -> tuple[float, int, tuple[int, float]]:
    return logprob, rank, (best[0], best[1])


def _completion(said: dict[str, Any]) -> Completion:
    given = dict(said)
    for name in ("token_ids", "prompt_logprobs", "prompt_ranks", "versions"):
        given[name] = None if given[name] is None else tuple(given[name])
    if given["logprobs"] is not None:
        given["logprobs"] = tuple(_logprob(**one) for one in given["logprobs"])
    if given["prompt_best"] is not None:
        given["prompt_best"] = tuple((id, p) for id, p in given["prompt_best"])
    return Completion(**{**given, "timings": Timings(**given["timings"])})
