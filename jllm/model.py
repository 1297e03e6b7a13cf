"""The LLaMA forward pass, a pure function of weights, tokens and (optionally) a paged KV cache.

All tokens of all sequences lie head to tail on one flat axis T: norms, matmuls and rotary embeddings see [T, E] and
know nothing of sequences. Attention alone tells them apart. Without a cache (training) it runs over packed segments;
with one (serving) this step's K and V are written to their pages first, and decode rows and prompt chunks then read
the pages.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jllm.config import LlamaConfig
from jllm.linear import embed, linear, norm, silu_mul
from jllm.params import LayerParams, Params, Weight
from jllm.rope import angles
from pallas_kernels import decode_attention, prefill_attention
from pallas_kernels.backends import on_hopper
from pallas_kernels.cache_update import cache_update, cache_update_fused
from pallas_kernels.causal_attention import causal_attention
from pallas_kernels.kv_pages import KVPages
from pallas_kernels.numerics import compute_dtype
from pallas_kernels.rotary import rotate

Cache = tuple[KVPages, ...]  # one a layer


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Packed:
    """Whole sequences without a cache. Under vmap for a batch of rows."""

    tokens: jax.Array  # i32[T]
    positions: jax.Array  # i32[T], from 0 in each segment
    segments: jax.Array  # i32[T], equal for tokens that may see each other


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Paged:
    """One merged step: R decode rows (one token each), then B prompt chunks on C rows; T = R + C."""

    tokens: jax.Array  # i32[T]
    positions: jax.Array  # i32[T]
    page: jax.Array  # i32[T], where the token's K and V go; >= N writes nothing
    offset: jax.Array  # i32[T], within the page
    decode_pages: jax.Array  # i32[R, M]
    decode_lengths: jax.Array  # i32[R], keys visible to the row, its own included; 0: unused row
    chunk_pages: jax.Array  # i32[B, M]
    chunk_cu: jax.Array  # i32[B + 1], chunk b's rows are R + chunk_cu[b] .. R + chunk_cu[b + 1]
    chunk_lengths: jax.Array  # i32[B], keys visible to the chunk's last row


def forward(
    params: Params, config: LlamaConfig, batch: Packed | Paged, cache: Cache | None, *, backend: str | None = None
) -> tuple[jax.Array, Cache | None]:
    """Logits [T, V] of every row (float32 at least), and the updated cache.

    backend names the kernels ("xla", "mosaic"); None chooses for the device, and XLA without a cache, since gradients
    and vmap go through that. Raises NotImplementedError for one that lacks these sizes or formats.
    """
    hidden, cache = backbone(params, config, batch, cache, backend=backend)
    return head(params, config, hidden, backend=_backend(backend, cache)), cache


def backbone(
    params: Params, config: LlamaConfig, batch: Packed | Paged, cache: Cache | None, *, backend: str | None = None
) -> tuple[jax.Array, Cache | None]:
    """Hidden states [T, E] before the final norm, and the updated cache."""
    backend = _backend(backend, cache)
    x = embed(params.embed, batch.tokens, params.norm.dtype)
    cos, sin = angles(config, batch.positions, compute_dtype(x.dtype))
    works = {w: _plan(batch, config, w, x.dtype, cache, backend) for w in dict.fromkeys(config.windows or (None,))}
    pools = []
    for i, layer in enumerate(params.layers):
        window = config.window(i)
        pages = None if cache is None else cache[i]
        x, pages = _layer(
            layer, x, cos, sin, batch, works[window], pages, config=config, window=window, backend=backend
        )
        pools.append(pages)
    return x, None if cache is None else tuple(pools)


def head(params: Params, config: LlamaConfig, hidden: jax.Array, *, backend: str | None = None) -> jax.Array:
    """Logits [T, V] of hidden states [T, E], float32 at least."""
    w = params.embed if params.head is None else params.head
    x = norm(hidden, params.norm, config.norm_eps, w, backend=backend)
    return linear(x, w, out_dtype=compute_dtype(hidden.dtype), backend=backend)


def _backend(backend: str | None, cache: Cache | None) -> str | None:
    return "xla" if backend is None and cache is None else backend


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Works:
    """Work lists of the attention kernels: they depend on lengths alone, so all layers of one window share them."""

    decode: decode_attention.Work | None = None
    prefill: prefill_attention.Work | None = None


def _plan(
    batch: Packed | Paged, config: LlamaConfig, window: int | None, dtype, cache: Cache | None, backend: str | None
) -> _Works:
    on_kernels = backend == "mosaic" or (backend is None and on_hopper())
    if cache is None or isinstance(batch, Packed) or not on_kernels:
        return _Works()
    heads = (config.num_heads, config.num_kv_heads, config.head_dim)
    R = batch.decode_lengths.shape[0]
    q = jax.ShapeDtypeStruct((batch.tokens.shape[0] - R, config.num_heads, config.head_dim), dtype)
    chunks = (batch.chunk_cu, batch.chunk_lengths)
    return _Works(
        decode_attention.make_work(batch.decode_lengths, *heads, window=window) if R else None,
        prefill_attention.make_work(q, cache[0], *chunks, window=window) if q.shape[0] else None,
    )


# One trace and one lowering serve all layers with the same window.
@partial(jax.jit, static_argnames=("config", "window", "backend"))
def _layer(
    p: LayerParams,
    x: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    batch: Packed | Paged,
    works: _Works,
    pages: KVPages | None,
    *,
    config: LlamaConfig,
    window: int | None,
    backend: str | None,
) -> tuple[jax.Array, KVPages | None]:
    def norm_linear(x: jax.Array, weight: jax.Array, w: Weight, bias: jax.Array | None) -> jax.Array:
        rows = norm(x, weight, config.norm_eps, w, backend=backend)
        return linear(rows, w, bias, out_dtype=x.dtype, backend=backend)

    qkv = norm_linear(x, p.attn_norm, p.qkv, p.qkv_bias)
    options = {"scale": config.head_dim**-0.5, "window": window, "backend": backend}
    if pages is None:
        assert isinstance(batch, Packed), "without a cache, the batch is Packed"
        q, k, v = _split_qkv(p, qkv, config)
        out = causal_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, batch.segments, **options)
    else:
        assert isinstance(batch, Paged), "with a cache, the batch is Paged"
        if p.q_norm is None:
            q, pages = cache_update_fused(qkv, cos, sin, pages, batch.page, batch.offset, backend=backend)
        else:
            q, k, v = _split_qkv(p, qkv, config)
            q, pages = cache_update(q, k, v, cos, sin, pages, batch.page, batch.offset, backend=backend)
        out = _paged_attention(q, pages, batch, works, options)
    x = linear(out.reshape(x.shape[0], -1), p.o, p.o_bias, residual=x, backend=backend)
    gate_up = norm_linear(x, p.mlp_norm, p.gate_up, p.gate_up_bias)
    y = silu_mul(gate_up, p.down, backend=backend)
    return linear(y, p.down, p.down_bias, residual=x, out_dtype=x.dtype, backend=backend), pages


def _split_qkv(p: LayerParams, qkv: jax.Array, config: LlamaConfig) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q [T, H, D], k and v [T, K, D], before rotation."""
    H, K, D = config.num_heads, config.num_kv_heads, config.head_dim
    q, k, v = jnp.split(qkv.reshape(-1, H + 2 * K, D), (H, H + K), axis=1)
    if p.q_norm is not None and p.k_norm is not None:
        q, k = rms_norm(q, p.q_norm, config.norm_eps), rms_norm(k, p.k_norm, config.norm_eps)
    return q, k, v


def _paged_attention(q: jax.Array, pages: KVPages, batch: Paged, works: _Works, options: dict[str, Any]) -> jax.Array:
    """Decode rows and prompt chunks each go to their own kernel, over the same pages: [T, H, D]."""
    R = batch.decode_lengths.shape[0]
    parts = []
    if R:
        rows = (batch.decode_pages, batch.decode_lengths)
        parts.append(decode_attention.decode_attention(q[:R], pages, *rows, work=works.decode, **options))
    if q.shape[0] > R:
        chunks = (batch.chunk_pages, batch.chunk_cu, batch.chunk_lengths)
        parts.append(prefill_attention.prefill_attention(q[R:], pages, *chunks, work=works.prefill, **options))
    return jnp.concatenate(parts)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root mean square norm over the last axis (Zhang and Sennrich, arXiv 1910.07467), computed in float32 at least."""
    y = x.astype(compute_dtype(x.dtype))
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + jnp.asarray(eps, y.dtype))
    weight = weight.reshape((1,) * (x.ndim - 1) + weight.shape)
    return y.astype(x.dtype) * weight.astype(x.dtype)
