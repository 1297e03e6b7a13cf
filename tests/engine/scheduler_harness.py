"""A model of the device, which reads its KV through the page table that the plans built, and a loop that drives a
scheduler against it and checks whatever must hold."""

import random
import zlib
from collections import deque
from dataclasses import dataclass, field

from jllm.engine.plan import Chunk, StepPlan
from jllm.engine.request import SamplingParams
from jllm.engine.scheduler import Scheduler
from jllm.engine.sequence import Sequence
from jllm.programs.sizes import Limits

STOP_ID, STOP_TEXT = 0, 1  # tokens that end a sequence: known to the device, known to the host alone

GARBAGE = 255  # what a page holds that was not written


def sample(tokens) -> int:
    """The device's model: the next token is a function of all tokens whose KV it reads, and of their order."""
    return zlib.crc32(bytes(tokens)) % 12


def ends(params: SamplingParams, token: int, produced: int) -> str | None:
    """Why a sequence ends with this token, its `produced`-th."""
    if token in params.stop_token_ids or (token == STOP_TEXT and params.stop):
        return "stop"
    return "length" if produced == params.max_new_tokens else None


def output_of(prompt: tuple[int, ...], params: SamplingParams) -> list[int]:
    """The output that a sequence must have, whatever runs beside it."""
    tokens = list(prompt)
    while True:
        tokens.append(sample(tokens))
        if ends(params, tokens[-1], len(tokens) - len(prompt)):
            return tokens[len(prompt) :]


def alone(seq: Sequence) -> list[int]:
    return output_of(seq.prompt, seq.params)


@dataclass
class Row:
    """A slot on the device."""

    table: dict[int, int] = field(default_factory=dict)  # index -> page
    seq: Sequence | None = None
    length: int = 0  # KV written
    last: int | None = None
    done: bool = True


@dataclass(frozen=True)
class Sampled:
    """What a step made of a sequence that had `rows` rows in it."""

    seq: Sequence
    tokens: list[int]
    rows: int = 1


class Device:
    """Executes plans in order, as they are dispatched; a slot that it knows to be done writes nothing. A decode of
    several rows advances by any number of tokens that they allow, as if that many drafts were right."""

    def __init__(self, limits: Limits):
        self.limits = limits
        self.random = random.Random(0)
        self.written: set[tuple[Sequence, int]] = set()  # pages, since somebody cleared it
        self.rows = [Row() for _ in range(limits.max_slots)]
        self.memory: dict[tuple[int, int], int] = {}  # (page, offset) -> token

    def run(self, plan: StepPlan) -> list[Sampled]:
        assert len({(slot, index) for slot, index, _ in plan.deltas}) == len(plan.deltas), "two changes of one entry"
        sources, targets = {page for page, _ in plan.copies}, {page for _, page in plan.copies}
        assert len(targets) == len(plan.copies), "a page is copied to twice"
        assert not sources & targets, "a page is both read and written by copies"
        offsets = range(self.limits.page_size)
        self.memory |= {(to, i): self.memory.get((page, i), GARBAGE) for page, to in plan.copies for i in offsets}
        for slot, index, page in plan.deltas:
            self.rows[slot].table[index] = page
        out = []
        for seq, rows in zip(plan.decodes, plan.rows, strict=True):
            row = self.rows[seq.slot]
            assert row.seq is seq, "a slot decodes that was never filled"
            if not row.done:
                assert seq.computed - 1 <= row.length <= seq.computed + seq.ahead - rows, "another length than is known"
                out.append(Sampled(seq, self.decode(row, rows), rows))
        for chunk in plan.chunks:
            row = self.rows[chunk.seq.slot]
            if self.begins(row, chunk):
                row.seq, row.length, row.last, row.done = chunk.seq, chunk.start, None, False
            assert row.seq is chunk.seq
            assert row.length == chunk.start, "a position is left out or written twice"
            self.write(row, chunk.tokens)
            if chunk.final:
                out.append(Sampled(row.seq, [self.sample(row)]))
        return out

    def decode(self, row: Row, rows: int) -> list[int]:
        """Writes all rows, and then the right tokens over the first drafts."""
        start = row.length
        self.write(row, [row.last, *[GARBAGE] * min(rows - 1, row.seq.max_length - 2 - start)])
        row.length, tokens = start, []
        for _ in range(self.random.randint(1, rows)):
            self.write(row, [row.last])
            tokens.append(self.sample(row))
            if row.done:
                break
        return tokens

    def begins(self, row: Row, chunk: Chunk) -> bool:
        """Whether this chunk is the first of its slot's new sequence."""
        return chunk.start == 0

    def write(self, row: Row, tokens):
        for token in tokens:
            index, offset = divmod(row.length, self.limits.page_size)
            assert index in row.table, "the device's page table is another"
            assert row.table[index] in row.seq.pages, "a page is written that its sequence does not hold"
            self.written.add((row.seq, row.table[index]))
            self.memory[row.table[index], offset] = token
            row.length += 1

    def sample(self, row: Row) -> int:
        size = self.limits.page_size
        row.last = sample([self.memory.get((row.table[i // size], i % size), GARBAGE) for i in range(row.length)])
        row.done = row.last in row.seq.params.stop_token_ids or row.length + 1 == row.seq.max_length
        return row.last


class Loop:
    """Drives a scheduler as the engine does and checks whatever must hold of each plan and between any two actions."""

    make_device = Device

    def __init__(self, limits: Limits, scheduler=Scheduler):
        self.limits = limits
        self.scheduler: Scheduler = scheduler(limits)
        self.device = self.make_device(limits)
        self.unread: deque = deque()  # (plan, outputs, what each of its sequences held)
        self.seqs: list[Sequence] = []
        self.admitted = False  # by the newest plan

    def add(self, prompt, new_tokens=4, stop_id=False, stop_text=False, priority=0) -> Sequence:
        ids, text = (STOP_ID,) if stop_id else (), ("x",) if stop_text else ()
        params = SamplingParams(stop_token_ids=ids, stop=text, max_new_tokens=max(1, new_tokens))
        prompt = tuple(range(2, prompt + 2)) if isinstance(prompt, int) else tuple(prompt)
        seq = Sequence(len(self.seqs), 0, prompt, params, 0, len(prompt) + new_tokens, priority=priority)
        self.scheduler.add(seq)
        self.seqs.append(seq)
        return seq

    def dispatch(self) -> StepPlan | None:
        s = self.scheduler
        before = {seq: (0 if seq.slot is None else seq.computed) for seq in self.seqs}
        preempted, admissions = {seq: seq.preemptions for seq in self.seqs}, s.counts.admitted
        waited, ran, oldest = {*s.waiting}, [*s.running], s.running[0] if s.running else None
        plan = s.schedule()
        assert oldest is None or oldest.preemptions == preempted[oldest], "the oldest was preempted"
        gone = [seq.priority for seq in ran[1:] if seq.preemptions > preempted[seq]]
        kept = [seq.priority for seq in ran[1:] if seq.preemptions == preempted[seq]]
        assert not gone or not kept or min(gone) >= max(kept), "a more urgent one was preempted"
        entered = [seq.order for seq in s.running if seq in waited]
        left = [seq.order for seq in s.waiting if seq in waited]
        assert not entered or not left or max(entered) < min(left), "one that came later was admitted first"
        assert not self.admitted or sum(preempted.values()) == s.counts.preempted, "admitted only to be preempted"
        if plan is None:
            assert self.unread or not (s.running or s.waiting), "nothing runs though nothing stands in the way"
            return None
        self.admitted = s.counts.admitted > admissions
        assert plan.step == s.dispatched
        self.check(plan, {seq: 0 if seq.preemptions > preempted[seq] else n for seq, n in before.items()})
        if s.counts.preempted > sum(preempted.values()):
            assert not any(seq.borrowed for seq in s.running), "preempted though drafts held pages"
        read, size = [page for page, _ in plan.copies], self.limits.page_size
        self.device.written.clear()
        outputs = self.device.run(plan)
        held = [(seq, seq.slot, seq.pages[: -(-seq.computed // size)] + read) for seq in in_plan(plan)]
        held += [(seq, seq.slot, [page]) for seq, page in self.device.written]
        self.unread.append((plan, outputs, held))
        return plan

    def check(self, plan: StepPlan, before: dict[Sequence, int]):
        s, limits = self.scheduler, self.limits
        chunk_tokens = sum(len(c.tokens) for c in plan.chunks)
        assert plan.decodes or plan.chunks or plan.deltas, "a step for nothing"
        assert len(plan.decodes) * limits.short_rows + chunk_tokens <= limits.max_step_tokens
        assert all(1 <= rows <= limits.short_rows for rows in plan.rows)
        assert chunk_tokens <= limits.max_prompt_tokens
        assert len(plan.chunks) <= limits.max_chunks
        assert len(plan.deltas) <= limits.max_deltas
        assert len(set(in_plan(plan))) == len(in_plan(plan)) <= limits.max_slots
        for seq in in_plan(plan):
            assert not seq.finished
            assert seq in s.running
            assert seq.last_step == plan.step
            assert seq.length + seq.in_flight <= seq.max_length, "dispatched beyond max_length"
            assert seq.computed < seq.max_length, "KV that nothing reads"
            written = min(seq.computed + seq.ahead, seq.max_length - 1)
            assert limits.page_size * seq.mapped >= written, "no page for a position that is written"
        for seq in plan.decodes:
            assert seq.computed == before[seq] + 1, "a position is left out or written twice"
        for c in plan.chunks:
            assert c.start == before[c.seq], "a position is left out or written twice"
            assert c.tokens == c.seq.tokens[c.start : c.seq.computed] != ()
            assert c.final == (c.seq.computed == c.seq.length)
        oldest = s.running[0]
        mapped = {slot for slot, _, _ in plan.deltas}  # its page table may take more than a step
        taking_part = oldest in in_plan(plan) or (oldest.prefilling and oldest.slot in mapped)
        assert taking_part or oldest.length + oldest.in_flight == oldest.max_length, "the oldest is held up"
        left = limits.max_step_tokens - len(plan.decodes) * limits.short_rows
        left = min(left, limits.max_prompt_tokens) - chunk_tokens
        left = left and not s.sizes.mixed  # for which prompts are cut
        if left and len(plan.chunks) < limits.max_chunks and len(plan.deltas) < limits.max_deltas and s.pool.num_free:
            assert all(not seq.prefilling for seq in s.running), "a prompt waits though there is room for it"

    def read(self):
        plan, outputs, _ = self.unread.popleft()
        for sampled in outputs:
            seq, known, reason = sampled.seq, len(sampled.seq.output), None
            for n, token in enumerate(sampled.tokens, 1):
                if reason := ends(seq.params, token, known + n):
                    break
            self.scheduler.on_tokens(seq, sampled.tokens[:n], sampled.rows)
            if reason and not seq.finished:
                self.scheduler.finish(seq, reason)
        self.scheduler.step_read(plan.step)

    def abort(self, seq: Sequence):
        if not seq.finished:
            self.scheduler.finish(seq, "abort")

    def lose_device(self):
        self.unread.clear()
        self.device = self.make_device(self.limits)
        self.scheduler.reset()

    def step(self, late=1) -> StepPlan | None:
        """Dispatches a step and reads all but the last `late`; everything if there was none to dispatch."""
        plan = self.dispatch()
        self.check_state()
        while self.unread and (plan is None or len(self.unread) > late):
            self.read()
            self.check_state()
        return plan

    def run(self, late=1):
        """Until all have ended: in a bounded number of steps, as each advances the oldest sequence unless that one
        waits for a read of its last token or has just ended on the device; and as only those that wait now and are more
        urgent can take what it has computed."""
        bound = self.scheduler.dispatched + 2 * sum(seq.max_length + 2 for seq in self.seqs if not seq.finished)
        while not self.scheduler.idle:
            self.step(late)
            assert self.scheduler.dispatched <= bound, "no progress"
        self.check_end()

    def check_pages(self, taken: list[int]):
        """`taken`: pages of sequences, and those that plans still read."""
        pool = self.scheduler.pool
        assert sorted([*taken, *pool.free_pages]) == list(range(pool.num_pages)), "a page is lost or has two owners"
        assert all(pool.refcount(page) == 1 for page in taken), "references are miscounted"

    def check_state(self):
        s, limits = self.scheduler, self.limits
        owners = s.running + s.draining
        retired = [page for _, pages in s.retired for page in pages]
        self.check_pages([page for seq in owners for page in seq.pages] + retired)
        room = sum(len(seq.pages) * limits.page_size - seq.computed for seq in owners)
        assert s.empty == room, "the room in pages is miscounted"
        slots = [seq.slot for seq in owners] + s.free_slots
        assert sorted(slots) == list(range(limits.max_slots)), "a slot is lost or has two owners"
        for seq in self.seqs:
            if seq not in owners:
                assert seq.slot is None
                assert seq.pages == []
        for seq in owners:
            table = self.device.rows[seq.slot].table
            assert [table.get(i) for i in range(seq.mapped)] == seq.pages[: seq.mapped], (
                "the device's page table is another"
            )
            row = self.device.rows[seq.slot]
            if not seq.in_flight and not seq.finished and row.seq is seq:
                assert (seq.ahead, seq.computed) == (0, row.length), "the host knows another length than the device"
        for _, _, held in self.unread:
            for seq, slot, taken in held:
                assert seq.slot == slot, "a slot was given back though an unread step uses it"
                kept = {*seq.pages, *retired}
                assert kept.issuperset(taken), "pages were given back though an unread step may write them"
        for order in ([(seq.priority, seq.request_id) for seq in some] for some in (s.running, s.waiting)):
            assert order == sorted(order), "one that came later stands before one that came earlier"
        order = [seq.request_id for seq in [*s.running, *s.waiting]]
        assert sorted(order) == [seq.request_id for seq in self.seqs if not seq.finished]

    def check_end(self):
        s = self.scheduler
        assert all(seq.finished for seq in self.seqs)
        assert s.pool.num_available == self.limits.num_pages
        assert s.counts.added == s.counts.finished == len(self.seqs)
        assert s.counts.preempted == sum(seq.preemptions for seq in self.seqs)
        for seq in self.seqs:
            expected = alone(seq)
            assert seq.origin is seq.snapshot is None, "what has ended keeps others alive"
            if seq.finish_reason == "abort":
                assert seq.output == expected[: len(seq.output)], "another output than alone"
            else:
                assert seq.output == expected, "another output than alone"
                assert seq.finish_reason == ends(seq.params, seq.output[-1], len(seq.output))


def in_plan(plan: StepPlan) -> list[Sequence]:
    return [*plan.decodes, *(chunk.seq for chunk in plan.chunks)]
