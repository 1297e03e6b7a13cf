"""Trial: all_reduce in Mosaic GPU over unicast remote_ref. The flags and what is received lie in arrays that the
caller keeps: [staging, flags, epochs], donated from call to call."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf

WIDE = 1024  # elements of a lane: 128 threads with 8 each
MOST_LANES = 128


def sizes(count: int) -> tuple[int, int]:
    """Lanes and elements of each."""
    lanes = min(MOST_LANES, -(-count // WIDE))
    return lanes, -(-count // (lanes * WIDE)) * WIDE


def memory(count: int, ranks: int, dtype: Any) -> list[jax.Array]:
    lanes, each = sizes(count)
    return [
        jnp.zeros((2 * ranks * lanes, each), dtype),
        jnp.zeros((ranks * lanes,), jnp.int32),
        jnp.zeros((lanes,), jnp.int32),
    ]


def all_reduce(x: jax.Array, kept: list[Any], axis: str, ranks: int, skip: bool) -> jax.Array:
    """x [T, E], kept: refs of memory() -> [T, E]."""
    lanes, each = sizes(x.size)
    assert lanes * each == x.size, "a trial: sizes of whole lanes"
    y = plgpu.kernel(
        partial(_body, axis=axis, ranks=ranks, lanes=lanes, each=each),
        out_type=jax.ShapeDtypeStruct((lanes, each), x.dtype),
        grid=(lanes,),
        grid_names=("lane",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, skip_device_barrier=skip),
        kernel_name="all_reduce",
    )(x.reshape(lanes, each), *kept)
    return y.reshape(x.shape)


def _body(x: Any, staging: Any, flags: Any, epochs: Any, out: Any, *, axis: str, ranks: int, lanes: int, each: int):
    lane, rank = lax.axis_index("lane"), lax.axis_index(axis)
    layout = plgpu.Layout.WG_STRIDED((each,), vec_size=8)
    epoch = epochs[lane] + 1
    parity = epoch & 1

    def place(source: Any) -> Any:
        return staging.at[(parity * ranks + source) * lanes + lane]

    own = plgpu.load(x.at[lane], (), layout=layout, optimized=False)
    for k in range(1, ranks):
        plgpu.remote_ref(place(rank), lax.rem(rank + k, ranks))[...] = own
    for k in range(1, ranks):
        peer = lax.rem(rank + k, ranks)
        _signal(plgpu.remote_ref(flags.at[rank * lanes + lane], peer), epoch)
    for k in range(1, ranks):
        _wait(flags.at[lax.rem(rank + k, ranks) * lanes + lane], epoch)
    total = None
    for source in range(ranks):
        part = plgpu.load(place(source), (), layout=layout, optimized=False)
        part = jnp.where(rank == source, own.astype(jnp.float32), part.astype(jnp.float32))
        total = part if total is None else total + part
    out[lane, ...] = total.astype(out.dtype)
    epochs[lane] = epoch


def _signal(flag: Any, epoch: jax.Array) -> None:
    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(())))
    def signal(_: Any, flag: Any, epoch: Any) -> None:
        mgpu.utils.warpgroup_barrier()  # all have stored
        with mgpu.utils.single_thread(scope=mgpu.utils.ThreadSubset.WARPGROUP):
            llvm.inline_asm(
                ir.Type.parse("!llvm.void"), [mgpu.utils.memref_ptr(flag), epoch.registers.item()],
                "st.release.sys.global.u32 [$0], $1;", "l,r", has_side_effects=True,
            )  # fmt: skip

    signal(flag, epoch)


def _wait(flag: Any, epoch: jax.Array) -> None:
    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(())))
    def wait(_: Any, flag: Any, epoch: Any) -> None:
        i32, ptr, want = ir.IntegerType.get_signless(32), mgpu.utils.memref_ptr(flag), epoch.registers.item()
        loop = scf.WhileOp([], [])
        with ir.InsertionPoint.at_block_begin(loop.before.blocks.append()):
            found = llvm.inline_asm(i32, [ptr], "ld.acquire.sys.global.u32 $0, [$1];", "=r,l", has_side_effects=True)
            scf.condition(arith.cmpi(arith.CmpIPredicate.ne, found, want), [])
        with ir.InsertionPoint.at_block_begin(loop.after.blocks.append()):
            scf.yield_([])
        mgpu.utils.warpgroup_barrier()

    wait(flag, epoch)
