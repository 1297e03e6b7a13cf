"""Programs compiled in threads ahead of their first call, the most needed first."""

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
from tqdm import tqdm

from jllm.batch import Rung

T = TypeVar("T")
Keep = Callable[[jax.stages.Compiled], None]
CACHE_HIT = "/jax/compilation_cache/cache_hits"


@dataclass
class Compiled:
    """What an engine had compiled ahead so far."""

    programs: int = 0
    seconds: float = 0.0  # until the last of them was there, tracing included
    cache_hits: int = 0  # programs that JAX's persistent cache had
    loaded: int = 0  # programs that files had (executables.py)


def most_needed_first(ladder: Sequence[Rung]) -> list[Rung]:
    """A ladder's rungs: first the one that holds every step, then those with more decodes, without prompt tokens before
    with them."""
    top = max(ladder, key=lambda r: (r.decodes, r.tokens, r.chunks))
    return [top, *sorted((r for r in ladder if r != top), key=lambda r: (-r.decodes, r.tokens))]


class Compiler:
    """Compiles programs in threads of its own in the order in which they come, and adds them to `compiled`.

    Tracing is not for threads: JAX's context managers (64-bit mode, say) are the calling thread's own. What a program's
    compilation raises, its future does.
    """

    def __init__(self, compiled: Compiled):
        self._compiled, self._start, self._before = compiled, time.perf_counter(), compiled.seconds
        self._lock, self._threads = threading.Lock(), set[int]()
        self._unfinished, self._last, self._listens = 0, False, True
        self._pool = ThreadPoolExecutor(os.cpu_count(), "compile", lambda: self._threads.add(threading.get_ident()))
        jax.monitoring.register_event_listener(self._count_hit)

    def add(self, lowered: jax.stages.Lowered, keep: Keep = lambda made: None) -> "Future[jax.stages.Compiled]":
        """keep is called with the program, in the thread that made it, before the future is done."""
        return self._submit(self._compile, lowered, keep)

    def load(self, find: Callable[[], jax.stages.Compiled | None]) -> "Future[jax.stages.Compiled | None]":
        """A program that a file may have."""
        return self._submit(self._find, find)

    def wait(self, jobs: Iterable[Future]) -> None:
        """Until all are done, with progress on a terminal. Raises what the first of them to fail raises."""
        jobs = list(jobs)
        with tqdm(None, "compiling", len(jobs), unit="program", delay=2, leave=False, disable=None) as bar:
            for job in as_completed(jobs):
                job.result()
                cached = self._compiled.cache_hits + self._compiled.loaded
                bar.set_postfix_str(f"{cached} from the cache", refresh=False)
                bar.update()

    def leave(self) -> None:
        """No more programs come; those that came go on."""
        self._pool.shutdown(wait=False)
        with self._lock:
            self._last = True
            self._stop_listening()

    def close(self) -> None:
        """What has not begun never does; waits for the rest."""
        self._pool.shutdown(cancel_futures=True)
        with self._lock:
            self._last, self._unfinished = True, 0
            self._stop_listening()

    def _submit(self, work: Callable[..., T], *arguments: Any) -> "Future[T]":
        with self._lock:
            self._unfinished += 1
        return self._pool.submit(self._finish, work, arguments)

    def _finish(self, work: Callable[..., T], arguments: tuple[Any, ...]) -> T:
        try:
            return work(*arguments)
        finally:
            with self._lock:
                self._unfinished -= 1
                self._stop_listening()

    def _compile(self, lowered: jax.stages.Lowered, keep: Keep) -> jax.stages.Compiled:
        made = lowered.compile()
        self._count(loaded=0)
        keep(made)
        return made

    def _find(self, find: Callable[[], jax.stages.Compiled | None]) -> jax.stages.Compiled | None:
        found = find()
        if found is not None:
            self._count(loaded=1)
        return found

    def _count(self, loaded: int) -> None:
        with self._lock:
            self._compiled.programs += 1
            self._compiled.loaded += loaded
            self._compiled.seconds = self._before + time.perf_counter() - self._start

    def _stop_listening(self) -> None:
        """Once all is done."""
        if self._listens and self._last and self._unfinished <= 0:
            self._listens = False
            jax.monitoring.unregister_event_listener(self._count_hit)

    def _count_hit(self, event: str, **about: Any) -> None:
        if event == CACHE_HIT and threading.get_ident() in self._threads:
            with self._lock:
                self._compiled.cache_hits += 1
