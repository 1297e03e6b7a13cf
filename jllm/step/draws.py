"""Draws tokens where each device of a mesh has the logits of a part of the vocabulary.

For rows without filters, devices exchange the best of their parts (pallas_kernels.sample.parts). That is 8 bytes a row,
and once more for rows with a temperature. Filters need whole rows. Devices then exchange parts, so that each has some
whole rows. Each draws its rows as one device does, and sends the tokens to the others. A row is moved once instead of
(ranks - 1) times, and drawn once. But that takes two exchanges. Few rows are therefore gathered whole on every device,
which is faster.

The choice is compiled in (Variant.draws). XLA would have the host read a condition before a GPU goes on, and the host
could never run ahead.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jllm.config import LlamaConfig
from jllm.model.sampling import Draws, Sampling, sample, sample_parts

# The least bytes of all logits for which parts pay, by the time of an exchange and NVLink's rate.
LEAST = 32 << 20


def leaves_parts(config: LlamaConfig, rows: int, draws: Draws) -> bool:
    """Returns whether rows of logits stay in parts. `config` is that of one device's share."""
    return config.axis is not None and (draws < Draws.FILTERED or rows * config.vocab_size * 4 >= LEAST)


def draw_apart(config: LlamaConfig, draws: Draws) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Returns a function that each device calls like sampling.sample, with its part f[R, ceil(V / ranks)] of the rows.
    Rows without filters are drawn in plain jnp whatever `backend` is, since no other backend takes parts."""
    assert config.axis is not None
    axis, vocabulary = config.axis.name, config.vocab_size

    def best(logits: jax.Array, sampling: Sampling, index: jax.Array, **_: object) -> tuple[jax.Array, jax.Array]:
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
