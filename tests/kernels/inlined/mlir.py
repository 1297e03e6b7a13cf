"""Runs MLIR in numpy: what operations do for all threads at once. A value is an array [threads], or [threads, n] of
vectors; integers are unsigned."""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from tests.kernels.inlined.memory import Run
from tests.kernels.inlined.ptx import as_bytes, parse

Value = Any  # an array, a Pointer, a View, or a list of a struct's


def dtype_of(kind: ir.Type) -> Any:
    if isinstance(kind, ir.VectorType):
        return dtype_of(kind.element_type)
    return {
        "i1": np.bool_, "i8": np.uint8, "i16": np.uint16, "i32": np.uint32, "i64": np.int64, "index": np.int64,
        "f16": np.float16, "bf16": jnp.bfloat16, "f32": np.float32,
    }[str(kind)]  # fmt: skip


def elements_of(kind: ir.Type) -> int:
    """Counts the elements of a vector; 0: no vector."""
    return math.prod(kind.shape) if isinstance(kind, ir.VectorType) else 0


def reader(kind: ir.Type) -> Callable[[np.ndarray], np.ndarray]:
    """Returns what makes values of bytes [threads, ..]."""
    dtype, vector = dtype_of(kind), elements_of(kind) > 0

    def read(data: np.ndarray) -> np.ndarray:
        values = np.ascontiguousarray(data).view(dtype)
        return values if vector else values[:, 0]

    return read


def size_of(kind: ir.Type) -> int:
    return max(elements_of(kind), 1) * np.dtype(dtype_of(kind)).itemsize


def signed(x: np.ndarray) -> np.ndarray:
    return x if x.dtype.kind != "u" else x.view(f"i{x.itemsize}")


# Of each operation what computes its result, from the run and its operands.
OPERATIONS: dict[str, Callable[[Any], Callable[..., Value]]] = {}


def operation(*names: str) -> Any:
    def add(f: Any) -> Any:
        OPERATIONS.update(dict.fromkeys(names, f))
        return f

    return add


def _elementwise(f: Callable[..., np.ndarray]) -> Any:
    def make(op: Any) -> Any:
        dtype = dtype_of(op.results[0].type)

        def run(_: Run, *values: np.ndarray) -> np.ndarray:
            with np.errstate(all="ignore"):
                return f(*values).astype(dtype, copy=False)

        return run

    return make


for _names, _f in {
    ("arith.addi", "arith.addf"): np.add, ("arith.subi", "arith.subf"): np.subtract,
    ("arith.muli", "arith.mulf", "llvm.mul"): np.multiply,
    ("arith.divui",): np.floor_divide, ("arith.remui",): np.remainder,
    ("arith.divf",): np.divide, ("arith.andi",): np.bitwise_and, ("arith.ori",): np.bitwise_or,
    ("arith.xori",): np.bitwise_xor, ("arith.shli",): np.left_shift, ("arith.shrui",): np.right_shift,
    ("arith.shrsi",): lambda a, b: (signed(a) >> signed(b)).view(a.dtype), ("arith.minui",): np.minimum,
    ("arith.maxui",): np.maximum,
    ("arith.maximumf",): np.maximum, ("arith.select",): lambda c, a, b: np.where(c, a, b),
    ("math.fma",): lambda a, b, c: a.astype(np.float64) * b + c,
    ("arith.extui", "arith.trunci", "arith.extf", "arith.truncf", "arith.index_castui"): lambda x: x,
    ("arith.extsi", "arith.index_cast", "arith.sitofp"): signed,
}.items():  # fmt: skip
    operation(*_names)(_elementwise(_f))


@operation("arith.constant")
def _constant(op: Any) -> Any:
    attribute, dtype = op.attributes["value"], dtype_of(op.results[0].type)
    assert not elements_of(op.results[0].type)
    value = attribute.value
    if isinstance(value, int) and not isinstance(value, bool) and np.issubdtype(dtype, np.unsignedinteger):
        value &= (1 << 8 * np.dtype(dtype).itemsize) - 1
    return lambda run: run.full(value, dtype)


@operation("arith.cmpi")
def _compare(op: Any) -> Any:
    number = op.attributes["predicate"].value
    compare = (np.equal, np.not_equal, *(np.less, np.less_equal, np.greater, np.greater_equal) * 2)[number]
    return lambda run, a, b: compare(a, b) if number > 5 else compare(signed(a), signed(b))


@operation("llvm.select")
def _choose(op: Any) -> Any:
    """Chooses one of two pointers, for all threads the same."""

    def run(_: Run, condition: np.ndarray, a: Value, b: Value) -> Value:
        assert condition.all() or not condition.any()
        return a if condition.all() else b

    return run


@operation("arith.bitcast", "vector.bitcast", "llvm.bitcast")
def _bitcast(op: Any) -> Any:
    read = reader(op.results[0].type)
    return lambda run, x: read(as_bytes(x))


@operation("vector.extract")
def _extract(op: Any) -> Any:
    (i,) = op.attributes["static_position"]
    return lambda run, x: x[:, i]


@operation("vector.insert")
def _insert(op: Any) -> Any:
    (i,) = op.attributes["static_position"]
    return lambda run, x, into: np.concatenate([into[:, :i], x[:, None], into[:, i + 1 :]], axis=1)


@operation("vector.extract_strided_slice")
def _slice(op: Any) -> Any:
    (begin,), (size,) = ([x.value for x in op.attributes[name]] for name in ("offsets", "sizes"))
    return lambda run, x: x[:, begin : begin + size]


@operation("vector.insert_strided_slice")
def _insert_slice(op: Any) -> Any:
    (begin,) = (x.value for x in op.attributes["offsets"])
    return lambda run, x, to: np.concatenate([to[:, :begin], x, to[:, begin + x.shape[1] :]], axis=1)


@operation("vector.from_elements")
def _from_elements(op: Any) -> Any:
    return lambda run, *xs: np.stack(xs, axis=1)


@operation("vector.shuffle")
def _select_elements(op: Any) -> Any:
    chosen = list(op.attributes["mask"])
    return lambda run, x, y: np.concatenate([x, y], axis=1)[:, chosen]


@operation("vector.broadcast")
def _broadcast(op: Any) -> Any:
    size = elements_of(op.results[0].type)
    return lambda run, x: np.stack([x] * size, axis=1)


@operation("vector.load", "memref.load")
def _load_element(op: Any) -> Any:
    read, size = reader(op.results[0].type), size_of(op.results[0].type)
    alignment = op.attributes["alignment"].value if "alignment" in op.attributes else 1
    return lambda run, source, *indices: read(run.load(source.at(indices), size, alignment))


@operation("memref.store", "vector.store")
def _store_element(op: Any) -> Any:
    return lambda run, x, target, *indices: run.store(target.at(indices), as_bytes(x), 1)


@operation("llvm.load")
def _load(op: Any) -> Any:
    kind = op.results[0].type
    read, size = reader(kind), size_of(kind)
    alignment = op.attributes["alignment"].value if "alignment" in op.attributes else np.dtype(dtype_of(kind)).itemsize
    return lambda run, source: read(run.load(source, size, alignment))


@operation("llvm.store")
def _store(op: Any) -> Any:
    alignment = op.attributes["alignment"].value if "alignment" in op.attributes else None
    return lambda run, x, target: run.store(target, as_bytes(x), alignment or x.itemsize)


@operation("llvm.getelementptr")
def _getelementptr(op: Any) -> Any:
    size = np.dtype(dtype_of(op.attributes["elem_type"].value)).itemsize
    (static,) = op.attributes["rawConstantIndices"]
    if op.operands[1:]:
        return lambda run, pointer, index: pointer.moved(signed(index).astype(np.int64) * size)
    return lambda run, pointer: pointer.moved(static * size)


@operation("builtin.unrealized_conversion_cast")
def _descriptor(op: Any) -> Any:
    return lambda run, x: [x.at(()), x.at(()), run.full(0, np.int64)]


@operation("llvm.add")
def _add_to_pointer(op: Any) -> Any:
    return lambda run, pointer, offset: pointer.moved(offset)


@operation("llvm.addrspacecast", "llvm.ptrtoint", "llvm.inttoptr")
def _same(op: Any) -> Any:
    return lambda run, x: x


@operation("llvm.extractvalue")
def _extractvalue(op: Any) -> Any:
    (i,) = op.attributes["position"]
    return lambda run, x: x[i]


@operation("llvm.mlir.undef")
def _undefined(op: Any) -> Any:
    size, dtype = elements_of(op.results[0].type), dtype_of(op.results[0].type)
    return lambda run: np.zeros((len(run.threads), size), dtype)


@operation("llvm.insertelement")
def _insertelement(op: Any) -> Any:
    return lambda run, x, value, i: np.where(np.arange(x.shape[1]) == i[:, None], value[:, None], x)


@operation("gpu.thread_id")
def _thread_id(op: Any) -> Any:
    x = "<x>" in str(op.attributes["dimension"])
    return lambda run: run.threads.astype(np.int64) if x else run.full(0, np.int64)


@operation("gpu.block_dim")
def _block_dim(op: Any) -> Any:
    return lambda run: run.full(0, np.int64)  # it is multiplied by other dimensions' thread numbers, which are 0


@operation("gpu.barrier")
def _barrier(op: Any) -> Any:
    return lambda run: run.synchronize()


@operation("nvvm.shfl.sync")
def _shuffle(op: Any) -> Any:
    assert "bfly" in str(op.attributes["kind"])
    return lambda run, mask, x, distance, clamp: x[np.arange(len(x)) ^ distance]


@operation("nvvm.ldmatrix")
def _load_matrices(op: Any) -> Any:
    """Loads matrices: lane 8 i + r points to row r, 16 bytes, of the i-th; lane l gets word l % 4 of its row l / 4."""
    count = op.attributes["num"].value
    assert count == 4
    assert "row" in str(op.attributes["layout"])

    def run(run: Run, place: Value) -> list[np.ndarray]:
        rows = run.load(place, 16, 16).view(np.uint32).reshape(-1, count, 8, 4)
        return [np.ascontiguousarray(rows[:, i]).reshape(-1) for i in range(count)]

    return run


@operation("nvvm.cp.async.shared.global")
def _copy(op: Any) -> Any:
    size = op.attributes["size"].value
    return lambda run, target, source: run.store(target, run.load(source, size, size), size, "copy")


@operation("scf.yield")
def _yield(op: Any) -> Any:
    return lambda run, *values: list(values)


@operation("llvm.inline_asm")
def _inline_asm(op: Any) -> Any:
    count = op.attributes["constraints"].value.count("=")
    kinds = [x.type for x in op.results]
    struct = kinds and isinstance(kinds[0], llvm.StructType)
    if struct:
        kinds = kinds[0].body
    readers, statements = [reader(kind) for kind in kinds[:count]], parse(op.attributes["asm_string"].value)

    def run_all(run: Run, *values: Value) -> Value:
        names = {f"${i}": value for i, value in enumerate(values, count)}
        for statement in statements:
            statement(run, names)
        out = [read(as_bytes(names[f"${i}"])) for i, read in enumerate(readers)]
        return out if struct or not out else out[0]

    return run_all


class Code:
    """Holds the operations of a block, and of those within; values are numbered."""

    def __init__(self, block: Any, numbers: dict[Any, int]) -> None:
        self.steps: list[tuple[Any, list[int], list[int]]] = []
        for op in block.operations:
            inner = [Code(region.blocks[0], numbers) for region in op.operation.regions if len(region.blocks)]
            if op.operation.name == "scf.if":
                compute = _branch(inner)
            elif op.operation.name in OPERATIONS:
                compute = OPERATIONS[op.operation.name](op.operation)
            else:
                raise NotImplementedError(f"numpy does not know {op}")
            numbers |= {value: len(numbers) + i for i, value in enumerate(op.operation.results)}
            results = [numbers[value] for value in op.operation.results]
            self.steps.append((compute, [numbers[value] for value in op.operation.operands], results))

    def __call__(self, run: Run, values: dict[int, Value]) -> Value:
        """Returns what the last operation gives."""
        out = None
        run.values = values
        for compute, operands, results in self.steps:
            out = compute(run, *[values[i] for i in operands])
            if results:
                values.update(zip(results, out if len(results) > 1 else [out]))
        return out


def _branch(blocks: list[Code]) -> Any:
    """Runs scf.if: both branches, each by the threads that take it."""

    def run_both(run: Run, condition: np.ndarray) -> Value:
        out = []
        for block, taken in zip(blocks, (condition, ~condition)):
            with run.only(taken):
                out.append(block(run, run.values))
        if not out[0]:
            return None
        both = [np.where(condition if a.ndim == 1 else condition[:, None], a, b) for a, b in zip(*out)]
        return both if len(both) > 1 else both[0]

    return run_both
