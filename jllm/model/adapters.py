"""Makes, checks, merges and places low-rank adapters (LoRA, arXiv 2106.09685) by the table of weights (params.py).

An adapter is a plain pytree, stacked over layers. Its leaves are what an optimizer trains. An engine has places for
several, which a step's rows choose from (adapted.Slots).
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jllm.config import LlamaConfig
from jllm.errors import ConfigError, QuantizationError, WeightsError
from jllm.model.adapted import Adapted, OneAdapter, Slots
from jllm.model.param_specs import LeafSpec, param_dtype, param_specs
from jllm.model.params import (
    EXPERT_DOWN,
    EXPERT_GATE_UP,
    LayerParams,
    Params,
    WeightEntry,
    matrices,
    matrix_entries,
    with_matrices,
)
from jllm.model.shapes import AnyArray, Array, Int32
from jllm.model.shards import share_indices, stack
from jllm.parallel.ranks import STACKED, place
from pallas_kernels.formats.numerics import compute_dtype
from pallas_kernels.formats.quantized_weights import QuantizedWeight

MOST_RANK = 1024
OF_EXPERTS = {module.rpartition(".")[2] for module in (*EXPERT_GATE_UP, *EXPERT_DOWN)}  # modules without adapters


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LowRank:
    """Holds one adapter of one matrix, in the L layers that have the matrix. P is the number of its merged parts."""

    a: AnyArray  # [L, P r, in]
    b: AnyArray  # [L, out, r]
    scale: tuple[tuple[float, ...], ...] = field(metadata={"static": True})  # of each layer and part

    @property
    def rank(self) -> int:
        return self.b.shape[2]

    def of_layer(self, target: "Target", layer: int) -> "LowRank":
        """Returns the adapter of one layer that has the matrix."""
        at = target.layers.index(layer)
        return LowRank(self.a[at : at + 1], self.b[at : at + 1], self.scale[at : at + 1])


Adapter = dict[str, LowRank]  # by field of a layer's matrices: qkv, o, gate_up, down


@dataclass(frozen=True)
class Target:
    """Describes a matrix that adapters can change."""

    entry: WeightEntry
    layers: tuple[int, ...]  # those that have it
    parts: tuple[int, ...]  # rows of each merged part
    inputs: int

    @property
    def modules(self) -> tuple[str, ...]:
        """Returns the Hugging Face modules that are merged in it."""
        return tuple(module for module, _ in self.entry.modules)

    def shapes(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the shapes of a and b."""
        L = len(self.layers)
        return (L, len(self.parts) * rank, self.inputs), (L, sum(self.parts), rank)


def all_targets(config: LlamaConfig) -> dict[str, Target]:
    """Returns the matrices that adapters can change, by field. Those of experts are none."""
    specs = param_specs(replace(config, mesh=None)).layers
    found: dict[str, list[tuple[int, LeafSpec]]] = {}
    for i, layer in enumerate(specs):
        for name, entry in matrix_entries(layer).items():
            if entry.over is None:
                found.setdefault(name, []).append((i, matrices(layer)[name]))
    return {
        name: Target(
            layers[0][1].entry,
            tuple(i for i, _ in layers),
            tuple(rows for _, rows in layers[0][1].parts),
            layers[0][1].shape[1],
        )
        for name, layers in found.items()
    }


def choose_targets(config: LlamaConfig, names: Collection[str] | None) -> dict[str, Target]:
    """Returns the targets by field that have one of these modules, such as q_proj; None: all. Raises ConfigError for a
    module that the model lacks, or that its experts alone have."""
    every = all_targets(config)
    if names is None:
        return every
    modules = {name: [module.rpartition(".")[2] for module in target.modules] for name, target in every.items()}
    known = dict.fromkeys(module for some in modules.values() for module in some)
    if isinstance(names, str):
        raise ConfigError(f"adapter targets are a list of modules, not the string {names!r}")
    if unknown := [name for name in names if name not in known]:
        why = "experts take no adapters; " if config.experts is not None and unknown[0] in OF_EXPERTS else ""
        raise ConfigError(f"adapter target {unknown[0]!r}: {why}the model has {', '.join(known)}")
    return {name: every[name] for name in every if set(modules[name]) & set(names)}


def init_adapter(
    config: LlamaConfig,
    key: jax.Array,
    rank: int,
    *,
    alpha: float | None = None,
    targets: Collection[str] | None = None,
    dtype: DTypeLike | None = None,
) -> Adapter:
    """Returns an adapter that changes nothing yet: a is random, b is zero, and the scale is alpha / rank (1 without
    alpha). `targets` are names of modules, such as q_proj; None: all. Modules that share a matrix have the adapter
    together. dtype defaults to the config's."""
    check_rank(rank)
    dtype, found = param_dtype(config, dtype), {}
    for name, target in choose_targets(config, targets).items():
        key, own = jax.random.split(key)
        a, b = target.shapes(rank)
        values = jax.random.normal(own, a, compute_dtype(dtype)) / math.sqrt(target.inputs)
        scale = (((1.0 if alpha is None else alpha / rank),) * len(target.parts),) * len(target.layers)
        found[name] = LowRank(values.astype(dtype), jnp.zeros(b, dtype), scale)
    return found


def check_rank(rank: object) -> None:
    """Raises ConfigError for an invalid rank."""
    if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= MOST_RANK:
        raise ConfigError(f"an adapter's rank must be an integer from 1 to {MOST_RANK}, not {rank!r}")


def check_adapter(adapter: Any, targets: Mapping[str, Target], rank: int, what: str) -> None:
    """Raises WeightsError for a pytree that is no adapter of these targets, or has a larger rank. `what` names it."""
    if not isinstance(adapter, dict) or not all(isinstance(each, LowRank) for each in adapter.values()):
        raise WeightsError(f"{what} must be a dict of LowRank by matrix, as init_adapter and load_adapter return it")
    for name, each in adapter.items():
        if name not in targets:
            raise WeightsError(f"{what} changes {name}, and there is room for {', '.join(targets)} alone")
        if each.a.ndim != 3 or each.b.ndim != 3:
            raise WeightsError(f"{what}: {name} must have a [L, P r, in] and b [L, out, r]")
        if each.rank > rank:
            raise WeightsError(f"{what} has rank {each.rank}, and there is room for {rank}: give adapter_rank")
        target = targets[name]
        a, b = target.shapes(each.rank)
        if (each.a.shape, each.b.shape) != (a, b):
            got = f"a {list(each.a.shape)} and b {list(each.b.shape)}"
            raise WeightsError(f"{what}: {name} has {got}, and this model takes {list(a)} and {list(b)}")
        if [len(row) for row in each.scale] != [len(target.parts)] * len(target.layers):
            raise WeightsError(f"{what}: {name} must have a scale for each layer and part")


def padded(adapter: Adapter, rank: int) -> Adapter:
    """Returns the adapter with zeros up to a larger rank, which change no value."""

    def pad(each: LowRank) -> LowRank:
        more, parts = rank - each.rank, len(each.scale[0])
        if not more:
            return each
        xp = np if isinstance(each.a, np.ndarray) else jnp
        L, rows, inputs = each.a.shape
        a = xp.pad(each.a.reshape(L, parts, rows // parts, inputs), ((0, 0), (0, 0), (0, more), (0, 0)))
        b = xp.pad(each.b, ((0, 0), (0, 0), (0, more)))
        return LowRank(a.reshape(L, parts * rank, inputs), b, each.scale)

    return {name: pad(each) for name, each in adapter.items()}


def merge_params(
    params: Params, config: LlamaConfig, adapter: Adapter, magnitudes: Mapping[str, AnyArray] = MappingProxyType({})
) -> Params:
    """Returns params to whose weights the adapter is added. `magnitudes` [L, out] by field are the norms of rows that
    DoRA (arXiv 2402.09353) gives them; NaN keeps a row's. Raises QuantizationError for a quantized weight, into which
    merging would round, and WeightsError for an adapter that does not fit."""
    if config.mesh is not None:
        raise ConfigError("merging is for one device: give a model without a mesh")
    targets = all_targets(config)
    check_adapter(adapter, targets, MOST_RANK, "the adapter")

    def in_layer(layer: LayerParams, i: int) -> LayerParams:
        changed = {}
        for name, each in adapter.items():
            if i not in targets[name].layers:
                continue
            w = matrices(layer)[name]
            if isinstance(w, QuantizedWeight):
                raise QuantizationError(f"{name} is quantized: merge first, or serve the adapter beside it")
            one, wide = _alone(each.of_layer(targets[name], i)), compute_dtype(w.dtype)
            rows, start = [], 0
            for part, size in enumerate(targets[name].parts):
                a = one.a[part * each.rank : (part + 1) * each.rank].astype(wide)
                b = one.b[start : start + size].astype(wide)
                rows.append(one.scale[part].astype(wide) * jnp.matmul(b, a, precision="highest"))
                start += size
            merged = w.astype(wide) + jnp.concatenate(rows)
            if name in magnitudes:
                norms = jnp.asarray(magnitudes[name], wide)[targets[name].layers.index(i)]
                scales = norms / jnp.linalg.norm(merged, axis=1)
                merged = merged * jnp.where(jnp.isnan(norms), 1, scales)[:, None]
            changed[name] = merged.astype(w.dtype)
        return with_matrices(layer, changed)

    return replace(params, layers=tuple(in_layer(layer, i) for i, layer in enumerate(params.layers)))


def layer_with(layer: LayerParams, adapter: Adapter, config: LlamaConfig) -> LayerParams:
    """Returns the layer of a model of one layer with its adapter, which all rows take. Products stay apart, and
    gradients reach a and b."""
    parts = {name: target.parts for name, target in all_targets(config).items()}
    changed = {
        name: Adapted(matrices(layer)[name], _alone(each), None, None, parts[name]) for name, each in adapter.items()
    }
    return with_matrices(layer, changed)


def _alone(each: LowRank) -> OneAdapter:
    """Returns the arrays of an adapter of one layer."""
    return OneAdapter(each.a[0], each.b[0], jnp.asarray(each.scale[0], compute_dtype(each.a.dtype)))


# Adapters that a step's rows choose from


def with_adapters(
    params: Params, config: LlamaConfig, rows: Int32[Array, " T"], runs: int | None = None
) -> tuple[LayerParams, ...]:
    """Returns the layers with the adapters of the params. Rows i32[T] choose theirs; -1: none. `runs` is as in
    Adapted."""
    passed, layers = Counter[str](), []
    for layer in params.layers:
        changed = {}
        for name, entry in matrix_entries(layer).items():
            if name in params.adapters and entry.over is None:
                parts = tuple(math.prod(config.axes[axis] for axis in rows.split()) for _, rows in entry.modules)
                place = jnp.asarray(passed[name], jnp.int32)
                changed[name] = Adapted(matrices(layer)[name], params.adapters[name], place, rows, parts, runs)
                passed[name] += 1
        layers.append(with_matrices(layer, changed))
    return tuple(layers)


def empty_slots(
    targets: Mapping[str, Target], count: int, rank: int, dtype: np.dtype, config: LlamaConfig
) -> dict[str, Slots]:
    """Returns places for `count` adapters: on the config's mesh, stacks of the ranks' shares."""

    def one(target: Target) -> Slots:
        (L, rows, inputs), (_, outputs, _) = target.shapes(rank)
        ranks: tuple[int, ...] = ()
        if config.mesh is not None:
            ranks, share = (config.mesh.size,), _share(target, config)
            inputs, outputs = share.inputs, share.rows.shape[1]
        scale = jnp.zeros((*ranks, L, count, len(target.parts)), compute_dtype(dtype))
        a, b = (*ranks, L, count, rows, inputs), (*ranks, L, count, outputs, rank)
        return Slots(jnp.zeros(a, dtype), jnp.zeros(b, dtype), scale)

    return place({name: one(target) for name, target in targets.items()}, config, STACKED)


def arrays_of(adapter: Adapter, targets: Mapping[str, Target], rank: int, dtype: np.dtype) -> dict[str, OneAdapter]:
    """Returns the adapter as put takes it on one device: of all targets, in this rank and dtype."""
    adapter, wide = padded(adapter, rank), compute_dtype(dtype)

    def one(name: str, target: Target) -> OneAdapter:
        if name in adapter:
            given = adapter[name]
            a, b, scale = given.a.astype(dtype), given.b.astype(dtype), np.asarray(given.scale, wide)
        else:
            a, b = (np.zeros(shape, dtype) for shape in target.shapes(rank))
            scale = np.zeros((len(target.layers), len(target.parts)), wide)
        return OneAdapter(a, b, scale)  # type: ignore[arg-type]

    return {name: one(name, target) for name, target in targets.items()}


def share_adapter(
    adapter: dict[str, OneAdapter], targets: Mapping[str, Target], config: LlamaConfig
) -> dict[str, OneAdapter]:
    """Returns the adapter as put takes it on the config's mesh: stacks of the ranks' shares.

    A rank that has rows of a weight has these rows of b, and all of a. One that has columns of a weight has these
    columns of a, and all of b: what it adds to its part of the product is summed with it.
    """
    assert config.mesh is not None
    mesh = config.mesh

    def one(name: str, whole: OneAdapter) -> OneAdapter:
        share = _share(targets[name], config)
        cuts = ((rows, slice(at, at + share.inputs)) for rows, at in zip(share.rows, share.first))
        return stack((replace(whole, a=whole.a[:, :, cut], b=whole.b[:, rows]) for rows, cut in cuts), mesh)

    return {name: one(name, each) for name, each in adapter.items()}


class _Share(NamedTuple):
    rows: np.ndarray  # i32[ranks, n] of b
    first: list[int]  # the first input of each rank
    inputs: int  # of a, of each rank


def _share(target: Target, config: LlamaConfig) -> _Share:
    at = share_indices(target.entry, config)
    cut = target.inputs // len(at.rows) if at.column.any() else target.inputs
    return _Share(at.rows, at.column.tolist(), cut)


def put(slots: dict[str, Slots], adapter: dict[str, OneAdapter], place: jax.Array) -> dict[str, Slots]:
    """Returns the slots with an adapter at a place, i32[]."""

    def write(old: jax.Array, new: jax.Array, after: int) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(old, new, place, old.ndim - 1 - after)

    def one(old: Slots, new: OneAdapter) -> Slots:
        return Slots(write(old.a, new.a, 2), write(old.b, new.b, 2), write(old.scale, new.scale, 1))

    return {name: one(old, adapter[name]) for name, old in slots.items()}


@jax.jit
def taken(slots: dict[str, Slots], place: jax.Array) -> dict[str, OneAdapter]:
    """Returns the adapter at a place of the slots of one device, as put takes it."""

    def read(old: jax.Array, after: int) -> jax.Array:
        return jax.lax.dynamic_index_in_dim(old, place, old.ndim - 1 - after, keepdims=False)

    return {name: OneAdapter(read(old.a, 2), read(old.b, 2), read(old.scale, 1)) for name, old in slots.items()}
