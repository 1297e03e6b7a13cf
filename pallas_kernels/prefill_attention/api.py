"""Attends ragged prompt chunks, each continuing a sequence whose earlier K and V are in pages."""

from functools import partial

import jax

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
from pallas_kernels.debug import check_prefill_values
from pallas_kernels.formats.kv_pages import KVPages
from pallas_kernels.one_order import TILE, in_tiles
from pallas_kernels.prefill_attention import xla
from pallas_kernels.prefill_attention.config import PART, check_supported, check_triton
from pallas_kernels.prefill_attention.work import Work, make_work
from pallas_kernels.tiled_attention import check_page_size


def prefill_attention(
    q: jax.Array,
    pages: KVPages,
    page_table: jax.Array,
    cu_q_lens: jax.Array,
    kv_lens: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    into: jax.Array | None = None,
    first: int = 0,
    work: Work | None = None,
    backend: str | None = None,
    debug: bool = False,
) -> jax.Array:
    """Returns causal softmax(scale * q k^T) v [C, H, D] of B chunks, over K and V as stored, the chunks' own included.

    Chunk b's queries are rows cu_q_lens[b] to cu_q_lens[b + 1] of q [C, H, D] (i32[B + 1], from 0, nondecreasing: a
    chunk may be empty). Its last one sees kv_lens[b] keys (i32[B]): positions run up to kv_lens[b] - 1. Rows from
    cu_q_lens[B] on come out zero. Token j of chunk b is in page page_table[b, j // P] (i32[B, M]). Entries past its
    length, or wholly before the window of its first query, are never read. With a window, key j is visible to query i
    iff 0 <= i - j < window.

    With `softcap` a logit x becomes softcap * tanh(x / softcap). `sinks` [H] are further logits, one a query head,
    without a value: they only add to the sum of a row's weights.

    With `into` [F + C, H, D] the C rows are those of q [F + C, H, D] from F = `first` on. The result is `into` with
    these rows replaced, in place if possible. So the rows before may come from another operation.

    `work` is `plan`'s for the same arguments, which all layers of a step share; without it each call makes its own.
    `debug` reads the values first, outside of jit only. It raises ValueError for a chunk whose rows, length or pages
    are out of range. Raises ValueError where shapes or dtypes disagree, and NotImplementedError for sizes, dtypes and
    formats that a backend lacks.
    """
    if into is not None and (into.shape != q.shape or into.dtype != q.dtype or not 0 <= first <= q.shape[0]):
        raise ValueError(
            f"into is {into.dtype}{list(into.shape)} and first {first}, expected {q.dtype}{list(q.shape)} and its row"
        )
    if into is None and first:
        raise ValueError(f"first is {first} without into, whose rows before it are kept")
    sizes = bind_shapes(
        q=(q, "C H D"), page_table=(page_table, "B M"), cu_q_lens=(cu_q_lens, "B+1"), kv_lens=(kv_lens, "B")
    )
    check_floats(q=q)
    check_int32(page_table=page_table, cu_q_lens=cu_q_lens, kv_lens=kv_lens)
    check_pages(pages, None, sizes["D"])
    check_heads(sizes["H"], pages.k.values.shape[1])
    check_window(window)
    if debug:
        check_prefill_values(q.shape[0] - first, page_table, cu_q_lens, kv_lens, window, pages)
    logits = check_logits(softcap, sinks, sizes["H"])
    chosen = _choose(backend, q, pages, scale)
    check_work(work, chosen, BACKENDS)
    return chosen.run(q, pages, page_table, cu_q_lens, kv_lens, scale, window, work, into, first, **logits)


def plan(
    q: jax.Array | jax.ShapeDtypeStruct,
    pages: KVPages,
    cu_q_lens: jax.Array,
    kv_lens: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    backend: str | None = None,
) -> Work | None:
    """Returns the work list of prefill_attention with these arguments, or None if the chosen backend has none. It
    depends on lengths, sizes and dtypes alone, so all layers of a step share it. Of q and pages, shapes and dtypes are
    enough."""
    make = _choose(backend, q, pages, scale).plan
    return None if make is None else make(q, pages, cu_q_lens, kv_lens, window=window)


def _choose(backend: str | None, *args) -> Backend:
    """Returns the backend that runs. In deterministic mode Mosaic's kernel adds up parts of long rows."""
    chosen = choose(BACKENDS, backend, *args)
    return _IN_PARTS if backend == DETERMINISTIC and chosen is BACKENDS["mosaic"] else chosen


def _mosaic(*args, **logits) -> jax.Array:
    from pallas_kernels.prefill_attention import mosaic_sm90  # imports all of Pallas

    *rest, into, first = args
    return mosaic_sm90.prefill_attention(*rest, into=into, first=first, **logits)


_IN_PARTS = Backend(partial(_mosaic, part=PART), check_supported, plan=partial(make_work, part=PART))


def _triton(*args, **logits) -> jax.Array:
    from pallas_kernels.prefill_attention import triton  # imports Triton

    return _placed(partial(triton.prefill_attention, **logits), *args)


def _triton_plan(*args, **options) -> Work:
    from pallas_kernels.prefill_attention import triton

    return triton.plan(*args, **options)


def _xla(*args, **options) -> jax.Array:
    return _placed(lambda *rest: xla.prefill_attention(*rest[:-1], **options), *args)


_one_order = partial(_xla, tile=TILE, apart=partial(in_tiles, size=1))  # each tile is a program of one shape


def _placed(attend, q, *args) -> jax.Array:
    """Attends the rows from `first` on, and keeps what `into` holds before."""
    *rest, into, first = args
    if into is None:
        return attend(q, *rest)
    return into.at[first:].set(attend(q[first:], *rest))


BACKENDS = {
    "mosaic": Backend(_mosaic, check_supported, plan=make_work),
    "triton": Backend(_triton, check_triton, plan=_triton_plan),
    "xla": Backend(_xla, lambda q, pages, scale: check_page_size(pages.k.page_size)),
    DETERMINISTIC: Backend(_one_order, for_xla=True),
}
