"""Runs weight_only_matmul for one row of x on sm_90, with the norm before it, and SiLU or a residual after it.

Codes go from memory straight into registers, 512 bytes of a row of the weight at a time: 16 bytes a lane. The four
warps of a block share its rows, a chunk of columns each in turn. So what a warp has of x meets all of them:
row_lanes_sm90.py says how.

Several rows of x may each have a weight of their own, as experts' rows do. Then each block has one of these rows.
"""

from functools import partial
from typing import Any, NamedTuple

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

SCALARS = (plgpu.Layout.WG_SPLAT(()),) * 3  # of a Place
CODES = plgpu.Layout.TILED(plgpu.Tiling(((WARPS, LANES, 4),)), (-3,), (-2,), -1)  # words [.., 4, 32, 4]


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
    group: jax.Array | None = None,
    groups: int = 1,
    config: RowConfig,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """Returns x [1, K'] with columns as stored times a weight [N, K] transposed, plus bias [N] and residual [1, N]: [1,
    N]. norm [K']: the row is RMSNorm(x) * norm, with the bits of norm_quant's kernel. gated: SiLU of the product with
    the weight's first half, times that with its second half: [1, N / 2]. Nothing is added. Raises NotImplementedError
    for weights that the configuration does not cut evenly.

    group i32[M or more], groups: x is [M, K'], and row i meets block group[i] of the weight [groups N, K']: [M, N]. If
    there is no such block, the row of the result is zero and the weight is not read. Nothing is added, and there is no
    norm."""
    (m, k), stored, halves = x.shape, w.values.shape[0], 2 if gated else 1
    alone = gated or group is not None
    known = takes_one_row(stored // groups, w.format, gated, config) and (w.shape[0] == stored or not alone)
    if not known or (m != 1 and group is None):
        raise NotImplementedError(
            f"{config} is for one row of x and a weight whose rows are a multiple, not M={m} and {w.shape}"
        )
    assert not alone or (bias is None and residual is None), "nothing is added to a product that is gated or of groups"
    assert norm is None or group is None, "there is no norm before a product of groups"
    n = stored // (halves * groups)
    wide = out_dtype == jnp.float64
    beyond = stored - w.shape[0]
    weights = 0 if group is None else groups
    plan = Plan(n, k, x.dtype, w.format, halves, config.rows // halves, weights, config.across)
    vectors = k // VECTOR
    optional: dict[str, jax.Array | None] = {
        "zeros": w.zeros, "table": pair_table(x.dtype)[:, 0] if w.format.codes == "nf4" else None,
        "norm": None if norm is None else norm.reshape(vectors, VECTOR), "bias": bias,
        "residual": residual, "group": group,
    }  # fmt: skip
    given = {name: array for name, array in optional.items() if array is not None}
    for name in given.keys() & {"bias", "residual"}:
        given[name] = jnp.pad(given[name].reshape(-1), (0, beyond))
        if given[name].dtype == jnp.float64:
            given[name] = given[name].astype(jnp.float32)  # as it is added
    scratch: dict[str, Any] = {
        "parts_s": plgpu.SMEM((plan.rows, plan.parts, 1), jnp.float32), "barrier": plgpu.Barrier()
    }  # fmt: skip
    if norm is not None:
        scratch["row_s"] = plgpu.SMEM((vectors, VECTOR), x.dtype)
        scratch["squares"] = plgpu.SMEM((vectors,), jnp.float32)
    if "table" in given:
        scratch["table_s"] = plgpu.SMEM((256, 32), jnp.int32)
    kernel = plgpu.kernel(
        partial(_kernel, plan, eps, tuple(given)),
        out_type=jax.ShapeDtypeStruct((m, n), jnp.dtype("float32") if wide else out_dtype),
        scratch_types=scratch,
        grid=(n // plan.kept, m),  # rows of one group run side by side
        grid_names=("block", "row"),
        num_threads=1,
        thread_name="warpgroup",
        compiler_params=row_pieces.COMPILER_PARAMS,
        interpret=interpret,
        kernel_name="weight_only_row" + "_gated" * gated + "_ragged" * (group is not None),
    )
    scales = w.scales if w.format.scale_codes == "e8m0" else group_scales(w)
    y = kernel(x.reshape(m, vectors, VECTOR), w.values, scales, *given.values())
    return y[:, : w.shape[0] // (halves * groups)].astype(out_dtype)


def _kernel(
    plan: Plan, eps: float, names: tuple[str, ...], x: Any, w: Any, scales: Any, *refs: Any, **scratch: Any
) -> None:
    *arrays, out = refs
    extra = dict(zip(names, arrays, strict=True))
    place = Place(lax.axis_index("block"), lax.axis_index("row"), jnp.int32(0))
    at = place.row, pl.ds(place.block * plan.kept, plan.kept)
    if "group" not in extra:
        out.at[at][...] = _product(plan, eps, extra, place, x, w, scales, out.dtype, **scratch)
        return
    place = place._replace(weight=extra.pop("group")[place.row])

    @pl.when(place.weight < plan.weights)
    def _() -> None:
        out.at[at][...] = _product(plan, eps, extra, place, x, w, scales, out.dtype, **scratch)

    @pl.when(place.weight >= plan.weights)
    def _() -> None:
        out.at[at][...] = plgpu.layout_cast(jnp.zeros((plan.kept,), out.dtype), _parts(plan).reduce((1, 2)))


class Place(NamedTuple):
    """Says what a block computes: which block of a weight's rows, for which row of x, and which weight that is."""

    block: Any
    row: Any
    weight: Any


def _product(
    plan: Plan, eps: float, extra: dict[str, Any], place: Place, x: Any, w: Any, scales: Any, out_dtype: Any,
    **scratch: Any,
) -> jax.Array:  # fmt: skip
    """Returns a block of a row of the result."""
    block = pl.ds(place.block * plan.kept, plan.kept)
    codes = _load_first(plan, place, w)  # before anything that waits
    row, parts, barrier = x, scratch["parts_s"], scratch["barrier"]
    if "norm" in extra:
        row = scratch["row_s"]
        part = row_pieces.Part(jnp.int32(0), row_pieces.pieces(row.shape[0]))
        normed = part.norm(part.load(x.at[0]), part.load(extra["norm"]), eps, scratch["squares"], barrier)
        part.store(row, normed)
        row_pieces.everyone(barrier)
    read = {"x": row, "w": w, "scales": scales, "parts": parts}
    if "zeros" in extra:
        read["zeros"] = extra["zeros"]
    if "table" in extra:
        read |= {"bytes": extra["table"], "table": scratch["table_s"]}
    if plan.format.group is None:
        del read["scales"]
    _sum(plan, place, codes, read)
    row_pieces.everyone(barrier)
    layout = _parts(plan)
    by_row = layout.reduce((1, 2))
    totals = []
    for half in range(plan.halves):
        of_half = plgpu.load(parts.at[pl.ds(half * plan.kept, plan.kept)], layout=layout, optimized=False)
        total = jnp.sum(jnp.sum(of_half, axis=2), axis=1)
        if plan.format.group is None:
            at = pl.ds(block.start + half * plan.n, plan.kept)
            total = total * plgpu.load(scales.at[at], layout=by_row, optimized=False)
        totals.append(total)
    total = row_pieces.silu_mul(*totals) if plan.halves == 2 else totals[0]
    for name in ("bias", "residual"):
        if name in extra:
            total = total + row_pieces.widen(plgpu.load(extra[name].at[block], layout=by_row, optimized=False))
    return total.astype(out_dtype)


def _parts(plan: Plan) -> Any:
    """Lays out sums [rows, parts, 1]: a warp has every fourth row. Lanes that are too many hold copies."""
    copies = () if plan.parts == LANES else (plgpu.Replicated(LANES // plan.parts),)
    return plgpu.Layout.TILED(plgpu.Tiling(((WARPS, plan.parts, 1),)), (-3,), (-2, *copies), -1)


def _load_first(plan: Plan, place: Place, w: Any) -> jax.Array:
    """Loads the codes of each warp's first chunk: int32 [rows of a warp, 4, 32, 4]."""
    shape = plan.own, WARPS, LANES, 4

    @plgpu.inline_mgpu(
        arg_types=(*SCALARS, plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.int32, layout=CODES),
    )
    def load(_: Any, *arguments: Any) -> mgpu.FragmentedArray:
        *numbers, w = arguments
        emit = StreamEmitter(plan.dtype, {"w": mgpu.utils.memref_ptr(w)})
        codes = Row(plan, emit, *(number.registers.item() for number in numbers)).load_codes(0)
        registers = np.empty(CODES.to_mgpu().registers_shape(shape), object)
        kind = ir.VectorType.get((4,), emit.i32)
        registers.flat = [vector.from_elements(kind, words) for words in codes]
        return mgpu.FragmentedArray(_registers=registers, _layout=CODES.to_mgpu(), _is_signed=True)

    return load(*place, w)


def _sum(plan: Plan, place: Place, codes: jax.Array, read: dict[str, Any]) -> None:
    """Puts the sums of the quads of lanes of four warps into read["parts"]."""
    names = tuple(read)

    @plgpu.inline_mgpu(arg_types=(*SCALARS, CODES, *(plgpu.RefType(),) * len(names)), return_type=())
    def compute(_: Any, *arguments: Any) -> tuple[()]:
        numbers, (codes, *arrays) = arguments[: len(SCALARS)], arguments[len(SCALARS) :]
        pointers = {name: mgpu.utils.memref_ptr(array) for name, array in zip(names, arrays)}
        words = [
            [vector.extract(register, [], ir.DenseI64ArrayAttr.get([i])) for i in range(4)]
            for register in codes.registers.flat
        ]
        at = (number.registers.item() for number in numbers)
        Row(plan, StreamEmitter(plan.dtype, pointers), *at).store_sums(words)
        return ()

    compute(*place, codes, *read.values())
