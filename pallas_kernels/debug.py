"""Checks the values of lengths, page tables and trees, for debug=True of the attention APIs. Errors name the wrong row.
Kernels trust these values. A wrong one makes them read another sequence's keys, or memory outside of the pool."""

import jax
import numpy as np

from pallas_kernels.formats.kv_pages import KVPages
from pallas_kernels.formats.segments import Segments, as_numbers


def check_decode_values(
    page_table: jax.Array,
    lengths: jax.Array,
    window: int | None,
    pages: KVPages,
    segments: Segments | None = None,
    width: int = 1,
) -> None:
    """Raises ValueError for a row whose length, page table or place in a tree is out of range. Arguments are
    decode_attention's, and width is Q."""
    tables, ends = _values(page_table, lengths)
    for row, length in enumerate(ends.tolist()):
        used = (width if length else 0) if segments is None else int(_values(segments.rows)[0][row])
        if length >= 0 and not 0 <= used <= min(width, length):
            raise ValueError(f"row {row} uses {used} rows of {width}, with {length} keys")
        if segments is not None and segments.ancestors is not None:
            for i, mask in enumerate(as_numbers(_values(segments.ancestors)[0][row, :used])):
                if mask.bit_length() != i + 1:
                    raise ValueError(
                        f"row {row}: ancestors of its row {i} are {mask:b}, expected bit {i} as the highest"
                    )
        if used or length < 0:  # nothing of an unused segment is read
            start = 0 if window is None else max(0, length - used + 1 - window)
            _check_sequence(f"row {row}", tables[row], start, length, pages)


def check_prefill_values(
    num_rows: int,
    page_table: jax.Array,
    cu_q_lens: jax.Array,
    kv_lens: jax.Array,
    window: int | None,
    pages: KVPages,
) -> None:
    """Raises ValueError for a chunk that is out of range. Arguments are prefill_attention's, and num_rows is C."""
    tables, cu, ends = _values(page_table, cu_q_lens, kv_lens)
    if cu[0] != 0 or cu[-1] > num_rows:
        raise ValueError(f"cu_q_lens runs from {cu[0]} to {cu[-1]}, expected from 0 to at most {num_rows} rows")
    for chunk, (queries, length) in enumerate(zip(np.diff(cu).tolist(), ends.tolist())):
        if queries < 0:
            raise ValueError(f"cu_q_lens falls from {cu[chunk]} to {cu[chunk + 1]} at chunk {chunk}")
        if queries == 0:
            continue
        if length < queries:
            raise ValueError(
                f"chunk {chunk} has {queries} queries and kv_lens {length}, expected at least as many keys"
            )
        start = 0 if window is None else max(0, length - queries + 1 - window)
        _check_sequence(f"chunk {chunk}", tables[chunk], start, length, pages)


def _values(*arrays: jax.Array) -> tuple[np.ndarray, ...]:
    if any(isinstance(array, jax.core.Tracer) for array in arrays):
        raise NotImplementedError("debug=True reads values: call it outside jit, vmap and grad")
    return tuple(np.asarray(array) for array in arrays)


def _check_sequence(name: str, table: np.ndarray, start: int, length: int, pages: KVPages) -> None:
    """Raises ValueError unless keys start <= j < length lie in pages of the pool."""
    page_size, num_pages = pages.k.page_size, pages.k.num_pages
    room = table.size * page_size
    if not 0 <= length <= room:
        raise ValueError(f"{name} has length {length}, expected 0 to {room}: {table.size} pages of {page_size} tokens")
    for index in range(start // page_size, -(-length // page_size)):
        if not 0 <= table[index] < num_pages:
            raise ValueError(f"{name} has page {table[index]} at index {index}, expected one of the pool's {num_pages}")
