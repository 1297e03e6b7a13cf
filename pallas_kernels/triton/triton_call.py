"""Launches Triton kernels, each from one description. A device runs a launch through jax_triton, and tests run it in
Triton's interpreter. Triton's own compiler turns it into PTX for GPUs that are not there. jax_triton and Triton come
with the extras cuda12 and cuda13. Neither is imported before a kernel runs."""

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
from jaxlib.mlir import ir

from pallas_kernels.backends import capability


@dataclass(frozen=True)
class Launch:
    """Describes one launch of a kernel. Its arguments are the inputs, then the outputs in the order of `out`, then
    constants."""

    kernel: Any  # a function under triton.jit
    out: tuple[jax.ShapeDtypeStruct, ...]
    grid: tuple[int, ...]  # at most three
    constants: Mapping[str, Any]  # the kernel's tl.constexpr parameters
    num_warps: int = 4
    num_stages: int = 2
    aliases: Mapping[int, int] = field(default_factory=dict)  # an input's position -> its output's position


def call(launch: Launch, *arrays: jax.Array) -> list[jax.Array]:
    """Returns the outputs of a launch on the device that computes. Raises NotImplementedError for a device that
    backend triton does not support."""
    of = capability()  # jax_triton would ask a device, and a process that traces for another one sees none
    if not of or int(of.partition(".")[0]) < 8:
        raise NotImplementedError(
            f"backend triton is for GPUs of compute capability 8.0 and later, not for {of or jax.default_backend()}"
        )
    import jax_triton

    from pallas_kernels.triton import triton_lowering  # noqa: F401  (lowers it so that CUDA graphs take it in)

    return jax_triton.triton_call(
        *arrays,
        kernel=launch.kernel,
        out_shape=list(launch.out),
        grid=launch.grid,
        name=launch.kernel.fn.__name__,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        input_output_aliases=dict(launch.aliases),
        compute_capability=int(of.replace(".", "")),
        **launch.constants,
    )


def typed_call(operation: ir.Operation) -> None:
    """Changes jaxlib's untyped launch of a Triton kernel to its typed one, which takes the same description."""
    with operation.context:
        described = ir.StringAttr(operation.attributes["backend_config"])
        operation.attributes["call_target_name"] = ir.StringAttr.get("triton_kernel_call_ffi")
        operation.attributes["api_version"] = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 4)
        operation.attributes["backend_config"] = ir.DictAttr.get({"opaque": described})


def with_gradients(run: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `run` with the gradients of `plain`, which computes the same in jnp from the same arrays."""
    found = jax.custom_vjp(run)
    found.defvjp(lambda *arrays: (run(*arrays), arrays), lambda saved, cotangent: jax.vjp(plain, *saved)[1](cotangent))
    return found


def check_rows(letter: str, dtype: str, rows: int, width: int, largest: int) -> None:
    """Raises NotImplementedError for what kernels over whole rows [T, `letter`] lack, naming what they do."""
    check_installed()
    if dtype not in ("bfloat16", "float16"):
        raise NotImplementedError(f"dtype {dtype} is not supported by backend triton, which does bfloat16, float16")
    if width > largest:
        raise NotImplementedError(f"{letter}={width} is not supported by backend triton, which does up to {largest}")
    if rows < 1:
        raise NotImplementedError("T=0 is not supported by backend triton, which does at least one row")


def check_installed() -> None:
    """Raises NotImplementedError where there is no jax_triton."""
    if importlib.util.find_spec("jax_triton") is None:
        raise NotImplementedError("backend triton needs jax-triton, which the extras cuda12 and cuda13 install")
