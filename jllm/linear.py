"""linear(x, w): the one place that knows what each kind of weight leaf is multiplied by, and who makes that.

A plain weight takes rows in the model's dtype, and so does a weight-only format. A format with quantized activations
takes rows of eight bits: the RMSNorm or SiLU before it makes them in the same pass (`norm`, `silu_mul`); what comes
from elsewhere, attention's output, is quantized here. Residuals are added in the product's epilogue: one pass over the
sum less than adding them in the norm that follows.

`backend` names the implementation of these operations ("xla", "mosaic"); None chooses. Plain products know no other
than the best one unless that is "xla": the kernel for them is there for few rows only.
"""

import jax
import jax.numpy as jnp

from jllm.params import Weight
from pallas_kernels.fp8_matmul import fp8_matmul
from pallas_kernels.int8_matmul import int8_matmul
from pallas_kernels.matmul import matmul
from pallas_kernels.norm_quant import norm_quant
from pallas_kernels.quantized_rows import QuantizedRows, quantize_rows
from pallas_kernels.quantized_weights import QuantizedWeight, take_rows
from pallas_kernels.silu_mul_quant import silu_mul_quant
from pallas_kernels.weight_only_matmul import weight_only_matmul

Rows = jax.Array | QuantizedRows


def linear(
    x: Rows,
    w: Weight,
    bias: jax.Array | None = None,
    *,
    residual: jax.Array | None = None,
    out_dtype=None,
    backend: str | None = None,
) -> jax.Array:
    """x [..., in] times w [out, in] transposed, plus bias [out] and residual [..., out]: [..., out] in out_dtype
    (default: x's, which QuantizedRows do not have: they need one)."""
    added = {"bias": bias, "residual": residual}
    if not isinstance(w, QuantizedWeight):
        assert not isinstance(x, QuantizedRows), "a plain weight takes plain rows"
        return matmul(x, w, **added, out_dtype=out_dtype, backend="xla" if backend == "xla" else None)
    if isinstance(x, QuantizedRows):
        return _codes_product(x, w, **added, out_dtype=out_dtype, backend=backend)
    out_dtype = x.dtype if out_dtype is None else out_dtype
    if w.format.activations is not None:
        rows = quantize_rows(x, w.format.activations, per_tensor=w.format.per_tensor)
        return _codes_product(rows, w, **added, out_dtype=out_dtype, backend=backend)
    return weight_only_matmul(x, w, **added, out_dtype=out_dtype, backend=backend)


def norm(x: jax.Array, weight: jax.Array, eps: float, reader: Weight, *, backend: str | None = None) -> Rows:
    """RMSNorm of x [T, E], as the weight that reads it takes it."""
    return norm_quant(x, weight, eps=eps, kind=_rows_kind(reader), backend=backend)[0]


def silu_mul(gate_up: jax.Array, reader: Weight, *, backend: str | None = None) -> Rows:
    """SiLU(gate) * up of gate_up [T, 2F], as the weight that reads it takes it: [T, F]."""
    return silu_mul_quant(gate_up, kind=_rows_kind(reader), backend=backend)


def embed(w: Weight, tokens: jax.Array, dtype) -> jax.Array:
    """Rows of an embedding [V, E]: i32[...] -> [..., E]. Token ids out of range are clipped."""
    if isinstance(w, QuantizedWeight):
        return take_rows(w, tokens, dtype)
    return jnp.take(w, tokens, axis=0, mode="clip")


def _rows_kind(reader: Weight) -> str | None:
    """What a norm or SiLU quantizes to for this weight. A scale that all tokens share takes a pass of its own."""
    if not isinstance(reader, QuantizedWeight) or reader.format.per_tensor:
        return None
    return reader.format.activations


def _codes_product(
    x: QuantizedRows,
    w: QuantizedWeight,
    *,
    bias: jax.Array | None,
    residual: jax.Array | None,
    out_dtype,
    backend: str | None,
) -> jax.Array:
    """Codes times codes. Sizes that are no multiples of 32 are padded, as w's were when it was quantized."""
    plain = w.format.group is None and w.zeros is None and w.columns is None
    assert plain, "codes meet codes of one symmetric scale a row; no other format has quantized activations"
    (N, K), leading = w.shape, x.values.shape[:-1]
    rows, columns = w.values.shape[0] - N, w.values.shape[1] - K
    values = jnp.pad(x.values.reshape(-1, K), ((0, 0), (0, columns)))
    scales = x.scales.reshape(-1)
    if bias is not None:
        bias = jnp.pad(bias, (0, rows))
    if residual is not None:
        residual = jnp.pad(residual.reshape(-1, N), ((0, 0), (0, rows)))
    product = int8_matmul if w.format.codes == "int8" else fp8_matmul
    added = {"bias": bias, "residual": residual}
    y = product(values, w.values, scales, w.scales.astype(scales.dtype), **added, out_dtype=out_dtype, backend=backend)
    return y[:, :N].reshape(*leading, N)
