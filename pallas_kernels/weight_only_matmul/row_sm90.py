"""Runs weight_only_matmul for one row of x on sm_90, with the norm before it, and SiLU or a residual after it.

Codes go from memory straight into registers, 512 bytes of a row of the weight at a time: 16 bytes a lane. The four
warps of a block share its rows, a chunk of columns each in turn. So what a warp has of x meets all of them:
row_lanes_sm90.py says how.
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
from jax.typing import DTypeLike
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector

from pallas_kernels.formats.quantized_weights import QuantizedWeight, group_scales
from pallas_kernels.hopper import row_pieces_sm90 as row_pieces
from pallas_kernels.hopper.row_pieces_sm90 import LANES, VECTOR, WARPS
from pallas_kernels.weight_only_matmul.config import RowConfig, takes_one_row
from pallas_kernels.weight_only_matmul.emitter_sm90 import StreamEmitter
from pallas_kernels.weight_only_matmul.operand_sm90 import pair_table
from pallas_kernels.weight_only_matmul.row_lanes_sm90 import Plan, Row

CODES = plgpu.Layout.TILED(plgpu.Tiling(((WARPS, LANES, 4),)), (-3,), (-2,), -1)  # words [rows, 4, 32, 4]
PARTS = plgpu.Layout.TILED(plgpu.Tiling(((WARPS, LANES, 1),)), (-3,), (-2,), -1)  # of sums [rows, 32, 1]


def product(
    x: jax.Array,
    w: QuantizedWeight,
    norm: jax.Array | None,
    bias: jax.Array | None,
    residual: jax.Array | None,
    out_dtype: DTypeLike,
    *,
    eps: float = 0.0,
    gated: bool = False,
    config: RowConfig,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """Returns x [1, K'] with columns as stored times a weight [N, K] transposed, plus bias [N] and residual [1, N]: [1,
    N]. norm [K']: the row is RMSNorm(x) * norm, with the bits of norm_quant's kernel. gated: SiLU of the product with
    the weight's first half, times that with its second half: [1, N / 2]. Nothing is added. Raises NotImplementedError
    for weights that the configuration does not cut evenly."""
    stored, halves = w.values.shape[0], 2 if gated else 1
    if x.shape[0] != 1 or not takes_one_row(stored, w.format, gated, config) or (gated and w.shape[0] != stored):
        raise NotImplementedError(
            f"{config} is for one row of x and a weight whose rows are a multiple, not M={x.shape[0]} and {w.shape}"
        )
    assert not gated or (bias is None and residual is None), "nothing is added to a gated product"
    n, k = stored // halves, x.shape[1]
    wide = out_dtype == jnp.float64
    beyond = stored - w.shape[0]
    plan = Plan(n, k, x.dtype, w.format, halves, config.rows // halves)
    vectors = k // VECTOR
    optional: dict[str, jax.Array | None] = {
        "zeros": w.zeros, "table": pair_table(x.dtype)[:, 0] if w.format.codes == "nf4" else None,
        "norm": None if norm is None else norm.reshape(vectors, VECTOR), "bias": bias,
        "residual": residual,
    }  # fmt: skip
    given = {name: array for name, array in optional.items() if array is not None}
    for name in given.keys() & {"bias", "residual"}:
        given[name] = jnp.pad(given[name].reshape(-1), (0, beyond))
        if given[name].dtype == jnp.float64:
            given[name] = given[name].astype(jnp.float32)  # as it is added
    scratch: dict[str, Any] = {
        "parts_s": plgpu.SMEM((plan.rows, LANES, 1), jnp.float32), "barrier": plgpu.Barrier()
    }  # fmt: skip
    if norm is not None:
        scratch["row_s"] = plgpu.SMEM((vectors, VECTOR), x.dtype)
        scratch["squares"] = plgpu.SMEM((vectors,), jnp.float32)
    if "table" in given:
        scratch["table_s"] = plgpu.SMEM((256, 32), jnp.int32)
    kernel = plgpu.kernel(
        partial(_kernel, plan, eps, tuple(given)),
        out_type=jax.ShapeDtypeStruct((n,), jnp.dtype("float32") if wide else out_dtype),
        scratch_types=scratch,
        grid=(n // plan.kept,),
        grid_names=("block",),
        num_threads=1,
        thread_name="warpgroup",
        compiler_params=row_pieces.COMPILER_PARAMS,
        interpret=interpret,
        kernel_name="weight_only_row_gated" if gated else "weight_only_row",
    )
    y = kernel(x.reshape(vectors, VECTOR), w.values, group_scales(w), *given.values())[None]
    return y[:, : w.shape[0] // halves].astype(out_dtype)


def _kernel(
    plan: Plan, eps: float, names: tuple[str, ...], x: Any, w: Any, scales: Any, *refs: Any, **scratch: Any
) -> None:
    *arrays, out = refs
    extra = dict(zip(names, arrays, strict=True))
    index = lax.axis_index("block")
    block = pl.ds(index * plan.kept, plan.kept)
    codes = _load_first(plan, index, w)  # before anything that waits
    row, parts, barrier = x, scratch["parts_s"], scratch["barrier"]
    if "norm" in extra:
        row = scratch["row_s"]
        part = row_pieces.Part(jnp.int32(0), row_pieces.pieces(x.shape[0]))
        normed = part.norm(part.load(x), part.load(extra["norm"]), eps, scratch["squares"], barrier)
        part.store(row, normed)
        row_pieces.everyone(barrier)
    read = {"x": row, "w": w, "scales": scales, "parts": parts}
    if "zeros" in extra:
        read["zeros"] = extra["zeros"]
    if "table" in extra:
        read |= {"bytes": extra["table"], "table": scratch["table_s"]}
    if plan.format.group is None:
        del read["scales"]
    _sum(plan, index, codes, read)
    row_pieces.everyone(barrier)
    by_row = PARTS.reduce((1, 2))
    totals = []
    for half in range(plan.halves):
        of_half = plgpu.load(parts.at[pl.ds(half * plan.kept, plan.kept)], layout=PARTS, optimized=False)
        total = jnp.sum(jnp.sum(of_half, axis=2), axis=1)
        if plan.format.group is None:
            at = pl.ds(index * plan.kept + half * plan.n, plan.kept)
            total = total * plgpu.load(scales.at[at], layout=by_row, optimized=False)
        totals.append(total)
    total = row_pieces.silu_mul(*totals) if plan.halves == 2 else totals[0]
    for name in ("bias", "residual"):
        if name in extra:
            total = total + row_pieces.widen(plgpu.load(extra[name].at[block], layout=by_row, optimized=False))
    out.at[block][...] = total.astype(out.dtype)


def _load_first(plan: Plan, block: jax.Array, w: Any) -> jax.Array:
    """Loads the codes of each warp's first chunk: int32 [rows, 4, 32, 4]."""
    shape = plan.rows, WARPS, LANES, 4

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WG_SPLAT(()), plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.int32, layout=CODES),
    )
    def load(_: Any, block: mgpu.FragmentedArray, w: ir.Value) -> mgpu.FragmentedArray:
        emit = StreamEmitter(plan.dtype, {"w": mgpu.utils.memref_ptr(w)})
        codes = Row(plan, emit, block.registers.item()).load_codes(0)
        registers = np.empty(CODES.to_mgpu().registers_shape(shape), object)
        kind = ir.VectorType.get((4,), emit.i32)
        registers.flat = [vector.from_elements(kind, words) for words in codes]
        return mgpu.FragmentedArray(_registers=registers, _layout=CODES.to_mgpu(), _is_signed=True)

    return load(block, w)


def _sum(plan: Plan, block: jax.Array, codes: jax.Array, read: dict[str, Any]) -> None:
    """Puts the sums of the quads of lanes of four warps into read["parts"]."""
    names = tuple(read)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT(()), CODES, *(plgpu.RefType(),) * len(names)), return_type=())
    def compute(_: Any, block: mgpu.FragmentedArray, codes: mgpu.FragmentedArray, *arrays: ir.Value) -> tuple[()]:
        pointers = {name: mgpu.utils.memref_ptr(array) for name, array in zip(names, arrays)}
        words = [
            [vector.extract(register, [], ir.DenseI64ArrayAttr.get([i])) for i in range(4)]
            for register in codes.registers.flat
        ]
        Row(plan, StreamEmitter(plan.dtype, pointers), block.registers.item()).store_sums(words)
        return ()

    compute(block, codes, *read.values())
