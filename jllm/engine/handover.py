"""A request that changes engines while it runs: what one engine gives up, and another goes on with.

K and V of the prompt go along, as pages that are copied from device to device, on meshes of one size from each device
to the one that has the same heads, or as a snapshot on the host, which may go anywhere and to pages of any size. What
was generated so far is few tokens: the engine that goes on computes their K and V itself, with the next token. So
nothing is drawn twice, and tokens are those that one engine would have given.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jllm.batch import NOWHERE, Bucket, make_buckets
from jllm.engine.between_steps import padded
from jllm.engine.device import Device
from jllm.engine.engine import Engine
from jllm.engine.live import InFlight, Live
from jllm.engine.loop import Loop
from jllm.engine.options import EngineKeywords
from jllm.engine.placement import Placement, on
from jllm.engine.plan import PlanParts, StepPlan
from jllm.engine.request import SamplingParams, TokenLogprob
from jllm.engine.scheduler import Scheduler
from jllm.engine.sequence import Sequence
from jllm.engine.sharing import known_tokens
from jllm.engine.turns import in_turn
from jllm.model import Cache
from jllm.parallel.ranks import HEADS
from jllm.snapshot import Snapshot, gather_pages, join

if TYPE_CHECKING:
    from jllm.pretrained import Model

JOINING = 16  # tokens of a step that requests from elsewhere may have together: each has one, or a few
MOVED = "moved"  # the finish reason of a sample that goes on elsewhere: no completion ever says so


class Begun(NamedTuple):
    """An unfinished sample, as far as it has come. Times are seconds, `now` that of the one who lets it go."""

    sample: int
    output: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    scores: dict[int, Any]  # of prompt tokens: see live.Live
    submitted: float
    first_token: float | None
    last_token: float


class Handover(NamedTuple):
    """A request that an engine has let go. kv: a Snapshot, or DevicePages, of the prompt's tokens; None: of none."""

    id: int
    prompt: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    samples: tuple[Begun, ...]
    started: int  # samples that it ever had
    guided: int  # where the text of its guide begins
    kv: Any


@dataclass(frozen=True)
class DevicePages:
    """K and V of the first `length` tokens of a sequence, in pages that are on their way to a device: what takes the
    place of a Snapshot between engines whose pages are alike. Layers of one shape and dtype are one array, [layers,
    pages, ...]: a copy costs the host as much as a large one."""

    length: int
    arrays: tuple[jax.Array, ...]

    @property
    def ready(self) -> bool:
        """Whether they have arrived."""
        return all(array.is_ready() for array in self.arrays)  # type: ignore[attr-defined]


@jax.jit
def _pack(cache: Cache, page: jax.Array) -> tuple[jax.Array, ...]:
    """These pages of all layers, i32[n]."""
    leaves = jax.tree.leaves(gather_pages(cache, page))
    return tuple(jnp.stack([leaves[i] for i in group]) for group in _alike(leaves))


@partial(jax.jit, donate_argnums=0)
def _unpack(cache: Cache, page: jax.Array, arrays: tuple[jax.Array, ...]) -> Cache:
    """The cache with what _pack took at other pages, i32[n]; a page outside of the cache is dropped."""
    leaves, tree = jax.tree.flatten(cache)
    for group, array in zip(_alike(leaves), arrays, strict=True):
        for i, rows in zip(group, array):
            leaves[i] = leaves[i].at[page].set(rows, mode="drop")
    return jax.tree.unflatten(tree, leaves)


def _alike(leaves: list[jax.Array]) -> list[list[int]]:
    """Places of the leaves that differ in their first axis alone."""
    found: dict[Any, list[int]] = {}
    for i, leaf in enumerate(leaves):
        found.setdefault((leaf.shape[1:], leaf.dtype), []).append(i)
    return list(found.values())


class PagesDevice(Device):
    """A Device whose pages come and go as DevicePages, too."""

    def pack(self, pages: list[int], length: int, to: Placement) -> DevicePages:
        """The first `length` tokens of these pages after all steps dispatched so far, on their way to an engine."""
        assert self._state is not None
        arrays = _pack(self._state.cache, padded(pages, 0))
        return DevicePages(length, jax.device_put(arrays, on(to, P(None, *HEADS))))

    def load(self, pages: Any, snapshot: Any) -> None:
        if not isinstance(snapshot, DevicePages):
            super().load(pages, snapshot)
            return
        assert self._state is not None
        to = padded(pages, NOWHERE)
        self._state = replace(self._state, cache=_unpack(self._state.cache, to, snapshot.arrays))

    def warm_up(self, tokens: int, to: Placement | None) -> None:
        """Compiles what moves up to that many tokens: to an engine there, or from one (None)."""
        assert self._state is not None
        # As steps will leave it: jit tells apart arrays that are on a device by default and those that were put there.
        self._state = replace(self._state, cache=jax.device_put(self._state.cache, self._home))
        count, most = 1, -(-tokens // self._page_size)
        while True:
            if to is not None:
                jax.block_until_ready(self.pack([0] * count, 0, to).arrays)
            else:
                arrays = _pack(self._state.cache, padded([0] * count, 0))
                nowhere = np.full(count, NOWHERE, np.int32)
                self._state = replace(self._state, cache=_unpack(self._state.cache, nowhere, arrays))
            if count >= most:
                return
            count *= 2


class LeavingLoop(Loop):
    """Sends a prompt's K and V on their way right behind the step that computes the last of them: behind the next step,
    which is dispatched before this one's tokens are read, they would come by a whole step of prompts later."""

    def __init__(self, *args: Any, to: Placement | None):
        super().__init__(*args)
        self._to = to
        self.sent: dict[int, DevicePages] = {}  # by request
        self.likely: Callable[[int], bool] = lambda samples: True  # to have room there

    def dispatch(self, plan: StepPlan) -> InFlight:
        """As Loop.dispatch."""
        step = super().dispatch(plan)
        for seq in (chunk.seq for chunk in plan.chunks if chunk.final):
            length = self.scheduler.sharing.whole(len(seq.prompt))
            wanted = self._to is not None and length and not seq.params.counts_tokens
            if wanted and seq.request_id not in self.sent and self.likely(seq.params.n):
                assert isinstance(self.device, PagesDevice)
                pages = seq.pages[: self.scheduler.pool.pages_for(length)]
                self.sent[seq.request_id] = self.device.pack(pages, length, self._to)
        return step

    def forget_sent(self) -> None:
        """Keeps those alone whose first token is not read yet: all others have gone, or stay."""
        plan = None if self.in_flight is None else self.in_flight.plan
        coming = set() if plan is None else {chunk.seq.request_id for chunk in plan.chunks if chunk.final}
        self.sent = {request_id: pages for request_id, pages in self.sent.items() if request_id in coming}

    def close(self) -> None:
        """As Loop.close."""
        self.sent.clear()
        super().close()


class PrefillEngine(Engine):
    """An Engine that lets requests go once each of their samples has begun: step() then has their Handover behind their
    events. `room` is asked first, for a number of samples; where it says no they go on here. K and V go to the place
    `to`; without one they become a Snapshot on the host."""

    def __init__(self, model: "Model", *, to: Placement | None = None, **options: Unpack[EngineKeywords]):
        super().__init__(model, device=PagesDevice, loop=partial(LeavingLoop, to=to), **options)
        self._to = to
        self.room: Callable[[int], bool] = lambda samples: True

    def expect(self, likely: Callable[[int], bool]) -> None:
        """Pages are sent ahead only where there will probably be room for a number of samples: this is asked, and it
        takes none."""
        assert isinstance(self._loop, LeavingLoop)
        self._loop.likely = likely

    @in_turn
    def warm_up(self) -> None:
        """Compiles what lets requests go, as compile_ahead does steps."""
        if self._to is not None:
            assert isinstance(self._device, PagesDevice)
            self._device.warm_up(
                min(self._config.context, self.sizes.max_pages * self.sizes.limits.page_size), self._to
            )

    def step(self) -> list[Any]:
        """Events, then the Handover of each request that leaves."""
        events: list[Any] = super().step()
        return events + self._let_go()

    @in_turn
    def _let_go(self) -> list[Handover]:
        begun = dict.fromkeys(seq.request_id for seq in self._scheduler.running if seq.output)
        found = []
        for request_id in begun:
            samples = self._ledger.request(request_id).unfinished
            stays = any(not live.seq.output or live.seq.params.counts_tokens for live in samples.values())
            if not stays and self.room(len(samples)):
                found.append(self._take_out(request_id))
        assert isinstance(self._loop, LeavingLoop)
        self._loop.forget_sent()
        return found

    def _take_out(self, request_id: int) -> Handover:
        """Ends a request here, of which no event tells."""
        request = self._ledger.request(request_id)
        lives = list(request.unfinished.values())
        seq = next((live.seq for live in lives if live.seq.slot is not None), lives[0].seq)
        kv = self._kv_of_prompt(seq)
        for live in lives:
            self._loop.drop(live, MOVED)
        samples = tuple(map(_begun, lives))
        return Handover(request_id, seq.prompt, seq.params, seq.seed, samples, request.started, seq.guided, kv)

    def _kv_of_prompt(self, seq: Sequence) -> Any:
        assert isinstance(self._loop, LeavingLoop)
        if seq.request_id in self._loop.sent:
            return self._loop.sent[seq.request_id]
        length = 0 if seq.slot is None else min(known_tokens(seq), len(seq.prompt))
        length = self._scheduler.sharing.whole(length)
        pages = seq.pages[: self._scheduler.pool.pages_for(length)]
        if not length:
            return None
        if self._to is None:
            value = join(self._device.read_pages(pages), seq.prompt, length)
            return replace(value, weights=self._device.weights)
        assert isinstance(self._device, PagesDevice)
        return self._device.pack(pages, length, self._to)


def _begun(live: Live) -> Begun:
    seq = live.seq
    times = live.submitted, live.first_token, live.last_token
    return Begun(seq.sample, tuple(seq.output), tuple(live.logprobs), live.prompt_scores, *times)


class Joining(Scheduler):
    """Takes in requests from elsewhere few at a time, in steps that are hardly larger than those that decode alone, and
    only once their pages have arrived: until then those that run don't wait for them."""

    def _fill(self, prefills: list[Sequence], budget: int, decodes: int) -> int:
        few = all(s.prefill_end - s.computed < self.limits.block for s in prefills)
        joins = few and (prefills or (self.waiting and self.waiting[0].snapshot is not None))
        return min(budget, JOINING) if joins else super()._fill(prefills, budget, decodes)

    def _admit(self, seq: Sequence, parts: PlanParts) -> bool:
        pages: Any = seq.snapshot
        on_their_way = isinstance(pages, DevicePages) and not pages.ready
        return not (on_their_way and self.running) and super()._admit(seq, parts)


class JoiningLoop(Loop):
    """Keeps no pages that came from elsewhere once they are in its own: who loses these computes its prompt. So does
    who waits when the device fails, since a copy from another device that has failed would make it fail again."""

    def dispatch(self, plan: StepPlan) -> InFlight:
        """As Loop.dispatch."""
        step = super().dispatch(plan)
        for seq in plan.loads:
            if not seq.private:
                seq.snapshot = None
        return step

    def recover(self, error: Exception) -> None:
        """As Loop.recover."""
        for seq in (*self.scheduler.waiting, *self.scheduler.running, *self.gate.waiting):
            if isinstance(seq.snapshot, DevicePages):
                seq.snapshot = None
        super().recover(error)


def joining_buckets(max_slots: int, max_step_tokens: int) -> tuple[Bucket, ...]:
    """Sizes of an engine to which requests come with their prompts computed: decodes alone, decodes with a few tokens,
    and the one for all that has to be computed here after all."""
    usual = make_buckets(max_slots, max_step_tokens)
    alone = {bucket.decodes for bucket in usual if not bucket.tokens}
    few = min(JOINING, max(1, max_step_tokens - max_slots))
    sizes = {(n, tokens) for n in alone for tokens in (0, few)}
    return tuple(sorted({Bucket(n, tokens, min(tokens, max_slots)) for n, tokens in sizes} | {max(usual, key=_top)}))


def _top(bucket: Bucket) -> tuple[int, int, int]:
    return bucket.decodes, bucket.tokens, bucket.chunks


class DecodeEngine(Engine):
    """An Engine that goes on with requests that another one has let go: resume() takes their Handover."""

    def __init__(self, model: "Model", **options: Unpack[EngineKeywords]):
        super().__init__(model, device=PagesDevice, scheduler=Joining, loop=JoiningLoop, **options)

    @property
    def has_text(self) -> bool:
        """Whether completions have a text."""
        return self._tokenizer is not None

    @in_turn
    def warm_up(self) -> None:
        """Compiles what takes requests in, as compile_ahead does steps."""
        assert isinstance(self._device, PagesDevice)
        limits = self.sizes.limits
        self._device.warm_up(min(self._config.context, self.sizes.max_pages * limits.page_size), None)

    def resume(self, snapshot: Any, sampling: SamplingParams = SamplingParams(), **more: Any) -> int:
        """As Engine.resume; a Handover goes on with its own sampling parameters, samples and seed."""
        if not isinstance(snapshot, Handover):
            return super().resume(snapshot, sampling, **more)
        with self._turns.take():
            return self._take_in(snapshot, more.get("priority", 0), more.get("deadline"))

    def _take_in(self, given: Handover, priority: int, deadline: float | None) -> int:
        self._check_open()
        if isinstance(given.kv, Snapshot):
            self._device.check_snapshot(given.kv)
        request_id, self._next_id = self._next_id, self._next_id + 1
        first, longest = None, self._max_length(given.prompt, given.sampling)
        with self._loop.all_or_none() as added:
            for begun in given.samples:
                seq = Sequence(request_id, begun.sample, given.prompt, given.sampling, given.seed, longest)
                seq.output += begun.output
                seq.origin, seq.common, seq.priority, seq.guided = first, len(given.prompt), priority, given.guided
                seq.snapshot = given.kv if first is None else None
                first = first or seq
                live = self._loop.add(seq)
                added.append(live)
                live.carry_on(begun.output, begun.logprobs, begun.submitted, begun.first_token, begun.last_token)
                live.prompt_scores = dict(begun.scores)
        self._ledger.request(request_id).started = given.started
        if deadline is not None:
            self._ledger.end_after(request_id, deadline)
        return request_id
