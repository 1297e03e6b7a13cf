"""Runs what kernels inline in numpy: the MLIR that it becomes, and the PTX in that. Written for JAX 0.11.2."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.interpreters import mlir
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func

from tests.kernels.inlined.memory import Run
from tests.kernels.inlined.mlir import Code, Value

WARPGROUP = 128


def places(layout: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the flat index of each element of each register: [register, thread, element]."""
    return _places(layout, tuple(shape))


@cache
def _places(layout: Any, shape: tuple[int, ...]) -> np.ndarray:
    index = np.arange(math.prod(shape)).reshape(shape)
    for tile in layout.tiling.tiles:
        rank, outer = len(tile), index.ndim - len(tile)
        split = [x for size, t in zip(index.shape[outer:], tile) for x in (size // t, t)]
        index = index.reshape(*index.shape[:outer], *split)
        order = [outer + 2 * i for i in range(rank)] + [outer + 2 * i + 1 for i in range(rank)]
        index = index.transpose(*range(outer), *order)
    vector = layout.vector_dim % index.ndim
    of_thread: dict[int, np.ndarray] = {}
    for dims, rest in ((layout.lane_dims, np.arange(WARPGROUP) % 32), (layout.warp_dims, np.arange(WARPGROUP) // 32)):
        for dim in reversed(dims):
            size = index.shape[dim] if isinstance(dim, int) else dim.times
            if isinstance(dim, int):
                of_thread[dim % index.ndim] = rest % size
            rest = rest // size
    index = np.moveaxis(index, vector, -1)
    out = []
    for at in np.ndindex(layout.registers_shape(shape)):
        chosen = [of_thread.get(d, np.full(WARPGROUP, i)) for d, i in enumerate(at) if d != vector]
        out.append(index[tuple(chosen)])
    return np.array(out)


@dataclass(frozen=True)
class Array:
    """Describes the type of an argument or result in registers."""

    shape: tuple[int, ...]
    dtype: Any
    layout: Any  # of mgpu

    @property
    def scalar(self) -> bool:
        return isinstance(self.layout, mgpu.WGSplatFragLayout)

    @property
    def register(self) -> ir.Type:
        kind = mgpu.utils.dtype_to_ir_type(jnp.dtype(self.dtype))
        return kind if self.scalar else ir.VectorType.get((self.layout.vector_length,), kind)

    def distributed(self, x: np.ndarray, threads: int) -> list[np.ndarray]:
        x = np.asarray(x)
        x = x.view(f"u{x.itemsize}") if x.dtype.kind == "i" else x
        if self.scalar:
            return [np.full(threads, x)]
        return list(x.reshape(-1)[places(self.layout, self.shape)])

    def gathered(self, registers: Sequence[np.ndarray]) -> np.ndarray:
        out = np.zeros(math.prod(self.shape), self.dtype)
        for place, register in zip(places(self.layout, self.shape), registers, strict=True):
            out[place] = np.ascontiguousarray(register).view(self.dtype)
        return out.reshape(self.shape)


@dataclass(frozen=True)
class Reference:
    """Describes the type of an argument in memory, and how it is laid out there."""

    shape: tuple[int, ...]
    dtype: Any
    transforms: tuple[Any, ...] = ()


class Function:
    """Holds a function that inlines code, f(context, *arguments), as JAX lowers it."""

    def __init__(self, f: Any, arguments: Sequence[Array | Reference], tree: Any, results: Sequence[Array]) -> None:
        self.arguments, self.results = arguments, results
        with mlir.make_ir_context() as self.context, ir.Location.unknown():
            mgpu.dialect.register_dialect(self.context)
            self.context.load_all_available_dialects()
            module = ir.Module.create()
            for name, number in (("major", 9), ("minor", 0)):
                attribute = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), number)
                module.operation.attributes[f"mosaic_gpu.arch_{name}"] = attribute
            kinds: list[list[ir.Type]] = []
            for kind in arguments:
                if isinstance(kind, Reference):
                    element = mgpu.utils.dtype_to_ir_type(jnp.dtype(kind.dtype))
                    kinds.append([ir.MemRefType.get(kind.shape, element)])
                else:
                    count = 1 if kind.scalar else math.prod(kind.layout.registers_shape(kind.shape))
                    kinds.append([kind.register] * count)
            with ir.InsertionPoint(module.body):
                signature = ir.FunctionType.get([x for some in kinds for x in some], [])
                block = func.FuncOp("f", signature).add_entry_block()
            with ir.InsertionPoint(block):
                rest = iter(block.arguments)
                values = [_argument(kind, [next(rest) for _ in some]) for kind, some in zip(arguments, kinds)]
                found = f(None, *jax.tree.unflatten(tree, values))
            leaves = jax.tree.leaves(found, is_leaf=lambda x: isinstance(x, mgpu.FragmentedArray))
            self.numbers: dict[Any, int] = {value: i for i, value in enumerate(block.arguments)}
            self.code = Code(block, self.numbers)
            self.registers = [[self.numbers[x] for x in leaf.registers.flat] for leaf in leaves]
            self.module = module  # whose values these are

    def __call__(self, run: Run, arguments: Sequence[Any]) -> list[np.ndarray]:
        """Takes arrays, and Views of memory, which it may change."""
        values: list[Value] = []
        for kind, x in zip(self.arguments, arguments, strict=True):
            values += [x] if isinstance(kind, Reference) else kind.distributed(x, len(run.threads))
        env = dict(enumerate(values))
        self.code(run, env)
        return [kind.gathered([env[i] for i in some]) for kind, some in zip(self.results, self.registers)]


def _argument(kind: Array | Reference, values: list[ir.Value]) -> Any:
    if isinstance(kind, Reference):
        return values[0]
    shape = () if kind.scalar else kind.layout.registers_shape(kind.shape)
    registers = np.empty(shape, object)
    registers.reshape(-1)[:] = values
    dtype = jnp.dtype(kind.dtype)
    signedness = None if not jnp.issubdtype(dtype, jnp.integer) else bool(jnp.issubdtype(dtype, jnp.signedinteger))
    return mgpu.FragmentedArray(_registers=registers, _layout=kind.layout, _is_signed=signedness)
