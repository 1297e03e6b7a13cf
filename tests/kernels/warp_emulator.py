"""What warps_sm90 inlines into its kernels, run in numpy: 128 threads at once, each operation of MLIR and each
instruction of PTX by its definition. The interpreter of Pallas runs no inlined code."""

import contextlib
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

THREADS = 128


class Value:
    """An SSA value of all threads: numpy [128], or [128, n] of vectors; or what a struct holds."""

    def __init__(self, data: Any, kind: Any = None):
        self.data, self.type = data, kind


def _dtype(kind: Any) -> Any:
    if isinstance(kind, ir.VectorType):
        return _dtype(kind.element_type)
    return {
        "i1": bool, "i8": np.uint8, "i16": np.uint16, "i32": np.uint32, "f16": np.float16, "bf16": jnp.bfloat16,
        "f32": np.float32,
    }[str(kind)]  # fmt: skip


def _kind(dtype: Any, size: int = 0) -> Any:
    name = {"bool": "i1", "uint8": "i8", "int8": "i8", "int32": "i32", "uint32": "i32", "float16": "f16"}
    name["bfloat16"] = "bf16"
    kind = ir.Type.parse(name.get(str(dtype), "f32"))
    return ir.VectorType.get((size,), kind) if size else kind


def _binary(f: Any) -> Any:
    return lambda x, y: Value(f(x.data, y.data).astype(x.data.dtype), x.type)


def _compare(predicate: Any, x: Value, y: Value) -> Value:
    name = str(predicate).rsplit(".", 1)[-1].lower().split()[0]
    a, b = (z.data.view(np.int32) if name[0] == "s" else z.data for z in (x, y))
    compare = {"sge": np.greater_equal, "slt": np.less, "uge": np.greater_equal, "ne": np.not_equal}[name]
    return Value(compare(a, b), _kind("bool"))


ARITH = SimpleNamespace(
    **{
        name: _binary(f)
        for name, f in {
            "addi": np.add, "muli": np.multiply, "divui": np.floor_divide, "remui": np.remainder,
            "andi": np.bitwise_and, "ori": np.bitwise_or, "xori": np.bitwise_xor, "shrui": np.right_shift,
            "shli": np.left_shift, "subi": np.subtract,
            "addf": np.add, "mulf": np.multiply, "maximumf": np.maximum,
        }.items()
    },
    cmpi=_compare,
    CmpIPredicate=arith.CmpIPredicate,
    select=lambda c, x, y: Value(np.where(c.data, x.data, y.data), x.type),
    trunci=lambda kind, x: Value(x.data.astype(_dtype(kind)), kind),
    extf=lambda kind, x: Value(x.data.astype(_dtype(kind)), kind),
)  # fmt: skip

VECTOR = SimpleNamespace(
    extract=lambda x, _, at: Value(x.data[:, list(at)[0]], x.type.element_type),
    from_elements=lambda kind, xs: Value(np.stack([x.data for x in xs], axis=1), kind),
    broadcast=lambda kind, x: Value(np.stack([x.data] * kind.shape[0], axis=1), kind),
)


def _f16(x: Value) -> np.ndarray:
    return np.ascontiguousarray(x.data).view(np.float16).reshape(THREADS, 2)


def _u32(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x, dtype=np.float16).view(np.uint32).reshape(THREADS)


def _permute(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    both = np.concatenate([np.ascontiguousarray(x).view(np.uint8).reshape(THREADS, 4) for x in (a, b)], axis=1)
    chosen = [both[np.arange(THREADS), (selector >> (4 * i)) & 7] for i in range(4)]
    return np.ascontiguousarray(np.stack(chosen, axis=1)).view(np.uint32).reshape(THREADS)


def _mma(xs: list[Value]) -> list[Value]:
    lane = np.arange(32)
    g, t = lane // 4, lane % 4
    out = np.zeros((4, THREADS), np.float32)
    for warp in range(4):
        mine = slice(32 * warp, 32 * warp + 32)
        a, b, c = np.zeros((16, 16)), np.zeros((16, 8)), np.zeros((16, 8))
        for i in range(4):  # rows g, g + 8, g, g + 8; columns from 0, 0, 8, 8
            for j in range(2):
                a[g + 8 * (i % 2), 2 * t + j + 8 * (i // 2)] = _f16(xs[i])[mine, j]
        for i in range(2):
            for j in range(2):
                b[2 * t + j + 8 * i, g] = _f16(xs[4 + i])[mine, j]
        for i in range(4):
            c[g + 8 * (i // 2), 2 * t + i % 2] = xs[6 + i].data[mine]
        c += a @ b
        for i in range(4):
            out[i, mine] = c[g + 8 * (i // 2), 2 * t + i % 2]
    return [Value(x, _kind("float32")) for x in out]


def _inline_asm(kind: Any, xs: list[Value], text: str, *_: Any, **__: Any) -> Value:
    name = text.split()[0]
    if name.startswith("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"):
        return Value(_mma(xs))
    if name == "movmatrix.sync.aligned.m8n8.trans.b16":
        matrices = _f16(xs[0]).reshape(4, 8, 8)
        return Value(_u32(matrices.transpose(0, 2, 1).reshape(THREADS, 2)), kind)
    if name == "prmt.b32":
        return Value(_permute(*(x.data for x in xs)), kind)
    if name == "mov.b32":
        return Value(xs[0].data, kind)
    if name == "cvt.rn.f16x2.e4m3x2":
        stored = np.ascontiguousarray(xs[0].data).view(np.uint8).reshape(THREADS, 2)
        return Value(_u32(stored.view(jnp.float8_e4m3fn).astype(np.float16)), kind)
    if name == "cvt.rn.f16x2.f32":
        return Value(_u32(np.stack([xs[1].data, xs[0].data], axis=1)), kind)
    if name == "shfl.sync.idx.b32":
        return Value(xs[0].data[np.arange(THREADS) // 32 * 32 + xs[1].data % 32], kind)
    if name in ("max.u32", "min.u32"):
        return Value((np.maximum if name == "max.u32" else np.minimum)(xs[0].data, xs[1].data), kind)
    if name == "max.bf16x2":
        halves = [np.ascontiguousarray(x.data).view(jnp.bfloat16).reshape(THREADS, 2) for x in xs]
        return Value(np.fmax(*halves).astype(jnp.bfloat16).view(np.uint32).reshape(THREADS), kind)
    if "@p st.global.v2.b32" in text:
        row, where, *words = xs
        _store_where(row.data < int(text.partition("$0, ")[2].partition(";")[0]), where, words)
        return Value(None)
    numbers = [_f16(x).astype(np.float64) for x in xs]  # exact, then rounded once
    instructions: dict[str, Any] = {
        "sub.f16x2": lambda a, b: a - b, "mul.f16x2": lambda a, b: a * b, "max.f16x2": np.maximum,
        "fma.rn.f16x2": lambda a, b, c: a * b + c,
    }  # fmt: skip
    return Value(_u32(instructions[name](*numbers)), kind)


class Memory:
    """A buffer in shared memory, and a place in it a thread."""

    type = None

    def __init__(self, flat: np.ndarray, at: Any = 0):
        self.flat, self.at = flat, at


def _load(kind: Any, where: Memory, alignment: int) -> Value:
    size = kind.shape[0]
    assert np.all(where.at * where.flat.itemsize % alignment == 0)
    return Value(where.flat[where.at[:, None] + np.arange(size)], kind)


def _store(x: Value, where: Memory, alignment: int) -> None:
    assert np.all(where.at * where.flat.itemsize % alignment == 0)
    where.flat[where.at[:, None] + np.arange(x.data.shape[1])] = x.data


def _store_where(chosen: np.ndarray, where: Any, words: list[Value]) -> None:
    assert np.all(where.at * where.flat.itemsize % (4 * len(words)) == 0)
    data = np.ascontiguousarray(np.stack([x.data for x in words], axis=1)).view(where.flat.dtype)
    where.flat[where.at[chosen, None] + np.arange(data.shape[1])] = data[chosen]


LLVM = SimpleNamespace(
    StructType=SimpleNamespace(get_literal=lambda kinds: None),
    inline_asm=_inline_asm,
    extractvalue=lambda kind, x, at: x.data[at[0]],
    getelementptr=lambda kind, x, at, *_: Memory(x.flat, at[0].data.astype(np.int64)),
    load=_load,
    store=_store,
    GEPNoWrapFlags=SimpleNamespace(none=None),
)


def _bitcast(x: Value, kind: Any) -> Value:
    size = kind.shape[0] if isinstance(kind, ir.VectorType) else 0
    data = np.ascontiguousarray(x.data).reshape(THREADS, -1).view(_dtype(kind))
    return Value(data.reshape((THREADS, size) if size else THREADS), kind)


def _constant(value: Any, kind: Any) -> Value:
    return Value(np.full(THREADS, value & 0xFFFFFFFF if isinstance(value, int) else value, _dtype(kind)), kind)


MGPU = SimpleNamespace(
    c=_constant,
    FragmentedArray=lambda _registers, _layout, _is_signed: SimpleNamespace(registers=_registers, layout=_layout),
    utils=SimpleNamespace(
        memref_ptr=lambda x: x,
        bitcast=_bitcast,
        bitwidth=mgpu.utils.bitwidth,
        thread_idx=lambda: Value(np.arange(THREADS, dtype=np.uint32) + THREADS, _kind("uint32")),
        shfl_bfly=lambda x, distance: Value(x.data[np.arange(THREADS) ^ distance], x.type),
        warpgroup_barrier=lambda: None,
    ),
)  # fmt: skip


def _places(layout: Any, shape: tuple[int, ...]) -> np.ndarray:
    """The flat index of each element of each register: [register, thread, element]."""
    index = np.arange(np.prod(shape)).reshape(shape)
    for tile in layout.tiling.tiles:
        rank, outer = len(tile), index.ndim - len(tile)
        split = [x for size, t in zip(index.shape[outer:], tile) for x in (size // t, t)]
        index = index.reshape(*index.shape[:outer], *split)
        order = [outer + 2 * i for i in range(rank)] + [outer + 2 * i + 1 for i in range(rank)]
        index = index.transpose(*range(outer), *order)
    threads: list[dict[int, int]] = [{} for _ in range(THREADS)]
    for dims, numbers in ((layout.lane_dims, np.arange(THREADS) % 32), (layout.warp_dims, np.arange(THREADS) // 32)):
        rest = numbers
        for dim in reversed(dims):
            size = index.shape[dim] if isinstance(dim, int) else dim.times
            for thread in range(THREADS):
                if isinstance(dim, int):
                    threads[thread][dim % index.ndim] = rest[thread] % size
            rest = rest // size
    vector = layout.vector_dim % index.ndim
    out = []
    for at in np.ndindex(layout.registers_shape(shape)):
        of_threads = [
            tuple(thread.get(d, slice(None) if d == vector else i) for d, i in enumerate(at)) for thread in threads
        ]
        out.append([index[place] for place in of_threads])
    return np.array(out)


def _distribute(x: jax.Array, layout: Any) -> Any:
    array = np.asarray(x)
    if str(array.dtype) in ("int8", "int32"):
        array = array.view(f"u{array.dtype}")
    if array.ndim == 0:
        found = np.array(Value(np.full(THREADS, array), _kind(array.dtype)), object)
        return SimpleNamespace(registers=found, shape=())
    tiled = layout.to_mgpu()
    places = _places(tiled, array.shape)
    registers = np.empty(len(places), object)
    for i, place in enumerate(places):
        registers[i] = Value(array.reshape(-1)[place], _kind(array.dtype, place.shape[1]))
    return SimpleNamespace(registers=registers.reshape(tiled.registers_shape(array.shape)), shape=array.shape)


def _gather(x: Any, kind: Any) -> np.ndarray:
    out = np.full(int(np.prod(kind.shape)), np.nan, kind.dtype)
    for place, register in zip(_places(kind.layout.to_mgpu(), kind.shape), x.registers.flat):
        out[place] = register.data
    return out.reshape(kind.shape)


def _inline_mgpu(*, arg_types: Any = (), return_type: Any = None) -> Any:
    def decorate(f: Any) -> Any:
        def run(*arguments: Any) -> Any:
            values = [
                Memory(x.reshape(-1)) if isinstance(kind, plgpu.RefType) else _distribute(x, kind)
                for x, kind in zip(arguments, arg_types)
            ]
            out = f(None, *values)
            if isinstance(return_type, tuple):
                return tuple(map(_gather, out, return_type))
            return None if return_type is None else _gather(out, return_type)

        return run

    return decorate


def _elements(x: Value) -> list[Value]:
    return [Value(x.data[:, i], x.type.element_type) for i in range(x.data.shape[1])]


@contextlib.contextmanager
def emulated(monkeypatch: Any, *modules: Any):
    """Runs what these modules inline in numpy."""
    layouts = {name: getattr(plgpu, name) for name in ("Layout", "Tiling", "Replicated", "RefType", "ShapeDtypeStruct")}
    pallas = SimpleNamespace(**layouts, inline_mgpu=_inline_mgpu, load=lambda x, **_: x)
    fakes = {"arith": ARITH, "vector": VECTOR, "llvm": LLVM, "mgpu": MGPU, "plgpu": pallas}
    with monkeypatch.context() as patch, ir.Context() as context, ir.Location.unknown():
        context.allow_unregistered_dialects = True  # of types that nothing looks at
        for module in modules:
            for name, fake in fakes.items():
                if hasattr(module, name):
                    patch.setattr(module, name, fake)
        yield
