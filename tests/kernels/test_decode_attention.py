import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.decode_attention import decode_attention, make_work, reference
from pallas_kernels.decode_attention.cases import BENCH_CASES, CASES
from pallas_kernels.formats.kv_formats import parse_format
from pallas_kernels.formats.kv_pages import KVPages, allocate
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


def first_visible(lengths, window):
    return [0 if window is None else max(0, int(n) - window) for n in lengths]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_the_formula_and_reads_nothing_else(case):
    q, pages, table, lengths = case.inputs()
    starts = first_visible(lengths, case.window)
    pages = poison(pages, visible_slots(table, starts, lengths.tolist(), pages.k.num_pages, case.page_size))
    table = np.where(np.arange(table.shape[1])[None] < np.array(starts)[:, None] // case.page_size, -1, table)
    table = jnp.asarray(table, jnp.int32)  # pages wholly before the window are not read either
    expected = reference.decode_attention(q, pages, table, lengths, case.scale, case.window)
    out = decode_attention(q, pages, table, lengths, scale=case.scale, window=case.window)
    assert out.dtype == q.dtype
    assert error(out, expected) < TOLERANCE[case.dtype]
    assert same_bits(out, decode_attention(q, pages, table, lengths, scale=case.scale, window=case.window))


OTHERS = (  # with zero points, and rotated
    ("int4-g32-h", "int4-g32-h"),
    ("int8-g8-zp", "int4-g64-zp"),
    ("fp8-h", "int4-g16-zp-h"),
    ("int4-g64-zp", "f32-h"),
)


@pytest.mark.parametrize(("case", "formats"), list(zip(CASES[:8], OTHERS * 2)), ids=str)
def test_zero_points_and_rotations(case, formats):
    case = dataclasses.replace(case, **dict(zip(("k_format", "v_format"), formats)), dtype="float32", head_dim=64)
    q, pages, table, lengths = case.inputs()
    expected = reference.decode_attention(q, pages, table, lengths, case.scale, case.window)
    out = decode_attention(q, pages, table, lengths, scale=case.scale, window=case.window)
    assert error(out, expected) < TOLERANCE[case.dtype]
    if pages.v.format.hadamard:  # a seeded fault: results stay rotated
        unrotated = KVPages(pages.k, pages.v.as_stored)
        assert error(out, reference.decode_attention(q, unrotated, table, lengths, case.scale, case.window)) > 0.1


SMALL = {"page_size": 32, "heads": (4, 2), "head_dim": 64}
FAULTY = dataclasses.replace(
    CASES[0],
    lengths=(130, 1, 0, 64, 257),
    **SMALL,
    k_format="int8-g8",
    v_format="int8-g8",
    dtype="bfloat16",
    window=100,
)


def test_seeded_faults_are_caught():
    q, pages, table, lengths = FAULTY.inputs()
    expected = reference.decode_attention(q, pages, table, lengths, FAULTY.scale, FAULTY.window)

    others = [
        reference.decode_attention(q, pages, table, lengths, FAULTY.scale, FAULTY.window + change) for change in (1, -1)
    ]

    def wrong_by(pages=pages, table=table, lengths=lengths, expected=expected):
        return error(decode_attention(q, pages, table, lengths, scale=FAULTY.scale, window=FAULTY.window), expected)

    tolerance = TOLERANCE[FAULTY.dtype]
    assert wrong_by() < tolerance
    page = int(table[4, 7])
    (unowned,) = set(range(pages.k.num_pages)) - set(np.asarray(table).flat)
    faults = {
        "a dropped page": wrong_by(table=table.at[4, 7].set(unowned)),
        "swapped table entries": wrong_by(table=swap_entries(table, 4, 5, 8)),
        "one key too few": wrong_by(lengths=jnp.maximum(lengths - 1, 0)),
        "one key too many": wrong_by(lengths=jnp.where(lengths > 0, lengths + 1, 0)),
        "a shorter window": wrong_by(expected=others[0]),
        "a longer window": wrong_by(expected=others[1]),
        "a swapped scale of V": wrong_by(KVPages(pages.k, swap_scales(pages.v, int(table[0, 4]), 1))),
        "a swapped scale of K": wrong_by(KVPages(swap_scales(pages.k, page, 0), pages.v)),
        "K for V": wrong_by(KVPages(pages.v, pages.k)),
    }
    assert not missed(faults, tolerance)


def repage(pages: KVPages, table, length: int, page_size: int):
    """Puts the same tokens of one sequence in pages of another size (bf16 pools)."""

    def pool(part):
        values = np.asarray(part.values)[np.asarray(table)[: -(-length // part.page_size)]]
        tokens = values.transpose(1, 0, 2, 3).reshape(values.shape[1], -1, values.shape[3])
        tokens = np.pad(tokens, ((0, 0), (0, -tokens.shape[1] % page_size), (0, 0)))
        values = tokens.reshape(tokens.shape[0], -1, page_size, tokens.shape[2]).transpose(1, 0, 2, 3)
        return dataclasses.replace(part, values=jnp.asarray(values[::-1]))

    new = KVPages(pool(pages.k), pool(pages.v))
    return new, jnp.arange(new.k.num_pages, dtype=jnp.int32)[::-1][None, :]


@pytest.mark.parametrize(
    ("dtype", "page_size", "window"), [("float64", 8, None), ("float64", 128, 70), ("float32", 64, 70)]
)
def test_company_and_page_size_change_nothing(dtype, page_size, window):
    with jax.enable_x64(True):
        case = dataclasses.replace(CASES[0], **SMALL, dtype=dtype, window=window, k_format="bf16", v_format="bf16")
        q, pages, table, lengths = case.inputs()
        together = decode_attention(q, pages, table, lengths, scale=case.scale, window=window)
        for row in (0, 4):
            own, own_table = repage(pages, table[row], int(lengths[row]), page_size)
            alone = decode_attention(
                q[row : row + 1], own, own_table, lengths[row : row + 1], scale=case.scale, window=window
            )
            assert error(alone, together[row : row + 1]) < TOLERANCE[dtype]


def test_float64_is_exact_through_an_offset_window():
    with jax.enable_x64(True):
        case = dataclasses.replace(FAULTY, k_format="f64", v_format="int8-g8", dtype="float64")
        q, pages, table, lengths = case.inputs()
        logits = logits_of(0, case.heads[0], case.dtype)
        expected = reference.decode_attention(q, pages, table, lengths, case.scale, case.window, **logits)
        out = decode_attention(q, pages, table, lengths, scale=case.scale, window=case.window, **logits)
        assert out.dtype == jnp.float64
        assert error(out, expected) < TOLERANCE["float64"]


def test_large_logits_neither_overflow_nor_vanish():
    case = dataclasses.replace(FAULTY, k_format="f32", v_format="f32", dtype="float32", window=None)
    q, pages, table, lengths = case.inputs()
    expected = reference.decode_attention(q, pages, table, lengths, 50.0, None)
    assert error(decode_attention(q, pages, table, lengths, scale=50.0), expected) < 1e-4  # logits of 1e3: 1e-7 of them


def test_no_row_and_all_rows_unused():
    q, pages, table, lengths = FAULTY.inputs()
    assert decode_attention(q[:0], pages, table[:0], lengths[:0], scale=1.0).shape == (0, 4, 64)
    assert not np.any(np.asarray(decode_attention(q, pages, table, lengths * 0, scale=1.0)))


def test_reference_catches_values_out_of_range():
    q, pages, table, lengths = FAULTY.inputs()
    for bad_table, bad_lengths, message in (
        (table.at[0, 0].set(99), lengths, "page 99"),
        (table.at[0, 0].set(-1), lengths, "page -1"),
        (table, lengths.at[4].set(10_000), "10000 keys"),
        (table, lengths.at[1].set(-3), "row 1 has length -3"),
    ):
        with pytest.raises(ValueError, match=message):
            reference.decode_attention(q, pages, bad_table, bad_lengths, 1.0, None)


def test_bad_arguments_say_what_is_wrong():
    q, pages, table, lengths = FAULTY.inputs()

    def call(q=q, pages=pages, table=table, lengths=lengths, **options):
        decode_attention(q, pages, table, lengths, scale=1.0, **options)

    three = allocate(4, 3, 32, 64, parse_format("bf16", 64), parse_format("bf16", 64))
    odd = allocate(4, 2, 24, 64, parse_format("bf16", 64), parse_format("bf16", 64))
    work = make_work(lengths, 4, 2, 64)
    for error_type, message, arguments in (
        (ValueError, r"lengths has shape \(4,\), expected \[R\] with R=5", {"lengths": lengths[:4]}),
        (ValueError, r"page_table has shape \(10,\), expected \[R, M\]", {"table": table[0]}),
        (ValueError, "page_table has dtype float32, expected int32", {"table": table.astype(jnp.float32)}),
        (ValueError, "q has dtype int32", {"q": q.astype(jnp.int32)}),
        (ValueError, r"pages.k.values has shape \(.*64\), expected \(.*32\) for head dim 32", {"q": q[..., :32]}),
        (ValueError, "4 query heads cannot share 3 KV heads", {"pages": three}),
        (ValueError, "window is 0", {"window": 0}),
        (ValueError, "unknown backend 'cuda'; backends: xla, mosaic", {"backend": "cuda"}),
        (
            NotImplementedError,
            "dtype float32 is not supported by backend mosaic",
            {"q": q.astype(jnp.float32), "backend": "mosaic"},
        ),
        (NotImplementedError, "page size 24", {"pages": odd}),
        (ValueError, "work was made for backend mosaic, and the one that", {"work": work, "backend": "xla"}),
    ):
        with pytest.raises(error_type, match=message):
            call(**arguments)


def test_bench_cases_trace():
    for case in BENCH_CASES[::3]:
        fmt = (parse_format(case.k_format, case.head_dim), parse_format(case.v_format, case.head_dim))
        pages = jax.eval_shape(lambda: allocate(64, case.heads[1], case.page_size, case.head_dim, *fmt))  # noqa: B023
        rows = len(case.lengths)
        q = jax.ShapeDtypeStruct((rows, case.heads[0], case.head_dim), case.dtype)
        table = jax.ShapeDtypeStruct((rows, max(case.lengths) // case.page_size), jnp.int32)
        lengths = jax.ShapeDtypeStruct((rows,), jnp.int32)
        out = jax.eval_shape(lambda *a: decode_attention(*a, scale=1.0), q, pages, table, lengths)
        assert out.shape == q.shape


def test_cases_cover_all_pairs():
    def settings(case):
        return {
            "page_size": case.page_size,
            "formats": (case.k_format, case.v_format),
            "heads": case.heads,
            "window": case.window,
            "dtype": case.dtype,
            "head_dim": case.head_dim,
        }

    rows = [settings(case) for case in CASES]
    for a, b in itertools.combinations(rows[0], 2):
        values = [sorted({row[axis] for row in rows}, key=str) for axis in (a, b)]
        missing = set(itertools.product(*values)) - {(row[a], row[b]) for row in rows}
        assert not missing, (a, b, missing)
