"""Computes rotary position embeddings (Su et al., arXiv 2104.09864): a config's frequencies, and angles of
positions.

Frequencies never depend on a sequence's length, so a request's tokens do not depend on others. Dynamic NTK and LongRoPE
choose them by a length. Here that is the longest that the model serves (config.context).
"""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from jllm.config import LlamaConfig, RopeScaling
from jllm.model.shapes import Array, Float, Int32, shaped


def inverse_frequencies(config: LlamaConfig) -> np.ndarray:
    """Returns the radians per position of each of a head's rotated pairs, float64, with the config's scaling."""
    scaling, theta, D = config.rope_scaling, config.rope_theta, config.rotated_dims
    if scaling is not None and scaling.kind == "dynamic":
        theta *= _ntk(scaling, config.context) ** (D / (D - 2))
    freq = theta ** (-np.arange(0, D, 2, dtype=np.float64) / D)
    if scaling is None or scaling.kind == "dynamic":
        return freq
    if scaling.kind == "linear":
        return freq / scaling.factor
    if scaling.kind == "yarn":
        return _yarn(freq, scaling, theta)
    if scaling.kind == "longrope":
        longer = config.context > scaling.original_context
        return freq / np.asarray(scaling.long_factors if longer else scaling.short_factors)
    return _llama3(freq, scaling)


def _ntk(s: RopeScaling, context: int) -> float:
    """Returns the factor by which the base grows for a length, before the exponent that keeps the fastest pair."""
    return s.factor * max(context, s.original_context) / s.original_context - (s.factor - 1)


def _llama3(freq: np.ndarray, s: RopeScaling) -> np.ndarray:
    """Returns scaled frequencies: long wavelengths are slowed by `factor`, short ones kept, others interpolated (Llama
    3.1 model card)."""
    turns = s.original_context * freq / (2 * math.pi)  # rotations within the original context
    keep = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    keep = np.clip(keep, 0.0, 1.0)
    return keep * freq + (1 - keep) * freq / s.factor


def _yarn(freq: np.ndarray, s: RopeScaling, theta: float) -> np.ndarray:
    """Returns scaled frequencies: pairs of few turns within the original context are slowed by `factor`, those of many
    kept, and a linear ramp over pairs lies between (Peng et al., arXiv 2309.00071)."""
    D = 2 * len(freq)

    def pair(turns: float) -> float:
        return D * math.log(s.original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair(s.beta_fast), pair(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, D - 1)
    if low == high:
        high += 0.001  # as in transformers: a step needs a width
    slowed = np.clip((np.arange(len(freq)) - low) / (high - low), 0.0, 1.0)
    return slowed * freq / s.factor + (1 - slowed) * freq


@shaped
def angles(
    config: LlamaConfig, positions: Int32[Array, " T"], dtype, rotation: str = "scaled"
) -> tuple[Float[Array, "T {config.rotated_dims//2}"], Float[Array, "T {config.rotated_dims//2}"]]:
    """Returns cos and sin of the angles at positions, in `dtype` (float32 or float64). Both carry the scaling's
    attention factor. `rotation` is as LlamaConfig.rotation has it."""
    if rotation == "none":
        return unturned(positions.shape[0], config.rotated_dims, dtype)
    if rotation == "window":
        assert config.window_theta is not None, "rotation names it"
        config = replace(config, rope_theta=config.window_theta, rope_scaling=None)
    freq = jnp.asarray(inverse_frequencies(config), dtype)
    angle = positions.astype(dtype)[:, None] * freq[None, :]
    if config.rope_scaling is None or config.rope_scaling.attention_factor == 1:
        return jnp.cos(angle), jnp.sin(angle)
    factor = jnp.asarray(config.rope_scaling.attention_factor, dtype)
    return jnp.cos(angle) * factor, jnp.sin(angle) * factor


def unturned(rows: int, dims: int, dtype) -> tuple[jax.Array, jax.Array]:
    """Returns cos and sin [rows, dims / 2] that rotate nothing."""
    return jnp.ones((rows, dims // 2), dtype), jnp.zeros((rows, dims // 2), dtype)
