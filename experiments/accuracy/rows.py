"""Holds the measurements of experiments.quant_accuracy. Each is a function that yields flat rows.

Part "scheme" compares a scheme and a KV format with the model as loaded. Part "layer" quantizes one layer after the
other.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from experiments.accuracy.own import Quantizer, is_own, own_kv
from jllm.analysis.activations import compare_layers
from jllm.analysis.evaluate import Evaluation, Part, Recorded, evaluate
from jllm.analysis.layer_divergence import divergence_by_layer
from jllm.analysis.protocols import find_protocol
from jllm.model.cache import KVCache, cache_bytes, least_page, make_cache, parse_kv_cache
from jllm.model.model import Model
from jllm.model.params import Params, linears
from jllm.quant.rotation import quantize_model, rotate
from jllm.quant.schemes import Scheme, find_scheme
from pallas_kernels.formats import quantized_weights
from pallas_kernels.formats.kv_formats import KVFormat, decode, encode
from pallas_kernels.formats.quantized_weights import QuantizedWeight
from pallas_kernels.formats.weight_formats import WeightFormat

Row = dict[str, Any]
AnyScheme = str | Scheme | Quantizer
PLAIN_KV = "model"  # K and V, or one of them, in the model's own dtype
DTYPE_NAMES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64"}
INTERVALS = ("perplexity", "added", "kl", "top1")
PAGE = 16  # tokens, unless the KV format needs more
WIDE_BYTES = 2  # of an unquantized weight or value: 16 bits, even if a CPU widens it


def kv_taken(kv: str, dtype: Any) -> KVCache | None:
    """Returns jllm's option for a KV format of the sweep, or for a user's own."""
    return own_kv(kv) if is_own(kv) else kv_name(kv, dtype)


def kv_name(kv: str, dtype: Any) -> str | None:
    """Returns jllm's name for a KV format of the sweep. "model" and "k=int8-g8,v=model" mean the model's dtype."""
    if kv == PLAIN_KV:
        return None
    own = DTYPE_NAMES[np.dtype(dtype).name]
    return ",".join(f"{part[:2]}{own}" if part[2:] == PLAIN_KV else part for part in kv.split(","))


def default_kv(head_dim: int) -> list[str]:
    """Returns the default formats. They have groups of 8, of 32 and of a head, for K and V together and apart. int4 is
    also rotated and with zero points. K per channel comes with 2-bit V too."""
    groups = dict.fromkeys(group for group in (8, 32, head_dim) if head_dim % group == 0)
    both = ["fp8", *(f"{codes}-g{group}" for codes in ("int8", "int4") for group in groups)]
    apart = [f"k={k}-g8,v={v}-g8" for k, v in (("int8", "int4"), ("int4", "int8"))]
    alone = [
        name for codes in ("int8", "int4") for name in (f"k={codes}-g8,v={PLAIN_KV}", f"k={PLAIN_KV},v={codes}-g8")
    ]
    per_channel = ["kivi4-g32", "kivi2-g32", "int2-g32-zp"] if head_dim % 32 == 0 else []
    return [*both, f"int4-g{head_dim}-h", f"int4-g{head_dim}-zp", *per_channel, *alone, *apart]


# Part "scheme"


def scheme_found(
    model: Model,
    texts: Sequence[Any],
    protocol: str,
    reference: Model | Recorded,
    scheme: AnyScheme,
    kv: str,
    *,
    backend: str | None = None,
) -> tuple[Row, Evaluation]:
    """Returns a row of accuracy and bytes, with its evaluation."""
    quantized = rounded_by(scheme, model)
    name = kv_taken(kv, model.params.dtype)
    options: dict[str, Any] = {"backend": backend, "page_size": max(PAGE, least_page(name, model.config))}
    found = evaluate(quantized, texts, protocol, reference=reference, kv_cache=name, **options)
    of_own = scheme.bytes_per_weight if isinstance(scheme, Quantizer) else None
    row = {
        "part": "scheme",
        "scheme": scheme_name(scheme),
        "kv": kv,
        **accuracy(found),
        "bytes_per_weight": round(of_own or bytes_per_weight(quantized.params), 4),
        "bytes_per_kv": round(bytes_per_kv(model, kv), 4),
    }
    return row, found


def rounded_by(scheme: AnyScheme, model: Model) -> Model:
    return scheme.of(model) if isinstance(scheme, Quantizer) else quantize_model(model, scheme)


def scheme_name(scheme: AnyScheme) -> str:
    return scheme.name if isinstance(scheme, Quantizer) else find_scheme(scheme).name


def by_part(found: Evaluation) -> Row:
    """Returns the sums of each document or window, which make rows comparable."""
    columns = {name: [getattr(part, name) for part in found.parts] for name in Part.__dataclass_fields__}
    return {
        f"part_{name}": [float(f"{x:.7g}") if isinstance(x, float) else x for x in values]
        for name, values in columns.items()
        if values[0] is not None
    }


def evaluation_of(row: Row) -> Evaluation:
    """Returns the evaluation of a row with `by_part`."""
    protocol = replace(find_protocol(row["protocol"]), context=row["context"], stride=row["stride"])
    names = [name for name in Part.__dataclass_fields__ if f"part_{name}" in row]
    parts = [dict(zip(names, values)) for values in zip(*(row[f"part_{name}"] for name in names))]
    return Evaluation(protocol, tuple(Part(**{"words": None} | part) for part in parts))


def difference(row: Row, other: Row) -> Row:
    """Returns the comparison of two rows on the same documents: a ratio for perplexity, differences for the rest."""
    mine, theirs = evaluation_of(row), evaluation_of(other)
    found: Row = {"part": "pair", **{key: row[key] for key in ("scheme", "kv", "protocol", "parts")}}
    found |= {"over_scheme": other["scheme"], "over_kv": other["kv"]}
    for name in ("perplexity", "kl", "top1"):
        a, b = mine.measure(name), theirs.measure(name)
        relative = name == "perplexity"
        found[name] = rounded(a / b - 1 if relative else a - b)
        if len(mine.parts) > 1:
            found[f"{name}_95"] = [rounded(x - relative) for x in mine.interval(name, over=theirs)]
    return found


def accuracy(found: Evaluation) -> Row:
    """Returns an evaluation's measures, with intervals if it has several parts."""
    row = found.as_row()
    row |= {"perplexity": round(found.perplexity, 4), "top1": round(found.top1, 4)}
    row |= {name: rounded(row[name]) for name in ("added", "kl")}
    if len(found.parts) > 1:
        row |= {f"{name}_95": [rounded(x) for x in found.interval(name)] for name in INTERVALS}
    return row


def bytes_per_weight(params: Params) -> float:
    """Returns the bytes per weight of the linear layers. An unquantized weight counts as 2 bytes."""
    stored = weights = 0
    for leaf in linears(params).values():
        size = leaf.shape[0] * leaf.shape[1]
        quantized = isinstance(leaf, QuantizedWeight)
        arrays = jax.tree.leaves(leaf) if quantized else []
        stored += sum(array.size * array.dtype.itemsize for array in arrays) if quantized else WIDE_BYTES * size
        weights += size
    return stored / weights


def bytes_per_kv(model: Model, kv: str) -> float:
    """Returns the bytes per value of K and V. An unquantized value counts as 2 bytes."""
    c, tokens = model.config, PAGE
    name = own_kv(kv) if is_own(kv) else kv.replace(PLAIN_KV, "bf16")
    formats = parse_kv_cache(name, c, model.params.dtype)
    page = jax.eval_shape(lambda: make_cache(c, 1, tokens, formats))
    return cache_bytes(page) / (2 * c.num_layers * c.num_kv_heads * c.head_dim * tokens)


# Part "layer"


def layer_rows(
    model: Model, reference: Model, windows: np.ndarray, scheme: AnyScheme, *, backend: str | None = None
) -> Iterator[Row]:
    """Yields a row per layer, from 1. It has the stream's signal-to-noise ratio after it if all layers are quantized.
    It has the result's divergence if only this one is. windows: i32[W, T]; there is no cache."""
    quantized = rounded_by(scheme, model)
    which = None if isinstance(scheme, Quantizer) else find_scheme(scheme).rotate
    reference = reference if which is None else rotate(reference, which)  # rotates its stream alike
    alone = [divergence_by_layer(quantized, reference, window, backend=backend) for window in windows]
    errors = [compare_layers(quantized, reference, window, backend=backend)[1:] for window in windows]
    for i, kl in enumerate(np.mean(alone, axis=0).tolist()):
        noise = np.mean([10 ** (-of_window[i].snr_db / 10) for of_window in errors])
        snr = -10 * math.log10(noise) if noise > 0 else None
        yield {
            "part": "layer", "scheme": scheme_name(scheme), "layer": i + 1, "tokens": windows.size,
            "kl": rounded(kl), "snr_db": None if snr is None else round(snr, 2),
        }  # fmt: skip


# Rounding errors, for claims


def weight_error(params: Params, fmt: WeightFormat) -> tuple[float, float]:
    """Returns the bytes per weight of the linear layers, and their relative error together."""
    stored = weights = 0
    pairs = []
    for leaf in linears(params).values():
        encoded = _encode_weight(leaf, fmt)
        stored += sum(array.nbytes for array in jax.tree.leaves(encoded[0]))
        weights += leaf.size
        pairs.append(encoded[1:])
    return stored / weights, _relative(pairs)


def kv_error(values: Iterable[jax.Array], fmt: KVFormat) -> tuple[float, float]:
    """Returns the bytes per value [.., D], and the relative error of all values together."""
    found = [_encode_kv(x, fmt) for x in values]
    stored = sum(array.nbytes for arrays, _, _ in found for array in jax.tree.leaves(arrays))
    count = sum(x.size for x in values)
    return stored / count, _relative([(noise, signal) for _, noise, signal in found])


@jax.jit(static_argnums=1)
def _encode_weight(w: jax.Array, fmt: WeightFormat) -> tuple[QuantizedWeight, jax.Array, jax.Array]:
    """Returns the encoded weight, and the squared norms of the error and of w."""
    encoded = quantized_weights.encode(w, fmt)
    return encoded, *_norms(w, quantized_weights.decode(encoded, w.dtype))


@jax.jit(static_argnums=1)
def _encode_kv(x: jax.Array, fmt: KVFormat) -> tuple[Any, jax.Array, jax.Array]:
    values, scales = encode(x, fmt)
    return (values, scales), *_norms(x, decode(values, scales, fmt, x.dtype))


def _norms(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    wide = jax.numpy.promote_types(x.dtype, "float32")
    x, y = x.astype(wide), y.astype(wide)
    return jax.numpy.sum((x - y) ** 2), jax.numpy.sum(x * x)


def _relative(pairs: Iterable[tuple[jax.Array, jax.Array]]) -> float:
    noise, signal = (math.fsum(map(float, column)) for column in zip(*pairs))
    return math.sqrt(noise / signal)


def rounded(value: float) -> float:
    """Returns a value rounded to four digits."""
    return float(f"{value:.4g}")
