"""The weights of a model as an explicit pytree: a tuple of per-layer dataclasses, never stacked arrays.

A matrix may be a plain array or a QuantizedWeight. Each has a name, which quantization schemes and files use: its
Hugging Face module's, or for horizontally merged ones the name that vLLM gives them (qkv_proj, gate_up_proj).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax

from pallas_kernels.quantized_weights import QuantizedWeight

Weight = jax.Array | QuantizedWeight

EMBED, HEAD = "model.embed_tokens", "lm_head"
LINEARS = {  # field of LayerParams -> the name of the weight, and the modules that are merged in it
    "qkv": ("self_attn.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    "o": ("self_attn.o_proj", ("self_attn.o_proj",)),
    "gate_up": ("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj")),
    "down": ("mlp.down_proj", ("mlp.down_proj",)),
}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerParams:
    """One decoder layer. Linear weights are [out, in]; horizontally merged ones are concatenated along out."""

    attn_norm: jax.Array  # [E]
    qkv: Weight  # [(H + 2K) D, E]: query rows, key rows, value rows
    qkv_bias: jax.Array | None  # [(H + 2K) D]
    q_norm: jax.Array | None  # [D]
    k_norm: jax.Array | None  # [D]
    o: Weight  # [E, H D]
    o_bias: jax.Array | None  # [E]
    mlp_norm: jax.Array  # [E]
    gate_up: Weight  # [2F, E]: gate rows, up rows
    gate_up_bias: jax.Array | None  # [2F]
    down: Weight  # [E, F]
    down_bias: jax.Array | None  # [E]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Params:
    """A whole model."""

    embed: Weight  # [V, E]
    layers: tuple[LayerParams, ...]
    norm: jax.Array  # [E]
    head: Weight | None  # [V, E]; None when tied to embed

    @property
    def dtype(self) -> Any:
        """The dtype that the model computes in, whatever its matrices are stored in."""
        return self.norm.dtype


def layer_prefix(layer: int) -> str:
    return f"model.layers.{layer}."


def weight_modules(num_layers: int) -> dict[str, tuple[str, ...]]:
    """Every matrix of a model by name, and the Hugging Face modules that it is made of."""
    linears = {
        layer_prefix(i) + name: tuple(layer_prefix(i) + part for part in parts)
        for i in range(num_layers)
        for name, parts in LINEARS.values()
    }
    return {EMBED: (EMBED,), **linears, HEAD: (HEAD,)}


def map_linears(f: Callable[[str, Any], Any], params: Params) -> Params:
    """`params` with f(name, leaf) in place of each layer's matrices, layer by layer."""

    def one(i: int, layer: LayerParams) -> LayerParams:
        leaves = {field: f(layer_prefix(i) + name, getattr(layer, field)) for field, (name, _) in LINEARS.items()}
        return replace(layer, **leaves)

    return replace(params, layers=tuple(one(i, layer) for i, layer in enumerate(params.layers)))
