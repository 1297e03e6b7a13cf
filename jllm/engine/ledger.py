"""The samples that have not ended: what their tokens make of them, and what is still to be told of them."""

import contextlib
import heapq
import time
from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as List

from jllm.config import LlamaConfig
from jllm.engine.guides import Matcher
from jllm.engine.live import Live, Samples, token_logprob
from jllm.engine.metrics import RequestCounts, Times
from jllm.engine.output import OutputText
from jllm.engine.request import Event
from jllm.engine.sequence import Sequence
from jllm.engine.texts import PendingEvent, Texts
from jllm.errors import RequestError
from jllm.state import NOT_FINITE, Outputs
from jllm.tokenizer import Tokenizer

CUT = ("abort", "deadline")  # the finish reasons of samples that were not let go on


class Ledger:
    """An engine's samples from submission to completion: their tokens and ends, the events that tell of them, and the
    counts and times of metrics. Slots and pages are the Scheduler's."""

    def __init__(self, config: LlamaConfig, tokenizer: Tokenizer | None):
        self._config, self._tokenizer = config, tokenizer
        self.counts, self.times = RequestCounts(), Times()  # for others to read
        self._requests: dict[int, Samples] = {}  # those with unfinished samples
        self._owed: dict[tuple[int, int], Live] = {}  # samples whose completion news() has not returned
        self._deadlines: list[tuple[float, int]] = []  # a heap of times and requests, which may have ended
        self._previous: Counter[float] = Counter()  # read times of previous tokens, with the number of sequences
        self._events: list[PendingEvent | Event] = []
        self._texts = Texts()

    @property
    def has_samples(self) -> bool:
        """Whether any sample has not ended."""
        return bool(self._requests)

    @property
    def has_news(self) -> bool:
        """Whether there is something that news() has not returned."""
        return bool(self._events or self._texts.waiting)

    def add(self, seq: Sequence, matcher: Matcher | None) -> Live:
        """A new sample; its request is a new one, or has others."""
        decoder = None if self._tokenizer is None else self._tokenizer.stream_decoder(seq.prompt)
        ends = () if seq.params.ignore_eos else self._config.eos_ids
        stop_ids = frozenset(ends) | frozenset(seq.params.stop_token_ids)
        live = Live(seq, OutputText(decoder, seq.params.stop), stop_ids, time.perf_counter(), matcher)
        self._owed[seq.request_id, seq.sample] = live
        request = self._requests.setdefault(seq.request_id, Samples())
        request.started = max(request.started, seq.sample + 1)
        request.unfinished[seq.sample] = live
        return live

    def request(self, request_id: int) -> Samples:
        """A request that has not ended. RequestError for others."""
        if request_id not in self._requests:
            raise RequestError(f"request {request_id} is not running: it has finished or was never submitted")
        return self._requests[request_id]

    def find(self, request_id: int, sample: int) -> Live:
        """RequestError for a sample that is not there, or has ended."""
        request = self._requests.get(request_id)
        if request is None or sample not in request.unfinished:
            raise RequestError(f"request {request_id} has no running sample {sample}")
        return request.unfinished[sample]

    def sample(self, seq: Sequence) -> Live | None:
        """A sequence's; None once it has ended."""
        request = self._requests.get(seq.request_id)
        return None if request is None else request.unfinished.get(seq.sample)

    def submitted(self, prompt_tokens: int) -> None:
        """A new request, whose samples were added."""
        self.counts.requests += 1
        self.counts.prompt_tokens += prompt_tokens

    def step_dispatched(self, prompt_tokens: int, decoded: int, rows: int, pages: int) -> None:
        """Counts a step: its prompt tokens and rows that decode, the `rows` that it computes, and the pages in use."""
        self.counts.steps += 1
        self.counts.tokens += prompt_tokens + decoded
        self.counts.rows += rows
        self.counts.prefill_tokens += prompt_tokens
        self.counts.pages_peak = max(self.counts.pages_peak, pages)

    def device_failed(self) -> None:
        """Samples go on, once what was lost is computed again."""
        self.counts.device_errors += 1

    def end_after(self, request_id: int, seconds: float) -> None:
        """late() has the request from then on."""
        heapq.heappush(self._deadlines, (time.perf_counter() + seconds, request_id))

    def late(self) -> Iterator[Samples]:
        """The requests whose time is over, each once."""
        while self._deadlines and self._deadlines[0][0] <= time.perf_counter():
            if request := self._requests.get(heapq.heappop(self._deadlines)[1]):
                yield request

    def take(
        self, live: Live, tokens: list[int], outputs: Outputs, row: int, now: float
    ) -> tuple[list[int], str | None]:
        """Takes in the tokens that a step drew for a sample in its rows from `row` on, read at `now`. Returns those
        that count, up to the first that ends the sample, and the reason of its end; a number below 0 is no token."""
        seq, output, kept, reason = live.seq, live.output, 0, None
        room = seq.max_length - len(seq.prompt) - len(seq.output)
        for token in tokens:
            if token < 0:
                reason = "error" if token == NOT_FINITE else None
                break
            kept += 1
            if token in live.stop_ids:
                reason = "stop"
                break
            if outputs.logprobs is not None and seq.params.logprobs is not None:
                live.logprobs.append(token_logprob(token, outputs, row + kept - 1, seq.params.logprobs))
            if not output.text_can_be_late:
                output.push(token)
                if output.stopped:
                    reason = "stop"
                    break
            if kept == room:
                reason = "length"
                break
        if kept:
            self._time(live, kept, now)
        return (tokens if kept == len(tokens) else tokens[:kept]), reason

    def _time(self, live: Live, tokens: int, now: float) -> None:
        self.counts.output_tokens += tokens
        if live.first_token is None:
            live.first_token = now - live.submitted
            self.times.first_token.add(live.first_token)
        else:
            self._previous[live.last_token] += 1
        live.last_token = now
        if tokens > 1:  # between those of one step there is no time
            self._previous[now] += tokens - 1

    def step_read(self, now: float) -> None:
        """All samples have their tokens of a step that was read at `now`."""
        for last, times in self._previous.items():  # few: most sequences had their last token in the step before
            self.times.inter_token.add(now - last, times)
        self._previous.clear()

    def tell(self, live: Live, tokens: List[int]) -> None:
        """News of a sample that goes on."""
        if live.output.text_can_be_late:
            self._events.append(PendingEvent(live, tokens))
            return
        text, certain, logprobs = live.take(final=False)
        if text or certain:
            self._events.append(Event(live.seq.request_id, live.seq.sample, text, certain, None, logprobs))

    def end(self, live: Live, reason: str, now: float, tokens: List[int] = ()) -> str:
        """A sample ends; returns the reason, which a stop string changes that the last bytes complete. now: when its
        last token was read; tokens: its newest ones, whose text is still to be made if it may wait."""
        output = live.output
        if reason == "length" and not output.text_can_be_late:
            output.finish()
            if output.stopped:  # bytes held back completed a stop string
                reason = "stop"
        self._remove(live)
        if live.seq.request_id not in self._requests:
            self.counts.requests_aborted += reason in CUT
            self.counts.requests_finished += reason not in CUT
        total = now - live.submitted
        if reason not in CUT:
            self.times.end_to_end.add(total)
        self._events.append(PendingEvent(live, tokens if output.text_can_be_late else (), reason, total))
        return reason

    def forget(self, live: Live) -> None:
        """A sample leaves, and nothing is told of it."""
        self._remove(live)
        del self._owed[live.seq.request_id, live.seq.sample]

    def _remove(self, live: Live) -> None:
        seq = live.seq
        unfinished = self._requests[seq.request_id].unfinished
        del unfinished[seq.sample]
        if not unfinished:
            del self._requests[seq.request_id]

    def news(self, *, at_once: bool) -> list[Event]:
        """What is new since the last call. With `at_once` all of it; else text of many tokens
        comes with the next call."""
        news, self._events = self._events, []
        events = self._texts.take(news, now=at_once)
        for event in events:
            if event.completion is not None:
                self._owed.pop((event.id, event.sample), None)
        return events

    def end_all(self, reason: str) -> tuple[Event, ...]:
        """What news() has not returned, and the completions of all that is left."""
        events, now = self._texts.rest(self._events), time.perf_counter()
        ended = {(event.id, event.sample) for event in events if event.completion is not None}
        left = [live for key, live in self._owed.items() if key not in ended]
        for live in left:
            with contextlib.suppress(Exception):  # its text may be what failed
                live.output.finish()
        self.counts.requests_aborted += len(self._requests)
        return (*events, *self._texts.rest(PendingEvent(live, (), reason, now - live.submitted) for live in left))

    def reset_metrics(self) -> None:
        """Counters and times begin anew; samples go on."""
        self.counts, self.times = RequestCounts(), Times()

    def close(self) -> None:
        """Ends the thread that makes texts."""
        self._texts.close()
