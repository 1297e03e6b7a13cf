"""Runs all_reduce over the peer memory of GPUs of one host that one process has (peer.cu), through jax.ffi.

The user's nvcc compiles the source the first time that GPUs exchange with it. The library is kept in the user's cache.
XLA takes the call into its command buffers, wherever the arrays lie then. So the ranks write to each other in buffers
that are made once in a process.
"""

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import jax
import numpy as np

from pallas_kernels.all_reduce.axis import MeshAxis
from pallas_kernels.backends import capability

SOURCE = Path(__file__).with_name("peer.cu")
TARGET = "pallas_kernels_peer_all_reduce"
DTYPES = ("float32", "float16", "bfloat16")
MOST_RANKS = 8
PACK = 16  # bytes; a row has a whole number of packs
ONE_SHOT = 1 << 20  # bytes; larger arrays take two shots
FASTER = 8 << 20  # bytes; for larger arrays, this exchange runs only if named
WAIT_S = 60.0  # how long a device waits for the others before it stops the program


def check(x: jax.Array, axis: MeshAxis) -> None:
    """Raises NotImplementedError for devices and arrays that the exchange over peer memory does not take."""
    if axis.gpus is None:
        raise NotImplementedError("the exchange over peer memory is for GPUs of one host that one process has")
    if not 2 <= len(axis.gpus) <= MOST_RANKS:
        raise NotImplementedError(f"{len(axis.gpus)} devices: the exchange over peer memory is for 2 to {MOST_RANKS}")
    if str(x.dtype) not in DTYPES:
        raise NotImplementedError(f"{x.dtype}: the exchange over peer memory takes {', '.join(DTYPES)}")
    if x.shape[-1] * x.dtype.itemsize % PACK or not x.size:
        raise NotImplementedError(f"{x.dtype}{list(x.shape)}: rows must have a multiple of {PACK} bytes")
    if (why := refusal(axis.gpus)) is not None:
        raise NotImplementedError(why)


def check_unasked(x: jax.Array, axis: MeshAxis) -> None:
    """Raises NotImplementedError as `check` does, and for arrays that XLA exchanges faster."""
    check(x, axis)
    if x.size * x.dtype.itemsize > FASTER:
        raise NotImplementedError(f"{x.size * x.dtype.itemsize} bytes: XLA's exchange of that much is faster")


def all_reduce(
    x: jax.Array,
    axis: MeshAxis,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    once: bool | None = None,
    wait_s: float = WAIT_S,
) -> jax.Array:
    """Returns the sum of x [T, E], bias [E] and residual [T, E]; see api.py. `once`: in one shot (None: by size)."""
    register()
    assert axis.gpus is not None
    if once is None:
        once = x.size * x.dtype.itemsize <= ONE_SHOT
    call = jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct(x.shape, x.dtype))
    return call(
        x,
        *(y.astype(x.dtype) for y in (bias, residual) if y is not None),
        devices=np.asarray(axis.gpus, np.int64),
        has_bias=np.int32(bias is not None),
        has_residual=np.int32(residual is not None),
        once=np.int32(once),
        limit=np.int64(wait_s * 1e9),
    )


@functools.cache
def refusal(gpus: tuple[int, ...]) -> str | None:
    """Returns why these GPUs cannot exchange over peer memory, or None if they can."""
    try:
        library = register()
    except RuntimeError as error:
        return str(error)
    pairs = ((a, b) for a in gpus for b in gpus if a != b)
    apart = [f"{a} and {b}" for a, b in pairs if not library.peer_can_access(a, b)]
    return f"GPUs {apart[0]} cannot reach each other's memory" if apart else None


@functools.cache
def register() -> ctypes.CDLL:
    """Registers the call with XLA, and returns its library. Raises RuntimeError without nvcc, if nvcc refuses the
    source, and for a damaged library."""
    path = compiled(capability().replace(".", ""))
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise RuntimeError(f"{path} cannot be loaded ({error}): remove it, and it is compiled again") from None
    stages = {"initialize": library.peer_all_reduce_initialize, "execute": library.peer_all_reduce}
    jax.ffi.register_ffi_target(TARGET, {k: jax.ffi.pycapsule(v) for k, v in stages.items()}, platform="CUDA")
    return library


def compiled(arch: str) -> Path:
    """Returns the library for a compute capability ("90"). Compiles it if it is missing. Raises RuntimeError."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path=f"{home}/bin")
    if nvcc is None:
        raise RuntimeError("no nvcc, which compiles the exchange over peer memory: put CUDA's compiler on PATH")
    key = hashlib.sha256(b"\0".join([SOURCE.read_bytes(), arch.encode(), nvcc.encode(), jax.__version__.encode()]))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pallas_kernels"
    path = cache / f"peer-{key.hexdigest()[:16]}.so"
    if path.exists():
        return path
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            made = Path(folder) / path.name
            options = ["-shared", "-Xcompiler", "-fPIC", "-O3", "-std=c++17"]
            target = [f"-gencode=arch=compute_{arch},code=sm_{arch}", f"-I{jax.ffi.include_dir()}"]
            command = [nvcc, *options, *target, str(SOURCE), "-o", str(made)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                lines = done.stderr.splitlines()
                said = [line for line in lines if "error" in line or "fatal" in line]
                why = said[0] if said else f"it ended with {done.returncode}"
                raise RuntimeError(f"nvcc cannot compile {SOURCE.name}: {why}")
            os.replace(made, path)  # a whole file, even if other processes compile it too
    except OSError as error:
        raise RuntimeError(f"{cache}: cannot be written: {error.strerror}") from None
    return path
