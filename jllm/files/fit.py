"""Estimates from shapes, before anything is allocated, whether a model fits a device, and which changes would make it
fit."""

import math
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jllm.config import LlamaConfig
from jllm.errors import NoRoomError, QuantizationError
from jllm.model.cache import KVCache, cache_bytes, make_cache, parse_kv_cache
from jllm.model.param_specs import abstract_params, weight_specs
from jllm.model.params import matrix_modules, tree_bytes
from jllm.parallel.memory import gib
from jllm.quant.quantize import quantize
from jllm.quant.schemes import PLAIN, Scheme, find_scheme
from jllm.step.buckets import Bucket

SCHEMES = ("w8a16", "w4a16-g128")  # proposed schemes, the more accurate one first
LEAST = Bucket(1, 256, 1)  # the smallest step: nothing can be generated without room for it


def would_fit(found: list[str], otherwise: str) -> str:
    return f"what would fit: {'; '.join(found)}" if found else otherwise


def step_bytes(config: LlamaConfig, dtype: DTypeLike, bucket: Bucket) -> int:
    """Estimates the bytes that a step needs beside weights, cache and slots.

    It adds the widest activations of a layer, the residual stream, and the logits of every row that samples. There are
    three float32 copies of the logits (raw, masked, scratch).
    """
    E, F, D, size = config.hidden_size, config.intermediate_size, config.head_dim, jnp.dtype(dtype).itemsize
    qkv = (config.num_heads + 2 * config.num_kv_heads) * D
    if config.experts is not None:  # each row is there once for each of its experts
        F = max(F, config.experts.chosen * (config.experts.ffn + E))
    widest = max(3 * F, 2 * qkv + config.num_heads * D)
    logits = 3 * (bucket.decodes * bucket.rows + bucket.chunks) * config.vocab_size * max(4, size)
    return bucket.size * (2 * E + widest) * size + logits


def trial_bytes(config: LlamaConfig, dtype: DTypeLike, bucket: Bucket) -> int:
    """Estimates the bytes that compiling a step needs beside all that it computes with. XLA tries ways of a product on
    operands of its own: the largest weight and its results."""
    matrices = (spec.shape for spec in weight_specs(config).values() if len(spec.shape) == 2)
    return max((inputs + bucket.size) * outputs for outputs, inputs in matrices) * jnp.dtype(dtype).itemsize


def page_bytes(config: LlamaConfig, dtype: DTypeLike, kv_cache: KVCache | None, page_size: int) -> int:
    """Counts the bytes of one KV page in all layers. Raises ConfigError for an unknown format."""
    formats, one = parse_kv_cache(kv_cache, config, dtype), config.one_layer(0)
    return config.num_layers * cache_bytes(jax.eval_shape(lambda: make_cache(one, 1, page_size, formats)))


@dataclass(frozen=True)
class WeightBytes:
    """Holds the bytes that loading takes."""

    total: int
    passing: int = 0  # temporary bytes on top: the largest weight before it is quantized

    @property
    def peak(self) -> int:
        return self.total + self.passing


def weight_bytes(config: LlamaConfig, dtype: DTypeLike, scheme: str | Scheme | None = None) -> WeightBytes:
    """Counts the bytes of a model's weights in a dtype, or quantized as a scheme asks. Raises QuantizationError for a
    scheme that does not fit the model."""
    plain = abstract_params(config, dtype)
    if scheme is None:
        return WeightBytes(tree_bytes(plain))
    scheme, specs, size = find_scheme(scheme), weight_specs(config), jnp.dtype(dtype).itemsize
    quantized = [name for name, formats in scheme.formats(matrix_modules(plain)).items() if formats]
    passing = max((math.prod(specs[name].shape) * size for name in quantized), default=0)
    return WeightBytes(tree_bytes(quantize(plain, scheme)), passing)


def check_weights(
    folder: Path,
    config: LlamaConfig,
    dtype: DTypeLike,
    scheme: Scheme | None,
    free: int | None,
    stored: int | None = None,
) -> None:
    """Raises NoRoomError where the weights of a model directory take more than the `free` bytes of a device. Its
    message names dtypes and schemes that would leave room for a step as well.

    `stored` is the bytes of weights that are quantized already; their codes take as many.
    """
    if free is None:
        return
    need = weight_bytes(config, dtype, scheme) if stored is None else WeightBytes(stored)
    if need.peak <= free:
        return
    size = f"{gib(need.peak)}{' while they are quantized' if need.passing else ''}"
    what = f"in {_described(dtype, scheme)}" if stored is None else "as they are stored"
    found = _smaller(config, dtype, scheme, free) if stored is None else []
    otherwise = "no smaller dtype or scheme would fit: it takes a larger device"
    raise NoRoomError(
        f"{folder}: its weights {what} need {size}, and the device has {gib(free)} free; {would_fit(found, otherwise)}"
    )


def _described(dtype: DTypeLike, scheme: Scheme | None) -> str:
    name = jnp.dtype(dtype).name
    return name if scheme is None or scheme.name == PLAIN else f"{name} with scheme {scheme.name}"


def _smaller(config: LlamaConfig, dtype: DTypeLike, scheme: Scheme | None, free: int) -> list[str]:
    """Returns dtypes and schemes that make the weights fit, with the bytes of each, the fewest changes first."""
    dtype = jnp.dtype(dtype)
    dtypes = [dtype] + [jnp.dtype("bfloat16")] * (dtype.itemsize > 2)
    found = []
    for name, other in product((None, *SCHEMES), dtypes):
        changes = {"quantize": name, "dtype": None if other == dtype else "bf16"}
        given = [f"{option}={value}" for option, value in changes.items() if value is not None]
        try:
            need = weight_bytes(config, other, name or scheme)
        except QuantizationError:
            continue
        room = page_bytes(config, other, None, LEAST.tokens) + step_bytes(config, other, LEAST)
        if given and max(need.peak, need.total + room) <= free:
            found.append((len(given), f"{', '.join(given)} ({gib(need.peak)})"))
    fewest = min((count for count, _ in found), default=0)
    return [text for count, text in found if count == fewest]
