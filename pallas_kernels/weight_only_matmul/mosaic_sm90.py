"""weight_only_matmul for Hopper GPUs: codes become wgmma's left operand in registers.

The weight's rows are the 64-row side of wgmma and the few rows of x its narrow side. One warpgroup copies codes, scales
and x into a ring of stages, on and on across the tiles of a persistent CTA; the others turn codes into 16-bit operands
in registers and multiply. Few rows of x leave room beside them: with fold = 2, 32 rows of the weight in two parts of K
are the 64 rows of wgmma, each part meeting its own columns of x, so that tiles are fine enough to balance over all SMs
with no sums to exchange between them. With fewer rows of x single warps multiply what the ring brings (warp_sm90.py),
or there is no ring (stream_sm90.py, row_sm90.py).
"""

import functools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.norm_quant import xla as norm_xla
from pallas_kernels.quantized_weights import QuantizedWeight, group_scales
from pallas_kernels.ring_sm90 import drain, free_slot, slot_of
from pallas_kernels.silu_mul_quant import xla as silu_xla
from pallas_kernels.weight_only_matmul import row_sm90, stream_sm90, warp_sm90, xla
from pallas_kernels.weight_only_matmul.config import (
    WARP_ROWS,
    AnyConfig,
    Config,
    RowConfig,
    StreamConfig,
    check_supported,
    choose_config,
)
from pallas_kernels.weight_only_matmul.operand_sm90 import COLUMNS, ROWS, operand, pair_table
from pallas_kernels.weight_only_matmul.plan_sm90 import Plan

# Of a thread that computes, and that copies, by the warpgroups that compute. Two warpgroups in all have enough as they
# are launched: asking for more than that is undefined.
REGISTERS = {1: None, 2: (232, 40), 3: (152, 40)}


@partial(jax.jit, static_argnames=("out_dtype", "config", "interpret"))
def product(
    x: jax.Array,
    w: QuantizedWeight,
    *,
    out_dtype: jnp.dtype,
    config: Config | StreamConfig,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """x [M, K'] times the weight's padded rows [N', K'], transposed -> [split, M, N'] of out_dtype, to be summed."""
    if isinstance(config, StreamConfig):
        return stream_sm90.product(x, w, jnp.dtype(out_dtype), config, interpret)[None]
    (m, k), n = x.shape, w.values.shape[0]
    plan = Plan(m, n, k, x.dtype, jnp.dtype(out_dtype), w.format, config)
    if config.by_warp and (m > config.tokens or n % WARP_ROWS or not w.format.packed):
        raise NotImplementedError(
            f"{config} is for at most {config.tokens} rows of x, multiples of {WARP_ROWS} rows of the weight and 4 "
            f"bits, not M={m}, N={n} and {w.format.name}"
        )
    if config.fold > 1 and (w.format.group or 1) > plan.step:
        raise NotImplementedError(
            f"{config} cuts groups of {w.format.group}: stages hold {plan.step} columns of a part"
        )
    rows = m
    if m > 8 and m % 8:  # TMA cuts x into groups of 8 rows
        rows = m + -m % 8
        x = jnp.pad(x, ((0, rows - m), (0, 0)))
    arrays = {"x": x, "w": w.values, "scales": group_scales(w), "zeros": w.zeros}
    if w.format.codes == "nf4":
        arrays["table"] = pair_table(x.dtype)
    arrays = {name: array for name, array in arrays.items() if array is not None}
    # What is as wide as its array is copied as one run of bytes, which is not cut at the array's edges.
    width = n + 16 if n == ROWS // config.fold else n
    shape = (config.split, m, n) if config.by_warp else (config.split, rows, width)
    kernel = plgpu.kernel(
        partial(_kernel, plan, tuple(arrays)),
        out_type=jax.ShapeDtypeStruct(shape, out_dtype),
        scratch_types=plan.scratch(tuple(arrays)),
        grid=(min(config.ctas, plan.items),),
        grid_names=("worker",),
        num_threads=config.warpgroups + 1,
        thread_name="warpgroup",
        kernel_name="weight_only_matmul",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )
    return kernel(*arrays.values())[:, :m, :n]


@partial(jax.jit, static_argnames=("out_dtype", "eps", "gated", "config", "interpret"))
def weight_only_matmul(
    x: jax.Array,
    w: QuantizedWeight,
    bias: jax.Array | None,
    residual: jax.Array | None,
    out_dtype: jnp.dtype,
    *,
    norm: jax.Array | None = None,
    eps: float = 0.0,
    gated: bool = False,
    config: AnyConfig | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """x [M, K'] with columns as stored, bias [N], residual [M, N] -> [M, N]; see api.py. norm [K'], and SiLU of one
    half of the product times the other (gated: [M, N / 2]), are for a RowConfig. Gradients are xla's."""
    n, k = w.values.shape[0], x.shape[1]
    check_supported(x.dtype, x.shape[0], n, k, w.format)
    config = config or choose_config(x.shape[0], n, k, w.format)
    return _product(x, w, norm, bias, residual, out_dtype, eps, gated, config, interpret)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7, 8, 9))
def _product(
    x: jax.Array,
    w: QuantizedWeight,
    norm: jax.Array | None,
    bias: jax.Array | None,
    residual: jax.Array | None,
    out_dtype: jnp.dtype,
    eps: float,
    gated: bool,
    config: AnyConfig,
    interpret: plgpu.InterpretGPUParams | None,
) -> jax.Array:
    if isinstance(config, RowConfig):
        return row_sm90.product(
            x, w, norm, bias, residual, out_dtype, eps=eps, gated=gated, config=config, interpret=interpret
        )
    assert norm is None, "a norm goes with one row"
    assert not gated, "so does SiLU"
    split = config.split if isinstance(config, Config) else 1
    whole = split == 1 and bias is None and residual is None and out_dtype != jnp.float64
    parts = product(x, w, out_dtype=out_dtype if whole else jnp.float32, config=config, interpret=interpret)
    y = functools.reduce(jnp.add, list(parts))  # in order
    return xla.finish(y[:, : w.shape[0]], bias, residual, out_dtype)


def _forward(x, w, norm, bias, residual, *options):
    return _product(x, w, norm, bias, residual, *options), (x, w, norm, bias, residual)


def _backward(out_dtype, eps, gated, config, interpret, saved, gradient):
    def plain(x, w, norm, bias, residual):
        rows = x if norm is None else norm_xla.norm_quant(x, norm, eps=eps)[0]
        if not gated:
            return xla.weight_only_matmul(rows, w, bias, residual, out_dtype)
        return silu_xla.silu_mul_quant(xla.weight_only_matmul(rows, w, None, None, x.dtype)).astype(out_dtype)

    return jax.vjp(plain, *saved)[1](gradient)


_product.defvjp(_forward, _backward)


def _kernel(plan: Plan, names: tuple[str, ...], *refs: Any, **scratch: Any) -> None:
    sources, out = dict(zip(names, refs)), refs[len(names)]
    config = plan.config
    worker, warpgroup = lax.axis_index("worker"), lax.axis_index("warpgroup")
    workers = lax.axis_size("worker")
    mine = lax.div(plan.items - worker + workers - 1, workers)  # `//` asks for signs: more to run and to lower
    registers = REGISTERS[config.warpgroups]

    def item(i: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """First row of the weight, of x, and part of K of this CTA's i-th item: neighbours share the weight's rows."""
        number = worker + i * workers
        along_x = plan.tiles[1]
        rest = lax.div(number, jnp.int32(along_x))
        return (
            lax.div(rest, jnp.int32(config.split)) * config.rows,
            lax.rem(number, jnp.int32(along_x)) * config.tokens,
            lax.rem(rest, jnp.int32(config.split)),
        )

    @pl.when(warpgroup < config.warpgroups)
    def _compute() -> None:
        if registers is not None:
            plgpu.set_max_registers(registers[0], action="increase")
        if "table" in names:
            plgpu.barrier_wait(scratch["table_full"])

        compute = warp_sm90.compute_item if config.by_warp else compute_item

        @pl.loop(0, mine)
        def _item(i: jax.Array) -> None:
            compute(plan, names, warpgroup, i, item(i), out, scratch)

        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == config.warpgroups)
    def _copy() -> None:
        if registers is not None:
            plgpu.set_max_registers(registers[1], action="decrease")

        @plgpu.warp_map
        def _warps(warp: jax.Array) -> None:
            copies = plan.copies(names)
            for w in range(3):
                pl.when(warp == w)(partial(copy_stages, plan, sources, scratch, mine, item, copies[w::3]))

            @pl.when(warp == 3)
            def _vectors() -> None:
                if "table" in names:
                    plgpu.copy_gmem_to_smem(sources["table"], scratch["table_s"], scratch["table_full"])
                if plan.vectors(names):
                    copy_vectors(plan, sources, scratch, mine, item, plan.vectors(names))


def copy_stages(
    plan: Plan, sources: Any, scratch: Any, mine: jax.Array, item: Any, copies: list[tuple[str, int]]
) -> None:
    """One warp's share of the copies that fill the ring."""
    if not copies:
        return
    config, steps, full, free = plan.config, plan.steps, scratch["full"], scratch["free"]

    @pl.loop(0, mine)
    def _item(i: jax.Array) -> None:
        row, token, split = item(i)

        @pl.loop(0, steps)
        def _step(s: jax.Array) -> None:
            slot = free_slot(i * steps + s, free)
            first = (split * steps + s) * config.fold  # of the parts of K
            for name, part in copies:
                source, target = sources[name], scratch[f"{name}_s"].at[slot]
                if name == "w":
                    width = config.fold * config.width
                    source = source.at[pl.ds(row, config.rows), pl.ds(first * config.width, width)]
                elif name == "x":
                    source = source.at[pl.ds(token, config.tokens), pl.ds((first + part) * plan.step, plan.step)]
                    target = target.at[pl.ds(part * config.tokens, config.tokens)]
                else:
                    assert plan.format.group is not None
                    group = lax.div(first * plan.step, jnp.int32(plan.format.group))
                    source = source.at[pl.ds(group, target.shape[0]), pl.ds(row, target.shape[1])]
                plgpu.copy_gmem_to_smem(source, target, full.at[slot])

    drain(mine * steps, free)


def copy_vectors(plan: Plan, sources: Any, scratch: Any, mine: jax.Array, item: Any, names: list[str]) -> None:
    """Scales and zeros of rows, once a tile."""

    @pl.loop(0, mine)
    def _item(i: jax.Array) -> None:
        pl.when(i > 0)(lambda: plgpu.barrier_wait(scratch["vectors_free"]))
        for name in names:
            target = scratch[f"{name}_s"]
            source = sources[name].at[pl.ds(item(i)[0], target.shape[0])]
            plgpu.copy_gmem_to_smem(source, target, scratch["vectors_full"])

    pl.when(mine > 0)(lambda: plgpu.barrier_wait(scratch["vectors_free"]))


def compute_item(
    plan: Plan,
    names: tuple[str, ...],
    warpgroup: jax.Array,
    i: jax.Array,
    item: tuple[jax.Array, ...],
    out: Any,
    scratch: Any,
) -> None:
    """A computing warpgroup's rows of a tile."""
    config, steps, full, free = plan.config, plan.steps, scratch["full"], scratch["free"]
    stages, vectors = full.shape[0], plan.vectors(names)
    if vectors:
        plgpu.barrier_wait(scratch["vectors_full"])

    def multiply(acc: Any, slot: jax.Array, j: int, r: int) -> None:
        refs: dict[str, Any] = {
            name: scratch[f"{name}_s"] for name in ("w", "scales", "zeros", "table") if name in names
        }
        for name in ("w", *(() if vectors else ("scales", "zeros"))):
            if name in refs:
                refs[name] = refs[name].at[slot]
        a = operand(plan.tile, refs, j, r, config.row_tiles)
        plgpu.wgmma(acc, a, scratch["x_s"].at[slot, :, pl.ds(j * COLUMNS, COLUMNS)].transpose((1, 0)))

    def accumulate(*accs: Any) -> list[jax.Array]:
        @pl.loop(0, steps)
        def _step(s: jax.Array) -> None:
            slot = slot_of(i * steps + s, stages)
            plgpu.barrier_wait(full.at[slot])
            for j in range(plan.step // COLUMNS):
                for r, acc in enumerate(accs):
                    multiply(acc, slot, j, r)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(free.at[slot])

        return [lax.optimization_barrier(acc[...]) for acc in accs]

    accumulators = [plgpu.ACC((ROWS, plan.columns), jnp.float32)] * config.row_tiles
    sums = pl.run_scoped(accumulate, *accumulators)
    for r, part in enumerate(sums):
        store(plan, warpgroup, item, part, r, out, scratch, bool(vectors))
    if vectors:
        plgpu.barrier_arrive(scratch["vectors_free"])


def store(
    plan: Plan, warpgroup: jax.Array, item: tuple[jax.Array, ...], acc: jax.Array, r: int, out: Any, scratch: Any,
    by_row: bool,
) -> None:  # fmt: skip
    """Scales 64 rows of sums [64, columns], adds the parts of a folded tile, and copies them out transposed."""
    row, token, split = item
    config, fold = plan.config, plan.config.fold
    kept = ROWS // fold
    first = warpgroup * config.row_tiles * kept + r * kept
    out_s = scratch["out_s"].at[warpgroup]
    if fold == 1:
        layout = plgpu.Layout.WGMMA
        if by_row:
            scale = plgpu.load(scratch["scales_s"].at[pl.ds(first, ROWS)], layout=layout.reduce(1), optimized=False)
            acc = acc * lax.broadcast_in_dim(scale, acc.shape, (0,))
        result = plgpu.layout_cast(acc.astype(plan.out_dtype), plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        out_s.transpose((1, 0))[...] = result
    else:
        parts = scratch["parts_s"].at[warpgroup]
        transposed = plgpu.layout_cast(acc, plgpu.Layout.WGMMA_TRANSPOSED)
        parts.at[pl.ds(0, plan.columns)].transpose((1, 0))[...] = transposed
        plgpu.commit_smem()
        by_token = plgpu.Layout.TILED(
            plgpu.Tiling(((8, kept), (2, kept), (kept // 16,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
        )
        total = None
        for f in range(fold):
            place = parts.at[pl.ds(f * config.tokens, config.tokens), pl.ds(f * kept, kept)]
            part = plgpu.load(place, layout=by_token, optimized=False)
            total = part if total is None else total + part
        assert total is not None
        if by_row:
            scale = plgpu.load(scratch["scales_s"].at[pl.ds(first, kept)], layout=by_token.reduce(0), optimized=False)
            total = total * plgpu.layout_cast(lax.broadcast_in_dim(scale, total.shape, (1,)), by_token)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        out_s[...] = total.astype(plan.out_dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(out_s, out.at[split, pl.ds(token, config.tokens), pl.ds(row + first, kept)])
