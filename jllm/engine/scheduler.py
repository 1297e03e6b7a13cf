"""Which tokens the next step computes: admission, chunked prefill, pages on demand, preemption by recompute.

Pure host code over integers. The loop that drives it:

    plan = scheduler.schedule()         the plan counts as dispatched from here on
    dispatch it to the device; then, one step late, for the oldest unread step:
        on_token(seq, token)            for each sequence that sampled in it; ignored once the sequence has ended
        finish(seq, reason)             where the token ended it: end token, stop text, max_length
        step_read(step)                 releases what only that step kept

schedule() returns None when nothing can be dispatched before the step in flight is read, or before a request comes:
the loop reads what is unread and asks again. So a preemption drains first without a special case in the loop.

Fairness: running sequences stand in admission order, and each waiting one in the order of arrival (preempted ones in
front, in their old order). Every decode and the oldest prefill advance in every step, but for a few steps that many
slots spend to fill the sizes that are compiled (see Scheduler); when pages are short the sequence admitted last gives
up its own. So the oldest always progresses, and every request ends.
"""

from collections import deque
from dataclasses import dataclass, fields
from itertools import islice

from jllm.engine.pages import PagePool
from jllm.engine.sequence import Sequence
from jllm.errors import ConfigError, RequestError


@dataclass(frozen=True)
class Limits:
    """Sizes that no plan exceeds.

    A step takes one token and at most one new page from each decoding slot, hence max_step_tokens >= max_slots and
    max_deltas >= max_slots: the decodes always fit, and a slot that prefills can always add a token.
    """

    max_slots: int  # sequences that run at once
    max_step_tokens: int  # decodes and prompt tokens in a step
    max_prompt_tokens: int  # prompt tokens in a step
    max_chunks: int  # prompt chunks in a step
    page_size: int  # tokens a page
    num_pages: int
    max_deltas: int  # page table changes in a step

    def __post_init__(self):
        for f in fields(self):
            if getattr(self, f.name) < 1:
                raise ConfigError(f"{f.name} must be at least 1, not {getattr(self, f.name)}")
        for name, unit in (("max_step_tokens", "token"), ("num_pages", "page"), ("max_deltas", "page table change")):
            if getattr(self, name) < self.max_slots:
                least = f"max_slots = {self.max_slots} (one {unit} a slot)"
                raise ConfigError(f"{name} must be at least {least}, not {getattr(self, name)}")


@dataclass(frozen=True)
class Chunk:
    """tokens of seq at positions start, start + 1, ...; the device samples after a final chunk."""

    seq: Sequence
    start: int
    tokens: tuple[int, ...]
    final: bool  # the last known token is in it


@dataclass(frozen=True)
class Plan:
    """One step. Each decode computes the KV of its slot's newest token, at position seq.computed - 1, and samples."""

    step: int
    decodes: tuple[Sequence, ...]
    chunks: tuple[Chunk, ...]
    deltas: tuple[tuple[int, int, int], ...]  # (slot, index, page): page table changes to apply before the step
    decode_rows: int = 0  # compute at least so many, though fewer decode


@dataclass
class Counts:
    """What happened since the scheduler was made."""

    added: int = 0
    admitted: int = 0  # readmissions included
    preempted: int = 0
    finished: int = 0
    recomputed: int = 0  # tokens whose KV was thrown away by preemption
    drains: int = 0  # times that a shortage of pages had to wait for the step in flight


class Scheduler:
    """prompt_sizes, ascending, are numbers of prompt tokens that a step can hold without waste. While at least half
    of the slots decode, a step takes the largest of these that prompts can fill, or waits up to PATIENCE steps for
    prompts that fill the smallest; otherwise, and without sizes, it takes what there is.

    decode_sizes are numbers of rows that a step without prompts can compute. Where a few decodes too many would take it
    to the next, at most one in EXCESS, these sit out the step, in turn: fewer rows for nothing are worth the delay.

    static: sequences are admitted in batches of max_slots; a batch prefills, then decodes, in as many rows as it has
    members until the last of them has ended, and only then comes the next. That is what continuous batching replaced.
    """

    PATIENCE = 8
    EXCESS = 8

    def __init__(
        self,
        limits: Limits,
        prompt_sizes: tuple[int, ...] = (),
        decode_sizes: tuple[int, ...] = (),
        *,
        static: bool = False,
    ):
        self.limits = limits
        self.prompt_sizes, self.decode_sizes, self.static = prompt_sizes, decode_sizes, static
        self.turn = 0  # where among the decodes the next to sit out begin
        self.held = 0  # steps since prompts first waited for others to fill a step with
        self.joining = 0  # static: members of the batch that are still to be admitted
        self.members = 0  # static: of the batch
        self.counts = Counts()
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in admission order
        self.dispatched = -1  # newest step planned
        self.read = -1  # newest step read
        self._renew()

    def _renew(self) -> None:
        self.pool = PagePool(self.limits.num_pages, self.limits.page_size)
        self.free_slots = list(range(self.limits.max_slots - 1, -1, -1))
        self.draining: list[Sequence] = []  # ended, but an unread step may still write their pages

    @property
    def unread(self) -> int:
        """Steps dispatched and not read."""
        return self.dispatched - self.read

    @property
    def idle(self) -> bool:
        """Nothing to do, now or after a read."""
        return not (self.waiting or self.running or self.unread)

    def check(self, length: int, max_length: int) -> None:
        """RequestError when a sequence of so many tokens could never run to max_length."""
        if not 0 < length < max_length:
            raise RequestError(f"there must be at least 1 token and fewer than max_length = {max_length}, not {length}")
        pool = self.pool
        need = pool.pages_for(max_length - 1)  # the last token never gets KV
        if need > pool.num_pages:
            raise RequestError(
                f"{length} prompt tokens and {max_length - length} new ones need {need} pages of {pool.page_size}, "
                f"the page pool has {pool.num_pages}: shorten the request or raise num_pages"
            )

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence. RequestError when it could never run to its max_length."""
        self.check(seq.length, seq.max_length)
        self.waiting.append(seq)
        self.counts.added += 1

    def reset_counts(self) -> None:
        self.counts = Counts()

    def schedule(self) -> Plan | None:
        """The next step, or None when there is nothing to dispatch now. The plan counts as dispatched."""
        if self.static:
            self._form_batch()
        room = self._make_room()
        if room is None:
            self.counts.drains += 1
            return None
        decodes, short, prefills = room
        budget = min(self.limits.max_step_tokens - len(decodes), self.limits.max_prompt_tokens)
        budget = self._fill(prefills, budget, len(decodes))
        if not budget or not (prefills or (self.waiting and self.free_slots)):
            decodes = self._trim(decodes)
        deltas: list[tuple[int, int, int]] = []
        taking_part = {*decodes, *prefills}
        for seq in short:
            if seq in taking_part:
                self._grow(seq, 1, deltas)
        chunks = self._prefill(prefills, budget, deltas)
        if not decodes and not chunks:
            if self.joining and not self.unread:  # pages are too few for the rest of the batch: it goes without
                self.joining = 0
                return self.schedule()
            if self.running and not self.unread:
                raise AssertionError("nothing can run: a sequence at its max_length was read but not finished")
            return None
        self.dispatched += 1
        for seq in decodes:
            seq.computed += 1
            seq.in_flight += 1
            seq.last_step = self.dispatched
        for chunk in chunks:
            chunk.seq.computed += len(chunk.tokens)
            chunk.seq.in_flight += chunk.final
            chunk.seq.last_step = self.dispatched
        rows = self.members if self.static and decodes else 0
        return Plan(self.dispatched, tuple(decodes), tuple(chunks), tuple(deltas), rows)

    def _form_batch(self) -> None:
        if not self.running and not self.draining:
            self.members = self.joining = min(len(self.waiting), len(self.free_slots))
        self.joining = min(self.joining, len(self.waiting))

    def _make_room(self) -> tuple[list[Sequence], list[Sequence], list[Sequence]] | None:
        """(decodes, short, prefills): the sequences that decode now, those that prefill, and those among the decodes
        and the oldest prefill that need a page to go on; after preempting until there is a page for each of these.
        None: pages are short and a step is unread. Reading it may end a sequence, and the tokens of one must be known
        before it is preempted."""
        size = self.pool.page_size
        while True:
            prefills = [s for s in self.running if s.computed < s.prefill_end]
            # A decode whose sampled tokens already reach max_length waits for its read.
            decodes = [s for s in self.running if s.prefill_end <= s.computed < s.max_length - 1]
            if self.static and (prefills or self.joining):
                decodes = []
            short = [s for s in decodes + prefills[:1] if s.computed == len(s.pages) * size]
            if len(short) <= self.pool.num_free:
                return decodes, short, prefills
            if self.unread:
                return None
            self._preempt(self.running[-1])

    def _fill(self, prefills: list[Sequence], budget: int, decodes: int) -> int:
        """How many prompt tokens to take of at most budget, so that a step of so many decodes has little waste."""
        if not self.prompt_sizes or 2 * decodes < self.limits.max_slots:
            return budget
        ready = sum(s.prefill_end - s.computed for s in prefills)
        for seq in islice(self.waiting, len(self.free_slots)):
            if ready >= budget:
                break
            ready += seq.length
        full = [n for n in self.prompt_sizes if n <= min(ready, budget)]
        self.held = self.held + 1 if ready and not full else 0
        if 0 < self.held <= self.PATIENCE:
            return 0
        self.held = 0
        return full[-1] if full else budget

    def _trim(self, decodes: list[Sequence]) -> list[Sequence]:
        """The decodes without those few that would make the step a size larger."""
        fits = max((size for size in self.decode_sizes if size <= len(decodes)), default=0)
        excess = len(decodes) - fits
        if self.static or not 0 < excess <= fits // self.EXCESS:
            return decodes
        self.turn = (self.turn + excess) % len(decodes)
        turned = decodes[self.turn :] + decodes[: self.turn]
        return turned[:fits]

    def _prefill(self, running: list[Sequence], budget: int, deltas: list[tuple[int, int, int]]) -> list[Chunk]:
        """Chunks of at most budget tokens: prefills that run first, then admissions, each in order."""
        chunks: list[Chunk] = []
        for seq in running:
            budget -= self._chunk(seq, budget, chunks, deltas)
        while self.waiting and self.free_slots and budget and len(chunks) < self.limits.max_chunks:
            if self.static and not self.joining:
                break
            if len(deltas) == self.limits.max_deltas or not self._admissible(self.waiting[0]):
                break
            seq = self.waiting.popleft()
            seq.slot = self.free_slots.pop()
            seq.prefill_end = seq.length
            self.running.append(seq)
            self.counts.admitted += 1
            self.joining -= self.static
            budget -= self._chunk(seq, budget, chunks, deltas)
        return chunks

    def _admissible(self, seq: Sequence) -> bool:
        """Whether pages are free for all of seq's prefill and first decode, and one more for each running sequence to
        grow into. Pages are taken chunk by chunk all the same: the whole prompt counts here because a prompt that
        fits only in part would be preempted and computed again. Running prefills have what they need by now, or
        nothing is left to admit with. A sequence alone always passes (see add)."""
        need = self.pool.pages_for(min(seq.length + 1, seq.max_length - 1)) + len(self.running)
        return need <= self.pool.num_free

    def _chunk(self, seq: Sequence, budget: int, chunks: list[Chunk], deltas: list[tuple[int, int, int]]) -> int:
        """Append seq's next chunk, as long as budget, pages and deltas allow; returns its length, perhaps 0."""
        if not budget or len(chunks) == self.limits.max_chunks:
            return 0
        n = self._grow(seq, min(budget, seq.prefill_end - seq.computed), deltas)
        if n:
            stop = seq.computed + n
            chunks.append(Chunk(seq, seq.computed, seq.slice(seq.computed, stop), stop == seq.prefill_end))
        return n

    def _grow(self, seq: Sequence, tokens: int, deltas: list[tuple[int, int, int]]) -> int:
        """Take the pages that seq's next tokens need, as far as the pool and the room for deltas go; returns how many
        of the tokens have their page."""
        assert seq.slot is not None
        slot, have = seq.slot, len(seq.pages)
        missing = self.pool.pages_for(seq.computed + tokens) - have
        pages = self.pool.allocate(min(missing, self.pool.num_free, self.limits.max_deltas - len(deltas))) or []
        deltas.extend((slot, have + i, page) for i, page in enumerate(pages))
        seq.pages.extend(pages)
        return min(tokens, len(seq.pages) * self.pool.page_size - seq.computed)

    def on_token(self, seq: Sequence, token: int) -> None:
        """A token read from the device. What comes after the end of a sequence is surplus, and dropped."""
        if seq.finished:
            return
        if not seq.in_flight:
            raise AssertionError(f"request {seq.request_id} sample {seq.sample}: a token that was not in flight")
        seq.in_flight -= 1
        seq.output.append(token)

    def finish(self, seq: Sequence, reason: str) -> None:
        """End a sequence that waits or runs. Its slot and pages stay taken until the last step that may write them
        has been read."""
        if seq.finished:
            raise AssertionError(f"request {seq.request_id} sample {seq.sample} has already ended: {seq.finish_reason}")
        seq.finish_reason = reason
        self.counts.finished += 1
        if seq.slot is None:
            self.waiting.remove(seq)
            return
        self.running.remove(seq)
        if seq.last_step > self.read:
            self.draining.append(seq)
        else:
            self._release(seq)

    def step_read(self, step: int) -> None:
        """All outputs of this step have been taken in. Steps are read in order."""
        if not self.read + 1 == step <= self.dispatched:
            raise AssertionError(f"step {step} read after {self.read}, dispatched up to {self.dispatched}")
        self.read = step
        for seq in [s for s in self.draining if s.last_step <= step]:
            self.draining.remove(seq)
            self._release(seq)

    def reset(self) -> None:
        """After a device error: what was in flight is lost and so is the pool. All that ran waits again, in its old
        order, to be recomputed."""
        for seq in reversed(self.running):
            self.counts.recomputed += seq.computed
            self._requeue(seq)
            seq.slot, seq.pages = None, []
        for seq in self.draining:
            seq.slot, seq.pages = None, []
        self.running = []
        self.read = self.dispatched
        self._renew()

    def _preempt(self, seq: Sequence) -> None:
        """Take slot and pages from a running sequence of which nothing is in flight; it waits in front."""
        if seq.in_flight:
            raise AssertionError(f"request {seq.request_id} sample {seq.sample}: a sampled token was never taken in")
        self.running.remove(seq)
        self._release(seq)
        self.counts.preempted += 1
        self.counts.recomputed += seq.computed
        seq.preemptions += 1
        self._requeue(seq)

    def _requeue(self, seq: Sequence) -> None:
        seq.computed = seq.in_flight = 0
        self.waiting.appendleft(seq)

    def _release(self, seq: Sequence) -> None:
        assert seq.slot is not None
        self.pool.free(seq.pages)
        self.free_slots.append(seq.slot)
        seq.slot, seq.pages = None, []
