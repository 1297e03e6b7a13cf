"""Writes to standard output and standard error."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import TextIO

from jllm.engine.request import Event
from jllm.errors import OutputError, counted

Key = tuple[int, int]  # index of the prompt and of the sample


def write_stdout(text: str) -> None:
    """Writes at once. Raises BrokenPipeError if the reader has gone, and OutputError for any other failure."""
    encoding = sys.stdout.encoding or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except OSError as error:
        # Drop the buffer: Python would try to write it at exit, and complain again.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise
        raise OutputError(f"cannot write to standard output: {error.strerror or error}") from None


def one_line(text: object) -> str:
    return " ".join(str(text).splitlines())


def in_colour(stream: TextIO) -> bool:
    """Returns whether a stream is a terminal with colours, and they are not disabled (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class InOrder:
    """Shows completions in order, although they grow at once. The first appears as it is generated. The next one
    appears once that has ended, with the text it has by then."""

    def __init__(self, keys: Iterable[Key], before: Callable[[Key], str], after: str, write: Callable[[str], None]):
        self._held = dict.fromkeys(keys, "")
        self._before, self._after, self._write = before, after, write
        self._ended: set[Key] = set()
        self._shown: Key | None = None  # the unfinished one on screen

    def add(self, key: Key, text: str, last: bool) -> None:
        self._held[key] += text
        if last:
            self._held[key] += self._after
            self._ended.add(key)
        self.show()

    def show(self) -> None:
        """Shows all text whose turn has come."""
        while self._held:
            key = next(iter(self._held))
            self._show(key)
            if key not in self._ended:
                return
            del self._held[key]

    def show_rest(self) -> None:
        """Shows the remaining text at the end of a run, finished or not."""
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
    """Counts the engine's tokens, for the last line on standard error."""

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
