"""Runs a ring of buffers in shared memory: the n-th copy of a CTA goes to slot n modulo the number of slots. A slot is
filled again once its readers have arrived at its barrier `free`."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


def slot_of(number: jax.Array, stages: int) -> jax.Array:
    """Returns the slot of the n-th copy, for numbers that are not negative."""
    return lax.rem(number, jnp.int32(stages))


def free_slot(number: jax.Array, free: Any) -> jax.Array:
    """Returns the slot of the n-th copy, once it may be filled."""
    stages = free.shape[0]
    slot = slot_of(number, stages)
    pl.when(number >= stages)(lambda: plgpu.barrier_wait(free.at[slot]))
    return slot


def drain(copies: jax.Array, *barriers: Any) -> None:
    """Waits until the last copy in each slot has been read. So no barrier is left in the middle of a phase, and no
    CTA leaves while another still signals it. `barriers` are the `free` ones of rings with the same number of slots."""
    stages = barriers[0].shape[0]

    @pl.loop(jnp.maximum(copies - stages, 0), copies)
    def _(number: jax.Array) -> None:
        for free in barriers:
            plgpu.barrier_wait(free.at[slot_of(number, stages)])
