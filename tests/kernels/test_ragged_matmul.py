"""Products of groups of rows, each with a weight of its own."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.formats.quantized_rows import QuantizedRows, dequantize_rows, quantize_rows
from pallas_kernels.formats.quantized_weights import decode, encode
from pallas_kernels.formats.weight_formats import parse_weight_format
from pallas_kernels.ragged_matmul import ragged_matmul, reference, xla
from tests.kernels.helpers import TOLERANCE, error

pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st

X, N, K, M = 4, 24, 64, 70
run = jax.jit(ragged_matmul, static_argnames=("out_dtype", "backend"))


def inputs(dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=(M, K)), dtype), jnp.asarray(rng.normal(size=(X, N, K)) / K**0.5, dtype)


def sizes_of(*sizes):
    return jnp.asarray(sizes, jnp.int32)


@given(st.lists(st.integers(0, 40), min_size=X, max_size=X).filter(lambda sizes: sum(sizes) <= M))
@settings(max_examples=40)
def test_any_sizes_give_the_formula_and_read_nothing_else(sizes):
    x, w = inputs()
    used = np.asarray(sizes) > 0
    x = x.at[sum(sizes) :].set(jnp.nan)
    poisoned = jnp.where(jnp.asarray(used)[:, None, None], w, jnp.nan)
    got = run(x, poisoned.reshape(X * N, K), sizes_of(*sizes))
    assert error(got, np.nan_to_num(reference.ragged_matmul(np.nan_to_num(x), w, sizes))) < TOLERANCE["float32"]


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_other_dtypes_are_summed_wide_and_rounded_once(dtype):
    with jax.enable_x64(dtype == "float64"):
        x, w = inputs(dtype)
        sizes = sizes_of(3, 0, 33, 20)
        got = run(x, w.reshape(X * N, K), sizes)
        assert got.dtype == x.dtype
        assert error(got, reference.ragged_matmul(x, w, sizes)) < TOLERANCE[dtype]


def test_bits_of_a_row_do_not_depend_on_its_company():
    x, w = inputs("bfloat16")
    flat, rows = w.reshape(X * N, K), []
    for sizes in (sizes_of(40, 10, 10, 10), sizes_of(17, 1, 0, 0), sizes_of(5, 0, 0, 60)):
        rows.append(np.asarray(run(x, flat, sizes, out_dtype="float32"))[:5])
    assert (rows[0] == rows[1]).all()
    assert (rows[0] == rows[2]).all()


@pytest.mark.parametrize("name", ["w8a16", "w4a16-g32", "nf4-dq", "mxfp4-weight"])
def test_weights_of_any_format_are_multiplied_as_they_are_decoded(name):
    x, w = inputs()
    codes = encode(w.reshape(X * N, K), parse_weight_format(name))
    sizes = sizes_of(3, 0, 33, 20)
    want = reference.ragged_matmul(x, np.asarray(decode(codes)).reshape(w.shape), sizes)
    assert error(run(x, codes, sizes), want) < 2e-6


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_rows_of_codes(kind):
    x, w = inputs()
    codes = encode(w.reshape(X * N, K), parse_weight_format({"int8": "w8a8", "fp8": "fp8"}[kind]))
    rows, sizes = quantize_rows(x, kind), sizes_of(3, 0, 33, 20)
    stood_for = np.asarray(rows.values, np.float64) * np.asarray(rows.scales, np.float64)[:, None]
    want = reference.ragged_matmul(stood_for, np.asarray(decode(codes)).reshape(w.shape), sizes)
    assert error(run(rows, codes, sizes, out_dtype="float32"), want) < 2e-6
    with pytest.raises(ValueError, match="give out_dtype"):
        ragged_matmul(rows, codes, sizes)


def test_rows_of_codes_in_blocks():
    """Experts of a block and a half, and columns of as many."""
    x, (n, k) = inputs()[0], (192, 200)
    w = jnp.asarray(np.random.default_rng(2).normal(size=(X * n, k)), jnp.float32)
    codes, wide = encode(w, parse_weight_format("fp8-b128")), jnp.pad(jnp.tile(x, 4)[:, :k], ((0, 0), (0, 56)))
    rows, sizes = quantize_rows(wide, "fp8", group=128), sizes_of(3, 0, 33, 20)
    want = reference.ragged_matmul(dequantize_rows(rows)[:, :k], np.asarray(decode(codes)).reshape(X, n, k), sizes)
    rows = QuantizedRows(rows.values[:, :k], rows.scales)
    assert error(run(rows, codes, sizes, out_dtype="float32"), want) < 2e-6


def test_gradients_are_products_too():
    x, w = inputs()
    sizes, g = sizes_of(3, 0, 33, 20), jnp.asarray(np.random.default_rng(1).normal(size=(M, N)), jnp.float32)
    dx, dw, _ = jax.vjp(partial(run), x, w.reshape(X * N, K), sizes)[1](g)
    assert error(dx, reference.ragged_matmul(g, np.swapaxes(w, 1, 2), sizes)) < TOLERANCE["float32"]
    starts = np.cumsum([0, *np.asarray(sizes)])
    wide = [np.asarray(each, np.float64) for each in (g, x)]
    want = np.stack([wide[0][a:b].T @ wide[1][a:b] for a, b in zip(starts[:-1], starts[1:], strict=True)])
    assert error(dw.reshape(X, -1), want.reshape(X, -1)) < TOLERANCE["float32"]


FAULTS = {
    "a group's rows begin one late": lambda tiles: tiles._replace(rows=jnp.minimum(tiles.rows + 1, M)),
    "two groups are swapped": lambda tiles: tiles._replace(group=tiles.group ^ 1),
    "a tile is dropped": lambda tiles: tiles._replace(rows=tiles.rows.at[0].set(M)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_caught(monkeypatch, fault):
    x, w = inputs()
    sizes, cut = sizes_of(3, 5, 33, 20), xla.cut
    monkeypatch.setattr(xla, "cut", lambda *args: FAULTS[fault](cut(*args)))
    got = xla.ragged_matmul.__wrapped__(x, w.reshape(X * N, K), sizes, "float32")
    assert error(got, reference.ragged_matmul(x, w, sizes)) > 0.01


def test_what_does_not_fit_is_refused():
    x, w = inputs()
    with pytest.raises(ValueError, match=r"expected \[M, K\], \[X N, K\] and \[X\]"):
        ragged_matmul(x, w.reshape(X * N, K)[:-1], sizes_of(1, 2, 3, 4))
    with pytest.raises(ValueError, match="sizes has dtype int8"):
        ragged_matmul(x, w.reshape(X * N, K), sizes_of(1, 2, 3, 4).astype(jnp.int8))
    codes = encode(w.reshape(X * N, K), parse_weight_format("w8a16"))
    with pytest.raises(NotImplementedError, match="mosaic"):
        ragged_matmul(x, codes, sizes_of(1, 2, 3, 4), backend="mosaic")
