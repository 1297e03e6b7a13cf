"""Wraps a model's weights in a flax.nnx.Module, to be trained by nnx and optax. It needs the extra `train`."""

from dataclasses import fields, replace
from typing import Any

import jax
import jax.numpy as jnp

from jllm.config import LlamaConfig
from jllm.errors import CheckpointError, how_to_install
from jllm.model.backbone import packed_logits
from jllm.model.paged import Packed
from jllm.model.params import AttentionParams, LayerParams, MLPParams, Params
from jllm.training.logprobs import token_logprobs

try:
    from flax import nnx
except ImportError:
    raise ImportError(f"jllm.nnx needs flax: {how_to_install('train')}") from None


class Llama(nnx.Module):
    """Holds Params, each leaf as an nnx.Param. All that it computes is a pure function of them.

    nnx.Optimizer(model, optimizer, wrt=nnx.Param) trains it, and orbax saves the leaves of its nnx.state. `params`
    gives its weights to an engine. Give it masters in float32: token_logprobs casts them.
    """

    def __init__(self, params: Params, config: LlamaConfig):
        self.weights = nnx.data(jax.tree.map(nnx.Param, params))
        self.config = config

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns logits [B, L, V] of whole sequences i32[B, L], in float32 at least (packed_logits)."""
        position = jnp.arange(tokens.shape[1], dtype=jnp.int32)

        def one(row: jax.Array) -> jax.Array:
            return packed_logits(params(self), self.config, Packed(row, position, jnp.zeros_like(position)))

        return jax.vmap(one)(tokens)

    def token_logprobs(self, tokens: jax.Array, lengths: jax.Array, **options: Any) -> Any:
        """Returns the log-probability [B, L] of each next token, as jllm.token_logprobs with these options."""
        return token_logprobs(params(self), self.config, tokens, lengths, **options)


def params(state: Llama | nnx.State) -> Params:
    """Returns the weights of a Llama, or of its nnx.State, without a copy: the argument of Engine.update. The layers
    of a state's model are AttentionParams and MLPParams."""
    if isinstance(state, Llama):
        return jax.tree.map(_value, state.weights, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    found = state["weights"]
    layers = (
        LayerParams(_part(AttentionParams, layer["attention"]), _part(MLPParams, layer["mlp"]))
        for _, layer in sorted(found["layers"].items())
    )
    return replace(_part(Params, found), layers=tuple(layers))


def _part(kind: type, found: Any) -> Any:
    """Returns a dataclass of a state's arrays, with None for weights that the model does not have. Raises
    CheckpointError for weights that this kind does not have."""
    if extra := set(found) - {each.name for each in fields(kind)}:
        raise CheckpointError(f"a state with {sorted(extra)[0]} is not of a LLaMA's layers: give the Llama itself")
    return kind(**{each.name: _value(found.get(each.name)) for each in fields(kind)})


def _value(leaf: Any) -> Any:
    return leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf
