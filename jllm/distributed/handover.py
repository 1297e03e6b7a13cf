"""Defines engines that hand requests over after their prompts, and engines that continue them (moved.py)."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

from jllm.engine.engine import Engine
from jllm.engine.loop import Loop
from jllm.engine.moved import DevicePages, Handover
from jllm.engine.options import EngineKeywords
from jllm.engine.placement import Placement
from jllm.engine.plan import StepPlan
from jllm.engine.reuse import known_tokens
from jllm.engine.samples import begun
from jllm.engine.scheduler import Scheduler
from jllm.engine.sequence import Sequence
from jllm.engine.turns import in_turn
from jllm.files.snapshot import Snapshot, join
from jllm.step.buckets import Bucket, make_buckets

if TYPE_CHECKING:
    from jllm.model.model import Model

JOINING = 16  # tokens of a step that joining requests may have together: each has one, or a few
MOVED = "moved"  # the finish reason of a sample that continues elsewhere; no completion has it


def _always(samples: int) -> bool:
    return True


def _stays(seq: Sequence) -> bool:
    """Returns whether a sample has what cannot leave its engine."""
    return seq.params.counts_tokens or seq.inputs is not None or seq.taps is not None


@dataclass
class Leaving:
    """The part of a loop that hands requests over once each of their samples has begun.

    K and V go to the placement `to`, or without one to a Snapshot on the host. `room` is first asked for a number of
    samples; if it returns False, they continue here. `likely` returns whether there will probably be room, and reserves
    none.
    """

    to: Placement | None = None
    room: Callable[[int], bool] = _always
    likely: Callable[[int], bool] = _always
    sent: dict[int, DevicePages] = field(default_factory=dict)  # by request, pages sent before it leaves
    gone: list[Handover] = field(default_factory=list)  # requests that step() has not returned yet

    def dispatched(self, loop: Loop, plan: StepPlan) -> None:
        """Sends a prompt's K and V right behind the step that computes the last of them.

        The next step is dispatched before this step's tokens are read. Behind that step, the transfer would be late by
        a whole step of prompts.
        """
        for seq in (chunk.seq for chunk in plan.chunks if chunk.final):
            length = loop.scheduler.sharing.whole(len(seq.prompt))
            wanted = self.to is not None and length and not _stays(seq)
            if wanted and seq.request_id not in self.sent and self.likely(seq.params.n):
                self.sent[seq.request_id] = self._send(loop, seq, length)

    def stepped(self, loop: Loop) -> None:
        """Hands over every request that can leave. Then drops sent pages, except for requests whose first token is not
        read yet: all others have left, or stay."""
        for request_id in dict.fromkeys(seq.request_id for seq in loop.scheduler.running if seq.output):
            samples = loop.ledger.request(request_id).unfinished
            stays = any(not seq.output or _stays(seq) for seq in samples.values())
            if not stays and self.room(len(samples)):
                self.gone.append(self._take_out(loop, request_id))
        plan = None if loop.in_flight is None else loop.in_flight.plan
        coming = set() if plan is None else {chunk.seq.request_id for chunk in plan.chunks if chunk.final}
        self.sent = {request_id: pages for request_id, pages in self.sent.items() if request_id in coming}

    def stop(self) -> None:
        """Drops its arrays on devices."""
        self.sent.clear()

    def _take_out(self, loop: Loop, request_id: int) -> Handover:
        """Ends a request here without an event."""
        request = loop.ledger.request(request_id)
        seqs = list(request.unfinished.values())
        seq = next((seq for seq in seqs if seq.slot is not None), seqs[0])
        kv = self.sent[request_id] if request_id in self.sent else self._kv_of_prompt(loop, seq)
        kv = None if seq.kept else kv  # K and V are of several weights
        for each in seqs:
            loop.drop(each, MOVED)
        samples = tuple(map(begun, seqs))
        asked = request_id, seq.prompt, seq.params, seq.seed
        return Handover(*asked, samples, request.started, seq.guided, loop.device.version, kv)

    def _kv_of_prompt(self, loop: Loop, seq: Sequence) -> Snapshot | DevicePages | None:
        length = 0 if seq.slot is None else min(known_tokens(seq), len(seq.prompt))
        length = loop.scheduler.sharing.whole(length)
        if not length:
            return None
        if self.to is not None:
            return self._send(loop, seq, length)
        pages = seq.pages[: loop.scheduler.pool.pages_for(length)]
        value = join(loop.device.read_pages(pages), seq.prompt, length)
        return replace(value, weights=loop.device.weights_with(seq.adapter))

    def _send(self, loop: Loop, seq: Sequence, length: int) -> DevicePages:
        assert self.to is not None
        return loop.device.pack(seq.pages[: loop.scheduler.pool.pages_for(length)], length, self.to)


class PrefillEngine(Engine):
    """An Engine that hands requests over once their prompts are computed (Leaving). After its events, step() returns
    their Handovers."""

    def __init__(
        self,
        model: "Model",
        *,
        to: Placement | None = None,
        room: Callable[[int], bool] = _always,
        likely: Callable[[int], bool] = _always,
        **options: Unpack[EngineKeywords],
    ):
        self.leaving = Leaving(to, room, likely)
        super().__init__(model, beside=self.leaving, **options)

    @in_turn
    def warm_up(self) -> None:
        """Compiles the functions that hand requests over, as compile_ahead does for steps."""
        if self.leaving.to is not None:
            self._device.warm_up(self.most_tokens - 1, self.leaving.to)

    def step(self) -> list[Any]:
        """Returns events, then the Handover of each request that leaves."""
        events, gone = super().step(), self.leaving.gone
        self.leaving.gone = []
        return [*events, *gone]


class DecodeEngine(Engine):
    """An Engine that continues requests of another engine: take_in() takes their Handovers. It takes in only a few at a
    time. So its steps are hardly larger than steps that only decode."""

    def __init__(self, model: "Model", **options: Unpack[EngineKeywords]):
        super().__init__(model, scheduler=partial(Scheduler, most_joining=JOINING), **options)

    @property
    def has_text(self) -> bool:
        """Returns whether completions have a text."""
        return self._tokenizer is not None

    @in_turn
    def warm_up(self) -> None:
        """Compiles the functions that take requests in, as compile_ahead does for steps."""
        self._device.warm_up(self.most_tokens - 1, None)


def joining_buckets(max_slots: int, max_step_tokens: int) -> tuple[Bucket, ...]:
    """Returns the compiled sizes of an engine whose requests come with their prompts computed. They are decodes alone,
    decodes with a few tokens, and the largest usual size. It computes prompts itself in the largest."""
    usual = make_buckets(max_slots, max_step_tokens)
    alone = {bucket.decodes for bucket in usual if not bucket.tokens}
    few = min(JOINING, max(1, max_step_tokens - max_slots))
    sizes = {(n, tokens) for n in alone for tokens in (0, few)}
    return tuple(sorted({Bucket(n, tokens, min(tokens, max_slots)) for n, tokens in sizes} | {max(usual, key=_top)}))


def _top(bucket: Bucket) -> tuple[int, int, int]:
    return bucket.decodes, bucket.tokens, bucket.chunks
