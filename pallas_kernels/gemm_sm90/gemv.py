"""Product of one row with a matrix for Hopper, in Pallas Mosaic GPU: each warp has rows of w of its own.

Weights go from memory to registers and are multiplied there: no row of theirs waits for another, and blocks are small
and many, so that one begins while another ends. XLA makes such a product in the same way; this one takes the norm
before it along, and adds bias and residual, or SiLU and the other half's product, before it rounds.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import row_pieces_sm90 as row_pieces
from pallas_kernels.gemm_sm90.gemv_config import CHUNK, Config
from pallas_kernels.row_pieces_sm90 import VECTOR, WARPS, widen

# Of w [rows, K / 8, 8]: a warp has every fourth row, a lane a vector of each chunk.
LAYOUT = plgpu.Layout.TILED(plgpu.Tiling(((WARPS, CHUNK, VECTOR),)), (-3,), (-2,), -1)


@partial(jax.jit, static_argnames=("eps", "out_dtype", "config", "gated", "interpret"))
def gemv(
    x: jax.Array,
    w: jax.Array,
    *,
    norm: jax.Array | None = None,
    eps: float = 0.0,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    out_dtype: jnp.dtype,
    config: Config,
    gated: bool = False,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """x [1, K] times w [N, K] transposed, plus bias [N] and residual [1, N] -> [1, N]. Sizes as gemv_config.fits says.

    norm [K]: the row is RMSNorm(x) * norm, with the bits of norm_quant's kernel. gated: SiLU of the product with w's
    first half, times that with its second half -> [1, N / 2]; nothing is added.
    """
    halves = 2 if gated else 1
    n, vectors = w.shape[0] // halves, w.shape[1] // VECTOR
    optional = (("norm", norm), ("bias", bias), ("residual", residual))
    given = {name: array.reshape(-1) for name, array in optional if array is not None}
    assert not (gated and given.keys() - {"norm"}), "nothing is added to a gated product"
    scratch: dict[str, Any] = {}
    if norm is not None:
        given["norm"] = norm.reshape(vectors, VECTOR)
        scratch["row_s"] = plgpu.SMEM((vectors, VECTOR), x.dtype)
        scratch["squares"] = plgpu.SMEM((vectors,), jnp.float32)
        scratch["barrier"] = plgpu.Barrier()
    kernel = plgpu.kernel(
        partial(_kernel, config, halves, eps, tuple(given)),
        out_type=jax.ShapeDtypeStruct((n,), out_dtype),
        scratch_types=scratch,
        grid=(n // config.rows,),
        grid_names=("block",),
        num_threads=1,
        thread_name="warpgroup",
        compiler_params=row_pieces.COMPILER_PARAMS,
        interpret=interpret,
        kernel_name="gemv_gated" if gated else "gemv",
    )
    return kernel(x.reshape(vectors, VECTOR), w.reshape(-1, vectors, VECTOR), *given.values())[None]


def _kernel(
    config: Config, halves: int, eps: float, names: tuple[str, ...], x: Any, w: Any, *refs: Any, **scratch: Any
) -> None:
    *arrays, out = refs
    extra = dict(zip(names, arrays, strict=True))
    n, chunks = out.shape[0], x.shape[0] // CHUNK
    block = pl.ds(lax.axis_index("block") * config.rows, config.rows)
    parts = [w.at[pl.ds(block.start + i * n, config.rows)] for i in range(halves)]
    zeros = plgpu.layout_cast(jnp.zeros((config.rows, CHUNK, VECTOR), jnp.float32), LAYOUT)

    def load_weights(first: Any, count: int) -> list[list[jax.Array]]:
        return [[_load(part.at[:, chunk], LAYOUT) for part in parts] for chunk in _chunks(first, count)]

    def add(sums: list[jax.Array], weights: list[list[jax.Array]], first: Any) -> list[jax.Array]:
        for chunk, of_parts in zip(_chunks(first, len(weights)), weights):
            values = widen(_load(row.at[chunk], LAYOUT.reduce((0,))))
            spread = plgpu.layout_cast(lax.broadcast_in_dim(values, zeros.shape, (1, 2)), LAYOUT)
            sums = [total + widen(each) * spread for total, each in zip(sums, of_parts, strict=True)]
        return sums

    ahead = min(config.ahead, chunks)
    weights = load_weights(0, ahead)  # before anything that waits
    row = x
    if "norm" in extra:
        row = scratch["row_s"]
        _norm(x, extra["norm"], eps, **scratch)
    sums = add([zeros] * halves, weights, 0)
    whole, rest = divmod(chunks, ahead)
    step = lambda i, sums: add(sums, load_weights(i * ahead, ahead), i * ahead)  # noqa: E731
    sums = lax.fori_loop(1, whole, step, sums)
    if rest:
        sums = add(sums, load_weights(whole * ahead, rest), whole * ahead)
    totals = [jnp.sum(jnp.sum(each, axis=2), axis=1) for each in sums]
    total = row_pieces.silu_mul(*totals) if halves == 2 else totals[0]
    for name in ("bias", "residual"):
        if name in extra:
            total = total + widen(_load(extra[name].at[block], LAYOUT.reduce((1, 2))))
    out.at[block][...] = total.astype(out.dtype)


def _norm(x: Any, gain: Any, eps: float, *, row_s: Any, squares: Any, barrier: Any) -> None:
    """Puts RMSNorm(x) * gain into row_s: each warp its part, as all of them are read by each."""
    part = row_pieces.Part(jnp.int32(0), row_pieces.pieces(x.shape[0]))
    part.store(row_s, part.norm(part.load(x), part.load(gain), eps, squares, barrier))
    row_pieces.everyone(barrier)


def _chunks(first: Any, count: int) -> list[Any]:
    return [pl.ds((first + i) * CHUNK, CHUNK) for i in range(count)]


def _load(ref: Any, layout: Any) -> jax.Array:
    return plgpu.load(ref, layout=layout, optimized=False)
