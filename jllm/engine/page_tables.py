"""Keeps the pages that sequences hold, and the part of them that the device's page table has.

Drafts: if a short segment has several rows, a decode gets extra rows as far as their pages exist. Unread steps may have
advanced it by several tokens. It needs pages for these tokens, for the rows, and for one token after them. So the next
step can always follow. Drafts use spare pages. They give them back before a sequence waits for a page or is preempted.
"""

from jllm.engine.kv_policy import Policy
from jllm.engine.plan import PlanParts, ScheduleCounts
from jllm.engine.reuse import Sharing
from jllm.engine.sequence import Sequence
from jllm.programs.sizes import Limits


class PageTables:
    """Is the scheduler's half that hands out slots and pages. It makes a new policy with each pool."""

    def __init__(self, limits: Limits, policy: Policy, prefix_cache: bool):
        self.limits, self.policy = limits, policy
        self.sharing = Sharing(prefix_cache, limits.block)
        self.counts = ScheduleCounts()
        self.running: list[Sequence] = []
        self.dispatched = -1  # the newest planned step

    def _renew(self) -> None:
        """Makes a pool in which everything is free."""
        self.pool = self.policy.make_pool(self.limits.num_pages, self.limits.page_size)
        self.policy = self.policy.over(self.pool)
        self.sharing.renew(self.pool)
        self.returns = 0  # how often pages were given back
        self.free_slots = list(range(self.limits.max_slots - 1, -1, -1))
        self.empty = 0  # free token places in the pages of sequences
        self.retired: list[tuple[int, list[int]]] = []  # (step that copies these pages elsewhere, pages)

    def _grow(self, seq: Sequence, tokens: int, parts: PlanParts, others: int = 0) -> int:
        """Allocates pages for seq's first `tokens`, and puts them into the page table.

        It goes as far as the policy and the room for changes allow. A page and a change stay for each of `others`
        sequences. Returns how many uncomputed tokens have their page.
        """
        room = self.limits.max_deltas - len(parts.deltas) - others
        need, have = self.pool.pages_for(tokens), len(seq.pages)
        if need > have:
            seq.borrowed, missing = 0, min(need - have, room)
            self.counts.outgrown += 0 < seq.expected <= seq.computed
            copies = self.policy.grow(seq, missing, others, room) if missing > 0 else []
            self.empty += (len(seq.pages) - have) * self.pool.page_size
            if copies:
                self.counts.moved += 1
                parts.copy(copies)
                seq.mapped = have - len(copies)
                self.retired.append((self.dispatched + 1, [page for page, _ in copies]))
        self._put(seq, min(need, seq.mapped + room), parts)
        return max(0, min(tokens, seq.mapped * self.pool.page_size) - seq.computed)

    def _put(self, seq: Sequence, pages: int, parts: PlanParts) -> None:
        """Puts the first `pages` pages of seq into the page table, as far as it has them."""
        assert seq.slot is not None
        new = seq.pages[seq.mapped : pages]
        parts.deltas.extend((seq.slot, seq.mapped + i, page) for i, page in enumerate(new))
        seq.mapped += len(new)

    def _lend(self, seq: Sequence, tokens: int, spare: int, parts: PlanParts) -> bool:
        """Takes at most `spare` pages so that the first tokens of seq have pages in the page table. Returns whether
        they have."""
        need = self.pool.pages_for(min(tokens, seq.max_length - 1))
        missing, changes = max(0, need - len(seq.pages)), max(0, need - seq.mapped)
        if missing > max(0, spare) or changes > self.limits.max_deltas - len(parts.deltas):
            return False
        seq.pages += self.pool.allocate(missing) or []
        seq.borrowed += missing
        self.empty += missing * self.pool.page_size
        self._put(seq, need, parts)
        return True

    def _return_borrowed(self) -> bool:
        """Frees pages that were taken for drafts and that no unread step may write. Returns whether there were any."""
        found = False
        for seq in self.running if self.limits.short_rows > 1 else ():
            seq.borrowed = min(seq.borrowed, len(seq.pages) - self.pool.pages_for(seq.reach))
            if seq.borrowed > 0:
                found, keep = True, len(seq.pages) - seq.borrowed
                self.pool.free(seq.pages[keep:])
                del seq.pages[keep:]
                seq.mapped = min(seq.mapped, keep)
                self.empty -= seq.borrowed * self.pool.page_size
            seq.borrowed = 0
        self.returns += found
        return found

    def _free_retired(self, step: int) -> None:
        """Frees pages that were copied by steps up to this one."""
        while self.retired and self.retired[0][0] <= step:
            self.pool.free(self.retired.pop(0)[1])
            self.returns += 1

    def _release(self, seq: Sequence) -> None:
        """Frees slot and pages of a sequence that ended or is preempted; the prefix cache keeps its full pages."""
        assert seq.slot is not None
        self.empty -= len(seq.pages) * self.pool.page_size - seq.computed
        self.sharing.on_release(seq)
        self.policy.release(seq)
        self.returns += 1
        self.free_slots.append(seq.slot)
        seq.slot, seq.mapped, seq.borrowed = None, 0, 0
        if seq.finished:
            seq.origin = seq.snapshot = None
