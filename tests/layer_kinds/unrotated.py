"""A toy attention without rotary embeddings: causal order is all that it knows of positions."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from jllm.config import LlamaConfig
from jllm.model.attention import AttentionInputs, attention_block, paged_attention
from jllm.model.fused_linear import norm_linear
from jllm.model.linear import linear
from jllm.model.paged import Packed
from jllm.model.param_specs import layer_types
from jllm.model.params import OUT, QKV, MLPParams, Weight, matrix, norm_weight
from jllm.model.taps import Tap
from pallas_kernels.cache_update import cache_update
from pallas_kernels.causal_attention import causal_attention
from pallas_kernels.formats.kv_pages import KVPages


@dataclass(frozen=True)
class UnrotatedConfig(LlamaConfig):
    """Every layer is without rotary embeddings."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class UnrotatedParams:
    norm: jax.Array = field(metadata=norm_weight("input_layernorm", "embed"))  # [E]
    qkv: Weight = field(metadata=matrix(QKV, "embed", "self_attn.qkv_proj"))  # [(H + 2K) D, E]
    o: Weight = field(metadata=matrix(OUT, "heads head_dim", residual=True))  # [E, H D]


@layer_types.register
def _(config: UnrotatedConfig, layer: int) -> tuple[type, type]:
    return UnrotatedParams, MLPParams


@attention_block.register
def _(
    p: UnrotatedParams,
    x: jax.Array,
    inputs: AttentionInputs,
    pages: KVPages | None,
    *,
    config: LlamaConfig,
    window: int | None,
    backend: str | None,
    tap: Tap,
) -> tuple[jax.Array, KVPages | None]:
    H, K, D, batch = config.num_heads, config.num_kv_heads, config.head_dim, inputs.batch
    qkv = norm_linear(x, p.norm, p.qkv, eps=config.norm_eps, backend=backend)
    q, k, v = jnp.split(qkv.reshape(-1, H + 2 * K, D), (H, H + K), axis=1)
    options: dict[str, Any] = {"scale": D**-0.5, "window": window, "backend": backend}
    if isinstance(batch, Packed):
        out = causal_attention(q, k, v, batch.segments, **options)
    else:
        assert pages is not None
        unturned = jnp.ones_like(inputs.cos), jnp.zeros_like(inputs.sin)
        q, pages = cache_update(q, k, v, *unturned, pages, batch.page, batch.offset, backend=backend)
        out = paged_attention(q, pages, inputs, **options)
    return linear(out.reshape(x.shape[0], -1), p.o, residual=x, backend=backend), pages
