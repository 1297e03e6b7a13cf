"""The LLaMA forward pass, a pure function of weights, tokens and (optionally) a paged KV cache.

All tokens of all sequences lie head to tail on one flat axis T: norms, matmuls and rotary embeddings see [T, E] and
know nothing of sequences. Attention alone tells them apart. Without a cache (training) it runs over packed segments;
with one (serving) this step's K and V are written to their pages first, and decode rows and prompt chunks then read
the pages.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jllm.batch import Packed, Paged
from jllm.cache import Cache
from jllm.config import LlamaConfig
from jllm.linear import embed, fuses_swiglu, linear, norm_linear, norm_swiglu, silu_linear
from jllm.params import LayerParams, Params
from jllm.rope import angles
from jllm.taps import of_layer, resolve_taps
from pallas_kernels import decode_attention, prefill_attention
from pallas_kernels.cache_update import cache_update, cache_update_fused
from pallas_kernels.causal_attention import causal_attention
from pallas_kernels.kv_pages import KVPages
from pallas_kernels.norm_quant import norm_quant
from pallas_kernels.numerics import compute_dtype
from pallas_kernels.rotary import rotate
from pallas_kernels.silu_mul_quant import silu_mul_quant

Taps = dict[str, jax.Array]  # by names of jllm.taps


def forward(
    params: Params, config: LlamaConfig, batch: Packed | Paged, cache: Cache | None, *, backend: str | None = None
) -> tuple[jax.Array, Cache | None]:
    """Logits [T, V] of every row (float32 at least), and the updated cache.

    backend chooses the kernels as pallas_kernels.backends says; without a cache None is "xla", since gradients and vmap
    go through that. Raises NotImplementedError for one that lacks these sizes or formats.
    """
    hidden, cache = backbone(params, config, batch, cache, backend=backend)
    return head(params, config, hidden, backend=_backend(backend, cache)), cache


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
) -> tuple[jax.Array, Cache | None, Taps]:
    """backbone, and those of the values that taps name which it computes (see jllm.taps). Raises EvaluationError for
    names that the model doesn't have."""
    taps = resolve_taps(taps, config.num_layers)
    backend = _backend(backend, cache)
    x = embed(params.embed, batch.tokens, params.dtype)
    found = {"embedding": x} if "embedding" in taps else {}
    cos, sin = angles(config, batch.positions, compute_dtype(x.dtype))
    works = {w: _plan(batch, config, w, x.dtype, cache, backend) for w in dict.fromkeys(config.windows or (None,))}
    pools = []
    for i, layer in enumerate(params.layers):
        window = config.window(i)
        pages = None if cache is None else cache[i]
        static: dict[str, Any] = {"config": config, "window": window, "backend": backend, "taps": of_layer(taps, i)}
        x, pages, inside = _layer(layer, x, cos, sin, batch, works[window], pages, **static)
        found |= {f"layers.{i}.{name}": value for name, value in inside.items()}
        pools.append(pages)
    return x, None if cache is None else tuple(pools), found


def head(params: Params, config: LlamaConfig, hidden: jax.Array, *, backend: str | None = None) -> jax.Array:
    """Logits [T, V] of hidden states [T, E], float32 at least."""
    w = params.embed if params.head is None else params.head
    dtype = compute_dtype(hidden.dtype)
    return norm_linear(hidden, params.norm, w, eps=config.norm_eps, out_dtype=dtype, backend=backend)


def head_taps(
    params: Params,
    config: LlamaConfig,
    hidden: jax.Array,
    logits: jax.Array,
    taps: tuple[str, ...],
    *,
    backend: str | None = None,
) -> Taps:
    """Those of the values that taps name which the head computes, of rows [rows, E]."""
    names = resolve_taps(taps, config.num_layers)
    found = (
        {"norm": norm_quant(hidden, params.norm, eps=config.norm_eps, backend=backend)[0]} if "norm" in names else {}
    )
    return found | ({"logits": logits} if "logits" in names else {})


def _backend(backend: str | None, cache: Cache | None) -> str | None:
    return "xla" if backend is None and cache is None else backend


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Works:
    """What the attention kernels plan ahead: it depends on lengths alone, so all layers of one window share it."""

    decode: decode_attention.Work | None = None
    prefill: prefill_attention.Work | None = None


def _plan(
    batch: Packed | Paged, config: LlamaConfig, window: int | None, dtype, cache: Cache | None, backend: str | None
) -> _Works:
    if cache is None or isinstance(batch, Packed):
        return _Works()
    R = batch.short_rows
    C = batch.tokens.shape[0] - R
    q, qs = (jax.ShapeDtypeStruct((rows, config.num_heads, config.head_dim), dtype) for rows in (R, C))
    chunks = (batch.chunk_cu, batch.chunk_lengths)
    options: dict[str, Any] = {"window": window, "backend": backend}
    return _Works(
        decode_attention.plan(q, cache[0], batch.decode_lengths, **options) if R else None,
        prefill_attention.plan(qs, cache[0], *chunks, scale=config.head_dim**-0.5, **options) if C else None,
    )


# One trace and one lowering serve all layers with the same window.
@partial(jax.jit, static_argnames=("config", "window", "backend", "taps"))
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
    taps: tuple[str, ...] = (),
) -> tuple[jax.Array, KVPages | None, Taps]:
    found: Taps = {}

    def tap(name: str, value: Callable[[], jax.Array]) -> None:
        """Only what is asked for is computed; XLA merges it with what the step computes anyway."""
        if name in taps:
            found[name] = value()

    project = partial(norm_linear, eps=config.norm_eps, backend=backend)
    tap("input", lambda: x)
    tap("attn_norm", lambda: norm_quant(x, p.attn_norm, eps=config.norm_eps, backend=backend)[0])
    qkv = project(x, p.attn_norm, p.qkv, p.qkv_bias)
    tap("qkv", lambda: qkv)
    tap("q", lambda: rotate(_split_qkv(p, qkv, config)[0], cos, sin))
    tap("k", lambda: rotate(_split_qkv(p, qkv, config)[1], cos, sin))
    tap("v", lambda: _split_qkv(p, qkv, config)[2])
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
    out = out.reshape(x.shape[0], -1)
    tap("attention", lambda: out)
    middle = linear(out, p.o, p.o_bias, residual=x, backend=backend)
    tap("middle", lambda: middle)
    tap("mlp_norm", lambda: norm_quant(middle, p.mlp_norm, eps=config.norm_eps, backend=backend)[0])
    if fuses_swiglu(p.gate_up, p.gate_up_bias, p.down) and "gate_up" not in taps:
        rows = norm_swiglu(middle, p.mlp_norm, p.gate_up, eps=config.norm_eps, backend=backend)
        tap("silu_mul", lambda: rows)
        y = linear(rows, p.down, p.down_bias, residual=middle, out_dtype=x.dtype, backend=backend)
    else:
        gate_up = project(middle, p.mlp_norm, p.gate_up, p.gate_up_bias)
        tap("gate_up", lambda: gate_up)
        tap("silu_mul", lambda: silu_mul_quant(gate_up, backend=backend))
        y = silu_linear(gate_up, p.down, p.down_bias, residual=middle, backend=backend)
    tap("output", lambda: y)
    return y, pages, found


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
