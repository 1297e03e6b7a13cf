"""Searches the scales of blocks of small floats that round a weight with the least squared error.

They replace the scales of the formats' definitions (pallas_kernels/formats/block_floats.py), as in MR-GPTQ (Egiazarian
et al., arXiv 2509.23202).

For powers of two (E8M0), each block takes the best of the definition's scale, its half and its double. The block is
then clipped or has a code to spare. For E4M3, each block takes the best of several factors of the scale that it needs.
The float32 unit of all scales is then fitted by least squares to the stored scales and codes. These two steps
alternate.
"""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.formats.block_floats import to_e4m3
from pallas_kernels.formats.weight_codes import code_values, fit_scales, round_codes, store_scales
from pallas_kernels.formats.weight_formats import WeightFormat

POWERS = (1.0, 0.5, 2.0)  # the definition's first, which wins ties
FACTORS = tuple(float(x) for x in np.round(np.arange(1.0, 0.49, -0.05), 2)) + (1.1, 1.2, 1.3, 1.4, 1.5)
TURNS = 3

Stored = tuple[jax.Array, jax.Array, jax.Array | None]  # the result of store_scales


def search_scales(x: jax.Array, fmt: WeightFormat) -> Stored:
    """Returns scales for x [N', groups, group] as store_scales returns them. If the format rotates, x is rotated."""
    asked, _ = fit_scales(x, fmt)
    if fmt.scale_codes == "e8m0":
        return store_scales(_best(x, [_power(asked, factor) for factor in POWERS], fmt), fmt)
    _, stored, steps = store_scales(asked, fmt)
    assert steps is not None
    tensor = steps[0]

    def decoded(stored: jax.Array, tensor: jax.Array) -> jax.Array:
        return (stored.astype(jnp.float32) * tensor).astype(x.dtype)

    for turn in range(TURNS):
        choices = [to_e4m3(asked * jnp.asarray(factor, x.dtype), tensor) for factor in FACTORS]
        best = _best(x, [decoded(choice, tensor) for choice in choices], fmt)
        stored = to_e4m3(best, tensor)
        if turn + 1 < TURNS:
            tensor = _fitted(x, stored, tensor, fmt)
    return decoded(stored, tensor), stored, jnp.broadcast_to(tensor, steps.shape)


def squared_errors(x: jax.Array, scales: jax.Array, fmt: WeightFormat) -> jax.Array:
    """Returns the squared error [N', groups] of x [N', groups, group] rounded with these scales."""
    return jnp.square(_values(x, scales, fmt) * scales[..., None] - x).sum(axis=-1)


def _best(x: jax.Array, choices: list[jax.Array], fmt: WeightFormat) -> jax.Array:
    """Returns the scale with the least error for each block, at ties the first."""
    best, least = choices[0], squared_errors(x, choices[0], fmt)
    for scales in choices[1:]:
        errors = squared_errors(x, scales, fmt)
        best, least = jnp.where(errors < least, scales, best), jnp.minimum(errors, least)
    return best


def _power(scales: jax.Array, factor: float) -> jax.Array:
    """Returns powers of two times another power of two, within the normal range of E8M0 and float32."""
    return jnp.clip(scales * jnp.asarray(factor, scales.dtype), 2.0**-126, 2.0**127)


def _fitted(x: jax.Array, stored: jax.Array, tensor: jax.Array, fmt: WeightFormat) -> jax.Array:
    """Returns the float32 unit with the least error for these scales and their codes. It is unchanged if all codes are
    zero."""
    units = stored.astype(x.dtype)
    whole = _values(x, units * tensor.astype(x.dtype), fmt) * units[..., None]
    over, under = jnp.sum(x * whole), jnp.sum(whole * whole)
    return jnp.where(under > 0, (over / jnp.where(under > 0, under, 1)).astype(jnp.float32), tensor)


def _values(x: jax.Array, scales: jax.Array, fmt: WeightFormat) -> jax.Array:
    """Returns the elements in units of scales."""
    return code_values(round_codes(x / scales[..., None], None, fmt), None, fmt, x.dtype)
