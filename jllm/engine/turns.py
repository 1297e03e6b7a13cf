"""One caller at a time: whoever calls a method of an engine waits for its turn, in the order of the calls."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Concatenate, Protocol

from jllm.errors import EngineBusy


class Turns:
    """A lock that is fair: a thread that steps without a pause keeps nobody waiting for longer than one step. (After a
    threading.Lock is released, the thread that had it is the likeliest to get it again.)"""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()  # the first one has the turn
        self._owner: int | None = None  # the thread that has it
        self._stepping = False  # whether a thread is inside step(), or waits to be

    @contextmanager
    def take(self, *, to_step: bool = False) -> Iterator[None]:
        """Waits for the turn and holds it. EngineBusy for a thread that has it already, say from a signal handler; and
        for a second one that wants it `to_step`, as the two would share the events."""
        me, thread = object(), threading.get_ident()
        with self._changed:
            if to_step and self._stepping:
                raise EngineBusy("step() is running already: let one thread step, and others submit and abort")
            if self._owner == thread:
                raise EngineBusy("this thread is inside a call of this engine: call again once it has returned")
            self._waiting.append(me)
            self._stepping |= to_step
            try:
                while self._waiting[0] is not me:
                    self._changed.wait()
                self._owner = thread
            except BaseException:  # Ctrl-C while it waits
                self._leave(me, to_step)
                raise
        try:
            yield
        finally:
            with self._changed:
                self._owner = None
                self._leave(me, to_step)

    def _leave(self, me: object, to_step: bool) -> None:
        self._waiting.remove(me)
        self._stepping &= not to_step
        self._changed.notify_all()


class HasTurns(Protocol):
    _turns: Turns


def in_turn[S: HasTurns, **P, R](method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """A method that waits for its turn."""

    @wraps(method)
    def wrapper(self: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._turns.take():
            return method(self, *args, **kwargs)

    return wrapper
