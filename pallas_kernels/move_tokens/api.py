"""Copies tokens' K and V, as they are stored, to other places of their sequences, in all layers at once."""

import jax

from pallas_kernels.backends import Backend, choose
from pallas_kernels.checks import bind_shapes, check_int32, check_pages
from pallas_kernels.formats.kv_pages import KVPages
from pallas_kernels.move_tokens import xla
from pallas_kernels.move_tokens.config import check_supported


def move_tokens(
    pools: tuple[KVPages, ...],
    page_table: jax.Array,
    source: jax.Array,
    target: jax.Array,
    *,
    backend: str | None = None,
) -> tuple[KVPages, ...]:
    """Copies tokens' K and V from cache indices source to target, both i32[R, Q], of R sequences in all layers of the
    pools.

    After a tree of drafts was verified, the accepted nodes so become the next tokens of their sequence. Codes and
    scales are copied, never decoded or encoded. Cache index i of row r is slot i % P of page page_table[r, i // P]
    (i32[R, M]). All pools have N pages of P tokens a layer and may differ in all else. A negative source, or one that
    is its target, is no move. An index that lies in no page of the pool makes none either.

    All of a row's tokens are read before any is written. A target lies before its source, no later move of the row
    reads it, and no two write it. Rows write no page that another one reads or writes. Returns the pools; under jit
    with the pools donated they are changed in place. Raises ValueError where shapes or dtypes disagree, and
    NotImplementedError for what a named backend doesn't do.
    """
    sizes = bind_shapes(page_table=(page_table, "R M"), source=(source, "R Q"), target=(target, "R Q"))
    check_int32(page_table=page_table, source=source, target=target)
    for number, pages in enumerate(pools):
        check_pages(pages, None, pages.k.head_dim)
        found, expected = ((p.k.num_pages, p.k.page_size) for p in (pages, pools[0]))
        if found != expected:
            raise ValueError(
                f"pools[{number}] has {found[0]} pages of {found[1]} tokens, expected {expected[0]} of {expected[1]} "
                "as pools[0] has"
            )
    return choose(BACKENDS, backend, pools, sizes["Q"]).run(pools, page_table, source, target)


def _mosaic(*args) -> tuple[KVPages, ...]:
    from pallas_kernels.move_tokens import mosaic_sm90  # imports all of Pallas

    return mosaic_sm90.move_tokens(*args)


BACKENDS = {
    "mosaic": Backend(_mosaic, check_supported),
    "xla": Backend(xla.move_tokens),
}
