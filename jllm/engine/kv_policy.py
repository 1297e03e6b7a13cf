"""Who gets which pages of the KV pool, and when: three policies behind one protocol.

    reserve   all pages that a request could ever need, at admission (PyTorch's way): it never waits again
    paged     pages as tokens come (PagedAttention): most requests at once, at the price of preemption
    extent    a run of pages in a row of the predicted length, at admission (a VM allocator's way)

The scheduler asks; a policy owns nothing but its pool. It changes `pages` and `expected` of sequences and nothing else
of them: the page table, the step and the kernels know no policy. With a predictor (length.py), `paged` admits only
what it expects to hold to the end.

A sequence may come to admission with pages that it shares with others (PagePool.share), full ones, at the head of
seq.pages, whose tokens count as computed: a policy takes what is missing behind them.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as List
from functools import partial
from typing import Protocol

import numpy as np

from jllm.engine.length import Longest, Predictor
from jllm.engine.pages import PagePool
from jllm.engine.sequence import Sequence
from jllm.errors import RequestError


class Policy(Protocol):
    """What the scheduler asks about memory. One object for each page pool."""

    pool: PagePool

    def check(self, length: int, max_length: int) -> None:
        """RequestError when a sequence of so many tokens, alone, could never run to max_length."""

    def admit(self, seq: Sequence, running: List[Sequence]) -> bool:
        """Takes the pages that seq begins with. False, and nothing is taken, when it must wait: then for a running one
        to end; with none running, seq gets what it needs. What was admitted isn't the reason for a preemption in the
        very next step."""

    def admissible(self, waiting: Iterable[Sequence], running: List[Sequence], tokens: int) -> tuple[int, bool]:
        """About how many tokens of those that wait, in order, could be admitted now, until there are so many; and
        whether it is for want of pages that there are fewer. Takes nothing."""

    def grow(self, seq: Sequence, pages: int, spare: int, room: int) -> list[tuple[int, int]]:
        """Takes `pages` more pages for the next tokens of seq, as far as they are available, and more on top if it
        likes, as long as `spare` stay available. Where all pages of seq are full of tokens, it may move it to others,
        if the page table has room for so many changes: it then returns copies (from, to) for all pages of seq but some
        first ones that stay, and the scheduler frees the old ones in time. Else it returns none."""

    def cause(self, seq: Sequence) -> str:
        """Why seq needs a page that it lacks: a word for the counts of preemptions."""

    def victim(self, running: List[Sequence], pages: int) -> Sequence:
        """Whom to preempt for so many pages, `running` in the order of arrival: never the first if there are others."""

    def observe(self, seq: Sequence) -> None:
        """seq has ended."""

    def release(self, seq: Sequence) -> None:
        """Gives back all pages of seq."""


class OnDemand:
    """What the policies have in common; by itself, pages as tokens come."""

    ALIVE = 16  # requests that end before the predictor hears again of those that run

    def __init__(self, pool: PagePool, *, predictor: Predictor | None = None, quantile: float = 0.9):
        self.pool, self.predictor, self.quantile = pool, predictor, quantile
        self._news = 0  # requests that have ended since the predictor was told who is alive

    def check(self, length: int, max_length: int) -> None:
        pool, need = self.pool, self.pool.pages_for(max_length - 1)  # the last token never gets KV
        if need > pool.num_pages:
            raise RequestError(
                f"{length} prompt tokens and {max_length - length} new ones need {need} pages of {pool.page_size}, "
                f"the page pool has {pool.num_pages}: shorten the request or raise num_pages"
            )

    def cause(self, seq: Sequence) -> str:
        if seq.computed < seq.prefill_end:
            return "prefill"
        return "decode" if self.predictor is None or seq.computed < seq.expected else "outgrown"

    def victim(self, running: List[Sequence], pages: int) -> Sequence:
        """The cheapest that frees enough by itself: with the fewest tokens to recompute, and of equals the newest.
        Whoever is preempted, the pages that it frees and the tokens that it loses are in proportion, so the smallest
        loss is that which frees no more than what is wanted. The oldest of all requests is never taken once it runs,
        and nobody is admitted before it while it waits: so it ends, and then the next is the oldest."""
        others = running[1:] or running
        if len(others) == 1:
            return others[0]
        costs = [(s.computed - s.cached, -i, s) for i, s in enumerate(others)]
        enough = [cost for cost in costs if self._frees(cost[2]) >= pages]
        return min(enough)[2] if enough else max(others, key=self._frees)

    def admissible(self, waiting: Iterable[Sequence], running: List[Sequence], tokens: int) -> tuple[int, bool]:
        found, left = 0, self.pool.num_available - self._keep(running)
        for seq in waiting:
            if found >= tokens:
                break
            left -= self._begins(seq, running)
            if left < 0:
                return found, True
            found, left = found + seq.length, left - 1
        return found, False

    def _keep(self, running: List[Sequence]) -> int:
        """Pages that stay available to those that run when one more is admitted."""
        return 0

    def _begins(self, seq: Sequence, running: List[Sequence]) -> int:
        """Pages that admission asks for, those included that seq shares."""
        return self._first(seq)

    def _frees(self, seq: Sequence) -> int:
        return sum(map(self.pool.frees, seq.pages))

    def observe(self, seq: Sequence) -> None:
        if self.predictor is not None and seq.finish_reason != "error":
            self.predictor.observe(seq.prompt, seq.params, len(seq.output), seq.finish_reason == "stop")
            self._news += 1

    def release(self, seq: Sequence) -> None:
        self.pool.free(seq.pages)
        seq.pages = []

    def grow(self, seq: Sequence, pages: int, spare: int, room: int) -> list[tuple[int, int]]:
        seq.pages += self.pool.allocate(min(pages, self.pool.num_available)) or []
        return []

    def _expect(self, seq: Sequence, running: List[Sequence] = ()) -> int:
        """Tokens of KV that seq is expected to come to, more than it is known to have. Reads come a step late: its last
        token is computed, too, unless max_length says before that it is the last."""
        known = max(seq.length, seq.computed + 1)  # tokens that exist, those in flight included
        if seq.expected < known:
            assert self.predictor is not None
            if self._news >= self.ALIVE and running:
                self._news = 0
                self.predictor.alive(len(s.output) for s in running)
            produced = known - len(seq.prompt)
            output = self.predictor.predict(seq.prompt, seq.params, self.quantile, produced)
            seq.expected = min(len(seq.prompt) + max(output, produced + 1), seq.max_length - 1)
        return seq.expected

    def _first(self, seq: Sequence) -> int:
        """Pages for all that seq prefills and its first decode."""
        return self.pool.pages_for(min(seq.length + 1, seq.max_length - 1))


class Paged(OnDemand):
    """Pages on demand.

    Admission asks for room for the whole prompt and its first decode, though chunks take their pages one by one: a
    prompt that fits only in part would be preempted and computed again. Beyond that one page for each running sequence
    to grow into and `watermark`, a share of the pool, stay available, but for a sequence alone.

    With a predictor, a sequence also waits as long as all that run and it, each ending where it is expected to, would
    at some time hold more pages than there are.
    """

    def __init__(
        self, pool: PagePool, *, predictor: Predictor | None = None, quantile: float = 0.9, watermark: float = 0.0
    ):
        super().__init__(pool, predictor=predictor, quantile=quantile)
        self.watermark = watermark

    def admit(self, seq: Sequence, running: List[Sequence]) -> bool:
        if self._first(seq) - len(seq.pages) + self._keep(running) > self.pool.num_available:
            return False
        return self.predictor is None or not running or self._holds(seq, running)

    def _keep(self, running: List[Sequence]) -> int:
        return len(running) + int(self.watermark * self.pool.num_pages) if running else 0

    def _holds(self, seq: Sequence, running: List[Sequence]) -> bool:
        """Asked often, hence written for speed. Pages that a sequence found (cached) count on neither side: others hold
        them, so that its end may give back none of them."""
        self._expect(seq, running)
        now, end = [seq.length - seq.cached], [seq.expected - seq.cached]
        pages, found = len(seq.pages), seq.cached
        for s in running:
            computed, prefill_end, cached = s.computed, s.prefill_end, s.cached
            known = computed if computed >= prefill_end else prefill_end
            if s.expected <= known:
                self._expect(s, running)
            now.append(known - cached)
            end.append(s.expected - cached)
            pages += len(s.pages)
            found += cached
        most = self.pool.num_available + pages - found // self.pool.page_size
        return peak_pages(now, end, self.pool.page_size) <= most


class Reserve(OnDemand):
    """Pages for max_length at admission, anywhere in the pool."""

    def admit(self, seq: Sequence, running: List[Sequence]) -> bool:
        pages = self.pool.allocate(self._begins(seq, running) - len(seq.pages))
        seq.pages += pages or []
        return pages is not None

    def _begins(self, seq: Sequence, running: List[Sequence]) -> int:
        return self.pool.pages_for(seq.max_length - 1)

    def grow(self, seq: Sequence, pages: int, spare: int, room: int) -> list[tuple[int, int]]:
        raise AssertionError(f"request {seq.request_id} outgrew what was reserved for max_length = {seq.max_length}")


class Extent(OnDemand):
    """A run of pages in a row of the predicted length at admission. A sequence that outgrows it goes on in the pages
    right behind, as many as it is now expected to need, if the first of these is free. Else, by `overflow`:

        "move"      it moves to a longer run, if there is one, and goes on as with "scatter" if not
        "scatter"   it goes on in another run, or a single page: the page table doesn't mind

    Nothing is ever compacted: experiments.kv_choices says what that would be worth, and why "scatter" is the default.
    """

    def __init__(self, pool: PagePool, *, predictor: Predictor, quantile: float = 0.9, overflow: str = "scatter"):
        super().__init__(pool, predictor=predictor, quantile=quantile)
        self.overflow = overflow

    def admit(self, seq: Sequence, running: List[Sequence]) -> bool:
        pages = self._begins(seq, running) - len(seq.pages)
        if running and pages + self._keep(running) > self.pool.num_available:
            return False
        run = self.pool.allocate_run(pages)
        seq.pages += run or []
        return run is not None

    def _keep(self, running: List[Sequence]) -> int:
        """Those that may need a page in the next step, after this one's decode."""
        size = self.pool.page_size
        return sum(len(s.pages) * size - s.computed <= 1 for s in running)

    def _begins(self, seq: Sequence, running: List[Sequence]) -> int:
        return max(self.pool.pages_for(self._expect(seq, running)), self._first(seq))

    def grow(self, seq: Sequence, pages: int, spare: int, room: int) -> list[tuple[int, int]]:
        available = self.pool.num_available
        want = max(pages, self.pool.pages_for(self._expect(seq)) - len(seq.pages))
        want = min(want, max(pages, available - spare), available)
        behind = self.pool.extend(seq.pages[-1], want) if seq.pages else []
        if behind:
            seq.pages += behind
            missing = pages - len(behind)
            return super().grow(seq, missing, spare, room) if missing > 0 else []
        shared = seq.cached // self.pool.page_size  # these stay where they are
        total = len(seq.pages) + want - shared
        if self.overflow == "move" and total <= min(room, available - spare):
            run = self.pool.allocate_run(total)
            if run is not None:
                copies = list(zip(seq.pages[shared:], run))
                seq.pages = seq.pages[:shared] + run
                return copies
        seq.pages += self.pool.allocate_run(want) or self.pool.allocate(min(pages, available)) or []
        return []


def make_policy(
    name: str = "paged",
    *,
    predictor: Predictor | None = None,
    quantile: float = 0.9,
    watermark: float = 0.0,
    overflow: str = "scatter",
) -> Callable[[PagePool], Policy]:
    """What makes the policy called `name` for a pool, with those options that it has."""
    if name == "reserve":
        return Reserve
    if name == "paged":
        return partial(Paged, predictor=predictor, quantile=quantile, watermark=watermark)
    return partial(Extent, predictor=predictor or Longest(), quantile=quantile, overflow=overflow)


def peak_pages(now: List[int], end: List[int], page_size: int) -> int:
    """Most pages of page_size tokens that sequences hold at once if each has so many tokens now and in the end, gains
    one a step and gives all back at its end; partial pages count as whole ones."""
    tokens = np.array(now, np.int64)
    left = np.array(end, np.int64) - tokens
    order = np.argsort(-left)
    # When one ends, those before it in this order are still there.
    alive = np.arange(1, len(now) + 1)
    return int((np.cumsum(tokens[order]) + alive * (left[order] + page_size - 1)).max()) // page_size
