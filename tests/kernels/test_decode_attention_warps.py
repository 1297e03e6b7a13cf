"""The products that single warps make of K and V as stored, thread by thread, against the formula."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.decode_attention import warp_results_sm90, warps_sm90
from pallas_kernels.decode_attention.config import Config
from pallas_kernels.decode_attention.storage_sm90 import storage
from pallas_kernels.kv_pages import Pages, decode, encode, parse_format
from tests.kernels.helpers import error
from tests.kernels.inlined.now import inlined_now

FORMATS = [
    ("fp8", 64), ("fp8", 128), ("fp8", 256), ("int8-g8", 64), ("int8-g8", 128), ("int8-g32", 128), ("int8-g128", 128),
    ("int8-g64", 256), ("int8-g256", 256), ("int4-g8", 64), ("int4-g8", 128), ("int4-g16", 128), ("int4-g32", 128),
    ("int4-g128", 128), ("int4-g64", 64), ("int4-g8", 256), ("int4-g128", 256),
]  # fmt: skip


def stored_tile(name: str, head_dim: int, page_size: int = 16):
    """How 16 tokens of each of four heads are stored, the tile and its scales as they are in shared memory, and the
    values, a head's after the other's."""
    rng = np.random.default_rng(0)
    fmt = parse_format(name, head_dim)
    values, scales = encode(jnp.asarray(rng.normal(size=(64, head_dim)), jnp.float32), fmt)
    pool = Pages(jnp.zeros((1, 1, page_size, values.shape[-1]), values.dtype), scales, fmt)
    stored = storage(pool, jnp.float16, head_dim, Config(), False, True)
    exact = np.asarray(decode(values, scales, fmt, jnp.float32), np.float64)
    if scales is None:
        return stored, values, None, exact
    return stored, values, np.asarray(scales, np.float16).reshape(-1).copy(), exact


def of_rows(stored):
    """The units of sums [4 * D, 1]."""
    low, high = warps_sm90.units(stored)
    return np.where(np.arange(4 * stored.head_dim) % 16 < 8, low, high).astype(np.float32)[:, None]


def of_heads(exact, queries):
    """K Q^T [64, columns] of each head's tokens and its own queries [4 * columns, D]."""
    of_warp = exact.reshape(4, 16, -1), queries.astype(np.float64).reshape(4, -1, exact.shape[1])
    return np.einsum("wtd,wcd->wtc", *of_warp).reshape(64, -1)


@pytest.mark.parametrize("columns", [8, 16])
@pytest.mark.parametrize(("name", "head_dim"), FORMATS)
def test_logits_of_each_thread(monkeypatch, name, head_dim, columns):
    stored, values, scales, exact = stored_tile(name, head_dim)
    queries = np.random.default_rng(1).normal(size=(4 * columns, head_dim)).astype(np.float16)
    with inlined_now(monkeypatch, warps_sm90, warp_results_sm90):
        loaded = warps_sm90.load_queries(stored, queries, columns)
        logits = warps_sm90.dot_k(stored, (values, scales), np.int32(0), loaded)
    found = logits.astype(np.float64) * stored.unit * np.repeat(loaded.factors[::8], 16, axis=0)
    assert error(found, of_heads(exact, queries)) < 7e-4


@pytest.mark.parametrize(("columns", "count"), [(8, 1), (8, 5), (16, 11)])
def test_missing_queries_are_the_last_again(monkeypatch, columns, count):
    stored, *_ = stored_tile("int8-g8", 64)
    queries = np.random.default_rng(1).normal(size=(4, count, 64)).astype(np.float16)
    every = np.concatenate([queries, np.repeat(queries[:, -1:], columns - count, axis=1)], axis=1)
    with inlined_now(monkeypatch, warps_sm90, warp_results_sm90):
        some, whole = (warps_sm90.load_queries(stored, x.reshape(-1, 64), columns).values for x in (queries, every))
    assert np.array_equal(some, whole)


@pytest.mark.parametrize("columns", [8, 16])
@pytest.mark.parametrize(("name", "head_dim"), FORMATS[::3])
def test_queries_of_bfloat16_fit_float16(monkeypatch, name, head_dim, columns):
    """Their range is that of float32: each is divided by a power of two, and none is lost but far below the rest."""
    stored, values, scales, exact = stored_tile(name, head_dim)
    sizes = 2.0 ** np.arange(-70, 70, 140 / (4 * columns))
    queries = np.random.default_rng(1).normal(size=(4 * columns, head_dim)) * sizes[:, None]
    queries[3], queries[4, 1:] = 0, 0
    queries = queries.astype(jnp.bfloat16)
    with inlined_now(monkeypatch, warps_sm90, warp_results_sm90):
        loaded = warps_sm90.load_queries(stored, queries, columns)
        logits = warps_sm90.dot_k(stored, (values, scales), np.int32(0), loaded)
    factors = loaded.factors.reshape(4, 8, columns)
    assert np.array_equal(factors, np.repeat(factors[:, :1], 8, axis=1))
    largest = np.abs(queries.astype(np.float64)).max(axis=1).reshape(4, columns)
    assert np.array_equal(factors[:, 0][largest > 0], 2.0 ** np.floor(np.log2(largest[largest > 0])))
    found = logits.astype(np.float64) * stored.unit * np.repeat(factors[:, 0], 16, axis=0)
    assert error(found.T, of_heads(exact, queries).T) < 7e-4  # of each query; that of zeros is exact


def test_a_query_of_the_largest_numbers_is_right_and_one_that_has_none_harms_no_other(monkeypatch):
    stored, values, scales, exact = stored_tile("int8-g8", 128)
    queries = np.random.default_rng(1).normal(size=(32, 128))
    queries[1] *= 3e38 / np.abs(queries[1]).max()
    queries[2, 5], queries[4, 7] = np.inf, np.nan
    queries = queries.astype(jnp.bfloat16)
    with inlined_now(monkeypatch, warps_sm90, warp_results_sm90):
        loaded = warps_sm90.load_queries(stored, queries, 8)
        logits = warps_sm90.dot_k(stored, (values, scales), np.int32(0), loaded)
    right, factors = [0, 1, 3, 5, 6, 7], loaded.factors
    found = logits.astype(np.float64) * np.repeat(factors[::8], 16, axis=0)
    assert np.isfinite(factors).all()
    assert (factors >= np.finfo(np.float32).tiny).all()
    with np.errstate(invalid="ignore"):
        expected = of_heads(exact, queries)
    assert error(found.T[right], expected.T[right]) < 7e-4
    assert not np.isfinite(found[:16, [2, 4]]).any()
    assert error(found[16:], expected[16:]) < 7e-4


@pytest.mark.parametrize("columns", [8, 16])
@pytest.mark.parametrize(("name", "head_dim"), FORMATS)
def test_sums_of_each_warp_without_hidden_tokens(monkeypatch, name, head_dim, columns):
    stored, values, scales, exact = stored_tile(name, head_dim)
    rng = np.random.default_rng(2)
    low, high, slot = 3, 13, 1
    hidden = np.flatnonzero((np.arange(64) % 16 < low) | (np.arange(64) % 16 >= high))
    if scales is None:
        values = np.asarray(values).copy()
        values[hidden] = 0x7F  # NaN
    else:
        scales.reshape(64, -1)[hidden] = np.nan
    weights = rng.uniform(0, 1, (64, columns)).astype(np.float16)
    weights[hidden] = 0
    before, factor, top, total = (rng.uniform(1, 2, (4, columns)).astype(np.float32) for _ in range(4))

    def by_warp(x):
        return np.repeat(x, 8, axis=0)

    acc = before[np.arange(4 * head_dim) // 16 % 4] / of_rows(stored)  # of all dims the same, wherever they are
    with inlined_now(monkeypatch, warps_sm90, warp_results_sm90):
        bounds = np.int32(low), np.int32(high)
        operands = warps_sm90.convert_v(stored, (values, scales), np.int32(0), bounds)
        acc = warps_sm90.dot_v(stored, operands, scales, bounds, weights, acc.astype(np.float32), by_warp(factor))
        sums = np.full((8, 3, columns, head_dim + 4), np.nan, np.float32)
        warp_results_sm90.store_sums(stored, acc, by_warp(top), by_warp(total), sums, np.int32(1), np.int32(slot))
    exact[hidden] = 0
    expected = np.einsum("wtc,wtd->wcd", weights.reshape(4, 16, columns).astype(np.float64), exact.reshape(4, 16, -1))
    assert error(sums[4:, slot, :, :head_dim], (before * factor)[..., None] + expected) < 7e-4
    assert np.array_equal(sums[4:, slot, :, head_dim], top)
    assert np.array_equal(sums[4:, slot, :, head_dim + 1], total)
    assert np.isnan(np.delete(sums.reshape(24, -1), np.arange(4, 8) * 3 + slot, axis=0)).all()  # and nothing else


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
    ("name", "head_dim", "columns", "queries", "heads"),
    [("int8-g8", 128, 8, 1, 1), ("int4-g32", 64, 8, 8, 8), ("fp8", 64, 16, 12, 3), ("int8-g256", 256, 8, 5, 5)],
)
def test_results_go_to_their_rows_and_no_others(monkeypatch, name, head_dim, columns, queries, heads, dtype):
    stored, *_ = stored_tile(name, head_dim)
    rng = np.random.default_rng(5)
    sums = rng.normal(size=(4, columns, head_dim)).astype(np.float32)
    factor = rng.uniform(1, 2, (4, columns)).astype(np.float32)
    there, apart, firsts = 3, 23, [2, 11, 28, 40]
    target = np.full((100, head_dim), np.nan, dtype)
    with inlined_now(monkeypatch, warps_sm90, warp_results_sm90):
        numbers = np.arange(sums.size, dtype=np.float32).reshape(-1, columns) / of_rows(stored)
        places = np.full((4, 1, columns, head_dim + 4), np.nan, np.float32)  # where each element is: by its own number
        zeros = np.zeros((32, columns), np.float32)
        warp_results_sm90.store_sums(stored, numbers, zeros, zeros, places, np.int32(0), np.int32(0))
        acc = np.zeros(sums.size, np.float32)
        acc[places[:, 0, :, :head_dim].astype(int)] = sums
        acc = acc.reshape(-1, columns) / of_rows(stored)
        rows = warp_results_sm90.Rows(queries, heads, apart)
        warp_results_sm90.store_results(
            stored, acc, np.repeat(factor, 8, axis=0), target,
            [np.int32(x) for x in firsts], np.int32(there), rows,
        )  # fmt: skip
    places = [first + i % heads + i // heads * apart for first in firsts[:there] for i in range(queries)]
    expected = (sums * factor[..., None])[:there, :queries].reshape(-1, head_dim).astype(dtype)
    assert np.array_equal(target[places], expected)
    assert np.isnan(np.delete(target, places, axis=0).astype(np.float32)).all()


def test_reductions_within_warps(monkeypatch):
    x = np.random.default_rng(3).normal(size=(64, 16)).astype(np.float32)
    with inlined_now(monkeypatch, warps_sm90, warp_results_sm90):
        largest = warps_sm90.reduce_warp(x, "max")
        spread = warps_sm90.spread(largest, 2)
    expected = x.reshape(4, 16, 16).max(axis=1)
    assert np.array_equal(largest.reshape(4, 8, 16), np.repeat(expected[:, None], 8, axis=1))
    assert np.array_equal(spread, np.tile(np.repeat(expected, 16, axis=0), (2, 1)))
