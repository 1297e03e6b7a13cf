"""Programs compiled in threads, the most needed first, or by the step that needs them now; and how many there were."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

import jax
from jax._src import config as jax_config
from tqdm import tqdm

from jllm.batch import Bucket

CACHE_HIT = "/jax/compilation_cache/cache_hits"


@dataclass
class Compiled:
    """What was compiled for an engine so far: ahead of requests, behind their steps, or at a step's first use."""

    programs: int = 0
    first_use: int = 0  # those of them that a step had to wait for
    seconds: float = 0.0  # while at least one was made, tracing included
    cache_hits: int = 0  # programs that JAX's persistent cache had
    loaded: int = 0  # programs that files had (executables.py)


class Recipe(NamedTuple):
    """How a program is made: where it may be found, how it is traced and lowered, and what is done with a new one."""

    lower: Callable[[], jax.stages.Lowered]
    find: Callable[[], jax.stages.Compiled | None] = lambda: None
    keep: Callable[[jax.stages.Compiled], None] = lambda made: None


def most_needed_first(buckets: Sequence[Bucket]) -> list[Bucket]:
    """All buckets: first the one that holds every step (see options.resolve), then by decodes,
    descending, and at equal decodes those with fewer prompt tokens first."""
    top = max(buckets, key=lambda r: (r.tokens, r.chunks, r.decodes, -r.rows))
    return [top, *sorted((r for r in buckets if r != top), key=lambda r: (-r.decodes, r.tokens, r.rows))]


def own_settings() -> Callable[[], AbstractContextManager[None]]:
    """The JAX settings that context managers have changed in this thread, as a context manager for another thread."""
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
    """Makes programs in threads of its own, in the order in which they are added, and counts them in `compiled`.

    Tracing holds Python's lock, so only one program is traced at a time: the first one is not slowed by the others.
    Each program is made with the JAX settings of the thread that added it. Its future raises what making it raised.
    """

    def __init__(self, compiled: Compiled):
        self._compiled, self._closed = compiled, False
        self._lock, self._tracing = threading.Lock(), threading.Lock()
        self._busy: set[int] = set()  # threads that are making a program
        self._since = 0.0  # the time up to which compiled.seconds counts
        self._pool = ThreadPoolExecutor(os.cpu_count(), "compile")

    def add(self, recipe: Recipe) -> "Future[jax.stages.Compiled]":
        return self._pool.submit(self._behind, recipe, own_settings())

    def now(self, recipe: Recipe) -> jax.stages.Compiled:
        """Makes a program in this thread, which waits for it."""
        made = self._make(recipe, contextlib.nullcontext())
        with self._lock:
            self._compiled.first_use += 1
        return made

    def wait(self, jobs: Iterable[Future]) -> None:
        """Until all are done, with progress on a terminal. Raises what the first of them to fail raises."""
        jobs = list(jobs)
        with tqdm(None, "compiling", len(jobs), unit="program", delay=2, leave=False, disable=None) as bar:
            for job in as_completed(jobs):
                job.result()
                cached = self._compiled.cache_hits + self._compiled.loaded
                bar.set_postfix_str(f"{cached} from the cache", refresh=False)
                bar.update()

    def close(self) -> None:
        """What has not begun never does; waits for the rest."""
        self._closed = True
        self._pool.shutdown(cancel_futures=True)

    def _behind(self, recipe: Recipe, settings: Callable[[], AbstractContextManager[None]]) -> jax.stages.Compiled:
        with settings():
            return self._make(recipe, self._tracing)

    def _make(self, recipe: Recipe, tracing: AbstractContextManager) -> jax.stages.Compiled:
        with self._counting():
            made = recipe.find()
            loaded = made is not None
            if made is None:
                with tracing:
                    if self._closed:
                        raise CancelledError
                    lowered = recipe.lower()
                made = lowered.compile()
            with self._lock:
                self._compiled.programs += 1
                self._compiled.loaded += loaded
            if not loaded:
                recipe.keep(made)
            return made

    @contextlib.contextmanager
    def _counting(self) -> Iterator[None]:
        """Counts the time, and the hits of JAX's persistent cache in this thread."""
        me = threading.get_ident()
        with self._lock:
            if not self._busy:
                self._since = time.perf_counter()
                jax.monitoring.register_event_listener(self._count_hit)
            self._busy.add(me)
        try:
            yield
        finally:
            with self._lock:
                self._busy.remove(me)
                if not self._busy:
                    jax.monitoring.unregister_event_listener(self._count_hit)
                now = time.perf_counter()
                self._compiled.seconds += now - self._since
                self._since = now

    def _count_hit(self, event: str, **about: object) -> None:
        if event == CACHE_HIT and threading.get_ident() in self._busy:
            with self._lock:
                self._compiled.cache_hits += 1
