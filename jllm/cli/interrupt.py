"""Ctrl-C, without a KeyboardInterrupt.

Raised wherever the main thread happens to be, that exception may come out of a half-done import as another one, or be
swallowed by a callback of a C library. So a handler of our own ends the process, or leaves a note that the run reads.
"""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

INTERRUPTED = 130  # what shells report for SIGINT


@dataclass
class Interrupt:
    """What Ctrl-C does: it ends the process at once, unless `deferred`; then the first only sets `asked`, and the next
    raises KeyboardInterrupt, unless `patient`."""

    deferred: bool = False
    asked: bool = False
    patient: bool = False
    tidy: Callable[[], object] | None = None  # called before it ends the process

    def handle(self, signum: int, frame: FrameType | None) -> None:
        if not self.deferred:
            with contextlib.suppress(OSError):
                os.write(2, b"\ninterrupted\n" if os.isatty(2) else b"interrupted\n")
            if self.tidy is not None:
                with contextlib.suppress(OSError):
                    self.tidy()
            os._exit(INTERRUPTED)  # nothing is lost: no result has been written so far
        if self.asked and not self.patient:
            raise KeyboardInterrupt
        self.asked = True

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """In the block, Ctrl-C sets `asked`, which stays set, and does nothing else."""
        before = self.deferred, self.patient
        self.asked, self.deferred, self.patient = False, True, True
        try:
            yield
        finally:
            self.deferred, self.patient = before

    @contextlib.contextmanager
    def raised(self) -> Iterator[None]:
        """In the block, Ctrl-C raises KeyboardInterrupt."""
        before = self.deferred, self.patient
        self.asked, self.deferred, self.patient = True, True, False
        try:
            yield
        finally:
            (self.deferred, self.patient), self.asked = before, False


@contextlib.contextmanager
def catch_interrupts() -> Iterator[Interrupt]:
    """Handles SIGINT while in the block; leaves it alone outside the main thread, and where it is ignored (a shell's
    background job)."""
    interrupt, before = Interrupt(), signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN or before is None:  # None: a handler that is not Python's
        yield interrupt
        return
    try:
        signal.signal(signal.SIGINT, interrupt.handle)
    except ValueError:  # not in the main thread
        yield interrupt
        return
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)
