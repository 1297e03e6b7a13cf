"""Copies by the lanes of a warp, 16 bytes each (cp.async), to where TMA would put them.

Pallas issues a TMA copy in well over a hundred instructions, whatever it brings. Pages of 8 and 4 bits and their scales
are many small copies. Their instructions took more of an SM's time than attention. This is written for JAX 0.11.2,
whose lowering the barriers go through.
"""

from typing import Any

import jax
from jax._src import core as jax_core
from jax._src.pallas.mosaic_gpu import core as gpu_core
from jax._src.pallas.mosaic_gpu import lowering, primitives
from jax._src.state import primitives as state_primitives
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm

from pallas_kernels.decode_attention.unpack_sm90 import add, constant, div, mul, rem, warp_and_lane

CHUNK = 16  # bytes of a lane
_LANES = 32


def copy_rows(
    source: Any, target: Any, page: jax.Array, begin: jax.Array, into: jax.Array, *, page_bytes: int, size: int,
    row: int | None,
) -> None:  # fmt: skip
    """Begins to copy `size` bytes from byte `begin` of page `page` of `source` to byte `into` of `target`. The target
    has rows of `row` bytes, in shared memory as smem_sm90.swizzled has them, or (None) as they are."""
    splat, transforms = plgpu.Layout.WG_SPLAT(()), ()
    if row is not None:
        width = swizzle_of(row)
        itemsize = target.dtype.itemsize
        transforms = (plgpu.TilingTransform((8, width // itemsize)), plgpu.SwizzleTransform(width))  # type: ignore

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(transforms), splat, splat, splat))
    def copy(_: Any, source: ir.Value, target: ir.Value, *scalars: Any) -> None:
        page, begin, into = (x.registers.item() for x in scalars)
        _, lane = warp_and_lane()
        i64 = ir.IntegerType.get_signless(64)
        at = arith.addi(arith.muli(arith.extsi(i64, page), mgpu.c(page_bytes, i64)), arith.extsi(i64, begin))
        pointers = _global(source), mgpu.utils.memref_ptr(target)
        for first in range(0, size // CHUNK, _LANES):
            chunk = add(lane, first)
            if first + _LANES <= size // CHUNK:
                _copy(pointers, at, into, chunk, row)
                continue
            with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.ult, chunk, constant(size // CHUNK))):
                _copy(pointers, at, into, chunk, row)

    copy(source, target, page, begin, into)


def _copy(pointers: tuple[ir.Value, ir.Value], at: ir.Value, into: ir.Value, chunk: ir.Value, row: int | None) -> None:
    offset = arith.extui(at.type, mul(chunk, CHUNK))
    place = add(into, mul(chunk, CHUNK) if row is None else swizzled_place(chunk, row, _Registers))
    source, target = _moved(pointers[0], arith.addi(at, offset)), _moved(pointers[1], place)
    nvvm.cp_async_shared_global(target, source, CHUNK, nvvm.LoadCacheModifierKind.CG)


class _Registers:
    """Computes on what lanes hold."""

    add, mul, div, rem = staticmethod(add), staticmethod(mul), staticmethod(div), staticmethod(rem)
    xor = staticmethod(arith.xori)


def swizzle_of(row: int) -> int:
    """Returns the bytes in which rows of `row` bytes are swizzled."""
    return next(width for width in (128, 64, 32) if row % width == 0)


def swizzled_place(chunk: Any, row: int, number: Any) -> Any:
    """Returns the byte at which chunk `chunk` of rows of `row` bytes lies in shared memory. The first lies at a
    multiple of what the pattern repeats after. `number` computes (add, mul, div, rem, xor). Tiles of 8 rows,
    `swizzle_of(row)` bytes wide, lie one after the other. In each the number of a 16-byte chunk is xored with that of
    its 128 bytes."""
    width, chunks = swizzle_of(row), row // CHUNK
    line, column = number.div(chunk, chunks), number.rem(chunk, chunks)
    tile = number.add(number.mul(number.div(line, 8), row // width), number.div(column, width // CHUNK))
    inside = number.add(number.mul(number.rem(line, 8), width), number.mul(number.rem(column, width // CHUNK), CHUNK))
    flip = number.mul(number.rem(number.div(inside, 128), width // CHUNK), CHUNK)
    return number.add(number.mul(tile, 8 * width), number.xor(inside, flip))


def _global(ref: ir.Value) -> ir.Value:
    return llvm.addrspacecast(llvm.PointerType.get(address_space=1), mgpu.utils.memref_ptr(ref))


def _moved(pointer: ir.Value, offset: ir.Value) -> ir.Value:
    i8 = ir.IntegerType.get_signless(8)
    return llvm.getelementptr(pointer.type, pointer, [offset], [-2147483648], i8, llvm.GEPNoWrapFlags.none)


_follow_p = jax_core.Primitive("follow_copies")
_follow_p.multiple_results = True


def arrive_with_copies(barrier: Any) -> None:
    """Arrives as plgpu.barrier_arrive does, in a single warp, once all copies of its lanes have arrived too."""
    ref, transforms = state_primitives.get_ref_and_transforms(barrier, None, "arrive_with_copies")
    leaves, tree = jax.tree.flatten(transforms)
    _follow_p.bind(ref, *leaves, transforms_treedef=tree)
    plgpu.barrier_arrive(barrier)


@_follow_p.def_effectful_abstract_eval
def _abstract(*operands: Any, **trees: Any) -> Any:
    return primitives._barrier_arrive_abstract_eval(*operands, **trees)


@lowering.register_lowering_rule(_follow_p, *gpu_core.LANExWARP_SEMANTICS)
def _lower(ctx: Any, barrier: Any, *flat: Any, transforms_treedef: Any) -> Any:
    """Makes the barrier wait for one more arrival of each lane, which comes with its copies."""
    index = primitives._get_barrier_base_index(ctx.avals_in[0], transforms_treedef.unflatten(flat))
    nvvm.cp_async_mbarrier_arrive((barrier if index is None else barrier[index]).get_ptr())
    return ()
