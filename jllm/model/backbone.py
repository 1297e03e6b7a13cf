"""Computes the LLaMA forward pass, a pure function of weights, tokens and (optionally) a paged KV cache.

All tokens of all sequences lie head to tail on one flat axis T. Norms, matmuls and rotary embeddings see [T, E] and do
not depend on sequences. A layer is an attention block and an MLP block, each chosen by the type of its params.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from jllm.config import LlamaConfig
from jllm.errors import EvaluationError
from jllm.model import experts as _experts  # noqa: F401  (registers its block)
from jllm.model import norm_after as _norm_after  # noqa: F401  (likewise)
from jllm.model.adapters import with_adapters
from jllm.model.attention import AttentionInputs, attention_block, attention_inputs
from jllm.model.cache import Cache
from jllm.model.fused_linear import norm_linear
from jllm.model.hooks import Edits, HookRows, make_edits
from jllm.model.linear import embed, linear
from jllm.model.mlp import mlp_block
from jllm.model.norms import norm_rows
from jllm.model.paged import Packed, Paged
from jllm.model.params import LayerParams, Params
from jllm.model.rope import angles
from jllm.model.shapes import Array, Float, shaped
from jllm.model.taps import Tap, of_layer, resolve_taps
from jllm.parallel.ranks import HEADS, REPLICATED, STACKED, on_mesh
from pallas_kernels.backends import DIFFERENTIABLE
from pallas_kernels.formats.kv_pages import KVPages
from pallas_kernels.formats.numerics import compute_dtype
from pallas_kernels.one_order import fenced

Taps = dict[str, jax.Array]  # by the names in jllm.model.taps


@shaped
def packed_logits(
    params: Params,
    config: LlamaConfig,
    batch: Packed,
    edit: Mapping[str, Callable] = MappingProxyType({}),
    *,
    add: Mapping[str, Callable] = MappingProxyType({}),
    inputs: Any = None,
    backend: str = DIFFERENTIABLE,
) -> Float[Array, "T {config.vocab_size}"]:
    """Returns logits of whole sequences without a cache, in float32 at least. It is differentiable, and vmap takes it.

    `edit` and `add` are as in Hooks; the slot of a row is its segment, and `inputs` are HookRows.inputs. `backend` must
    be one whose operations have gradients: XLA's, or "training", which leaves attention in 16 bits to cuDNN on a GPU.
    """
    rows = HookRows(batch.segments, batch.positions, batch.tokens, inputs=inputs)
    edits = make_edits(edit, config.num_layers, rows, add)
    hidden, _, _ = tapped_backbone(params, config, batch, None, backend=backend, edits=edits)
    return head(params, config, hidden, backend=backend, edits=edits)


@shaped
def backbone(
    params: Params, config: LlamaConfig, batch: Packed | Paged, cache: Cache | None, *, backend: str | None = None
) -> tuple[Float[Array, "T {config.hidden_size}"], Cache | None]:
    """Returns hidden states before the final norm, and the updated cache."""
    return tapped_backbone(params, config, batch, cache, backend=backend)[:2]


@on_mesh({"params": STACKED, "batch": REPLICATED, "cache": HEADS, "edits": REPLICATED}, (REPLICATED, HEADS, REPLICATED))
@shaped
def tapped_backbone(
    params: Params,
    config: LlamaConfig,
    batch: Packed | Paged,
    cache: Cache | None,
    taps: tuple[str, ...] = (),
    *,
    backend: str | None = None,
    edits: Edits | None = None,
) -> tuple[Float[Array, "T {config.hidden_size}"], Cache | None, Taps]:
    """Returns what backbone returns, after edits, and the values that taps name (see jllm.model.taps). Raises
    EvaluationError for names that the model does not have, or that one of its layers does not have."""
    taps = resolve_taps(taps, config.num_layers)
    tokens = batch.tokens if config.axis is None else jnp.clip(batch.tokens, 0, config.vocab_size - 1)
    x = embed(params.embed, tokens, params.dtype, axis=config.axis, backend=backend)
    if config.embedding_multiplier != 1:
        x = x * jnp.asarray(config.embedding_multiplier, x.dtype)
    x = x if edits is None else edits.apply("embedding", x, backend)
    found = {"embedding": x} if "embedding" in taps else {}
    layers = params.layers
    if params.adapters is not None:
        assert isinstance(batch, Paged), "params with adapters take a step's rows"
        assert batch.adapter is not None, "its rows say which adapter they take"
        layers = with_adapters(params, config, batch.adapter, batch.runs)
    x, cache, inside = run_layers(layers, config, x, batch, cache, taps, backend=backend, edits=edits)
    return x, cache, found | inside


@shaped
def run_layers(
    layers: Sequence[LayerParams],
    config: LlamaConfig,
    x: Float[Array, "T E"],
    batch: Packed | Paged,
    cache: Cache | None,
    taps: tuple[str, ...] = (),
    *,
    backend: str | None = None,
    edits: Edits | None = None,
) -> tuple[Float[Array, "T E"], Cache | None, Taps]:
    """Runs the part of tapped_backbone after the embedding: x are its inputs, and taps are resolved. It does not read
    batch.tokens."""
    if backend is None and cache is None:
        backend = DIFFERENTIABLE
    found: Taps = {}
    options: dict[str, Any] = {"config": config, "backend": backend}
    wide = compute_dtype(x.dtype)
    kinds = dict.fromkeys((config.rotation(i), config.window(i)) for i in range(config.num_layers))
    turns = {
        rotation: fenced(backend, partial(angles, config, dtype=wide, rotation=rotation), batch.positions)
        for rotation in dict.fromkeys(rotation for rotation, _ in kinds)
    }
    inputs = {
        (rotation, window): attention_inputs(batch, *turns[rotation], cache, x.dtype, window=window, **options)
        for rotation, window in kinds
    }
    for i, layer in enumerate(layers):
        kind = _, window = config.rotation(i), config.window(i)
        pages = None if cache is None else cache.at_layer(i)
        wanted = of_layer(taps, i)
        own = None if edits is None else edits.of_layer(i)
        x, cache, inside = _layer(layer, x, inputs[kind], pages, own, window=window, taps=wanted, **options)
        if missing := [name for name in wanted if name not in inside]:
            raise EvaluationError(f"tap layers.{i}.{missing[0]}: this kind of layer has no such value")
        found |= {f"layers.{i}.{name}": value for name, value in inside.items()}
    return x, None if cache is None else cache.at_layer(None), found


@on_mesh({"params": STACKED, "hidden": REPLICATED, "edits": REPLICATED}, REPLICATED)
@shaped
def head(
    params: Params,
    config: LlamaConfig,
    hidden: Float[Array, "T E"],
    *,
    backend: str | None = None,
    edits: Edits | None = None,
    whole: bool = True,
) -> Float[Array, "T V"]:
    """Returns logits of hidden states, in float32 at least. On a mesh with whole=False, a device returns the logits of
    its part of the vocabulary."""
    w = params.embed if params.head is None else params.head
    dtype = compute_dtype(hidden.dtype)
    if edits is not None:
        normed = edits.apply("norm", norm_rows(hidden, params.norm, config, backend), backend)
        logits = scale_logits(linear(normed, w, out_dtype=dtype, backend=backend), config, backend)
        return edits.apply("logits", whole_rows(logits, config), backend)
    if config.norm_offset:
        logits = linear(norm_rows(hidden, params.norm, config, backend), w, out_dtype=dtype, backend=backend)
    else:
        logits = norm_linear(hidden, params.norm, w, eps=config.norm_eps, out_dtype=dtype, backend=backend)
    logits = scale_logits(logits, config, backend)
    return whole_rows(logits, config) if whole else logits


@shaped
def scale_logits(logits: Float[Array, "T part"], config: LlamaConfig, backend: str | None) -> Float[Array, "T part"]:
    """Returns logits with the model's divisor and softcap."""
    if config.logit_divisor == 1 and config.logit_softcap is None:
        return logits

    def scaled(x: jax.Array) -> jax.Array:
        x = x / config.logit_divisor
        return x if config.logit_softcap is None else config.logit_softcap * jnp.tanh(x / config.logit_softcap)

    return fenced(backend, scaled, logits)


@shaped
def whole_rows(logits: Float[Array, "T part"], config: LlamaConfig) -> Float[Array, "T {config.vocab_size}"]:
    """Returns whole rows of logits. On a mesh it gathers the parts that the devices computed; without one the rows are
    whole."""
    if config.axis is None:
        return logits
    parts = jax.lax.all_gather(logits, config.axis.name, axis=1, tiled=True)
    return parts[:, : config.vocab_size]  # the last device's part is padded


@shaped
def head_taps(
    params: Params,
    config: LlamaConfig,
    hidden: Float[Array, "rows E"],
    logits: Float[Array, "rows V"],
    taps: tuple[str, ...],
    *,
    backend: str | None = None,
    edits: Edits | None = None,
) -> Taps:
    """Returns the values of the head that taps name."""
    names, found = resolve_taps(taps, config.num_layers), {}
    if "norm" in names:
        weight = params.norm if config.mesh is None else params.norm[0]  # all devices have the same
        normed = norm_rows(hidden, weight, config, backend)
        found["norm"] = normed if edits is None else edits.apply("norm", normed, backend)
    return found | ({"logits": logits} if "logits" in names else {})


# One trace and one lowering serve all layers of the same kinds, window and rotation.
@partial(jax.jit, static_argnames=("config", "window", "backend", "taps"))
@shaped
def _layer(
    p: LayerParams,
    x: Float[Array, "T E"],
    inputs: AttentionInputs,
    pages: KVPages | None,
    edits: Edits | None = None,
    *,
    config: LlamaConfig,
    window: int | None,
    backend: str | None,
    taps: tuple[str, ...] = (),
) -> tuple[Float[Array, "T E"], KVPages | None, Taps]:
    tap = Tap(taps, edits, config, backend)
    options: dict[str, Any] = {"config": config, "backend": backend, "tap": tap}
    x = tap("input", x)
    middle, pages = attention_block(p.attention, x, inputs, pages, window=window, **options)
    middle = tap("middle", middle)
    y = mlp_block(p.mlp, middle, **options)
    y = tap("output", y)
    tap.check_edits()
    return y, pages, tap.found
