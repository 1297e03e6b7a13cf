"""Runs move_tokens on Hopper: one launch for the pools of all layers, in place.

A block of one warpgroup serves some layers of some arrays (values or scales of K or V) of one sequence. Without a move
it reads the sequence's indices and ends. With moves it takes one after the other, and each thread the same bytes of
all. So a slot is read before a later move writes it, in the order of the thread's own instructions. What an array holds
does not matter: arrays with rows of equal size share the code, which picks among their addresses.
"""

import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.formats.kv_pages import KVPages, apart
from pallas_kernels.hopper.hopper import SMS
from pallas_kernels.move_tokens.config import check_supported

THREADS = 128
WIDEST = 16  # bytes that a thread loads at once
AHEAD = 8  # such loads before the first store
BLOCKS = 16 * SMS  # that run at the same time


class _Rows(NamedTuple):
    """Describes arrays that share code: a token's K or V, or its scales, is a row of some bytes for each head."""

    heads: int
    size: int  # bytes
    page_size: int


@partial(jax.jit, static_argnames="interpret")
def move_tokens(
    pools: tuple[KVPages, ...],
    page_table: jax.Array,
    source: jax.Array,
    target: jax.Array,
    *,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[KVPages, ...]:
    """Returns the pools, in place where they are donated; see api.py. Takes page_table i32[R, M], source, target i32[R,
    Q]."""
    check_supported(pools, source.shape[1])
    arrays, structure = jax.tree.flatten(apart(pools))
    if not arrays or not source.size:  # no launch without blocks
        return pools
    num_pages, page_size = pools[0].k.num_pages, pools[0].k.page_size
    kinds = [_Rows(x.shape[1], math.prod(x.shape[2:]) // page_size * x.dtype.itemsize, page_size) for x in arrays]
    order = sorted(range(len(arrays)), key=kinds.__getitem__)
    layers = [len(arrays[i]) // num_pages for i in order]
    refs = [jax.new_ref(arrays[i].reshape(-1)) for i in order]
    parts = min(sum(layers), -(-BLOCKS // len(source)))
    plgpu.kernel(
        partial(_body, kinds=[kinds[i] for i in order], layers=layers, num_pages=num_pages, parts=parts),
        out_type=(),
        grid=(len(source), parts),
        grid_names=("row", "part"),
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=True,  # no thread reads what another writes
        ),
        kernel_name="move_tokens",
    )(page_table, source, target, *refs)
    for i, ref in zip(order, refs):
        arrays[i] = jax.freeze(ref).reshape(arrays[i].shape)
    return jax.tree.unflatten(structure, arrays)


def _body(
    page_table: Any, source: Any, target: Any, *arrays: Any,
    kinds: Sequence[_Rows], layers: Sequence[int], num_pages: int, parts: int,
) -> None:  # fmt: skip
    row, part = jax.lax.axis_index("row"), jax.lax.axis_index("part")
    page_size, begins = kinds[0].page_size, [0, *itertools.accumulate(layers)]  # the layers before each array's
    indices = [(source[row, e], target[row, e]) for e in range(source.shape[1])]
    moved = functools.reduce(operator.or_, [(begin >= 0) & (begin != end) for begin, end in indices])

    def slot(index: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns page and offset, and whether there is such a slot."""
        entry = jax.lax.div(index, page_size)
        inside = (index >= 0) & (entry < page_table.shape[1])
        page = page_table[row, jnp.where(inside, entry, 0)]
        return page, jax.lax.rem(index, page_size), inside & (page >= 0) & (page < num_pages)

    def move(e: jax.Array, copy: Callable[..., None]) -> None:
        begin, end = source[row, e], target[row, e]
        (*old, there), (*new, too) = slot(begin), slot(end)
        pl.when((begin != end) & there & too)(partial(copy, old, new))

    def serve(i: jax.Array, _: None) -> None:
        number = part + i * parts  # of a layer of an array
        for kind in sorted(set(kinds)):
            alike = slice(kinds.index(kind), kinds.index(kind) + kinds.count(kind))
            copy = partial(_copy, kind, num_pages, number, begins[alike], arrays[alike])
            moves = partial(jax.lax.fori_loop, 0, len(indices), lambda e, _, copy=copy: move(e, copy), None)
            pl.when((number >= begins[alike.start]) & (number < begins[alike.stop]))(moves)

    @pl.when(moved)
    def _():
        jax.lax.fori_loop(0, -(-begins[-1] // parts), serve, None)


def _copy(
    kind: _Rows, num_pages: int, number: jax.Array, begins: Sequence[int], arrays: Sequence[Any],
    old: Sequence[jax.Array], new: Sequence[jax.Array],
) -> None:  # fmt: skip
    """Copies the rows of all heads from one page and offset to others, in layer `number` of those of all arrays. These
    begin with the layers `begins`."""
    splat, width = plgpu.Layout.WG_SPLAT(()), math.gcd(kind.size, WIDEST)
    pieces = kind.size // width  # of a row

    @plgpu.inline_mgpu(arg_types=(*(splat,) * 5, *(plgpu.RefType(),) * len(arrays)))
    def copy(_: Any, *operands: Any) -> None:
        number, *places = (x.registers.item() for x in operands[:5])
        array, layer = _chosen(number, begins, [_global(x) for x in operands[5:]])
        first = arith.muli(layer, _i32(num_pages))
        rows = [arith.addi(first, page) for page in (places[0], places[2])]
        slots = [_moved(array, _bytes_before(kind, *place)) for place in zip(rows, (places[1], places[3]))]
        total = kind.heads * pieces

        def place(slot: ir.Value, piece: ir.Value) -> ir.Value:
            head, inside = arith.divui(piece, _i32(pieces)), arith.remui(piece, _i32(pieces))
            offset = arith.addi(arith.muli(head, _i32(kind.page_size * kind.size)), arith.muli(inside, _i32(width)))
            return _moved(slot, arith.extui(_i64(), offset))

        def copy_pieces(mine: Sequence[ir.Value]) -> None:
            loaded = [llvm.load(_register(width), place(slots[0], piece), alignment=width) for piece in mine]
            for piece, x in zip(mine, loaded):
                llvm.store(x, place(slots[1], piece), alignment=width)

        mine = [arith.addi(mgpu.utils.thread_idx(), _i32(first)) for first in range(0, total, THREADS)]
        whole = total // THREADS
        for first in range(0, whole, AHEAD):
            copy_pieces(mine[first : min(first + AHEAD, whole)])
        for piece in mine[whole:]:
            with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.ult, piece, _i32(total))):
                copy_pieces([piece])

    copy(number, *old, *new, *arrays)


def _chosen(number: ir.Value, begins: Sequence[int], pointers: Sequence[ir.Value]) -> tuple[ir.Value, ir.Value]:
    """Returns the array that has layer `number` of all arrays', and which of its own that is."""
    chosen, before = pointers[0], _i32(begins[0])
    for begin, pointer in zip(begins[1:], pointers[1:]):
        reached = arith.cmpi(arith.CmpIPredicate.sge, number, _i32(begin))
        chosen, before = llvm.select(reached, pointer, chosen), llvm.select(reached, _i32(begin), before)
    return chosen, arith.subi(number, before)


def _bytes_before(kind: _Rows, row: ir.Value, offset: ir.Value) -> ir.Value:
    """Returns the bytes before the first head's row of a slot: a pool may have more than 2 GB."""
    rows = arith.muli(arith.extsi(_i64(), row), mgpu.c(kind.heads * kind.page_size, _i64()))
    return arith.muli(arith.addi(rows, arith.extsi(_i64(), offset)), mgpu.c(kind.size, _i64()))


def _register(width: int) -> ir.Type:
    i32 = ir.IntegerType.get_signless(32)
    return ir.VectorType.get((width // 4,), i32) if width > 4 else ir.IntegerType.get_signless(8 * width)


def _global(ref: ir.Value) -> ir.Value:
    return llvm.addrspacecast(llvm.PointerType.get(address_space=1), mgpu.utils.memref_ptr(ref))


def _moved(pointer: ir.Value, offset: ir.Value) -> ir.Value:
    i8 = ir.IntegerType.get_signless(8)
    return llvm.getelementptr(pointer.type, pointer, [offset], [-2147483648], i8, llvm.GEPNoWrapFlags.none)


def _i32(value: int) -> ir.Value:
    return mgpu.c(value, ir.IntegerType.get_signless(32))


def _i64() -> ir.Type:
    return ir.IntegerType.get_signless(64)
