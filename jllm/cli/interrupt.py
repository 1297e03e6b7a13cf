"""Handles Ctrl-C without a KeyboardInterrupt.

Python raises KeyboardInterrupt wherever the main thread is. A half-done import may turn it into another exception, and
a C library's callback may swallow it. So our own handler ends the process, or sets a flag that the run reads.
"""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

INTERRUPTED = 130  # the exit status of shells for SIGINT


@dataclass
class Interrupt:
    """Reacts to Ctrl-C. By default it ends the process at once. If `deferred`, the first Ctrl-C only sets
    `asked`. The next raises KeyboardInterrupt, unless `patient`."""

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
            os._exit(INTERRUPTED)  # nothing is lost: there are no results yet
        if self.asked and not self.patient:
            raise KeyboardInterrupt
        self.asked = True

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Makes Ctrl-C in the block only set `asked`, which stays set."""
        before = self.deferred, self.patient
        self.asked, self.deferred, self.patient = False, True, True
        try:
            yield
        finally:
            self.deferred, self.patient = before

    @contextlib.contextmanager
    def raised(self) -> Iterator[None]:
        """Makes Ctrl-C in the block raise KeyboardInterrupt."""
        before = self.deferred, self.patient
        self.asked, self.deferred, self.patient = True, True, False
        try:
            yield
        finally:
            (self.deferred, self.patient), self.asked = before, False


@contextlib.contextmanager
def catch_interrupts() -> Iterator[Interrupt]:
    """Handles SIGINT in the block. Does nothing outside the main thread, or if SIGINT is ignored, as in a shell's
    background job."""
    interrupt, before = Interrupt(), signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN or before is None:  # None: a handler from outside Python
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
