"""The weights of a model as an explicit pytree: a tuple of per-layer dataclasses, never stacked arrays."""

from dataclasses import dataclass

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerParams:
    """One decoder layer. Linear weights are [out, in]; horizontally merged ones are concatenated along out."""

    attn_norm: jax.Array  # [E]
    qkv: jax.Array  # [(H + 2K) D, E]: query rows, key rows, value rows
    qkv_bias: jax.Array | None  # [(H + 2K) D]
    q_norm: jax.Array | None  # [D]
    k_norm: jax.Array | None  # [D]
    o: jax.Array  # [E, H D]
    o_bias: jax.Array | None  # [E]
    mlp_norm: jax.Array  # [E]
    gate_up: jax.Array  # [2F, E]: gate rows, up rows
    gate_up_bias: jax.Array | None  # [2F]
    down: jax.Array  # [E, F]
    down_bias: jax.Array | None  # [E]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Params:
    """A whole model."""

    embed: jax.Array  # [V, E]
    layers: tuple[LayerParams, ...]
    norm: jax.Array  # [E]
    head: jax.Array | None  # [V, E]; None when tied to embed
