"""Makes events of a sample's tokens: the client's half of a Sequence.

A thread makes the text of a step with many tokens, while the loop goes on. Making text takes as long as all else that
the loop does with a token. Only texts without stop strings are made late: a stop must be known when its tokens are
read.
"""

import contextlib
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as List
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple, cast

from jllm.engine.moved import Begun
from jllm.engine.plan import StepPlan
from jllm.engine.request import Completion, Event, SamplingParams, Timings, TokenLogprob
from jllm.engine.sequence import Sequence
from jllm.step.state import NOT_FINITE, Outputs

FEW = 64  # tokens whose text is made at once: a step of so few waits for its device, not for its host


def begun(seq: Sequence) -> Begun:
    """Returns a sample as far as it has come."""
    times = seq.submitted, seq.first_token, seq.last_token
    return Begun(seq.sample, tuple(seq.output), tuple(seq.logprobs), tuple(seq.versions), seq.prompt_scores, *times)


def go_on(seq: Sequence, begun: Begun) -> Sequence:
    """Returns a new sequence that begins with the tokens of another sample, and takes over its times."""
    seq.output, seq.logprobs, seq.prompt_scores = list(begun.output), list(begun.logprobs), dict(begun.scores)
    seq.versions = list(begun.versions)
    seq.submitted, seq.first_token, seq.last_token = begun.submitted, begun.first_token, begun.last_token
    return seq


def keep(seq: Sequence, tokens: tuple[int, ...], outputs: Outputs, row: int) -> tuple[tuple[int, ...], str | None]:
    """Takes in the tokens that a step drew in a sample's rows from `row` on.

    Returns the tokens that count, up to the first that ends it, and the reason of its end. A number below 0 is no
    token."""
    answer, room = seq.answer, seq.most - len(seq.output)
    for kept, token in enumerate(tokens, 1):
        if token < 0:
            return tokens[: kept - 1], "error" if token == NOT_FINITE else None
        ends = token in seq.stop_ids
        if ends and seq.params.include_end:
            seq.ending = token
        if outputs.logprobs is not None and seq.params.logprobs is not None and (not ends or seq.params.include_end):
            seq.logprobs.append(token_logprob(token, outputs, row + kept - 1, seq.params))
        if ends:
            return tokens[:kept], "stop"
        if not answer.text_can_be_late:
            answer.push(token)
            if answer.stopped:
                return tokens[:kept], "stop"
        if kept == room:
            return tokens[:kept], "length"
    return tokens, None


def token_logprob(token: int, outputs: Outputs, row: int, asked: SamplingParams) -> TokenLogprob:
    """Returns the log-probability of the token sampled in a row, with the most likely ones that were asked for."""
    own, best = outputs.logprobs, outputs.top_logprobs
    if asked.logprobs_mode == "tempered":
        assert outputs.tempered is not None
        own, best = outputs.tempered
    assert own is not None
    assert best is not None
    assert outputs.top_ids is not None
    n = asked.logprobs
    top = zip(outputs.top_ids[row, :n].tolist(), best[row, :n].tolist())
    return TokenLogprob(token, float(own[row]), tuple(top))


def take_prompt_scores(plan: StepPlan, outputs: Outputs) -> None:
    """Adds the scores of a step's prompt tokens to the samples that asked for them."""
    assert outputs.prompt_logprobs is not None
    assert outputs.prompt_ranks is not None
    assert outputs.prompt_best is not None
    assert outputs.prompt_best_logprobs is not None
    best = zip(outputs.prompt_best.tolist(), outputs.prompt_best_logprobs.tolist())
    scores = list(zip(outputs.prompt_logprobs.tolist(), outputs.prompt_ranks.tolist(), best))
    at = 0
    for chunk in plan.chunks:
        # After a sample's first token they stay: a prompt that is computed again may meet other weights.
        if chunk.seq.live and chunk.seq.params.prompt_logprobs and not chunk.seq.output:
            last = min(chunk.start + len(chunk.tokens), len(chunk.seq.prompt) - 1)
            for position in range(chunk.start, last):
                chunk.seq.prompt_scores[position + 1] = scores[at + position - chunk.start]
        at += len(chunk.tokens)


def completion(seq: Sequence, reason: str, seconds: float) -> Completion:
    """Returns a sample as it ended, `seconds` after its submission."""
    tokens, scored = tuple(seq.answer.tokens), seq.params.prompt_logprobs
    scores = [score for _, score in sorted(seq.prompt_scores.items())]
    return Completion(
        token_ids=tokens,
        text=None if seq.answer.decoder is None else seq.answer.text,
        finish_reason=reason,
        logprobs=None if seq.params.logprobs is None else tuple(seq.logprobs[: len(tokens)]),
        prompt_logprobs=tuple(logprob for logprob, *_ in scores) if scored else None,
        timings=Timings(seq.first_token, seconds, len(seq.prompt), len(tokens)),
        seed=seq.seed,
        prompt_ranks=tuple(rank for _, rank, _ in scores) if scored else None,
        prompt_best=tuple(best for *_, best in scores) if scored else None,
        versions=tuple(seq.versions[: len(tokens)]),
        taps=None if seq.taps is None else seq.taps.values(),
    )


class PendingEvent(NamedTuple):
    """Holds what a sample's next event is made of: new tokens, the reason of its end, or both."""

    seq: Sequence
    tokens: List[int] = ()
    reason: str | None = None
    seconds: float = 0.0  # from its submission to its end

    def event(self) -> Event | None:
        """Returns the event, or None while nothing is certain. Call it once, in the order of a sample's news."""
        seq, last = self.seq, self.reason is not None
        seq.answer.extend(self.tokens)
        if last:
            seq.answer.finish()
            if seq.ending is not None:
                seq.answer.end(seq.ending)
        text, tokens = seq.answer.news(final=last)
        logprobs: tuple[TokenLogprob, ...] = ()
        if seq.params.logprobs is not None:
            logprobs = tuple(seq.logprobs[seq.told : seq.told + len(tokens)])
            seq.told += len(tokens)
        ended = None if self.reason is None else completion(seq, self.reason, self.seconds)
        return Event(seq.request_id, seq.sample, text, tokens, ended, logprobs) if text or tokens or ended else None


class Texts:
    """Makes events of news, some of them one call later. Their number decides which ones, never time."""

    def __init__(self) -> None:
        self.coming: list[PendingEvent | Event] = []  # since the last call of news()
        self._thread: ThreadPoolExecutor | None = None
        self._late: Future[None] | None = None
        self._pending: deque[PendingEvent | Event] = deque()  # whose events are to be made
        self._made: list[Event] = []

    @property
    def waiting(self) -> bool:
        """Returns whether there is something that news() has not returned."""
        return bool(self.coming) or self._late is not None

    def news(self, *, now: bool) -> list[Event]:
        """Returns the events that the last call left, then those of what came since.

        If these are many, they come with the next call. With `now` all come. Raises what their making raised."""
        coming, self.coming = self.coming, []
        if self._late is None and not self._pending and PendingEvent not in set(map(type, coming)):
            made, self._made = [*self._made, *cast(list[Event], coming)], []
            return made
        try:
            if self._late is not None:
                self._late.result()
        finally:
            self._pending.extend(coming)
        self._late = None
        many = sum(isinstance(one, PendingEvent) and one.seq.answer.text_can_be_late for one in coming) > FEW
        if now or not many:
            self._make()
        made, self._made = self._made, []
        if many and not now:
            self._thread = self._thread or ThreadPoolExecutor(1, "texts")
            self._late = self._thread.submit(self._make)
        return made

    def rest(self, more: Iterable[PendingEvent] = ()) -> list[Event]:
        """Returns all events that news() has not returned, those of `more` last. It skips those that can't be made."""
        if self._late is not None:
            wait([self._late])
        self._late = None
        self._pending.extend((*self.coming, *more))
        self.coming = []
        while self._pending:
            with contextlib.suppress(Exception):  # of one sample; the others have nothing to do with it
                self._make()
        made, self._made = self._made, []
        return made

    def _make(self) -> None:
        """Makes the events of all news, in order. After an exception, a call goes on behind what raised it."""
        while self._pending:
            one = self._pending.popleft()
            event = one if isinstance(one, Event) else one.event()
            if event is not None:
                self._made.append(event)

    def join(self) -> None:
        """Joins the thread, and drops what news() has not returned."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        self._late = None
        self._pending.clear()
