"""What a weight's inputs are when they meet it: as they come, in codes of eight bits, or in blocks of small floats."""

from typing import Any

import jax
import jax.numpy as jnp

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
    """Returns x as a weight of that format takes it, in numbers of x's dtype; rounding passes gradients. `scale` is
    of all inputs, found ahead. axis: the mesh axis whose devices have a part of each row and quantize it with the whole
    row's scale. parts: into which a row of blocks is cut; each is rounded by itself."""
    fixed = jax.lax.stop_gradient(x)
    if fmt.activations in KINDS:
        return x + (rotate_groups(input_blocks(fixed, fmt, scale, axis, parts), fmt) - fixed)
    if fmt.row_codes is None:
        return x
    rest, large = (fixed, 0) if fmt.outliers is None else part_outliers(fixed, fmt.outliers)
    return x + (dequantize_rows(row_codes(rest, fmt, scale, axis), x.dtype) + large - fixed)


@shaped
def row_codes(
    x: Float[Array, "*rows K"], fmt: WeightFormat, scale: Float[Array, "1"] | None, axis: str | None
) -> QuantizedRows:
    """Returns x in the codes of a format's inputs; the rest as rounded_inputs has it. Groups are whole."""
    assert fmt.row_codes is not None
    options: dict[str, Any] = {"group": fmt.row_group} if fmt.row_group else {"scale": scale, "axis": axis}
    return quantize_rows(x, fmt.row_codes, per_tensor=fmt.per_tensor, **options)


@shaped
def input_blocks(
    x: Float[Array, "*rows K"], fmt: WeightFormat, scale: Float[Array, "1"] | None, axis: str | None, parts: int
) -> Float[Array, "*rows K"]:
    """Returns x, rotated where the format has that, in blocks of small floats; the rest as rounded_inputs has it."""
    assert fmt.activations is not None
    cut = rotate_groups(x, fmt).reshape(*x.shape[:-1], parts, -1)
    return round_blocks(cut, fmt.activations, scale, axis=axis).reshape(x.shape)


@shaped
def part_outliers(
    x: Float[Array, "*rows K"], threshold: float
) -> tuple[Float[Array, "*rows K"], Float[Array, "*rows K"]]:
    """Returns x as the sum of what is smaller and of what is not (LLM.int8, arXiv 2208.07339), value by value.

    bitsandbytes takes a column out for all tokens of a batch where one has an outlier there, and a token then depends
    on others."""
    large = jnp.abs(x) >= jnp.asarray(threshold, x.dtype)
    zero = jnp.zeros((), x.dtype)
    return jnp.where(large, zero, x), jnp.where(large, x, zero)


def takes_numbers(w: QuantizedWeight) -> bool:
    """Returns whether rows meet this weight as they are: neither quantized nor rounded first."""
    return w.format.activations is None


def rows_kind(reader: Weight) -> str | None:
    """Returns what a norm or SiLU quantizes to for this weight. A scale that all tokens share takes a pass of its own,
    be it found as they come or ahead (input_scale), and so do outliers and scales of groups."""
    if not isinstance(reader, QuantizedWeight) or reader.format.per_tensor or reader.input_scale is not None:
        return None
    apart = reader.format.outliers is not None or reader.format.row_group is not None
    return None if apart else reader.format.row_codes


def takes_plain_rows(w: QuantizedWeight) -> bool:
    """Returns whether rows of x can be quantized as they are multiplied: each by itself, for codes that are not
    padded."""
    return rows_kind(w) is not None and w.values.shape == w.shape
