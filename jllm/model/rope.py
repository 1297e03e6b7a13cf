"""Computes rotary position embeddings (Su et al., arXiv 2104.09864): a config's frequencies, and angles of
positions."""

import math

import jax.numpy as jnp
import numpy as np

from jllm.config import LlamaConfig, RopeScaling
from jllm.model.shapes import Array, Float, Int32, shaped


def inverse_frequencies(config: LlamaConfig) -> np.ndarray:
    """Returns the radians per position of each of the D/2 rotated pairs, float64, with the config's scaling."""
    pairs = np.arange(0, config.head_dim, 2, dtype=np.float64)
    freq = config.rope_theta ** (-pairs / config.head_dim)
    if config.rope_scaling is None:
        return freq
    if config.rope_scaling.kind == "linear":
        return freq / config.rope_scaling.factor
    return _llama3(freq, config.rope_scaling)


def _llama3(freq: np.ndarray, s: RopeScaling) -> np.ndarray:
    """Returns scaled frequencies: long wavelengths are slowed by `factor`, short ones kept, others interpolated (Llama
    3.1 model card)."""
    turns = s.original_context * freq / (2 * math.pi)  # rotations within the original context
    keep = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    keep = np.clip(keep, 0.0, 1.0)
    return keep * freq + (1 - keep) * freq / s.factor


@shaped
def angles(
    config: LlamaConfig, positions: Int32[Array, " T"], dtype
) -> tuple[Float[Array, "T {config.head_dim//2}"], Float[Array, "T {config.head_dim//2}"]]:
    """Returns cos and sin of the angles at positions, in `dtype` (float32 or float64)."""
    freq = jnp.asarray(inverse_frequencies(config), dtype)
    angle = positions.astype(dtype)[:, None] * freq[None, :]
    return jnp.cos(angle), jnp.sin(angle)
