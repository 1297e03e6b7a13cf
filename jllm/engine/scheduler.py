"""Plans which tokens the next step computes: admission, chunked prefill, page tables, preemption by recompute.

It is pure host code over integers. A policy (kv_policy.py) decides which pages a sequence gets, and which sequence is
preempted. page_tables.py puts pages where the device finds them. The loop drives it:

    plan = scheduler.schedule()         the plan counts as dispatched from here on
    dispatch it to the device; then, one step late, for the oldest unread step:
        on_tokens(seq, tokens, rows)    for each sequence that sampled in it; ignored once the sequence has ended
        finish(seq, reason)             where a token ended it: end token, stop text, max_length
        step_read(step)                 releases pages and slots that only that step kept

schedule() returns None if nothing can be dispatched before the step in flight is read, or before a request comes. The
loop then reads all unread steps and asks again. So a preemption drains first without a special case in the loop.

Fairness: running and waiting sequences are each ordered by priority, lower values first, then by arrival. No sequence
is admitted before the first waiting one. Every decode and the first prefill advance in every step. (Exception: steps
that many slots spend to fill compiled sizes, see Scheduler.) Waiting sequences preempt nothing. If pages are short, the
policy chooses a victim among running sequences with the highest value, never the first that runs. So the first sequence
in this order progresses, or waits only for running ones to end. With equal priorities every request ends. A request
starves while enough requests of lower values keep coming.

A sequence's beginning may exist already: in the prefix cache, in the sequence that it forks, in a snapshot (reuse.py).
When the policy is asked for more pages, seq.pages are shared full pages with seq.cached tokens. seq.computed also
counts tokens that the plan will copy or load into the sequence's own pages.
"""

from bisect import insort
from collections import deque
from collections.abc import Callable, Collection
from itertools import islice
from operator import attrgetter

from jllm.engine.kv_policy import PAGED, Policy
from jllm.engine.page_tables import PageTables
from jllm.engine.plan import PlanParts, ScheduleCounts, StepPlan, next_chunk
from jllm.engine.reuse import ReusedPrefix
from jllm.engine.sequence import Sequence
from jllm.errors import RequestError
from jllm.programs.sizes import NO_SIZES, Limits, StepSizes
from jllm.step.buckets import CHEAP


class Scheduler(PageTables):
    """Plans steps for one engine.

    sizes are the compiled ones. A step is planned so that little of its size is padding:

    - Where less than half of the slots decode, prompts are cut. Two small steps may have fewer rows than a large one,
      and decodes wait less. With few slots (no sizes.full) it is always so.
    - Where more decode, a step takes the largest full size that prompts can fill. If they fill none, it waits for more
      prompts, up to PATIENCE steps. It also does so where some decode, and pages are too few for all waiting prompts
      and free slots.
    - Without prompts, slightly more sequences may decode than a size holds, up to 1/EXCESS more. Then the extra ones
      skip this step, in turn. The delay costs less than padding to the next size.

    policy is the KV policy (kv_policy.py); the default allocates pages as tokens come.

    prefix_cache: pages outlive their sequences, for others that begin alike (reuse.py).

    draft_rows returns the most rows of a decode in a step of some decodes, with or without prompts. The default is
    limits.short_rows.

    most_joining limits the prompt tokens of a step in which only sequences with their own K and V prefill. Then running
    sequences hardly wait for them. None: no special limit.
    """

    PATIENCE = 8
    EXCESS = 8

    def __init__(
        self,
        limits: Limits,
        sizes: StepSizes = NO_SIZES,
        *,
        policy: Policy = PAGED,
        prefix_cache: bool = False,
        draft_rows: Callable[[int, bool], int] | None = None,
        most_joining: int | None = None,
    ):
        super().__init__(limits, policy, prefix_cache)
        self.draft_rows, self.most_joining = draft_rows, most_joining
        self.sizes = sizes
        self.turn = 0  # round-robin offset of decodes that skip a step
        self.held = 0  # steps for which prompts have waited for others to fill a step with
        self.waiting: deque[Sequence] = deque()  # in the order of priority and arrival, like `running`
        self.arrivals = 0  # sequences that were ever added
        self.read = -1  # the newest step that was read
        self._renew()

    def _renew(self) -> None:
        super()._renew()
        self.refused: tuple[Sequence, int] | None = None  # a sequence that lacked pages, and self.returns then
        self.preempted: list[Sequence] = []  # since the last plan
        self.draining: list[Sequence] = []  # ended, but an unread step may still write their pages

    @property
    def unread(self) -> int:
        """Returns how many steps are dispatched and not read."""
        return self.dispatched - self.read

    @property
    def active(self) -> bool:
        """Returns whether a sequence runs or a step is unread."""
        return bool(self.running or self.unread)

    @property
    def idle(self) -> bool:
        """Returns whether there is nothing to do, now or after a read."""
        return not (self.waiting or self.active)

    def check_length(self, length: int, max_length: int) -> None:
        """Raises RequestError if a sequence of `length` tokens could never run to max_length."""
        if not 0 < length < max_length:
            raise RequestError(f"there must be at least 1 token and fewer than max_length = {max_length}, not {length}")
        self.policy.check(length, max_length)

    def arrive(self, seq: Sequence) -> None:
        """Gives a new sequence its place in the order of arrival. Raises RequestError if it could never run to its
        max_length."""
        self.check_length(seq.length, seq.max_length)
        seq.arrival, self.arrivals = self.arrivals, self.arrivals + 1

    def add(self, seq: Sequence) -> None:
        """Queues a new sequence, in its place if it has arrived before (otherwise it arrives now)."""
        if seq.arrival < 0:
            self.arrive(seq)
        self._queue(seq)
        self.counts.added += 1

    def reset_counts(self) -> None:
        self.counts = ScheduleCounts()
        self.sharing.reset_counts()

    def schedule(self) -> StepPlan | None:
        """Returns the next step, or None if there is nothing to dispatch now. The plan counts as dispatched."""
        room = self._make_room()
        if room is None:
            self.counts.drains += 1
            return None
        decodes, short, prefills = room
        limits = self.limits
        prompts = bool(prefills or (self.waiting and self.free_slots))
        rows = self._most_rows(len(decodes), True) if prompts else 1  # without prompts it is called below
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
        """Returns None: there is nothing to dispatch before a read or a request."""
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
            tuple(parts.begun),
            tuple(preempted),
        )

    def _make_room(self) -> tuple[list[Sequence], list[Sequence], list[Sequence]] | None:
        """Returns (decodes, short, prefills), after preempting until each sequence of `short` can have a page.

        decodes are the sequences that decode now, prefills those that prefill. short are the decodes, and the oldest
        prefill, whose next token has no page in the page table. Returns None if pages are short and a step is unread.
        Reading it may end a sequence, and the tokens of a sequence must be known before it is preempted.
        """
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
        """Returns the first running sequence, and the victims that the policy may choose: all others of the highest
        value."""
        first, *others = self.running
        return [first, *(s for s in others if s.priority == self.running[-1].priority)]

    def _decoding(self, prefills: list[Sequence]) -> list[Sequence]:
        """Returns the sequences that decode beside these prefills. If a sequence's sampled tokens already reach
        max_length, it waits for its read."""
        return [s for s in self.running if s.prefill_end <= s.computed < s.max_length - 1]

    def _map(self, short: list[Sequence], parts: PlanParts) -> None:
        """Maps a page for the next token of each, even of sequences that may skip this step."""
        for left, seq in zip(range(len(short) - 1, -1, -1), short):
            self._grow(seq, seq.reach, parts, left)

    def _most_rows(self, decodes: int, prompts: bool) -> int:
        """Returns the most rows of each decode in a step with these decodes, with or without prompts."""
        if decodes > self.limits.most_short:
            return 1
        most = self.limits.short_rows
        return most if self.draft_rows is None else min(most, self.draft_rows(decodes, prompts))

    def _rows(self, decodes: list[Sequence], most: int, parts: PlanParts) -> tuple[int, ...]:
        """Returns the rows of each decode: `most` if their pages exist or are spare, else one."""
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
        """Returns how many prompt tokens to take, at most budget, so that a step with `decodes` decodes has little
        padding."""
        if self.most_joining is not None and self._joins(prefills):
            return min(budget, self.most_joining)
        ready = sum(s.prefill_end - s.computed for s in prefills)
        if not self.sizes.mixed or not (ready or (self.waiting and self.free_slots)):
            return budget
        coming, short = self.policy.admissible(islice(self.waiting, len(self.free_slots)), self.running, budget - ready)
        tokens = min(ready + coming, budget)
        if not tokens:  # a sequence whose prompt is all in shared pages is admitted anyway
            self.held = 0
            return budget
        if not (decodes and self.sizes.full) or (2 * decodes < self.limits.max_slots and not short):
            self.held = 0
            return self._fewest_rows(decodes, tokens, budget)
        full = [n for n in self.sizes.full if n <= tokens]
        self.held = 0 if full else self.held + 1
        if 0 < self.held <= self.PATIENCE:
            return 0
        self.held = 0
        return full[-1] if full else budget

    def _fewest_rows(self, decodes: int, tokens: int, budget: int) -> int:
        """Returns how many prompt tokens the next step takes, so that steps of one size, and a last one for the rest,
        compute all of them with the fewest rows. Among equals it takes the largest. CHEAP rows cost no more than one.
        """
        joining = self.most_joining or 0  # prompts that are computed here don't go through the sizes for joining
        fits = [(r, c) for r, c in self.sizes.mixed if r >= decodes and c > joining]

        def rows(size: tuple[int, int]) -> int:
            whole, rest = divmod(tokens, size[1])
            last = min((max(CHEAP, r + c) for r, c in fits if c >= rest), default=0) if rest else 0
            return whole * max(CHEAP, sum(size)) + last

        _, best = min(fits, key=lambda size: (rows(size), -size[1]), default=(0, budget))
        return min(budget, best)

    def _joins(self, prefills: list[Sequence]) -> bool:
        """Returns whether only sequences that come with their K and V prefill."""
        few = all(s.prefill_end - s.computed < self.limits.block for s in prefills)
        return few and bool(prefills or (self.waiting and self.waiting[0].snapshot is not None))

    def _trim(self, decodes: list[Sequence]) -> list[Sequence]:
        """Returns the decodes without the few that would make the step a size larger."""
        fits = max((size for size in self.sizes.decodes if size <= len(decodes)), default=0)
        excess = len(decodes) - fits
        if not 0 < excess <= fits // self.EXCESS:
            return decodes
        self.turn = (self.turn + excess) % len(decodes)
        turned = decodes[self.turn :] + decodes[: self.turn]
        return turned[:fits]

    def _prefill(self, running: list[Sequence], budget: int, parts: PlanParts) -> None:
        """Adds chunks of at most budget tokens: running prefills first, then admissions, each in order."""
        for seq in running:
            budget -= self._chunk(seq, budget, parts)
        while self.waiting and self.free_slots and budget and len(parts.chunks) < self.limits.max_chunks:
            if len(parts.deltas) == self.limits.max_deltas or not self._admit(self.waiting[0], parts):
                break
            budget -= self._chunk(self.waiting.popleft(), budget, parts)

    def _admit(self, seq: Sequence, parts: PlanParts) -> bool:
        """Admits seq with a slot, its reused prefix and its first pages; returns False if it must wait.

        A refused sequence is not tried again before pages are freed. Running sequences don't wait for a snapshot that
        is still on its way here.
        """
        if self.running and seq.snapshot is not None and not seq.snapshot.ready:
            return False
        if self.refused == (seq, self.returns) or self.sharing.must_wait(seq):
            return False
        if seq.taps is not None and self._tap_rows(parts) < self.limits.short_rows:
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
        if reused.source is not None:  # it is held until its copy is dispatched
            parts.copy([(reused.source, seq.pages[len(reused.pages)])])
            self.retired.append((self.dispatched + 1, [reused.source]))
        if reused.snapshot:
            parts.loads.append(seq)
        parts.begun.append((seq, seq.computed))
        seq.slot = self.free_slots.pop()
        seq.prefill_end = seq.length
        self.empty += len(seq.pages) * self.pool.page_size - seq.computed
        insort(self.running, seq, key=attrgetter("order"))
        self.counts.admitted += 1

    def _chunk(self, seq: Sequence, budget: int, parts: PlanParts) -> int:
        """Appends seq's next chunk, as long as budget, pages and deltas allow; returns its length, perhaps 0."""
        if not budget or len(parts.chunks) == self.limits.max_chunks:
            return 0
        want = seq.prefill_end - seq.computed
        if seq.taps is not None:
            wanted = seq.taps.wanted(seq.computed, seq.prefill_end)
            most = self.limits.short_rows + self._tap_rows(parts)
            want = wanted[most] - seq.computed if len(wanted) > most else want
        n = self._grow(seq, seq.computed + min(budget, want), parts)
        if n:
            parts.chunks.append(next_chunk(seq, n, self.pool.page_size))
            if seq.taps is not None:
                rows = len(seq.taps.wanted(seq.computed, seq.computed + n))
                parts.tapped += max(0, rows - self.limits.short_rows)
        return n

    def _tap_rows(self, parts: PlanParts) -> int:
        """Returns how many rows of the step more requests may ask for. Each running sequence that asks has those of its
        next decode for itself."""
        running = sum(seq.taps is not None for seq in self.running)
        return (self.limits.tap_rows or 0) - running * self.limits.short_rows - parts.tapped

    def on_tokens(self, seq: Sequence, tokens: Collection[int], rows: int = 1) -> None:
        """Takes in the tokens that a step sampled for seq, at least one; the step had `rows` rows for it. Tokens after
        the end of a sequence are dropped."""
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
        """Ends a sequence that waits or runs. It keeps its slot and pages until the last step that may write them is
        read."""
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
        """Takes note that all outputs of this step are taken in. Steps are read in order."""
        if not self.read + 1 == step <= self.dispatched:
            raise AssertionError(f"step {step} read after {self.read}, dispatched up to {self.dispatched}")
        self.read = step
        self._free_retired(step)
        for seq in [s for s in self.draining if s.last_step <= step]:
            self.draining.remove(seq)
            self._release(seq)

    def start_over(self, of: Callable[[Sequence], bool] | None = None) -> None:
        """Preempts all running sequences, and forgets all prefixes: the weights are others. No step may be unread. With
        `of` it preempts these sequences alone, whose prefixes have another key."""
        for seq in [seq for seq in self.running if of is None or of(seq)]:
            self.counts.preempted_by["update"] += 1
            self._preempt(seq)
        if of is None:
            self.sharing.clear()

    def keep_on(self, of: Callable[[Sequence], bool] | None = None) -> None:
        """Lets running sequences continue over K and V of older weights. Nothing else uses these. `of` is as in
        start_over."""
        for seq in (*self.running, *self.draining):
            seq.kept = seq.kept or of is None or of(seq)
        for seq in self.waiting:
            if of is None or of(seq):
                seq.origin = None
        if of is None:
            self.sharing.clear()

    def reset(self) -> None:
        """Makes a new pool after a device error or for sleep: the old one and steps in flight are lost. All running
        sequences wait again, in their old order, to be recomputed."""
        for seq in reversed(self.running):
            self._requeue(seq)
            seq.slot, seq.pages, seq.mapped = None, [], 0
        for seq in self.draining:
            seq.slot, seq.pages, seq.mapped, seq.origin, seq.snapshot = None, [], 0, None, None
        self.running = []
        self.read = self.dispatched
        self._renew()

    def _preempt(self, seq: Sequence) -> None:
        """Takes slot and pages from a running sequence with nothing in flight; it waits in its old place."""
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
        seq.borrowed, seq.kept = 0, False
        self._queue(seq)

    def _queue(self, seq: Sequence) -> None:
        insort(self.waiting, seq, key=attrgetter("order"))
