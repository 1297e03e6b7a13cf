"""Says what the Mosaic GPU kernel supports. Imports no Pallas."""

import jax

from pallas_kernels.checks import HEAD_DIMS, PAGE_SIZES, check_listed
from pallas_kernels.formats.kv_formats import FP8
from pallas_kernels.formats.kv_pages import KVPages

FORMATS = ("bfloat16", "float16", "float32", FP8, "int8", "int4")
MOST_MOVES = 64  # of a sequence; their indices are loaded at once
MOST_ARRAYS = 500  # of a launch: a parameter of 8 bytes each, of which 4 KB are safe


def check_supported(pools: tuple[KVPages, ...], moves: int) -> None:
    """Raises NotImplementedError for what the kernel does not do, naming what it does."""
    for pages in pools:
        check_listed(
            ("head dim", pages.k.head_dim, HEAD_DIMS),
            ("page size", pages.k.page_size, PAGE_SIZES),
            ("K stored as", pages.k.format.codes, FORMATS),
            ("V stored as", pages.v.format.codes, FORMATS),
        )
    if (arrays := len(jax.tree.leaves(pools))) > MOST_ARRAYS:
        raise NotImplementedError(
            f"{arrays} arrays are not supported by backend mosaic, which does at most {MOST_ARRAYS}"
        )
    if moves > MOST_MOVES:
        raise NotImplementedError(
            f"Q={moves} is not supported by backend mosaic, which does at most {MOST_MOVES} moves of a sequence"
        )
