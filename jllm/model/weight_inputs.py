"""Converts a weight's inputs to its form: as they come, codes of eight bits, or blocks of small floats."""

from typing import Any

import jax
import jax.numpy as jnp

from jllm.model.adapted import Adapted
from jllm.model.params import Weight
from jllm.model.shapes import Array, Float, shaped
from pallas_kernels.formats.block_floats import KINDS, round_blocks
from pallas_kernels.formats.quantized_rows import QuantizedRows, dequantize_rows, quantize_rows
from pallas_kernels.formats.quantized_weights import QuantizedWeight, rotate_groups
from pallas_kernels.formats.weight_formats import WeightFormat


@shaped
def rounded_inputs(
    x: Float[Array, "*rows K"],
    fmt: WeightFormat,
    scale: Float[Array, "1"] | None = None,
    *,
    axis: str | None = None,
    parts: int = 1,
) -> Float[Array, "*rows K"]:
    """Returns x rounded to the values that a weight of that format takes, in x's dtype. Rounding passes gradients
    straight through.

    `scale` is that of all inputs, found beforehand. `axis` is the mesh axis whose devices have a part of each row. They
    quantize it with the whole row's scale. `parts` is the number of parts of a row that are rounded separately, for
    blocks.
    """
    fixed = jax.lax.stop_gradient(x)
    if fmt.activations in KINDS:
        return x + (rotate_groups(input_blocks(fixed, fmt, scale, axis, parts), fmt) - fixed)
    if fmt.row_codes is None:
        return x
    rest, large = (fixed, 0) if fmt.outliers is None else part_outliers(fixed, fmt.outliers)
    codes = row_codes(_whole_groups(rest, fmt), fmt, scale, axis)
    return x + (dequantize_rows(codes, x.dtype)[..., : x.shape[-1]] + large - fixed)


@shaped
def row_codes(
    x: Float[Array, "*rows K"], fmt: WeightFormat, scale: Float[Array, "1"] | None, axis: str | None
) -> QuantizedRows:
    """Returns x in the codes of a format's inputs. Arguments are as in rounded_inputs. No device cuts a group, and the
    last group may have fewer columns."""
    assert fmt.row_codes is not None
    options: dict[str, Any] = {"group": fmt.row_group} if fmt.row_group else {"scale": scale, "axis": axis}
    rows = quantize_rows(_whole_groups(x, fmt), fmt.row_codes, per_tensor=fmt.per_tensor, **options)
    return QuantizedRows(rows.values[..., : x.shape[-1]], rows.scales)


def _whole_groups(x: jax.Array, fmt: WeightFormat) -> jax.Array:
    """Pads x [..., K] by zeros to whole groups of inputs."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % (fmt.row_group or 1))])


@shaped
def input_blocks(
    x: Float[Array, "*rows K"], fmt: WeightFormat, scale: Float[Array, "1"] | None, axis: str | None, parts: int
) -> Float[Array, "*rows K"]:
    """Returns x in blocks of small floats, rotated first if the format rotates. Arguments are as in rounded_inputs."""
    assert fmt.activations is not None
    cut = rotate_groups(x, fmt).reshape(*x.shape[:-1], parts, -1)
    return round_blocks(cut, fmt.activations, scale, axis=axis).reshape(x.shape)


@shaped
def part_outliers(
    x: Float[Array, "*rows K"], threshold: float
) -> tuple[Float[Array, "*rows K"], Float[Array, "*rows K"]]:
    """Returns x as the sum of two arrays: its values below the threshold, and its outliers (LLM.int8, arXiv
    2208.07339).

    bitsandbytes instead takes out a column for all tokens of a batch if one token has an outlier there. A token then
    depends on others.
    """
    large = jnp.abs(x) >= jnp.asarray(threshold, x.dtype)
    zero = jnp.zeros((), x.dtype)
    return jnp.where(large, zero, x), jnp.where(large, x, zero)


def is_weight_only(w: QuantizedWeight) -> bool:
    """Returns whether the weight takes rows as they are, neither quantized nor rounded."""
    return w.format.activations is None


def rows_kind(reader: Weight | Adapted) -> str | None:
    """Returns the code that a norm or SiLU quantizes to for this weight, or None. A scale that all
    tokens share takes a pass of its own. So does one that is known before (input_scale), and so do outliers and scales
    of groups."""
    if not isinstance(reader, QuantizedWeight) or reader.format.per_tensor or reader.input_scale is not None:
        return None
    apart = reader.format.outliers is not None or reader.format.row_group is not None
    return None if apart else reader.format.row_codes


def takes_plain_rows(w: QuantizedWeight) -> bool:
    """Returns whether rows can be quantized within the product: each by itself, for codes without padding."""
    return rows_kind(w) is not None and w.values.shape == w.shape
