"""Collects statistics of linear layers' inputs on calibration tokens, layer by layer, by the model's own forward
pass."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from numpy.typing import ArrayLike

from jllm.config import LlamaConfig
from jllm.errors import QuantizationError
from jllm.model.backbone import Packed, tapped_backbone
from jllm.model.linear import embed
from jllm.model.model import Model
from jllm.model.params import LayerParams, Params, Weight, layer_prefix, matrices, matrix_entries
from jllm.quant.quantize import check_shapes, formats_by_weight, map_weights, quantize_weight, weight_formats
from jllm.quant.schemes import Formats, Scheme, choose_format
from pallas_kernels.formats.numerics import compute_dtype
from pallas_kernels.formats.quantized_weights import QuantizedWeight, rotate_groups
from pallas_kernels.formats.weight_formats import WeightFormat

DELAY = 2  # seconds after which a progress bar shows


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class InputStats:
    """Holds statistics of the rows x [tokens, K] that a linear layer reads, in float32 at least."""

    tokens: jax.Array  # i32
    absmax: jax.Array  # [K]
    mean_abs: jax.Array  # [K]
    gram: jax.Array | None  # [K, K], sum of x x^T over tokens: half of GPTQ's Hessian. None if not wanted

    def scaled(self, s: jax.Array) -> "InputStats":
        """Returns the statistics of x / s, s [K]."""
        gram = None if self.gram is None else self.gram / (s[:, None] * s[None, :])
        return replace(self, absmax=self.absmax / s, mean_abs=self.mean_abs / s, gram=gram)


def check_tokens(model: Model, tokens: ArrayLike) -> np.ndarray:
    """Returns calibration tokens as i32[B, T]. Raises QuantizationError for other arrays, and for tokens outside the
    model's vocabulary or context."""
    ids, size = np.asarray(tokens), model.config.vocab_size
    if ids.ndim != 2 or not ids.size or not np.issubdtype(ids.dtype, np.integer):
        raise QuantizationError(f"calibration tokens must be integers [rows, length], not {ids.dtype}{list(ids.shape)}")
    if ids.min() < 0 or ids.max() >= size:
        raise QuantizationError(f"calibration tokens must be in [0, {size}), the model's vocabulary")
    if ids.shape[1] > model.config.context:
        raise QuantizationError(f"calibration rows of {ids.shape[1]} tokens, but the context is {model.config.context}")
    return ids.astype(np.int32)


def plan(model: Model, scheme: str | Scheme) -> dict[str, Formats]:
    """Returns the formats by weight. Raises QuantizationError if they do not fit, or if a weight is quantized
    already."""
    if quantized := weight_formats(model.params):
        name, fmt = next(iter(quantized.items()))
        raise QuantizationError(f"{name} is quantized already ({fmt.name}); calibrate the 16-bit weights instead")
    formats = formats_by_weight(model.params, scheme)
    check_shapes(model.params, formats)
    return formats


def formats_of_layer(layer: LayerParams, i: int, formats: dict[str, Formats]) -> dict[str, WeightFormat]:
    """Returns field -> its format, for the fields that are quantized, in order of computation."""
    names = {field: f"{layer_prefix(i)}{entry.name}" for field, entry in matrix_entries(layer).items()}
    weights = matrices(layer)
    return {
        field: choose_format(name, weights[field].shape, formats[name])
        for field, name in names.items()
        if formats.get(name)
    }


def round_rest(params: Params, formats: dict[str, Formats]) -> Params:
    """Returns params in which the remaining weights of the scheme are rounded."""

    def convert(name: str, leaf: Weight, wanted: Formats) -> Weight:
        return quantize_weight(name, leaf, wanted) if wanted and not isinstance(leaf, QuantizedWeight) else leaf

    return map_weights(convert, params, formats)


def rotate_gram(gram: jax.Array, fmt: WeightFormat) -> jax.Array:
    """Returns the Gram matrix [K, K] of inputs after the rotation of a weight's format."""
    return rotate_groups(rotate_groups(gram, fmt).T, fmt)


def embed_tokens(model: Model, tokens: np.ndarray) -> jax.Array:
    """Returns the first layer's inputs [B, T, E]."""
    x = embed(model.params.embed, jnp.asarray(tokens), model.params.dtype)
    return x * jnp.asarray(model.config.embedding_multiplier, x.dtype)


def run_layer(
    layer: LayerParams, x: jax.Array, config: LlamaConfig, taps: tuple[str, ...] = ()
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Runs one layer (`config` is one_layer's) on one sequence [T, E]. Returns its output and the inputs of linear
    layers that taps name."""
    T, E = x.shape
    rows = jnp.arange(T, dtype=jnp.int32)
    alone = Params(embed=x, layers=(layer,), norm=jnp.ones(E, x.dtype), head=None)  # its tokens are 0 .. T - 1
    batch = Packed(rows, rows, jnp.zeros_like(rows))
    names = tuple(f"layers.0.{name}" for name in taps)
    y, _, found = tapped_backbone(alone, config, batch, None, names)
    return y, {name: found[f"layers.0.{name}"] for name in taps}


@partial(jax.jit, static_argnames=("config", "fields", "gram"))
def collect(
    layer: LayerParams, x: jax.Array, config: LlamaConfig, fields: tuple[str, ...], *, gram: bool = True
) -> tuple[jax.Array, dict[str, InputStats]]:
    """Runs a layer on x [B, T, E]. Returns its outputs [B, T, E], and statistics of the inputs of its `fields`."""
    taps = _taps(layer, fields)

    def one(stats: dict[str, InputStats], row: jax.Array) -> tuple[dict[str, InputStats], jax.Array]:
        y, found = run_layer(layer, row, config, tuple(taps.values()))
        return {field: _add(stats[field], found[taps[field]]) for field in fields}, y

    dtype = compute_dtype(x.dtype)
    empty = {field: _empty(matrices(layer)[field].shape[1], dtype, gram) for field in fields}
    stats, out = jax.lax.scan(one, empty, x)
    count = x.shape[0] * x.shape[1]
    return out, {field: replace(s, mean_abs=s.mean_abs / count) for field, s in stats.items()}


def _taps(layer: LayerParams, fields: Sequence[str]) -> dict[str, str]:
    """Returns field -> the tap of its input. Raises QuantizationError if the layer's blocks have no such tap."""
    entries = matrix_entries(layer)
    if unread := [field for field in fields if entries[field].reads is None]:
        raise QuantizationError(f"{entries[unread[0]].name}: its inputs have no tap, so it cannot be calibrated")
    return {field: entry.reads for field, entry in entries.items() if field in fields and entry.reads is not None}


def layer_statistics(
    model: Model, tokens: ArrayLike, fields: Sequence[str] | None = None, *, gram: bool = True
) -> Iterator[dict[str, InputStats]]:
    """Yields each layer's statistics by field: "qkv", "o", "gate_up", "down", or only these `fields`. `tokens` are
    i32[B, T]."""
    x = embed_tokens(model, check_tokens(model, tokens))
    for i, layer in enumerate(model.params.layers):
        chosen = tuple(matrix_entries(layer) if fields is None else fields)
        x, stats = collect(layer, x, model.config.one_layer(i), chosen, gram=gram)
        yield stats


def _empty(size: int, dtype: DTypeLike, gram: bool) -> InputStats:
    zeros = jnp.zeros(size, dtype)
    return InputStats(jnp.zeros((), jnp.int32), zeros, zeros, jnp.zeros((size, size), dtype) if gram else None)


def _add(stats: InputStats, rows: jax.Array) -> InputStats:
    """Returns the statistics with rows [T, K] added. mean_abs is a sum here."""
    x = rows.astype(stats.absmax.dtype)
    magnitude = jnp.abs(x)
    gram = None if stats.gram is None else stats.gram + jnp.matmul(x.T, x, precision="highest")
    return InputStats(
        stats.tokens + rows.shape[0],
        jnp.maximum(stats.absmax, magnitude.max(axis=0)),
        stats.mean_abs + magnitude.sum(axis=0),
        gram,
    )
