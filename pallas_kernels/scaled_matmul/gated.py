"""Gate and up projection of quantized rows, SiLU, and codes of the result with a scale for every group of columns."""

import jax
import jax.numpy as jnp

from pallas_kernels.backends import Backend, choose, where_faster
from pallas_kernels.checks import bind_shapes
from pallas_kernels.int8_matmul import int8_matmul
from pallas_kernels.one_order import fenced
from pallas_kernels.quantized_rows import QuantizedRows, quantize_rows
from pallas_kernels.scaled_matmul.config import FEW_ROWS, check_group, check_supported, gated_config
from pallas_kernels.silu_mul_quant import silu_mul_quant


def scaled_swiglu(
    rows: QuantizedRows,
    w: jax.Array,
    w_scale: jax.Array,
    *,
    group: int,
    dtype: jnp.dtype,
    backend: str | None = None,
) -> QuantizedRows:
    """Rows int8[M, K] with scales [M] times w int8[2F, K] transposed, gate's rows first, with w_scale [2F]; SiLU(gate)
    * up, and its codes -> int8[M, F] with scales [M, F / group].

    The product is rounded to `dtype` as int8_matmul does, SiLU's result as silu_mul_quant does in that dtype, and its
    codes and scales are quantize_rows's with `group`: all backends do one after the other, but for silu_mul_quant's
    unit in the last place. Raises ValueError where shapes or dtypes disagree, NotImplementedError for what a backend
    that was named doesn't do.
    """
    sizes = bind_shapes(values=(rows.values, "M K"), w=(w, "X K"), scales=(rows.scales, "M"), w_scale=(w_scale, "X"))
    if rows.values.dtype != jnp.int8 or w.dtype != jnp.int8:
        raise ValueError(f"rows are {rows.values.dtype} and w is {w.dtype}, expected int8 for both")
    if sizes["X"] % 2 or group < 1 or sizes["X"] // 2 % group:
        raise ValueError(f"w has shape {w.shape}, expected two halves of rows in groups of {group}")
    chosen = choose(BACKENDS, backend, sizes["X"], sizes["K"], rows.scales.dtype, jnp.dtype(dtype), group)
    return chosen.run(rows, w, w_scale, group, jnp.dtype(dtype), backend)


def _check_supported(n: int, k: int, scale_dtype: jnp.dtype, dtype: jnp.dtype, group: int) -> None:
    """Raises NotImplementedError for what the kernel does not do, naming what it does."""
    check_supported(n, k, scale_dtype, dtype, None)
    check_group(group)
    if dtype.itemsize != 2:
        raise NotImplementedError(f"{dtype} is not supported by backend mosaic, which does bfloat16 and float16")


def _mosaic(
    rows: QuantizedRows, w: jax.Array, w_scale: jax.Array, group: int, dtype: jnp.dtype, backend: str | None
) -> QuantizedRows:
    if len(rows.values) > FEW_ROWS:
        return _operations(rows, w, w_scale, group, dtype, backend, backend)
    from pallas_kernels.gemm_sm90 import gated_codes  # imports all of Pallas

    options = {"x_scale": rows.scales, "w_scale": w_scale, "group": group, "dtype": dtype}
    return QuantizedRows(*gated_codes.gemm(rows.values, w, **options, config=gated_config(group)))


def _xla(
    rows: QuantizedRows, w: jax.Array, w_scale: jax.Array, group: int, dtype: jnp.dtype, backend: str | None
) -> QuantizedRows:
    return _operations(rows, w, w_scale, group, dtype, backend, where_faster(backend))


def _operations(
    rows: QuantizedRows,
    w: jax.Array,
    w_scale: jax.Array,
    group: int,
    dtype: jnp.dtype,
    backend: str | None,
    of_silu: str | None,
) -> QuantizedRows:
    """One after the other; `of_silu` is the backend of SiLU."""
    y = int8_matmul(rows.values, w, rows.scales, w_scale.astype(rows.scales.dtype), out_dtype=dtype, backend=backend)
    gated = silu_mul_quant(y, backend=of_silu)
    return fenced(backend, lambda x: quantize_rows(x, "int8", group=group), gated)


BACKENDS = {
    "mosaic": Backend(_mosaic, _check_supported),
    "xla": Backend(_xla),
}
