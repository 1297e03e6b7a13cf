"""Reads messages from a terminal, with line editing, or from a pipe, one per line."""

import contextlib
import sys
from functools import partial

from jllm.cli.display import in_colour
from jllm.cli.interrupt import Interrupt
from jllm.errors import InputFileError, RequestError

BOLD, PLAIN = "\x1b[1m", "\x1b[0m"


class Lines:
    """Reads messages. Ctrl-C drops the line on a terminal, and ends the process in a pipe."""

    def __init__(self, interrupt: Interrupt):
        self._interrupt = interrupt
        self.terminal = sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()
        self._readline = None
        if self.terminal:
            with contextlib.suppress(ImportError):  # some systems lack it
                import readline

                readline.parse_and_bind("set enable-bracketed-paste on")  # a pasted text is one message
                self._readline = readline

    def read(self, before: str = "") -> str | None:
        """Returns the next line, or None at the end. `before` is text that the user may edit."""
        if not self.terminal:
            return self._from_pipe()
        while True:
            with contextlib.suppress(KeyboardInterrupt), self._interrupt.raised():
                return self._from_terminal(before)
            print()

    def edit(self, text: str) -> str | None:
        """Returns the text after the user edited it on a terminal."""
        if self._readline is None:
            raise RequestError("give the new message: /edit TEXT")
        return self.read(text)

    def _from_pipe(self) -> str | None:
        try:
            line = "" if sys.stdin is None else sys.stdin.readline()
        except UnicodeDecodeError as error:
            raise InputFileError(f"standard input is not UTF-8 text: {error}") from None
        return line.removeprefix("\ufeff").rstrip("\r\n") if line else None

    def _from_terminal(self, before: str) -> str | None:
        lines: list[str] = []
        try:
            while True:
                self._prefill(before)
                line = input(self._mark(". " if lines else "> "))
                if not line.endswith("\\"):
                    return "\n".join([*lines, line])
                lines.append(line[:-1])
                before = ""
        except EOFError:
            print()
            return None
        except UnicodeDecodeError:
            raise RequestError("the message is not UTF-8 text") from None

    def _prefill(self, text: str) -> None:
        if self._readline is not None:
            self._readline.set_startup_hook(partial(self._readline.insert_text, text))

    def _mark(self, text: str) -> str:
        """Returns a prompt. readline must know which characters take no room on the screen."""
        if not in_colour(sys.stdout):
            return text
        start, end = ("\001", "\002") if self._readline is not None else ("", "")
        return f"{start}{BOLD}{end}{text}{start}{PLAIN}{end}"
