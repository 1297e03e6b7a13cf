"""Computes the MLP block of a Mixture of Experts (Shazeer et al., arXiv 1701.06538; Mixtral, arXiv 2401.04088).

A router gives each expert a share of each token. The k experts with the largest shares compute the token, and their
outputs are added by share. Rows are sorted by expert, so that each expert's weight meets all of its rows at once. The
sum over a token's experts goes in the order of their numbers, in float32 at least.

On a mesh all devices have all rows and route them alike. Each one has some experts, or some columns of each expert. It
adds the outputs of its own, and one exchange sums what the devices have added.
"""

import functools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jllm.config import Experts, LlamaConfig
from jllm.model.linear import decoded, linear, linear_part, with_gradient
from jllm.model.mlp import mlp_block
from jllm.model.params import BiasedExpertsParams, ExpertsParams, SharedExpertParams, Weight
from jllm.model.shapes import Array, Float, Int32, shaped
from jllm.model.taps import Tap
from jllm.model.weight_inputs import part_outliers, rounded_inputs, row_codes
from pallas_kernels.all_reduce import MeshAxis, all_reduce
from pallas_kernels.backends import DETERMINISTIC, DIFFERENTIABLE, where_faster
from pallas_kernels.formats.block_floats import KINDS
from pallas_kernels.formats.numerics import compute_dtype
from pallas_kernels.formats.quantized_rows import QuantizedRows
from pallas_kernels.formats.quantized_weights import QuantizedWeight
from pallas_kernels.norm_quant import norm_quant
from pallas_kernels.one_order import fenced
from pallas_kernels.ragged_matmul import ragged_matmul
from pallas_kernels.ragged_matmul.api import BACKENDS
from pallas_kernels.silu_mul_quant import silu_mul_quant

COMPARED = 2048  # rows: more are sorted
ALPHA, LIMIT = 1.702, 7.0  # of gpt-oss's gates


@mlp_block.register
@shaped
def _(
    p: ExpertsParams, x: Float[Array, "T E"], *, config: LlamaConfig, backend: str | None, tap: Tap
) -> Float[Array, "T E"]:
    rows, routes, shares = _routed(p, x, None, config, backend, tap)
    return _joined(x, run_experts(p, rows, routes, shares, axis=config.axis, backend=backend), config, backend)


@mlp_block.register
@shaped
def _(
    p: SharedExpertParams, x: Float[Array, "T E"], *, config: LlamaConfig, backend: str | None, tap: Tap
) -> Float[Array, "T E"]:
    rows, routes, shares = _routed(p, x, None, config, backend, tap)
    added = run_experts(p, rows, routes, shares, axis=config.axis, backend=backend)
    hidden = silu_mul_quant(linear(rows, p.shared_gate_up, backend=backend), backend=where_faster(backend))
    if config.axis is None:
        shared = linear(hidden, p.shared_down, backend=backend)
    else:
        shared = linear_part(hidden, p.shared_down, axis=config.axis, backend=backend)

    def add(added: jax.Array, shared: jax.Array, gate: jax.Array) -> jax.Array:
        return added + jax.nn.sigmoid(gate.astype(added.dtype)) * shared.astype(added.dtype)

    added = fenced(backend, add, added, shared, linear(rows, p.shared_gate, backend=backend))
    return _joined(x, added, config, backend)


@mlp_block.register
@shaped
def _(
    p: BiasedExpertsParams, x: Float[Array, "T E"], *, config: LlamaConfig, backend: str | None, tap: Tap
) -> Float[Array, "T E"]:
    rows, routes, shares = _routed(p, x, p.router_bias, config, backend, tap)
    biases = p.gate_up_bias, p.down_bias
    added = run_experts(p, rows, routes, shares, biases, axis=config.axis, backend=backend)
    return _joined(x, added, config, backend)


def _routed(
    p: Any, x: jax.Array, bias: jax.Array | None, config: LlamaConfig, backend: str | None, tap: Tap
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the normed rows, each one's experts, and their shares."""
    experts = config.experts
    assert experts is not None, "a config whose layers have experts describes them"
    rows = tap("mlp_norm", norm_quant(x, p.norm, eps=config.norm_eps, backend=where_faster(backend))[0])
    scores = tap("router", linear(rows, p.router, bias, backend=backend))
    routes = tap("routes", fenced(backend, partial(choose_experts, experts=experts), scores))
    return rows, routes, fenced(backend, partial(shares_of, experts=experts), scores, routes)


def _joined(x: jax.Array, added: jax.Array, config: LlamaConfig, backend: str | None) -> jax.Array:
    """Returns the residual stream plus what the experts add, in its dtype."""
    if config.axis is not None:
        return all_reduce(added, config.axis, residual=x, backend=where_faster(backend)).astype(x.dtype)
    return (x.astype(added.dtype) + added).astype(x.dtype)


@shaped
def choose_experts(scores: Float[Array, "T X"], experts: Experts) -> Int32[Array, "T k"]:
    """Returns the numbers of each token's experts, the best first. Of equal ones the lowest number comes first."""
    wide = jax.nn.softmax(scores.astype(compute_dtype(scores.dtype)), axis=1)
    return jax.lax.top_k(wide, experts.chosen)[1].astype(jnp.int32)


@shaped
def shares_of(scores: Float[Array, "T X"], routes: Int32[Array, "T k"], experts: Experts) -> Float[Array, "T k"]:
    """Returns the share of each chosen expert, in float32 at least. The shares of a token add up to 1 if the model
    normalizes them. A route that is no expert's number has none."""
    wide = jax.nn.softmax(scores.astype(compute_dtype(scores.dtype)), axis=1)
    there = (routes >= 0) & (routes < experts.count)
    shares = jnp.where(there, jnp.take_along_axis(wide, routes, axis=1, mode="clip"), 0)
    if not experts.normalize:
        return shares
    sums = total(shares)[:, None]
    return shares / jnp.where(sums == 0, 1, sums)


@shaped
def run_experts(
    p: Any,
    x: Float[Array, "T E"],
    routes: Int32[Array, "T k"],
    shares: Float[Array, "T k"],
    biases: tuple[Float[Array, " gate_up"], Float[Array, " down"]] | None = None,
    *,
    axis: MeshAxis | None = None,
    backend: str | None = None,
) -> Float[Array, "T E"]:
    """Returns the sum of each token's experts by their shares, in the shares' dtype. With `biases`, which are added to
    gates and ups and to outputs, gates and ups are clamped. With `axis` it returns a device's part of the sum."""
    (T, k), X, own = routes.shape, p.router.shape[0], p.down.shape[0] // x.shape[1]
    flat = routes.reshape(-1)
    if own < X:
        assert axis is not None, "one device has all experts"
        flat = flat - jax.lax.axis_index(axis.name) * own
    flat = jnp.where((flat >= 0) & (flat < own), flat, own)  # rows of no expert here come last, and no group has them
    place, order = places(flat)
    sizes = jnp.sum(flat[None, :] == jnp.arange(own, dtype=jnp.int32)[:, None], axis=1, dtype=jnp.int32)
    rows = jnp.take(x, order // k, axis=0)
    columns = axis if own == X else None  # of which each device has a part
    if biases is None:
        hidden = ragged_linear(rows, p.gate_up, sizes, gated=True, backend=backend)
        out = ragged_linear(hidden, p.down, sizes, axis=columns, backend=backend)
    else:
        there = flat[order] < own
        once = there if columns is None else there & (jax.lax.axis_index(columns.name) == 0)
        gate_up_bias, down_bias = (each.reshape(own, -1)[jnp.minimum(flat[order], own - 1)] for each in biases)
        gate_up = ragged_linear(rows, p.gate_up, sizes, backend=backend)
        hidden = fenced(backend, _clamped_swiglu, gate_up, gate_up_bias)
        out = ragged_linear(hidden, p.down, sizes, axis=columns, backend=backend)
        out = fenced(backend, jnp.add, out, jnp.where(once[:, None], down_bias, 0))

    def add(place: jax.Array, shares: jax.Array) -> jax.Array:
        total = jnp.zeros((place.shape[0], out.shape[1]), shares.dtype)
        for i in range(k):
            total = total + jnp.take(out, place[:, i], axis=0).astype(shares.dtype) * shares[:, i, None]
        return total

    return fenced(backend, add, *by_number(routes, place.reshape(T, k), shares))


def by_number(routes: jax.Array, *values: jax.Array) -> list[jax.Array]:
    """Returns values [T, k] of each token's experts in the order of their numbers. Equal ones keep their order."""
    columns, number = range(routes.shape[1]), jax.lax.broadcasted_iota(jnp.int32, routes.shape, 1)
    others = [routes[:, i, None] for i in columns]
    first = [jnp.where(number > i, other <= routes, other < routes) for i, other in enumerate(others)]
    rank = total(jnp.stack(first, axis=1).astype(jnp.int32))
    return [total(jnp.stack([jnp.where(rank == i, x, 0) for i in columns], axis=2)) for x in values]


def total(x: jax.Array) -> jax.Array:
    """Returns the sums of x [T, k, ...] over k, one after the other: XLA joins that with what is around it, and a
    reduction is a kernel."""
    return functools.reduce(jnp.add, [x[:, i] for i in range(x.shape[1])])


@shaped
def places(experts: Int32[Array, " rows"]) -> tuple[Int32[Array, " rows"], Int32[Array, " rows"]]:
    """Returns where each row goes if rows are sorted by expert, and which row comes to each place. Rows of one expert
    keep their order. Few rows are compared with each other: XLA makes two kernels of that, and many more of a sort."""
    R = experts.shape[0]
    number = jnp.arange(R, dtype=jnp.int32)
    if R > COMPARED:
        order = jnp.argsort(experts, stable=True).astype(jnp.int32)
        return jnp.zeros(R, jnp.int32).at[order].set(number, unique_indices=True), order
    first = (experts[None, :] < experts[:, None]) | (
        (experts[None, :] == experts[:, None]) & (number[None, :] < number[:, None])
    )
    place = jnp.sum(first, axis=1, dtype=jnp.int32)
    order = jnp.sum(jnp.where(place[:, None] == number[None, :], number[:, None], 0), axis=0, dtype=jnp.int32)
    return place, order


def _clamped_swiglu(gate_up: jax.Array, bias: jax.Array) -> jax.Array:
    """Returns gate * sigmoid(1.702 gate) * (up + 1), where gates are at most 7 and ups at most 7 from 0 (gpt-oss)."""
    gate, up = jnp.split((gate_up + bias).astype(compute_dtype(gate_up.dtype)), 2, axis=1)
    gate, up = jnp.minimum(gate, LIMIT), jnp.clip(up, -LIMIT, LIMIT)
    return (gate * jax.nn.sigmoid(ALPHA * gate) * (up + 1)).astype(gate_up.dtype)


@shaped
def ragged_linear(
    x: Float[Array, "rows inputs"],
    w: Weight,
    sizes: Int32[Array, " X"],
    *,
    gated: bool = False,
    axis: MeshAxis | None = None,
    backend: str | None = None,
) -> Float[Array, "rows outputs"]:
    """Returns the rows of group i times block i of w [X outputs, inputs], in x's dtype. Rows are sorted by group.
    gated: each block has gate's rows and as many of up's, and SiLU(x gate^T) * (x up^T) is returned. With `axis` the
    result is a device's part of the product, as linear_part's is."""
    if not isinstance(w, QuantizedWeight):
        return _multiply(x, w, sizes, gated=gated, out_dtype=x.dtype, backend=backend)
    how: dict[str, Any] = {"gated": gated, "axis": axis.name if axis and backend == DETERMINISTIC else None}
    return with_gradient(partial(_of_codes, **how, backend=backend), partial(_straight_through, **how))(x, w, sizes)


def _of_codes(
    x: jax.Array, w: QuantizedWeight, sizes: jax.Array, *, gated: bool, axis: str | None, backend: str | None
) -> jax.Array:
    how: dict[str, Any] = {"fmt": w.format, "scale": w.input_scale, "axis": axis}
    if w.format.outliers is not None:
        wide: dict[str, Any] = {"out_dtype": compute_dtype(x.dtype), "backend": backend}
        rest, large = fenced(backend, partial(part_outliers, threshold=w.format.outliers), x)
        rows = fenced(backend, partial(row_codes, **how), rest), large
        products = (_multiply(each, w, sizes, **wide) for each in rows)
        return fenced(backend, partial(_added, gated=gated, dtype=x.dtype), *products)
    if w.format.activations in KINDS:
        x = fenced(backend, partial(rounded_inputs, **how), x)
    elif w.format.row_codes is not None:
        codes = fenced(backend, partial(row_codes, **how), x)
        return _multiply(codes, w, sizes, gated=gated, out_dtype=x.dtype, backend=backend)
    return _multiply(x, w, sizes, gated=gated, out_dtype=x.dtype, backend=backend)


def _multiply(
    x: jax.Array | QuantizedRows, w: Weight, sizes: jax.Array, *, out_dtype: DTypeLike, gated: bool = False,
    backend: str | None,
) -> jax.Array:  # fmt: skip
    """Multiplies by the backend that is named, if it has this product; else as by default."""
    named = BACKENDS.get(backend or "")
    if named is None or named.supports(x, w, sizes.shape[0], gated, jnp.dtype(out_dtype)) is not None:
        backend = where_faster(backend)
    return ragged_matmul(x, w, sizes, gated=gated, out_dtype=out_dtype, backend=backend)


def _added(codes: jax.Array, large: jax.Array, *, gated: bool, dtype: Any) -> jax.Array:
    """Returns the product of codes plus that of outliers, gated if so."""
    y = codes + large
    if gated:
        gate, up = jnp.split(y, 2, axis=1)
        y = jax.nn.silu(gate) * up
    return y.astype(dtype)


def _straight_through(
    x: jax.Array, w: QuantizedWeight, sizes: jax.Array, *, gated: bool, axis: str | None
) -> jax.Array:
    """Computes ragged_linear on decoded values. Rounded activations pass gradients straight through."""
    wide = compute_dtype(x.dtype)
    rounded = rounded_inputs(x, w.format, w.input_scale, axis=axis).astype(wide)
    return ragged_matmul(rounded, decoded(w, wide), sizes, gated=gated, backend=DIFFERENTIABLE).astype(x.dtype)
