"""Runs causal_attention in plain jnp: dense [T, T] logits."""

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.formats.numerics import compute_dtype


@partial(jax.jit, static_argnames=("scale", "window", "softcap"))
def causal_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array,
    scale: float,
    window: int | None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Returns [T, H, D] of q [T, H, D], k, v [T, K, D] and segments i32[T]; see api.py. Gradients compute the weights
    again: [T, T] of each head and layer would be most of training's memory."""
    num_tokens, num_heads, head_dim = q.shape
    compute = compute_dtype(q.dtype)
    # Beside inputs of 16 bits a GPU may take TF32, whose 11 bits of a weight are more than the output keeps.
    precision = "highest" if q.dtype == compute else None
    row = jnp.arange(num_tokens, dtype=jnp.int32)
    distance = row[:, None] - row[None, :]
    mask = (distance >= 0) & (segments[:, None] == segments[None, :])
    if window is not None:
        mask &= distance < window
    q = q.reshape(num_tokens, k.shape[1], -1, head_dim)
    logits = scale * jnp.einsum("ikgd,jkd->kgij", q, k, precision=precision, preferred_element_type=compute)
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    logits = jnp.where(mask[None, None], logits, -jnp.inf)
    if sinks is None:
        weights = jax.nn.softmax(logits, axis=-1)  # every row sees itself
    else:
        own = jnp.broadcast_to(sinks.astype(compute).reshape(k.shape[1], -1, 1, 1), (*logits.shape[:-1], 1))
        weights = jax.nn.softmax(jnp.concatenate([logits, own], axis=-1), axis=-1)[..., :-1]
    out = jnp.einsum("kgij,jkd->ikgd", weights, v.astype(compute), precision=precision)
    return out.reshape(num_tokens, num_heads, head_dim).astype(q.dtype)
