"""Computes move_tokens from its definition, one slot at a time in numpy."""

import numpy as np
from numpy.typing import ArrayLike

from pallas_kernels.formats.kv_pages import KVPages, Pages
from pallas_kernels.formats.reference_pages import of_layer, to_numpy

Slot = tuple[int, int]  # a page and an offset in it


def move_tokens(
    pools: tuple[KVPages, ...], page_table: ArrayLike, source: ArrayLike, target: ArrayLike
) -> tuple[KVPages, ...]:
    """Returns the pools in numpy. Arguments are api.py's, concrete. Raises ValueError for a target that lies behind its
    source, and for a slot that is written twice. So for one that is read by a move after the one that writes it."""
    moved = tuple(to_numpy(pages) for pages in pools)
    if moved:
        first = moved[0].k
        moves = slots(first.num_pages, first.page_size, *(np.asarray(x) for x in (page_table, source, target)))
        for pages in moved:
            for layer in range(pages.k.layers):
                own = of_layer(pages, layer)
                _move(own.k, moves)
                _move(own.v, moves)
    return moved


def slots(
    num_pages: int, page_size: int, table: np.ndarray, source: np.ndarray, target: np.ndarray
) -> list[tuple[Slot, Slot]]:
    """Yields from where to where tokens move."""
    moves: list[tuple[Slot, Slot]] = []
    for row, e in np.ndindex(source.shape):
        indices = int(source[row, e]), int(target[row, e])
        if indices[0] < 0 or indices[0] == indices[1]:
            continue
        if indices[1] > indices[0]:
            raise ValueError(f"row {row} moves cache index {indices[0]} to {indices[1]}, expected one before it")
        if not all(0 <= i < table.shape[1] * page_size for i in indices):
            continue
        begin, end = ((int(table[row, i // page_size]), i % page_size) for i in indices)
        if not all(0 <= page < num_pages for page, _ in (begin, end)):
            continue
        written = [slot for _, slot in moves]
        if end in written:
            raise ValueError(f"row {row} writes cache index {indices[1]}, where an earlier move has written")
        if begin in written:
            raise ValueError(f"row {row} reads cache index {indices[0]}, where an earlier move has written")
        moves.append((begin, end))
    return moves


def _move(pool: Pages, moves: list[tuple[Slot, Slot]]) -> None:
    """Changes a host copy: all slots are read before any is written."""
    arrays = [np.asarray(pool.values)]
    if pool.scales is not None:
        arrays.append(np.asarray(pool.scales).reshape(*pool.values.shape[:3], -1))  # a view
    for array in arrays:
        read = [array[page, :, offset].copy() for (page, offset), _ in moves]
        for row, (_, (page, offset)) in zip(read, moves):
            array[page, :, offset] = row
