"""Lists small calls of the Triton kernels over pages, that the interpreter and GPUs compute."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cache_update import cache_update, reference
from pallas_kernels.cache_update.cases import Case as Update
from pallas_kernels.decode_attention import Segments
from pallas_kernels.decode_attention.cases import Case as Decode
from pallas_kernels.formats.kv_pages import KVPages
from pallas_kernels.prefill_attention.cases import Case as Prefill
from tests.kernels.helpers import TOLERANCE, error, poison, same_bits, visible_slots
from tests.kernels.test_cache_update import storage_tolerance, written_rows
from tests.kernels.test_segments import queries, random_trees

SMALL_DECODE = Decode(
    lengths=(130, 0, 1, 300), heads=(4, 2), head_dim=64, page_size=16, k_format="bf16", v_format="bf16",
    dtype="bfloat16",
)  # fmt: skip


def small(**changes) -> Decode:
    return dataclasses.replace(SMALL_DECODE, **changes)


EIGHT_AND_FOUR = {"k_format": "int8-g8", "v_format": "int4-g32"}
FLOATS_OF_EIGHT = {"k_format": "fp8", "v_format": "int8-g256"}
# Each with the rows that its segments use (None: one each), and whether these are trees.
DECODE = [
    (small(window=100), None, False),
    (small(lengths=(600,), heads=(2, 2), page_size=128, head_dim=128, **EIGHT_AND_FOUR), None, False),
    (small(lengths=(9, 140), heads=(9, 1), page_size=8, v_format="f16", dtype="float16"), None, False),
    (small(lengths=(40, 5), heads=(1, 1), page_size=32, head_dim=256, **FLOATS_OF_EIGHT), None, False),
    (small(lengths=(70,), heads=(71, 1), page_size=64, window=1, k_format="f16"), None, False),
    (small(lengths=(40, 0, 20), k_format="int4-g8-zp", v_format="int8-g64-zp", dtype="float16"), None, False),
    (small(lengths=(300, 66), heads=(2, 2), width=4), (4, 2), False),
    (small(lengths=(140, 9), heads=(6, 2), window=3, k_format="fp8", v_format="fp8", width=5), (5, 3), True),
    (small(lengths=(129,), heads=(1, 1), window=30, dtype="float16", k_format="f16", width=40), (34,), True),
    (small(lengths=(5000,), heads=(1, 1), page_size=128), None, False),  # splits that were doubled
]  # fmt: skip


def segments_of(rows: tuple[int, ...], width: int, tree: bool) -> Segments:
    masks = jnp.asarray(random_trees(np.random.default_rng(0), rows, width)) if tree else None
    return Segments(jnp.asarray(rows, jnp.int32), masks)


def decode_arguments(case: Decode, rows: tuple[int, ...] | None, tree: bool) -> tuple[tuple, Segments | None]:
    """Returns the case's inputs with NaN wherever nothing may be read, and the segments. Tables point nowhere before
    the window."""
    q, pages, table, lengths = case.inputs()
    segments = None if rows is None else segments_of(rows, case.width, tree)
    used = np.minimum(1, lengths) if rows is None else np.asarray(rows)
    starts = np.maximum(lengths - used + 1 - (case.window or 10**6), 0)
    pages = poison(pages, visible_slots(table, starts, lengths.tolist(), pages.k.num_pages, case.page_size))
    hidden = np.arange(table.shape[1])[None] < starts[:, None] // case.page_size
    unused = (np.arange(case.width) >= used[:, None]).reshape(-1)
    q = jnp.where(unused[:, None, None], jnp.nan, queries(case, case.width))
    return (q, pages, jnp.asarray(np.where(hidden, -1, table), jnp.int32), lengths), segments


_UPDATE = {"rows": 5, "dropped": 1, "num_pages": 3, "head_dim": 64, "page_size": 16}
UPDATES = [
    Update(**_UPDATE, heads=heads, k_format=k_format, v_format=v_format, dtype=dtype)  # type: ignore[arg-type]
    for heads, k_format, v_format, dtype in (
        ((4, 2), "bf16", "f16", "bfloat16"),
        ((34, 17), "f32", "int8-g8", "float16"),
        ((3, 1), "fp8", "int4-g32", "bfloat16"),
        ((4, 4), "int4-g8", "fp8", "float16"),
        ((6, 2), "int8-g64", "int4-g64-zp", "bfloat16"),
        ((6, 2), "int8-g16-zp", "int8-g32", "bfloat16"),
    )
]


def update_arguments(case: Update) -> tuple:
    """Returns the case's inputs, with NaN in every slot."""
    *arrays, pages, page, offset = case.inputs()
    return *arrays, poison(pages, np.zeros((case.num_pages, case.page_size), bool)), page, offset


def updated(case: Update, arguments: tuple) -> tuple[jax.Array, KVPages]:
    """Returns what Triton's cache_update returns, which is near the definition."""
    page, offset = arguments[-2:]
    expected_q, expected = reference.cache_update(*arguments)
    q, new = cache_update(*arguments, backend="triton")
    assert error(q, expected_q) < TOLERANCE[case.dtype]
    assert same_bits(new.v, jax.tree.map(jnp.asarray, expected.v))
    for name, rows, wanted in zip(
        (case.k_format, case.v_format), written_rows(new, page, offset), written_rows(expected, page, offset)
    ):
        assert error(rows, wanted) < storage_tolerance(name, case.dtype)
    return q, new


_CHUNKS = {"q_lens": (37, 0, 1, 5), "kv_lens": (150, 9, 129, 5), "unused": 5}
_LONG = {"q_lens": (140, 3), "kv_lens": (300, 3), "unused": 0}
_EDGES = {"q_lens": (5, 9), "kv_lens": (35, 71), "unused": 0}  # a chunk's first row sees all but a block's last key
PREFILLS = [
    Prefill(**lens, heads=heads, head_dim=D, page_size=page, k_format=k, v_format=v, dtype=dtype, window=window)  # type: ignore[arg-type]
    for lens, heads, D, page, k, v, dtype, window in (
        (_CHUNKS, (2, 1), 64, 16, "bf16", "bf16", "bfloat16", None),
        (_CHUNKS, (3, 1), 64, 8, "int8-g8", "int4-g32", "bfloat16", 40),
        (_CHUNKS, (2, 2), 128, 128, "fp8", "int8-g64-zp", "float16", 129),
        (_LONG, (1, 1), 128, 32, "f16", "bf16", "bfloat16", 1),
        (_LONG, (1, 1), 256, 64, "bf16", "fp8", "float16", None),
        (_EDGES, (1, 1), 64, 16, "bf16", "bf16", "bfloat16", None),
    )
]


def prefill_arguments(case: Prefill) -> tuple:
    """Returns the case's inputs with NaN wherever nothing may be read, and tables that point nowhere before the
    window."""
    q, pages, table, cu, kv_lens = case.inputs()
    starts = [
        0 if case.window is None else max(0, kv - n - case.window + 1) for n, kv in zip(case.q_lens, case.kv_lens)
    ]
    stops = [kv if n else 0 for n, kv in zip(case.q_lens, case.kv_lens)]
    pages = poison(pages, visible_slots(table, starts, stops, pages.k.num_pages, case.page_size))
    hidden = np.arange(table.shape[1])[None] < np.asarray(starts)[:, None] // case.page_size
    q = q.at[q.shape[0] - case.unused :].set(jnp.nan)
    return q, pages, jnp.asarray(np.where(hidden, -1, table), jnp.int32), cu, kv_lens
