"""Checks Triton kernels over pages in Triton's interpreter against the references."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton")  # of extras and development, for Linux alone

from pallas_kernels.cache_update import cache_update, cache_update_fused  # noqa: E402
from pallas_kernels.cache_update import reference as update_reference  # noqa: E402
from pallas_kernels.cache_update import triton as update_triton  # noqa: E402
from pallas_kernels.decode_attention import Segments, decode_attention  # noqa: E402
from pallas_kernels.decode_attention import reference as decode_reference  # noqa: E402
from pallas_kernels.decode_attention import triton as decode_triton  # noqa: E402
from pallas_kernels.decode_attention.cases import Case as Decode  # noqa: E402
from pallas_kernels.formats import kv_formats  # noqa: E402
from pallas_kernels.formats.kv_pages import KVPages, Pages  # noqa: E402
from pallas_kernels.prefill_attention import plan, prefill_attention  # noqa: E402
from pallas_kernels.prefill_attention import reference as prefill_reference  # noqa: E402
from pallas_kernels.prefill_attention import triton as prefill_triton  # noqa: E402
from pallas_kernels.triton import pages_triton, triton_call  # noqa: E402
from tests.kernels import triton_tools  # noqa: E402
from tests.kernels.helpers import TOLERANCE, error, missed, same_bits, swap_entries, swap_scales  # noqa: E402
from tests.kernels.layers import caught, check_attention, check_update, expected_of, plant  # noqa: E402
from tests.kernels.test_cache_update import storage_tolerance, written_rows  # noqa: E402
from tests.kernels.test_segments import queries, words  # noqa: E402
from tests.kernels.triton_cases import (  # noqa: E402
    DECODE,
    PREFILLS,
    UPDATES,
    decode_arguments,
    prefill_arguments,
    small,
    update_arguments,
    updated,
)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setattr(triton_call, "call", triton_tools.interpret)


def decode(case: Decode, arguments, segments=None) -> jax.Array:
    options = {"scale": case.scale, "window": case.window, "segments": segments}
    return decode_attention(*arguments, **options, backend="triton")


def decode_formula(case: Decode, arguments, segments: Segments | None = None) -> np.ndarray:
    parts = (None, None) if segments is None else (segments.rows, segments.ancestors)
    return decode_reference.decode_attention(*arguments, case.scale, case.window, *parts)


@pytest.mark.parametrize(("case", "rows", "tree"), DECODE, ids=str)
def test_decode_attention_matches_the_formula_and_reads_nothing_else(case, rows, tree):
    arguments, segments = decode_arguments(case, rows, tree)
    out = decode(case, arguments, segments)
    assert error(out, decode_formula(case, arguments, segments)) < TOLERANCE[case.dtype]


def test_decode_attention_depends_neither_on_company_nor_on_room():
    case = small(lengths=(600, 40), k_format="fp8", v_format="int8-g8")
    q, pages, table, lengths = case.inputs()
    out = decode(case, (q, pages, table, lengths))
    wider = jnp.pad(table[:1], ((0, 0), (0, 300)))  # room for more splits
    for alone in (table[:1], wider):
        assert same_bits(out[:1], decode(case, (q[:1], pages, alone, lengths[:1])))


def test_capped_logits_and_sinks_match_the_formula():
    case, chunks = small(lengths=(600, 0, 40), k_format="int8-g8", v_format="fp8"), PREFILLS[1]
    for kernel, formula, of, arguments in (
        (decode_attention, decode_reference.decode_attention, case, case.inputs()),
        (prefill_attention, prefill_reference.prefill_attention, chunks, prefill_arguments(chunks)),
    ):
        given = {"softcap": 1.5, "sinks": jnp.linspace(-1, 5, arguments[0].shape[1]).at[0].set(-jnp.inf)}
        out = kernel(*arguments, scale=of.scale, window=of.window, **given, backend="triton")
        expected = partial(formula, *arguments, of.scale, of.window)
        assert error(out, expected(**given)) < TOLERANCE[of.dtype]
        for name in given:
            assert error(out, expected(**given | {name: None})) > 3 * TOLERANCE[of.dtype]


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_what_a_row_of_a_tree_does_not_see_changes_none_of_its_bits(kv):
    """Tries any keys, and any values that are numbers."""
    case, leaf = small(lengths=(130,), heads=(1, 1), k_format=kv, v_format=kv, width=5), 3
    segments = Segments(jnp.asarray([5], jnp.int32), jnp.asarray(words([[0b1, 0b11, 0b101, 0b1011, 0b10101]])))
    _, pages, table, lengths = case.inputs()
    page, slot = int(table[0, (125 + leaf) // 16]), (125 + leaf) % 16

    def drafted(pool, value):
        return dataclasses.replace(pool, values=pool.values.at[page, :, slot].set(value))

    nan, large = (0x7F, 0x70) if kv == "fp8" else (jnp.nan, 1e4)
    other = dataclasses.replace(pages, k=drafted(pages.k, nan), v=drafted(pages.v, large))
    one, another = (decode(case, (queries(case, 5), each, table, lengths), segments) for each in (pages, other))
    rest = np.arange(5) != leaf
    assert same_bits(one[rest], another[rest])
    assert not np.isfinite(np.asarray(another[leaf], np.float32)).any()


@pytest.mark.parametrize("width", [5, 40])
def test_a_tree_deeper_than_the_window_sees_its_last_ancestors_alone(width):
    case = small(lengths=(130,), heads=(1, 1), window=3, width=width)
    arguments, _ = decode_arguments(case, (width,), False)
    chain = jnp.asarray(words([[(2 << i) - 1 for i in range(width)]]))
    segments = Segments(jnp.asarray([width], jnp.int32), chain)
    out = decode(case, arguments, segments)
    assert error(out, decode_formula(case, arguments, segments)) < TOLERANCE[case.dtype]


@pytest.mark.parametrize("size", [2.0**100, 2.0**-60])
def test_queries_need_not_fit_float16(size):
    """Tries bfloat16 over codes, with which it is multiplied in float16."""
    case, chunks = small(lengths=(130, 5), k_format="int8-g8", v_format="fp8"), PREFILLS[1]
    (q, *rest), _ = decode_arguments(case, None, False)
    arguments, scale = (q * jnp.asarray(size, q.dtype), *rest), case.scale / size
    out = decode_attention(*arguments, scale=scale, backend="triton")
    assert error(out, decode_reference.decode_attention(*arguments, scale, None)) < TOLERANCE[case.dtype]
    q, *rest = prefill_arguments(chunks)
    arguments, scale = (q * jnp.asarray(size, q.dtype), *rest), chunks.scale / size
    expected = prefill_reference.prefill_attention(*arguments, scale, chunks.window)
    assert error(prefill(chunks, arguments, scale=scale), expected) < TOLERANCE[chunks.dtype]


def test_seeded_faults_of_decode_attention_are_caught(monkeypatch):
    case = small(lengths=(130, 1, 0, 600), page_size=32, k_format="int8-g8", v_format="int4-g8", window=100)
    q, pages, table, lengths = case.inputs()
    expected = decode_formula(case, (q, pages, table, lengths))

    def wrong(pages=pages, table=table, lengths=lengths, window=case.window):
        return error(decode(dataclasses.replace(case, window=window), (q, pages, table, lengths)), expected)

    assert wrong() < TOLERANCE[case.dtype]
    faults = {
        "swapped table entries": wrong(table=swap_entries(table, 3, 16, 18)),
        "one key too few": wrong(lengths=jnp.maximum(lengths - 1, 0)),
        "a shorter window": wrong(window=99),
        "a longer window": wrong(window=101),
        "a swapped scale of V": wrong(KVPages(pages.k, swap_scales(pages.v, int(table[0, 3]), 1))),
        "a swapped scale of K": wrong(KVPages(swap_scales(pages.k, int(table[3, 17]), 0), pages.v)),
    }
    launches = decode_triton.launches

    def changed(*arguments):
        split, merge = launches(*arguments)
        return split, dataclasses.replace(merge, constants={**merge.constants, "SPLIT": 1024})

    monkeypatch.setattr(decode_triton, "launches", changed)
    jax.clear_caches()
    faults["other splits merged"] = wrong()
    jax.clear_caches()
    assert not missed(faults, TOLERANCE[case.dtype])


@pytest.mark.parametrize("case", UPDATES, ids=str)
def test_cache_update_matches_the_definition_and_touches_nothing_else(case):
    arguments = update_arguments(case)
    q, k, v, cos, sin, pages, page, offset = arguments
    rotated, new = updated(case, arguments)
    written = np.zeros((case.num_pages, case.page_size), bool)
    kept = case.rows - case.dropped
    written[np.asarray(page)[:kept], np.asarray(offset)[:kept]] = True
    for old, found in zip(jax.tree.leaves(pages), jax.tree.leaves(new)):
        shape = case.num_pages, case.heads[1], case.page_size, -1
        before, after = (np.asarray(x).reshape(shape).transpose(0, 2, 1, 3)[~written] for x in (old, found))
        assert before.tobytes() == after.tobytes()
    fused = jnp.concatenate([x.reshape(case.rows, -1) for x in (q, k, v)], axis=1)
    assert same_bits((rotated, new), cache_update_fused(fused, cos, sin, pages, page, offset, backend="triton"))


def test_cache_update_of_no_rows_changes_nothing():
    q, k, v, cos, sin, pages, page, offset = update_arguments(UPDATES[0])
    rows = [x[:0] for x in (q, k, v, cos, sin)]
    rotated, new = cache_update(*rows, pages, page[:0], offset[:0], backend="triton")
    assert rotated.shape == (0, *q.shape[1:])
    assert same_bits(pages, new)


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")  # of the interpreter's least and largest
@pytest.mark.parametrize("stored", ["fp8", "int8-g8", "int4-g8", "int8-g8-zp", "int4-g8-zp"])
def test_numbers_at_the_ends_of_their_range_are_stored_as_xla_stores_them(stored):
    case = dataclasses.replace(UPDATES[0], k_format=stored, v_format=stored)
    q, k, v, cos, sin, pages, page, offset = case.inputs()
    odd = (np.nan, np.inf, -np.inf, 500.0, -1e6, 3e38, 1e-7, -1e-5)
    for head in range(v.shape[1]):
        v = v.at[0, head, 8 * np.arange(8)].set(jnp.asarray(odd, v.dtype))
        v = v.at[1, head, :].set(jnp.asarray(np.repeat(odd, 8), v.dtype))
    v = v.at[2].set(v[2] * jnp.asarray(1e-7, v.dtype))
    stores = [cache_update(q, k, v, cos, sin, pages, page, offset, backend=name)[1].v for name in ("triton", "xla")]
    of_triton, of_xla = (np.asarray(decode_pages(each.values, each.scales, each.format, page)) for each in stores)
    np.testing.assert_array_equal(of_triton, of_xla)


def decode_pages(values, scales, fmt, page) -> jax.Array:
    """Returns the numbers of these pages, as float32."""
    if scales is not None:
        scales = scales.reshape(*values.shape[:3], -1)
    return kv_formats.decode(values, scales, fmt, jnp.float32)[jnp.unique(page[page < values.shape[0]])]


def test_seeded_faults_of_cache_update_are_caught():
    case = dataclasses.replace(UPDATES[4], heads=(4, 2))
    q, k, v, cos, sin, pages, page, offset = case.inputs()
    _, expected = update_reference.cache_update(q, k, v, cos, sin, pages, page, offset)

    def wrong(k=k, v=v, sin=sin, page=page, offset=offset):
        _, new = cache_update(q, k, v, cos, sin, pages, page, offset, backend="triton")
        return max(error(found, right) for found, right in zip(written_rows(new, *at), written_rows(expected, *at)))

    at, tolerance = (page, offset), storage_tolerance("int4", "bfloat16")
    assert wrong() < tolerance
    faults = {
        "the angle reversed": wrong(sin=-sin),
        "an offset too far": wrong(offset=(offset + 1) % case.page_size),
        "a dropped row": wrong(page=page.at[0].set(case.num_pages)),
        "a row before the pool": wrong(page=page.at[0].set(-1)),
        "heads exchanged": wrong(v=v[:, ::-1]),
    }
    assert not missed(faults, tolerance)


def prefill(case, arguments, **options) -> jax.Array:
    options = {"scale": case.scale, "window": case.window, "backend": "triton"} | options
    return prefill_attention(*arguments, **options)


@pytest.mark.parametrize("case", PREFILLS, ids=str)
def test_prefill_attention_matches_the_formula_and_reads_nothing_else(case):
    arguments = prefill_arguments(case)
    expected = prefill_reference.prefill_attention(*arguments, case.scale, case.window)
    out = prefill(case, arguments)
    assert error(out, expected) < TOLERANCE[case.dtype]
    q, pages, _, *lengths = arguments
    work = plan(q, pages, *lengths, scale=case.scale, window=case.window, backend="triton")
    assert same_bits(out, prefill(case, arguments, work=work))


def test_prefill_attention_does_not_depend_on_company():
    case = PREFILLS[1]
    q, pages, table, _, kv_lens = case.inputs()
    out = prefill(case, case.inputs())
    alone = prefill(case, (q[38:43], pages, table[3:], jnp.asarray([0, 5], jnp.int32), kv_lens[3:]))
    assert same_bits(out[38:43], alone)


@pytest.mark.parametrize("window", [None, 40])
def test_rows_that_no_chunk_owns_come_out_zero_whatever_they_hold(window):
    """Tries a tile of them and a bit, of NaN: more than a block of keys."""
    case = dataclasses.replace(PREFILLS[0], unused=70, window=window)
    out = prefill(case, prefill_arguments(case))
    assert not np.asarray(out[-case.unused :], np.float32).any()


@pytest.mark.parametrize("scale", [0.0, -0.1])
def test_any_scale_will_do(scale):
    case, chunks = small(lengths=(130, 5), k_format="int8-g8"), PREFILLS[1]
    arguments, _ = decode_arguments(case, None, False)
    out = decode_attention(*arguments, scale=scale, backend="triton")
    assert error(out, decode_reference.decode_attention(*arguments, scale, None)) < TOLERANCE[case.dtype]
    arguments = prefill_arguments(chunks)
    expected = prefill_reference.prefill_attention(*arguments, scale, chunks.window)
    assert error(prefill(chunks, arguments, scale=scale), expected) < TOLERANCE[chunks.dtype]


def test_seeded_faults_of_prefill_attention_are_caught():
    case = PREFILLS[1]
    q, pages, table, cu, kv_lens = case.inputs()
    expected = prefill_reference.prefill_attention(q, pages, table, cu, kv_lens, case.scale, case.window)

    def wrong(pages=pages, table=table, cu=cu, kv_lens=kv_lens, window=case.window):
        return error(prefill(case, (q, pages, table, cu, kv_lens), window=window), expected)

    assert wrong() < TOLERANCE[case.dtype]
    faults = {
        "swapped table entries": wrong(table=swap_entries(table, 0, 10, 15)),
        "one key too few": wrong(kv_lens=kv_lens - 1),
        "a shorter window": wrong(window=39),
        "a longer window": wrong(window=41),
        "a row of another chunk": wrong(cu=cu.at[1:3].add(1)),
        "a swapped scale of V": wrong(KVPages(pages.k, swap_scales(pages.v, int(table[0, 15]), 0))),
        "a swapped scale of K": wrong(KVPages(swap_scales(pages.k, int(table[0, 15]), 0), pages.v)),
    }
    assert not missed(faults, TOLERANCE[case.dtype])


ONE_DECODE = small(lengths=(70,), heads=(1, 1), k_format="int8-g8")
ONE_CHUNK = dataclasses.replace(PREFILLS[5], q_lens=(5,), kv_lens=(71,))
OF_LAYERS = {  # past the jits, whose traces would hide a fault
    "cache_update": (
        check_update, update_triton.cache_update.__wrapped__, dataclasses.replace(UPDATES[4], dropped=3).inputs(),
    ),
    "decode_attention": (
        check_attention,
        lambda *arguments: decode_triton.decode_attention.__wrapped__(*arguments, ONE_DECODE.scale, None),
        ONE_DECODE.inputs(),
    ),
    "prefill_attention": (
        check_attention,
        lambda *arguments: prefill_triton.prefill_attention.__wrapped__(*arguments, ONE_CHUNK.scale, None),
        ONE_CHUNK.inputs(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_LAYERS)
def test_the_pages_are_those_of_a_layer_among_others(name):
    check, run, arguments = OF_LAYERS[name]
    check(run, arguments)


@pytest.mark.parametrize("name", OF_LAYERS)
def test_seeded_faults_of_layers_are_caught(name, monkeypatch):
    check, run, arguments = OF_LAYERS[name]
    place, function, bound = pages_triton, "rows_of", "tl.minimum(tl.maximum(page, 0), N - 1) + tl.load(layer) * N"
    of_all = bound.replace("N - 1", "3 * N - 1")
    before = "tl.minimum(tl.maximum(page + tl.load(layer) * N, 0), 3 * N - 1)"
    if name == "cache_update":
        place, function, bound = update_triton, "_update", "(to >= 0) & (to < N)"
        of_all = "(to >= 0) & (to < 3 * N)"
        before = "(to + tl.load(layer) * N >= 0) & (to + tl.load(layer) * N < 3 * N)"
    ignored = Pages, "layer_operand", "jnp.reshape(self.layer, 1)", "jnp.zeros(1, jnp.int32)"
    expected = expected_of(check, run, arguments)
    for fault in ((place, function, bound, of_all), (place, function, bound, before), ignored):
        with monkeypatch.context() as patch:
            plant(patch, *fault)
            assert caught(check, run, arguments, expected), fault[1:]
