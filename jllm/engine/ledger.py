"""The samples that have not ended: what their tokens make of them, and what is still to be told of them."""

import contextlib
import heapq
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as List

from jllm.config import LlamaConfig
from jllm.engine.metrics import RequestCounts, Times
from jllm.engine.output import OutputText
from jllm.engine.request import Event, SamplingParams
from jllm.engine.samples import Live, Samples
from jllm.engine.sequence import Sequence
from jllm.engine.texts import PendingEvent, Texts
from jllm.errors import RequestError
from jllm.files.tokenizer import Tokenizer
from jllm.guides.matcher import Matcher
from jllm.model.model import end_ids
from jllm.step.state import Outputs

Drawn = tuple[Sequence, int, int, tuple[int, ...]]  # a sequence, its number of rows in a step, the first, their tokens
CUT = ("abort", "deadline")  # the finish reasons of samples that were not let go on


class Ledger:
    """An engine's samples from submission to completion: their tokens and ends, the events that tell of them, and the
    counts and times of metrics. Slots and pages are the Scheduler's."""

    def __init__(self, config: LlamaConfig, tokenizer: Tokenizer | None):
        self._ends, self._tokenizer = end_ids(config, tokenizer), tokenizer
        self.counts, self.times = RequestCounts(), Times()  # for others to read
        self._requests: dict[int, Samples] = {}  # those with unfinished samples
        self._live: dict[Sequence, Live] = {}  # the same samples, by what a step has of each
        self._owed: dict[tuple[int, int], Live] = {}  # samples whose completion news() has not returned
        self._deadlines: list[tuple[float, int]] = []  # a heap of times and requests, which may have ended
        self._events: list[PendingEvent | Event] = []
        self._texts = Texts()

    @property
    def has_samples(self) -> bool:
        """Returns whether any sample has not ended."""
        return bool(self._requests)

    @property
    def has_news(self) -> bool:
        """Returns whether there is something that news() has not returned."""
        return bool(self._events or self._texts.waiting)

    def add(self, seq: Sequence, matcher: Matcher | None) -> Live:
        """Returns a new sample; its request is a new one, or has others."""
        decoder = None if self._tokenizer is None else self._tokenizer.stream_decoder(seq.prompt)
        seq.stop_ids = self._stop_ids(seq.params)
        live = Live(seq, OutputText(decoder, seq.params.stop), time.perf_counter(), matcher)
        self._owed[seq.request_id, seq.sample] = live
        request = self._requests.setdefault(seq.request_id, Samples())
        request.started = max(request.started, seq.sample + 1)
        request.unfinished[seq.sample] = live
        self._live[seq] = live
        return live

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        """Returns the tokens that end a sample, with those that its stop strings are: no text shows a special token."""
        found = {*params.stop_token_ids, *(() if params.ignore_eos else self._ends)}
        if isinstance(self._tokenizer, Tokenizer):
            found |= {id for stop in params.stop if (id := self._tokenizer.special_id(stop)) is not None}
        return frozenset(found)

    def request(self, request_id: int) -> Samples:
        """Returns a request that has not ended. RequestError for others."""
        if request_id not in self._requests:
            raise RequestError(f"request {request_id} is not running: it has finished or was never submitted")
        return self._requests[request_id]

    def find(self, request_id: int, sample: int) -> Live:
        """Returns RequestError for a sample that is not there, or has ended."""
        request = self._requests.get(request_id)
        if request is None or sample not in request.unfinished:
            raise RequestError(f"request {request_id} has no running sample {sample}")
        return request.unfinished[sample]

    def sample(self, seq: Sequence) -> Live | None:
        """Returns a sequence's; None once it has ended."""
        return self._live.get(seq)

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
        """Yields the requests whose time is over, each once."""
        while self._deadlines and self._deadlines[0][0] <= time.perf_counter():
            if request := self._requests.get(heapq.heappop(self._deadlines)[1]):
                yield request

    def take(
        self, drawn: Iterable[Drawn], outputs: Outputs, now: float
    ) -> Iterator[tuple[Live, int, tuple[int, ...], str | None]]:
        """Takes in what a step drew, read at `now`. Yields each sample that had not ended before, its rows, its tokens
        that count, and the reason of its end, for which the caller calls end(). What the others go on with is news.

        Most of what the host does for a token is done in this loop: each call here is one a token."""
        counts, events = self.counts, self._events
        lasts: list[float] = []  # read times of previous tokens
        for seq, rows, row, tokens in drawn:
            live = self._live.get(seq)
            if live is None:  # ended by an earlier token or an abort; the surplus is dropped
                continue
            kept, reason = live.keep(tokens, outputs, row)
            if kept:
                counts.output_tokens += len(kept)
                if live.first_token is None:
                    live.first_token = now - live.submitted
                    self.times.first_token.add(live.first_token)
                else:
                    lasts.append(live.last_token)
                live.last_token = now
                if len(kept) > 1:  # between those of one step there is no time
                    lasts += [now] * (len(kept) - 1)
            elif reason is None:
                raise AssertionError(f"request {seq.request_id}: the device ended a sequence that the host runs")
            if reason is None:
                if live.output.text_can_be_late:
                    events.append(PendingEvent(live, kept))
                elif live.plain:  # there is no text to wait for
                    events.append(Event(seq.request_id, seq.sample, "", live.output.pass_on()))
                else:
                    text, certain, logprobs = live.take(final=False)
                    if text or certain:
                        events.append(Event(seq.request_id, seq.sample, text, certain, None, logprobs))
            yield live, rows, kept, reason
        for last, times in Counter(lasts).items():  # few: most sequences had their last token in the step before
            self.times.inter_token.add(now - last, times)

    def end(self, live: Live, reason: str, now: float, tokens: List[int] = ()) -> str:
        """Returns a sample ends; returns the reason, which a stop string changes that the last bytes complete. now:
        when its last token was read; tokens: its newest ones, whose text is still to be made if it may wait."""
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
        del self._live[seq]
        if not unfinished:
            del self._requests[seq.request_id]

    def news(self, *, at_once: bool) -> list[Event]:
        """Returns what is new since the last call. With `at_once` all of it; else text of many tokens
        comes with the next call."""
        news, self._events = self._events, []
        events = self._texts.take(news, now=at_once)
        for event in events:
            if event.completion is not None:
                self._owed.pop((event.id, event.sample), None)
        return events

    def end_all(self, reason: str) -> tuple[Event, ...]:
        """Returns what news() has not returned, and the completions of all that is left."""
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
