"""Keeps the samples that have not ended, and the events that tell of them."""

import contextlib
import heapq
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from functools import partial

from jllm.config import LlamaConfig
from jllm.engine.metrics import RequestCounts, Times
from jllm.engine.output import OutputText
from jllm.engine.request import Event, SamplingParams
from jllm.engine.samples import PendingEvent, Texts, keep
from jllm.engine.sequence import Sequence
from jllm.errors import RequestError
from jllm.files.tokenizer import Tokenizer
from jllm.model.model import end_ids
from jllm.step.state import NOT_FINITE, Outputs

Drawn = tuple[Sequence, int, int, tuple[int, ...]]  # sequence, its rows in a step, the first, their tokens
# A named tuple's own class makes it in two calls, where these make it in one.
_event, _pending = partial(tuple.__new__, Event), partial(tuple.__new__, PendingEvent)
CUT = ("abort", "deadline")  # finish reasons of samples that were cut off


@dataclass
class Samples:
    """Holds the samples of one request."""

    started: int = 0  # ever: the next sample index
    unfinished: dict[int, Sequence] = field(default_factory=dict)  # by sample index


class Ledger:
    """Keeps an engine's samples from submission to completion, and makes the events that tell of them.

    It also keeps the counts and times of metrics. The scheduler keeps slots and pages."""

    def __init__(self, config: LlamaConfig, tokenizer: Tokenizer | None):
        self._ends, self._tokenizer = end_ids(config, tokenizer), tokenizer
        self.counts, self.times = RequestCounts(), Times()  # for others to read
        self._requests: dict[int, Samples] = {}  # those with unfinished samples
        self._owed: dict[tuple[int, int], Sequence] = {}  # samples whose completion news() has not returned
        self._deadlines: list[tuple[float, int]] = []  # a heap of times and requests, which may have ended
        self._texts = Texts()

    @property
    def has_samples(self) -> bool:
        """Returns whether any sample has not ended."""
        return bool(self._requests)

    @property
    def has_news(self) -> bool:
        """Returns whether there is something that news() has not returned."""
        return self._texts.waiting

    def add(self, seq: Sequence) -> None:
        """Takes in a sample, with the output that it begins with. Its request is a new one, or has others."""
        decoder, params = None if self._tokenizer is None else self._tokenizer.stream_decoder(seq.prompt), seq.params
        seq.stop_ids = self._stop_ids(params)
        seq.ends, seq.plain = seq.stop_ids | {-1, NOT_FINITE}, not params.stop and params.logprobs is None
        seq.most = seq.max_length - len(seq.prompt)
        seq.answer = OutputText(decoder, params.stop)
        seq.answer.extend(seq.output)
        self._owed[seq.request_id, seq.sample] = seq
        request = self._requests.setdefault(seq.request_id, Samples())
        request.started = max(request.started, seq.sample + 1)
        request.unfinished[seq.sample] = seq
        seq.live = True

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        """Returns the tokens that end a sample. Stop strings that are special tokens count, as no text shows them."""
        found = {*params.stop_token_ids, *(() if params.ignore_eos else self._ends)}
        if isinstance(self._tokenizer, Tokenizer):
            found |= {id for stop in params.stop if (id := self._tokenizer.special_id(stop)) is not None}
        return frozenset(found)

    def request(self, request_id: int) -> Samples:
        """Returns a request that has not ended. Raises RequestError for others."""
        if request_id not in self._requests:
            raise RequestError(f"request {request_id} is not running: it has finished or was never submitted")
        return self._requests[request_id]

    def find(self, request_id: int, sample: int) -> Sequence:
        """Returns a sample. Raises RequestError for one that is not there, or has ended."""
        request = self._requests.get(request_id)
        if request is None or sample not in request.unfinished:
            raise RequestError(f"request {request_id} has no running sample {sample}")
        return request.unfinished[sample]

    def submitted(self, prompt_tokens: int) -> None:
        """Counts a new request, whose samples were added."""
        self.counts.requests += 1
        self.counts.prompt_tokens += prompt_tokens

    def step_dispatched(self, prompt_tokens: int, decoded: int, rows: int, pages: int) -> None:
        """Counts a step: its prompt tokens, its decoded rows, all `rows` that it computes, and the pages in use."""
        self.counts.steps += 1
        self.counts.tokens += prompt_tokens + decoded
        self.counts.rows += rows
        self.counts.prefill_tokens += prompt_tokens
        self.counts.pages_peak = max(self.counts.pages_peak, pages)

    def device_failed(self) -> None:
        """Counts a device error. Samples go on once their lost tokens are computed again."""
        self.counts.device_errors += 1

    def end_after(self, request_id: int, seconds: float) -> None:
        """Sets a request's deadline, after which late() yields it."""
        heapq.heappush(self._deadlines, (time.perf_counter() + seconds, request_id))

    def late(self) -> Iterator[Samples]:
        """Yields each request whose deadline has passed, once."""
        while self._deadlines and self._deadlines[0][0] <= time.perf_counter():
            if request := self._requests.get(heapq.heappop(self._deadlines)[1]):
                yield request

    def take(
        self, drawn: Iterable[Drawn], outputs: Outputs, version: int, now: float
    ) -> Iterator[tuple[Sequence, int, tuple[int, ...], str | None]]:
        """Takes in what a step of these weights drew, read at `now`. What samples go on with is news.

        Yields each sample that had not ended before, its rows, its tokens that count, and the reason of its end. If
        there is a reason, the caller calls end(). Most of the host's work for a token is here: each call in this loop
        is made once a token."""
        counts, events = self.counts, self._texts.coming
        lasts: list[float] = []  # read times of previous tokens
        for seq, rows, row, tokens in drawn:
            if not seq.live:  # ended by an earlier token or an abort; the surplus is dropped
                continue
            kept, reason, answer = tokens, None, seq.answer
            if seq.plain and len(seq.output) + len(tokens) < seq.most and seq.ends.isdisjoint(tokens):  # as most are
                if answer.text_can_be_late:
                    events.append(_pending((seq, tokens, None, 0.0)))
                else:  # there is no text
                    events.append(_event((seq.request_id, seq.sample, "", answer.relay(tokens), None, ())))
            else:
                kept, reason = keep(seq, tokens, outputs, row)
                if not kept and reason is None:
                    raise AssertionError(f"request {seq.request_id}: the device ended a sequence that the host runs")
                if reason is None and answer.text_can_be_late:
                    events.append(PendingEvent(seq, kept))
                elif reason is None and (event := PendingEvent(seq).event()):
                    events.append(event)
            if len(kept) == 1:
                seq.versions.append(version)
            elif kept:  # tokens of one step have no time between them
                seq.versions += [version] * len(kept)
                lasts += [now] * (len(kept) - 1)
            if kept:
                counts.output_tokens += len(kept)
                if seq.first_token is None:
                    seq.first_token = now - seq.submitted
                    self.times.first_token.add(seq.first_token)
                else:
                    lasts.append(seq.last_token)
                seq.last_token = now
            yield seq, rows, kept, reason
        for last, times in Counter(lasts).items():  # few: most sequences had their last token in the step before
            self.times.inter_token.add(now - last, times)

    def end(self, seq: Sequence, reason: str, now: float, tokens: List[int] = ()) -> str:
        """Ends a sample, and returns the reason: "stop" for "length" if its last bytes complete a stop string.

        `now` is when its last token was read. `tokens` are its newest ones, whose text comes with the next events."""
        answer = seq.answer
        if reason == "length" and not answer.text_can_be_late:
            answer.finish()
            if answer.stopped:  # bytes held back completed a stop string
                reason = "stop"
        self._remove(seq)
        if seq.request_id not in self._requests:
            self.counts.requests_aborted += reason in CUT
            self.counts.requests_finished += reason not in CUT
        total = now - seq.submitted
        if reason not in CUT:
            self.times.end_to_end.add(total)
        self._texts.coming.append(PendingEvent(seq, tokens if answer.text_can_be_late else (), reason, total))
        return reason

    def forget(self, seq: Sequence) -> None:
        """Drops a sample without an event."""
        self._remove(seq)
        del self._owed[seq.request_id, seq.sample]

    def _remove(self, seq: Sequence) -> None:
        unfinished = self._requests[seq.request_id].unfinished
        del unfinished[seq.sample]
        seq.live = False
        if not unfinished:
            del self._requests[seq.request_id]

    def news(self, *, at_once: bool) -> list[Event]:
        """Returns what is new since the last call.

        With `at_once` it returns all of it. Else text of many tokens comes with the next call."""
        events = self._texts.news(now=at_once)
        for event in events:
            if event.completion is not None:
                self._owed.pop((event.id, event.sample), None)
        return events

    def end_all(self, reason: str) -> tuple[Event, ...]:
        """Returns what news() has not returned, and the completions of all that is left."""
        events, now = self._texts.rest(), time.perf_counter()
        ended = {(event.id, event.sample) for event in events if event.completion is not None}
        left = [seq for key, seq in self._owed.items() if key not in ended]
        for seq in left:
            with contextlib.suppress(Exception):  # its text may be what failed
                seq.answer.finish()
        self.counts.requests_aborted += len(self._requests)
        return (*events, *self._texts.rest(PendingEvent(seq, (), reason, now - seq.submitted) for seq in left))

    def reset_metrics(self) -> None:
        """Resets counters and times; samples go on."""
        self.counts, self.times = RequestCounts(), Times()

    def join(self) -> None:
        """Joins the thread that makes texts."""
        self._texts.join()
