import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.formats.kv_formats import parse_format
from pallas_kernels.formats.kv_pages import KVPages, allocate
from pallas_kernels.prefill_attention import make_work, prefill_attention, reference
from pallas_kernels.prefill_attention.cases import BENCH_CASES, CASES
from tests.kernels.helpers import (
    TOLERANCE,
    error,
    logits_of,
    missed,
    poison,
    same_bits,
    swap_entries,
    swap_scales,
    visible_slots,
)


# Every page size and every format; all pairs are in test_decode_attention.py, whose keys are read by the same code.
@pytest.mark.parametrize("case", CASES[::7] + CASES[5::7], ids=str)
def test_matches_the_formula_and_reads_nothing_else(case):
    q, pages, table, cu_q_lens, kv_lens = case.inputs()
    used = [kv if n else 0 for n, kv in zip(case.q_lens, case.kv_lens)]
    window = max(case.kv_lens) if case.window is None else case.window
    starts = [max(0, kv - n - window + 1) for n, kv in zip(case.q_lens, case.kv_lens)]
    pages = poison(pages, visible_slots(table, starts, used, pages.k.num_pages, case.page_size))
    table = np.where(np.arange(table.shape[1])[None] < np.array(starts)[:, None] // case.page_size, -1, table)
    table = jnp.asarray(table, jnp.int32)  # pages wholly before the window are not read either
    arguments = (q, pages, table, cu_q_lens, kv_lens)
    expected = reference.prefill_attention(*arguments, case.scale, case.window)
    out = prefill_attention(*arguments, scale=case.scale, window=case.window)
    assert out.dtype == q.dtype
    assert error(out, expected) < TOLERANCE[case.dtype]
    assert same_bits(out, prefill_attention(*arguments, scale=case.scale, window=case.window))


@pytest.mark.parametrize("formats", [("int4-g32-h", "int4-g64-zp"), ("int8-g8-zp-h", "fp8-h")], ids=str)
def test_zero_points_and_rotations(formats):
    names = dict(zip(("k_format", "v_format"), formats))
    case = dataclasses.replace(CASES[3], **names, dtype="float32", head_dim=64)
    arguments = case.inputs()
    out = prefill_attention(*arguments, scale=case.scale, window=case.window)
    assert error(out, reference.prefill_attention(*arguments, case.scale, case.window)) < TOLERANCE["float32"]


SMALL = {"page_size": 32, "heads": (4, 2), "head_dim": 64}
FAULTY = dataclasses.replace(CASES[0], **SMALL, k_format="int8-g8", v_format="int8-g8", dtype="bfloat16", window=100)


def test_seeded_faults_are_caught():
    q, pages, table, cu_q_lens, kv_lens = FAULTY.inputs()
    expected = reference.prefill_attention(q, pages, table, cu_q_lens, kv_lens, FAULTY.scale, FAULTY.window)

    others = [
        reference.prefill_attention(q, pages, table, cu_q_lens, kv_lens, FAULTY.scale, FAULTY.window + change)
        for change in (1, -1)
    ]

    def wrong_by(pages=pages, table=table, cu_q_lens=cu_q_lens, kv_lens=kv_lens, expected=expected):
        out = prefill_attention(q, pages, table, cu_q_lens, kv_lens, scale=FAULTY.scale, window=FAULTY.window)
        return error(out, expected)

    tolerance = TOLERANCE[FAULTY.dtype]
    assert wrong_by() < tolerance
    (unowned,) = set(range(pages.k.num_pages)) - set(np.asarray(table).flat)
    page = int(table[0, 3])
    faults = {
        "a dropped page": wrong_by(table=table.at[0, 3].set(unowned)),
        "swapped table entries": wrong_by(table=swap_entries(table, 0, 2, 3)),
        "one key too few": wrong_by(kv_lens=kv_lens.at[2].add(-1)),
        "one key too many": wrong_by(kv_lens=kv_lens.at[3].add(1)),
        "a query of the next chunk": wrong_by(cu_q_lens=cu_q_lens.at[3].add(1)),
        "a shorter window": wrong_by(expected=others[0]),
        "a longer window": wrong_by(expected=others[1]),
        "a swapped scale of V": wrong_by(KVPages(pages.k, swap_scales(pages.v, page, 1))),
        "a swapped scale of K": wrong_by(KVPages(swap_scales(pages.k, page, 0), pages.v)),
    }
    assert not missed(faults, tolerance)


@pytest.mark.parametrize("window", [None, 90])
def test_chunking_changes_nothing(window):
    """Attends one prompt whole, in chunks with company, and token by token."""
    with jax.enable_x64(True):
        case = dataclasses.replace(
            CASES[0], q_lens=(160,), kv_lens=(160,), unused=0, **SMALL, k_format="f64", v_format="int4-g8",
            dtype="float64", window=window,
        )  # fmt: skip
        q, pages, table, cu_q_lens, kv_lens = case.inputs()
        options = {"scale": case.scale, "window": window, **logits_of(0, case.heads[0], case.dtype)}
        whole = prefill_attention(q, pages, table, cu_q_lens, kv_lens, **options)
        assert error(whole, reference.prefill_attention(q, pages, table, cu_q_lens, kv_lens, **options)) < 1e-12
        cuts, tables = jnp.asarray([0, 1, 8, 8, 71, 160], jnp.int32), jnp.tile(table, (5, 1))
        assert error(prefill_attention(q, pages, tables, cuts, cuts[1:], **options), whole) < 1e-12
        lengths = jnp.arange(1, 161, dtype=jnp.int32)
        decoded = decode_attention(q, pages, jnp.tile(table, (160, 1)), lengths, **options)
        assert error(decoded, whole) < 1e-12


def test_every_partition_of_few_rows():
    """Tries all chunk bounds of six rows in three chunks, empty ones and unused rows included."""
    case = dataclasses.replace(CASES[0], q_lens=(6,), kv_lens=(14,), unused=0, **SMALL, dtype="float32", window=None)
    q, pages, table, _, _ = case.inputs()
    whole = np.zeros((7, *q.shape), np.float32)  # whole[n, i]: query i when it sees n + 8 keys
    for keys in range(7):
        lengths = jnp.full(6, keys + 8, jnp.int32)
        whole[keys] = decode_attention(q, pages, jnp.tile(table, (6, 1)), lengths, scale=case.scale)
    tables = jnp.tile(table, (3, 1))
    for a in range(7):
        for b in range(a, 7):
            for c in range(b, 7):
                bounds = jnp.asarray([0, a, b, c], jnp.int32)
                out = prefill_attention(q, pages, tables, bounds, jnp.full(3, 14, jnp.int32), scale=case.scale)
                ends = [end for begin, end in ((0, a), (a, b), (b, c)) for _ in range(begin, end)]
                expected = [whole[6 - (end - 1 - i), i] for i, end in enumerate(ends)]
                expected += [np.zeros(q.shape[1:])] * (6 - c)
                assert error(out, np.array(expected)) < TOLERANCE["float32"], (a, b, c)


def test_nothing_to_do():
    q, pages, table, cu_q_lens, kv_lens = FAULTY.inputs()
    assert prefill_attention(q[:0], pages, table, cu_q_lens * 0, kv_lens, scale=1.0).shape == (0, 4, 64)
    assert not np.any(np.asarray(prefill_attention(q, pages, table, cu_q_lens * 0, kv_lens, scale=1.0)))
    out = prefill_attention(q, pages, table[:0], cu_q_lens[:1], kv_lens[:0], scale=1.0)
    assert out.shape == q.shape
    assert not np.any(np.asarray(out))


def test_reference_catches_values_out_of_range():
    q, pages, table, cu_q_lens, kv_lens = FAULTY.inputs()
    for arguments, message in (
        ((table.at[0, 0].set(99), cu_q_lens, kv_lens), "page 99"),
        ((table, cu_q_lens.at[4].set(99), kv_lens), "cu_q_lens is"),
        ((table, cu_q_lens.at[2].set(5), kv_lens), "cu_q_lens is"),
        ((table, cu_q_lens, kv_lens.at[3].set(4)), "chunk 3 has 5 queries but only 4 keys"),
        ((table, cu_q_lens, kv_lens.at[3].set(5000)), "5000 keys do not fit"),
    ):
        with pytest.raises(ValueError, match=message):
            reference.prefill_attention(q, pages, *arguments, 1.0, None)


def test_bad_arguments_say_what_is_wrong():
    q, pages, table, cu_q_lens, kv_lens = FAULTY.inputs()

    def call(q=q, pages=pages, table=table, cu_q_lens=cu_q_lens, kv_lens=kv_lens, **options):
        prefill_attention(q, pages, table, cu_q_lens, kv_lens, scale=1.0, **options)

    scaleless = dataclasses.replace(pages.k, scales=None)
    work = make_work(q, pages, cu_q_lens, kv_lens)
    for error_type, message, arguments in (
        (ValueError, r"cu_q_lens has shape \(4,\), expected \[B\+1\] with B=4", {"cu_q_lens": kv_lens}),
        (ValueError, r"kv_lens has shape \(5,\), expected \[B\] with B=4", {"kv_lens": cu_q_lens}),
        (ValueError, "kv_lens has dtype int16", {"kv_lens": kv_lens.astype(jnp.int16)}),
        (ValueError, "pages.k has no scales", {"pages": KVPages(scaleless, pages.v)}),
        (ValueError, "5 query heads cannot share 2 KV heads", {"q": jnp.zeros((48, 5, 64))}),
        (ValueError, "window is -4", {"window": -4}),
        (ValueError, "work was made for backend mosaic or triton, and the one", {"work": work, "backend": "xla"}),
        (NotImplementedError, "dtype float32 is not supported", {"q": q.astype("float32"), "backend": "mosaic"}),
    ):
        with pytest.raises(error_type, match=message):
            call(**arguments)


def test_bench_cases_trace():
    for case in BENCH_CASES[::3]:
        fmt = (parse_format(case.k_format, case.head_dim), parse_format(case.v_format, case.head_dim))
        pages = jax.eval_shape(lambda: allocate(64, case.heads[1], case.page_size, case.head_dim, *fmt))  # noqa: B023
        chunks = len(case.q_lens)
        q = jax.ShapeDtypeStruct((sum(case.q_lens), case.heads[0], case.head_dim), case.dtype)
        shapes = ((chunks, max(case.kv_lens) // case.page_size), (chunks + 1,), (chunks,))
        table, cu_q_lens, kv_lens = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes)
        out = jax.eval_shape(lambda *a: prefill_attention(*a, scale=1.0), q, pages, table, cu_q_lens, kv_lens)
        assert out.shape == q.shape
