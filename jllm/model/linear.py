"""Computes linear(x, w) for each kind of weight. weight_inputs.py says what inputs a weight takes.

A plain weight and a weight-only format take rows in the model's dtype. So do the formats of block_floats.py: rows are
rounded here to values that the format can hold. A format with quantized activations takes rows of eight bits. The norm
or SiLU before it quantizes them in the same pass (fused_linear.py). Attention's output is quantized here. Residuals are
added in the product's epilogue, which saves the pass over the sum that the next norm would need.

`backend` chooses the implementation of all of these operations, as in pallas_kernels.backends.

Gradients of products with quantized weights are those of plain jnp, whatever runs forward. They exist for inputs,
scales, biases and norms. Quantized activations pass gradients straight through, as if they were not rounded (Bengio et
al., arXiv 1308.3432). Integer codes get float0, and codes of fp8 get zeros. A weight that holds its original passes
its own gradient to that, likewise.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp

from jllm.model.adapted import Adapted, with_addend
from jllm.model.params import Weight
from jllm.model.shapes import Array, Float, Int32, shaped
from jllm.model.weight_inputs import input_blocks, part_outliers, rounded_inputs, row_codes, takes_plain_rows
from pallas_kernels.all_reduce import MeshAxis, all_reduce
from pallas_kernels.backends import DETERMINISTIC, where_faster
from pallas_kernels.formats.block_floats import KINDS
from pallas_kernels.formats.numerics import compute_dtype
from pallas_kernels.formats.quantized_rows import QuantizedRows
from pallas_kernels.formats.quantized_weights import QuantizedWeight, decode, take_rows
from pallas_kernels.fp8_matmul import fp8_matmul
from pallas_kernels.int8_matmul import int8_matmul
from pallas_kernels.matmul import matmul
from pallas_kernels.one_order import fenced
from pallas_kernels.scaled_matmul.plain_rows import of_plain_rows
from pallas_kernels.weight_only_matmul import weight_only_matmul

Inputs = jax.Array | QuantizedRows


@shaped
def linear(
    x: Float[Array, "*rows inputs"] | QuantizedRows,
    w: Weight | Adapted,
    bias: Float[Array, " outputs"] | None = None,
    *,
    residual: Float[Array, "*rows outputs"] | None = None,
    out_dtype=None,
    backend: str | None = None,
    axis: MeshAxis | None = None,
    parts: int = 1,
) -> Float[Array, "*rows outputs"]:
    """Returns x times w [outputs, inputs] transposed, plus bias and residual, in out_dtype.

    out_dtype defaults to x's dtype; QuantizedRows need one. With `axis` the inputs are sharded over the devices of that
    mesh axis, and their products are summed. Each device quantizes its part with its own scales. If the backend is
    deterministic it takes the scales of whole rows. `parts` quantizes the inputs on one device as that number of
    devices would. It is differentiable except for QuantizedRows. Adapters of w take plain rows, and add in the
    residual's place. With `axis` they add to each device's part of the product.
    """
    if isinstance(w, Adapted):
        assert not isinstance(x, QuantizedRows), "adapters take plain rows"
        kind = x.dtype if out_dtype is None else out_dtype
        how: dict[str, Any] = {"out_dtype": kind, "backend": backend}
        if axis is None:
            added = with_addend(x, w, residual, **how)
            return linear(x, w.base, bias, residual=added, parts=parts, **how)
        part = linear_part(x, w, axis=axis, **how)
        return all_reduce(part, axis, bias=bias, residual=residual, backend=where_faster(backend))
    if parts > 1 and isinstance(w, QuantizedWeight) and w.format.row_codes is not None:
        assert not isinstance(x, QuantizedRows), "parts take inputs that are not quantized yet"
        each = zip(jnp.split(x, parts, axis=-1), column_parts(w, parts))
        return sum_parts([linear(*one, out_dtype=out_dtype, backend=backend) for one in each], bias, residual)
    if axis is not None:
        part = linear_part(x, w, axis=axis, out_dtype=out_dtype, backend=backend)
        return all_reduce(part, axis, bias=bias, residual=residual, backend=where_faster(backend))
    return _product(x, w, bias, residual, out_dtype=out_dtype, backend=backend, parts=parts)


def linear_part(
    x: Inputs, w: Weight | Adapted, *, axis: MeshAxis, out_dtype=None, backend: str | None = None
) -> jax.Array:
    """Returns a device's part of linear with `axis`, which the sum over devices completes. Adapters add to it."""
    added = None
    if isinstance(w, Adapted):
        assert not isinstance(x, QuantizedRows), "adapters take plain rows"
        added = with_addend(x, w, None, out_dtype=x.dtype if out_dtype is None else out_dtype, backend=backend)
        w = w.base
    name = axis.name if backend == DETERMINISTIC else None
    if isinstance(w, QuantizedWeight) and w.columns is not None:
        x, w = _in_order(x, w, axis, name, backend)
    return _product(x, w, None, added, out_dtype=out_dtype, backend=backend, axis=name)


@shaped
def embed(
    w: Weight, tokens: Int32[Array, "*rows"], dtype, *, axis: MeshAxis | None = None, backend: str | None = None
) -> Float[Array, "*rows E"]:
    """Returns rows of an embedding [V, E]. Token ids out of range are clipped. With `axis` each device of that mesh
    axis has a part of the rows. The device that has a token's row sends it to all."""
    if axis is not None:
        own = tokens - jax.lax.axis_index(axis.name) * w.shape[0]
        here = (own >= 0) & (own < w.shape[0])
        rows = embed(w, own, dtype, backend=backend)
        rows = jnp.where(here[:, None], rows, jnp.zeros((), rows.dtype))
        return all_reduce(rows, axis, backend=where_faster(backend))
    if isinstance(w, QuantizedWeight):
        return fenced(backend, lambda tokens: take_rows(w, tokens, dtype), tokens)
    return jnp.take(w, tokens, axis=0, mode="clip")


def _product(
    x: Inputs,
    w: Weight,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    out_dtype,
    backend: str | None,
    **how: Any,
) -> jax.Array:
    """Returns linear on one device, with its gradient. `how` holds axis and parts, as in rounded_inputs."""
    run: Callable[..., jax.Array] = partial(multiply, out_dtype=out_dtype, backend=backend, **how)
    if isinstance(w, QuantizedWeight) and not isinstance(x, QuantizedRows):
        return with_gradient(run, partial(straight_through, out_dtype=out_dtype, **how))(x, w, bias, residual)
    return run(x, w, bias, residual)


@shaped
def multiply(
    x: Float[Array, "*rows inputs"] | QuantizedRows,
    w: Weight,
    bias: Float[Array, " outputs"] | None,
    residual: Float[Array, "*rows outputs"] | None,
    *,
    out_dtype,
    backend: str | None,
    axis: str | None = None,
    parts: int = 1,
) -> Float[Array, "*rows outputs"]:
    """Computes linear on one device without a gradient of its own. `axis` and `parts` are as in rounded_inputs."""
    added: dict[str, Any] = {"bias": bias, "residual": residual}
    if not isinstance(w, QuantizedWeight):
        assert not isinstance(x, QuantizedRows), "a plain weight takes plain rows"
        return matmul(x, w, **added, out_dtype=out_dtype, backend=where_faster(backend))
    if isinstance(x, QuantizedRows):
        return _codes_product(x, w, **added, out_dtype=out_dtype, backend=backend)
    out_dtype = x.dtype if out_dtype is None else out_dtype
    if w.format.row_codes is not None:
        if w.format.outliers is not None:
            x, large = part_outliers(x, w.format.outliers)
            kept = weight_only_matmul(large, w, **added, out_dtype=out_dtype, backend=backend)
            added = {"bias": None, "residual": kept}
        if takes_plain_rows(w) and axis is None:
            flat = x.reshape(-1, w.shape[1])
            if added["residual"] is not None:
                added["residual"] = added["residual"].reshape(-1, w.shape[0])
            y = of_plain_rows(flat, w.values, w.scales, **added, out_dtype=out_dtype, backend=backend)
            return y.reshape(*x.shape[:-1], w.shape[0])
        codes = fenced(backend, partial(row_codes, fmt=w.format, scale=w.input_scale, axis=axis), x)
        return _codes_product(codes, w, **added, out_dtype=out_dtype, backend=backend)
    if w.format.activations in KINDS:
        x = fenced(backend, partial(input_blocks, fmt=w.format, scale=w.input_scale, axis=axis, parts=parts), x)
        w = replace(w, format=replace(w.format, rotated=False))  # x is rotated now
    return weight_only_matmul(x, w, **added, out_dtype=out_dtype, backend=backend)


def _codes_product(
    x: QuantizedRows,
    w: QuantizedWeight,
    *,
    bias: jax.Array | None,
    residual: jax.Array | None,
    out_dtype,
    backend: str | None,
) -> jax.Array:
    """Returns codes times codes. Sizes are padded as the weight's were when it was quantized."""
    plain = (w.format.group is None or w.format.in_blocks) and w.zeros is None and w.columns is None
    assert plain, "a weight's codes have one symmetric scale a row or block where its inputs are codes"
    (N, K), leading = w.shape, x.values.shape[:-1]
    more_outputs, more_inputs = w.values.shape[0] - N, w.values.shape[1] - K
    values = jnp.pad(x.values.reshape(-1, K), ((0, 0), (0, more_inputs)))
    scales = x.scales.reshape(len(values), *x.scales.shape[len(leading) :])
    if bias is not None:
        bias = jnp.pad(bias, (0, more_outputs))
    if residual is not None:
        residual = jnp.pad(residual.reshape(-1, N), ((0, 0), (0, more_outputs)))
    product = int8_matmul if w.format.codes == "int8" else fp8_matmul
    added = {"bias": bias, "residual": residual}
    if w.format.row_group is not None and not w.format.in_blocks:
        backend = where_faster(backend)  # scales of groups have no kernel, even if a backend is named
    y = product(values, w.values, scales, w.scales.astype(scales.dtype), **added, out_dtype=out_dtype, backend=backend)
    return y[:, :N].reshape(*leading, N)


def with_gradient(run: Callable[..., jax.Array], straight: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Returns `run` with the gradient of `straight`, which is computed only on request."""
    function = jax.custom_vjp(run)
    function.defvjp(lambda *args: (run(*args), args), lambda args, g: jax.vjp(straight, *args)[1](g))
    return function


@shaped
def straight_through(
    x: Float[Array, "*rows inputs"],
    w: QuantizedWeight,
    bias: Float[Array, " outputs"] | None,
    residual: Float[Array, "*rows outputs"] | None,
    *,
    out_dtype,
    **how: Any,
) -> Float[Array, "*rows outputs"]:
    """Computes linear in plain jnp, on decoded values instead of codes. Rounded activations pass gradients straight
    through."""
    x = rounded_inputs(x, w.format, w.input_scale, **how)
    wide = compute_dtype(x.dtype)
    contract = (((x.ndim - 1,), (1,)), ((), ()))
    y = jax.lax.dot_general(x.astype(wide), decoded(w, wide), contract, precision="highest")
    if bias is not None:
        y = y + bias.astype(wide).reshape((1,) * (y.ndim - 1) + bias.shape)
    if residual is not None:
        y = y + residual.astype(wide)
    return y.astype(x.dtype if out_dtype is None else out_dtype)


@shaped
def decoded(w: Weight, dtype: Any) -> Float[Array, "outputs inputs"]:
    """Returns a weight's values. Codes have no gradient: where the weight holds its original, that gets the values'."""
    if not isinstance(w, QuantizedWeight):
        return w.astype(dtype)
    values = decode(replace(w, values=jax.lax.stop_gradient(w.values)), dtype)
    if w.original is None:
        return values
    original = w.original.astype(dtype)
    return original + jax.lax.stop_gradient(values - original)


def _in_order(
    x: Inputs, w: QuantizedWeight, axis: MeshAxis, whole: str | None, backend: str | None
) -> tuple[jax.Array, QuantizedWeight]:
    """Returns the inputs for a device's columns of a reordered weight, and the weight without its order. Each device
    has a part of the inputs, so all devices exchange whole rows first. Blocks of small floats follow the order of the
    inputs, and are therefore rounded before. `whole` is the axis of rounded_inputs."""
    assert not isinstance(x, QuantizedRows), "inputs of a weight in an order of its own have no codes"
    assert w.columns is not None
    x = fenced(backend, lambda x: rounded_inputs(x, w.format, w.input_scale, axis=whole), x)
    every = jax.lax.all_gather(x, axis.name, axis=x.ndim - 1, tiled=True)
    return jnp.take(every, w.columns, axis=-1), replace(w, columns=None, format=replace(w.format, activations=None))


def column_parts(w: QuantizedWeight, parts: int) -> list[QuantizedWeight]:
    """Returns the weight's columns in equal parts. Its format has quantized activations, and scales of whole rows or of
    blocks that no part cuts."""
    K = w.shape[1] // parts
    groups = 0 if w.format.group is None else K // w.format.group

    def part(i: int) -> QuantizedWeight:
        values = jnp.pad(w.values[:, i * K : (i + 1) * K], ((0, 0), (0, w.format.columns(K) - K)))
        scales = w.scales[i * groups : (i + 1) * groups] if groups else w.scales
        return replace(w, values=values, scales=scales, shape=(w.shape[0], K))

    return [part(i) for i in range(parts)]


def sum_parts(products: list[jax.Array], bias: jax.Array | None, residual: jax.Array | None) -> jax.Array:
    """Returns the sum of the products in order, then bias and residual, as all_reduce adds those of several devices."""
    y = reduce(jnp.add, products)
    wide = compute_dtype(y.dtype)
    for added in (None if bias is None else bias[None], residual):
        y = y if added is None else (y.astype(wide) + added.astype(wide)).astype(y.dtype)
    return y
