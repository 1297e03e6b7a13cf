"""Builds a decoder layer without some of the four fusions, from the library's own operations, for claim C18.

Barriers separate what is not fused, so XLA fuses nothing across them. Each operation writes its result, and the next
one reads it.
"""

from dataclasses import dataclass, fields

import jax
import jax.numpy as jnp

from jllm.config import LlamaConfig
from jllm.model.backbone import Paged
from jllm.model.fused_linear import norm_linear, silu_mul
from jllm.model.linear import linear
from jllm.model.params import LayerParams
from jllm.model.rope import angles
from pallas_kernels.cache_update import cache_update, cache_update_fused
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.decode_attention import plan as plan_decode
from pallas_kernels.formats.kv_pages import KVPages, gather, write
from pallas_kernels.formats.numerics import compute_dtype
from pallas_kernels.prefill_attention import plan as plan_prefill
from pallas_kernels.prefill_attention import prefill_attention
from pallas_kernels.rotary import rotate

apart = jax.lax.optimization_barrier


@dataclass(frozen=True)
class Fusions:
    """Marks which of the four fusions a layer has."""

    norm: bool = False  # residual sums in the matmul before, and norms in the matmul after
    projections: bool = False  # one matmul for q, k and v, and one for gate and up
    rotary: bool = False  # rotary embedding with the write of K and V
    attention: bool = False  # flash attention: no scores in memory


NAMES = tuple(each.name for each in fields(Fusions))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Split:
    """The merged projections of a layer, split into their own weights."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    gate: jax.Array
    up: jax.Array


def split(p: LayerParams, config: LlamaConfig) -> Split:
    assert isinstance(p.attention.qkv, jax.Array)
    assert isinstance(p.mlp.gate_up, jax.Array)
    H, K, D = config.num_heads, config.num_kv_heads, config.head_dim
    q, k, v = jnp.split(p.attention.qkv, (H * D, (H + K) * D))
    return Split(q, k, v, *jnp.split(p.mlp.gate_up, 2))


def layers(
    params: tuple[tuple[LayerParams, Split], ...],
    x: jax.Array,
    batch: Paged,
    cache: KVPages,
    *,
    config: LlamaConfig,
    fusions: Fusions,
) -> tuple[jax.Array, KVPages]:
    """Runs all layers on x [T, E], which has only decode rows or only chunks. Returns the result and the cache."""
    cos, sin = angles(config, batch.positions, compute_dtype(x.dtype))
    work = _work(x, batch, cache, config) if fusions.attention else None
    for i, (merged, apart_weights) in enumerate(params):
        x, cache = _layer(merged, apart_weights, x, cos, sin, batch, cache.at_layer(i), work, config, fusions)
    return x, cache.at_layer(None)


def _work(x: jax.Array, batch: Paged, cache: KVPages, config: LlamaConfig):
    q = jax.ShapeDtypeStruct((x.shape[0], config.num_heads, config.head_dim), x.dtype)
    if batch.decode_lengths.shape[0]:
        return plan_decode(q, cache, batch.decode_lengths)
    return plan_prefill(q, cache, batch.chunk_cu, batch.chunk_lengths, scale=config.head_dim**-0.5)


def _layer(p, s, x, cos, sin, batch, pages, work, config, fusions):
    scale = config.head_dim**-0.5
    q, k, v, qkv = _project(p, s, x, config, fusions)
    q, pages = _store(q, k, v, qkv, cos, sin, pages, batch, config, fusions)
    out = _attend(q, pages, batch, work, scale) if fusions.attention else _naive(q, pages, batch, scale)
    out = out.reshape(x.shape[0], -1)
    if fusions.norm:
        x = linear(out, p.attention.o, residual=x)
    else:
        x = apart(x + apart(linear(out, p.attention.o)))
    y = _activate(p, s, x, config, fusions)
    if fusions.norm:
        return linear(y, p.mlp.down, residual=x), pages
    return apart(x + apart(linear(y, p.mlp.down))), pages


def _activate(p, s, x, config, fusions):
    """Computes SiLU of the gate times up, always as one kernel."""
    if fusions.projections and fusions.norm:
        return silu_mul(norm_linear(x, p.mlp.norm, p.mlp.gate_up, eps=config.norm_eps), p.mlp.down)
    rows = apart(_rms_norm(x, p.mlp.norm, config.norm_eps))
    if fusions.projections:
        return apart(silu_mul(apart(linear(rows, p.mlp.gate_up)), p.mlp.down))
    gate, up = (y.astype(compute_dtype(x.dtype)) for y in apart((linear(rows, s.gate), linear(rows, s.up))))
    return apart((jax.nn.silu(gate) * up).astype(x.dtype))


def _project(p, s, x, config, fusions):
    """Returns q, k, v [T, heads, D], and the three in one array if one matmul makes them."""
    D = config.head_dim
    if fusions.projections:
        if fusions.norm:
            qkv = norm_linear(x, p.attention.norm, p.attention.qkv, eps=config.norm_eps)
        else:
            qkv = apart(linear(apart(_rms_norm(x, p.attention.norm, config.norm_eps)), p.attention.qkv))
        at = (config.num_heads, config.num_heads + config.num_kv_heads)
        return *jnp.split(qkv.reshape(qkv.shape[0], -1, D), at, axis=1), qkv
    rows = apart(_rms_norm(x, p.attention.norm, config.norm_eps))
    q, k, v = apart(tuple(linear(rows, w).reshape(x.shape[0], -1, D) for w in (s.q, s.k, s.v)))
    return q, k, v, None


def _store(q, k, v, qkv, cos, sin, pages, batch, config, fusions):
    """Returns rotated q, and the pages with this step's K and V."""
    if fusions.rotary and qkv is not None:
        return cache_update_fused(qkv, cos, sin, pages, batch.page, batch.offset)
    if fusions.rotary:
        return cache_update(q, k, v, cos, sin, pages, batch.page, batch.offset)
    q, k, v = apart((q, k, v))
    q, k = apart(rotate(q, cos, sin)), apart(rotate(k, cos, sin))
    stored = [write(pool, rows, batch.page, batch.offset) for pool, rows in ((pages.k, k), (pages.v, v))]
    return q, KVPages(*apart(tuple(stored)))


def _attend(q, pages, batch, work, scale):
    if batch.decode_lengths.shape[0]:
        return decode_attention(q, pages, batch.decode_pages, batch.decode_lengths, scale=scale, work=work)
    return prefill_attention(q, pages, batch.chunk_pages, batch.chunk_cu, batch.chunk_lengths, scale=scale, work=work)


def _naive(q, pages, batch, scale):
    """Computes attention with all scores in memory. A chunk must begin its sequence."""
    decodes = batch.decode_lengths.shape[0] > 0
    table = batch.decode_pages if decodes else batch.chunk_pages
    k, v = apart(tuple(gather(pool, table, q.dtype) for pool in (pages.k, pages.v)))  # [sequences, K, n * P, D]
    rows = q[:, None] if decodes else q[None]  # [sequences, queries, H, D]
    group = rows.shape[2] // k.shape[1]
    rows = rows.reshape(*rows.shape[:2], k.shape[1], group, rows.shape[3])
    scores = jnp.einsum("sqkgd,skjd->skgqj", rows, k, preferred_element_type=compute_dtype(q.dtype))
    key = jnp.arange(k.shape[2], dtype=jnp.int32)
    last = batch.decode_lengths[:, None] - 1 if decodes else jnp.arange(q.shape[0], dtype=jnp.int32)[None]
    seen = key[None, None, :] <= last[:, :, None]  # [sequences, queries, keys]
    masked = jnp.where(seen[:, None, None], apart(scores) * scale, -jnp.inf)
    p = apart(jax.nn.softmax(masked, axis=-1).astype(q.dtype))
    return apart(jnp.einsum("skgqj,skjd->sqkgd", p, v)).reshape(q.shape)


def _rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    y = x.astype(compute_dtype(x.dtype))
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + jnp.asarray(eps, y.dtype))
    return y.astype(x.dtype) * weight.astype(x.dtype)[None, :]
