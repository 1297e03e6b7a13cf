"""Chooses which implementation of an operation runs. All rules of the choice are here.

An operation has a registry of backends by name: BACKENDS in its api.py. Each backend says what it supports and how it
runs. Its `plan` makes what all layers of a step share. A new backend is a file beside the others and a line in that
registry. The `backend` of an operation is one of

- a name: "mosaic" (Pallas kernels for Hopper), "triton" (kernels for Ampere, Ada and Hopper through jax_triton) or
  "xla" (plain jnp, everywhere). A name never falls back: arguments that the backend lacks raise
  NotImplementedError.
- a kind of device: "hopper" (compute capability 9.0) or "ampere" (8.0 to 8.9, Ada too), on any machine. The first of
  its backends runs that supports the arguments and is not expected to be slower with them than the next.
- "training": XLA, whose gradients JAX knows. Attention in 16 bits goes to cuDNN on a GPU.
- None: the kind of the device that computes.
- "deterministic": as None, with additions in one order (one_order.py). An operation has an entry of this name if its
  order would depend on the number of rows. If its kernels have one order anyway, the entry only takes xla's place.

A model hands its `backend` to each of its operations. A Hopper GPU should use XLA's own matmuls of 16 bits for many
rows, and mosaic has no kernel for them. So a model that is told "mosaic" says "hopper" to operations whose operands all
have 16 bits (`where_faster`): the plain matmul, norms, SwiGLU, SiLU. So it does to routes and products of experts.
These run as they would by default. The model is refused if a kernel of another operation lacks the arguments.

The references (reference.py of each operation) are for tests, and no backends.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

BACKEND_NAMES = ("xla", "mosaic", "triton")
DETERMINISTIC = "deterministic"
OF_MODELS = (*BACKEND_NAMES, DETERMINISTIC)  # values of a model's `backend`
DIFFERENTIABLE = "xla"  # its gradients and vmap are JAX's own; analyses of weights run it
TRAINING = "training"
# Backends of each kind of device or work, the first choice first. All other kinds have xla alone.
DEVICES = {
    "hopper": ("peer", "mosaic", "triton", "xla"),
    "ampere": ("peer", "triton", "xla"),
    TRAINING: ("cudnn", "xla"),
}
TARGET = "JLLM_COMPUTE_CAPABILITY"  # an environment variable: see capability
WITHOUT_FLOAT8 = ("8.0", "8.6", "8.7")  # compute capabilities that neither convert from float8 nor multiply it


def check_nothing(*_: Any) -> None:
    """Accepts all arguments, as a backend does that supports everything."""


@dataclass(frozen=True)
class Backend:
    """Describes one implementation of an operation. Both checks take the same arguments, and look only at shapes,
    dtypes and formats. They raise NotImplementedError, whose text says what is supported."""

    run: Callable[..., Any]
    check: Callable[..., None] = check_nothing  # refuses arguments that the backend lacks
    check_unasked: Callable[..., None] | None = None  # also refuses what it should run only if named; None: as check
    plan: Callable[..., Any] | None = None  # makes what all layers of a step share
    unasked_on: tuple[str, ...] = tuple(DEVICES)  # kinds of devices on which it runs without being named
    for_xla: bool = False  # for the entry DETERMINISTIC: it runs only where None would choose xla

    def supports(self, *args: Any, unasked: bool = False) -> str | None:
        """Returns the reason why the backend does not run these arguments; None if it does."""
        try:
            ((self.check_unasked if unasked else None) or self.check)(*args)
        except NotImplementedError as refusal:
            return str(refusal)
        return None


def choose(backends: Mapping[str, Backend], name: str | None, *args: Any) -> Backend:
    """Returns the one of an operation's backends that `name` stands for. `args` are the arguments of their checks.
    Raises NotImplementedError if no such backend supports them, and ValueError for an unknown name."""
    known = (*OF_MODELS, *DEVICES, *(each for each in backends if each not in OF_MODELS))
    if name is not None and name not in known:
        raise ValueError(f"unknown backend {name!r}; backends: {', '.join(known)}")
    one_order = backends.get(DETERMINISTIC) if name == DETERMINISTIC else None
    if name == DETERMINISTIC and (one_order is None or one_order.for_xla):
        chosen = choose(backends, None, *args)
        return one_order if one_order is not None and chosen is backends["xla"] else chosen
    if name == DETERMINISTIC:
        if (reason := backends[name].supports(*args)) is not None:
            raise NotImplementedError(reason)
        if on_hopper():
            _ask_ptxas_once()
        return backends[name]
    kind = _kind() if name is None else name
    unasked = name is None or name in DEVICES
    reasons = []
    for each in DEVICES.get(kind, ("xla",)) if unasked else (kind,):
        if each in backends and not (unasked and kind in DEVICES and kind not in backends[each].unasked_on):
            reason = backends[each].supports(*args, unasked=unasked)
            if reason is None:
                if each == "mosaic":
                    _ask_ptxas_once()
                return backends[each]
            reasons.append(reason)
    raise NotImplementedError("; ".join(reasons) or f"no {name} kernel yet; backends: {', '.join(backends)}")


def check_work(work: Any, chosen: Backend, backends: Mapping[str, Backend]) -> None:
    """Raises ValueError for a work list (of a Backend.plan) that is handed to a backend without a plan."""
    if work is not None and chosen.plan is None:
        made = " or ".join(name for name, each in backends.items() if each.plan is not None)
        raise ValueError(f"work was made for backend {made}, and the one that runs these arguments takes none")


def _kind() -> str:
    """Returns the kind of the device that computes, or an empty string if DEVICES lacks it."""
    return "hopper" if on_hopper() else "ampere" if capability().startswith("8.") else ""


def where_faster(backend: str | None) -> str | None:
    """Returns a model's `backend` for an operation that XLA does well too. "mosaic" and "triton" become kinds of
    devices, so their kernel runs only where it is expected to be faster."""
    return {"mosaic": "hopper", "triton": "ampere"}.get(backend or "", backend)


def or_xla(backend: str | None) -> str | None:
    """Returns a model's `backend` for an operation that has no Triton kernel."""
    return "ampere" if backend == "triton" else backend


def on_hopper() -> bool:
    """Returns whether computations run by default on a GPU of compute capability 9.0."""
    return capability() == "9.0"


def capability() -> str:
    """Returns the compute capability of the GPU that computes, or an empty string without a GPU. A process that traces
    for another GPU has that one's in the variable TARGET."""
    if (told := os.environ.get(TARGET)) is not None:
        return told
    if jax.default_backend() != "gpu":
        return ""
    return str(getattr(jax.local_devices()[0], "compute_capability", ""))


def tell_where_kernels_link() -> None:
    """Imports the module of JAX that puts the path of the library that launches kernels into the environment. The host
    code of Mosaic kernels needs that path. A process that lowers kernels imports the module anyway. Call this in a
    process that compiles or loads kernels that it has not lowered."""
    with contextlib.suppress(ImportError):  # JAX for another maker's GPU
        import jax.experimental.mosaic.gpu  # noqa: F401


def _ask_ptxas_once() -> None:
    """Makes JAX cache the output of `ptxas --version`, once the first Mosaic kernel is chosen. JAX 0.11.2 starts ptxas
    for each conversion to or from 8 bits or fewer (masks too) in every kernel that it lowers. In decode attention this
    is most of lowering. The output does not change. A JAX that does not start ptxas stays as it is."""
    try:
        from jax._src.lib import mosaic_gpu
    except ImportError:  # no GPU plugin: JAX asks nothing
        return
    binding: Any = getattr(mosaic_gpu, "_mosaic_gpu_ext", None)
    ask = getattr(binding, "_get_ptxas_isa_version", None)
    if ask is not None and not hasattr(ask, "cache_info"):
        binding._get_ptxas_isa_version = functools.cache(ask)
