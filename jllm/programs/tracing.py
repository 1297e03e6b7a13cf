"""Traces and lowers steps in other processes, for the device of this one.

Tracing holds Python's lock, so threads of one process cannot trace in parallel. Requests would wait while a step is
traced in the background. A tracing process sees no accelerator and gets only shapes. It exports a step (jax.export) for
a given platform, with kernels for a given compute capability, and returns StableHLO. Taking that in holds the lock only
briefly. Mosaic's kernels in it equal kernels lowered here, except for one number in their names.

Jobs and answers are pickles in a child's pipes. (jax.export's own files would need one more package, and every class of
the arguments registered.)
"""

import contextlib
import io
import os
import pickle
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE
from types import FunctionType
from typing import Any

import jax
from jax import export

from jllm.programs.executables import jax_cache_is_on
from jllm.programs.key import NO_MATTER, PACKAGES, check_unedited
from jllm.programs.packed_step import compiler_options, packed_step
from pallas_kernels import LOADED
from pallas_kernels.backends import TARGET, capability, tell_where_kernels_link

# Prefixes of JAX's settings about the devices of one process.
OF_DEVICES = ("jax_platform", "jax_default_device", "jax_num_cpu_devices", "jax_pjrt", "jax_mock", "mock")
MOST_USUAL = 8  # processes: more were slower on a host of 16 cores
# JAX may change the meaning of these custom calls between versions. Both processes run the same version.
CALLS = ("mosaic_gpu_v2", "triton_kernel_call", "triton_kernel_call_ffi")
# Packages whose code is the same in another process. A caller's code may depend on changes that this process made.
SAME = (*PACKAGES, "jax", "jaxlib", "numpy", "ml_dtypes", *sys.stdlib_module_names - {"__main__"})


def usual_processes(engines: int = 1) -> int:
    """Returns how many processes trace for an engine on a GPU that is not told: half of its cores, at most 8. Several
    engines share the cores. There is none beside JAX's own cache, which looks up the text that they lower: theirs has
    other numbers in kernels' names each time."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 0 if jax_cache_is_on() else min(MOST_USUAL, cores // (2 * engines))


class TracingFailed(Exception):
    """Raised when a step cannot be traced in another process. The message has the reason."""


class Tracers:
    """Manages at most `most` tracing processes. Each starts when it is first needed. Any number of threads may use
    it."""

    def __init__(self, most: int):
        self._idle: queue.LifoQueue[subprocess.Popen | None] = queue.LifoQueue()
        self._lock, self._all, self._closed = threading.Lock(), set[subprocess.Popen](), False
        for _ in range(most):
            self._idle.put(None)
        if capability():
            tell_where_kernels_link()

    def lower(self, arguments: tuple[Any, ...], static: dict[str, Any]) -> jax.stages.Lowered:
        """Returns jitted(..).lower(*arguments, **static). Raises the same errors as export."""
        options = compiler_options(static["layout"], static.get("backend"))
        step = jax.jit(named(self.export(arguments, static)), donate_argnums=1, compiler_options=options)
        return step.lower(*arguments)

    def export(self, arguments: tuple[Any, ...], static: dict[str, Any]) -> export.Exported:
        """Returns packed_step exported for these arguments (arrays or shapes), with the JAX settings of this thread.
        Raises TracingFailed where a process cannot trace it, and CancelledError once this is closed."""
        try:
            job = _pickled((jax.tree.map(_shape, arguments), static, _platform(arguments), settings(), LOADED))
        except Exception as error:  # an object of the caller may raise anything
            raise TracingFailed(f"{error}") from None
        tracer = self._idle.get()
        try:
            tracer = tracer or self._begin()
            assert tracer.stdin is not None
            assert tracer.stdout is not None
            tracer.stdin.write(job)
            tracer.stdin.flush()
            exported, why = pickle.load(tracer.stdout)
        except Exception as error:  # pickle alone names eight kinds; after one of them the pipe is out of step
            self._check_open()
            if tracer is not None:
                self._end(tracer)
                tracer = None
            raise TracingFailed(f"the process that traced it ended ({type(error).__name__})") from None
        finally:
            self._idle.put(tracer)
        if exported is None:
            raise TracingFailed(why)
        return exported

    def close(self) -> None:
        """Ends all processes, and the calls that wait for them."""
        with self._lock:
            self._closed, all_of_them = True, list(self._all)
        for tracer in all_of_them:
            self._end(tracer)

    def _begin(self) -> subprocess.Popen:
        self._check_open()
        path = os.pathsep.join(place or os.getcwd() for place in sys.path)
        own = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path, TARGET: capability()}
        command = [sys.executable, "-P", "-c", f"from {__name__} import main; main()"]
        # It has its own session: Ctrl+C goes to this process, which then ends it.
        tracer = subprocess.Popen(command, stdin=PIPE, stdout=PIPE, env=os.environ | own, start_new_session=True)
        with self._lock:
            self._all.add(tracer)
            closed = self._closed
        if closed:
            self._end(tracer)
            raise CancelledError
        return tracer

    def _end(self, tracer: subprocess.Popen) -> None:
        tracer.kill()
        tracer.wait()
        with self._lock:
            self._all.discard(tracer)
        for pipe in (tracer.stdin, tracer.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # the process never read some data
                pipe.close()

    def _check_open(self) -> None:
        if self._closed:
            raise CancelledError


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: object) -> Any:
        if isinstance(value, type | FunctionType) and value.__module__.partition(".")[0] not in SAME:
            raise pickle.PicklingError(f"{value.__module__}.{value.__qualname__} is code that only this process has")
        return NotImplemented


def _pickled(job: object) -> bytes:
    """Returns a pickle of bytes that holds the pickled job: the bytes can always be read whole. Raises PicklingError
    for the caller's own code."""
    inner = io.BytesIO()
    _Pickler(inner).dump(job)
    return pickle.dumps(inner.getvalue())


def _shape(leaf: object) -> object:
    """Returns an argument's shape and dtype, without its device: the compiling process places it."""
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=leaf.weak_type)
    return leaf


def _platform(arguments: object) -> str:
    """Returns the platform of the arrays among the arguments. With shapes alone, returns JAX's default platform, or the
    GPU that kernels are chosen for."""
    arrays = [leaf for leaf in jax.tree.leaves(arguments) if isinstance(leaf, jax.Array)]
    found = next(iter(arrays[0].devices())).platform if arrays else "gpu" if capability() else jax.default_backend()
    return {"gpu": "cuda"}.get(found, found)


def settings() -> dict[str, Any]:
    """Returns JAX's settings in this thread, except settings of devices."""
    values = jax.config.values
    names = (name for name in values if not name.startswith(NO_MATTER + OF_DEVICES))
    return {name: getattr(jax.config, name, values[name]) for name in names}


def take_settings(values: dict[str, Any]) -> None:
    """Gives this process the settings of another."""
    for name, value in values.items():
        if getattr(jax.config, name, value) != value:
            jax.config.update(name, value)


def named(exported: export.Exported) -> Callable[..., Any]:
    """Returns a function that calls `exported` and has the name that profiles show."""

    def packed_step(*arguments: object) -> object:
        return exported.call(*arguments)

    return packed_step


# In the tracing process


def main() -> None:
    """Answers jobs from standard input until it ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # prints while tracing must not mix with answers
    with contextlib.suppress(EOFError, OSError):  # the engine is gone
        while True:
            answer = _answer(pickle.load(sys.stdin.buffer))
            answers.write(answer)
            answers.flush()


def _answer(job: bytes) -> bytes:
    """Returns a pickle of (the exported step or None, the reason for None)."""
    try:
        arguments, static, platform, values, loaded = pickle.loads(job)
        take_settings(values)
        jax.config.update("jax_export_ignore_forward_compatibility", True)
        checks = [export.DisabledSafetyCheck.custom_call(name) for name in CALLS]
        exported = export.export(packed_step, platforms=[platform], disabled_checks=checks)(*arguments, **static)
        check_unedited(_sources(), loaded)
        return pickle.dumps((replace(exported, _get_vjp=None), ""))
    except Exception as error:  # the engine's process traces the step next, and raises the same error
        return pickle.dumps((None, f"{type(error).__name__}: {error}"))


def _sources() -> list[Path]:
    """Returns the files of the two packages that this process has loaded."""
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] in PACKAGES]
    return [Path(module.__file__) for module in modules if module.__file__]
