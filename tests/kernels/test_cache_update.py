import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.backends import TARGET
from pallas_kernels.cache_update import cache_update, cache_update_fused, reference
from pallas_kernels.cache_update.cases import BENCH_CASES, CASES
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.formats.kv_formats import parse_format
from pallas_kernels.formats.kv_pages import KVPages, allocate
from pallas_kernels.formats.reference_pages import read_row, to_numpy
from pallas_kernels.rms_norm import HeadNorms
from tests.kernels.helpers import TOLERANCE, error, missed, poison, same_bits


def written_rows(pages, page, offset):
    """Returns what the slots hold, decoded: K and V [T, K, D] of the rows that are not dropped."""
    pages = to_numpy(pages)
    slots = [(p, o) for p, o in zip(page.tolist(), offset.tolist()) if p < pages.k.num_pages]
    heads = range(pages.k.values.shape[1])
    return [np.array([[read_row(pool, p, h, o) for h in heads] for p, o in slots]) for pool in (pages.k, pages.v)]


def storage_tolerance(name, dtype):
    """Returns a share of a row's norm. Rounding before the cast may move a value by one step of the format, rarely."""
    step = {"fp8": 2.0**-3, "int8": 2 / 127, "int4": 2 / 7}.get(name.split("-")[0], 0)
    stored = {"bf16": "bfloat16", "f16": "float16"}.get(name, "float32")
    return max(TOLERANCE[stored], TOLERANCE["float32"], 0.1 * step)


@pytest.mark.parametrize("case", CASES[::5] + CASES[2::5], ids=str)
def test_matches_the_definition_and_touches_nothing_else(case):
    arguments = case.inputs()
    *_, pages, page, offset = arguments
    nothing = np.zeros((case.num_pages, case.page_size), bool)
    arguments = (*arguments[:5], poison(pages, nothing), page, offset)
    expected_q, expected = reference.cache_update(*arguments)
    q, new = cache_update(*arguments)
    assert q.dtype == arguments[0].dtype
    assert error(q, expected_q) < TOLERANCE[case.dtype]
    for name, rows, expected_rows in zip(
        (case.k_format, case.v_format), written_rows(new, page, offset), written_rows(expected, page, offset)
    ):
        assert error(rows, expected_rows) < storage_tolerance(name, case.dtype)
    assert same_bits(cache_update(*arguments), (q, new))
    # With the written slots put back, the pages are what they were.
    visible = np.zeros((case.num_pages, case.page_size), bool)
    kept = np.asarray(page) < case.num_pages
    visible[np.asarray(page)[kept], np.asarray(offset)[kept]] = True
    hidden = np.broadcast_to(~visible[:, None, :], pages.k.values.shape[:3])
    for before, after in zip(jax.tree.leaves(arguments[5]), jax.tree.leaves(new)):
        before, after = (np.asarray(pool).reshape(*hidden.shape, -1) for pool in (before, after))
        assert before[hidden].tobytes() == after[hidden].tobytes()
        assert before[~hidden].tobytes() != after[~hidden].tobytes()


@pytest.mark.parametrize("formats", [("int4-g32-h", "int8-g8-zp"), ("int4-g64-zp-h", "fp8-h")], ids=str)
def test_zero_points_and_rotations(formats):
    case = dataclasses.replace(CASES[2], dtype="float32", **dict(zip(("k_format", "v_format"), formats)))
    arguments = case.inputs()
    expected_q, expected = reference.cache_update(*arguments)
    q, new = cache_update(*arguments)
    assert error(q, expected_q) < TOLERANCE["float32"]  # not rotated: attention does
    for name, rows, wanted in zip(formats, *(written_rows(pages, *arguments[6:]) for pages in (new, expected))):
        assert error(rows, wanted) < storage_tolerance(name, case.dtype)


@pytest.mark.parametrize("case", CASES[2:6], ids=str)
def test_float64_is_exact(case):
    """Expects equal codes bit for bit: both sides round the same numbers, as K sees no rounding before its own. Not so
    the 16-bit floats, which XLA rounds from float64 by way of float32."""
    with jax.enable_x64(True):
        q, k, v, cos, sin, pages, page, offset = dataclasses.replace(case, dtype="float64").inputs()
        arguments = (q, k, v, cos, sin, pages, page, offset)
        expected_q, expected = reference.cache_update(*arguments)
        out, new = cache_update(*arguments)
        assert error(out, expected_q) < TOLERANCE["float64"]
        assert same_bits(new, jax.tree.map(jnp.asarray, expected))


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norms_of_heads_by_the_definition(offset, monkeypatch):
    with jax.enable_x64(True):
        q, k, v, *rest = dataclasses.replace(CASES[2], dtype="float64").inputs()
        gains = np.random.default_rng(5).uniform(0.5, 2, (2, q.shape[-1]))
        norms = HeadNorms(*map(jnp.asarray, gains), 1e-3, offset)
        qkv = jnp.concatenate([q, k, v], axis=1)
        out, new = cache_update_fused(qkv.reshape(len(q), -1), *rest, norms=norms)
        q, k = (
            np.asarray(x) / np.sqrt((np.asarray(x) ** 2).mean(-1, keepdims=True) + 1e-3) * (gain + offset)
            for x, gain in ((q, gains[0]), (k, gains[1]))
        )
        expected_q, expected = reference.cache_update(q, k, v, *rest)
        assert error(out, expected_q) < TOLERANCE["float64"]
        assert error(*(written_rows(pages, *rest[3:])[0] for pages in (new, expected))) < storage_tolerance("int4", "f")
    with pytest.raises(ValueError, match="k_norm has shape"):
        cache_update_fused(qkv.reshape(len(q), -1), *rest, norms=norms._replace(k=gains[1][1:]))
    monkeypatch.setenv(TARGET, "9.0")
    with pytest.raises(NotImplementedError, match="sums of norms have no one order here"):
        cache_update_fused(qkv.reshape(len(q), -1), *rest, norms=norms, backend="deterministic")


def test_seeded_faults_are_caught():
    case = dataclasses.replace(CASES[2], dtype="bfloat16", heads=(4, 2))
    q, k, v, cos, sin, pages, page, offset = case.inputs()
    _, expected = reference.cache_update(q, k, v, cos, sin, pages, page, offset)

    def wrong_by(k=k, v=v, cos=cos, sin=sin, page=page, offset=offset):
        _, new = cache_update(q, k, v, cos, sin, pages, page, offset)
        rows = zip(written_rows(new, *slots), written_rows(expected, *slots))
        return max(error(found, right) for found, right in rows)

    slots = (page, offset)
    tolerance = storage_tolerance("int4", "bfloat16")
    assert wrong_by() < tolerance
    faults = {
        "the angle reversed": wrong_by(sin=-sin),
        "sine and cosine exchanged": wrong_by(cos=sin, sin=cos),
        "neighbours paired": wrong_by(k=k.reshape(12, -1, 2, case.head_dim // 2).swapaxes(2, 3).reshape(k.shape)),
        "an offset too far": wrong_by(offset=(offset + 1) % case.page_size),
        "another page": wrong_by(page=jnp.roll(page, 1)),
        "a dropped row": wrong_by(page=page.at[0].set(case.num_pages)),
        "heads exchanged": wrong_by(v=v[:, ::-1]),
        "K for V": wrong_by(v=k),
    }
    assert not missed(faults, tolerance)


FORMATS = ("f32", "bf16", "f16", "fp8", "int8-g8", "int4-g32")


@pytest.mark.parametrize("name", FORMATS)
def test_donated_pages_are_updated_in_place(name):
    """Puts two layers behind inner jits, attention reading what was just written: no copy and no temporary of a
    pool."""
    fmt = parse_format(name, 64)
    pages = jax.eval_shape(lambda: (allocate(4096, 2, 16, 64, fmt, fmt),) * 2)
    x, rows = jax.ShapeDtypeStruct((8, 4, 64), jnp.float32), jax.ShapeDtypeStruct((8,), jnp.int32)
    wave, table = jax.ShapeDtypeStruct((8, 32), jnp.float32), jax.ShapeDtypeStruct((8, 8), jnp.int32)

    @jax.jit
    def layer(x, pages, wave, table, page, offset):
        q, pages = cache_update(x, x[:, :2], x[:, 2:], wave, wave, pages, page, offset)
        return decode_attention(q, pages, table, offset, scale=1.0), pages

    @partial(jax.jit, donate_argnums=1)
    def step(x, pages, *rest):
        new = []
        for layer_pages in pages:
            x, layer_pages = layer(x, layer_pages, *rest)
            new.append(layer_pages)
        return x, tuple(new)

    memory = step.lower(x, pages, wave, table, rows, rows).compile().memory_analysis()
    sizes = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pages)]
    assert memory.alias_size_in_bytes == sum(sizes)
    assert memory.temp_size_in_bytes < 4096 * 2 * 16 * 64 / 2  # half of the smallest pool


def test_undonated_pages_stay():
    *rest, pages, page, offset = CASES[0].inputs()
    before = jax.tree.map(np.array, pages)
    cache_update(*rest, pages, page, offset)
    assert same_bits(pages, jax.tree.map(jnp.asarray, before))


def test_reference_catches_values_out_of_range():
    *rest, pages, page, offset = CASES[0].inputs()
    with pytest.raises(ValueError, match="row 1 has offset 8, but pages hold 8 tokens"):
        reference.cache_update(*rest, pages, page, offset.at[1].set(8))
    with pytest.raises(ValueError, match="row 3 writes page . offset . again"):
        reference.cache_update(*rest, pages, page.at[3].set(page[2]), offset.at[3].set(offset[2]))


def test_debug_names_the_row_that_writes_where_it_must_not():
    q, k, v, *waves, pages, page, offset = CASES[0].inputs()
    qkv = jnp.concatenate([q, k, v], axis=1).reshape(len(q), -1)
    assert same_bits(
        cache_update(q, k, v, *waves, pages, page, offset, debug=True),
        cache_update(q, k, v, *waves, pages, page, offset),
    )
    for error_type, message, call in (
        (ValueError, "row 1 has offset 8, but pages hold 8 tokens", lambda: (page, offset.at[1].set(8))),
        (
            ValueError,
            "row 3 writes page . offset ., as row 2 does",
            lambda: (page.at[3].set(page[2]), offset.at[3].set(offset[2])),
        ),
    ):
        with pytest.raises(error_type, match=message):
            cache_update(q, k, v, *waves, pages, *call(), debug=True)
        with pytest.raises(error_type, match=message):
            cache_update_fused(qkv, *waves, pages, *call(), debug=True)
    with pytest.raises(NotImplementedError, match="debug=True reads values: call it outside jit"):
        jax.jit(lambda page: cache_update(q, k, v, *waves, pages, page, offset, debug=True))(page)


def test_bad_arguments_say_what_is_wrong():
    q, k, v, cos, sin, pages, page, offset = CASES[1].inputs()

    def call(q=q, k=k, v=v, cos=cos, sin=sin, pages=pages, page=page, offset=offset, backend=None):
        cache_update(q, k, v, cos, sin, pages, page, offset, backend=backend)

    other = allocate(6, 2, 16, 128, parse_format("f32", 128), parse_format("f16", 128))
    for error_type, message, arguments in (
        (ValueError, r"k has shape \(12, 2, 64\), expected \[T, K, D\] with T=12, D=128", {"k": k[..., :64]}),
        (ValueError, r"cos has shape \(12, 32\), expected \[T, D/2\] with T=12, D=128", {"cos": cos[:, :32]}),
        (ValueError, r"offset has shape \(11,\), expected \[T\] with T=12", {"offset": offset[1:]}),
        (ValueError, "page has dtype float32, expected int32", {"page": page.astype(jnp.float32)}),
        (
            ValueError,
            "v has dtype bfloat16, expected float16 as q has",
            {"q": q.astype("float16"), "k": k.astype("float16")},
        ),
        (
            ValueError,
            r"pages.v.values has shape \(6, 2, 16, 128\), expected \(6, 2, 8, 128\)",
            {"pages": KVPages(pages.k, other.v)},
        ),
        (ValueError, r"pages.k.values has shape .* with K=1", {"k": k[:, :1], "v": v[:, :1]}),
        (ValueError, "unknown backend", {"backend": "cpu"}),
        (
            NotImplementedError,
            "dtype float32 is not supported by backend mosaic, which does bfloat16, float16",
            {**dict(zip("qkv", (x.astype("float32") for x in (q, k, v)))), "backend": "mosaic"},
        ),
    ):
        with pytest.raises(error_type, match=message):
            call(**arguments)


def test_bench_cases_trace():
    for case in BENCH_CASES[::3]:
        (num_heads, num_kv_heads), dim = case.heads, case.head_dim
        formats = parse_format(case.k_format, dim), parse_format(case.v_format, dim)
        pages = jax.eval_shape(lambda: allocate(case.num_pages, num_kv_heads, case.page_size, dim, *formats))  # noqa: B023
        q, k = (jax.ShapeDtypeStruct((case.rows, heads, dim), case.dtype) for heads in case.heads)
        wave, slot = (
            jax.ShapeDtypeStruct((case.rows, dim // 2), jnp.float32),
            jax.ShapeDtypeStruct((case.rows,), jnp.int32),
        )
        rotated, new = jax.eval_shape(cache_update, q, k, k, wave, wave, pages, slot, slot)
        assert rotated.shape == (case.rows, num_heads, dim)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), new) == jax.tree.map(lambda x: (x.shape, x.dtype), pages)
