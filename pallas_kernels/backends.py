"""Which implementation of an operation runs: all rules about that are here.

- "xla", "reference" or "mosaic" is that implementation. A name never falls back: where the implementation lacks the
  arguments, it raises NotImplementedError.
- "hopper" is what a GPU of compute capability 9.0 runs unasked, on whatever machine it is said: mosaic where the
  operation has such a kernel, the kernel supports the arguments, and it was not measured to be slower than XLA; else
  xla.
- None is the choice of the device that computes: "hopper" on such a GPU, "xla" anywhere else.

A model hands its `backend` to each of its operations. A Hopper GPU is meant to use XLA's own products of 16 bits for
many rows, and mosaic has no kernel for those: so for operations whose operands all have 16 bits (the plain product,
SwiGLU, SiLU) a model that is told "mosaic" says "hopper" (`where_faster`). Thus it runs the kernels that it would run
unasked, and is refused where one of the others lacks the arguments.
"""

import functools
from collections.abc import Callable

import jax

BACKENDS = ("xla", "reference", "mosaic", "hopper")


def choose_backend(
    backend: str | None,
    check_supported: Callable[[], None] | None = None,
    check_faster: Callable[[], None] | None = None,
) -> str:
    """The implementation to run: "xla", "reference" or "mosaic".

    `check_supported` raises NotImplementedError for arguments that the operation's Mosaic GPU kernel does not support;
    None stands for an operation without one. `check_faster` does so for those and for what the kernel should not run
    unasked; None: the same. Raises NotImplementedError where "mosaic" is named and does not support the arguments, and
    ValueError for an unknown name.
    """
    if backend is None:
        backend = "hopper" if on_hopper() else "xla"
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r}; backends: {', '.join(BACKENDS)}")
    if backend == "hopper":
        return "mosaic" if _passes(check_faster or check_supported) else "xla"
    if backend == "mosaic":
        if check_supported is None:
            raise NotImplementedError("no mosaic kernel yet; backends: xla, reference")
        check_supported()
    return backend


def where_faster(backend: str | None) -> str | None:
    """A model's `backend`, for an operation that XLA does well too: the kernel that "mosaic" names runs there where it
    was measured to be the faster one."""
    return "hopper" if backend == "mosaic" else backend


def on_hopper() -> bool:
    """Whether computations run on a GPU of compute capability 9.0 unless told otherwise."""
    if jax.default_backend() != "gpu":
        return False
    return getattr(jax.local_devices()[0], "compute_capability", None) == "9.0"


def _passes(check: Callable[[], None] | None) -> bool:
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
