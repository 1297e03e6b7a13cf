"""Runs engines in processes of their own, each with its own JAX and GPUs.

A process runs its engine by a Replica, as Replicas does in a thread. Here an EngineProcess stands for both. Calls go to
the process as they are made. Events come back once a step, and the step does not wait for them to be read. The messages
are pickles, since both ends are one program of one user. child.py has the other end.
"""

import itertools
import os
import pickle
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Pipe
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import jax

from jllm.distributed.child import Answer, Ended, Ready, from_shares, main
from jllm.distributed.crossing import Packed
from jllm.distributed.replica import News, Refused, Request
from jllm.distributed.routing import Load
from jllm.engine.checks import Prompt, check_named, checked
from jllm.engine.engine import Engine, Running
from jllm.engine.inputs import Inputs, read_inputs
from jllm.engine.kv_policy import Policy, policy_of
from jllm.engine.loop import first_line
from jllm.engine.metrics import Metrics
from jllm.engine.placement import check_count
from jllm.engine.request import Event, SamplingParams
from jllm.engine.tapped import Asked, Tokens, read_asked
from jllm.errors import (
    ConfigError,
    EngineClosed,
    EngineNotReady,
    RemoteError,
    RequestError,
    WeightsError,
)
from jllm.files.find import find_model
from jllm.files.load import Head, load
from jllm.files.snapshot import Snapshot
from jllm.guides.matcher import Guides, guides_of
from jllm.model.hooks import Hooks, InputShapes
from jllm.model.model import Model, end_ids
from jllm.model.params import Params
from jllm.model.taps import resolve_taps
from jllm.parallel.mesh import ranks_of
from jllm.programs.compiler import TRACED_HERE
from jllm.programs.executables import NOT_KEPT
from jllm.programs.tracing import settings, usual_processes
from jllm.speculative.drafter import Drafter
from pallas_kernels.bench.gpus import visible_gpus

type Source = Model | str | Path | Callable[[], Model]
PATIENCE = 60.0  # seconds that an engine may take to close


def start_processes(
    source: Source,
    wanted: Any,
    mesh: int | None,
    make: Callable[..., Engine],
    options: Mapping[str, Any],
    news: "queue.SimpleQueue[News]",
    started: list[Any],
    folder: Path,
) -> Head:
    """Starts an EngineProcess for each engine, adds them to `started`, and waits until all take requests. Returns the
    head of their model. Each step is compiled by one of them, and the others load it: from the files of `executables`,
    or from `folder`. Raises the first error of a process that could not start."""
    given, size = _source(source, mesh)
    shares = share_gpus(wanted, size)
    compared = len(shares) > 1 and not isinstance(given, Model)
    values = {"the model": given, "make": make, **_starting(options, shares, size, folder)}
    packed = Packed(values | {"JAX's settings": settings(), "compared": compared})
    policy, hooks = policy_of(options.get("kv_policy") or "paged"), options.get("hooks")
    inputs = hooks.inputs if isinstance(hooks, Hooks) else None
    own = inputs, options.get("taps") or (), tuple(options.get("adapters") or ())
    with packed.file:
        for place, gpus in enumerate(shares):
            started.append(EngineProcess(place, gpus, size, packed, policy, own, news))
        head = None
        for each in started:
            head = each.wait(head)
    _check_same([each.weights_made for each in started])
    assert head is not None
    return head


def _starting(
    options: Mapping[str, Any], shares: Sequence[Sequence[str]], mesh: int | None, folder: Path
) -> dict[str, Any]:
    """Returns the options of each of several engines, with those that decide how it starts: a folder in common with the
    others, and its part of the cores. "quiet" are patterns of warnings about what the caller did not ask for. "folder"
    is what a process removes where this one is killed."""
    given, quiet, alone = dict(options), [], len(shares) == 1
    if options.get("executables") is None and not alone:
        given["executables"] = folder
        quiet.append(NOT_KEPT)
    if options.get("compile_processes") is None and mesh is None and shares[0]:
        given["compile_processes"] = usual_processes(len(shares))
        quiet.append(TRACED_HERE)
    return given | {"quiet": quiet, "folder": folder}


def fit_processes(
    processes: Sequence["EngineProcess"],
    given: Params | Source | None,
    quantize: str | None,
    drafter: Drafter | None,
    hooks: Hooks | None,
) -> list[Callable[[Running], int]]:
    """Gives new weights to all processes, and returns for each a function that lets its engine take them. Raises the
    first error of a process, and then none holds them."""
    if given is None or isinstance(given, Params):
        source: Any = jax.device_get(given)
    else:
        source = _source(given, processes[0].mesh)[0]
    packed = Packed({"the weights": source, "drafter": jax.device_get(drafter), "hooks": jax.device_get(hooks)})
    asked: list[Future[str | None]] = []
    try:
        for process in processes:
            with suppress(EngineClosed):
                asked.append(process.fit_weights(packed, quantize, compared=len(processes) > 1 and callable(source)))
        errors = [error for done in asked if (error := done.exception())]
        for error in errors:
            if not isinstance(error, EngineClosed):
                raise error
        _check_same([done.result() for done in asked if done.exception() is None])
    except BaseException:
        drop_weights(processes)
        raise
    finally:  # processes may open it later, if this one was interrupted
        threading.Thread(target=lambda: (wait(asked), packed.file.close()), daemon=True).start()
    return [process.take_weights for process in processes]


def drop_weights(replicas: Iterable[Any]) -> None:
    """Lets processes forget weights that they hold for an update."""
    for each in replicas:
        if isinstance(each, EngineProcess):
            each.drop_weights()


def _check_same(weights: Sequence[str | None]) -> None:
    """Raises WeightsError unless all fingerprints are equal."""
    if len(set(weights)) > 1:
        raise WeightsError("the engines' processes have made different weights: give a function that makes the same")


def end_processes(started: Iterable[Any]) -> None:
    """Ends processes that were not closed, at the end of this one or of the object that has them."""
    for each in started:
        if isinstance(each, EngineProcess):
            each.kill()


def share_gpus(wanted: Any, mesh: int | None) -> list[list[str]]:
    """Returns the GPUs of each engine: `mesh` of them, or one. Without GPUs an engine has the CPU; None is one then.
    Raises ConfigError for too few GPUs."""
    gpus, size = visible_gpus(), mesh or 1
    most = len(gpus) // size
    if wanted is None:
        wanted = most if gpus else 1
    check_count(wanted, size, len(gpus) if gpus else None)
    return [gpus[i * size : (i + 1) * size] for i in range(wanted)]


def _source(source: Source, mesh: int | None) -> tuple[Model | Callable[[], Model], int | None]:
    """Returns a model without a mesh, or a function that makes one, and the number of devices of its mesh."""
    if isinstance(source, Model):
        if source.config.mesh is None:
            return source, mesh
        ranks = ranks_of(source.config)
        return partial(from_shares, replace(source, config=replace(source.config, mesh=None)), ranks), mesh or ranks
    if isinstance(source, str) and ":" in source and not Path(source).exists():
        return partial(_made_by, source), mesh
    if isinstance(source, str | Path):
        return partial(load, find_model(source), mesh=mesh), mesh
    if not callable(source):
        kind = type(source).__name__
        raise ConfigError(f"replicas take a Model, a directory, 'package.module:NAME' or a function, not {kind}")
    return source, mesh


def _made_by(name: str) -> Model:
    """Returns the model that "package.module:NAME" makes."""
    try:
        make = resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{name} is neither a directory nor 'package.module:NAME': {error}") from None
    return make()


class EngineProcess:
    """Stands for an engine in another process, with the methods of a Replica and of its engine. Any thread may use
    it."""

    def __init__(
        self,
        place: int,
        gpus: Sequence[str],
        mesh: int | None,
        packed: Packed,
        policy: Policy,
        own: tuple[InputShapes | None, Sequence[str], Sequence[str]],
        news: "queue.SimpleQueue[News]",
    ):
        """Starts the process, and does not wait for it. `own` are the inputs that its hooks declare, its taps, and the
        names of its adapters."""
        self.name = f"engine {place} ({', '.join(gpus) or 'CPU'})"
        self.failed, self.closed = False, False
        self.stands = False  # whether its engine has work, and sleeps
        self.weights: object = 0  # as of a Replica
        self.mesh = mesh
        self.last_events: tuple[Event, ...] = ()
        self._policy, self._own, self._news, self._closing = policy, own, news, False
        self._line, theirs = Pipe()
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()  # an engine that does not read stops no one
        self._outbox.put(pickle.dumps((self.name, place == 0, bool(gpus), mesh, packed.pickles)))
        self._sending = threading.Lock()
        self._calls: dict[int, Future[Any]] = {}
        self._forks: dict[int, Request] = {}  # by call
        self._next_call = itertools.count()
        self._ready: Future[Ready] = Future()
        file = packed.file.fileno()
        path = os.pathsep.join(place or os.getcwd() for place in sys.path)
        added = {"PYTHONPATH": path} | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})
        command = [sys.executable, "-P", "-c", f"from {main.__module__} import main; main({theirs.fileno()}, {file})"]
        # It has its own session: Ctrl+C goes to this process, which then ends it.
        files = (theirs.fileno(), file)
        with theirs:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, env=os.environ | added, pass_fds=files, start_new_session=True
            )
        self._writer = threading.Thread(target=self._write, name=f"{self.name}, writer", daemon=True)
        self._reader = threading.Thread(target=self._read, name=self.name, daemon=True)
        self._writer.start()
        self._reader.start()
        threading.Thread(target=self._watch, name=f"{self.name}, watch", daemon=True).start()

    def wait(self, head: Head | None) -> Head:
        """Waits until the engine takes requests, and returns its model's head. `head` is that of the first engine."""
        ready = self._ready.result()
        head = ready.head or head
        assert head is not None
        self.head, self.sizes, self._metrics, self.weights_made = head, ready.sizes, ready.metrics, ready.weights
        limits = ready.sizes.limits
        self.load = Load(limits.page_size, limits.num_pages)
        self._policy = self._policy.over(self._policy.make_pool(limits.num_pages, limits.page_size))
        self.slots, self.vocab_size = limits.max_slots, head.config.vocab_size
        self.most_tokens = ready.sizes.most_tokens(head.config.context)
        self.guides: Guides = guides_of(head.tokenizer, head.config.vocab_size, end_ids(*head))
        return head

    @property
    def engine(self) -> "EngineProcess":
        """Returns itself, since it has an engine's methods too."""
        return self

    # Methods of a replica

    def submit(self, request: Request) -> Future[None]:
        """Begins a request. Its error in the process is news too, and its result comes only if it is awaited."""
        try:
            return self._ask("submit", request, answered=request.awaited, name=request.id)
        except EngineClosed as error:  # the news of its end is on the way, and the request begins again
            done: Future[None] = Future()
            done.set_exception(error)
            return done

    def abort(self, request: Request) -> None:
        with suppress(EngineClosed):
            self._ask("abort", answered=False, name=request.id)

    def fork(self, request: Request, sample: int) -> int:
        """Returns Engine.fork. The reader adds the new sample to the request, before it reads an event of it."""
        return self._ask("fork", request.local_of(sample), name=request.id, of=request).result()

    def snapshot(self, request: Request, sample: int) -> Snapshot:
        return self._ask("snapshot", request.local_of(sample), name=request.id).result()

    def forget(self, request: Request) -> None:
        with suppress(EngineClosed):
            self._ask("forget", answered=False, name=request.id)

    def go_on(self) -> None:
        """Lets the engine step again after it was not ready."""
        self.stands = False
        with suppress(EngineClosed):
            self._ask("go_on", answered=False)

    def named(self, events: Iterable[Event]) -> list[Event]:
        """Returns the events as they are: the process has named them."""
        return list(events)

    def begin_to_close(self, reason: str) -> None:
        """Lets the engine close, once all earlier calls are done, and ends one that is not ready."""
        if self._closing:
            return
        self._closing, self._last_moment = True, time.monotonic() + PATIENCE
        self._close: Future[None] = Future()
        try:
            if self._ready.done():
                self._close = self._ask("close", reason)
                return
            self.kill()
        except EngineClosed:
            pass
        self._close.set_result(None)

    def close(self, reason: str) -> None:
        """Closes the engine, and ends its process. Raises the error of closing it."""
        self.begin_to_close(reason)
        try:
            with suppress(EngineClosed):
                self._close.result(max(0.0, self._last_moment - time.monotonic()))
            self._reader.join(PATIENCE)
        except TimeoutError:
            pass
        finally:
            self.kill()
            self._reader.join()

    def kill(self) -> None:
        """Ends the process at once."""
        self._process.kill()

    # Methods of an engine

    def check(self, prompt: Prompt, sampling: SamplingParams = SamplingParams()) -> list[int]:
        """Returns Engine.check. It runs here, and waits for no step."""
        if self.closed:
            raise EngineClosed(f"{self.name} takes no more work")
        config, tokenizer = self.head
        check_named(sampling, self._own[2])
        return checked(prompt, sampling, config, tokenizer, self.most_tokens, self._policy.check, self.guides)

    def check_inputs(self, inputs: Any) -> Inputs | None:
        """Returns Engine.check_inputs, likewise."""
        return read_inputs(inputs, self._own[0])

    def check_taps(self, taps: Sequence[str] | Asked, tokens: Tokens, samples: int) -> Asked | None:
        """Returns Engine.check_taps, likewise."""
        declared = resolve_taps(self._own[1], self.head.config.num_layers)
        return read_asked(taps, tokens, samples, declared, self.sizes.limits)

    def compile_ahead(self, samplings: Iterable[SamplingParams] = (), *, wait: bool = True) -> int:
        return self._ask("compile_ahead", list(samplings), wait=wait).result()

    def measured(self) -> Metrics:
        """Returns Engine.measured; of a process that has gone, as far as it told them."""
        with suppress(EngineClosed):
            self._metrics = self._ask("measured").result()
        return self._metrics

    def reset_metrics(self) -> None:
        self._ask("reset_metrics").result()

    def reset_prefix_cache(self) -> None:
        self._ask("reset_prefix_cache").result()

    @property
    def version(self) -> int:
        return self.measured().version

    def fit_weights(self, packed: Packed, quantize: str | None, compared: bool) -> Future[str | None]:
        """Lets the process read new weights while its engine steps, and hold them. Their fingerprint is the answer, if
        they are `compared`."""
        path = f"/proc/{os.getpid()}/fd/{packed.file.fileno()}"
        if not os.path.exists(path):
            raise WeightsError(
                f"an update of engines in processes needs {path}, which this system lacks: use threads=True"
            )
        return self._ask("fit_weights", path, packed.pickles, quantize, compared)

    def drop_weights(self) -> None:
        with suppress(EngineClosed):
            self._ask("drop_weights", answered=False)

    def take_weights(self, running: Running) -> int:
        """Takes the weights that fit_weights() gave, as Engine.take_weights does."""
        return self._ask("take_weights", running).result()

    def sleep(self) -> None:
        self._ask("sleep").result()

    def wake(self) -> None:
        self._ask("wake").result()

    # The line

    def _ask(
        self,
        method: str,
        *given: Any,
        answered: bool = True,
        name: int | None = None,
        of: Request | None = None,
        **more: Any,
    ) -> Future[Any]:
        """Queues a call, and returns the Future of its answer. `name` is the request that it concerns, and `of` the one
        that a fork joins. Raises RequestError for values that cannot be pickled."""
        done: Future[Any] = Future()
        try:
            inner = pickle.dumps((given, more))
        except Exception as error:  # an object of the caller may raise anything
            what = f"an argument of {method} cannot go to the process of an engine"
            raise RequestError(f"{what}: {first_line(error)}") from None
        with self._sending:
            if self.closed:
                raise EngineClosed(f"{self.name} takes no more work")
            call = next(self._next_call)
            if answered:
                self._calls[call] = done
            if of is not None:
                self._forks[call] = of
            self._outbox.put(pickle.dumps((method, call, name, inner)))
        return done

    def _write(self) -> None:
        with suppress(OSError):  # the process has gone: the reader ends all calls
            while (message := self._outbox.get()) is not None:
                self._line.send_bytes(message)

    def _watch(self) -> None:
        """Ends the line soon after the process. A process that it started may hold the line's other end."""
        self._process.wait()
        self._reader.join(1.0)  # it reads what is left
        self._cut()

    def _cut(self) -> None:
        with suppress(OSError), socket.socket(fileno=os.dup(self._line.fileno())) as line:
            line.shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        """Takes in all messages. Then it waits for the end of the process, and tells of one that nobody asked for."""
        why: BaseException | None = None
        try:
            while True:
                self._take(self._line.recv())
        except (EOFError, OSError):
            pass
        except BaseException as error:  # a message that this process cannot load
            why = error
        self._process.kill()
        status = self._process.wait()
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        lost = why or RemoteError(f"the process of {self.name} {how}")
        with self._sending:
            told, self.closed = self.closed, True
            left, self._calls = list(self._calls.values()), {}
        self._outbox.put(None)
        self._cut()
        self._writer.join()
        self._line.close()
        for done in left:
            done.set_exception(EngineClosed(f"{self.name} takes no more work: {lost}"))
        if not self._ready.done():
            self._ready.set_exception(lost)
        elif not (told or self._closing):
            self._news.put((self, lost))

    def _take(self, message: Any) -> None:
        if isinstance(message, list):
            self._news.put((self, list(map(Event, *message))))
        elif isinstance(message, Refused):
            self._news.put((self, message))
        elif isinstance(message, EngineNotReady) and self._ready.done():
            self.stands = True
            self._news.put((self, message))
        elif isinstance(message, Answer):
            done, request = self._calls.pop(message.call, None), self._forks.pop(message.call, None)
            if done is None:
                return  # nobody waits for it
            if message.error is not None:
                done.set_exception(message.error)
                return
            done.set_result(message.value if request is None else request.add_fork(message.value))
        elif isinstance(message, Ready):
            self._ready.set_result(message)
        elif isinstance(message, Ended):
            self.last_events, self._metrics = tuple(message.events), message.metrics
            with self._sending:
                self.closed = True
            if message.error is not None and not self._closing:
                self._news.put((self, message.error))
        else:
            self._ready.set_exception(message)
