"""Runs prefill and decode on two engines, behind the interface of one: the first computes prompts, the second decodes.

Sources: DistServe, Zhong et al., arXiv 2401.09670; Splitwise, Patel et al., arXiv 2311.18677. A long prompt then delays
no other request's next token. This costs a second copy of the weights, and the transfer of K and V from one engine to
the other.
"""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self, Unpack

from jllm.distributed.handover import DecodeEngine, PrefillEngine, joining_buckets
from jllm.distributed.processes import Source
from jllm.distributed.remote import RemotePrefill, identity
from jllm.distributed.replica import Replica, Request
from jllm.distributed.replicas import AnyReplica, Replicas
from jllm.engine.engine import Engine, Running
from jllm.engine.metrics import Metrics
from jllm.engine.moved import Handover
from jllm.engine.options import MAX_SLOTS, EngineKeywords
from jllm.engine.placement import Placement, devices_of, find_placements
from jllm.engine.request import Event, SamplingParams
from jllm.errors import ConfigError, EngineClosed, RemoteError, RequestError
from jllm.model.params import Params
from jllm.programs.sizes import EngineSizes

if TYPE_CHECKING:
    from jllm.model.model import Model


class Disaggregated(Replicas):
    """Serves requests by two engines, each with all the weights. It is used as an Engine is.

    Each engine has its own device or mesh. The first device computes prompts and their first tokens. Pages are copied
    from device to device while it decodes. Once they have arrived, the request continues on the second device. While
    all slots there are taken, requests continue on the first device. Requests with token penalties, inputs, taps
    or a snapshot start on the second device: they need their prompt where they decode. When a device fails, its
    requests begin again on the other. Replicas does the same.
    """

    def __init__(
        self,
        model: "Model",
        devices: Sequence[Placement] | None = None,
        *,
        prefill: Mapping[str, Any] | None = None,
        **options: Unpack[EngineKeywords],
    ):
        """Makes two engines with `options`; `prefill` overrides options of the one that computes prompts.

        `devices` are the device of prompts and the device of decoding, or two meshes of the model's size. None means
        the first two. Raises ConfigError as Replicas does, for another number of devices, and for unequal pages.
        """
        there = find_placements(None, model.config) if devices is None else devices
        if len(there) < 2 or (devices is not None and len(devices) != 2):
            what = "devices" if model.config.mesh is None else "meshes"
            raise ConfigError(f"prefill and decode apart take two {what}, not {len(there)}")
        chosen = find_placements(there[:2], model.config)
        prefill = dict(prefill or {})
        if odd := sorted({"page_size", "kv_cache"} & prefill.keys()):
            raise ConfigError(f"both engines need the same pages: give {odd[0]} for both, not in prefill")

        def make(here: "Model", **given: Any) -> PrefillEngine | DecodeEngine:
            if here.params.norm.devices() == {*devices_of(chosen[0])}:
                own = {**given, **prefill}
                return PrefillEngine(here, to=chosen[1], room=self._reserve, likely=self._has_room, **own)
            slots = given.get("max_slots") or MAX_SLOTS
            tokens = given.get("max_step_tokens") or max(256, 2 * slots)
            return DecodeEngine(here, **{**given, "buckets": given.get("buckets") or joining_buckets(slots, tokens)})

        super().__init__(model, chosen, make=make, threads=True, **options)
        self._link()

    @classmethod
    def over(cls, prefill: RemotePrefill, decode: DecodeEngine) -> Self:
        """Returns an instance whose prompts another process computes.

        That process must have the same model and KV formats (else RemoteError); its pages may have any size. When it
        goes, everything is computed here. When the engine here fails, step() raises.
        """
        ours = identity(decode)
        for name, theirs in prefill.identity.items():
            if theirs != ours[name]:
                prefill.close()
                what = "another model" if name == "model" else f"other formats of K and V ({theirs})"
                raise RemoteError(f"{prefill.address} has {what} than this engine ({ours[name]}): load the same there")
        self = cls.__new__(cls)
        self._begin_empty(decode.has_text)
        self._all = [
            Replica(prefill.address, prefill, self._news),  # type: ignore[arg-type]
            Replica("this process", decode, self._news),
        ]
        self._link()
        return self

    def _link(self) -> None:
        self._prefill, self._decode = self._all
        self._reserved = 0  # samples that left the first engine and have not yet continued
        self._moved: dict[int, int] = {}  # by request, the number of samples that have continued

    @property
    def sizes(self) -> EngineSizes:
        """Returns the sizes of the engine that decodes."""
        return self._decode.engine.sizes

    def metrics(self) -> dict[str, Any]:
        """Returns Engine.metrics of all engines of this process together."""
        own = [replica.engine for replica in self._all if isinstance(replica.engine, Engine)]
        return Metrics.joined([engine.measured() for engine in own]).as_dict()

    def compile_ahead(self, samplings: Iterable[SamplingParams] = (), *, wait: bool = True) -> int:
        """Compiles steps as Engine.compile_ahead does, on both devices at once, and the functions that move pages."""
        compiled = super().compile_ahead(samplings, wait=wait)
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda replica: replica.engine.warm_up(), self._alive()))
        return compiled

    def check(self, prompt: Any, sampling: SamplingParams = SamplingParams()) -> list[int]:
        """Returns the prompt's token ids, or raises the error that submit would raise. Either engine may have to serve
        the request alone."""
        while True:
            *others, last = self._alive()
            with suppress(EngineClosed):  # an engine is failing right now
                ids = last.engine.check(prompt, sampling)  # another process has no tokenizer
                for other in others:
                    other.engine.check(ids, replace(sampling, guide=None))
                return ids

    def update(self, params: Params | Source | None = None, *, running: Running = "recompute", **more: Any) -> int:
        """Takes other weights as Replicas.update does. Raises ConfigError for running="finish": a request runs on both
        engines, and one of them would change its weights before it ends."""
        if running == "finish":
            raise ConfigError('running="finish" is not there for prefill and decode apart: give "recompute" or "keep"')
        return super().update(params, running=running, **more)

    def _alive(self) -> list[AnyReplica]:
        """Returns the engines that take work. Raises EngineClosed if none of them decodes."""
        alive = super()._alive()
        if all(isinstance(replica.engine, RemotePrefill) for replica in alive):
            raise EngineClosed("these engines take no more work: the one that decodes has failed (see step())")
        return alive

    def _call(self, method: str, request_id: int, sample: int) -> Any:
        try:
            return super()._call(method, request_id, sample)
        except RequestError:
            request, where = self._find(request_id)
            if where is self._prefill and sample in request.left:
                why = f"request {request_id} is on its way to the engine that decodes it: call step() first"
                raise RequestError(why) from None
            raise

    def _place(self, request: Request) -> Future:
        whole = request.snapshot is not None or bool(request.own()) or request.sampling.counts_tokens
        wanted, other = (self._decode, self._prefill) if whole else (self._prefill, self._decode)
        best = other if wanted.engine.closed else wanted
        request.weights = best.weights
        request.tokens = len(request.prompt) + request.sampling.n * request.sampling.max_new_tokens
        best.load.tokens += request.tokens
        self._requests[request.id] = request, best
        return best.submit(request)

    def _take(self, replica: AnyReplica, events: Iterable[Any]) -> list[Event]:
        news = list(events)
        found = super()._take(replica, [one for one in news if isinstance(one, Event)])
        with self._lock:
            for one in news:
                if isinstance(one, Handover):
                    found += self._go_on(one)
        return found

    def _go_on(self, given: Handover) -> list[Event]:
        """Continues a request that has left the first engine on the other. Begins it again if the other has failed.

        Returns the ends of samples that cannot continue.
        """
        self._reserved = max(0, self._reserved - len(given.samples))  # another process asks for no room
        request, where = self._requests.get(given.id, (None, None))
        if request is None or where is not self._prefill or self._closed is not None:
            return []
        lost = request.ends_of_lost(self._has_text, {where.weights}) if self._decode.failed else []
        ends = super()._take(where, lost)
        if not request.left:
            return ends
        self._moved[request.id] = len(given.samples)
        self._prefill.load.tokens -= request.tokens
        self._prefill.forget(request)
        if self._decode.failed:
            request.begin_again()
            self._place(request)
            return ends
        request.hand_over()
        self._decode.load.tokens += request.tokens
        self._requests[request.id] = request, self._decode
        self._decode.submit(replace(request, snapshot=given))
        return ends

    def _move(self, replica: AnyReplica, error: BaseException) -> list[Event]:
        if replica is self._decode and isinstance(self._prefill.engine, RemotePrefill):
            replica.failed = True
            raise error  # no other engine decodes
        return super()._move(replica, error)

    def _has_room(self, samples: int) -> bool:
        """Returns whether the decoding engine has room for these samples."""
        with self._lock:
            there = self._reserved + sum(self._moved.values())
            return not self._decode.engine.closed and there + samples <= self._decode.engine.slots

    def _reserve(self, samples: int) -> bool:
        """Reserves room for these samples on the decoding engine, and returns whether there was room."""
        with self._lock:
            if not self._has_room(samples):
                return False
            self._reserved += samples
            return True

    def _drop(self, request: Request, replica: AnyReplica) -> None:
        super()._drop(request, replica)
        self._moved.pop(request.id, None)
