"""Draws where each device of a mesh has the logits of a part of the vocabulary.

Of rows without filters devices tell each other the best of their parts (pallas_kernels.sample.parts), 8 bytes a row and
once more where rows have a temperature. Filters ask for whole rows: devices exchange parts, so that each has whole rows
of its own, draws there as one device does, and tells the others the tokens. A row is moved once in place of (ranks - 1)
times, and drawn once. But that is two exchanges, and few rows are sooner gathered whole on every device.

Which of these it is, is compiled in (Variant.draws): XLA has the host read a condition before a GPU goes on, and the
host could never run ahead."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jllm.config import LlamaConfig
from jllm.model.sampling import Draws, Sampling, sample, sample_parts

# Bytes of all logits, from which on it pays, counted from the time of an exchange and NVLink's rate.
LEAST = 32 << 20


def leaves_parts(config: LlamaConfig, rows: int, draws: Draws) -> bool:
    """Returns whether rows of logits are left in parts. config: of one device's share."""
    return config.axis is not None and (draws < Draws.FILTERED or rows * config.vocab_size * 4 >= LEAST)


def draw_apart(config: LlamaConfig, draws: Draws) -> Any:
    """Returns a function that each device calls as sampling.sample, with its part f[R, ceil(V / ranks)] of the rows.
    Rows without filters are drawn in plain jnp, whatever backend is named: no other one knows parts."""
    assert config.axis is not None
    axis, vocabulary = config.axis.name, config.vocab_size

    def best(logits: jax.Array, sampling: Sampling, index: jax.Array, **_: Any) -> tuple[jax.Array, jax.Array]:
        return sample_parts(logits, sampling, index, axis=axis, vocabulary=vocabulary, draws=draws)

    def whole(logits: jax.Array, sampling: Sampling, index: jax.Array, **options: Any) -> tuple[jax.Array, jax.Array]:
        ranks, R = lax.axis_size(axis), logits.shape[0]
        each = -(-R // ranks)

        def own(x: jax.Array) -> jax.Array:
            padded = jnp.pad(x, ((0, each * ranks - R), *((0, 0),) * (x.ndim - 1)))
            return lax.dynamic_slice_in_dim(padded, lax.axis_index(axis) * each, each)

        padded = jnp.pad(logits, ((0, each * ranks - R), (0, 0)))
        rows = lax.all_to_all(padded, axis, split_axis=0, concat_axis=1, tiled=True)[:, :vocabulary]
        tokens, finite = sample(rows, jax.tree.map(own, sampling), own(index), **options)
        told = lax.all_gather(2 * tokens + finite.astype(tokens.dtype), axis, tiled=True)[:R]
        return told // 2, told % 2 == 1

    return whole if draws == Draws.FILTERED else best
