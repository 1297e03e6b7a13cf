"""Which tokens the next step computes: admission, chunked prefill, page tables, preemption by recompute.

Pure host code over integers; which pages a sequence gets, and who must give up its own, is a policy's (kv_policy.py),
and page_tables.py puts them where the device finds them. The loop that drives it:

    plan = scheduler.schedule()         the plan counts as dispatched from here on
    dispatch it to the device; then, one step late, for the oldest unread step:
        on_tokens(seq, tokens, rows)    for each sequence that sampled in it; ignored once the sequence has ended
        finish(seq, reason)             where a token ended it: end token, stop text, max_length
        step_read(step)                 releases what only that step kept

schedule() returns None when nothing can be dispatched before the step in flight is read, or before a request comes:
the loop reads what is unread and asks again. So a preemption drains first without a special case in the loop.

Fairness: running sequences and waiting ones each stand in the order of priority, lower values first, and of arrival
where these are equal; none is admitted before the first that waits. Every decode and the first prefill advance in every
step, but for a few steps that many slots spend to fill the sizes that are compiled (see Scheduler). What waits preempts
nothing; when pages are short, the policy chooses who gives up its own among those that run with the highest value,
never the first that runs. So the oldest of all, which is the first in this order, progresses, or waits for those that
run to end: with equal priorities every request ends. A request starves as long as enough of lower values keep coming.

What a sequence begins with may exist already: in the prefix cache, in the sequence that it is a fork of, in a snapshot
(reuse.py). When the policy is asked for more, seq.pages are full pages that it shares, with seq.cached tokens, and
seq.computed counts those as well that the plan will bring to pages of its own (copies, loads).
"""

from bisect import insort
from collections import deque
from collections.abc import Callable, Collection
from itertools import islice
from operator import attrgetter

from jllm.engine.kv_policy import PAGED, Policy
from jllm.engine.page_tables import PageTables
from jllm.engine.plan import Chunk, PlanParts, ScheduleCounts, StepPlan
from jllm.engine.reuse import ReusedPrefix
from jllm.engine.sequence import Sequence
from jllm.errors import RequestError
from jllm.programs.sizes import Limits


class Scheduler(PageTables):
    """prompt_sizes, ascending, are numbers of prompt tokens that a step can hold without waste. While at least half
    of the slots decode, or pages are too few for all prompts that wait and slots that are free, a step takes the
    largest of these that prompts can fill, or waits up to PATIENCE steps for prompts that fill the smallest; otherwise,
    and without sizes, it takes what there is.

    decode_sizes are numbers of rows that a step without prompts can compute. Where a few decodes too many would take it
    to the next, at most one in EXCESS, these sit out the step, in turn: fewer rows for nothing are worth the delay.

    policy is the KV policy (see kv_policy.py); by default pages on demand.

    prefix_cache: pages outlive their sequences, for others that begin alike (see reuse.py).

    draft_rows tells how many rows a decode may have at most, of limits.short_rows, in a step of some decodes, with
    prompts or without; by default all.

    most_joining: prompt tokens, at most, of a step in which nobody prefills but sequences that come with their K and V:
    so those that run hardly wait for them. None: as many as of others.
    """

    PATIENCE = 8
    EXCESS = 8

    def __init__(
        self,
        limits: Limits,
        prompt_sizes: tuple[int, ...] = (),
        decode_sizes: tuple[int, ...] = (),
        *,
        policy: Policy = PAGED,
        prefix_cache: bool = False,
        draft_rows: Callable[[int, bool], int] | None = None,
        most_joining: int | None = None,
    ):
        super().__init__(limits, policy, prefix_cache)
        self.draft_rows, self.most_joining = draft_rows, most_joining
        self.prompt_sizes, self.decode_sizes = prompt_sizes, decode_sizes
        self.turn = 0  # round-robin offset of decodes that sit out
        self.held = 0  # steps since prompts first waited for others to fill a step with
        self.waiting: deque[Sequence] = deque()  # in the order of priority and arrival, as are those that run
        self.arrivals = 0  # sequences that were ever added
        self.read = -1  # newest step read
        self._renew()

    def _renew(self) -> None:
        super()._renew()
        self.refused: tuple[Sequence, int] | None = None  # who had to wait for pages, and when, by self.returns
        self.preempted: list[Sequence] = []  # since the last plan
        self.draining: list[Sequence] = []  # ended, but an unread step may still write their pages

    @property
    def unread(self) -> int:
        """Returns steps dispatched and not read."""
        return self.dispatched - self.read

    @property
    def active(self) -> bool:
        """Returns whether a sequence runs or a step is unread."""
        return bool(self.running or self.unread)

    @property
    def idle(self) -> bool:
        """Returns nothing to do, now or after a read."""
        return not (self.waiting or self.active)

    def check(self, length: int, max_length: int) -> None:
        """RequestError when a sequence of `length` tokens could never run to max_length."""
        if not 0 < length < max_length:
            raise RequestError(f"there must be at least 1 token and fewer than max_length = {max_length}, not {length}")
        self.policy.check(length, max_length)

    def arrive(self, seq: Sequence) -> None:
        """Give a new sequence its place in the order of arrival. RequestError when it could never run to its
        max_length."""
        self.check(seq.length, seq.max_length)
        seq.arrival, self.arrivals = self.arrivals, self.arrivals + 1

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence, in its place if it has arrived before (else it arrives now)."""
        if seq.arrival < 0:
            self.arrive(seq)
        self._queue(seq)
        self.counts.added += 1

    def reset_counts(self) -> None:
        self.counts = ScheduleCounts()
        self.sharing.reset_counts()

    def schedule(self) -> StepPlan | None:
        """Returns the next step, or None when there is nothing to dispatch now. The plan counts as dispatched."""
        room = self._make_room()
        if room is None:
            self.counts.drains += 1
            return None
        decodes, short, prefills = room
        limits = self.limits
        prompts = bool(prefills or (self.waiting and self.free_slots))
        rows = self._most_rows(len(decodes), True) if prompts else 1  # without any it is asked once, below
        budget = min(limits.max_step_tokens - len(decodes) * rows, limits.max_prompt_tokens)
        parts = PlanParts()
        self._map(short, parts)
        self._prefill(prefills, self._fill(prefills, budget, len(decodes)), parts)
        if not parts.chunks:
            decodes = self._trim(decodes)
            rows = self._most_rows(len(decodes), False)
        if not decodes and parts.empty:
            return self._nothing()
        return self._plan(decodes, self._rows(decodes, rows, parts), parts)

    def _nothing(self) -> StepPlan | None:
        """There is nothing to dispatch now: a read or a request must come first."""
        if self.running and not self.unread:
            raise AssertionError("nothing can run: a sequence at its max_length was read but not finished")
        return None

    def _plan(self, decodes: list[Sequence], rows: tuple[int, ...], parts: PlanParts) -> StepPlan:
        """Returns the parts as a plan, which counts as dispatched."""
        self.dispatched += 1
        for seq in decodes:
            seq.computed += 1
            seq.in_flight += 1
            seq.last_step = self.dispatched
        self.empty -= len(decodes)
        for chunk in parts.chunks:
            self.empty -= len(chunk.tokens)
            chunk.seq.computed += len(chunk.tokens)
            chunk.seq.in_flight += chunk.final
            chunk.seq.last_step = self.dispatched
        preempted, self.preempted = self.preempted, []
        self.counts.planned(self.pool, len(self.running), len(parts.copies), self.empty)
        copies = tuple((source, target) for target, source in parts.copies.items())
        return StepPlan(
            self.dispatched,
            tuple(decodes),
            rows,
            tuple(parts.chunks),
            tuple(parts.deltas),
            copies,
            tuple(parts.loads),
            tuple(parts.skips),
            tuple(preempted),
        )

    def _make_room(self) -> tuple[list[Sequence], list[Sequence], list[Sequence]] | None:
        """Returns (decodes, short, prefills): the sequences that decode now, those that prefill, and those among the
        decodes and the oldest prefill whose next token has no page in the page table; after preempting until there is a
        page for each of these. None: pages are short and a step is unread. Reading it may end a sequence, and the
        tokens of one must be known before it is preempted."""
        size = self.pool.page_size
        if self.waiting and self.free_slots:
            self._return_borrowed()
        while True:
            prefills = [s for s in self.running if s.computed < s.prefill_end]
            decodes = self._decoding(prefills)
            short = [s for s in decodes if s.computed + s.ahead >= s.mapped * size]
            short += [s for s in prefills[:1] if s.computed >= s.mapped * size]
            lacking = [s for s in short if s.reach > len(s.pages) * size]
            missing = len(lacking) - self.pool.num_available
            if missing <= 0:
                return decodes, short, prefills
            if self._return_borrowed():
                continue
            if self.unread:
                return None
            self.counts.preempted_by[self.policy.cause(lacking[-1])] += 1
            self._preempt(self.policy.victim(self._expendable(), missing))

    def _expendable(self) -> list[Sequence]:
        """Returns the first that runs, and those from which the policy chooses a victim: all others of the highest
        value."""
        first, *others = self.running
        return [first, *(s for s in others if s.priority == self.running[-1].priority)]

    def _decoding(self, prefills: list[Sequence]) -> list[Sequence]:
        """Who decodes beside these. A sequence whose sampled tokens already reach max_length waits for its read."""
        return [s for s in self.running if s.prefill_end <= s.computed < s.max_length - 1]

    def _map(self, short: list[Sequence], parts: PlanParts) -> None:
        """A page for the next token of each, of those as well that may sit out this step."""
        for left, seq in zip(range(len(short) - 1, -1, -1), short):
            self._grow(seq, seq.reach, parts, left)

    def _most_rows(self, decodes: int, prompts: bool) -> int:
        """Returns the most rows of each decode in a step of these, and whether prompts come with them."""
        if decodes > self.limits.most_short:
            return 1
        most = self.limits.short_rows
        return most if self.draft_rows is None else min(most, self.draft_rows(decodes, prompts))

    def _rows(self, decodes: list[Sequence], most: int, parts: PlanParts) -> tuple[int, ...]:
        """Returns rows of each decode: `most` where their pages are there or left over, else one."""
        if most == 1:
            return (1,) * len(decodes)
        spare = 0 if self.waiting and self.free_slots else self.pool.num_available - len(self.running)
        rows = []
        for seq in decodes:
            n, available = min(most, seq.max_length - 1 - seq.computed), self.pool.num_available
            rows.append(n if n > 1 and self._lend(seq, seq.computed + seq.ahead + n + 1, spare, parts) else 1)
            spare -= available - self.pool.num_available
            seq.ahead += rows[-1] - 1
        return tuple(rows)

    def _fill(self, prefills: list[Sequence], budget: int, decodes: int) -> int:
        """Returns how many prompt tokens to take of at most budget, so that a step with `decodes` decodes has little
        waste."""
        if self.most_joining is not None and self._joins(prefills):
            return min(budget, self.most_joining)
        ready = sum(s.prefill_end - s.computed for s in prefills)
        if not self.prompt_sizes or not (ready or (self.waiting and self.free_slots)):
            return budget
        coming, short = self.policy.admissible(islice(self.waiting, len(self.free_slots)), self.running, budget - ready)
        if not decodes or not ready + coming or (2 * decodes < self.limits.max_slots and not short):
            self.held = 0  # whoever finds all of a prompt's pages shared is taken all the same
            return budget
        full = [n for n in self.prompt_sizes if n <= min(ready + coming, budget)]
        self.held = 0 if full else self.held + 1
        if 0 < self.held <= self.PATIENCE:
            return 0
        self.held = 0
        return full[-1] if full else budget

    def _joins(self, prefills: list[Sequence]) -> bool:
        """Returns whether nobody prefills but sequences that come with their K and V."""
        few = all(s.prefill_end - s.computed < self.limits.block for s in prefills)
        return few and bool(prefills or (self.waiting and self.waiting[0].snapshot is not None))

    def _trim(self, decodes: list[Sequence]) -> list[Sequence]:
        """Returns the decodes without those few that would make the step a size larger."""
        fits = max((size for size in self.decode_sizes if size <= len(decodes)), default=0)
        excess = len(decodes) - fits
        if not 0 < excess <= fits // self.EXCESS:
            return decodes
        self.turn = (self.turn + excess) % len(decodes)
        turned = decodes[self.turn :] + decodes[: self.turn]
        return turned[:fits]

    def _prefill(self, running: list[Sequence], budget: int, parts: PlanParts) -> None:
        """Chunks of at most budget tokens: prefills that run first, then admissions, each in order."""
        for seq in running:
            budget -= self._chunk(seq, budget, parts)
        while self.waiting and self.free_slots and budget and len(parts.chunks) < self.limits.max_chunks:
            if len(parts.deltas) == self.limits.max_deltas or not self._admit(self.waiting[0], parts):
                break
            budget -= self._chunk(self.waiting.popleft(), budget, parts)

    def _admit(self, seq: Sequence, parts: PlanParts) -> bool:
        """Gives seq a slot, the tokens that it need not compute, and what the policy gives it to begin with; False if
        it must wait. Whom the policy refused is not looked at again before pages were given back. Those that run don't
        wait for pages that are on their way here."""
        if self.running and seq.snapshot is not None and not seq.snapshot.ready:
            return False
        if self.refused == (seq, self.returns) or self.sharing.must_wait(seq):
            return False
        for reused in self.sharing.candidates(seq, not self.running):
            self.sharing.take(seq, reused)
            if self.policy.admit(seq, self.running):
                break
            self.sharing.give_back(seq, reused)
        else:
            self.refused = seq, self.returns
            return False
        self._begin(seq, reused, parts)
        return True

    def _begin(self, seq: Sequence, reused: ReusedPrefix, parts: PlanParts) -> None:
        self.sharing.begin(seq, reused)
        self.counts.recomputed += max(0, seq.lost - seq.computed)
        seq.lost = 0
        if reused.source is not None:  # held until its copy has been dispatched
            parts.copy([(reused.source, seq.pages[len(reused.pages)])])
            self.retired.append((self.dispatched + 1, [reused.source]))
        if reused.snapshot:
            parts.loads.append(seq)
        if seq.computed:
            parts.skips.append((seq, seq.computed))
        seq.slot = self.free_slots.pop()
        seq.prefill_end = seq.length
        self.empty += len(seq.pages) * self.pool.page_size - seq.computed
        insort(self.running, seq, key=attrgetter("order"))
        self.counts.admitted += 1

    def _chunk(self, seq: Sequence, budget: int, parts: PlanParts) -> int:
        """Append seq's next chunk, as long as budget, pages and deltas allow; returns its length, perhaps 0."""
        if not budget or len(parts.chunks) == self.limits.max_chunks:
            return 0
        want = seq.prefill_end - seq.computed
        n = self._grow(seq, seq.computed + min(budget, want), parts)
        if n:
            stop = seq.computed + n
            parts.chunks.append(Chunk(seq, seq.computed, seq.slice(seq.computed, stop), stop == seq.prefill_end))
        return n

    def on_tokens(self, seq: Sequence, tokens: Collection[int], rows: int = 1) -> None:
        """What a step made of seq, at least one token, read from the device; the step had `rows` rows for it. What
        comes after the end of a sequence is surplus, and dropped."""
        if seq.finish_reason is not None:
            return
        if not seq.in_flight:
            raise AssertionError(f"request {seq.request_id} sample {seq.sample}: tokens that were not in flight")
        seq.in_flight -= 1
        if rows > 1:
            more = len(tokens) - 1
            seq.computed += more
            seq.ahead -= rows - 1
            self.empty -= more
        seq.output += tokens
        if len(seq.output) == seq.prefill_end + 1 - len(seq.prompt):
            self.sharing.on_first_token(seq)

    def finish(self, seq: Sequence, reason: str) -> None:
        """End a sequence that waits or runs. Its slot and pages stay taken until the last step that may write them
        has been read."""
        if seq.finished:
            raise AssertionError(f"request {seq.request_id} sample {seq.sample} has already ended: {seq.finish_reason}")
        seq.finish_reason = reason
        self.counts.finished += 1
        self.policy.observe(seq)
        if seq.slot is None:
            self.waiting.remove(seq)
            seq.origin = seq.snapshot = None
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
        self._free_retired(step)
        for seq in [s for s in self.draining if s.last_step <= step]:
            self.draining.remove(seq)
            self._release(seq)

    def reset(self) -> None:
        """After a device error: what was in flight is lost and so is the pool. All that ran waits again, in its old
        order, to be recomputed."""
        for seq in reversed(self.running):
            self._requeue(seq)
            seq.slot, seq.pages, seq.mapped = None, [], 0
        for seq in self.draining:
            seq.slot, seq.pages, seq.mapped, seq.origin, seq.snapshot = None, [], 0, None, None
        self.running = []
        self.read = self.dispatched
        self._renew()

    def _preempt(self, seq: Sequence) -> None:
        """Take slot and pages from a running sequence of which nothing is in flight; it waits in its old place."""
        if seq.in_flight:
            raise AssertionError(f"request {seq.request_id} sample {seq.sample}: a sampled token was never taken in")
        self.running.remove(seq)
        self._release(seq)
        self.counts.preempted += 1
        seq.preemptions += 1
        self.preempted.append(seq)
        self._requeue(seq)

    def _requeue(self, seq: Sequence) -> None:
        seq.lost, seq.computed, seq.ahead, seq.cached, seq.in_flight = seq.computed, 0, 0, 0, 0
        seq.borrowed = 0
        self._queue(seq)

    def _queue(self, seq: Sequence) -> None:
        insort(self.waiting, seq, key=attrgetter("order"))
