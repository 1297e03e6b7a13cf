"""Runs Triton kernels without a GPU, by Triton's interpreter, and compiles them for GPUs that are not there."""

import contextlib
import inspect
import io
import re
import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.triton.triton_call import Launch
from tests.kernels.inlined import ptx

ALONE = threading.Lock()  # XLA may call back several times at once
SHARED_MEMORY = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024}  # bytes a block may take, by capability
TYPES = {
    "bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int8": "i8", "uint8": "u8", "int32": "i32",
    "uint32": "u32", "float8_e4m3fn": "fp8e4nv", "float8_e5m2": "fp8e5",
}  # fmt: skip


class Every(int):
    """Names a capability that all cases are compiled for."""


EVERY = [
    pytest.param(Every(capability), marks=pytest.mark.exhaustive, id=f"{capability} all") for capability in (86, 90)
]
CAPABILITIES = [*SHARED_MEMORY, *EVERY]


def cases_of[T](capability: int, cases: Iterable[T]) -> list[T]:
    """Returns the cases to compile for a GPU. 8.6 and 9.0 get them in turn: blocks have the least memory on 8.6, and
    9.0 has configurations of its own. 8.0 gets the first one. 8.9 gets half of those of float8 too, which 8.6 cannot
    convert."""
    found = list(cases)
    if isinstance(capability, Every):
        return found
    if capability in (86, 90):
        return found[capability == 90 :: 2]
    return found[:1] + [case for case in found[:0:-1] if capability == 89 and re.search("fp8|float8", str(case))][::2]


class Compiled(NamedTuple):
    """Holds what a GPU's compiler says of a kernel."""

    ptx: str
    shared: int  # bytes
    registers: int  # of a thread
    spilled: int  # bytes stored


def interpret(launch: Launch, *arrays: jax.Array) -> list[jax.Array]:
    """Runs what triton_call.call does, in Triton's interpreter. Outputs are NaN, or -1, until they are written, and
    nothing but outputs may change."""

    def run(*inputs: np.ndarray) -> list[np.ndarray]:
        from triton.runtime.interpreter import GridExecutor

        class OnHost(GridExecutor):
            """Holds its arguments where the interpreter reads and writes them."""

            def _init_args_hst(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
                return args, kwargs

            def _restore_args_dev(self, *_: Any) -> None:
                pass

        assert all(launch.grid), "a GPU refuses a launch of no programs"
        held = [np.array(array) for array in inputs]
        outputs = [np.full(out.size * out.dtype.itemsize, 0xFF, np.uint8).view(out.dtype) for out in launch.out]
        outputs = [flat.reshape(out.shape) for flat, out in zip(outputs, launch.out)]
        for position, output in launch.aliases.items():
            outputs[output] = held[position]
        names = launch.kernel.arg_names
        assert names == [*names[: len(held) + len(outputs)], *launch.constants], "arguments in the launch's order"
        with ALONE, _interpreter():
            executor = OnHost(_rewritten(launch.kernel.fn), names, launch.grid)
            executor(*(_pointer(array) for array in (*held, *outputs)), **launch.constants)
        for position, (before, after) in enumerate(zip(inputs, held)):
            assert position in launch.aliases or np.asarray(before).tobytes() == after.tobytes(), "an input changed"
        return outputs

    return list(jax.pure_callback(run, list(launch.out), *arrays))


@contextlib.contextmanager
def _interpreter() -> Iterator[None]:
    """Has functions of Triton interpreted, which is else chosen before Triton is imported. Its language is changed
    once, and not again in each call of a function."""
    import triton.language as tl
    from triton import knobs
    from triton.runtime import interpreter
    from triton.runtime.jit import JITFunction

    scope = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    try:
        with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):  # as GPUs do
            patch.setattr(knobs.runtime, "interpret", True)
            patch.setattr(JITFunction, "__call__", lambda self, *args, **kwargs: _rewritten(self.fn)(*args, **kwargs))
            patch.setattr(interpreter, "_convert_float", _nearest(interpreter._convert_float))
            patch.setattr(interpreter.InterpreterBuilder, "create_dot", _dot)
            patch.setattr(interpreter.InterpreterBuilder, "create_fsub", _minus)
            patch.setattr(interpreter.InterpreterBuilder, "create_fma", _fused)
            patch.setattr(interpreter.InterpreterBuilder, "create_inline_asm", _inlined)
            # Bounds of loops are arrays of one number, of which NumPy 2.4 makes no int.
            patch.setattr(tl.tensor, "__index__", lambda self: self.handle.data.item())
            patch.setattr(interpreter, "_patch_lang", lambda _: interpreter._LangPatchScope())
            yield
    finally:
        scope.restore()


@contextlib.contextmanager
def launched_with(module: Any, **constants: Any) -> Iterator[None]:
    """Launches a module's kernel with some other constants: a seeded fault."""
    launch = module.launch

    def changed(*arguments: Any) -> Launch:
        made = launch(*arguments)
        return replace(made, constants={**made.constants, **constants})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "launch", changed)
        jax.clear_caches()
        yield
    jax.clear_caches()


@cache
def _rewritten(function: Any) -> Any:
    """Returns what the interpreter makes of a plain function. That of Triton has a hash of all that it calls."""
    from triton.runtime.interpreter import InterpretedFunction

    return InterpretedFunction(function).rewrite()


def _nearest(convert: Any) -> Any:
    """Converts floats in the interpreter, which cuts float32 off for bfloat16 where GPUs round to nearest even."""

    def run(x: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
        if (str(source), str(target)) == ("fp32", "bf16"):
            return x.astype(jnp.bfloat16).view(np.uint16)
        return convert(x, source, target, rounding)

    return run


def _dot(_: Any, a: Any, b: Any, total: Any, *__: Any) -> Any:
    """Multiplies tiles: the interpreter would multiply the bits of bfloat16 and float8."""
    from triton.runtime.interpreter import TensorHandle

    def numbers(x: Any) -> np.ndarray:
        stored = {"bf16": jnp.bfloat16, "fp8e4nv": jnp.float8_e4m3fn}.get(str(x.dtype.scalar))
        return x.data if stored is None else x.data.view(stored)

    kind = total.data.dtype
    return TensorHandle(numbers(a).astype(kind) @ numbers(b).astype(kind) + total.data, total.dtype.scalar)


def _minus(_: Any, a: Any, b: Any) -> Any:
    """Subtracts: the interpreter would subtract the bits of bfloat16."""
    from triton.runtime.interpreter import TensorHandle

    if str(a.dtype.scalar) != "bf16":
        return TensorHandle(a.data - b.data, a.dtype.scalar)
    return TensorHandle((a.data.view(jnp.bfloat16) - b.data.view(jnp.bfloat16)).view(np.uint16), a.dtype.scalar)


def _fused(_: Any, a: Any, b: Any, c: Any) -> Any:
    """Multiplies and adds, rounded once: the interpreter would round both."""
    from triton.runtime.interpreter import TensorHandle

    total = a.data.astype(np.float64) * b.data + c.data
    return TensorHandle(total.astype(c.data.dtype), c.dtype.scalar)


def _inlined(_: Any, text: str, constraints: str, values: list[Any], types: list[Any], __: bool, pack: int) -> Any:
    """Runs PTX that makes float16 numbers of a tensor of 16 bits, of which two share a register."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    assert pack == 2
    assert constraints.count("=") == len(types)
    (x,) = values
    made = [TensorHandle(y.reshape(x.data.shape), tl.float16) for y in run_ptx(text, x.data.reshape(-1), len(types))]
    return SimpleNamespace(get_result=made.__getitem__)


def run_ptx(text: str, x: np.ndarray, outputs: int) -> list[np.ndarray]:
    """Returns the float16 numbers in the registers $0, $1, .. of `outputs`, two in each, that PTX makes of 16 bits
    x."""
    words = np.ascontiguousarray(x).view(np.uint32)
    names = {f"${outputs}": words}
    for statement in ptx.parse(text):
        statement(SimpleNamespace(full=partial(np.full, len(words))), names)
    return [names[f"${i}"].view(np.float16) for i in range(outputs)]


def _pointer(array: np.ndarray) -> Any:
    return SimpleNamespace(data_ptr=lambda: array.ctypes.data, dtype=TYPES[str(array.dtype)])


def compile_for(launch: Launch, inputs: list[Any], capability: int) -> Compiled:
    """Compiles the launch with Triton and ptxas for a compute capability (80: 8.0). `inputs`: their dtypes."""
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = list(inspect.signature(launch.kernel.fn).parameters)
    dtypes = [str(np.dtype(dtype)) for dtype in (*inputs, *(out.dtype for out in launch.out))]
    assert names == [*names[: len(dtypes)], *launch.constants], "arguments in the launch's order"
    signature = {name: f"*{TYPES[dtype]}" for name, dtype in zip(names, dtypes)}
    signature |= dict.fromkeys(launch.constants, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(dtypes))}
    source = ASTSource(launch.kernel, signature, {(names.index(k),): v for k, v in launch.constants.items()}, aligned)
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setattr(knobs.nvidia, "dump_ptxas_log", True)
        patch.setattr(knobs.compilation, "always_compile", True)
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    said = out.getvalue()
    registers, spilled = (re.search(pattern, said) for pattern in (r"Used (\d+) reg", r"(\d+) bytes spill stores"))
    assert registers is not None, said
    assert spilled is not None, said
    return Compiled(made.asm["ptx"], made.metadata.shared, int(registers[1]), int(spilled[1]))
