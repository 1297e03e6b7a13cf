"""Moves values inside a layer (model/taps.py) on a mesh: whole for taps and edits, in parts for the device itself.

Values that devices compute alike are whole everywhere. The others have parts along axis 1: each device's share of
heads, KV heads or MLP columns. A merged value has a share of each of its parts, as weights have (model/shards.py).
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jllm.config import LlamaConfig

PARTS = {  # axes of LlamaConfig.axes
    "qkv": ("heads", "kv_heads", "kv_heads"),
    "q": ("heads",),
    "k": ("kv_heads",),
    "v": ("kv_heads",),
    "weights": ("heads",),
    "attention": ("heads",),
    "gate_up": ("ffn", "ffn"),
    "silu_mul": ("ffn",),
}


def gathered(name: str, value: jax.Array, config: LlamaConfig) -> jax.Array:
    """Returns the whole value [T, n, ...] from a device's part. `config` is that of the device's share. The value is
    unchanged without a mesh, or if all devices have it alike."""
    if config.axis is None or name not in PARTS:
        return value
    every = lax.all_gather(value, config.axis.name, axis=1)  # [T, ranks, n / ranks, ...]
    parts = jnp.split(every, _starts([config.axes[axis] for axis in PARTS[name]], value.shape[1]), axis=2)
    parts = [part[:, ::n] for part, n in zip(parts, _copies(name, config))]
    return jnp.concatenate([x.reshape(x.shape[0], -1, *x.shape[3:]) for x in parts], axis=1)


def own_part(name: str, value: jax.Array, config: LlamaConfig) -> jax.Array:
    """Returns a device's part of a whole value [T, n, ...]: the inverse of gathered."""
    if config.axis is None or name not in PARTS:
        return value
    ranks, rank = lax.axis_size(config.axis.name), lax.axis_index(config.axis.name)
    copies = _copies(name, config)
    shares = [config.axes[axis] * (ranks // n) for axis, n in zip(PARTS[name], copies)]
    parts = jnp.split(value, _starts(shares, value.shape[1]), axis=1)
    each = [(part, part.shape[1] * n // ranks, rank // n) for part, n in zip(parts, copies)]
    return jnp.concatenate([lax.dynamic_slice_in_dim(x, at * size, size, axis=1) for x, size, at in each], axis=1)


def _copies(name: str, config: LlamaConfig) -> list[int]:
    """Returns, for each part, how many devices have the same share of it."""
    return [config.kv_copies if axis == "kv_heads" else 1 for axis in PARTS[name]]


def _starts(shares: Sequence[int], size: int) -> list[int]:
    """Returns where the parts of an axis begin, without the first: `shares` are their relative sizes."""
    return [sum(shares[: i + 1]) * size // sum(shares) for i in range(len(shares) - 1)]
