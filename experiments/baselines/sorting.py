"""Samples by sorting each row's logits."""

import jax
import jax.numpy as jnp

from jllm.model.sampling import Sampling, sample_reference


def draw_by_sorting(
    logits: jax.Array, params: Sampling, position: jax.Array, *, backend: str | None
) -> tuple[jax.Array, jax.Array]:
    """Returns a token for each row of logits f[rows, V], and which rows are finite, like sampling.sample."""
    return sample_reference(logits, params, position), jnp.isfinite(logits).all(axis=1)
