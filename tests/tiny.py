"""Small random models for tests: sharp enough that greedy tokens differ, quick to compile."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jllm.config import Experts, LlamaConfig
from jllm.engine.engine import Engine
from jllm.engine.request import Completion, SamplingParams
from jllm.model.backbone import Packed, packed_logits
from jllm.model.model import Model
from jllm.model.param_specs import init_params
from jllm.model.params import AttentionParams, LayerParams, MLPParams, Params
from jllm.step.buckets import Bucket

CONFIG = LlamaConfig(
    "LlamaForCausalLM",
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    context=128,
    eos_ids=(2,),
    dtype="float32",
)


def tiny_model(dtype="float32", seed: int = 0, tokenizer=None, **changes) -> Model:
    """A model of CONFIG's shapes (with changes) and zero-mean random weights."""
    c = replace(CONFIG, dtype=str(dtype), **changes)
    rng = np.random.default_rng(seed)
    H, K, D, E, F, V = c.num_heads, c.num_kv_heads, c.head_dim, c.hidden_size, c.intermediate_size, c.vocab_size

    def normal(*shape: int, scale: float = 0.2, mean: float = 0.0) -> jax.Array:
        return jnp.asarray(mean + scale * rng.normal(size=shape), dtype)

    def layer() -> LayerParams:
        attention = AttentionParams(
            norm=normal(E, mean=1.0),
            qkv=normal((H + 2 * K) * D, E),
            qkv_bias=None,
            q_norm=None,
            k_norm=None,
            o=normal(E, H * D),
            o_bias=None,
        )
        mlp = MLPParams(
            norm=normal(E, mean=1.0),
            gate_up=normal(2 * F, E),
            gate_up_bias=None,
            down=normal(E, F),
            down_bias=None,
        )
        return LayerParams(attention, mlp)

    layers = tuple(layer() for _ in range(c.num_layers))
    head = None if c.tie_embeddings else normal(V, E, scale=0.4)
    return Model(c, Params(normal(V, E, scale=1.0), layers, normal(E, mean=1.0), head), tokenizer)


EXPERTS = Experts(count=5, chosen=2, ffn=32, normalize=True, layers=(False, True))


def experts_model(dtype: str = "float32", experts: Experts = EXPERTS) -> Model:
    """A dense layer and one of experts, with random weights that are scaled such that each block matters."""
    config = replace(CONFIG, dtype=dtype, intermediate_size=64, experts=experts)
    params = init_params(config, jax.random.key(0))
    return Model(config, jax.tree.map(lambda leaf: leaf if leaf.ndim == 1 else leaf * 10, params))


def with_fields(layer: LayerParams, attention: dict[str, Any] | None = None, mlp: dict[str, Any] | None = None):
    """The layer with other values in some fields of its parts."""
    return LayerParams(replace(layer.attention, **attention or {}), replace(layer.mlp, **mlp or {}))


def one_size(slots: int = 4, page_size: int = 8, tokens: int = 28) -> dict[str, Any]:
    """Options of an engine whose steps are one program, where one left to itself has up to fifteen and compiles those
    that it meets: for tests in which it doesn't matter which sizes there are."""
    buckets = (Bucket(slots, tokens, slots),)
    return {"max_slots": slots, "page_size": page_size, "max_step_tokens": slots + tokens, "buckets": buckets}


def serve(model: Model, prompts, sampling, **options) -> list[Completion]:
    """All prompts at once through a fresh engine, of one size unless options give one; completions by prompt (one
    sample each)."""
    engine = Engine(model, **(options if "max_slots" in options else one_size() | options))
    ids = [engine.submit(p, s) for p, s in zip(prompts, sampling, strict=True)]
    done = {e.id: e.completion for e in engine.run() if e.completion}
    return [done[i] for i in ids]


def full_logits(model: Model, tokens, pad: int = 128) -> np.ndarray:
    """Logits [len(tokens), V] of the forward without a cache, padded so that it compiles once."""
    padded = np.zeros(pad, np.int32)
    padded[: len(tokens)] = tokens
    return np.asarray(_full(model.params, model.config, jnp.asarray(padded)))[: len(tokens)]


def _full_impl(params, config, tokens):
    positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    return packed_logits(params, config, Packed(tokens, positions, jnp.zeros_like(tokens)))


_full = jax.jit(_full_impl, static_argnames="config")


def greedy(tokens: int = 16, **kw) -> SamplingParams:
    """Greedy for `tokens` tokens, whatever they are."""
    return SamplingParams(**{"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True, **kw})


def log_softmax(x: np.ndarray) -> np.ndarray:
    """Over the last axis, in the dtype of x."""
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))
