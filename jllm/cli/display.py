"""What appears on standard output and standard error."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import TextIO

from jllm.engine.request import Event
from jllm.errors import OutputError, counted

Key = tuple[int, int]  # prompt and sample


def write_stdout(text: str) -> None:
    """Writes at once. Raises OutputError where that fails, but BrokenPipeError when the reader has gone."""
    encoding = sys.stdout.encoding or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except OSError as error:
        # What is still buffered goes nowhere, or Python would try, and complain, once more at its end.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise
        raise OutputError(f"cannot write to standard output: {error.strerror or error}") from None


def one_line(text: object) -> str:
    return " ".join(str(text).splitlines())


def in_colour(stream: TextIO) -> bool:
    """Returns whether a stream is a terminal that shows colours and may (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class InOrder:
    """Shows several completions one after the other, though they grow side by side: the first as it comes, the next,
    once that has ended, with all that it has by then."""

    def __init__(self, keys: Iterable[Key], before: Callable[[Key], str], after: str, write: Callable[[str], None]):
        self._held = dict.fromkeys(keys, "")
        self._before, self._after, self._write = before, after, write
        self._ended: set[Key] = set()
        self._shown: Key | None = None  # the one that is on screen, unfinished

    def add(self, key: Key, text: str, last: bool) -> None:
        self._held[key] += text
        if last:
            self._held[key] += self._after
            self._ended.add(key)
        self.show()

    def show(self) -> None:
        """What may appear by now."""
        while self._held:
            key = next(iter(self._held))
            self._show(key)
            if key not in self._ended:
                return
            del self._held[key]

    def show_rest(self) -> None:
        """All that is there, when no more will come; what was not finished ends as it is."""
        for key, text in self._held.items():
            if text or key == self._shown:
                self._show(key)
                if key not in self._ended:
                    self._write(self._after)
        self._held.clear()

    def _show(self, key: Key) -> None:
        text, self._held[key] = self._held[key], ""
        if key != self._shown:
            text, self._shown = self._before(key) + text, key
        if text:
            self._write(text)


class Speed:
    """Counts what comes out of the engine, for the last line on standard error."""

    def __init__(self, started: float, *notes: str):
        self.started, self.submitted, self.notes = started, time.perf_counter(), notes
        self.tokens = 0
        self.first: float | None = None

    def count(self, event: Event) -> None:
        self.tokens += len(event.token_ids)
        if self.first is None and event.token_ids:
            self.first = time.perf_counter() - self.submitted

    @property
    def rate(self) -> float:
        return self.tokens / max(time.perf_counter() - self.submitted, 1e-9)

    def line(self, *more: str) -> str:
        seconds = time.perf_counter() - self.submitted
        notes = [] if self.first is None else [f"first token after {self.first:.2f} s"]
        notes += [f"ready after {self.submitted - self.started:.1f} s", *self.notes, *more]
        return f"{counted(self.tokens, 'token')} in {seconds:.2f} s: {self.rate:.1f} tokens/s ({', '.join(notes)})"
