"""Defines the weights of a model as an explicit pytree, and the one table that describes them.

The pytree is a tuple of per-layer dataclasses. An engine's steps take them in fewer arrays (layers.py). Each field that
holds a weight has its entry in the table, a WeightEntry, as metadata. Files, schemes, importers, initial values and
memory estimates all read these entries. A matrix may be a plain array or a QuantizedWeight.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import jax
import numpy as np

from pallas_kernels.formats.quantized_weights import QuantizedWeight

Weight = jax.Array | QuantizedWeight


@dataclass(frozen=True)
class WeightEntry:
    """Describes one weight of a model: its shape, its parts, its names and its initial values.

    A dimension is a product of axes, such as "heads head_dim". LlamaConfig.axes has their sizes.
    """

    kind: Literal["matrix", "norm", "bias"]  # also decides the initial values (param_specs.INITIAL)
    modules: tuple[tuple[str, str], ...]  # Hugging Face module, first dimension; merged along it, in this order
    columns: str | None = None  # second dimension of a matrix
    name: str | None = None  # a matrix's name in schemes and our files: its module's, or vLLM's if merged
    reads: str | None = None  # the tap (jllm.model.taps) that is a linear layer's input
    residual: bool = False  # writes to the residual stream, so it starts smaller
    switch: str | None = None  # the field of LlamaConfig that decides whether a model has this weight
    over: str | None = None  # an axis: the modules are there once for each of its numbers, which replaces {}

    def modules_of(self, axes: Mapping[str, int]) -> tuple[tuple[str, str], ...]:
        """Returns the modules of a model with axes of these sizes."""
        if self.over is None:
            return self.modules
        return tuple((module.format(i), rows) for i in range(axes[self.over]) for module, rows in self.modules)

    def tensors(self, axes: Mapping[str, int]) -> tuple[tuple[str, str], ...]:
        """Returns the name of each module's tensor in Hugging Face files, and the tensor's first dimension."""
        suffix = "bias" if self.kind == "bias" else "weight"
        return tuple((f"{module}.{suffix}", rows) for module, rows in self.modules_of(axes))


def matrix(modules: Mapping[str, str], columns: str, name: str | None = None, **more: Any) -> dict[str, WeightEntry]:
    """Returns the metadata of a field that holds a matrix. Merged modules need a name of their own."""
    (name,) = modules if name is None else (name,)
    return {"weight": WeightEntry("matrix", tuple(modules.items()), columns, name, **more)}


def norm_weight(module: str, size: str, switch: str | None = None) -> dict[str, WeightEntry]:
    """Returns the metadata of a field that holds the weight of an RMSNorm."""
    return {"weight": WeightEntry("norm", ((module, size),), switch=switch)}


def bias(modules: Mapping[str, str], switch: str | None = None, **more: Any) -> dict[str, WeightEntry]:
    """Returns the metadata of a field that holds the bias of a linear layer."""
    return {"weight": WeightEntry("bias", tuple(modules.items()), switch=switch, **more)}


def entries(part: Any) -> dict[str, WeightEntry]:
    """Returns the entries of a dataclass (or of an instance), by field."""
    return {f.name: f.metadata["weight"] for f in fields(part) if "weight" in f.metadata}


EMBED, HEAD = "model.embed_tokens", "lm_head"
QKV = {
    "self_attn.q_proj": "heads head_dim",
    "self_attn.k_proj": "kv_heads head_dim",
    "self_attn.v_proj": "kv_heads head_dim",
}
Q_NORM, K_NORM = "q_norm head_dim", "k_norm head_dim"
OUT = {"self_attn.o_proj": "embed"}
GATE_UP = {"mlp.gate_proj": "ffn", "mlp.up_proj": "ffn"}
DOWN = {"mlp.down_proj": "embed"}
ROUTER, BIASED_ROUTER = {"mlp.gate": "experts"}, {"mlp.router": "experts"}
SINKS = {"self_attn.sinks": "heads"}
SHARED_GATE_UP = {"mlp.shared_expert.gate_proj": "shared_ffn", "mlp.shared_expert.up_proj": "shared_ffn"}
SHARED_DOWN = {"mlp.shared_expert.down_proj": "embed"}
SHARED_GATE = {"mlp.shared_expert_gate": ""}
EXPERT_GATE_UP = {"mlp.experts.{}.gate_proj": "expert_ffn", "mlp.experts.{}.up_proj": "expert_ffn"}
EXPERT_DOWN = {"mlp.experts.{}.down_proj": "embed"}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionParams:
    """Holds the weights of rotary attention and of the norm before it, for attention.attention_block."""

    norm: jax.Array = field(metadata=norm_weight("input_layernorm", "embed"))  # [E]
    # [(H + 2K) D, E]: query rows, key rows, value rows
    qkv: Weight = field(metadata=matrix(QKV, "embed", "self_attn.qkv_proj", reads="attn_norm"))
    qkv_bias: jax.Array | None = field(metadata=bias(QKV, "qkv_bias"))  # [(H + 2K) D]
    q_norm: jax.Array | None = field(metadata=norm_weight("self_attn.q_norm", Q_NORM, "qk_norm"))  # [D] or [H D]
    k_norm: jax.Array | None = field(metadata=norm_weight("self_attn.k_norm", K_NORM, "qk_norm"))  # [D] or [K D]
    o: Weight = field(metadata=matrix(OUT, "heads head_dim", reads="attention", residual=True))  # [E, H D]
    o_bias: jax.Array | None = field(metadata=bias(OUT, "o_bias"))  # [E]
    sinks: jax.Array | None = field(default=None, metadata=bias(SINKS, "sinks"))  # [H]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NormAfterAttentionParams:
    """Holds the weights of rotary attention and of the norm after it, for norm_after.py. Gemma has one before it,
    too."""

    norm: jax.Array | None = field(metadata=norm_weight("input_layernorm", "embed", "norm_before"))  # [E]
    qkv: Weight = field(metadata=matrix(QKV, "embed", "self_attn.qkv_proj", reads="attn_norm"))  # as AttentionParams
    qkv_bias: jax.Array | None = field(metadata=bias(QKV, "qkv_bias"))
    q_norm: jax.Array | None = field(metadata=norm_weight("self_attn.q_norm", Q_NORM, "qk_norm"))
    k_norm: jax.Array | None = field(metadata=norm_weight("self_attn.k_norm", K_NORM, "qk_norm"))
    o: Weight = field(metadata=matrix(OUT, "heads head_dim", reads="attention", residual=True))
    o_bias: jax.Array | None = field(metadata=bias(OUT, "o_bias"))
    norm_after: jax.Array = field(metadata=norm_weight("post_attention_layernorm", "embed"))  # [E]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MLPParams:
    """Holds the weights of SwiGLU and of the norm before it, for mlp.mlp_block."""

    norm: jax.Array = field(metadata=norm_weight("post_attention_layernorm", "embed"))  # [E]
    # [2F, E]: gate rows, up rows
    gate_up: Weight = field(metadata=matrix(GATE_UP, "embed", "mlp.gate_up_proj", reads="mlp_norm"))
    gate_up_bias: jax.Array | None = field(metadata=bias(GATE_UP, "mlp_bias"))  # [2F]
    down: Weight = field(metadata=matrix(DOWN, "ffn", reads="silu_mul", residual=True))  # [E, F]
    down_bias: jax.Array | None = field(metadata=bias(DOWN, "mlp_bias"))  # [E]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NormAfterMLPParams:
    """Holds the weights of a gated MLP and of the norm after it, for norm_after.py. Gemma has one before it, too."""

    norm: jax.Array | None = field(metadata=norm_weight("pre_feedforward_layernorm", "embed", "norm_before"))  # [E]
    gate_up: Weight = field(metadata=matrix(GATE_UP, "embed", "mlp.gate_up_proj", reads="mlp_norm"))  # as MLPParams
    down: Weight = field(metadata=matrix(DOWN, "ffn", reads="silu_mul", residual=True))
    norm_after: jax.Array = field(metadata=norm_weight("post_feedforward_layernorm", "embed"))  # [E]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExpertsParams:
    """Holds the weights of a Mixture of Experts and of the norm before it, for experts.py. Experts lie one after the
    other in the rows of one matrix: a group of rows and its scales are one expert's."""

    norm: jax.Array = field(metadata=norm_weight("post_attention_layernorm", "embed"))  # [E]
    router: Weight = field(metadata=matrix(ROUTER, "embed", reads="mlp_norm"))  # [X, E]
    # [X 2F, E]: of each expert, gate rows, then up rows
    gate_up: Weight = field(
        metadata=matrix(EXPERT_GATE_UP, "embed", "mlp.experts.gate_up_proj", reads="mlp_norm", over="experts")
    )
    down: Weight = field(  # [X E, F]
        metadata=matrix(EXPERT_DOWN, "expert_ffn", "mlp.experts.down_proj", residual=True, over="experts")
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SharedExpertParams:
    """Holds the weights of a Mixture of Experts beside one that computes every token, for experts.py."""

    norm: jax.Array = field(metadata=norm_weight("post_attention_layernorm", "embed"))  # this and more: ExpertsParams
    router: Weight = field(metadata=matrix(ROUTER, "embed", reads="mlp_norm"))
    gate_up: Weight = field(
        metadata=matrix(EXPERT_GATE_UP, "embed", "mlp.experts.gate_up_proj", reads="mlp_norm", over="experts")
    )
    down: Weight = field(
        metadata=matrix(EXPERT_DOWN, "expert_ffn", "mlp.experts.down_proj", residual=True, over="experts")
    )
    shared_gate: Weight = field(metadata=matrix(SHARED_GATE, "embed", reads="mlp_norm"))  # [1, E]
    shared_gate_up: Weight = field(  # [2S, E]
        metadata=matrix(SHARED_GATE_UP, "embed", "mlp.shared_expert.gate_up_proj", reads="mlp_norm")
    )
    shared_down: Weight = field(metadata=matrix(SHARED_DOWN, "shared_ffn", residual=True))  # [E, S]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BiasedExpertsParams:
    """Holds the weights of a Mixture of Experts with biases, for experts.py."""

    norm: jax.Array = field(metadata=norm_weight("post_attention_layernorm", "embed"))  # this and more: ExpertsParams
    router: Weight = field(metadata=matrix(BIASED_ROUTER, "embed", reads="mlp_norm"))
    router_bias: jax.Array = field(metadata=bias(BIASED_ROUTER))  # [X]
    gate_up: Weight = field(
        metadata=matrix(EXPERT_GATE_UP, "embed", "mlp.experts.gate_up_proj", reads="mlp_norm", over="experts")
    )
    gate_up_bias: jax.Array = field(metadata=bias(EXPERT_GATE_UP, over="experts"))  # [X 2F]
    down: Weight = field(
        metadata=matrix(EXPERT_DOWN, "expert_ffn", "mlp.experts.down_proj", residual=True, over="experts")
    )
    down_bias: jax.Array = field(metadata=bias(EXPERT_DOWN, over="experts"))  # [X E]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerParams:
    """Holds the weights of one decoder layer. The types of its two parts decide what it computes. Linear weights are
    [out, in]. Merged ones are concatenated along out."""

    attention: Any  # AttentionParams, NormAfterAttentionParams, or another type with an attention_block
    mlp: Any  # MLPParams, NormAfterMLPParams, one of three with experts, or another type with an mlp_block


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Layers(Sequence[LayerParams]):
    """Holds a model's layers in few arrays (layers.py), and returns them one by one."""

    own: tuple[LayerParams, ...]  # without the vectors that are stacked: None in their place
    stacks: tuple[LayerParams, ...]  # of layers that look alike: their vectors [L, n], or on a mesh [ranks, L, n]
    places: tuple[tuple[int, int], ...] = field(metadata={"static": True})  # of each layer: its stack, its row there

    def __len__(self) -> int:
        return len(self.own)

    def __getitem__(self, layer: Any) -> Any:
        if isinstance(layer, slice):
            return tuple(self)[layer]
        stack, row = self.places[layer]

        def leaf(own: Any, stacked: Any) -> Any:
            return own if stacked is None else stacked[..., row, :]

        return jax.tree.map(leaf, self.own[layer], self.stacks[stack], is_leaf=lambda leaf: leaf is None)

    def __iter__(self) -> Iterator[LayerParams]:
        return (self[i] for i in range(len(self)))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Params:
    """Holds all weights of a model."""

    embed: Weight = field(metadata=matrix({EMBED: "vocab"}, "embed"))  # [V, E]
    layers: Sequence[LayerParams]
    norm: jax.Array = field(metadata=norm_weight("model.norm", "embed"))  # [E]
    head: Weight | None = field(metadata=matrix({HEAD: "vocab"}, "embed"))  # [V, E]; None when tied to embed
    adapters: Any = None  # of a step's requests: adapted.Slots by field of a layer's matrices; files hold none

    @property
    def dtype(self) -> np.dtype:
        """Returns the dtype that the model computes in. Its matrices may be stored in another."""
        return self.norm.dtype


def layer_prefix(layer: int) -> str:
    return f"model.layers.{layer}."


def matrix_entries(layer: LayerParams) -> dict[str, WeightEntry]:
    """Returns the entries of a layer's matrices by field, in order of computation."""
    found = entries(layer.attention) | entries(layer.mlp)
    return {name: entry for name, entry in found.items() if entry.kind == "matrix"}


def matrices(layer: LayerParams) -> dict[str, Any]:
    """Returns a layer's matrices by field, in order of computation."""
    found = vars(layer.attention) | vars(layer.mlp)
    return {name: found[name] for name in matrix_entries(layer)}


def with_matrices(layer: LayerParams, changed: Mapping[str, object]) -> LayerParams:
    """Returns the layer with other matrices in some fields."""

    def part(old: Any) -> Any:
        return replace(old, **{name: leaf for name, leaf in changed.items() if name in entries(old)})

    return LayerParams(part(layer.attention), part(layer.mlp))


def matrix_modules(params: Params) -> dict[str, tuple[str, ...]]:
    """Returns the name of every matrix -> the Hugging Face modules that are merged in it. The head is included for tied
    models, too. `params` may have leaves of any type."""
    found = {
        f"{layer_prefix(i)}{entry.name}": tuple(layer_prefix(i) + m for m, _ in entry.modules_of(_repeats(layer)))
        for i, layer in enumerate(params.layers)
        for entry in matrix_entries(layer).values()
    }
    return {EMBED: (EMBED,), **found, HEAD: (HEAD,)}


def _repeats(layer: LayerParams) -> dict[str, int]:
    """Returns the sizes of the axes that a layer's modules are repeated over: the rows of the matrix that has them."""
    over = {entry.over for entry in matrix_entries(layer).values()}
    rows = {entry.modules[0][1]: name for name, entry in matrix_entries(layer).items() if len(entry.modules) == 1}
    return {axis: matrices(layer)[rows[axis]].shape[0] for axis in over if axis is not None}


def linears(params: Params) -> dict[str, Any]:
    """Returns all layers' matrices by name."""
    return {
        f"{layer_prefix(i)}{entry.name}": leaf
        for i, layer in enumerate(params.layers)
        for entry, leaf in zip(matrix_entries(layer).values(), matrices(layer).values())
    }


def map_linears(f: Callable[[str, Any], Any], params: Params) -> Params:
    """Returns `params` with f(name, leaf) in place of each layer's matrices, layer by layer."""

    def one(i: int, layer: LayerParams) -> LayerParams:
        names = {field: f"{layer_prefix(i)}{entry.name}" for field, entry in matrix_entries(layer).items()}
        return with_matrices(layer, {field: f(names[field], leaf) for field, leaf in matrices(layer).items()})

    return replace(params, layers=tuple(one(i, layer) for i, layer in enumerate(params.layers)))


def tree_bytes(tree: object) -> int:
    """Counts the bytes of a pytree of arrays or jax.ShapeDtypeStruct."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
