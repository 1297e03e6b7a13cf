"""Checks arguments of scaled matmuls and chooses their backend."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.backends import DETERMINISTIC, Backend, choose, on_hopper
from pallas_kernels.checks import bind_shapes, check_floats, check_out_dtype
from pallas_kernels.formats.weight_formats import BLOCK
from pallas_kernels.one_order import check_device, in_tiles
from pallas_kernels.scaled_matmul import xla
from pallas_kernels.scaled_matmul.config import (
    check_blocks,
    check_supported,
    check_triton,
    check_triton_fp8,
    choose_blocks,
    choose_config,
    is_skinny,
)


def scaled_matmul(
    x: jax.Array,
    w: jax.Array,
    x_scale: jax.Array,
    w_scale: jax.Array,
    *,
    bias: jax.Array | None,
    residual: jax.Array | None,
    out_dtype: DTypeLike,
    backend: str | None,
    operand: DTypeLike,
) -> jax.Array:
    """Multiplies operands of dtype `operand`."""
    grouped, in_blocks = x_scale.ndim == 2, operand == jnp.float8_e4m3fn and w_scale.ndim == 2
    of_rows, of_columns = (x_scale, "M G" if grouped else "M"), (w_scale, "G N" if in_blocks else "N")
    sizes = bind_shapes(x=(x, "M K"), w=(w, "N K"), x_scale=of_rows, w_scale=of_columns)
    for name, array in (("x", x), ("w", w)):
        if array.dtype != operand:
            raise ValueError(f"{name} has dtype {array.dtype}, expected {jnp.dtype(operand)}")
    if str(x_scale.dtype) not in ("float32", "float64") or w_scale.dtype != x_scale.dtype:
        raise ValueError(f"scales are {x_scale.dtype} and {w_scale.dtype}, expected float32 or float64 for both")
    if in_blocks and (not grouped or sizes["G"] != -(-sizes["K"] // BLOCK)):
        raise ValueError(
            f"scales have shapes {x_scale.shape} and {w_scale.shape}, expected [M, G] and [G, N], "
            f"where G is K / {BLOCK}, rounded up"
        )
    if grouped and not in_blocks and (operand != jnp.int8 or not sizes["G"] or sizes["K"] % sizes["G"]):
        raise ValueError(f"x_scale has shape {x_scale.shape}, expected [M], or of int8 [M, G] where G divides K")
    for name, addend, spec in (("bias", bias, "N"), ("residual", residual, "M N")):
        if addend is not None:
            check_floats(**{name: addend})
            bind_shapes(x=(x, "M K"), w=(w, "N K"), **{name: (addend, spec)})
    out_dtype = check_out_dtype(out_dtype)
    backends = BACKENDS if operand == jnp.int8 else BACKENDS | {"triton": FP8_TRITON}
    backends = BLOCKS if in_blocks else GROUPED if grouped else backends
    chosen = choose(backends, backend, sizes["N"], sizes["K"], x_scale.dtype, out_dtype, residual)
    return chosen.run(x, w, x_scale, w_scale, bias, residual, out_dtype)


def _mosaic(x, w, x_scale, w_scale, bias, residual, out_dtype) -> jax.Array:
    from pallas_kernels.hopper.gemm_sm90 import skinny, tall  # import all of Pallas

    choose = choose_config if w_scale.ndim == 1 else choose_blocks
    config = choose(x.shape[0], *w.shape)
    gemm: Any = skinny.gemm if is_skinny(config) else tall.gemm
    bias = None if bias is None else bias.astype(jnp.float32)
    added: dict[str, Any] = {"x_scale": x_scale, "w_scale": w_scale, "bias": bias, "residual": residual}
    return gemm(x, w, **added, out_dtype=out_dtype, config=config)


def _triton(*args) -> jax.Array:
    from pallas_kernels.scaled_matmul import triton  # imports Triton

    return triton.scaled_matmul(*args)


def _one_order(x, w, x_scale, w_scale, bias, residual, out_dtype) -> jax.Array:
    """Runs the kernels on Hopper: those of few and of many rows both add in the order of K."""
    if on_hopper():
        return _mosaic(x, w, x_scale, w_scale, bias, residual, out_dtype)
    run = xla.scaled_matmul if w_scale.ndim == 1 else xla.grouped_matmul
    return _in_tiles(run, x, w, x_scale, w_scale, bias, residual, out_dtype)


def _in_tiles(matmul, x, w, x_scale, w_scale, bias, residual, out_dtype) -> jax.Array:
    return in_tiles(lambda x, s, r: matmul(x, w, s, w_scale, bias, r, out_dtype), x, x_scale, residual)


def _check_one_order(*arguments, check=check_supported) -> None:
    check_device()
    if on_hopper():
        check(*arguments)


BACKENDS = {
    "mosaic": Backend(_mosaic, check_supported),
    "triton": Backend(_triton, check_triton, unasked_on=("ampere",)),
    "xla": Backend(xla.scaled_matmul),
    DETERMINISTIC: Backend(_one_order, _check_one_order),
}
GROUPED = {
    "xla": Backend(xla.grouped_matmul),
    DETERMINISTIC: Backend(partial(_in_tiles, xla.grouped_matmul), lambda *_: check_device()),
}
FP8_TRITON = Backend(_triton, check_triton_fp8, unasked_on=("ampere",))
BLOCKS = {
    "mosaic": Backend(_mosaic, check_blocks),
    "triton": FP8_TRITON,
    "xla": Backend(xla.grouped_matmul),
    DETERMINISTIC: Backend(_one_order, partial(_check_one_order, check=check_blocks)),
}
