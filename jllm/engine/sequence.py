"""The host's record of one sample of one request."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Optional

from jllm.engine.request import SamplingParams

if TYPE_CHECKING:
    from jllm.engine.moved import DevicePages
    from jllm.files.snapshot import Snapshot


@dataclass(eq=False, slots=True)
class Sequence:
    """Mutable, and once the ledger has it changed by the scheduler alone; compared by identity.

    It waits (slot is None), runs (it has a slot and stands in Scheduler.running) or has ended (finish_reason is set;
    slot and pages stay its own until the last step that may write them has been read). While it runs, it prefills
    until its KV reaches prefill_end and then decodes, where computed == length + in_flight - 1: the newest token has
    no KV yet, it is the input of the next step.

    A step with drafts may advance it by more than one token, which the host learns when it reads the step. Until then
    the tokens with KV on the device are between computed, which counts one for each unread step, and computed + ahead.
    """

    request_id: int
    sample: int
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    max_length: int  # most tokens that prompt and output may come to
    output: list[int] = field(default_factory=list)  # tokens read so far
    slot: int | None = None
    pages: list[int] = field(default_factory=list)  # all that it holds
    mapped: int = 0  # how many of them, from the first, the device's page table has
    cached: int = 0  # tokens that it found computed when it was admitted, in full pages that it shares
    computed: int = 0  # tokens whose KV is written, or will be by a step that was dispatched, at least
    ahead: int = 0  # tokens that unread steps may have computed beyond these
    borrowed: int = 0  # pages at the end of `pages` that were taken for drafts alone
    lost: int = 0  # tokens that were computed when it had to give up its pages, until it is admitted again
    prefill_end: int = 0  # tokens to prefill: those known at admission
    in_flight: int = 0  # dispatched steps that sample for it and are not yet read
    expected: int = 0  # tokens of KV that it is thought to come to, once a policy asked
    arrival: int = -1  # the place in the order of arrival, given by the scheduler
    priority: int = 0  # lower values first
    origin: Optional["Sequence"] = None  # the sequence that it continues: another sample, or what it is a fork of
    common: int = 0  # tokens that both begin with
    guided: int = 0  # the index of the first token that its guide is of, if it has one
    snapshot: "Snapshot | DevicePages | None" = None  # K and V of its first tokens: these are taken as they are
    moved: bool = False  # from another engine: its snapshot is loaded once, and lost with its pages
    private: bool = False  # these may be edited, so that its pages are no other request's
    stop_ids: frozenset[int] = frozenset()  # tokens that end it: the ledger gives them
    preemptions: int = 0
    last_step: int = -1  # the newest dispatched step that includes it
    finish_reason: str | None = None

    @property
    def length(self) -> int:
        """Returns tokens known to the host."""
        return len(self.prompt) + len(self.output)

    @property
    def order(self) -> tuple[int, int]:
        """Returns its place among those that wait, and among those that run."""
        return self.priority, self.arrival

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.prompt + tuple(self.output)

    @property
    def prefilling(self) -> bool:
        """Returns whether KV of tokens known at admission is still to be computed (running sequences only)."""
        return self.computed < self.prefill_end

    @property
    def reach(self) -> int:
        """Returns tokens that need a page before the next one is decoded. The last token of all never gets KV."""
        return min(self.computed + self.ahead + 1, self.max_length - 1)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def slice(self, start: int, stop: int) -> tuple[int, ...]:
        """Returns tokens[start:stop] without building tokens."""
        n = len(self.prompt)
        if stop <= n:
            return self.prompt[start:stop]
        return self.prompt[start:] + tuple(self.output[max(start - n, 0) : stop - n])
