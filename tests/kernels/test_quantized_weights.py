"""Checks formats of weights: what is stored stands for what was given, to half a step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.formats import quantized_weights
from pallas_kernels.formats.quantized_weights import group_scales
from pallas_kernels.formats.weight_codes import pack4, unpack4
from pallas_kernels.formats.weight_formats import TABLES, check_shape, parse_weight_format

pytest.importorskip("hypothesis")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

encode = jax.jit(quantized_weights.encode, static_argnums=1)
decode = jax.jit(quantized_weights.decode, static_argnums=1)
take_rows = jax.jit(quantized_weights.take_rows, static_argnums=2)
FORMATS = (
    "w8a8", "w8a8-tensor", "w8a16", "w8a16-g32", "w8a16-g8-zp", "w4a16-g32", "w4a16-g64-zp", "w4a16-g128", "nf4",
    "nf4-g32", "nf4-dq", "fp4", "fp4-g32", "fp4-dq", "fp8", "fp8-weight", "uint8-zp", "llm-int8", "llm-int8-t4.5",
    "llm-int8-t1e-07", "iq4nl", "iq4nl-g32-dq", "fp8-b128",
)  # fmt: skip
ENCODED = (  # one of those whose codes and scales are made alike
    "w8a8", "uint8-zp", "w8a16-g32", "w8a16-g8-zp", "w4a16-g32", "w4a16-g64-zp", "nf4", "nf4-dq", "fp4", "fp8",
    "fp8-b128",
)  # fmt: skip


def weight(shape, seed=0, dtype=np.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape).astype(dtype) * 0.02)


def steps(w):
    """Returns [N, K], the largest distance of neighbouring codes around each value, in float64 numpy."""
    N, K = w.shape
    scales = np.asarray(group_scales(w), np.float64)
    scales = scales[:N, None] if scales.ndim == 1 else np.repeat(scales.T[:N], K // scales.shape[0], axis=1)
    if w.format.codes in TABLES:
        return scales * np.diff(np.unique(TABLES[w.format.codes])).max()
    if w.format.codes == "fp8":
        values = np.asarray(w.values.astype(jnp.float32), np.float64)[:N, :K]
        return scales * np.maximum(2.0 ** (np.floor(np.log2(np.maximum(np.abs(values), 2.0**-6))) - 3), 2.0**-9)
    return scales


@pytest.mark.parametrize("name", FORMATS)
def test_names_are_read_back(name):
    assert parse_weight_format(name).name == name


@pytest.mark.parametrize(
    "name",
    ["w8", "w4a16", "w4a16-g12", "w4a16-g0", "w4a16-g32-dq", "nf4-g64-zp", "fp8-g32", "fp8-b64", "llm-int8-t0", ""],
)
def test_unknown_names_are_refused(name):
    with pytest.raises(ValueError, match="unknown weight format"):
        parse_weight_format(name)


@pytest.mark.parametrize("name", ENCODED)
def test_error_is_half_a_step(name):
    for scale in (1.0, 1e-4, 30.0):
        x = weight((40, 128)) * scale
        w = encode(x, parse_weight_format(name))
        got = np.asarray(decode(w, jnp.float32), np.float64)
        slack = 1.06 if w.format.double_quant else 1.0  # its scales are rounded either way
        # The largest e4m3 step above a value is that of the next binade.
        assert (np.abs(got - np.asarray(x, np.float64)) <= slack * steps(w) * (0.5 + 1e-4) + 1e-9 * scale).all()


@pytest.mark.parametrize("name", ENCODED)
def test_zero_rows_and_groups_stay_zero(name):
    x = weight((40, 128)).at[3].set(0).at[5, :64].set(0)
    got = np.asarray(decode(encode(x, parse_weight_format(name))))
    assert np.isfinite(got).all()
    assert got[4].any()
    assert not got[3].any()
    assert not got[5, :64].any()


@pytest.mark.parametrize("name", ["w8a8", "fp8-weight", "uint8-zp"])
def test_sizes_are_padded_once(name):
    x = weight((33, 50))
    w = encode(x, parse_weight_format(name))
    assert w.values.shape == (64, 64)
    assert w.shape == (33, 50)
    assert decode(w).shape == (33, 50)
    error = np.linalg.norm(np.asarray(decode(w) - x)) / np.linalg.norm(np.asarray(x))
    assert error < 0.03


def test_blocks_share_the_scale_of_their_largest_value():
    """Expects 128 x 128 of them, and the last ones as the edges leave them."""
    x = np.array(weight((200, 300)))
    x[150, 290] = 1.0
    w = encode(jnp.asarray(x), parse_weight_format("fp8-b128"))
    assert (w.values.shape, w.scales.shape, w.scales.dtype) == ((224, 384), (3, 224), jnp.float32)
    for g, first in np.ndindex(3, 2):
        rows, columns = slice(128 * first, min(128 * first + 128, 200)), slice(128 * g, 128 * g + 128)
        np.testing.assert_allclose(w.scales[g, rows], np.abs(x[rows, columns]).max() / 448, rtol=1e-6)
    error = np.linalg.norm(np.asarray(decode(w)) - x) / np.linalg.norm(x)
    assert error < 0.03


@pytest.mark.parametrize("name", ENCODED)
def test_taken_rows_are_decoded_rows(name):
    w = encode(weight((40, 128)), parse_weight_format(name))
    rows = jnp.asarray([[0, 39], [7, 7], [45, -3]], jnp.int32)
    assert (np.asarray(take_rows(w, rows, jnp.float32)) == np.asarray(decode(w))[[[0, 39], [7, 7], [39, 0]]]).all()


def test_columns_in_another_order():
    x = weight((32, 128))
    order = jnp.asarray(np.random.default_rng(1).permutation(128), jnp.int32)
    fmt = parse_weight_format("w4a16-g32")
    plain = encode(x[:, order], fmt)
    w = type(plain)(plain.values, plain.scales, None, None, order, plain.shape, fmt)
    assert (np.asarray(decode(w))[:, np.asarray(order)] == np.asarray(decode(plain))).all()


def test_scales_are_never_rounded_down():
    x = weight((64, 256))
    w = encode(x, parse_weight_format("nf4"))
    absmax = np.abs(np.asarray(x, np.float64)).reshape(64, 4, 64).max(-1)
    scales = np.asarray(w.scales, np.float64).T
    assert (scales >= absmax).all()
    assert (scales <= absmax * (1 + 2.0**-9)).all()


@pytest.mark.parametrize("name", ["w8a8", "w4a16-g64-zp", "nf4-dq", "fp8"])
def test_float64_and_bfloat16(name):
    fmt = parse_weight_format(name)
    x = weight((40, 128))
    with jax.enable_x64():
        wide = encode(jnp.asarray(np.asarray(x, np.float64)), fmt)
        assert decode(wide, jnp.float64).dtype == jnp.float64
    narrow = encode(x, fmt)
    same = np.asarray(wide.values.astype(jnp.float32)) == np.asarray(narrow.values.astype(jnp.float32))
    assert same.mean() > 0.99
    assert decode(encode(x.astype(jnp.bfloat16), fmt), jnp.bfloat16).dtype == jnp.bfloat16


@pytest.mark.parametrize("name", TABLES)
def test_codes_of_tables_are_the_nearest(name):
    top = max(TABLES[name])
    x = jnp.asarray(np.linspace(-top, top, 2048, dtype=np.float32).reshape(32, 64)).at[:, 0].set(top)  # scales are one
    got = np.asarray(decode(encode(x, parse_weight_format(name))))
    table = np.asarray(TABLES[name])
    nearest = table[np.abs(np.asarray(x)[..., None] - table).argmin(-1)]
    assert np.abs(got - nearest).max() < 1e-6


@pytest.mark.parametrize(("shape", "name"), [((8, 96), "w4a16-g64"), ((8, 48), "w8a16-g16"), ((0, 32), "w8a8")])
def test_shapes_that_do_not_fit(shape, name):
    with pytest.raises(ValueError, match="cannot"):
        check_shape(shape, parse_weight_format(name))


@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1), st.booleans())
def test_packing_is_exact(seed, signed):
    low = -8 if signed else 0
    codes = np.random.default_rng(seed).integers(low, low + 16, (3, 64)).astype(np.int8)
    assert (np.asarray(unpack4(pack4(jnp.asarray(codes)), signed=signed)) == codes).all()


def test_where_a_packed_code_lies():
    """Expects column 8p + 2c + i as nibble 4i + p of word c."""
    codes = np.arange(32) % 15
    words = np.asarray(pack4(jnp.asarray(codes))).view("<u4")
    for column, code in enumerate(codes):
        p, c, i = column // 8, column % 8 // 2, column % 2
        assert words[c] >> 4 * (4 * i + p) & 15 == code
    with pytest.raises(ValueError, match="10 codes cannot be packed"):
        pack4(jnp.zeros(10, jnp.int8))
