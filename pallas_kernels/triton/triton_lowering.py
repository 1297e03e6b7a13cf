"""Lowers jax_triton's calls to calls that XLA takes into its CUDA graphs: imported before the first kernel runs.

jax_triton 0.3.1 lowers a launch to jaxlib's untyped custom call, which XLA leaves outside of its command buffers. So
every launch costs the host some microseconds. jaxlib has the same launcher as a typed one, which says of itself that it
can be recorded. This module has jax_triton's primitive lowered to that.
"""

from typing import Any

from jax.interpreters import mlir
from jax_triton import triton_lib

from pallas_kernels.triton.triton_call import typed_call


def _lower(ctx: mlir.LoweringRuleContext, *arrays: Any, **parameters: Any) -> Any:
    results = triton_lib.triton_kernel_call_lowering(triton_lib.get_cuda_backend, ctx, *arrays, **parameters)
    typed_call(results[0].owner)
    return results


mlir.register_lowering(triton_lib.triton_kernel_call_p, _lower, platform="cuda")
