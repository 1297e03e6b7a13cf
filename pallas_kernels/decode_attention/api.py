"""Checks arguments of decode_attention and chooses its backend."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.backends import DETERMINISTIC, Backend, check_work, choose
from pallas_kernels.checks import (
    bind_shapes,
    check_floats,
    check_heads,
    check_int32,
    check_logits,
    check_pages,
    check_window,
)
from pallas_kernels.debug import check_decode_values
from pallas_kernels.decode_attention import xla
from pallas_kernels.decode_attention.config import check_supported, check_triton
from pallas_kernels.decode_attention.work import Work, make_work
from pallas_kernels.formats.kv_pages import KVPages
from pallas_kernels.formats.segments import MOST_ROWS, Segments, words_of
from pallas_kernels.tiled_attention import check_page_size


def decode_attention(
    q: jax.Array,
    pages: KVPages,
    page_table: jax.Array,
    lengths: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    segments: Segments | None = None,
    rows: int | None = None,
    work: Work | None = None,
    backend: str | None = None,
    debug: bool = False,
) -> jax.Array:
    """Returns softmax(scale * q k^T) v [R Q, H, D] of Q queries a sequence, over K and V as stored.

    If q has more than R Q rows, `rows` is Q. The result then has as many rows as q, and another operation writes the
    rest (prefill_attention's `into`).

    With Q = 1, lengths i32[R] counts a row's visible keys, its own included: the query is at position length - 1. A row
    of length 0 is unused and comes out zero. With a larger Q, a segment's own keys are the last of these. `segments`
    says which of its rows are in use, and which of them each sees besides the keys before (None: all of them, in a
    chain). Unused rows come out zero.

    Token j of segment r is in page page_table[r, j // P] (i32[R, M]). Entries past the length, or wholly before the
    window, are never read. With a window, key j is visible to query i iff 0 <= i - j < window, in positions (see
    Segments). A row's result does not depend on keys that it does not see, nor on their values if they are finite. Its
    last bits may depend on the sequence's length, which says how keys are split (mosaic_sm90.py).

    With `softcap` a logit x becomes softcap * tanh(x / softcap). `sinks` [H] are further logits, one a query head,
    without a value: they only add to the sum of a row's weights.

    `work` is `plan`'s for the same arguments, which all layers of a step share; without it each call makes its own.
    `debug` reads the values first, outside of jit only. It raises ValueError for a row whose length, pages or ancestors
    are out of range. Raises ValueError where shapes or dtypes disagree, and NotImplementedError for sizes, dtypes and
    formats that the backend lacks.
    """
    sizes = bind_shapes(q=(q, "T H D"), page_table=(page_table, "R M"), lengths=(lengths, "R"))
    rows = _rows_each(q, lengths, rows)
    if segments is not None:
        _check_segments(segments, sizes["R"], rows)
    check_floats(q=q)
    check_int32(page_table=page_table, lengths=lengths)
    check_pages(pages, None, sizes["D"])
    check_heads(sizes["H"], pages.k.values.shape[1])
    check_window(window)
    if debug:
        check_decode_values(page_table, lengths, window, pages, segments, rows)
    logits = check_logits(softcap, sinks, sizes["H"])
    chosen = choose(BACKENDS, backend, q, pages, rows)
    check_work(work, chosen, BACKENDS)
    return chosen.run(q, pages, page_table, lengths, scale, window, segments, work, rows, **logits)


def plan(
    q: jax.Array | jax.ShapeDtypeStruct,
    pages: KVPages,
    lengths: jax.Array,
    *,
    window: int | None = None,
    segments: Segments | None = None,
    backend: str | None = None,
) -> Work | None:
    """Returns the work list of decode_attention with these arguments, or None if the chosen backend has none. It
    depends on lengths i32[R], segments, sizes and dtypes alone, so all layers of a step share it. Of q [R Q, H, D] and
    pages, shapes and dtypes are enough."""
    make = choose(BACKENDS, backend, q, pages, _rows_each(q, lengths)).plan
    return None if make is None else make(q, pages, lengths, window, segments)


def _rows_each(q: jax.Array | jax.ShapeDtypeStruct, lengths: jax.Array, rows: int | None = None) -> int:
    """Returns Q. Raises ValueError for queries that segments cannot share, or fewer than R times `rows`."""
    R = lengths.shape[0]
    if rows is not None:
        if not 0 < rows <= MOST_ROWS or rows * R > q.shape[0]:
            raise ValueError(f"rows is {rows}, expected 1 to {MOST_ROWS} of each of {R} in {q.shape[0]} queries")
        return rows
    rows = q.shape[0] // R if R else 1
    if rows * R != q.shape[0] or not 0 < rows <= MOST_ROWS:
        raise ValueError(f"{q.shape[0]} queries for {R} lengths: expected 1 to {MOST_ROWS} for each")
    return rows


def _check_segments(segments: Segments, R: int, Q: int) -> None:
    check_int32(rows=segments.rows)
    if segments.rows.shape != (R,):
        raise ValueError(f"segments.rows has shape {segments.rows.shape}, expected [{R}]")
    masks = segments.ancestors
    shape = (R, Q, words_of(Q))
    if masks is not None and (masks.shape != shape or masks.dtype != jnp.uint32):
        raise ValueError(f"segments.ancestors is {masks.dtype}{list(masks.shape)}, expected uint32{list(shape)}")


def _mosaic(q, pages, page_table, lengths, scale, window, segments, work, rows, **logits) -> jax.Array:
    from pallas_kernels.decode_attention import mosaic_sm90  # imports all of Pallas

    arguments = q, pages, page_table, lengths, scale, window, work, segments
    return mosaic_sm90.decode_attention(*arguments, width=rows, **logits)


def _mosaic_plan(
    q: jax.Array | jax.ShapeDtypeStruct,
    pages: KVPages,
    lengths: jax.Array,
    window: int | None,
    segments: Segments | None,
) -> Work:
    sizes = q.shape[1], pages.k.values.shape[1], q.shape[2]
    options: dict[str, Any] = {"window": window, "narrow": pages.narrow}
    return make_work(lengths, *sizes, width=_rows_each(q, lengths), segments=segments, **options)


def _triton(q, pages, page_table, lengths, scale, window, segments, _, rows, **logits) -> jax.Array:
    from pallas_kernels.decode_attention import triton  # imports Triton

    attend = partial(triton.decode_attention, **logits)
    return _of_own_rows(attend, q, pages, page_table, lengths, scale, window, segments, rows)


def _xla(q, pages, page_table, lengths, scale, window, segments, _, rows, **logits) -> jax.Array:
    attend = partial(xla.decode_attention, **logits)
    return _of_own_rows(attend, q, pages, page_table, lengths, scale, window, segments, rows)


def _one_order(q, pages, page_table, lengths, scale, window, segments, _, rows, **logits) -> jax.Array:
    attend = partial(xla.in_one_order, **logits)
    return _of_own_rows(attend, q, pages, page_table, lengths, scale, window, segments, rows)


def _of_own_rows(attend, q, pages, page_table, lengths, scale, window, segments, rows) -> jax.Array:
    """Fills the other rows with zeros."""
    own = lengths.shape[0] * rows
    out = attend(q[:own], pages, page_table, lengths, scale, window, segments)
    return out if own == q.shape[0] else jnp.pad(out, ((0, q.shape[0] - own), (0, 0), (0, 0)))


BACKENDS = {
    "mosaic": Backend(_mosaic, check_supported, plan=_mosaic_plan),
    "triton": Backend(_triton, check_triton),
    "xla": Backend(_xla, lambda q, pages, rows: check_page_size(pages.k.page_size)),
    DETERMINISTIC: Backend(_one_order, for_xla=True),
}
