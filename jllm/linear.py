"""linear(x, w): the one place that knows what each kind of weight leaf is multiplied by, and who makes that.

A plain weight takes rows in the model's dtype, and so do a weight-only format and those of block_floats.py, whose rows
are rounded here to what the format would hold of them. A format with quantized activations
takes rows of eight bits: the RMSNorm or SiLU before it makes them in the same pass (`norm`, `silu_mul`); what comes
from elsewhere, attention's output, is quantized here. Where groups of inputs have scales of their own, gate and up
projection make the rows with them (`norm_mlp`). Residuals are added in the product's epilogue: one pass over the
sum less than adding them in the norm that follows.

`backend` chooses the implementation of all of these operations, as pallas_kernels.backends says.

Gradients of products with quantized weights are those of plain jnp's, whatever runs forward: with respect to inputs,
scales, biases and norms. Quantized activations pass them straight through (Bengio et al., arXiv 1308.3432: as if
rounding were not there); integer codes get float0, and codes of fp8 zeros.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp

from jllm.params import Weight
from pallas_kernels.all_reduce import MeshAxis, all_reduce
from pallas_kernels.backends import DETERMINISTIC, DIFFERENTIABLE, where_faster
from pallas_kernels.block_floats import KINDS, round_blocks
from pallas_kernels.fp8_matmul import fp8_matmul
from pallas_kernels.int8_matmul import int8_matmul
from pallas_kernels.matmul import matmul
from pallas_kernels.norm_quant import norm_quant
from pallas_kernels.numerics import compute_dtype
from pallas_kernels.quantized_rows import QuantizedRows, dequantize_rows, quantize_rows
from pallas_kernels.quantized_weights import QuantizedWeight, WeightFormat, decode, padded, rotate_groups, take_rows
from pallas_kernels.scaled_matmul.gated import scaled_swiglu
from pallas_kernels.scaled_matmul.plain_rows import of_plain_rows, one_kernel
from pallas_kernels.silu_mul_quant import silu_mul_quant
from pallas_kernels.swiglu import swiglu
from pallas_kernels.weight_only_matmul import weight_only_matmul, weight_only_swiglu

Rows = jax.Array | QuantizedRows


def linear(
    x: Rows,
    w: Weight,
    bias: jax.Array | None = None,
    *,
    residual: jax.Array | None = None,
    out_dtype=None,
    backend: str | None = None,
    axis: MeshAxis | None = None,
    parts: int = 1,
) -> jax.Array:
    """x [..., in] times w [out, in] transposed, plus bias [out] and residual [..., out]: [..., out] in out_dtype
    (default: x's, which QuantizedRows do not have: they need one). With `axis` the inputs are spread over the devices
    of that mesh axis, and their products are summed; `parts` quantizes the inputs as on so many devices, on one.
    Each device quantizes its part with scales of its own, but with those of whole rows where the backend is
    deterministic.
    Differentiable but for QuantizedRows."""
    if parts > 1 and isinstance(w, QuantizedWeight) and w.format.row_codes is not None:
        assert not isinstance(x, QuantizedRows), "parts of what is not quantized yet"
        each = zip(jnp.split(x, parts, axis=-1), _column_parts(w, parts))
        return _sum([linear(*one, out_dtype=out_dtype, backend=backend) for one in each], bias, residual)
    if axis is not None:
        rows = axis.name if backend == DETERMINISTIC else None
        if isinstance(w, QuantizedWeight) and w.columns is not None:
            x, w = _in_order(x, w, axis, rows)
        part = _product(x, w, None, None, out_dtype=out_dtype, backend=backend, rows=rows)
        return all_reduce(part, axis, bias=bias, residual=residual, backend=where_faster(backend))
    return _product(x, w, bias, residual, out_dtype=out_dtype, backend=backend, parts=parts)


def _product(
    x: Rows,
    w: Weight,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    out_dtype,
    backend: str | None,
    **how: Any,
) -> jax.Array:
    """linear of one device, and its gradient. how: rows and parts, as rounded_inputs has them."""
    run: Callable[..., jax.Array] = partial(_linear, out_dtype=out_dtype, backend=backend, **how)
    if isinstance(w, QuantizedWeight) and not isinstance(x, QuantizedRows):
        return _with_gradient(run, partial(_straight, out_dtype=out_dtype, **how))(x, w, bias, residual)
    return run(x, w, bias, residual)


def norm_linear(
    x: jax.Array,
    weight: jax.Array,
    w: Weight,
    bias: jax.Array | None = None,
    *,
    eps: float,
    out_dtype=None,
    backend: str | None = None,
) -> jax.Array:
    """linear of norm of x [T, E]: [T, out] in out_dtype (default: x's). Differentiable: norm
    and then linear are not where codes lie between them."""
    out_dtype = x.dtype if out_dtype is None else out_dtype
    if not isinstance(w, QuantizedWeight):
        options: dict[str, Any] = {"out_dtype": out_dtype, "backend": where_faster(backend)}
        return matmul(x, w, norm=weight, eps=eps, bias=bias, **options)

    def run(x: jax.Array, weight: jax.Array, w: QuantizedWeight, bias: jax.Array | None) -> jax.Array:
        if _takes_plain_rows(w):
            options: dict[str, Any] = {"norm": weight, "eps": eps, "out_dtype": out_dtype, "backend": backend}
            return of_plain_rows(x, w.values, w.scales, bias=bias, **options)
        if _takes_numbers(w):
            return weight_only_matmul(x, w, norm=weight, eps=eps, bias=bias, out_dtype=out_dtype, backend=backend)
        rows = norm(x, weight, eps, w, backend=backend)
        return _linear(rows, w, bias, None, out_dtype=out_dtype, backend=backend)

    def straight(x: jax.Array, weight: jax.Array, w: QuantizedWeight, bias: jax.Array | None) -> jax.Array:
        rows = norm_quant(x, weight, eps=eps, backend=DIFFERENTIABLE)[0]
        return _straight(rows, w, bias, None, out_dtype=out_dtype)

    return _with_gradient(run, straight)(x, weight, w, bias)


def fuses_swiglu(x: jax.Array, w: Weight, bias: jax.Array | None, reader: Weight, *, backend: str | None) -> bool:
    """Whether gate and up projection of x [T, E], SiLU and product are one operation: of weights that take rows as they
    are, for a reader of plain rows; of int8 codes where one kernel does all of it, for a reader that quantizes what
    comes."""
    if bias is not None or not isinstance(w, QuantizedWeight) or _takes_numbers(w):
        return bias is None and _rows_kind(reader) is None
    if not _takes_plain_rows(w) or _rows_kind(reader) != _rows_kind(w):
        return False
    return one_kernel(x, w.values, gated=True, backend=backend) is not None


def norm_swiglu(x: jax.Array, weight: jax.Array, w: Weight, *, eps: float, backend: str | None = None) -> jax.Array:
    """swiglu of norm of x [T, E] with w [2F, E], where fuses_swiglu says so: [T, F]."""
    if not isinstance(w, QuantizedWeight):
        return swiglu(x, w, norm=weight, eps=eps, backend=where_faster(backend))

    def run(x: jax.Array, weight: jax.Array, w: QuantizedWeight) -> jax.Array:
        if _takes_numbers(w):
            return weight_only_swiglu(x, w, norm=weight, eps=eps, backend=backend)
        return of_plain_rows(x, w.values, w.scales, norm=weight, eps=eps, gated=True, backend=backend)

    def straight(x: jax.Array, weight: jax.Array, w: QuantizedWeight) -> jax.Array:
        rows = norm_quant(x, weight, eps=eps, backend=DIFFERENTIABLE)[0]
        return silu_mul_quant(_straight(rows, w, None, None, out_dtype=None), backend=DIFFERENTIABLE)

    return _with_gradient(run, straight)(x, weight, w)


def fuses_codes(w: Weight, bias: jax.Array | None, reader: Weight) -> bool:
    """Whether gate and up projection, SiLU and the codes of its groups are one operation: of int8 codes, for a reader
    whose inputs have a scale for each group."""
    if bias is not None or not isinstance(w, QuantizedWeight) or not isinstance(reader, QuantizedWeight):
        return False
    return _takes_plain_rows(w) and w.format.row_codes == "int8" and reader.format.row_group is not None


def norm_mlp(
    x: jax.Array,
    weight: jax.Array,
    w: Weight,
    reader: Weight,
    bias: jax.Array | None = None,
    *,
    eps: float,
    backend: str | None = None,
) -> jax.Array:
    """x [T, E] plus linear, with `reader`, of SiLU(gate) * up of x's norm with w [2F, E], where fuses_codes says so."""

    def run(
        x: jax.Array, weight: jax.Array, w: QuantizedWeight, reader: QuantizedWeight, bias: jax.Array | None
    ) -> jax.Array:
        group = reader.format.row_group
        assert group is not None, "fuses_codes says so"
        if one_kernel(x, w.values, gated=True, backend=backend) is not None:
            rows: Rows = of_plain_rows(x, w.values, w.scales, norm=weight, eps=eps, gated=True, backend=backend)
        else:
            normed = norm(x, weight, eps, w, backend=backend)
            assert isinstance(normed, QuantizedRows), "w takes codes"
            options: dict[str, Any] = {"group": group, "dtype": x.dtype, "backend": backend}
            rows = scaled_swiglu(normed, w.values, w.scales, **options)
        return _linear(rows, reader, bias, x, out_dtype=x.dtype, backend=backend)

    def straight(
        x: jax.Array, weight: jax.Array, w: QuantizedWeight, reader: QuantizedWeight, bias: jax.Array | None
    ) -> jax.Array:
        rows = norm_quant(x, weight, eps=eps, backend=DIFFERENTIABLE)[0]
        gated = silu_mul_quant(_straight(rows, w, None, None, out_dtype=None), backend=DIFFERENTIABLE)
        return _straight(gated, reader, bias, x, out_dtype=x.dtype)

    return _with_gradient(run, straight)(x, weight, w, reader, bias)


def silu_linear(
    gate_up: jax.Array,
    w: Weight,
    bias: jax.Array | None = None,
    *,
    residual: jax.Array,
    backend: str | None = None,
    axis: MeshAxis | None = None,
    parts: int = 1,
) -> jax.Array:
    """linear of silu_mul of gate_up [T, 2F], in the residual's dtype; axis and parts as linear has them."""
    if parts > 1 and isinstance(w, QuantizedWeight) and w.format.row_codes is not None:
        gates, ups = (jnp.split(half, parts, axis=-1) for half in jnp.split(gate_up, 2, axis=-1))
        cut = [jnp.concatenate(pair, axis=-1) for pair in zip(gates, ups)]
        options: dict[str, Any] = {"out_dtype": residual.dtype, "backend": backend}
        each = zip(cut, _column_parts(w, parts))
        return _sum([linear(silu_mul(r, v, backend=backend), v, **options) for r, v in each], bias, residual)
    if axis is not None:
        if backend == DETERMINISTIC:  # linear quantizes whole rows, of which this device has a part
            rows: Rows = silu_mul_quant(gate_up, backend=backend)
        else:
            rows = silu_mul(gate_up, w, backend=backend)
        return linear(rows, w, bias, residual=residual, out_dtype=residual.dtype, backend=backend, axis=axis)

    def run(gate_up: jax.Array, w: Weight, bias: jax.Array | None, residual: jax.Array) -> jax.Array:
        rows = silu_mul(gate_up, w, backend=backend)
        return _linear(rows, w, bias, residual, out_dtype=residual.dtype, backend=backend, parts=parts)

    def straight(gate_up: jax.Array, w: QuantizedWeight, bias: jax.Array | None, residual: jax.Array) -> jax.Array:
        rows = silu_mul_quant(gate_up, backend=DIFFERENTIABLE)
        return _straight(rows, w, bias, residual, out_dtype=residual.dtype, parts=parts)

    return (_with_gradient(run, straight) if isinstance(w, QuantizedWeight) else run)(gate_up, w, bias, residual)


def _linear(
    x: Rows,
    w: Weight,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    out_dtype,
    backend: str | None,
    rows: str | None = None,
    parts: int = 1,
) -> jax.Array:
    added: dict[str, Any] = {"bias": bias, "residual": residual}
    if not isinstance(w, QuantizedWeight):
        assert not isinstance(x, QuantizedRows), "a plain weight takes plain rows"
        return matmul(x, w, **added, out_dtype=out_dtype, backend=where_faster(backend))
    if isinstance(x, QuantizedRows):
        return _codes_product(x, w, **added, out_dtype=out_dtype, backend=backend)
    out_dtype = x.dtype if out_dtype is None else out_dtype
    if w.format.row_codes is not None:
        if w.format.outliers is not None:
            x, large = _part_outliers(x, w.format.outliers)
            kept = weight_only_matmul(large, w, **added, out_dtype=out_dtype, backend=backend)
            added = {"bias": None, "residual": kept}
        if _takes_plain_rows(w) and rows is None:
            y = of_plain_rows(
                x.reshape(-1, w.shape[1]), w.values, w.scales, bias=added["bias"], residual=_flat(added["residual"]),
                out_dtype=out_dtype, backend=backend,
            )  # fmt: skip
            return y.reshape(*x.shape[:-1], w.shape[0])
        codes = _row_codes(x, w.format, w.input_scale, rows)
        return _codes_product(codes, w, **added, out_dtype=out_dtype, backend=backend)
    if w.format.activations in KINDS:
        x = _blocks(x, w.format, w.input_scale, rows, parts)
        w = replace(w, format=replace(w.format, rotated=False))  # as x is now
    return weight_only_matmul(x, w, **added, out_dtype=out_dtype, backend=backend)


def norm(x: jax.Array, weight: jax.Array, eps: float, reader: Weight, *, backend: str | None = None) -> Rows:
    """RMSNorm of x [T, E], as the weight that reads it takes it."""
    return norm_quant(x, weight, eps=eps, kind=_rows_kind(reader), backend=backend)[0]


def silu_mul(gate_up: jax.Array, reader: Weight, *, backend: str | None = None) -> Rows:
    """SiLU(gate) * up of gate_up [T, 2F], as the weight that reads it takes it: [T, F]."""
    kind = _rows_kind(reader)
    return silu_mul_quant(gate_up, kind=kind, backend=where_faster(backend) if kind is None else backend)


def embed(
    w: Weight, tokens: jax.Array, dtype, *, axis: MeshAxis | None = None, backend: str | None = None
) -> jax.Array:
    """Rows of an embedding [V, E]: i32[...] -> [..., E]. Token ids out of range are clipped. With `axis` each device of
    that mesh axis has a part of the rows, and the one that has a token's gives it to all."""
    if axis is not None:
        own = tokens - jax.lax.axis_index(axis.name) * w.shape[0]
        here = (own >= 0) & (own < w.shape[0])
        rows = embed(w, own, dtype)
        return all_reduce(
            jnp.where(here[:, None], rows, jnp.zeros((), rows.dtype)), axis, backend=where_faster(backend)
        )
    if isinstance(w, QuantizedWeight):
        return take_rows(w, tokens, dtype)
    return jnp.take(w, tokens, axis=0, mode="clip")


def _in_order(x: Rows, w: QuantizedWeight, axis: MeshAxis, rows: str | None) -> tuple[jax.Array, QuantizedWeight]:
    """The inputs that a device's columns of a weight in an order of its own meet, of inputs that devices have a part
    of each: any of the whole rows, which all exchange first; and the weight in that order. Blocks of small floats are
    of inputs as they come, and rounded before; rows as rounded_inputs has it."""
    assert not isinstance(x, QuantizedRows), "inputs of a weight in an order of its own have no codes"
    assert w.columns is not None
    x = rounded_inputs(x, w.format, w.input_scale, rows=rows)
    every = jax.lax.all_gather(x, axis.name, axis=x.ndim - 1, tiled=True)
    return jnp.take(every, w.columns, axis=-1), replace(w, columns=None, format=replace(w.format, activations=None))


def _column_parts(w: QuantizedWeight, parts: int) -> list[QuantizedWeight]:
    """The weight's columns in equal parts: of a format with quantized activations, whose scales are of whole rows."""
    K = w.shape[1] // parts
    cut = (w.values[:, i * K : (i + 1) * K] for i in range(parts))
    return [replace(w, values=jnp.pad(v, ((0, 0), (0, padded(K) - K))), shape=(w.shape[0], K)) for v in cut]


def _sum(products: list[jax.Array], bias: jax.Array | None, residual: jax.Array | None) -> jax.Array:
    """The products in order, then bias and residual: what all_reduce makes of those of several devices."""
    y = reduce(jnp.add, products)
    wide = compute_dtype(y.dtype)
    for added in (None if bias is None else bias[None], residual):
        y = y if added is None else (y.astype(wide) + added.astype(wide)).astype(y.dtype)
    return y


def _with_gradient(run: Callable[..., jax.Array], straight: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """`run`, with the gradient of `straight`, which is computed where it is asked for."""
    function = jax.custom_vjp(run)
    function.defvjp(lambda *args: (run(*args), args), lambda args, g: jax.vjp(straight, *args)[1](g))
    return function


def _straight(
    x: jax.Array, w: QuantizedWeight, bias: jax.Array | None, residual: jax.Array | None, *, out_dtype, **how: Any
) -> jax.Array:
    """linear in plain jnp, of numbers instead of codes, with rounding of activations passing gradients."""
    x = rounded_inputs(x, w.format, w.input_scale, **how)
    w = replace(w, values=jax.lax.stop_gradient(w.values))
    wide = compute_dtype(x.dtype)
    y = jax.lax.dot_general(x.astype(wide), decode(w, wide), (((x.ndim - 1,), (1,)), ((), ())), precision="highest")
    if bias is not None:
        y = y + bias.astype(wide).reshape((1,) * (y.ndim - 1) + bias.shape)
    if residual is not None:
        y = y + residual.astype(wide)
    return y.astype(x.dtype if out_dtype is None else out_dtype)


def rounded_inputs(
    x: jax.Array, fmt: WeightFormat, scale: jax.Array | None = None, *, rows: str | None = None, parts: int = 1
) -> jax.Array:
    """x [..., K] as a weight of that format takes it, in numbers of x's dtype; rounding passes gradients. scale [1] is
    of all inputs, found ahead. rows: the mesh axis whose devices have a part of each row and quantize it with the whole
    row's scale. parts: into which a row of blocks is cut; each is rounded by itself."""
    fixed = jax.lax.stop_gradient(x)
    if fmt.activations in KINDS:
        return x + (rotate_groups(_blocks(fixed, fmt, scale, rows, parts), fmt) - fixed)
    if fmt.row_codes is None:
        return x
    rest, large = (fixed, 0) if fmt.outliers is None else _part_outliers(fixed, fmt.outliers)
    return x + (dequantize_rows(_row_codes(rest, fmt, scale, rows), x.dtype) + large - fixed)


def _row_codes(x: jax.Array, fmt: WeightFormat, scale: jax.Array | None, rows: str | None) -> QuantizedRows:
    """x [..., K] in the codes of a format's inputs; the rest as rounded_inputs has it. Groups are whole."""
    assert fmt.row_codes is not None
    options: dict[str, Any] = {"group": fmt.row_group} if fmt.row_group else {"scale": scale, "axis": rows}
    return quantize_rows(x, fmt.row_codes, per_tensor=fmt.per_tensor, **options)


def _blocks(x: jax.Array, fmt: WeightFormat, scale: jax.Array | None, rows: str | None, parts: int) -> jax.Array:
    """x [..., K], rotated where the format has that, in blocks of small floats; the rest as rounded_inputs has it."""
    assert fmt.activations is not None
    cut = rotate_groups(x, fmt).reshape(*x.shape[:-1], parts, -1)
    return round_blocks(cut, fmt.activations, scale, axis=rows).reshape(x.shape)


def _takes_numbers(w: QuantizedWeight) -> bool:
    """Whether rows meet this weight as they are: neither quantized nor rounded first."""
    return w.format.activations is None


def _rows_kind(reader: Weight) -> str | None:
    """What a norm or SiLU quantizes to for this weight. A scale that all tokens share takes a pass of its own, be it
    found as they come or ahead (input_scale), and so do outliers and scales of groups."""
    if not isinstance(reader, QuantizedWeight) or reader.format.per_tensor or reader.input_scale is not None:
        return None
    apart = reader.format.outliers is not None or reader.format.row_group is not None
    return None if apart else reader.format.row_codes


def _takes_plain_rows(w: QuantizedWeight) -> bool:
    """Whether rows of x can be quantized as they are multiplied: each by itself, for codes that are not padded."""
    return _rows_kind(w) is not None and w.values.shape == w.shape


def _part_outliers(x: jax.Array, threshold: float) -> tuple[jax.Array, jax.Array]:
    """x as the sum of what is smaller and of what is not (LLM.int8, arXiv 2208.07339), value by value: bitsandbytes
    takes a column out for all tokens of a batch where one has an outlier there, and a token then depends on others."""
    large = jnp.abs(x) >= jnp.asarray(threshold, x.dtype)
    zero = jnp.zeros((), x.dtype)
    return jnp.where(large, zero, x), jnp.where(large, x, zero)


def _flat(x: jax.Array | None) -> jax.Array | None:
    """x [.., N] as [M, N]."""
    return None if x is None else x.reshape(-1, x.shape[-1])


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
    assert plain, "a weight's codes have one symmetric scale a row where its inputs are codes"
    (N, K), leading = w.shape, x.values.shape[:-1]
    rows, columns = w.values.shape[0] - N, w.values.shape[1] - K
    values = jnp.pad(x.values.reshape(-1, K), ((0, 0), (0, columns)))
    scales = x.scales.reshape(len(values), *x.scales.shape[len(leading) :])
    if bias is not None:
        bias = jnp.pad(bias, (0, rows))
    if residual is not None:
        residual = jnp.pad(residual.reshape(-1, N), ((0, 0), (0, rows)))
    product = int8_matmul if w.format.codes == "int8" else fp8_matmul
    added = {"bias": bias, "residual": residual}
    y = product(values, w.values, scales, w.scales.astype(scales.dtype), **added, out_dtype=out_dtype, backend=backend)
    return y[:, :N].reshape(*leading, N)
