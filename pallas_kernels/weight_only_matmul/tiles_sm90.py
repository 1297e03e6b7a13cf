"""Runs weight_only_matmul on sm_90 where codes come through a ring of shared memory. One warpgroup copies codes, scales
and x into a ring of stages, on and on across the tiles of a persistent CTA. The others multiply what is there: by wgmma
(wgmma_sm90.py), or few rows of x by products of single warps (warp_sm90.py)."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.formats.quantized_weights import QuantizedWeight, group_scales
from pallas_kernels.hopper.ring_sm90 import drain, free_slot
from pallas_kernels.weight_only_matmul import warp_sm90, wgmma_sm90
from pallas_kernels.weight_only_matmul.config import WARP_ROWS, Config
from pallas_kernels.weight_only_matmul.operand_sm90 import ROWS, pair_table
from pallas_kernels.weight_only_matmul.plan_sm90 import Plan

# Of a thread that computes, and that copies, by the warpgroups that compute. Two warpgroups in all have enough as they
# are launched: asking for more than that is undefined.
REGISTERS = {1: None, 2: (232, 40), 3: (152, 40)}


def product(
    x: jax.Array,
    w: QuantizedWeight,
    out_dtype: jnp.dtype,
    config: Config,
    interpret: plgpu.InterpretGPUParams | None,
) -> jax.Array:
    """Returns x [M, K'] times the weight's padded rows [N', K'], transposed: [split, M, N'] of out_dtype, to be
    summed."""
    (m, k), n = x.shape, w.values.shape[0]
    plan = Plan(m, n, k, x.dtype, out_dtype, w.format, config)
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


def _kernel(plan: Plan, names: tuple[str, ...], *refs: Any, **scratch: Any) -> None:
    sources, out = dict(zip(names, refs)), refs[len(names)]
    config = plan.config
    worker, warpgroup = lax.axis_index("worker"), lax.axis_index("warpgroup")
    workers = lax.axis_size("worker")
    mine = lax.div(plan.items - worker + workers - 1, workers)  # `//` asks for signs: more to run and to lower
    registers = REGISTERS[config.warpgroups]

    def item(i: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns first row of the weight, of x, and part of K of this CTA's i-th item: neighbours share the weight's
        rows."""
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

        compute = (warp_sm90 if config.by_warp else wgmma_sm90).compute_item

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
    """Copies one warp's share of what fills the ring."""
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
    """Copies scales and zeros of rows, once a tile."""

    @pl.loop(0, mine)
    def _item(i: jax.Array) -> None:
        pl.when(i > 0)(lambda: plgpu.barrier_wait(scratch["vectors_free"]))
        for name in names:
            target = scratch[f"{name}_s"]
            source = sources[name].at[pl.ds(item(i)[0], target.shape[0])]
            plgpu.copy_gmem_to_smem(source, target, scratch["vectors_full"])

    pl.when(mine > 0)(lambda: plgpu.barrier_wait(scratch["vectors_free"]))
