"""Checks the products that single warps make of K and V as stored, thread by thread, against the formula."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.decode_attention import warp_layouts_sm90, warp_queries_sm90, warp_stores_sm90, warps_sm90
from pallas_kernels.decode_attention.config import Config
from pallas_kernels.decode_attention.storage_sm90 import storage
from pallas_kernels.formats import kv_formats
from pallas_kernels.formats.hadamard import hadamard
from pallas_kernels.formats.kv_formats import parse_format
from pallas_kernels.formats.kv_pages import Pages
from tests.kernels.helpers import error
from tests.kernels.inlined.now import inlined_now

encode = jax.jit(kv_formats.encode, static_argnums=1)
decode = jax.jit(kv_formats.decode, static_argnums=(2, 3))
FORMATS = [
    ("fp8", 64), ("fp8", 128), ("fp8", 256), ("int8-g8", 64), ("int8-g8", 128), ("int8-g32", 128), ("int8-g128", 128),
    ("int8-g64", 256), ("int8-g256", 256), ("int4-g8", 64), ("int4-g8", 128), ("int4-g16", 128), ("int4-g32", 128),
    ("int4-g128", 128), ("int4-g64", 64), ("int4-g8", 256), ("int4-g128", 256), ("int4-g128-zp", 128),
    ("int8-g64-zp", 64), ("int4-g32-zp", 128), ("int8-g8-zp", 128), ("int4-g256-zp", 256), ("int8-g32-zp-h", 128),
    ("int4-g64-zp-h", 64), ("fp8-h", 128), ("int4-g32-h", 128),
]  # fmt: skip


def stored_tile(name: str, head_dim: int, page_size: int = 16):
    """Returns how 64 tokens are stored, the tile and its scales as they are in shared memory, and the values."""
    rng = np.random.default_rng(0)
    fmt = parse_format(name, head_dim)
    values, scales = encode(jnp.asarray(rng.normal(size=(64, head_dim)), jnp.float32), fmt)
    pool = Pages(jnp.zeros((1, 1, page_size, values.shape[-1]), values.dtype), scales, fmt)
    stored = storage(pool, jnp.float16, head_dim, Config(), False, True)
    exact = np.asarray(decode(values, scales, dataclasses.replace(fmt, hadamard=False), jnp.float32), np.float64)
    if scales is None:
        return stored, values, None, exact
    return stored, values, np.asarray(scales, np.float16).reshape(stored.parts, stored.scales).copy(), exact


def rotated(stored, queries) -> np.ndarray:
    queries = queries.astype(np.float64)
    return queries @ hadamard(stored.head_dim) if stored.format.hadamard else queries


@pytest.mark.parametrize("columns", [8, 16])
@pytest.mark.parametrize(("name", "head_dim"), FORMATS)
def test_logits_of_each_thread(monkeypatch, name, head_dim, columns):
    stored, values, scales, exact = stored_tile(name, head_dim)
    queries = np.random.default_rng(1).normal(size=(columns, head_dim)).astype(np.float16)
    with inlined_now(monkeypatch, warp_queries_sm90, warps_sm90):
        ordered, factors, sums = warp_queries_sm90.load_queries(stored, queries)
        logits = warps_sm90.dot_k(stored, (values, scales), np.int32(0), ordered, sums)
    assert (factors is None) == (not stored.format.hadamard)
    assert (sums is None) == (not stored.format.zero_point or stored.groups > 1)
    queries = rotated(stored, queries)
    logits = logits if factors is None else logits * factors[0]
    assert error(logits, exact @ queries.T) < 7e-4


@pytest.mark.parametrize("columns", [8, 16])
@pytest.mark.parametrize(("name", "head_dim"), FORMATS[::3])
def test_queries_of_bfloat16_fit_float16(monkeypatch, name, head_dim, columns):
    """Divides each by a power of two, as their range is float32's: only what is far below the rest loses bits."""
    stored, values, scales, exact = stored_tile(name, head_dim)
    sizes = 2.0 ** np.arange(-70, 70, 140 / columns)
    queries = np.random.default_rng(1).normal(size=(columns, head_dim)) * sizes[:, None]
    queries[3], queries[4, 1:] = 0, 0
    queries = queries.astype(jnp.bfloat16)
    with inlined_now(monkeypatch, warp_queries_sm90, warps_sm90):
        ordered, factors, sums = warp_queries_sm90.load_queries(stored, queries)
        logits = warps_sm90.dot_k(stored, (values, scales), np.int32(0), ordered, sums)
    assert np.array_equal(factors, np.tile(factors[:1], (32, 1)))
    queries = rotated(stored, queries)
    largest = np.abs(queries).max(axis=1)
    assert np.array_equal(factors[0, largest > 0], 2.0 ** np.floor(np.log2(largest[largest > 0])))
    found = logits.astype(np.float64) * factors[0]
    assert error(found.T, queries @ exact.T) < 7e-4  # of each query; that of zeros is exact


def test_a_query_of_the_largest_numbers_is_right_and_one_that_has_none_harms_no_other(monkeypatch):
    stored, values, scales, exact = stored_tile("int8-g8", 128)
    queries = np.random.default_rng(1).normal(size=(8, 128))
    queries[1] *= 3e38 / np.abs(queries[1]).max()
    queries[2, 5], queries[4, 7] = np.inf, np.nan
    queries = queries.astype(jnp.bfloat16)
    with inlined_now(monkeypatch, warp_queries_sm90, warps_sm90):
        ordered, factors, sums = warp_queries_sm90.load_queries(stored, queries)
        logits = warps_sm90.dot_k(stored, (values, scales), np.int32(0), ordered, sums)
    right = [0, 1, 3, 5, 6, 7]
    found = logits.astype(np.float64) * factors[0]
    assert np.isfinite(factors).all()
    assert (factors >= np.finfo(np.float32).tiny).all()
    assert error(found.T[right], queries[right].astype(np.float64) @ exact.T) < 7e-4
    assert not np.isfinite(found[:, [2, 4]]).any()


@pytest.mark.parametrize(("columns", "queries", "head_dim"), [(8, 1, 128), (8, 8, 64), (16, 11, 128), (8, 5, 256)])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_rows_of_a_result_and_no_others_are_stored(monkeypatch, columns, queries, head_dim, dtype):
    x = np.random.default_rng(5).normal(size=(columns, head_dim)).astype(dtype)
    target = np.full((40, head_dim), np.nan, dtype)
    with inlined_now(monkeypatch, warp_stores_sm90):
        warp_stores_sm90.store_rows(x, target, np.int32(7), queries, queries, 100)
    assert np.array_equal(target[7 : 7 + queries], x[:queries])
    assert np.isnan(np.delete(target, np.s_[7 : 7 + queries], axis=0).astype(np.float32)).all()


def test_rows_of_a_segment_are_stored_apart(monkeypatch):
    x = np.random.default_rng(5).normal(size=(16, 64)).astype(jnp.bfloat16)
    target = np.full((60, 64), np.nan, jnp.bfloat16)
    with inlined_now(monkeypatch, warp_stores_sm90):
        warp_stores_sm90.store_rows(x, target, np.int32(5), 12, 3, 13)
    places = [5 + 13 * i + head for i in range(4) for head in range(3)]
    assert np.array_equal(target[places], x[:12])
    assert np.isnan(np.delete(target, places, axis=0).astype(np.float32)).all()


@pytest.mark.parametrize("columns", [8, 16])
@pytest.mark.parametrize(("name", "head_dim"), FORMATS)
def test_sums_of_each_warp_without_hidden_tokens(monkeypatch, name, head_dim, columns):
    stored, values, scales, exact = stored_tile(name, head_dim)
    rng = np.random.default_rng(2)
    low, high = 5, 58
    hidden = np.r_[0:low, high:64]
    if scales is None:
        values = np.asarray(values).copy()
        values[hidden] = 0x7F  # NaN
    else:
        for token in hidden:
            part, at = divmod(token, stored.tokens)
            scales[part, at * stored.numbers : (at + 1) * stored.numbers] = np.nan
    weights = rng.uniform(0, 1, (64, columns)).astype(np.float16)
    weights[hidden] = 0
    before = rng.normal(size=(4, columns, head_dim)).astype(np.float32)
    factor, top, total = (rng.uniform(1, 2, (4, columns)).astype(np.float32) for _ in range(3))

    def by_warp(x):
        return np.repeat(x, 8, axis=0)

    with inlined_now(monkeypatch, warps_sm90, warp_stores_sm90):
        zeros = np.zeros((4 * head_dim, columns), np.float32)
        bounds = np.int32(low), np.int32(high)
        one = np.ones((32, columns), np.float32)
        # Where each element of the sums is, by storing its own number.
        numbers = np.arange(zeros.size, dtype=np.float32).reshape(zeros.shape)
        places = np.full((4, columns, head_dim + 4), np.nan, np.float32)
        warp_stores_sm90.store_sums(stored, numbers, by_warp(top), by_warp(total), columns, places)
        assert np.array_equal(np.sort(places[..., :head_dim].reshape(-1)), numbers.reshape(-1))
        some = np.full_like(places, np.nan)
        warp_stores_sm90.store_sums(stored, numbers, by_warp(top), by_warp(total), 3, some)
        assert np.array_equal(some[:, :3, : head_dim + 2], places[:, :3, : head_dim + 2])
        assert np.isnan(some[:, 8:]).all()  # what no lane has beside those
        acc = zeros.copy()
        acc.reshape(-1)[places[..., :head_dim].astype(int).reshape(-1)] = before.reshape(-1)
        v = values, scales
        operands = warps_sm90.convert_v(stored, v, np.int32(0), bounds), warps_sm90.weighted(stored, v, bounds, weights)
        acc = warps_sm90.dot_v(*operands, acc, by_warp(factor))
        if stored.by_factor and stored.format.zero_point:
            zeros_of = warps_sm90.zeros_of(stored, v, bounds, weights)
            assert not zeros_of[hidden].any()
            acc += np.tile(zeros_of.reshape(4, 16, columns).sum(axis=1).repeat(16, axis=0), (head_dim // 16, 1))
        sums = np.full((4, columns, head_dim + 4), np.nan, np.float32)
        warp_stores_sm90.store_sums(stored, acc, by_warp(top), by_warp(total), columns, sums)
        assert np.array_equal(warps_sm90.dot_v(*operands, zeros, one), warps_sm90.dot_v(*operands, zeros, one))
    exact[hidden] = 0
    expected = np.einsum("wtc,wtd->wcd", weights.reshape(4, 16, columns).astype(np.float64), exact.reshape(4, 16, -1))
    assert error(sums[..., :head_dim], before * factor[..., None] + expected) < 7e-4
    assert np.array_equal(sums[..., head_dim], top)
    assert np.array_equal(sums[..., head_dim + 1], total)


def test_reductions_within_warps(monkeypatch):
    x = np.random.default_rng(3).normal(size=(64, 16)).astype(np.float32)
    with inlined_now(monkeypatch, warp_layouts_sm90):
        largest = warp_layouts_sm90.reduce_warp(x, "max")
        spread = warp_layouts_sm90.spread(largest, 2)
    expected = x.reshape(4, 16, 16).max(axis=1)
    assert np.array_equal(largest.reshape(4, 8, 16), np.repeat(expected[:, None], 8, axis=1))
    assert np.array_equal(spread, np.tile(np.repeat(expected, 16, axis=0), (2, 1)))
