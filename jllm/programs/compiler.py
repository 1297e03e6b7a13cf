"""Compiles programs in threads, the most needed first, or in the thread of a step that needs one now."""

import contextlib
import os
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
from jax._src import config as jax_config
from tqdm import tqdm

from jllm.errors import NoRoomError
from jllm.parallel.memory import out_of_memory
from jllm.programs.tracing import Tracers, TracingFailed
from jllm.step.buckets import Bucket

CACHE_HIT = "/jax/compilation_cache/cache_hits"
PAUSE, LOG_PAUSE = 0.5, 10.0  # seconds from one line of progress to the next: on a terminal, and elsewhere
TRACED_HERE = "a step of .* is traced in the engine's own process"  # a pattern of a warning
LOOK, LONGEST = 0.1, 300.0  # seconds between looks for a program that another engine compiles, and the most in all


@dataclass
class Compiled:
    """Counts the programs compiled for an engine: ahead of requests, in the background, or at a step's first use."""

    programs: int = 0
    first_use: int = 0  # programs that a step had to wait for
    seconds: float = 0.0  # while at least one was made, tracing included
    cache_hits: int = 0  # programs found in JAX's persistent cache
    loaded: int = 0  # programs found in files (executables.py)
    elsewhere: int = 0  # steps that other processes traced (tracing.py)


class Recipe(NamedTuple):
    """Holds how a program is found, traced and lowered, and how a new one is kept."""

    lower: Callable[[], jax.stages.Lowered]
    find: Callable[[], jax.stages.Compiled | None] = lambda: None
    keep: Callable[[jax.stages.Compiled], None] = lambda made: None
    claim: Callable[[], AbstractContextManager[bool]] = lambda: nullcontext(True)  # False: another engine compiles it
    name: str = "a program"  # as progress shows it
    # packed_step's arguments and static ones, if it is one
    step: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]] | None = None


def most_needed_first(buckets: Sequence[Bucket]) -> list[Bucket]:
    """Returns all buckets in the order in which they are compiled. The bucket that holds every step comes first (see
    options.resolve). The others follow by decodes, descending; among equal decodes, fewer prompt tokens come first."""
    top = max(buckets, key=lambda r: (r.tokens, r.chunks, r.decodes, -r.rows))
    return [top, *sorted((r for r in buckets if r != top), key=lambda r: (-r.decodes, r.tokens, r.rows))]


def own_settings() -> Callable[[], AbstractContextManager[None]]:
    """Returns the JAX settings that context managers have changed in this thread. They come as a context manager that
    applies them in another thread."""
    states = jax_config.config_states.values()
    own = [(state, value) for state in states if (value := state.get_local()) is not jax_config.config_ext.unset]

    @contextlib.contextmanager
    def settings() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for state, value in own:
                stack.enter_context(state(value))
            yield

    return settings


class Compiler:
    """Compiles programs in its own `threads` (None: one a core), in the order in which they are added, and counts them
    in `compiled`.

    Tracing holds Python's lock, so only one program is traced at a time. Then the others don't slow the first one.
    `processes` is the number of other processes that trace steps (tracing.py). Steps that they cannot trace are traced
    here, with a warning if it `tells`. A program that another engine compiles is taken from its file. Each program is
    compiled with the JAX settings of the thread that added it. Its future raises any error of its compilation.
    `progress` decides whether standard error shows progress; None means only on a terminal.
    """

    def __init__(
        self,
        compiled: Compiled,
        progress: bool | None = None,
        processes: int = 0,
        tells: bool = True,
        threads: int | None = None,
    ):
        self._compiled, self._closed, self._progress = compiled, threading.Event(), progress
        self._lock, self._tracing = threading.Lock(), threading.Lock()
        self._turns = threading.Semaphore(max(1, processes))  # to trace
        self._busy: dict[int, str] = {}  # by thread, the name of the program that it compiles
        self._since = 0.0  # the time up to which compiled.seconds counts
        self._gate, self._ended, self._compiling = threading.Lock(), threading.Condition(), 0
        self._pool = ThreadPoolExecutor(threads or os.cpu_count(), "compile")
        self._tracers = Tracers(processes) if processes else None
        self._tells, self._reasons = tells, set[str]()  # why steps were traced here; each gives one warning

    def add(self, recipe: Recipe) -> "Future[jax.stages.Compiled]":
        return self._pool.submit(self._behind, recipe, own_settings())

    def now(self, recipe: Recipe) -> jax.stages.Compiled:
        """Compiles a program in this thread, which waits for it."""
        if self._progress or (self._progress is None and sys.stderr is not None and sys.stderr.isatty()):
            print(f"compiling a step of {recipe.name}", file=sys.stderr, flush=True)
        made = self._make(recipe, recipe.lower, nullcontext())
        with self._lock:
            self._compiled.first_use += 1
        return made

    def wait(self, jobs: Iterable[Future], of: Iterable[Future] = ()) -> None:
        """Waits until all jobs are done. Shows progress from the start, which counts the jobs of `of` too. Raises the
        error of a job that failed."""
        left = set(jobs)
        whole, terminal = left.union(of), sys.stderr is not None and sys.stderr.isatty()
        disable = sys.stderr is None or not (terminal if self._progress is None else self._progress)
        form, size = "compiling: {n_fmt} of {total_fmt} programs, {elapsed}{postfix}", shutil.get_terminal_size()
        shape = {"bar_format": form, "ncols": size.columns, "nrows": size.lines}
        with tqdm(total=len(whole), leave=not terminal, disable=disable, **shape) as bar:
            while left:
                done, left = wait_for(left, None if disable else PAUSE if terminal else LOG_PAUSE, FIRST_COMPLETED)
                for job in done:
                    job.result()
                if not disable:
                    bar.n = sum(job.done() for job in whole)
                    bar.set_postfix_str(self._working())

    def _working(self) -> str:
        """Returns text about the programs in progress and the number found in caches."""
        with self._lock:
            found, names = self._compiled.cache_hits + self._compiled.loaded, sorted(self._busy.values())
        return "; ".join([*([f"{found} from the cache"] if found else []), *names])

    def close(self) -> None:
        """Cancels jobs that have not begun, and waits for the others."""
        self._closed.set()
        if self._tracers is not None:
            self._tracers.close()
        self._pool.shutdown(cancel_futures=True)

    def _behind(self, recipe: Recipe, settings: Callable[[], AbstractContextManager[None]]) -> jax.stages.Compiled:
        with settings():
            return self._make(recipe, partial(self._lower, recipe), self._turns)

    def _lower(self, recipe: Recipe) -> jax.stages.Lowered:
        """Lowers a step in another process, or here, one at a time. Raises CancelledError once the compiler is
        closed."""
        if self._tracers is not None and recipe.step is not None:
            try:
                lowered = self._tracers.lower(*recipe.step())
                with self._lock:
                    self._compiled.elsewhere += 1
                return lowered
            except TracingFailed as why:
                with self._lock:
                    said = str(why) in self._reasons
                    self._reasons.add(str(why))
                if self._tells and not said:
                    warnings.warn(f"a step of {recipe.name} is traced in the engine's own process: {why}", stacklevel=2)
        with self._tracing:
            self._check_open()
            return recipe.lower()

    def _check_open(self, seconds: float = 0.0) -> None:
        """Waits so long. Raises CancelledError once the compiler is closed."""
        if self._closed.wait(seconds):
            raise CancelledError

    def _make(
        self, recipe: Recipe, lower: Callable[[], jax.stages.Lowered], turn: AbstractContextManager[Any]
    ) -> jax.stages.Compiled:
        until = time.monotonic() + LONGEST
        with self._counting(recipe.name):
            while True:
                with ExitStack() as claim:
                    begun = self._begin(recipe, lower, turn, claim, until)
                    made = self._compile(begun, recipe.name) if isinstance(begun, jax.stages.Lowered) else begun
                    if made is not None:
                        with self._lock:
                            self._compiled.programs += 1
                            self._compiled.loaded += made is begun
                        if made is not begun:
                            recipe.keep(made)
                        return made
                self._check_open(LOOK)

    def _compile(self, lowered: jax.stages.Lowered, name: str) -> jax.stages.Compiled:
        """Compiles a program beside others. XLA tries kernels on operands of its own, so the device's memory may be too
        little for several at once: then the program is compiled again while no other one is."""
        try:
            with self._beside():
                return lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            if not out_of_memory(error):
                raise
        with self._gate:
            self._check_open()
            with self._ended:
                self._ended.wait_for(lambda: not self._compiling)
            return _compiled(lowered, name)

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        """Waits for a program that is compiled alone, and counts one that is compiled beside others."""
        with self._gate, self._ended:
            self._compiling += 1
        try:
            yield
        finally:
            with self._ended:
                self._compiling -= 1
                self._ended.notify_all()

    def _begin(
        self,
        recipe: Recipe,
        lower: Callable[[], jax.stages.Lowered],
        turn: AbstractContextManager[Any],
        claim: ExitStack,
        until: float,
    ) -> jax.stages.Compiled | jax.stages.Lowered | None:
        """Returns a program from its file, or lowers it. Returns None while another engine compiles it, but not after
        `until`. A program is claimed when it is its turn to be traced: so engines share out those that are left."""
        if (found := recipe.find()) is not None:
            return found
        with turn:
            if not claim.enter_context(recipe.claim()) and time.monotonic() < until:
                return None
            found = recipe.find()  # it may have come meanwhile
            return lower() if found is None else found

    @contextlib.contextmanager
    def _counting(self, name: str) -> Iterator[None]:
        """Counts the time, and this thread's hits of JAX's persistent cache."""
        me = threading.get_ident()
        with self._lock:
            if not self._busy:
                self._since = time.perf_counter()
                jax.monitoring.register_event_listener(self._count_hit)
            self._busy[me] = name
        try:
            yield
        finally:
            with self._lock:
                del self._busy[me]
                if not self._busy:
                    jax.monitoring.unregister_event_listener(self._count_hit)
                now = time.perf_counter()
                self._compiled.seconds += now - self._since
                self._since = now

    def _count_hit(self, event: str, **about: object) -> None:
        if event == CACHE_HIT and threading.get_ident() in self._busy:
            with self._lock:
                self._compiled.cache_hits += 1


def _compiled(lowered: jax.stages.Lowered, name: str) -> jax.stages.Compiled:
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if not out_of_memory(error):
            raise
        why = f"the device has no memory left to compile a step of {name}"
        raise NoRoomError(f"{why}: take fewer pages (num_pages), or slots (max_slots)") from error
