"""Multiplies rows that are not quantized yet, in one kernel or by one operation after the other. Both give the same
bits, as sums of int8 are exact and the kernel rounds where the operations do. So a row's result does not depend on
which of them runs, nor on how many rows run beside it."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.backends import DETERMINISTIC, choose, on_hopper, or_xla, where_faster
from pallas_kernels.checks import bind_shapes, check_floats, check_norm, check_out_dtype
from pallas_kernels.formats.quantized_rows import KINDS
from pallas_kernels.hopper.gemm_sm90 import gemv_config
from pallas_kernels.norm_quant import norm_quant
from pallas_kernels.scaled_matmul.api import BACKENDS, scaled_matmul
from pallas_kernels.silu_mul_quant import silu_mul_quant


def of_plain_rows(
    x: jax.Array,
    w: jax.Array,
    w_scale: jax.Array,
    *,
    norm: jax.Array | None = None,
    eps: float = 0.0,
    gated: bool = False,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    out_dtype: DTypeLike | None = None,
    backend: str | None = None,
) -> jax.Array:
    """Returns x [M, K], quantized with a scale a row, times w int8 or e4m3[N, K] transposed: [M, N] of `out_dtype`.

    int8_matmul and fp8_matmul make it with w_scale [N], bias [N] and residual [M, N]. `out_dtype` is x's by default.
    With norm [K], in x's dtype, RMSNorm(x) * norm replaces x, as norm_quant computes it with `eps`. If `gated`, the
    result is SiLU of the product with w's first half, times the product with its second half: [M, N / 2]. It has the
    bits of silu_mul_quant, and nothing is added. Raises ValueError where shapes or dtypes disagree, and
    NotImplementedError for what a named backend doesn't do.
    """
    sizes = bind_shapes(x=(x, "M K"), w=(w, "N K"), w_scale=(w_scale, "N"))
    check_floats(x=x)
    check_norm(norm, x)
    kind = next((kind for kind, dtype in KINDS.items() if w.dtype == dtype), None)
    if kind is None:
        raise ValueError(f"w has dtype {w.dtype}, expected int8 or float8_e4m3fn")
    if gated and (sizes["N"] % 2 or bias is not None or residual is not None):
        raise ValueError(f"a gated product with w of {w.shape}: expected two halves, and neither bias nor residual")
    out_dtype = check_out_dtype(x.dtype if out_dtype is None else out_dtype)
    added: dict[str, Any] = {"bias": bias, "residual": residual, "out_dtype": out_dtype}
    config = one_kernel(x, w, gated=gated, residual=residual, out_dtype=out_dtype, backend=backend)
    if config is not None:
        from pallas_kernels.hopper.gemm_sm90.gemv import gemv  # imports all of Pallas

        return gemv(x, w, w_scale=w_scale, norm=norm, eps=eps, **added, config=config, gated=gated)
    how = or_xla(backend) if norm is None else backend
    rows: Any = norm_quant(x, norm, eps=eps, kind=kind, backend=how)[0]
    scales = rows.scales, w_scale.astype(rows.scales.dtype)
    y = scaled_matmul(rows.values, w, *scales, **added, backend=backend, operand=KINDS[kind])
    return silu_mul_quant(y, backend=where_faster(backend)) if gated else y


def one_kernel(
    x: jax.Array,
    w: jax.Array,
    *,
    gated: bool,
    residual: jax.Array | None = None,
    out_dtype: DTypeLike | None = None,
    backend: str | None,
) -> gemv_config.Config | None:
    """Returns the configuration of the kernel that does all of this for x [M, K] and w [N, K]; None where there is
    none."""
    (m, k), n = x.shape, w.shape[0]
    config = gemv_config.for_int8(n // (2 if gated else 1), k)
    if m != 1 or config is None or x.dtype.itemsize != 2 or w.dtype != jnp.int8:
        return None
    out_dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    chosen = choose(BACKENDS, backend, n, k, jnp.dtype(jnp.float32), out_dtype, residual)
    return config if chosen is BACKENDS["mosaic"] or (chosen is BACKENDS[DETERMINISTIC] and on_hopper()) else None
