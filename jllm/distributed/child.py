"""Serves an engine in the process that has it: what the other end of processes.py does.

The first message has the engine's model and options. Then calls come as they are made. News go back once a step.
"""

import logging
import os
import pickle
import queue
import shutil
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jllm.distributed.crossing import unpacked
from jllm.distributed.replica import Refused, Replica, Request
from jllm.engine.engine import Engine, Running
from jllm.engine.loop import first_line
from jllm.engine.metrics import Metrics
from jllm.engine.placement import copy_to
from jllm.engine.request import Event
from jllm.engine.weights import Weights
from jllm.errors import (
    ConfigError,
    EngineClosed,
    EngineNotReady,
    JllmError,
    RemoteError,
    RequestError,
)
from jllm.files import fingerprint
from jllm.files.load import Head
from jllm.guides.guide_trials import MOST
from jllm.model.model import Model
from jllm.model.params import Params, tree_bytes
from jllm.model.shards import share_params
from jllm.parallel.mesh import make_mesh, ranks_of, spread
from jllm.programs.sizes import EngineSizes
from jllm.programs.tracing import take_settings


class Ready(NamedTuple):
    """Tells that an engine takes requests."""

    head: Head | None  # of the first engine alone
    sizes: EngineSizes
    metrics: Metrics
    weights: str | None  # their fingerprint where each of several engines makes its own


class Ended(NamedTuple):
    """Tells that an engine has ended. No message follows."""

    error: BaseException | None  # of its step, or of closing it
    events: list[Event]  # its last_events
    metrics: Metrics


class Answer(NamedTuple):
    """Answers a call."""

    call: int
    value: Any
    error: BaseException | None = None


def main(line: int, file: int) -> None:
    """Makes an engine as the first message says, and serves calls until the last one, or until the other end goes."""
    for each in (line, file):  # a process that this one starts would hold them
        os.set_inheritable(each, False)
    process = _Process(Connection(line))
    with suppress(OSError):  # the other end has gone
        try:
            process.begin(file)
        except Exception as error:
            if not isinstance(error, JllmError):
                trace = "".join(traceback.format_exception(error))
                error = RemoteError(f"an engine's process cannot start: {type(error).__name__}: {first_line(error)}")
                error.add_note(trace)
            process.line.send(_sendable(error))
        else:
            process.tell_all()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads may still compile


class _Process:
    """Serves an engine in its process: one thread takes calls, one steps, and the main one tells the news."""

    def __init__(self, line: Connection):
        self.line = line
        self._news: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._requests: dict[int, tuple[Request, Future[None]]] = {}  # each with the end of its submit
        self._guides = ThreadPoolExecutor(MOST, "guides")
        self._replica: Future[Replica] = Future()
        self._loading = ThreadPoolExecutor(1, "weights")
        self._fitted: Weights | None = None
        self._folder: Path | None = None  # of the steps that the engines share

    def begin(self, file: int) -> None:
        """Makes the engine, and tells that it is ready."""
        name, first, on_gpus, mesh, pickles = self.line.recv()
        threading.Thread(target=self._obey_all, daemon=True).start()
        _write_plainly(name)
        values = unpacked(pickles, file)
        os.close(file)
        take_settings(values.pop("JAX's settings"))
        source, make, compared = (values.pop(name) for name in ("the model", "make", "compared"))
        self._folder = values.pop("folder")
        for pattern in values.pop("quiet"):
            warnings.filterwarnings("ignore", pattern)
        if (jax.default_backend() == "cpu") == on_gpus:
            what = "finds no GPU in its process" if on_gpus else "finds a GPU that nvidia-smi does not list"
            raise ConfigError(f"{name}: JAX {what}: set CUDA_VISIBLE_DEVICES, or JAX_PLATFORMS=cpu")
        model = _model_of(source, mesh)
        self._config, self._mesh = replace(model.config, mesh=None), mesh
        weights = fingerprint.of_model(model.params, model.config) if compared else None
        if not first:
            values["progress"] = False  # one engine reports; the others compile the same
        engine = make(model, **values)
        head = Head(self._config, model.tokenizer) if first else None
        self._replica.set_result(Replica(name, engine, self._news))
        self.line.send(Ready(head, engine.sizes, engine.measured(), weights))

    def tell_all(self) -> None:
        """Sends all news, until the engine has ended."""
        replica = self._replica.result()
        while True:
            news = self._news.get()
            if isinstance(news, Answer):
                self.line.send(news if news.error is None else news._replace(error=_sendable(news.error)))
                continue
            _, news = news
            if isinstance(news, list):
                ids, *columns = zip(*news)
                self.line.send([[replica.names.get(id, -1) for id in ids], *columns])
            elif isinstance(news, Refused):
                self.line.send(Refused(news.id, _sendable(news.error)))
            elif isinstance(news, EngineNotReady):
                self.line.send(news)
            else:
                last = replica.named(replica.engine.last_events)
                self.line.send(Ended(news and _sendable(news), last, replica.engine.measured()))
                return

    def _obey_all(self) -> None:
        try:
            while True:
                message = self.line.recv_bytes()  # first, to notice the end of the other process at once
                replica, (method, call, name, inner) = self._replica.result(), pickle.loads(message)
                begins = name if method == "submit" else None
                try:
                    given, more = pickle.loads(inner)
                except Exception as error:  # a class of the caller, as in its main program
                    why = f"an argument of {method} cannot be loaded in the process of an engine: {first_line(error)}"
                    self._refuse(call, begins, RequestError(why))
                else:
                    self._guarded(call, begins, partial(self._obey, replica, method, call, name, given, more))
        except (EOFError, OSError):  # nobody is left to serve
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
            os._exit(1)
        except BaseException as error:
            self._news.put((None, error))

    def _guarded(self, call: int, name: int | None, work: Callable[[], None]) -> None:
        """Runs `work`. Its error answers the call, and ends the request that it begins."""
        try:
            work()
        except Exception as error:
            self._refuse(call, name, error)

    def _refuse(self, call: int, name: int | None, error: BaseException) -> None:
        self._news.put(Answer(call, None, error))
        if name is not None and not isinstance(error, EngineClosed):
            self._news.put((None, Refused(name, error)))

    def _obey(
        self, replica: Replica, method: str, call: int, name: int | None, given: tuple[Any, ...], more: dict[str, Any]
    ) -> None:
        if method == "submit":
            (request,) = given
            begun: Future[None] = Future()
            self._requests[request.id] = request, begun
            guide = request.sampling.guide
            if guide is None or replica.engine.guides.has(guide):
                self._submit(replica, call, request, begun)
            else:  # compiling a large schema holds up neither steps nor other calls
                self._guides.submit(self._submit, replica, call, request, begun)
        elif name is not None:  # it waits for the submit
            if name not in self._requests:
                if method not in ("abort", "forget"):
                    raise RequestError(f"request {name} has no running sample {given[0]}")
                return
            request, begun = self._requests[name]
            if method == "abort":
                request.unwanted = True
            elif method == "forget":
                del self._requests[name]
            work = partial(self._go_on, replica, method, call, request, given)
            begun.add_done_callback(lambda _: self._guarded(call, None, work))
        elif method == "go_on":
            replica.go_on()
        elif method == "fit_weights":
            self._loading.submit(self._answer, call, partial(self._fit, replica.engine, *given))
        elif method == "drop_weights":
            self._loading.submit(setattr, self, "_fitted", None)
        elif method == "take_weights":
            replica.ask(partial(self._answer, call, partial(self._take, replica.engine, *given)))
        elif method == "close":
            self._answer(call, partial(replica.close, *given))
            self._news.put((replica, None))
        else:
            replica.ask(partial(self._answer, call, partial(getattr(replica.engine, method), *given, **more)))

    def _go_on(self, replica: Replica, method: str, call: int, request: Request, given: tuple[Any, ...]) -> None:
        """Carries out a call for a request that has begun."""
        if method in ("abort", "forget"):
            getattr(replica, method)(request)
        else:  # the answer is news before any event that follows it
            work = partial(replica.of_sample, method, request.id, *given)
            replica.ask(partial(self._answer, call, work))

    def _fit(
        self, engine: Engine, path: str, pickles: dict[str, bytes], quantize: str | None, compared: bool
    ) -> str | None:
        begin = time.perf_counter()
        with open(path, "rb") as file:
            values = unpacked(pickles, file.fileno())
        given, drafter, hooks = values["the weights"], values["drafter"], values["hooks"]

        def fit(params: Params | None, replaces: bool = False) -> None:
            how: dict[str, Any] = {"quantize": quantize, "drafter": drafter, "hooks": hooks, "replaces": replaces}
            fitted = engine.fit_weights(params, **how)
            read = (None if params is None else fitted.params), fitted.drafter, fitted.hooks
            copied = sum(leaf.nbytes for leaf in jax.tree.leaves(read))
            self._fitted = replace(fitted, copied=copied, seconds=time.perf_counter() - begin)

        if given is None:
            fit(None)
            return None
        alone = quantize is None and self._mesh is None  # nobody else holds the weights of this process
        if alone and isinstance(given, Params) and engine.lacks_room(tree_bytes(given)):
            fit(given, replaces=True)
            return fingerprint.of_model(given, self._config) if compared else None
        source = Model(self._config, given) if isinstance(given, Params) else given
        if self._mesh is not None and isinstance(given, Params) and given.norm.ndim == 2:
            source = from_shares(source, self._mesh)
        model = _model_of(source, self._mesh)
        if alone and engine.lacks_room(0):
            model = replace(model, params=jax.device_get(model.params))
            fit(model.params, replaces=True)
        else:
            fit(model.params)
        return fingerprint.of_model(model.params, model.config) if compared else None

    def _take(self, engine: Engine, running: Running) -> int:
        weights, self._fitted = self._fitted, None
        assert weights is not None, "take_weights comes after fit_weights"
        return engine.take_weights(weights, running)

    def _submit(self, replica: Replica, call: int, request: Request, begun: Future[None]) -> None:
        try:
            with suppress(RequestError):  # submitting raises it again
                if request.sampling.guide is not None:
                    replica.engine.guides.matcher(request.sampling.guide)
            done = replica.submit(request)
            if request.awaited:
                done.add_done_callback(lambda done: self._answer(call, done.result))
        except BaseException as error:  # nobody reads a thread's error
            self._refuse(call, request.id, error)
        finally:
            begun.set_result(None)

    def _answer(self, call: int, work: Callable[[], Any]) -> None:
        try:
            self._news.put(Answer(call, work()))
        except BaseException as error:  # a caller waits, and a maker may call sys.exit()
            self._news.put(Answer(call, None, error))


def _model_of(source: Model | Callable[[], Model], mesh: int | None) -> Model:
    """Returns the model on the device of this process, or on a mesh of so many."""
    model = source if isinstance(source, Model) else source()
    if not isinstance(model, Model):
        raise ConfigError(f"replicas need a function that returns a Model, not {type(model).__name__}")
    if model.config.mesh is not None and (devices := ranks_of(model.config)) != mesh:
        raise ConfigError(f"the model is on a mesh of {devices} devices: give Replicas mesh={devices} too")
    if mesh is None or model.config.mesh is not None:
        return copy_to(jax.local_devices()[0] if mesh is None else make_mesh(mesh), model)
    config = spread(model.config, make_mesh(mesh))
    return replace(model, config=config, params=share_params(model.params, config))


def _write_plainly(name: str) -> None:
    """Lets warnings and logs of this process be lines that name its engine."""

    def show(message: Warning | str, *where: Any, **more: Any) -> None:
        print(f"{name}: warning: {message}", file=sys.stderr, flush=True)

    warnings.showwarning = show
    logging.basicConfig(format=f"{name}: %(message)s")


def _sendable(error: BaseException) -> BaseException:
    """Returns an error that the other process can load. Its notes have the traceback of an unexpected one."""
    if not isinstance(error, Exception):  # SystemExit would end the other process too
        error = RemoteError(f"{type(error).__name__} in the process of an engine: {first_line(error)}")
    if not isinstance(error, JllmError):
        error.add_note("".join(traceback.format_exception(error)))
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:  # an exception of the caller may need arguments that it does not keep
        return RemoteError(first_line(error))


def from_shares(model: Model, ranks: int) -> Model:
    """Returns a model on a mesh from one whose params are shares of it."""
    return copy_to(make_mesh(ranks), model)
