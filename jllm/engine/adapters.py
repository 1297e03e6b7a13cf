"""Keeps an engine's adapters: all on the host, and those in use in places on the device.

A request names its adapter. It goes in once its adapter has a place (gate.py). If all places are taken, the least
recently used one is given away whose adapter no request inside uses. If there is none, the request waits, and others
overtake it.

Fairness: places go to requests in the order in which they began to wait. After OVERTAKES requests with adapters have
overtaken the first of them, one place is promised to it. Requests of the adapter there wait until it has gone in.
Further samples and forks of those inside do not.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Any

import jax

from jllm.engine.checks import check_named
from jllm.engine.request import SamplingParams
from jllm.errors import ConfigError, WeightsError
from jllm.files.peft import load_adapter
from jllm.model.adapted import OneAdapter
from jllm.model.adapters import Adapter

if TYPE_CHECKING:
    from jllm.engine.device import Device
    from jllm.engine.sequence import Sequence
    from jllm.model.model import Model

Given = Adapter | str | PathLike
OVERTAKES = 16  # requests with adapters that go in before one that waits for a place is promised one


@dataclass(eq=False)
class Held:
    """Holds one adapter of an engine."""

    name: str
    generation: int  # another one for each load and update, of all adapters
    value: dict[str, OneAdapter] | None  # on the host; None: the device alone has it
    place: int | None = None  # on the device
    requests: int = 0  # unfinished samples that name it
    inside: set["Sequence"] = field(default_factory=set)  # those of them that the gate has let in
    used: int = 0  # when the last one went in

    @property
    def key(self) -> tuple[str, int]:
        """Returns what K and V of its requests depend on besides tokens and weights."""
        return self.name, self.generation


class Places:
    """Gives adapters their places on the device. It takes one caller at a time."""

    def __init__(self, device: "Device", count: int):
        self._device, self._free = device, list(reversed(range(count)))
        self.count = count
        self.held: dict[str, Held] = {}
        self._placed: dict[int, Held] = {}  # by place
        self._clock = self._generation = 0
        self._waiting: dict[Sequence, int] = {}  # for a place, and the clock when each began to
        self._promised: Held | None = None  # in the place that the first of them gets

    def of(self, sampling: SamplingParams) -> Held | None:
        """Returns the adapter that a request names. Raises RequestError for an unknown one."""
        check_named(sampling, self.held)
        return None if sampling.adapter is None else self.held[sampling.adapter]

    def load(self, name: str, value: dict[str, OneAdapter]) -> None:
        self.check_new(name)
        self.held[name] = Held(name, self._next(), jax.device_get(value))

    def check_new(self, name: str) -> None:
        """Raises WeightsError for a name that is taken or is none."""
        if not self.count:
            raise WeightsError("this engine has no places for adapters: make it with max_adapters=")
        if not isinstance(name, str) or not name:
            raise WeightsError(f"an adapter's name must be text, not {name!r}")
        if name in self.held:
            raise WeightsError(f"adapter {name!r} is loaded already: update() gives it other values")

    def find(self, name: str) -> Held:
        """Returns a loaded adapter. Raises WeightsError for an unknown one."""
        if (held := self.held.get(name)) is None:
            raise WeightsError(f"adapter {name!r} is not loaded: loaded are {', '.join(self.held) or 'none'}")
        return held

    def unload(self, name: str) -> None:
        held = self.find(name)
        if held.requests:
            raise WeightsError(f"adapter {name!r} is in use by {held.requests} samples: unload it once they have ended")
        if held.place is not None:
            self._free.append(held.place)
            del self._placed[held.place]
            held.place = None  # an update that waits must not write there
        del self.held[name]

    def change(self, held: Held, value: dict[str, OneAdapter]) -> None:
        """Gives an adapter other values: in its place, if it has one."""
        held.generation, held.value = self._next(), None
        if held.place is not None:
            self._device.put_adapter(held.place, value)
        if held.place is None or not self._device.reads_adapters:
            held.value = jax.device_get(value)

    def ask(self, seq: "Sequence") -> bool:
        """Returns whether there is room for a sample. If not, it waits from now on in the order of those who asked."""
        if self.has_room(seq):
            self.forget(seq)
            return True
        self._waiting.setdefault(seq, self._clock)
        return False

    def forget(self, seq: "Sequence") -> None:
        """Takes note that a sample waits for no place any longer."""
        if seq in self._waiting:
            self._promised = None if seq is next(iter(self._waiting)) else self._promised
            del self._waiting[seq]

    def has_room(self, seq: "Sequence") -> bool:
        """Returns whether a sample's adapter has a place, or can have one now that nobody waits for before it."""
        held = seq.adapter
        if held is None:
            return True
        if held is self._promised:
            return seq.origin in held.inside
        if held.place is not None and held.inside:
            return True
        first = next(iter(self._waiting), seq)
        return first.adapter is held and bool(self._free or self._idle())

    def enter(self, seq: "Sequence") -> None:
        """Gives a sample's adapter a place, for which there is room."""
        held = seq.adapter
        if held is None:
            return
        if held.place is None:
            self._free.append(self._take())  # until its adapter is written
            assert held.value is not None
            self._device.put_adapter(self._free[-1], held.value)
        self._clock += 1
        self._promise()
        held.used = self._clock
        held.inside.add(seq)
        if held.place is None:
            held.place = self._free.pop()
            self._placed[held.place] = held

    def leave(self, seq: "Sequence") -> None:
        """Takes note that a sample that went in has ended."""
        if seq.adapter is not None:
            seq.adapter.inside.remove(seq)

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        assert self._idle(), "has_room was asked"
        idle = min(self._idle(), key=lambda held: held.used)
        assert idle.place is not None, "it is idle in a place"
        if idle.value is None:
            idle.value = self._device.read_adapter(idle.place)
        place, idle.place = idle.place, None
        del self._placed[place]
        return place

    def _promise(self) -> None:
        """Promises a place to the first sample that waits for one, if enough others have overtaken it: the place whose
        adapter the fewest samples inside use. A sample whose adapter has a place by now needs none."""
        first = next(iter(self._waiting), None)
        if first is None or self._promised is not None or self._clock - self._waiting[first] < OVERTAKES:
            return
        placed = self._placed.values()
        if first.adapter not in placed:
            self._promised = min(placed, key=lambda held: (len(held.inside), held.used), default=None)

    def _idle(self) -> list[Held]:
        """Returns the adapters in places that no request inside uses."""
        return [held for held in self._placed.values() if not held.inside]

    def _next(self) -> int:
        self._generation += 1
        return self._generation


def read(given: Given, model_config: Any) -> Adapter:
    """Returns an adapter as it is, or from a PEFT directory."""
    return load_adapter(given, model_config) if isinstance(given, str | PathLike) else given


def with_adapters(options: Mapping[str, Any], model: "Model") -> dict[str, Any]:
    """Returns engine options in which the paths of adapters are replaced by adapters, with as many places and as large
    a rank as these need, unless the options say so."""
    given = options.get("adapters")
    if given is None:
        return dict(options)
    if not isinstance(given, Mapping):
        kind = type(given).__name__
        raise ConfigError(f"adapters must be a mapping of names to PEFT directories or adapters, not {kind}")
    found = {name: read(one, model.config) for name, one in given.items()}
    ranks = [each.rank for one in found.values() if isinstance(one, dict) for each in one.values()]
    more: dict[str, Any] = {"adapters": found}
    if options.get("max_adapters") is None and found:
        more["max_adapters"] = len(found)
    if options.get("adapter_rank") is None and ranks:
        more["adapter_rank"] = max(ranks)
    return {**options, **more}
