"""Makes JAX's interpreter of GPU kernels as strict as a GPU is, and faster.

What orders accesses decides whether they race, not when threads happen to run. Who waits for a phase of a barrier
learns of the arrivals of that phase, and not of later ones that came before it woke up. Each asynchronous copy and
product has a place of its own in the clocks. A race raises at once. A product (wgmma) is asynchronous: until it is
waited for, it reads its operands in shared memory, and its accumulator holds NaN. Its left operand may be in registers.
What is inlined runs, too (inlined/), copies by lanes among it. Threads are not compiled (evaluate.py). Written for JAX
0.11.2.
"""

import math
import threading
from collections import defaultdict
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax._src import callback, source_info_util
from jax._src import core as jax_core
from jax._src.pallas.mosaic.interpret import thread_map
from jax._src.pallas.mosaic.interpret.utils import Access, JaxprEnv
from jax._src.pallas.mosaic_gpu import primitives
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret, race_detection_state, shared_memory
from jax._src.pallas.mosaic_gpu.interpret.shared_memory import GpuClockBundle, HostAllocationKey
from jax._src.state import indexing
from jax._src.state import types as state_types
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode_attention import lanes_sm90
from tests.kernels import evaluate
from tests.kernels.inlined.function import WARPGROUP, Array, Function, Reference
from tests.kernels.inlined.memory import Memory as Bytes
from tests.kernels.inlined.memory import Run, view

INTERPRET = plgpu.InterpretGPUParams()
FIND_RACES = plgpu.InterpretGPUParams(detect_races=True)
COMPILED = thread_map._run_jaxpr  # what runs a thread in JAX
ASYNCHRONOUS = 512  # places in the clocks: each copy and product takes the next one


class Race(Exception):
    pass


class Product(NamedTuple):
    """Holds a product that may be in flight: its accumulator, what that will hold, and what its end says to who waits
    for it."""

    accumulator: Any
    value: np.ndarray
    clock: Any


class Memory(shared_memory.GPUSharedMemory):
    def __init__(self, **options: Any) -> None:
        self.products: dict[Any, list[Product]] = defaultdict(list)  # of each thread, in their order
        self.copies: dict[Any, list[Any]] = defaultdict(list)  # by its lanes: what their ends say
        super().__init__(**options | {"num_tma_threads_per_device": ASYNCHRONOUS})

    def multiply(self, thread: Any, accumulator: Any, a: np.ndarray, b: np.ndarray, clock: Any) -> None:
        """Begins accumulator += a b; sums are rounded once, in whatever order they are added."""
        content = self.mem[accumulator].content
        earlier = [product.value for product in self.products[thread] if product.accumulator == accumulator]
        with np.errstate(all="ignore"):
            total = (earlier[-1] if earlier else content) + a.astype(np.float64) @ b.astype(np.float64)
            self.products[thread].append(Product(accumulator, total.astype(content.dtype), clock))
        content[...] = np.nan if content.dtype.kind == "f" else np.iinfo(content.dtype).min

    def wait_for_products(self, thread: Any, in_flight: int) -> None:
        """Waits until at most `in_flight` of the thread's products are in flight."""
        products = self.products[thread]
        ended = max(len(products) - in_flight, 0)
        done, self.products[thread] = products[:ended], products[ended:]
        running = [product.accumulator for product in products[ended:]]
        for product in done:
            if product.accumulator not in running:
                self.mem[product.accumulator].content[...] = product.value
            if product.clock is not None:
                with self.lock:
                    self.clocks[thread].update(product.clock)

    def kernel_thread_finished(self, thread: Any) -> None:
        if self.products[thread]:
            raise ValueError(f"{thread} ended without waiting for its products")
        super().kernel_thread_finished(thread)


class Barrier(shared_memory.Barrier):
    """Tells who waits for a phase what those knew that arrived in it and before."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.order = threading.Lock()
        self.arrived: Any = None
        self.known: list[Any] = []  # of each phase

    def arrive(self, thread: Any, clock: Any = None, logging_info: Any = None) -> None:
        with self.order:
            if clock is not None:
                self.arrived = clock.copy() if self.arrived is None else self.arrived
                self.arrived.update(clock)
                if self.arrivals_count + 1 == self.num_arrivals:
                    self.known.append(self.arrived.copy())
            super().arrive(thread, clock, logging_info)

    def wait(self, thread: Any, logging_info: Any = None) -> None:
        clock = self.shared_memory.get_clock(thread)
        super().wait(thread, logging_info)
        if clock is not None:
            clock.update(self.known[self.last_observed_phase_by_thread[thread] - 1])
            with self.shared_memory.lock:
                self.shared_memory.clocks[thread] = clock


class Accesses:
    """Lists accesses of a buffer: where each is in the clocks, and the box that it touches."""

    def __init__(self, rank: int) -> None:
        self.size, self.rows, self.frames = 0, np.zeros((16, 2 + 2 * rank), np.int64), []

    def add(self, row: np.ndarray, frame: str) -> None:
        if self.size == len(self.rows):
            self.rows = np.concatenate([self.rows, np.zeros_like(self.rows)])
        self.rows[self.size] = row
        self.size += 1
        self.frames.append(frame)

    def racing(self, row: np.ndarray, clock: np.ndarray) -> list[str]:
        """Returns where those are in the source that touch the same and are not known at `clock`."""
        rows, rank = self.rows[: self.size], len(row) // 2 - 1
        unknown = clock[rows[:, 0]] < rows[:, 1]
        same = (rows[:, 2 : 2 + rank] < row[2 + rank :]) & (row[2 : 2 + rank] < rows[:, 2 + rank :])
        return [self.frames[i] for i in np.flatnonzero(unknown & same.all(axis=1))]


class Races(race_detection_state.GPURaceDetectionState):
    """Orders events: two accesses are ordered if the later one knows of the earlier. Others raise, at once. JAX would
    only remember a race, until the next kernel begins. Members of a union are the same bytes, of the same order and as
    many."""

    def tag_ref_union_member(self, key: Any, union: Any, alias_group: int) -> None:
        memory = gpu_callbacks._get_shared_memory()
        with self.lock:
            member = memory.mem[key]
            member._content = memory.mem[union].content.reshape(member.shape)
            self.ref_union_members[key] = union, alias_group

    def check_read(self, thread: Any, clock: Any, buffer_key: Any, rnge: Access, source_info: Any = None) -> None:
        self._check("read", thread, clock.clock, buffer_key, rnge, source_info)

    def check_write(self, thread: Any, clock: Any, buffer_key: Any, rnge: Access, source_info: Any = None) -> None:
        self._check("write", thread, clock.clock, buffer_key, rnge, source_info)

    def check_copy(self, thread: Any, clock: GpuClockBundle, key: Any, access: Access, source_info: Any) -> None:
        """Checks a write by TMA. It needs a fence to come after writes of threads, but none to come after their reads.
        Who says that it has read has the values."""
        self._check("write", thread, clock.async_smem_clock.clock, key, access, source_info, clock.generic_clock.clock)

    def _check(
        self, kind: str, thread: Any, clock: np.ndarray, key: Any, access: Access, source_info: Any,
        after_reads: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        memory = gpu_callbacks._get_shared_memory()
        beyond = np.flatnonzero(clock > memory.clocks[thread].generic_clock.clock)  # of what is asynchronous
        place = beyond[-1] if len(beyond) else memory.thread_to_vc_position(thread)
        ends = np.array([(x, x + 1) if isinstance(x, int) else (x.start, x.stop) for x in access.range])
        if key in self.ref_union_members:
            shapes = [memory.buffer_shape_and_dtype(x).shape for x in (key, self.ref_union_members[key][0])]
            corners = np.unravel_index(np.ravel_multi_index(tuple(ends - [0, 1]), shapes[0]), shapes[1])
            key, ends = self.ref_union_members[key][0], np.array(corners) + [0, 1]
        row = np.array([place, clock[place], *ends[:, 0], *ends[:, 1]])
        frame = f"{kind} by {thread}, {source_info_util.summarize(source_info)}"
        with self.lock:
            reads, writes = (tables.setdefault(key, Accesses(len(ends))) for tables in (self.reads, self.writes))
            racing = writes.racing(row, clock)
            if kind == "write":
                racing += reads.racing(row, clock if after_reads is None else after_reads)
            (reads if kind == "read" else writes).add(row, frame)
        if racing:
            raise Race(f"a race in {key}: {frame}, and {racing[0]}")


@gpu_callbacks.fail_on_exception
def multiply(*, token: Any, thread: Any, mesh_location: Any, accumulator: Any, a: Any, b: Any, source_info: Any) -> Any:
    """Multiplies as wgmma; operands are arrays, or (key, transforms) in shared memory."""
    del mesh_location
    memory, clock = gpu_callbacks._get_shared_memory(), None
    if memory.detect_races:
        clock = memory.incr_clock(thread)
        clock.inc(memory.get_next_tma_thread_id())

    def read(operand: Any) -> np.ndarray:
        if isinstance(operand, np.ndarray):
            return operand
        key, transforms = HostAllocationKey.from_array(operand[0]), gpu_callbacks._remove_noop_transforms(operand[1])
        access = memory.access(key, jax.tree.map(int, transforms))
        if clock is not None:
            gpu_callbacks.get_races().check_read(thread, clock.async_smem_clock, key, access, source_info)
        return memory.get_buffer_content(key, access, thread, increment_clock=False)[0]

    memory.multiply(thread, HostAllocationKey.from_array(accumulator), read(a), read(b), clock)
    return token


@gpu_callbacks.fail_on_exception
def wait_for_products(*, token: Any, thread: Any, mesh_location: Any, in_flight: int) -> Any:
    gpu_callbacks._get_shared_memory().wait_for_products(thread, in_flight)
    return token


@gpu_callbacks.fail_on_exception
def load_accumulator(*, token: Any, thread: Any, mesh_location: Any, accumulator: Any, in_flight: int | None) -> Any:
    memory = gpu_callbacks._get_shared_memory()
    if in_flight is not None:
        memory.wait_for_products(thread, in_flight)
    return token, memory.mem[HostAllocationKey.from_array(accumulator)].content.copy()


@gpu_callbacks.fail_on_exception
def store_accumulator(*, token: Any, thread: Any, mesh_location: Any, accumulator: Any, value: Any) -> Any:
    memory, key = gpu_callbacks._get_shared_memory(), HostAllocationKey.from_array(accumulator)
    assert all(product.accumulator != key for product in memory.products[thread])
    memory.mem[key].content[...] = value
    return token


@gpu_callbacks.fail_on_exception
def run_inlined(
    *, token: Any, thread: Any, mesh_location: Any, operands: Any, function: Function, source_info: Any
) -> Any:
    memory, arguments = gpu_callbacks._get_shared_memory(), []
    buffers: list[tuple[Any, Bytes]] = []
    for operand, kind in zip(operands, function.arguments):
        if isinstance(kind, Array):
            arguments.append(operand)
            continue
        key, transforms = HostAllocationKey.from_array(operand[0]), gpu_callbacks._remove_noop_transforms(operand[1])
        access = memory.access(key, jax.tree.map(int, transforms))
        assert access.permutation is None
        arguments.append(view(memory.mem[key].content, access.range, kind.transforms))
        buffers.append((key, arguments[-1].memory))

    def tell() -> None:
        """Tells race detection what was read and written so far."""
        for key, buffer in buffers:
            shape = memory.buffer_shape_and_dtype(key).shape
            for kind, touched in buffer.touched.items():
                if memory.detect_races and sum(x.size for x in touched):
                    clock = memory.incr_clock(thread)
                    if kind == "copy":
                        clock.inc(memory.get_next_tma_thread_id())
                        memory.copies[thread].append(clock)
                    places = np.unique(np.concatenate(touched))
                    rows = np.unravel_index(places, shape)[0]
                    races = gpu_callbacks.get_races()
                    check = races.check_read if kind == "read" else races.check_write
                    for some in np.split(places, np.flatnonzero(np.diff(rows) > 1) + 1):  # rows with none between
                        at = np.unravel_index(some, shape)
                        box = Access(tuple(slice(int(x.min()), int(x.max()) + 1) for x in at))
                        check(thread, clock.generic_clock, key, box, source_info)
                touched.clear()

    def synchronize() -> None:
        tell()
        barrier = memory.named_barrier(thread, 0, memory.num_pallas_threads_per_block)
        barrier.arrive(thread, memory.incr_clock(thread) if memory.detect_races else None)
        barrier.wait(thread)

    first, count = WARPGROUP * thread.warpgroup_id, WARPGROUP
    if isinstance(thread, shared_memory.Warp):
        first, count = first + 32 * thread.warp_id, 32
    out = function(Run(np.arange(first, first + count, dtype=np.uint32), synchronize), arguments)
    tell()
    return (token, *out) if out else token


@gpu_callbacks.fail_on_exception
def follow_copies(*, token: Any, thread: Any, mesh_location: Any) -> Any:
    """Orders what arrives next after the copies of the thread's lanes."""
    memory = gpu_callbacks._get_shared_memory()
    for clock in memory.copies.pop(thread, ()):
        with memory.lock:
            memory.clocks[thread].update(clock)
    return token


def _call(interpreter: Any, function: Any, token: Any, *results: Any, **arguments: Any) -> Any:
    where = {"thread": interpreter.thread, "mesh_location": interpreter.mesh_location}
    kinds = (gpu_callbacks.TOKEN_SHAPE_DTYPE, *results) if results else gpu_callbacks.TOKEN_SHAPE_DTYPE
    out = callback.io_callback(function, kinds, token=token, **where, **arguments)
    return (out[0], list(out[1:])) if results else (out, [])


def _wgmma(interpreter: Any, eqn: Any, token: Any, values: list[Any]) -> Any:
    accumulator, a, b, *leaves = values
    trees = [eqn.params[f"{name}_transforms_tree"] or jax.tree.structure([]) for name in ("acc", "a", "b")]
    of_accumulator, *transforms = jax.tree.unflatten(jax.tree_util.treedef_tuple(trees), leaves)
    assert not of_accumulator
    a, b = (
        x if not isinstance(var.aval, state_types.AbstractRef) else jaxpr_interpret.resolve_ref(var.aval, x, tuple(t))
        for x, var, t in zip((a, b), eqn.invars[1:3], transforms)
    )
    function = partial(multiply, source_info=eqn.source_info)
    return _call(interpreter, function, token, accumulator=accumulator, a=a, b=b)


def _wgmma_wait(interpreter: Any, eqn: Any, token: Any, values: list[Any]) -> Any:
    return _call(interpreter, partial(wait_for_products, in_flight=eqn.params["n"]), token)


def _wgmma_load(interpreter: Any, eqn: Any, token: Any, values: list[Any]) -> Any:
    function = partial(load_accumulator, in_flight=eqn.params["wait_n"])
    return _call(interpreter, function, token, eqn.outvars[0].aval, accumulator=values[0])


def _wgmma_store(interpreter: Any, eqn: Any, token: Any, values: list[Any]) -> Any:
    token, _ = _call(interpreter, store_accumulator, token, accumulator=values[0], value=values[1])
    return token, [values[1]]


def _inline(interpreter: Any, eqn: Any, token: Any, values: list[Any]) -> Any:
    params, count = eqn.params, eqn.params["pytree_args"].num_leaves
    transforms = params["pytree_ref_transforms"].unflatten(values[count:])
    operands, kinds = [], []
    for x, var, kind, some in zip(values[:count], eqn.invars, params["flat_arg_types"], transforms):
        if not isinstance(kind, plgpu.RefType):
            operands.append(x)
            kinds.append(Array(var.aval.shape, var.aval.dtype, kind.to_mgpu()))
            continue
        indexers = [x for x in some if isinstance(x, indexing.NDIndexer)]
        shape = indexers[-1].get_indexer_shape() if indexers else var.aval.shape
        operands.append(jaxpr_interpret.resolve_ref(var.aval, x, tuple(some)))
        kinds.append(Reference(shape, var.aval.dtype, kind.transforms))
    results = [Array(x.shape, x.dtype, x.layout.to_mgpu()) for x in params["flat_ret_ty"]]
    function = Function(params["mgpu_fn"], kinds, params["pytree_args"], results)
    run = partial(run_inlined, function=function, source_info=eqn.source_info)
    return _call(interpreter, run, token, *(var.aval for var in eqn.outvars), operands=operands)


def _follow(interpreter: Any, eqn: Any, token: Any, values: list[Any]) -> Any:
    return _call(interpreter, follow_copies, token)


OWN = {
    primitives.inline_mgpu_p: _inline,
    lanes_sm90._follow_p: _follow,
    primitives.wgmma_ref_p: _wgmma,
    primitives.wgmma_wait_p: _wgmma_wait,
    primitives.wgmma_accumulator_deref_p: _wgmma_load,
    primitives.wgmma_accumulator_store_p: _wgmma_store,
}


def _interpreter_with_own(original: Any) -> Any:
    def interpret(self: Any, jaxpr: jax_core.Jaxpr, token: Any, *values: Any) -> Any:
        env = JaxprEnv(vars=jaxpr.constvars + jaxpr.invars, values=values)
        for eqn in jaxpr.eqns:
            if eqn.primitive in OWN:
                token, out = OWN[eqn.primitive](self, eqn, token, env.read_many(eqn.invars))
            else:
                read = list({var: None for var in eqn.invars if isinstance(var, jax_core.Var)})
                alone = jax_core.Jaxpr((), read, eqn.outvars, [eqn], eqn.effects, jaxpr.debug_info)
                token, out = original(self, alone, token, *env.read_many(read))
            env.write_many(eqn.outvars, out)
        return token, env.read_many(jaxpr.outvars)

    return interpret


def _write_copied(copy: Any, tma_thread_id: int, memory: Memory) -> None:
    if memory.detect_races:
        copy.clock.inc(tma_thread_id)
        place = copy.dst_allocation_key, copy.dst_access
        gpu_callbacks.get_races().check_copy(copy.thread, copy.clock, *place, copy.source_info)


def _refuse_runs_past_an_edge(store: Any) -> Any:
    """Wraps what is done before a copy to global memory: refuses one that is a run of bytes there, as a single row is,
    and that goes past an edge other than the end. A GPU goes on with the next row; it cuts no run of bytes."""

    def checked(copy: Any, tma_thread_id: int, memory: Memory) -> None:
        shape = memory.buffer_shape_and_dtype(copy.dst_allocation_key).shape
        ends = [(x, x + 1) if isinstance(x, int) else (x.start, x.stop) for x in copy.dst_access.range]
        sizes, kept = ([end - start for start, end in each] for each in (ends, _within(ends, shape)))
        strides = np.cumprod([1, *shape[:0:-1]])[::-1]
        wanted = np.cumprod([1, *sizes[:0:-1]])[::-1]
        if all(size == 1 or stride == own for size, stride, own in zip(sizes, strides, wanted, strict=True)):
            start = int(np.dot([start for start, _ in ends], strides))
            if min(math.prod(sizes), math.prod(shape) - start) != math.prod(kept):
                raise ValueError(f"a copy to {ends} of {shape} is one run of bytes, which is not cut at the edge")
        store(copy, tma_thread_id, memory)

    return checked


def _within(ends: list[tuple[int, int]], shape: tuple[int, ...]) -> list[tuple[int, int]]:
    return [(start, max(start, min(end, size))) for (start, end), size in zip(ends, shape, strict=True)]


def _call_back(*arguments: Any, callback: Any, **_: Any) -> Any:
    """Calls back with arrays of numpy: JAX would make one of its own of each number."""
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        return jax.tree.map(np.asarray, callback(*arguments))


def make_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret = _interpreter_with_own(jaxpr_interpret.JaxprInterpreter.interpret)
    monkeypatch.setattr(jaxpr_interpret.JaxprInterpreter, "interpret", interpret)
    monkeypatch.setattr(shared_memory, "GPUSharedMemory", Memory)
    monkeypatch.setattr(shared_memory, "Barrier", Barrier)
    monkeypatch.setattr(gpu_callbacks, "GPURaceDetectionState", Races)
    monkeypatch.setattr(gpu_callbacks.AsyncCopyGmemToSmemTask, "post_read", _write_copied)
    stores = gpu_callbacks.AsyncCopySmemToGmemTask
    monkeypatch.setattr(stores, "pre_read", _refuse_runs_past_an_edge(stores.pre_read))
    monkeypatch.setattr(callback, "io_callback_impl", _call_back)
    monkeypatch.setattr(thread_map, "_run_jaxpr", evaluate.run)
    monkeypatch.setattr(shared_memory, "_to_int", lambda x: x if isinstance(x, jax.core.Tracer) else int(x))
