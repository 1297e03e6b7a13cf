"""silu_mul_quant for many rows: the full pieces of a row are computed one after another, each while the next is loaded.

Results wait in shared memory, each in the place of the thread that made it, for the scale that they will be quantized
with. So a thread holds two pieces and not a row, several times as many blocks fit an SM, and they drift apart: some
load while others compute. Interpreted and lowered; it did not run on a device yet.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels import row_pieces_sm90 as row_pieces
from pallas_kernels.row_pieces_sm90 import FULL, VECTOR, Part, Piece, widen_by_bits


def stage(cut: tuple[Piece, ...], warpgroups: int, dtype: DTypeLike) -> Any:
    """Shared memory for the results of the full pieces."""
    return plgpu.SMEM((warpgroups, _num_full(cut) * FULL, VECTOR), dtype)


def body(gate_up: Any, values: Any, *rest: Any, kind: str | None, cut: tuple[Piece, ...]) -> None:
    """The kernel: gate_up [T, 2, F / 8, 8], values [T, F / 8, 8], then where it quantizes scales [T], two arguments of
    Part.peak, and the stage. What a warpgroup has beside full pieces is loaded first and held."""
    row, index, count = jax.lax.axis_index("row"), jax.lax.axis_index("warpgroup"), _num_full(cut)
    part, held = Part(index, cut), Part(index, cut, first=count)
    gate, up, values = gate_up.at[row, 0], gate_up.at[row, 1], values.at[row]
    loaded = list(zip(held.load(gate), held.load(up)))
    if kind is None:
        _stream(gate, up, part.base, count, values, part.base, None)
        held.store(values, [_silu_mul(*pair) for pair in loaded])
        return
    scales, scratch, barrier, staged = rest
    staged = staged.at[index]
    peak = _stream(gate, up, part.base, count, staged, 0, row_pieces.zero_piece(FULL, gate.dtype))
    results = [_silu_mul(*pair) for pair in loaded]
    inverse = part.store_scale(scales.at[row], part.peak([peak, *results], scratch, barrier), kind)

    def store(i: jax.Array, _: None) -> None:
        piece = widen_by_bits(row_pieces.load_piece(staged, i * FULL, FULL))
        values[pl.ds(part.base + i * FULL, FULL)] = row_pieces.codes(piece, inverse, kind)

    jax.lax.fori_loop(0, count, store, None)
    held.store(values, [row_pieces.codes(widen_by_bits(x), inverse, kind) for x in results])


def _stream(gate: Any, up: Any, base: Any, count: int, target: Any, start: Any, peak: Any) -> Any:
    """SiLU(gate) * up of `count` full pieces from vector `base` on, into target from vector `start` on. Returns the
    maximum of `peak` and their magnitudes, element by element, if it is not None."""

    def load(i: Any) -> list[jax.Array]:
        return [row_pieces.load_piece(ref, base + i * FULL, FULL) for ref in (gate, up)]

    def compute(i: Any, x: jax.Array, y: jax.Array, peak: jax.Array | None) -> jax.Array | None:
        result = _silu_mul(x, y)
        target[pl.ds(start + i * FULL, FULL)] = result
        return None if peak is None else jnp.maximum(peak, jnp.abs(result))

    def step(i: jax.Array, carry: Any) -> Any:
        following = load(i + 1)
        return *following, compute(i, *carry)

    last = jax.lax.fori_loop(0, count - 1, step, (*load(0), peak))
    return compute(count - 1, *last)


def _num_full(cut: tuple[Piece, ...]) -> int:
    return sum(piece.size == FULL for piece in cut)


def _silu_mul(gate: jax.Array, up: jax.Array) -> jax.Array:
    product = row_pieces.silu_mul(widen_by_bits(gate), widen_by_bits(up))
    return product.astype(gate.dtype)
