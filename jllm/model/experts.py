"""Computes the MLP block of a Mixture of Experts (Shazeer et al., arXiv 1701.06538; Mixtral, arXiv 2401.04088).

A router gives each expert a share of each token. The k experts with the largest shares compute the token, and their
outputs are added by share. Rows are sorted by expert, so that each expert's weight meets all of its rows at once. The
sum over a token's experts goes in the order of their numbers, in float32 at least.

On a mesh all devices have all rows and route them alike. Each one has some experts, or some columns of each expert. It
adds the outputs of its own, and one exchange sums what the devices have added.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jllm.config import LlamaConfig
from jllm.model.linear import decoded, linear, linear_part, with_gradient
from jllm.model.mlp import mlp_block
from jllm.model.params import BiasedExpertsParams, ExpertsParams, SharedExpertParams, Weight
from jllm.model.shapes import Array, Float, Int32, shaped
from jllm.model.taps import Tap
from jllm.model.weight_inputs import part_outliers, rounded_inputs, row_codes, rows_kind
from pallas_kernels.all_reduce import MeshAxis, all_reduce
from pallas_kernels.backends import DETERMINISTIC, DIFFERENTIABLE, where_faster
from pallas_kernels.formats.block_floats import KINDS
from pallas_kernels.formats.numerics import compute_dtype
from pallas_kernels.formats.quantized_rows import QuantizedRows
from pallas_kernels.formats.quantized_weights import QuantizedWeight
from pallas_kernels.norm_quant import norm_quant
from pallas_kernels.one_order import fenced
from pallas_kernels.ragged_matmul import ragged_matmul
from pallas_kernels.ragged_matmul.config import block_rows
from pallas_kernels.route import Here, Sorted, route, sort_rows
from pallas_kernels.row_groups import Schedule
from pallas_kernels.silu_mul_quant import silu_mul_quant

ALPHA, LIMIT = 1.702, 7.0  # of gpt-oss's gates


class Groups(NamedTuple):
    """Says which rows have which weight."""

    sizes: jax.Array  # i32[X]
    schedule: Schedule | None


@mlp_block.register
@shaped
def _(
    p: ExpertsParams, x: Float[Array, "T E"], *, config: LlamaConfig, backend: str | None, tap: Tap
) -> Float[Array, "T E"]:
    _, made = _routed(p, x, None, config, backend, tap)
    return _joined(x, _compute(p, made, None, config.axis, backend), config, backend)


@mlp_block.register
@shaped
def _(
    p: SharedExpertParams, x: Float[Array, "T E"], *, config: LlamaConfig, backend: str | None, tap: Tap
) -> Float[Array, "T E"]:
    rows, made = _routed(p, x, None, config, backend, tap)
    added = _compute(p, made, None, config.axis, backend)
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
    _, made = _routed(p, x, p.router_bias, config, backend, tap)
    added = _compute(p, made, (p.gate_up_bias, p.down_bias), config.axis, backend)
    return _joined(x, added, config, backend)


def _routed(
    p: Any, x: jax.Array, bias: jax.Array | None, config: LlamaConfig, backend: str | None, tap: Tap
) -> tuple[jax.Array, Sorted]:
    """Returns the normed rows, and what comes of them by expert."""
    experts = config.experts
    assert experts is not None, "a config whose layers have experts describes them"
    rows = tap("mlp_norm", norm_quant(x, p.norm, eps=config.norm_eps, backend=where_faster(backend))[0])
    scores = tap("router", linear(rows, p.router, bias, backend=backend))
    here, gated = _experts_here(p, x, config.axis), not isinstance(p, BiasedExpertsParams)
    how: dict[str, Any] = {"chosen": experts.chosen, "normalize": experts.normalize, "here": here, "backend": backend}
    rows_here = len(x) * experts.chosen
    how["block"], how["apart"] = block_rows(rows_here, p.gate_up, here.experts, gated, experts.chosen, backend)
    return rows, route(scores, rows, seen=partial(tap, "routes"), **how)


def _experts_here(p: Any, x: jax.Array, axis: MeshAxis | None) -> Here:
    """Returns which experts a device has."""
    own = p.down.shape[0] // x.shape[1]
    if own == p.router.shape[0]:
        return Here(own)
    assert axis is not None, "one device has all experts"
    return Here(own, jax.lax.axis_index(axis.name) * own)


def _joined(x: jax.Array, added: jax.Array, config: LlamaConfig, backend: str | None) -> jax.Array:
    """Returns the residual stream plus what the experts add, in its dtype."""
    if config.axis is not None:
        return all_reduce(added, config.axis, residual=x, backend=where_faster(backend)).astype(x.dtype)
    return (x.astype(added.dtype) + added).astype(x.dtype)


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
    made = sort_rows(x, routes, shares, _experts_here(p, x, axis))
    return _compute(p, made, biases, axis, backend)


def _compute(
    p: Any, made: Sorted, biases: tuple[jax.Array, jax.Array] | None, axis: MeshAxis | None, backend: str | None
) -> jax.Array:
    """Returns what run_experts does, of rows that are sorted."""
    if not len(made.rows):
        return jnp.zeros(made.rows.shape, made.shares.dtype)
    own = made.sizes.shape[0]
    columns = axis if own == p.router.shape[0] else None  # of which each device has a part
    product = partial(ragged_linear, sizes=made.sizes, schedule=made.schedule, backend=backend)
    if biases is None:
        out = product(product(made.rows, p.gate_up, gated=True), p.down, axis=columns)
    else:
        there = made.experts < own
        once = there if columns is None else there & (jax.lax.axis_index(columns.name) == 0)
        gate_up_bias, down_bias = (each.reshape(own, -1)[jnp.minimum(made.experts, own - 1)] for each in biases)
        hidden = fenced(backend, _clamped_swiglu, product(made.rows, p.gate_up), gate_up_bias)
        out = product(hidden, p.down, axis=columns)
        out = fenced(backend, jnp.add, out, jnp.where(once[:, None], down_bias, 0))

    def add(places: jax.Array, shares: jax.Array) -> jax.Array:
        total = jnp.zeros((places.shape[0], out.shape[1]), shares.dtype)
        for i in range(places.shape[1]):
            total = total + jnp.take(out, places[:, i], axis=0).astype(shares.dtype) * shares[:, i, None]
        return total

    return fenced(backend, add, made.places, made.shares)


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
    schedule: Schedule | None = None,
    axis: MeshAxis | None = None,
    backend: str | None = None,
) -> Float[Array, "rows outputs"]:
    """Returns the rows of group i times block i of w [X outputs, inputs], in x's dtype. Rows are sorted by group.
    gated: each block has gate's rows and as many of up's, and SiLU(x gate^T) * (x up^T) is returned. With `axis` the
    result is a device's part of the product, as linear_part's is. schedule: of sizes, for kernels."""
    groups = Groups(sizes, schedule)
    if not isinstance(w, QuantizedWeight):
        return _multiply(x, w, groups, gated=gated, out_dtype=x.dtype, backend=backend)
    how: dict[str, Any] = {"gated": gated, "axis": axis.name if axis and backend == DETERMINISTIC else None}
    return with_gradient(partial(_of_codes, **how, backend=backend), partial(_straight_through, **how))(x, w, groups)


def _of_codes(
    x: jax.Array, w: QuantizedWeight, groups: Groups, *, gated: bool, axis: str | None, backend: str | None
) -> jax.Array:
    how: dict[str, Any] = {"fmt": w.format, "scale": w.input_scale, "axis": axis}
    if w.format.outliers is not None:
        wide: dict[str, Any] = {"out_dtype": compute_dtype(x.dtype), "backend": backend}
        rest, large = fenced(backend, partial(part_outliers, threshold=w.format.outliers), x)
        rows = fenced(backend, partial(row_codes, **how), rest), large
        products = (_multiply(each, w, groups, **wide) for each in rows)
        return fenced(backend, partial(_added, gated=gated, dtype=x.dtype), *products)
    if w.format.activations in KINDS:
        x = fenced(backend, partial(rounded_inputs, **how), x)
    elif w.format.row_codes is not None:
        if axis is None and (kind := rows_kind(w)) is not None:  # one kernel, with the same bits
            codes = norm_quant(x, None, eps=0.0, kind=kind, backend=where_faster(backend))[0]
        else:
            codes = fenced(backend, partial(row_codes, **how), x)
        return _multiply(codes, w, groups, gated=gated, out_dtype=x.dtype, backend=backend)
    return _multiply(x, w, groups, gated=gated, out_dtype=x.dtype, backend=backend)


def _multiply(
    x: jax.Array | QuantizedRows, w: Weight, groups: Groups, *, out_dtype: DTypeLike, gated: bool = False,
    backend: str | None,
) -> jax.Array:  # fmt: skip
    """Multiplies rows of groups by the kernels of the named backend's devices, if they have this product."""
    how: dict[str, Any] = {"gated": gated, "schedule": groups.schedule, "out_dtype": out_dtype}
    return ragged_matmul(x, w, groups.sizes, **how, backend=where_faster(backend))


def _added(codes: jax.Array, large: jax.Array, *, gated: bool, dtype: Any) -> jax.Array:
    """Returns the product of codes plus that of outliers, gated if so."""
    y = codes + large
    if gated:
        gate, up = jnp.split(y, 2, axis=1)
        y = jax.nn.silu(gate) * up
    return y.astype(dtype)


def _straight_through(x: jax.Array, w: QuantizedWeight, groups: Groups, *, gated: bool, axis: str | None) -> jax.Array:
    """Computes ragged_linear on decoded values. Rounded activations pass gradients straight through."""
    wide = compute_dtype(x.dtype)
    rounded = rounded_inputs(x, w.format, w.input_scale, axis=axis).astype(wide)
    y = ragged_matmul(rounded, decoded(w, wide), groups.sizes, gated=gated, backend=DIFFERENTIABLE)
    return y.astype(x.dtype)
