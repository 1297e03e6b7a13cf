"""Defines the host's record of one sample of a request."""

import time
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Optional

from jllm.engine.output import OutputText
from jllm.engine.request import SamplingParams, TokenLogprob

if TYPE_CHECKING:
    from jllm.engine.adapters import Held
    from jllm.engine.inputs import Inputs
    from jllm.engine.moved import DevicePages
    from jllm.engine.tapped import Tapped
    from jllm.files.snapshot import Snapshot
    from jllm.guides.matcher import Matcher


@dataclass(eq=False, slots=True)
class Sequence:
    """Holds all that the host knows of a sample. It is mutable, and compared by identity.

    The first fields say what was asked for. The next ones are the scheduler's half. The last ones are the client's
    half, from which samples.py makes events.

    A sequence waits (slot is None), runs (it stands in Scheduler.running) or has ended (finish_reason is set). An ended
    one keeps its slot and pages until the last step that may write them was read. A running one prefills until its KV
    reaches prefill_end. Then it decodes, and computed == length + in_flight - 1: the newest token has no KV yet. It is
    the input of the next step.

    A step with drafts may advance it by several tokens. The host learns how many when it reads the step. Until then the
    device has KV of `computed` tokens, and of at most `ahead` more. `computed` counts one for each unread step.
    """

    request_id: int
    sample: int
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    max_length: int  # most tokens that prompt and output may come to
    output: list[int] = field(default_factory=list)  # tokens read so far
    adapter: Optional["Held"] = None  # that the params name
    # The scheduler's half
    slot: int | None = None
    pages: list[int] = field(default_factory=list)  # all that it holds
    mapped: int = 0  # how many of them, from the first, the device's page table has
    cached: int = 0  # tokens that were computed already when it was admitted, in full pages that it shares
    computed: int = 0  # tokens, at least, whose KV the dispatched steps have written or will write
    ahead: int = 0  # tokens beyond these that unread steps may have computed
    borrowed: int = 0  # pages at the end of `pages` that were taken for drafts alone
    lost: int = 0  # tokens that were computed when it was preempted, until it is admitted again
    prefill_end: int = 0  # tokens to prefill: those known at admission
    in_flight: int = 0  # unread steps that sample for it
    expected: int = 0  # tokens of KV that a policy expects it to have in the end
    arrival: int = -1  # its place in the order of arrival, given by the scheduler
    priority: int = 0  # lower values first
    origin: Optional["Sequence"] = None  # the sequence that it continues: another sample, or the one that was forked
    common: int = 0  # tokens that both begin with
    inputs: "Inputs | None" = None  # the request's own arrays
    taps: "Tapped | None" = None  # the values that it asks for
    guided: int = 0  # where the text of its guide begins, if it has one
    snapshot: "Snapshot | DevicePages | None" = None  # K and V of its first tokens, which are used as they are
    moved: bool = False  # from another engine: its snapshot is loaded once, and lost with its pages
    private: bool = False  # its K and V may be edited, so no other request shares its pages
    adapted: Hashable = None  # its adapter's key as of its admission
    kept: bool = False  # its K and V are partly of older weights, so no other request shares its pages either
    preemptions: int = 0
    last_step: int = -1  # the newest dispatched step that includes it
    finish_reason: str | None = None
    # The client's half
    live: bool = False  # the ledger has it, and it has not ended
    submitted: float = field(default_factory=time.perf_counter)
    first_token: float | None = None  # seconds from its submission to its first token
    last_token: float = 0.0  # when the newest token was read, once there is one
    answer: OutputText = field(default_factory=OutputText)
    most: int = 0  # most tokens of its output
    stop_ids: frozenset[int] = frozenset()  # tokens that end it
    ends: frozenset[int] = frozenset()  # stop_ids, and the numbers that are no token
    plain: bool = False  # no stop string and no log-probability asks for each of its tokens
    matcher: Optional["Matcher"] = None  # of its guide
    logprobs: list[TokenLogprob] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)  # of the weights that drew each token of output
    ending: int | None = None  # the end token or stop id that ended it, if the completion shall have it
    told: int = 0  # how many of these log-probabilities events had
    prompt_scores: dict[int, tuple[float, int, tuple[int, float]]] = field(default_factory=dict)  # by position: log p,
    # rank, and the most likely token with its log p

    @property
    def skippable(self) -> int:
        """Returns how many of its first tokens need not be computed if their K and V are there. Prompt
        log-probabilities, penalty counts and values that it asks for come from computing them."""
        if self.params.prompt_logprobs or self.params.counts_tokens:
            return 0
        wanted = self.taps.wanted(0, self.length - 1) if self.taps is not None else None
        return wanted.start if wanted else self.length - 1

    @property
    def key(self) -> Hashable:
        """Returns what its K and V depend on besides its tokens and the weights. None: nothing."""
        own = None if self.inputs is None else self.inputs.key
        return own if self.adapted is None else (own, self.adapted)

    @property
    def length(self) -> int:
        """Returns how many tokens the host knows."""
        return len(self.prompt) + len(self.output)

    @property
    def order(self) -> tuple[int, int]:
        """Returns its place among waiting sequences, and among running ones."""
        return self.priority, self.arrival

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.prompt + tuple(self.output)

    @property
    def prefilling(self) -> bool:
        """Returns whether a running sequence still lacks KV of tokens that were known at admission."""
        return self.computed < self.prefill_end

    @property
    def reach(self) -> int:
        """Returns how many tokens need a page before the next one is decoded. The last token of all never gets KV."""
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
