"""Text of new tokens. Where a step has many of them, it is made in a thread of its own while the loop goes on.

Making text takes as long as all else that the loop does with a token. Only texts without stop strings are made
later: what stops a sequence must be known when its tokens are read.
"""

import contextlib
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

from jllm.engine.request import Event
from jllm.engine.samples import Live

FEW = 64  # tokens, whose text is made at once: a step of so few is waiting for its device, not for its host


class PendingEvent(NamedTuple):
    """What a sample's next event will be made of: new tokens, the reason of its end, or both."""

    live: Live
    tokens: Sequence[int] = ()
    reason: str | None = None
    seconds: float = 0.0  # from its submission to its end

    def event(self) -> Event | None:
        """Returns none where nothing is certain yet. Each of a sample's news once, in order."""
        seq, output = self.live.seq, self.live.output
        key = seq.request_id, seq.sample
        output.extend(self.tokens)
        if self.reason is None:
            text, tokens, logprobs = self.live.take(final=False)
            return Event(*key, text, tokens, None, logprobs) if text or tokens else None
        output.finish()
        text, tokens, logprobs = self.live.take(final=True)
        completion = self.live.completion(self.reason, self.seconds, text=output.decoder is not None)
        return Event(*key, text, tokens, completion, logprobs)


class Texts:
    """Makes events of news, some of them one call later: which ones depends on their number alone, never on time."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._late: Future[None] | None = None
        self._news: deque[PendingEvent | Event] = deque()  # whose events are to be made
        self._made: list[Event] = []

    @property
    def waiting(self) -> bool:
        """Returns whether there are events that take has not returned."""
        return self._late is not None

    def take(self, news: Sequence[PendingEvent | Event], *, now: bool) -> list[Event]:
        """Returns the events that the last call left, then those of `news`, unless these are many: they come with the
        next call. With `now` all come. Raises what their making raised."""
        try:
            if self._late is not None:
                self._late.result()
        finally:
            self._news.extend(news)
        self._late = None
        if now or sum(isinstance(one, PendingEvent) and one.live.output.text_can_be_late for one in news) <= FEW:
            self._make()
            made, self._made = self._made, []
            return made
        made, self._made = self._made, []
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "texts")
        self._late = self._thread.submit(self._make)
        return made

    def rest(self, news: Iterable[PendingEvent | Event]) -> list[Event]:
        """Returns the events that take has not returned, those of `news` after them: all that can be made, where the
        making of some fails."""
        if self._late is not None:
            wait([self._late])
        self._late = None
        self._news.extend(news)
        while self._news:
            with contextlib.suppress(Exception):  # of one sample; the others have nothing to do with it
                self._make()
        made, self._made = self._made, []
        return made

    def _make(self) -> None:
        """Events of all news, in order. After an exception, what was made is kept, and a call goes on behind it."""
        while self._news:
            one = self._news.popleft()
            event = one if isinstance(one, Event) else one.event()
            if event is not None:
                self._made.append(event)

    def close(self) -> None:
        """Joins the thread; what was not taken is dropped."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        self._late = None
        self._news.clear()
