"""Lets one caller at a time into an engine: callers of its methods wait for their turn, in the order of the calls."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Concatenate

from jllm.errors import EngineBusy


class Turns:
    """Is a fair lock: a thread that steps without a pause keeps others waiting for at most one step.

    (After a threading.Lock is released, the same thread is the likeliest to get it again.)
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._threads: dict[int, bool] = {}  # by thread, whether it steps; the first has the turn, the others wait

    @contextmanager
    def turn(self, *, to_step: bool = False) -> Iterator[None]:
        """Waits for the turn and holds it.

        Raises EngineBusy for a thread that has it or waits for it already: a signal handler's call would wait for the
        call that it interrupts. Raises it also for a second thread with `to_step`, since the two would share the
        events.
        """
        me, queued = threading.get_ident(), False
        try:
            with self._changed:
                if to_step and any(self._threads.values()):
                    raise EngineBusy("step() is running already: let one thread step, and others submit and abort")
                if me in self._threads:
                    raise EngineBusy("this thread is inside a call of this engine: call again once it has returned")
                queued, self._threads[me] = True, to_step
                while next(iter(self._threads)) != me:
                    self._changed.wait()
            yield
        finally:
            if queued:
                with self._changed:
                    self._threads.pop(me, None)
                    self._changed.notify_all()


def in_turn[S, **P, R](method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Makes a method wait for its turn, by the Turns that its object has as `_turns`."""

    @wraps(method)
    def wrapper(self: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._turns.turn():
            return method(self, *args, **kwargs)

    return wrapper
