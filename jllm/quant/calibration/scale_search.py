"""Implements AWQ (Lin et al., arXiv 2306.00978). A grid search finds scales of input channels, and clipping, that
change the layer's outputs on calibration tokens least."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from numpy.typing import ArrayLike
from tqdm import tqdm

from jllm.config import LlamaConfig
from jllm.model.model import Model
from jllm.model.params import LayerParams, Params, matrices, with_matrices
from jllm.quant.calibration.inputs import (
    DELAY,
    InputStats,
    check_tokens,
    collect,
    embed_tokens,
    formats_of_layer,
    plan,
    rotate_gram,
    round_rest,
)
from jllm.quant.calibration.migration import migrate, tie_heads
from jllm.quant.quantize import with_chosen_codes
from jllm.quant.schemes import Scheme
from pallas_kernels.formats.quantized_weights import (
    QuantizedWeight,
    decode,
    encode,
    encode_with,
    grouped,
    rotate_groups,
)
from pallas_kernels.formats.weight_codes import code_values, fit_scales, round_codes
from pallas_kernels.formats.weight_formats import WeightFormat

GRID = 20  # exponents 0, 1/20, .. 19/20 of a channel's mean magnitude, as in the authors' code
SHRINK = tuple(1 - i / GRID for i in range(GRID // 2))  # factors of a group's range: 1, 0.95, .. 0.55


def awq(model: Model, scheme: str | Scheme, tokens: ArrayLike, *, clip: bool = True) -> Params:
    """Returns Params quantized by `scheme` after scales were moved into the norms and rows before each linear layer.

    With `clip`, the ranges of groups shrink where that reduces the error, except for queries and keys. `tokens` are
    i32[B, T]. A layer sees the outputs of the unquantized layers before it. Errors are tr(D G D^T): D is the weight's
    rounding error and G the Gram matrix of its inputs. This is exactly the squared error of its outputs.
    """
    formats = plan(model, scheme)
    x, layers = embed_tokens(model, check_tokens(model, tokens)), []
    for i, layer in enumerate(tqdm(model.params.layers, "AWQ", delay=DELAY, leave=False, disable=None)):
        chosen = formats_of_layer(layer, i, formats)
        fields = tuple(chosen)
        x, stats = collect(layer, x, model.config.one_layer(i), fields)
        for field in fields:
            s = search_scales(layer, model.config, field, stats[field], chosen[field])
            layer, stats[field] = migrate(layer, model.config, field, s), stats[field].scaled(s)
        weights: dict[str, QuantizedWeight] = {}
        for field in fields:
            gram, w = stats[field].gram, matrices(layer)[field]
            exempt = model.config.head_dim * (model.config.num_heads + model.config.num_kv_heads) * (field == "qkv")
            weights[field] = round_clipped(w, gram, chosen[field], exempt) if clip else _encode(w, chosen[field])
        layers.append(with_matrices(layer, weights))
    return with_chosen_codes(round_rest(replace(model.params, layers=tuple(layers)), formats))


def search_scales(
    layer: LayerParams, config: LlamaConfig, field: str, stats: InputStats, fmt: WeightFormat
) -> jax.Array:
    """Returns scales [K]: mean|x|^p with the exponent p of the grid that changes the outputs of `field` least."""
    mean = tie_heads(stats.mean_abs, config) if field == "o" else stats.mean_abs
    scales = jnp.stack([_powers(mean, p / GRID) for p in range(GRID)])
    errors = _errors(matrices(layer)[field], stats.gram, scales, fmt)
    return scales[jnp.argmin(errors)]


def _powers(mean: jax.Array, exponent: float) -> jax.Array:
    """Returns powers of mean magnitudes, centered around one as the authors do. A floor keeps channels without inputs
    near the others."""
    s = jnp.maximum(mean**exponent, 1e-4)
    return s / jnp.sqrt(s.max() * s.min())


@partial(jax.jit, static_argnames="fmt")
def _errors(w: jax.Array, gram: jax.Array, scales: jax.Array, fmt: WeightFormat) -> jax.Array:
    """Returns the squared error of the outputs for each of scales [grid, K]."""
    wide = w.astype(gram.dtype)

    def error(s: jax.Array) -> jax.Array:
        scaled = (w * s[None, :].astype(w.dtype)).astype(w.dtype)
        return output_error(decode(encode(scaled, fmt), gram.dtype) / s[None, :] - wide, gram)

    return jax.lax.map(error, scales)


def output_error(difference: jax.Array, gram: jax.Array) -> jax.Array:
    """Returns the sum over tokens of |D x|^2, for D [N, K] and the inputs' Gram matrix [K, K]."""
    return jnp.sum(jnp.matmul(difference, gram, precision="highest") * difference)


@partial(jax.jit, static_argnames=("fmt", "exempt"))
def round_clipped(w: jax.Array, gram: jax.Array, fmt: WeightFormat, exempt: int = 0) -> QuantizedWeight:
    """Returns w [N, K] rounded. Each group has the shrunken range that changes the outputs least if other groups stay.
    The first `exempt` rows keep their ranges: the authors find that queries and keys suffer."""
    x = rotate_groups(grouped(w, fmt), fmt)
    N, groups, size = x.shape
    padded = jnp.pad(rotate_gram(gram.astype(x.dtype), fmt), (0, groups * size - gram.shape[0]))
    blocks = padded.reshape(groups, size, groups, size)[jnp.arange(groups), :, jnp.arange(groups)]  # [G, size, size]
    fixed = (jnp.arange(N) < exempt)[:, None]
    best: tuple[jax.Array, jax.Array, jax.Array | None] | None = None
    for shrink in SHRINK:
        scales, zeros = fit_scales(x * shrink, fmt)
        wide = None if zeros is None else zeros[..., None]
        codes = round_codes(x / scales[..., None], wide, fmt)
        difference = code_values(codes, wide, fmt, x.dtype) * scales[..., None] - x
        errors = jnp.einsum("ngi,gij,ngj->ng", difference, blocks, difference, precision="highest")
        if best is None:
            best = errors, scales, zeros
            continue
        better = (errors < best[0]) & ~fixed
        kept = None if zeros is None or best[2] is None else jnp.where(better, zeros, best[2])
        best = jnp.where(better, errors, best[0]), jnp.where(better, scales, best[1]), kept
    assert best is not None
    return encode_with(w, best[1], best[2], fmt)


_encode = partial(jax.jit, static_argnums=1)(encode)
