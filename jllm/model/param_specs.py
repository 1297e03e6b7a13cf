"""Fills the table of weights with a config's sizes, leaf by leaf, and makes Params of random weights."""

import math
from dataclasses import dataclass, replace
from functools import partial, singledispatch
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jllm.config import DTYPES, LlamaConfig
from jllm.errors import ConfigError, NoRoomError
from jllm.model.params import (
    AttentionParams,
    BiasedExpertsParams,
    ExpertsParams,
    LayerParams,
    MLPParams,
    NormAfterAttentionParams,
    NormAfterMLPParams,
    Params,
    SharedExpertParams,
    WeightEntry,
    entries,
    layer_prefix,
)
from jllm.parallel.memory import free_memory, gib
from pallas_kernels.formats.numerics import compute_dtype

INITIAL = {"matrix": (0.0, 0.02), "norm": (1.0, 0.0), "bias": (0.0, 0.0)}  # mean and standard deviation


@dataclass(frozen=True)
class LeafSpec:
    """Describes one leaf of Params: its shape, its initial distribution and its stored tensors. The initial values are
    normal(mean, std), constant if std is 0. The stored tensors are `parts`, as (name, rows). They make up the leaf when
    stacked along the first axis."""

    shape: tuple[int, ...]
    parts: tuple[tuple[str, int], ...]
    entry: WeightEntry
    mean: float = 0.0
    std: float = 0.0
    weight: str | None = None  # a matrix's name in schemes

    @property
    def modules(self) -> tuple[str, ...]:
        """Returns the Hugging Face modules that are merged in the leaf."""
        return tuple(name.rpartition(".")[0] for name, _ in self.parts)

    def part_shape(self, rows: int) -> tuple[int, ...]:
        return (rows, *self.shape[1:])


def param_specs(config: LlamaConfig) -> Params:
    """Returns Params with a LeafSpec at every leaf: the table of weights (params.py) with a config's sizes."""

    def layer(i: int) -> LayerParams:
        attention, mlp = (part(**_leaf_specs(part, config, layer_prefix(i))) for part in layer_types(config, i))
        return LayerParams(attention, mlp)

    top = _leaf_specs(Params, config) | ({"head": None} if config.tie_embeddings else {})
    return Params(**top, layers=tuple(map(layer, range(config.num_layers))))


@singledispatch
def layer_types(config: LlamaConfig, layer: int) -> tuple[type, type]:
    """Returns the types of a layer's attention and MLP params. A config class with other layers registers its own
    function."""
    if config.norm_after:
        return NormAfterAttentionParams, NormAfterMLPParams
    if config.experts is None or not config.has_experts(layer):
        return AttentionParams, MLPParams
    if config.experts.biases:
        return AttentionParams, BiasedExpertsParams
    return AttentionParams, SharedExpertParams if config.experts.shared_ffn else ExpertsParams


def weight_specs(config: LlamaConfig) -> dict[str, LeafSpec]:
    """Returns the spec of every matrix by name, the head of a tied model included."""
    specs = param_specs(replace(config, tie_embeddings=False))
    return {spec.weight: spec for spec in jax.tree.leaves(specs) if spec.weight is not None}


def _leaf_specs(part: type, config: LlamaConfig, prefix: str = "") -> dict[str, Any]:
    """Returns the leaves of a dataclass by field, or None for a weight that the model does not have."""
    axes = config.axes

    def size(dimension: str) -> int:
        return math.prod(axes[axis] for axis in dimension.split())

    def leaf(entry: WeightEntry) -> LeafSpec | None:
        if entry.switch is not None and not getattr(config, entry.switch):
            return None
        parts = tuple((prefix + name, size(dimension)) for name, dimension in entry.tensors(axes))
        mean, std = INITIAL[entry.kind]
        if entry.kind == "norm":
            mean -= config.norm_offset
        if entry.residual:
            std *= 1 / math.sqrt(2 * config.num_layers)  # GPT-2: the residual stream sums 2L outputs
        shape = (sum(count for _, count in parts), *((size(entry.columns),) if entry.columns else ()))
        return LeafSpec(shape, parts, entry, mean, std, None if entry.name is None else prefix + entry.name)

    return {field: leaf(entry) for field, entry in entries(part).items()}


def abstract_params(config: LlamaConfig, dtype: DTypeLike | None = None) -> Params:
    """Returns Params of jax.ShapeDtypeStruct, which take no memory: for lowering a step or counting bytes. If dtype
    is None, it is config.dtype."""
    dtype = param_dtype(config, dtype)
    return jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, dtype), param_specs(config))


def init_params(config: LlamaConfig, key: jax.Array, dtype: DTypeLike | None = None) -> Params:
    """Returns random Params: weights are normal(0, 0.02), norms one, biases zero. Weights that write to the residual
    stream (o, down) are smaller by 1/sqrt(2 layers) (GPT-2's rule). Values are drawn in float32 at least, then rounded
    to dtype. Raises NoRoomError if the device of `key` has too little free memory for them."""
    return draw_params(param_specs(config), key, param_dtype(config, dtype))


def draw_params(specs: Params, key: jax.Array, dtype: np.dtype) -> Params:
    """Returns init_params of leaves with these specs. A leaf that is None stays None."""
    if not isinstance(key, jax.core.Tracer):
        _check_room(specs, dtype, key)
    keys = jax.random.split(key, len(specs.layers) + 1)
    top = _draw(replace(specs, layers=()), keys[0], dtype)
    layers = tuple(_draw(layer, keys[i + 1], dtype) for i, layer in enumerate(specs.layers))
    return replace(top, layers=layers)


def _check_room(specs: Params, dtype: np.dtype, key: jax.Array) -> None:
    need = sum(math.prod(spec.shape) for spec in jax.tree.leaves(specs)) * dtype.itemsize
    free = free_memory(min(key.devices(), key=lambda device: device.id))
    if free is not None and need > free:
        what = f"random weights in {dtype.name} take {gib(need)}"
        raise NoRoomError(f"{what}, and the device has {gib(free)} free: take fewer or smaller layers")


def _draw(specs: Any, key: jax.Array, dtype: np.dtype) -> Any:
    leaves, tree = jax.tree.flatten(specs)
    return jax.tree.unflatten(tree, _normals(key, tuple((s.shape, s.mean, s.std) for s in leaves), dtype))


@partial(jax.jit, static_argnums=(1, 2))  # one compilation serves all layers, which look alike
def _normals(
    key: jax.Array, shapes: tuple[tuple[tuple[int, ...], float, float], ...], dtype: np.dtype
) -> list[jax.Array]:
    compute = compute_dtype(dtype)

    def draw(key: jax.Array, shape: tuple[int, ...], mean: float, std: float) -> jax.Array:
        if std == 0:
            return jnp.full(shape, mean, dtype)
        return (mean + std * jax.random.normal(key, shape, compute)).astype(dtype)

    return [draw(k, *spec) for k, spec in zip(jax.random.split(key, len(shapes)), shapes)]


def param_dtype(config: LlamaConfig, dtype: DTypeLike | None = None) -> np.dtype:
    """Returns the dtype of all leaves: the given one, or config.dtype. Raises ConfigError for an unsupported dtype."""
    dtype = jnp.dtype(config.dtype if dtype is None else dtype)
    if dtype.name not in DTYPES:
        raise ConfigError(f"dtype {dtype.name} is not supported for parameters; supported are {', '.join(DTYPES)}")
    if dtype.name == "float64" and not jax.config.read("jax_enable_x64"):
        raise ConfigError("dtype float64 needs jax.config.update('jax_enable_x64', True)")
    return dtype
