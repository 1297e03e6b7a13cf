"""The LLaMA forward pass, a pure function of weights, tokens and (optionally) a paged KV cache.

All tokens of all sequences lie head to tail on one flat axis T: norms, matmuls and rotary embeddings see [T, E] and
know nothing of sequences. A layer is an attention block and an MLP block, each chosen by the type of its params.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from jllm.attention import AttentionInputs, attention_block, attention_inputs
from jllm.batch import Packed, Paged
from jllm.cache import Cache
from jllm.config import LlamaConfig
from jllm.errors import EvaluationError
from jllm.fused_linear import norm_linear
from jllm.hooks import Edits, HookRows, Hooks, make_edits
from jllm.linear import embed, linear
from jllm.mlp import mlp_block
from jllm.parallel.ranks import HEADS, WHOLE, per_rank
from jllm.params import LayerParams, Params
from jllm.rope import angles
from jllm.taps import Tap, of_layer, resolve_taps
from pallas_kernels.backends import DIFFERENTIABLE
from pallas_kernels.kv_pages import KVPages
from pallas_kernels.norm_quant import norm_quant
from pallas_kernels.numerics import compute_dtype
from pallas_kernels.one_order import fenced

Taps = dict[str, jax.Array]  # by names of jllm.taps


def packed_logits(
    params: Params,
    config: LlamaConfig,
    batch: Packed,
    edit: Mapping[str, Callable] = MappingProxyType({}),
    *,
    backend: str = DIFFERENTIABLE,
) -> jax.Array:
    """Logits [T, V] of whole sequences without a cache, float32 at least: differentiable, and fit for vmap. `edit` is
    that of jllm.hooks.Hooks; the slot of its rows is the segment. `backend` is one whose operations have gradients:
    XLA's, or "training", which leaves attention in 16 bits to cuDNN on a GPU."""
    if config.mesh is not None:

        def own(params: Params, batch: Packed, hooks: Hooks, config: LlamaConfig) -> jax.Array:
            return packed_logits(params, config, batch, hooks.edit, backend=backend)

        return per_rank(own, config, (WHOLE, WHOLE), WHOLE)(params, batch, Hooks(edit))
    edits = None
    if edit:
        edits = make_edits(edit, config.num_layers, HookRows(batch.segments, batch.positions, batch.tokens))
    hidden, _, _ = tapped_backbone(params, config, batch, None, backend=backend, edits=edits)
    return head(params, config, hidden, backend=backend, edits=edits)


def backbone(
    params: Params, config: LlamaConfig, batch: Packed | Paged, cache: Cache | None, *, backend: str | None = None
) -> tuple[jax.Array, Cache | None]:
    """Hidden states [T, E] before the final norm, and the updated cache."""
    return tapped_backbone(params, config, batch, cache, backend=backend)[:2]


def tapped_backbone(
    params: Params,
    config: LlamaConfig,
    batch: Packed | Paged,
    cache: Cache | None,
    taps: tuple[str, ...] = (),
    *,
    backend: str | None = None,
    edits: Edits | None = None,
) -> tuple[jax.Array, Cache | None, Taps]:
    """backbone, with edits of its values, and those of them that taps name (see jllm.taps). Raises EvaluationError for
    names that the model doesn't have, or one of its layers."""
    taps = resolve_taps(taps, config.num_layers)
    if config.mesh is not None:

        def own(
            params: Params, batch: Packed | Paged, cache: Cache | None, edits: Edits | None, config: LlamaConfig
        ) -> tuple[jax.Array, Cache | None, Taps]:
            return tapped_backbone(params, config, batch, cache, taps, backend=backend, edits=edits)

        spread = per_rank(own, config, (WHOLE, HEADS, WHOLE), (WHOLE, HEADS, WHOLE))
        return spread(params, batch, cache, edits)
    tokens = batch.tokens if config.axis is None else jnp.clip(batch.tokens, 0, config.vocab_size - 1)
    x = embed(params.embed, tokens, params.dtype, axis=config.axis, backend=backend)
    x = x if edits is None else edits.apply("embedding", x)
    found = {"embedding": x} if "embedding" in taps else {}
    x, cache, inside = run_layers(params.layers, config, x, batch, cache, taps, backend=backend, edits=edits)
    return x, cache, found | inside


def run_layers(
    layers: tuple[LayerParams, ...],
    config: LlamaConfig,
    x: jax.Array,
    batch: Packed | Paged,
    cache: Cache | None,
    taps: tuple[str, ...] = (),
    *,
    backend: str | None = None,
    edits: Edits | None = None,
) -> tuple[jax.Array, Cache | None, Taps]:
    """tapped_backbone after the embedding: of inputs [T, E], with taps that are resolved. batch.tokens play no part."""
    if backend is None and cache is None:
        backend = DIFFERENTIABLE
    found: Taps = {}
    cos, sin = fenced(backend, lambda at: angles(config, at, compute_dtype(x.dtype)), batch.positions)
    rows = (batch, cos, sin, None if cache is None else cache[0], x.dtype)
    options: dict[str, Any] = {"config": config, "backend": backend}
    windows = dict.fromkeys(config.windows or (None,))
    inputs = {window: attention_inputs(*rows, window=window, **options) for window in windows}
    pools = []
    for i, layer in enumerate(layers):
        window = config.window(i)
        pages = None if cache is None else cache[i]
        wanted = of_layer(taps, i)
        own = None if edits is None else edits.of_layer(i)
        x, pages, inside = _layer(layer, x, inputs[window], pages, own, window=window, taps=wanted, **options)
        if missing := [name for name in wanted if name not in inside]:
            raise EvaluationError(f"tap layers.{i}.{missing[0]}: this kind of layer has no such value")
        found |= {f"layers.{i}.{name}": value for name, value in inside.items()}
        pools.append(pages)
    return x, None if cache is None else tuple(pools), found


def head(
    params: Params,
    config: LlamaConfig,
    hidden: jax.Array,
    *,
    backend: str | None = None,
    edits: Edits | None = None,
    whole: bool = True,
) -> jax.Array:
    """Logits [T, V] of hidden states [T, E], float32 at least. Not `whole`: a device of a mesh has those of its part of
    the vocabulary."""
    if config.mesh is not None:
        own = lambda params, hidden, edits, config: head(params, config, hidden, backend=backend, edits=edits)  # noqa: E731
        return per_rank(own, config, (WHOLE, WHOLE), WHOLE)(params, hidden, edits)
    w = params.embed if params.head is None else params.head
    dtype = compute_dtype(hidden.dtype)
    if edits is not None:
        normed = edits.apply("norm", norm_quant(hidden, params.norm, eps=config.norm_eps, backend=backend)[0])
        return edits.apply("logits", whole_rows(linear(normed, w, out_dtype=dtype, backend=backend), config))
    logits = norm_linear(hidden, params.norm, w, eps=config.norm_eps, out_dtype=dtype, backend=backend)
    return whole_rows(logits, config) if whole else logits


def whole_rows(logits: jax.Array, config: LlamaConfig) -> jax.Array:
    """Logits [T, V], where each device of a mesh computed a part of every row; without a mesh as they are."""
    if config.axis is None:
        return logits
    parts = jax.lax.all_gather(logits, config.axis.name, axis=1, tiled=True)
    return parts[:, : config.vocab_size]  # the last device's rows are padded


def head_taps(
    params: Params,
    config: LlamaConfig,
    hidden: jax.Array,
    logits: jax.Array,
    taps: tuple[str, ...],
    *,
    backend: str | None = None,
    edits: Edits | None = None,
) -> Taps:
    """Those of the values that taps name which the head computes, of rows [rows, E]."""
    names, found = resolve_taps(taps, config.num_layers), {}
    if "norm" in names:
        weight = params.norm if config.mesh is None else params.norm[0]  # all devices have the same
        normed = norm_quant(hidden, weight, eps=config.norm_eps, backend=backend)[0]
        found["norm"] = normed if edits is None else edits.apply("norm", normed)
    return found | ({"logits": logits} if "logits" in names else {})


# One trace and one lowering serve all layers of the same kinds and window.
@partial(jax.jit, static_argnames=("config", "window", "backend", "taps"))
def _layer(
    p: LayerParams,
    x: jax.Array,
    inputs: AttentionInputs,
    pages: KVPages | None,
    edits: Edits | None = None,
    *,
    config: LlamaConfig,
    window: int | None,
    backend: str | None,
    taps: tuple[str, ...] = (),
) -> tuple[jax.Array, KVPages | None, Taps]:
    tap = Tap(taps, edits, config)
    options: dict[str, Any] = {"config": config, "backend": backend, "tap": tap}
    x = tap.pass_on("input", x)
    middle, pages = attention_block(p.attention, x, inputs, pages, window=window, **options)
    middle = tap.pass_on("middle", middle)
    y = mlp_block(p.mlp, middle, **options)
    y = tap.pass_on("output", y)
    tap.check_edits()
    return y, pages, tap.found
