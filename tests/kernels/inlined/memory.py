"""Shows memory as threads see it, all of a warpgroup or of a warp at once."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu


@cache
def swizzled_order(shape: tuple[int, ...], itemsize: int, width: int) -> np.ndarray:
    """Returns which element of [.., rows, columns] lies where in memory, as TMA writes it. Tiles have 8 rows of `width`
    bytes. The number of each 16 bytes is xored with that of their 128 bytes."""
    columns = width // itemsize
    *outer, rows, row = shape
    tiles = np.arange(math.prod(shape)).reshape(*outer, rows // 8, 8, row // columns, columns).swapaxes(-2, -3)
    units = tiles.reshape(-1, 16 // itemsize)
    place = np.arange(len(units)) * 16
    order = np.empty_like(units)
    order[(place ^ (place >> 3 & width - 16)) // 16] = units
    return order.reshape(-1)


class Memory:
    """Holds a buffer, and the elements that were read of it, written, and copied to it asynchronously."""

    def __init__(self, content: np.ndarray, order: np.ndarray | None = None) -> None:
        self.itemsize, self.order, self.bytes = content.itemsize, order, content.reshape(-1).view(np.uint8)
        assert np.shares_memory(self.bytes, content)
        self.touched: dict[str, list[np.ndarray]] = {"read": [], "write": [], "copy": []}

    def places(self, first: np.ndarray, size: int, kind: str) -> np.ndarray:
        """Returns where in `bytes` `size` bytes of memory from `first` on are."""
        place = first[:, None] + np.arange(size)
        assert 0 <= place.min(initial=0) <= place.max(initial=0) < len(self.bytes), "out of bounds"
        element = place // self.itemsize
        if self.order is not None:
            element = self.order[element]
        self.touched[kind].append(np.unique(element))
        return element * self.itemsize + place % self.itemsize


class Pointer(NamedTuple):
    """Holds a byte of a buffer for each thread."""

    memory: Memory
    at: Any

    def moved(self, by: np.ndarray) -> "Pointer":
        return Pointer(self.memory, self.at + by)


@dataclass(frozen=True)
class View:
    """Describes a part of a buffer: where it begins, in bytes, and how far its elements are apart along each
    dimension."""

    memory: Memory
    begin: int
    strides: tuple[int, ...]

    def at(self, indices: Sequence[np.ndarray]) -> Pointer:
        return Pointer(self.memory, self.begin + sum(i * stride for i, stride in zip(indices, self.strides)))


def view(content: np.ndarray, selection: Sequence[Any] = (), transforms: Sequence[Any] = ()) -> View:
    """Returns content[selection], of slices and numbers, of a buffer in shared memory that is laid out so."""
    order = None
    for transform in transforms:
        if isinstance(transform, plgpu.SwizzleTransform):
            order = swizzled_order(content.shape, content.itemsize, transform.swizzle)
    begin, strides = 0, []
    for i, stride in zip([*selection, *[slice(0)] * (content.ndim - len(selection))], content.strides):
        begin += (i if isinstance(i, int) else i.start or 0) * stride
        strides += [] if isinstance(i, int) else [stride]
    return View(Memory(content, order), begin, tuple(strides))


@dataclass
class Run:
    """Describes a run of the code by some threads: their numbers in the CTA, and which of them take part just now."""

    threads: np.ndarray
    synchronize: Callable[[], None] = lambda: None  # with all threads of the CTA
    seen: np.ndarray = field(init=False)
    values: dict[int, Any] = field(default_factory=dict)  # of the code, by number

    def __post_init__(self) -> None:
        self.seen = np.ones(len(self.threads), bool)

    def full(self, value: Any, dtype: Any) -> np.ndarray:
        return np.full(len(self.threads), value, dtype)

    def load(self, pointer: Pointer, size: int, alignment: int) -> np.ndarray:
        at = np.broadcast_to(pointer.at, len(self.threads))[self.seen]
        assert (at % alignment == 0).all(), "not aligned"
        out = np.zeros((len(self.threads), size), np.uint8)
        out[self.seen] = pointer.memory.bytes[pointer.memory.places(at, size, "read")]
        return out

    def store(self, pointer: Pointer, data: np.ndarray, alignment: int, kind: str = "write") -> None:
        at = np.broadcast_to(pointer.at, len(self.threads))[self.seen]
        assert (at % alignment == 0).all(), "not aligned"
        pointer.memory.bytes[pointer.memory.places(at, data.shape[1], kind)] = data[self.seen]

    @contextlib.contextmanager
    def only(self, condition: np.ndarray) -> Iterator[None]:
        seen, self.seen = self.seen, self.seen & condition
        yield
        self.seen = seen
