"""A toy Mixture of Experts: each token goes to the one expert that its router likes best. All experts compute all
tokens, and the output projection sums over experts."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from jllm.config import LlamaConfig
from jllm.model.linear import linear
from jllm.model.mlp import mlp_block
from jllm.model.param_specs import layer_types
from jllm.model.params import AttentionParams, MLPParams, Weight, matrix, norm_weight
from jllm.model.taps import Tap
from pallas_kernels.norm_quant import norm_quant
from pallas_kernels.silu_mul_quant import silu_mul_quant

GATE_UP = {"mlp.experts.gate_proj": "experts ffn", "mlp.experts.up_proj": "experts ffn"}
DOWN = {"mlp.experts.down_proj": "embed"}


@dataclass(frozen=True)
class ExpertsConfig(LlamaConfig):
    """The first layer has an ordinary MLP, the others have experts."""

    num_experts: int = 2  # X

    @property
    def axes(self) -> dict[str, int]:
        return super().axes | {"experts": self.num_experts}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExpertsParams:
    norm: jax.Array = field(metadata=norm_weight("post_attention_layernorm", "embed"))  # [E]
    router: Weight = field(metadata=matrix({"mlp.router": "experts"}, "embed", reads="mlp_norm"))  # [X, E]
    # [2 X F, E]: gate rows of all experts, up rows of all experts
    gate_up: Weight = field(metadata=matrix(GATE_UP, "embed", "mlp.experts.gate_up_proj", reads="mlp_norm"))
    down: Weight = field(metadata=matrix(DOWN, "experts ffn", reads="silu_mul", residual=True))  # [E, X F]


@layer_types.register
def _(config: ExpertsConfig, layer: int) -> tuple[type, type]:
    return AttentionParams, ExpertsParams if layer else MLPParams


@mlp_block.register
def _(p: ExpertsParams, x: jax.Array, *, config: ExpertsConfig, backend: str | None, tap: Tap) -> jax.Array:
    normed = tap("mlp_norm", norm_quant(x, p.norm, eps=config.norm_eps, backend=backend)[0])
    likes = linear(normed, p.router, backend=backend)
    chosen = jax.nn.one_hot(jnp.argmax(likes, axis=1), config.num_experts, dtype=x.dtype)
    shares = jax.nn.softmax(likes, axis=1) * chosen
    gate_up = linear(normed, p.gate_up, backend=backend)
    rows = silu_mul_quant(gate_up, backend=backend).reshape(x.shape[0], config.num_experts, -1)
    rows = tap("silu_mul", (rows * shares[:, :, None]).reshape(x.shape[0], -1))
    return linear(rows, p.down, residual=x, backend=backend)
