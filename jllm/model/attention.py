"""Computes the attention block, the first half of a layer: the residual stream plus attention of its norm.

Only this block distinguishes sequences. Without a cache (training) it runs over packed segments. With a cache (serving)
it writes the step's K and V to their pages first. Decode rows and prompt chunks then read the pages.

To add another kind of attention, write a params type with its entries in the table (params.py). Register it for a
config in param_specs.layer_types, and its block here by that type.
"""

from dataclasses import dataclass
from functools import partial, singledispatch
from typing import Any

import jax
import jax.numpy as jnp

from jllm.config import LlamaConfig
from jllm.model.attention_weights import packed_weights, paged_weights
from jllm.model.fused_linear import norm_linear
from jllm.model.linear import linear
from jllm.model.norms import add_linear
from jllm.model.paged import Packed, Paged, as_chunks
from jllm.model.params import AttentionParams
from jllm.model.rope import unturned
from jllm.model.shapes import Array, Float, shaped
from jllm.model.taps import Tap
from pallas_kernels import decode_attention, prefill_attention
from pallas_kernels.all_reduce import all_reduce
from pallas_kernels.backends import DETERMINISTIC, on_hopper, where_faster
from pallas_kernels.cache_update import cache_update, cache_update_fused
from pallas_kernels.causal_attention import causal_attention
from pallas_kernels.formats.kv_formats import KVFormat, decode, encode
from pallas_kernels.formats.kv_pages import KVPages
from pallas_kernels.formats.kv_tail import settle, with_row_map
from pallas_kernels.formats.numerics import compute_dtype
from pallas_kernels.norm_quant import norm_quant
from pallas_kernels.one_order import fenced, sum_in_order
from pallas_kernels.rms_norm import HeadNorms, rms_norm, times_weight
from pallas_kernels.rotary import rotate


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionInputs:
    """Holds the inputs of attention besides the residual stream and the pages. They are
    alike in all layers, so all layers with the same window and rotation share them."""

    cos: jax.Array  # [T, D / 2], or fewer where a part of each head is rotated
    sin: jax.Array  # likewise
    batch: Packed | Paged
    decode: decode_attention.Work | None = None
    prefill: prefill_attention.Work | None = None


@shaped
def attention_inputs(
    batch: Packed | Paged,
    cos: Float[Array, "T {config.rotated_dims//2}"],
    sin: Float[Array, "T {config.rotated_dims//2}"],
    pages: KVPages | None,
    dtype: Any,
    *,
    config: LlamaConfig,
    window: int | None,
    backend: str | None,
) -> AttentionInputs:
    """Returns the inputs that all layers of a window and rotation share. `dtype` is that of queries. `pages` are any
    layer's or all layers'."""
    if pages is None or isinstance(batch, Packed):
        return AttentionInputs(cos, sin, batch)
    if backend == DETERMINISTIC and on_hopper():  # two kernels there have two orders of sums
        batch = as_chunks(batch)
    R = batch.short_rows
    C = batch.tokens.shape[0] - R
    q, qs = (jax.ShapeDtypeStruct((rows, config.num_heads, config.head_dim), dtype) for rows in (R, C))
    chunks = (batch.chunk_cu, batch.chunk_lengths)
    options: dict[str, Any] = {"window": window, "backend": backend}
    segments = batch.segments
    decode = decode_attention.plan(q, pages, batch.decode_lengths, segments=segments, **options) if R else None
    prefill = prefill_attention.plan(qs, pages, *chunks, scale=config.query_scale, **options) if C else None
    return AttentionInputs(cos, sin, batch, decode, prefill)


@singledispatch
def attention_block(
    p: Any,
    x: Float[Array, "T E"],
    inputs: AttentionInputs,
    pages: KVPages | None,
    *,
    config: LlamaConfig,
    window: int | None,
    backend: str | None,
    tap: Tap,
) -> tuple[Float[Array, "T E"], KVPages | None]:
    """Returns x [T, E] plus attention of its norm, and the updated pages. The type of `p` decides which attention runs.
    Each value that a tap can name goes through `tap`, at least if `tap.open` is true."""
    raise NotImplementedError(f"{type(p).__name__} has no attention_block: register one for it")


@attention_block.register
@shaped
def _(
    p: AttentionParams,
    x: Float[Array, "T E"],
    inputs: AttentionInputs,
    pages: KVPages | None,
    *,
    config: LlamaConfig,
    window: int | None,
    backend: str | None,
    tap: Tap,
) -> tuple[Float[Array, "T E"], KVPages | None]:
    if tap.open:
        return _open_block(p, x, inputs, pages, config=config, window=window, backend=backend, tap=tap)
    return _fast_block(p, x, inputs, pages, config=config, window=window, backend=backend)


def _fast_block(
    p: AttentionParams,
    x: jax.Array,
    inputs: AttentionInputs,
    pages: KVPages | None,
    *,
    config: LlamaConfig,
    window: int | None,
    backend: str | None,
) -> tuple[jax.Array, KVPages | None]:
    """Computes the block by fused operations, whose intermediate values are not returned."""
    qkv = norm_linear(x, p.norm, p.qkv, p.qkv_bias, eps=config.norm_eps, backend=backend)
    out, kept = attend(p, qkv, inputs, pages, config=config, window=window, backend=backend)
    return add_linear(x, out, p.o, p.o_bias, config=config, backend=backend), kept


def attend(
    p: Any,
    qkv: jax.Array,
    inputs: AttentionInputs,
    pages: KVPages | None,
    *,
    config: LlamaConfig,
    window: int | None,
    backend: str | None,
) -> tuple[jax.Array, KVPages | None]:
    """Returns attention [T, H D] of the projected rows qkv, by fused operations, and the updated pages."""
    batch, cos, sin = inputs.batch, inputs.cos, inputs.sin
    options = _scope(p, config, window) | {"backend": backend}
    if isinstance(batch, Packed):
        q, k, v = fenced(backend, partial(_split_qkv, p, config, backend), qkv)
        wide = None if batch.stored is None else compute_dtype(k.dtype)  # a cache stores K without rounding it before
        q, k = rotate(q, cos, sin), rotate(k, cos, sin, wide)
        out, kept = packed_attention(q, k, v, batch, **options), None
    else:
        assert pages is not None, "a Paged batch has a cache"
        pages = with_row_map(pages, batch.row_map)
        if config.rotary_dim is None and (p.q_norm is None or _norms_each_head(config, backend)):
            norms = None if p.q_norm is None else HeadNorms(p.q_norm, p.k_norm, config.norm_eps, config.norm_offset)
            q, pages = cache_update_fused(qkv, cos, sin, pages, batch.page, batch.offset, norms=norms, backend=backend)
        else:
            q, k, v = fenced(backend, partial(_split_qkv, p, config, backend), qkv)
            if config.rotary_dim is not None:  # the update rotates whole heads
                q, k = (fenced(backend, rotate, each, cos, sin) for each in (q, k))
                cos, sin = unturned(q.shape[0], config.head_dim, cos.dtype)
            q, pages = cache_update(q, k, v, cos, sin, pages, batch.page, batch.offset, backend=backend)
        out, kept = paged_attention(q, pages, inputs, **options), settle(pages)
    return out.reshape(qkv.shape[0], -1), kept


def _open_block(
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
    """Computes the block one operation at a time, with a name for each value."""
    rows = tap("attn_norm", norm_quant(x, p.norm, eps=config.norm_eps, backend=where_faster(backend))[0])
    out, kept = open_attend(p, rows, inputs, pages, config=config, window=window, backend=backend, tap=tap)
    return add_linear(x, out, p.o, p.o_bias, config=config, backend=backend, tap=tap, name="o"), kept


def open_attend(
    p: Any,
    rows: jax.Array,
    inputs: AttentionInputs,
    pages: KVPages | None,
    *,
    config: LlamaConfig,
    window: int | None,
    backend: str | None,
    tap: Tap,
) -> tuple[jax.Array, KVPages | None]:
    """Returns attention [T, H D] of rows [T, E] one operation at a time, and the updated pages."""
    batch, cos, sin = inputs.batch, inputs.cos, inputs.sin
    scope = _scope(p, config, window)
    qkv = tap("qkv", tap.add("qkv", rows, linear(rows, p.qkv, p.qkv_bias, backend=backend)))
    q, k, v = fenced(backend, partial(_split_qkv, p, config, backend), qkv)
    q = tap("q", fenced(backend, rotate, q, cos, sin))
    k = tap("k", fenced(backend, rotate, k, cos, sin))
    v = tap("v", v)
    if isinstance(batch, Packed):
        if tap.wants("weights"):
            tap("weights", packed_weights(q, k, batch.segments, **scope))
        out, kept = packed_attention(q, k, v, batch, **scope, backend=backend), None
    else:
        assert pages is not None, "a Paged batch has a cache"
        pages = with_row_map(pages, batch.row_map)
        still = unturned(q.shape[0], config.head_dim, cos.dtype)
        q, pages = cache_update(q, k, v, *still, pages, batch.page, batch.offset, backend=backend)
        if tap.wants("weights"):
            tap("weights", paged_weights(q, pages, batch, **scope))
        out, kept = paged_attention(q, pages, inputs, **scope, backend=backend), settle(pages)
    return tap("attention", out.reshape(rows.shape[0], -1)), kept


def _scope(p: Any, config: LlamaConfig, window: int | None) -> dict[str, Any]:
    """Returns the options of attention that the model decides."""
    scope: dict[str, Any] = {"scale": config.query_scale, "window": window}
    if config.attention_softcap is not None:
        scope["softcap"] = config.attention_softcap
    return scope | ({"sinks": p.sinks} if config.sinks else {})


@shaped
def _split_qkv(
    p: Any, config: LlamaConfig, backend: str | None, qkv: Float[Array, "T _"]
) -> tuple[Float[Array, "T H D"], Float[Array, "T K D"], Float[Array, "T K D"]]:
    """Returns q, k and v, before rotation."""
    H, K, D = config.num_heads, config.num_kv_heads, config.head_dim
    q, k, v = jnp.split(qkv.reshape(-1, H + 2 * K, D), (H, H + K), axis=1)
    if p.q_norm is not None and p.k_norm is not None:
        if config.qk_norm_whole and config.axis is not None:
            q, k = _norms_of_ranks(q, k, p, config, backend)
        else:
            q, k = (_head_norm(x, weight, config, backend) for x, weight in ((q, p.q_norm), (k, p.k_norm)))
    return q, k, v


def _norms_each_head(config: LlamaConfig, backend: str | None) -> bool:
    """Returns whether the cache's update takes norms of q and k along. It has none of a row's heads together, and for a
    deterministic backend on Hopper none at all: a kernel of norms adds in one order there."""
    return not config.qk_norm_whole and not (backend == DETERMINISTIC and on_hopper())


def _norms_of_ranks(q: jax.Array, k: jax.Array, p: Any, config: LlamaConfig, backend: str | None) -> list[jax.Array]:
    """Returns the norms of a device's heads q and k [T, n, D] over the heads of all devices, which exchange their means
    of squares. Each has as many heads as the others, and copies of KV heads do not change a mean."""
    assert config.axis is not None, "devices share the heads"
    wide = compute_dtype(q.dtype)
    rows = [x.reshape(x.shape[0], -1).astype(wide) for x in (q, k)]
    add = sum_in_order if backend == DETERMINISTIC and on_hopper() else partial(jnp.sum, axis=1)
    means = [add(x * x) / x.shape[1] for x in rows]
    four = jnp.stack(means + means, axis=1)  # GPUs exchange packs of 16 bytes
    four = all_reduce(four, config.axis, backend=where_faster(backend)) / jax.lax.axis_size(config.axis.name)
    scales = jax.lax.rsqrt(four + jnp.asarray(config.norm_eps, wide))
    return [
        times_weight(x * scales[:, i, None], weight, config.norm_offset, of.dtype).reshape(of.shape)
        for i, (x, weight, of) in enumerate(zip(rows, (p.q_norm, p.k_norm), (q, k)))
    ]


def _head_norm(x: jax.Array, weight: jax.Array, config: LlamaConfig, backend: str | None) -> jax.Array:
    """Returns the norm of each head of x [T, n, D], or of a row's heads together if the weight has their size. For a
    deterministic backend on Hopper a kernel sums."""
    rows = x.reshape(x.shape[0], -1) if config.qk_norm_whole else x
    if backend == DETERMINISTIC and on_hopper() and not config.norm_offset:
        rows = rows.reshape(-1, rows.shape[-1])
        return norm_quant(rows, weight, eps=config.norm_eps, backend=backend)[0].reshape(x.shape)
    return rms_norm(rows, weight, config.norm_eps, config.norm_offset).reshape(x.shape)


@shaped
def packed_attention(
    q: Float[Array, "T H D"], k: Float[Array, "T K D"], v: Float[Array, "T K D"], batch: Packed, **options: Any
) -> Float[Array, "T H D"]:
    """Returns attention within the segments of a batch without a cache. Takes the options of _scope, and backend."""
    if batch.stored is None:
        return causal_attention(q, k, v, batch.segments, **options)
    wide = compute_dtype(q.dtype)
    k, v = (_as_stored(x.astype(wide), fmt) for x, fmt in zip((k, v), batch.stored))
    return causal_attention(q.astype(wide), k, v, batch.segments, **options).astype(q.dtype)


def _as_stored(x: jax.Array, fmt: KVFormat) -> jax.Array:
    """Returns x [T, K, D] rounded as a cache of that format rounds it. The rounding passes gradients straight
    through."""
    fixed = jax.lax.stop_gradient(x)
    return x + (decode(*encode(fixed, fmt), fmt, x.dtype) - fixed)


@shaped
def paged_attention(
    q: Float[Array, "T H D"], pages: KVPages, inputs: AttentionInputs, **options: Any
) -> Float[Array, "T H D"]:
    """Returns attention of queries over pages. Decode rows and prompt chunks each go to their own kernel. Both kernels
    take all queries and write to one array. Both take the options of _scope, and backend."""
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
