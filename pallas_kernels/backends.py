"""Which implementation of an operation runs."""

import functools
from collections.abc import Callable

import jax

BACKENDS = ("xla", "reference", "mosaic")


def choose_backend(backend: str | None, check_mosaic: Callable[[], None] | None = None) -> str:
    """The backend to run: `backend` itself when named (there is no fallback), the best one available for None.

    `check_mosaic` raises NotImplementedError for arguments that the operation's Mosaic GPU kernel does not support;
    None stands for an operation without one. Raises that error where "mosaic" is named, and ValueError for an unknown
    name. Unnamed, mosaic runs on a Hopper GPU where it supports the arguments.
    """
    if backend is None:
        return "mosaic" if on_hopper() and _supports(check_mosaic) else "xla"
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r}; backends: {', '.join(BACKENDS)}")
    if backend == "mosaic":
        if check_mosaic is None:
            raise NotImplementedError("no mosaic kernel yet; backends: xla, reference")
        check_mosaic()
    return backend


def on_hopper() -> bool:
    """Whether computations run on a GPU of compute capability 9.0 unless told otherwise."""
    if jax.default_backend() != "gpu":
        return False
    return getattr(jax.local_devices()[0], "compute_capability", None) == "9.0"


def _supports(check: Callable[[], None] | None) -> bool:
    if check is None:
        return False
    try:
        check()
    except NotImplementedError:
        return False
    return True


def _ask_ptxas_once() -> None:
    """JAX 0.11.2 starts `ptxas --version` for each conversion to or from 8 bits or fewer (masks too) in every kernel
    that it lowers: 493 times, or 3 of 4 seconds, for decode attention. The answer does not change: it is remembered."""
    try:
        from jax._src.lib import mosaic_gpu
    except ImportError:  # no GPU plugin: JAX asks nothing
        return
    binding = mosaic_gpu._mosaic_gpu_ext
    binding._get_ptxas_isa_version = functools.cache(binding._get_ptxas_isa_version)


_ask_ptxas_once()
