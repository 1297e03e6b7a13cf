"""Implements GPTQ (Frantar et al., arXiv 2210.17323). Columns are rounded one after another, and the remaining columns
compensate the error."""

import math
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from numpy.typing import ArrayLike
from tqdm import tqdm

from jllm.errors import QuantizationError
from jllm.model.model import Model
from jllm.model.params import Params, layer_prefix, matrices, matrix_entries, with_matrices
from jllm.quant.calibration.block_scales import search_scales
from jllm.quant.calibration.inputs import (
    DELAY,
    check_tokens,
    collect,
    embed_tokens,
    formats_of_layer,
    plan,
    rotate_gram,
    round_rest,
)
from jllm.quant.quantize import with_chosen_codes
from jllm.quant.schemes import Formats, Scheme
from pallas_kernels.formats.quantized_weights import QuantizedWeight, assemble, grouped, rotate_groups
from pallas_kernels.formats.weight_codes import code_values, fit_scales, round_codes, store_scales
from pallas_kernels.formats.weight_formats import WeightFormat

BLOCK = 128  # the most columns whose errors are collected before later columns are corrected


def gptq(
    model: Model,
    scheme: str | Scheme,
    tokens: ArrayLike,
    *,
    damping: float = 0.01,
    act_order: bool = False,
    static_groups: bool = False,
    search: bool = False,
) -> Params:
    """Returns Params quantized by `scheme`. Each weight is fitted to its inputs from the quantized layers before it.

    The order is qkv, o, gate_up, down. `tokens` are i32[B, T]. `damping` is added to the Hessian's diagonal, as a share
    of its mean. With `act_order`, columns with the largest inputs come first, and groups follow that order. The weight
    then has `columns`, and serving gathers its inputs. With `static_groups`, or one scale for each row, groups follow
    the original order. With `search`, scales of blocks of small floats have the least squared error (block_scales.py).
    With static groups they are found beforehand. Raises QuantizationError if a Hessian can't be factorized.
    """
    if not damping > 0:
        raise QuantizationError(f"damping must be above 0, not {damping}")
    formats = plan(model, scheme)
    for name, wanted in formats.items():
        check_options(name, wanted, moving=act_order and not static_groups, search=search)
    x, layers = embed_tokens(model, check_tokens(model, tokens)), []
    for i, layer in enumerate(tqdm(model.params.layers, "GPTQ", delay=DELAY, leave=False, disable=None)):
        config, chosen = model.config.one_layer(i), formats_of_layer(layer, i, formats)
        for field, fmt in chosen.items():
            gram = collect(layer, x, config, (field,))[1][field].gram
            options = {"act_order": act_order, "static_groups": static_groups, "search": search}
            w, finite = solve(matrices(layer)[field], gram, damping, fmt=fmt, **options)
            if not finite:
                name = f"{layer_prefix(i)}{matrix_entries(layer)[field].name}"
                raise QuantizationError(f"{name}: its Hessian is not positive definite; damping above {damping} may do")
            layer = with_matrices(layer, {field: w})
        x, _ = collect(layer, x, config, ())
        layers.append(layer)
    return with_chosen_codes(round_rest(replace(model.params, layers=tuple(layers)), formats))


def mr_gptq(model: Model, scheme: str | Scheme, tokens: ArrayLike, *, damping: float = 0.01) -> Params:
    """Returns Params by micro-rotated GPTQ (Egiazarian et al., arXiv 2509.23202). It is `gptq` for formats that rotate
    blocks (`mxfp4-h`, `nvfp4-h`). Scales with the least squared error are found beforehand, and columns are rounded in
    the order of their inputs. The weight keeps its columns in place. Raises QuantizationError for other formats."""
    for name, wanted in plan(model, scheme).items():
        if plain := [fmt.name for fmt in wanted if not fmt.rotated]:
            raise QuantizationError(
                f"{name}: MR-GPTQ takes formats that rotate blocks, such as mxfp4-h, not {plain[0]}"
            )
    return gptq(model, scheme, tokens, damping=damping, act_order=True, static_groups=True, search=True)


def check_options(name: str, formats: Formats, *, moving: bool, search: bool) -> None:
    """Raises QuantizationError for options that a weight's formats do not support."""
    for fmt in formats:
        if moving and fmt.rotated:
            raise QuantizationError(f"{name}: {fmt.name} rotates columns as they are: act_order needs static_groups")
        if search and fmt.scale_codes is None:
            raise QuantizationError(f"{name}: search is for blocks of small floats, such as mxfp4, not {fmt.name}")


@partial(jax.jit, static_argnames=("fmt", "act_order", "static_groups", "search"))
def solve(
    w: jax.Array,
    gram: jax.Array,
    damping: float,
    *,
    fmt: WeightFormat,
    act_order: bool = False,
    static_groups: bool = False,
    search: bool = False,
) -> tuple[QuantizedWeight, jax.Array]:
    """Returns one weight [N, K] for inputs of this Gram matrix [K, K], and a bool: whether its factor and values are
    finite.

    Columns whose inputs are always zero are rounded to nearest. Weights are corrected in gram's dtype.
    """
    K = w.shape[1]
    x, gram = rotate_groups(grouped(w.astype(gram.dtype), fmt), fmt), rotate_gram(gram, fmt)
    order = jnp.argsort(-jnp.diagonal(gram)).astype(jnp.int32) if act_order else jnp.arange(K, dtype=jnp.int32)
    factor = _inverse_factor(gram, order, damping)
    rows = jnp.take(x.reshape(x.shape[0], -1), order, axis=1)
    if static_groups or fmt.group is None or fmt.scales_together:
        scales, zeros = fit_scales(x, fmt)
        scales, stored, steps = search_scales(x, fmt) if search else store_scales(scales, fmt)
        group = order // (fmt.group or K)
        each = jnp.take(scales, group, axis=1), None if zeros is None else jnp.take(zeros, group, axis=1)
        codes = _round_columns(rows, factor, fmt, each)[0]
        codes = jnp.zeros_like(codes).at[:, order].set(codes)
        columns = None
    else:
        codes, scales, zeros = _round_columns(rows, factor, fmt, None, search)
        _, stored, steps = store_scales(scales, fmt)
        columns = order if act_order else None
    codes = _pad(codes, zeros, fmt.columns(K) - K)
    finite = jnp.isfinite(factor).all() & jnp.isfinite(w).all()
    return assemble(codes, stored, zeros, steps, w.shape, fmt, columns=columns), finite  # type: ignore[arg-type]


def _inverse_factor(gram: jax.Array, order: jax.Array, damping: float) -> jax.Array:
    """Returns U [K, K], upper triangular. U^T U is the inverse of the damped Hessian of columns in this order."""
    diagonal = jnp.diagonal(gram)
    dead = diagonal == 0  # inputs that are always zero: their columns neither correct others nor are corrected
    added = jnp.where(dead, 1, 0) + damping * jnp.mean(jnp.where(dead, 1, diagonal))
    damped = gram + jnp.diag(added.astype(gram.dtype))
    lower = jax.scipy.linalg.cho_factor(damped[order][:, order], lower=True)
    return jnp.linalg.cholesky(jax.scipy.linalg.cho_solve(lower, jnp.eye(len(order), dtype=gram.dtype)), upper=True)


def _round_columns(
    w: jax.Array,
    factor: jax.Array,
    fmt: WeightFormat,
    each: tuple[jax.Array, jax.Array | None] | None,
    search: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns the codes [N', K] of w's columns, rounded from left to right, and their scales and zeros. Scales and
    zeros are [N', groups], found for each group when it is reached, from columns as corrected by then. If those of
    `each` column [N', K] are given, they are returned instead."""
    N, K = w.shape
    size = fmt.group if each is None and fmt.group else math.gcd(K, BLOCK)

    def block(b: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        w, codes, scales, zeros = carry
        start = b * size
        part = jax.lax.dynamic_slice(w, (0, start), (N, size))
        if each is None:
            alone = part[:, None, :]
            found = (search_scales(alone, fmt)[0], None) if search else fit_scales(alone, fmt)
            scales, zeros = jax.tree.map(
                lambda x, new: jax.lax.dynamic_update_slice(x, new, (0, b)), (scales, zeros), found
            )
            s, z = jax.tree.map(lambda x: jnp.broadcast_to(x, (N, size)), found)
        else:
            s, z = jax.tree.map(lambda x: jax.lax.dynamic_slice(x, (0, start), (N, size)), (scales, zeros))
        rows = jax.lax.dynamic_slice(factor, (start, 0), (size, K))
        inner = jax.lax.dynamic_slice(rows, (0, start), (size, size))
        new, errors = _round_block(part, inner, s, z, fmt)
        # Columns up to this block's end are done: their new values are never read.
        w = w - jnp.matmul(errors, rows, precision="highest")
        return w, jax.lax.dynamic_update_slice(codes, new, (0, start)), scales, zeros

    codes = jnp.zeros((N, K), fmt.code_dtype)
    if each is None:
        blank = jnp.ones((N, K // size), w.dtype)
        each_or_group: tuple[jax.Array, jax.Array | None] = blank, jnp.zeros_like(blank) if fmt.zero_point else None
    else:
        each_or_group = each
    _, codes, scales, zeros = jax.lax.fori_loop(0, K // size, block, (w, codes, *each_or_group))
    return codes, scales, zeros


def _round_block(
    w: jax.Array, factor: jax.Array, scales: jax.Array, zeros: jax.Array | None, fmt: WeightFormat
) -> tuple[jax.Array, jax.Array]:
    """Returns the codes of a block's columns w [N', B], and their errors [N', B] over the factor's diagonal."""

    def column(i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        w, codes, errors = carry
        x, s = w[:, i], scales[:, i]
        z = None if zeros is None else zeros[:, i]
        code = round_codes(x / s, z, fmt)
        error = (x - code_values(code, z, fmt, x.dtype) * s) / factor[i, i]
        return w - error[:, None] * factor[i][None, :], codes.at[:, i].set(code), errors.at[:, i].set(error)

    codes = jnp.zeros(w.shape, fmt.code_dtype)
    _, codes, errors = jax.lax.fori_loop(0, w.shape[1], column, (w, codes, jnp.zeros_like(w)))
    return codes, errors


def _pad(codes: jax.Array, zeros: jax.Array | None, columns: int) -> jax.Array:
    """Returns codes with `columns` more, which stand for zero. Only weights with one scale for each row need them."""
    if not columns:
        return codes
    blank = jnp.zeros((codes.shape[0], 1), codes.dtype) if zeros is None else zeros.astype(codes.dtype)
    return jnp.concatenate([codes, jnp.broadcast_to(blank, (codes.shape[0], columns))], axis=1)
