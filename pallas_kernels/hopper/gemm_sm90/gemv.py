"""Multiplies one row by a matrix on Hopper, in Pallas Mosaic GPU: each warp has rows of w of its own.

Weights go from memory to registers and are multiplied there. No row of theirs waits for another. Blocks are small and
many, so that one begins while another ends. XLA makes such a matmul in the same way. This one also takes the norm
before it along. It adds bias and residual, or applies SiLU and the other half's product, before it rounds. With weights
of int8 it quantizes the row, too: every block does, while its first weights are on their way.

Several rows of x may each have a matrix of their own, as experts' rows do. Then each block has one of these rows.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from pallas_kernels.hopper import row_pieces_sm90 as row_pieces
from pallas_kernels.hopper.gemm_sm90.gemv_config import CHUNK, Config
from pallas_kernels.hopper.row_pieces_sm90 import VECTOR, WARPS, widen

# Of w [rows, K / 8, 8]: a warp has every fourth row, a lane a vector of each chunk.
LAYOUT = plgpu.Layout.TILED(plgpu.Tiling(((WARPS, CHUNK, VECTOR),)), (-3,), (-2,), -1)


@partial(jax.jit, static_argnames=("groups", "eps", "out_dtype", "config", "gated", "interpret"))
def gemv(
    x: jax.Array,
    w: jax.Array,
    *,
    group: jax.Array | None = None,
    groups: int = 1,
    x_scale: jax.Array | None = None,
    w_scale: jax.Array | None = None,
    norm: jax.Array | None = None,
    eps: float = 0.0,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    out_dtype: jnp.dtype,
    config: Config,
    gated: bool = False,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """Returns x [1, K] times w [N, K] transposed, plus bias [N] and residual [1, N]: [1, N]. gemv_config.fits says the
    sizes.

    - norm [K]: the row is RMSNorm(x) * norm, with the bits of norm_quant's kernel.
    - gated: SiLU of the product with w's first half, times that with its second half: [1, N / 2]. Nothing is added.
    - w_scale f32[N]: w is int8, and the row is quantized as well, after the norm. The result has the bits of
      norm_quant, int8_matmul and silu_mul_quant one after the other, whose sums are exact.
    - group i32[M or more], groups: x is [M, K], and row i meets block group[i] of w [groups N, K]: [M, N]. If there is
      no such block, the row of the result is zero and w is not read. Nothing is added, and there is no norm. In 16
      bits K is any multiple of 8 from 256 on.
    - x_scale f32[M]: these rows are codes already. A gated product is then rounded once.
    """
    halves = 2 if gated else 1
    m, n, vectors = x.shape[0], w.shape[0] // (halves * groups), w.shape[1] // VECTOR
    optional = (
        ("norm", norm), ("bias", bias), ("residual", residual), ("x_scale", x_scale), ("w_scale", w_scale),
        ("group", group),
    )  # fmt: skip
    given = {name: array.reshape(-1) for name, array in optional if array is not None}
    alone = {"bias", "residual"} if gated else set()
    alone |= {"bias", "residual", "norm"} if group is not None else set()
    assert not given.keys() & alone, "nothing is added to a gated product, or normed if rows have matrices of their own"
    assert group is not None or m == 1, "several rows have matrices of their own"
    scratch: dict[str, Any] = {}
    if norm is not None:
        given["norm"] = norm.reshape(vectors, VECTOR)
        scratch["squares"] = plgpu.SMEM((vectors,), jnp.float32)
    if w_scale is not None and x_scale is None:
        scratch["peaks"] = plgpu.SMEM((row_pieces.num_peaks(row_pieces.pieces(vectors)),), jnp.float32)
    if scratch:
        scratch["row_s"] = plgpu.SMEM((vectors, VECTOR), x.dtype if w_scale is None else w.dtype)
        scratch["barrier"] = plgpu.Barrier()
    names = ["gemv"] + ["int8"] * (w_scale is not None) + ["gated"] * gated + ["ragged"] * (group is not None)
    kernel = plgpu.kernel(
        partial(_kernel, config, halves, eps, tuple(given)),
        out_type=jax.ShapeDtypeStruct((m, n), out_dtype),
        scratch_types=scratch,
        grid=(n // config.rows, m),  # rows of one group run side by side
        grid_names=("block", "row"),
        num_threads=1,
        thread_name="warpgroup",
        compiler_params=row_pieces.COMPILER_PARAMS,
        interpret=interpret,
        kernel_name="_".join(names),
    )
    return kernel(x.reshape(m, vectors, VECTOR), w.reshape(-1, vectors, VECTOR), *given.values())


def _kernel(
    config: Config, halves: int, eps: float, names: tuple[str, ...], x: Any, w: Any, *refs: Any, **scratch: Any
) -> None:
    *arrays, out = refs
    extra = dict(zip(names, arrays, strict=True))
    row, n = lax.axis_index("row"), out.shape[1]
    block = pl.ds(lax.axis_index("block") * config.rows, config.rows)
    product = partial(_product, config, halves, eps, out.dtype, extra, x.at[row], w, row, block)
    if "group" not in extra:
        out.at[row, block][...] = product([block.start + i * n for i in range(halves)], **scratch)
        return
    group, groups = extra["group"][row], w.shape[0] // (halves * n)

    @pl.when(group < groups)
    def _() -> None:
        first = group * (halves * n) + block.start
        out.at[row, block][...] = product([first + i * n for i in range(halves)])

    @pl.when(group >= groups)
    def _() -> None:
        out.at[row, block][...] = plgpu.layout_cast(jnp.zeros((config.rows,), out.dtype), LAYOUT.reduce((1, 2)))


def _product(
    config: Config, halves: int, eps: float, out_dtype: jnp.dtype, extra: dict[str, Any], x: Any, w: Any, number: Any,
    block: Any, starts: list[Any], **scratch: Any,
) -> jax.Array:  # fmt: skip
    """Returns a block of the result of a row x [K / 8, 8]. starts: the first rows of w, and of its other half."""
    (chunks, tail), of_halves = divmod(x.shape[0], CHUNK), [pl.ds(start, config.rows) for start in starts]
    if "w_scale" in extra:
        zeros = plgpu.layout_cast(jnp.zeros((config.rows, CHUNK), jnp.int32), LAYOUT.reduce((2,)))
    else:
        zeros = plgpu.layout_cast(jnp.zeros((config.rows, CHUNK, VECTOR), jnp.float32), LAYOUT)

    def load_weights(places: list[Any]) -> list[list[jax.Array]]:
        return [[_load(w.at[half, place], LAYOUT) for half in of_halves] for place in places]

    def add(sums: list[jax.Array], weights: list[list[jax.Array]], places: list[Any], tail: int = 0) -> list[jax.Array]:
        for i, (place, parts) in enumerate(zip(places, weights, strict=True)):
            values = _load(row.at[place], LAYOUT.reduce((0,)))
            if tail and i == len(places) - 1:
                values = _last(values, tail)
            sums = [_add_products(total, part, values) for total, part in zip(sums, parts, strict=True)]
        return sums

    ahead = min(config.ahead, chunks)
    weights = load_weights(_chunks(0, ahead))  # before anything that waits
    row, scale = x, None
    if scratch:
        row = scratch["row_s"]
        scale = _prepare(x, extra.get("norm"), eps, **scratch)
    elif "x_scale" in extra:
        scale = extra["x_scale"][number]
    sums = add([zeros] * halves, weights, _chunks(0, ahead))
    whole, rest = divmod(chunks, ahead)

    def step(i: jax.Array, sums: list[jax.Array]) -> list[jax.Array]:
        places = _chunks(i * ahead, ahead)
        return add(sums, load_weights(places), places)

    sums = lax.fori_loop(1, whole, step, sums)
    places = _chunks(whole * ahead, rest)
    if tail:  # the last chunk begins in the one before
        places.append(pl.ds(x.shape[0] - CHUNK, CHUNK))
    if places:
        sums = add(sums, load_weights(places), places, tail)

    def vector_of(name: str, rows: Any) -> jax.Array:
        return widen(_load(extra[name].at[rows], LAYOUT.reduce((1, 2))))

    if scale is None:
        totals = [jnp.sum(jnp.sum(each, axis=2), axis=1) for each in sums]
    else:
        totals = [jnp.sum(each, axis=1).astype(jnp.float32) * scale for each in sums]
        totals = [total * vector_of("w_scale", half) for total, half in zip(totals, of_halves)]
        if halves == 2 and "x_scale" not in extra:  # as the product would have stored them
            totals = [widen(total.astype(out_dtype)) for total in totals]
    total = row_pieces.silu_mul(*totals) if halves == 2 else totals[0]
    for name in ("bias", "residual"):
        if name in extra:
            total = total + vector_of(name, block)
    return total.astype(out_dtype)


def _last(values: jax.Array, count: int) -> jax.Array:
    """Returns a chunk of x with zeros in place of all but its last `count` vectors."""
    number = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, values.shape, 0), LAYOUT.reduce((0,)))
    return jnp.where(number >= CHUNK - count, widen(values), 0.0).astype(values.dtype)


def _prepare(
    x: Any, gain: Any, eps: float, *, row_s: Any, barrier: Any, squares: Any = None, peaks: Any = None
) -> jax.Array | None:
    """Puts the row into row_s, normed where there is a gain, and quantized where there is room for peaks. Returns its
    scale then. Each warp has a part of the row, as all of it is read by each."""
    part = row_pieces.Part(jnp.int32(0), row_pieces.pieces(x.shape[0]))
    values, scale = part.load(x), None
    if gain is not None:
        values = part.norm(values, part.load(gain), eps, squares, barrier)
    if peaks is not None:
        scale = row_pieces.scale_of(part.peak(values, peaks, barrier), "int8")
        inverse = 1.0 / scale
        values = [row_pieces.codes(widen(value), inverse, "int8") for value in values]
    part.store(row_s, values)
    row_pieces.everyone(barrier)
    return scale


def _add_products(sums: jax.Array, w: jax.Array, x: jax.Array) -> jax.Array:
    """Adds products of vectors w [rows, lanes, 8] and x [lanes, 8] to sums f32[rows, lanes, 8]; of int8, i32[rows,
    lanes]."""
    if w.dtype == jnp.int8:
        return _add_four_at_a_time(sums, w, x)
    spread = plgpu.layout_cast(lax.broadcast_in_dim(widen(x), sums.shape, (1, 2)), LAYOUT)
    return sums + widen(w) * spread


def _add_four_at_a_time(sums: jax.Array, w: jax.Array, x: jax.Array) -> jax.Array:
    layout = LAYOUT.reduce((2,))

    @plgpu.inline_mgpu(
        arg_types=(layout, LAYOUT, LAYOUT.reduce((0,))),
        return_type=plgpu.ShapeDtypeStruct(sums.shape, jnp.int32, layout=layout),
    )
    def add(_: Any, sums: Any, w: Any, x: Any) -> mgpu.FragmentedArray:
        i32, rights = ir.IntegerType.get_signless(32), _words(x.registers.item())
        registers = np.empty_like(sums.registers)
        for (at, total), left in zip(np.ndenumerate(sums.registers), w.registers.flat, strict=True):
            total = vector.extract(total, [], ir.DenseI64ArrayAttr.get([0]))
            for word, right in zip(_words(left), rights):
                total = llvm.inline_asm(i32, [word, right, total], "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r")
            registers[at] = vector.from_elements(ir.VectorType.get((1,), i32), [total])
        return mgpu.FragmentedArray(_registers=registers, _layout=sums.layout, _is_signed=True)

    return add(sums, w, x)


def _words(values: ir.Value) -> list[ir.Value]:
    size = mgpu.utils.bitwidth(values.type) // 32
    words = mgpu.utils.bitcast(values, ir.VectorType.get((size,), ir.IntegerType.get_signless(32)))
    return [vector.extract(words, [], ir.DenseI64ArrayAttr.get([i])) for i in range(size)]


def _chunks(first: Any, count: int) -> list[Any]:
    return [pl.ds((first + i) * CHUNK, CHUNK) for i in range(count)]


def _load(ref: Any, layout: Any) -> jax.Array:
    return plgpu.load(ref, layout=layout, optimized=False)
