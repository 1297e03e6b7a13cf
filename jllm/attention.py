"""The attention block, the first half of a layer: the residual stream plus attention of its norm.

It alone tells sequences apart. Without a cache (training) it runs over packed segments; with one (serving) this step's
K and V are written to their pages first, and decode rows and prompt chunks then read the pages.

Another kind of attention is a params type with its entries in the table (params.py), registered for a config in
param_specs.layer_types, and its block, registered here by that type.
"""

from dataclasses import dataclass
from functools import partial, singledispatch
from typing import Any

import jax
import jax.numpy as jnp

from jllm.attention_weights import packed_weights, paged_weights
from jllm.batch import Packed, Paged
from jllm.config import LlamaConfig
from jllm.fused_linear import norm_linear
from jllm.linear import linear
from jllm.params import AttentionParams
from jllm.taps import Tap
from pallas_kernels import decode_attention, prefill_attention
from pallas_kernels.cache_update import cache_update, cache_update_fused
from pallas_kernels.causal_attention import causal_attention
from pallas_kernels.kv_pages import KVPages
from pallas_kernels.kv_tail import settle, with_row_map
from pallas_kernels.norm_quant import norm_quant
from pallas_kernels.numerics import compute_dtype
from pallas_kernels.one_order import fenced
from pallas_kernels.rotary import rotate


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionInputs:
    """The inputs of attention beside the residual stream and its pages. They depend on positions and lengths alone, so
    that all layers of one window share them."""

    cos: jax.Array  # [T, D / 2]
    sin: jax.Array  # [T, D / 2]
    batch: Packed | Paged
    decode: decode_attention.Work | None = None
    prefill: prefill_attention.Work | None = None


def attention_inputs(
    batch: Packed | Paged,
    cos: jax.Array,
    sin: jax.Array,
    pages: KVPages | None,
    dtype: Any,
    *,
    config: LlamaConfig,
    window: int | None,
    backend: str | None,
) -> AttentionInputs:
    """The inputs of all layers of a window, for queries of this dtype and pages of any of the layers."""
    if pages is None or isinstance(batch, Packed):
        return AttentionInputs(cos, sin, batch)
    R = batch.short_rows
    C = batch.tokens.shape[0] - R
    q, qs = (jax.ShapeDtypeStruct((rows, config.num_heads, config.head_dim), dtype) for rows in (R, C))
    chunks = (batch.chunk_cu, batch.chunk_lengths)
    options: dict[str, Any] = {"window": window, "backend": backend}
    segments = batch.segments
    decode = decode_attention.plan(q, pages, batch.decode_lengths, segments=segments, **options) if R else None
    prefill = prefill_attention.plan(qs, pages, *chunks, scale=config.head_dim**-0.5, **options) if C else None
    return AttentionInputs(cos, sin, batch, decode, prefill)


@singledispatch
def attention_block(
    p: Any,
    x: jax.Array,
    inputs: AttentionInputs,
    pages: KVPages | None,
    *,
    config: LlamaConfig,
    window: int | None,
    backend: str | None,
    tap: Tap,
) -> tuple[jax.Array, KVPages | None]:
    """x [T, E] plus attention of its norm, and the updated pages. The type of `p` decides which attention."""
    raise NotImplementedError(f"{type(p).__name__} has no attention_block: register one for it")


@attention_block.register
def _(
    p: AttentionParams,
    x: jax.Array,
    inputs: AttentionInputs,
    pages: KVPages | None,
    *,
    config: LlamaConfig,
    window: int | None,
    backend: str | None,
    tap: Tap,
) -> tuple[jax.Array, KVPages | None]:
    batch, cos, sin = inputs.batch, inputs.cos, inputs.sin
    if tap.edits_any("attn_norm"):
        rows = tap.pass_on("attn_norm", norm_quant(x, p.norm, eps=config.norm_eps, backend=backend)[0])
        qkv = linear(rows, p.qkv, p.qkv_bias, backend=backend)
    else:
        tap("attn_norm", lambda: norm_quant(x, p.norm, eps=config.norm_eps, backend=backend)[0])
        qkv = norm_linear(x, p.norm, p.qkv, p.qkv_bias, eps=config.norm_eps, backend=backend)
    qkv = tap.pass_on("qkv", qkv)
    edited = kept = None
    split = partial(fenced, backend, lambda rows: _split_qkv(p, rows, config), qkv)
    if tap.edits_any("q", "k", "v"):
        q, k, v = split()
        edited = tap.pass_on("q", rotate(q, cos, sin)), tap.pass_on("k", rotate(k, cos, sin)), tap.pass_on("v", v)
    else:
        tap("q", lambda: rotate(split()[0], cos, sin))
        tap("k", lambda: rotate(split()[1], cos, sin))
        tap("v", lambda: split()[2])
    options: dict[str, Any] = {"scale": config.head_dim**-0.5, "window": window, "backend": backend}
    if pages is None:
        assert isinstance(batch, Packed), "without a cache, the batch is Packed"
        q, k, v = split() if edited is None else edited
        if edited is None:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        tap("weights", lambda: packed_weights(q, k, batch.segments, scale=options["scale"], window=window))
        out = causal_attention(q, k, v, batch.segments, **options)
    else:
        assert isinstance(batch, Paged), "with a cache, the batch is Paged"
        pages = with_row_map(pages, batch.row_map)
        if edited is not None:
            unturned = jnp.ones_like(cos), jnp.zeros_like(sin)
            q, pages = cache_update(*edited, *unturned, pages, batch.page, batch.offset, backend=backend)
        elif p.q_norm is None:
            q, pages = cache_update_fused(qkv, cos, sin, pages, batch.page, batch.offset, backend=backend)
        else:
            q, k, v = split()
            q, pages = cache_update(q, k, v, cos, sin, pages, batch.page, batch.offset, backend=backend)
        tap("weights", lambda: paged_weights(q, pages, batch, scale=options["scale"], window=window))
        out = paged_attention(q, pages, inputs, **options)
        kept = settle(pages)
    out = tap.pass_on("attention", out.reshape(x.shape[0], -1))
    shared: dict[str, Any] = {"axis": config.axis, "parts": config.activation_parts}
    return linear(out, p.o, p.o_bias, residual=x, backend=backend, **shared), kept


def _split_qkv(p: AttentionParams, qkv: jax.Array, config: LlamaConfig) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q [T, H, D], k and v [T, K, D], before rotation."""
    H, K, D = config.num_heads, config.num_kv_heads, config.head_dim
    q, k, v = jnp.split(qkv.reshape(-1, H + 2 * K, D), (H, H + K), axis=1)
    if p.q_norm is not None and p.k_norm is not None:
        q, k = rms_norm(q, p.q_norm, config.norm_eps), rms_norm(k, p.k_norm, config.norm_eps)
    return q, k, v


def paged_attention(q: jax.Array, pages: KVPages, inputs: AttentionInputs, **options: Any) -> jax.Array:
    """Attention of queries [T, H, D] over pages: [T, H, D]. Decode rows and prompt chunks each go to their own kernel,
    which take all queries and write to one array; both take the options scale, window and backend."""
    batch = inputs.batch
    assert isinstance(batch, Paged), "with a cache, the batch is Paged"
    R, out = batch.short_rows, None
    if R:
        rows = (batch.decode_pages, batch.decode_lengths)
        own = options | {"segments": batch.segments, "rows": batch.width, "work": inputs.decode}
        out = decode_attention.decode_attention(q, pages, *rows, **own)
    if out is None or q.shape[0] > R:
        chunks = (batch.chunk_pages, batch.chunk_cu, batch.chunk_lengths)
        own = options | {"into": out, "first": R, "work": inputs.prefill}
        out = prefill_attention.prefill_attention(q, pages, *chunks, **own)
    return out


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root mean square norm over the last axis (Zhang and Sennrich, arXiv 1910.07467), computed in float32 at least."""
    y = x.astype(compute_dtype(x.dtype))
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + jnp.asarray(eps, y.dtype))
    weight = weight.reshape((1,) * (x.ndim - 1) + weight.shape)
    return y.astype(x.dtype) * weight.astype(x.dtype)
