import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.formats.quantized_rows import KINDS, LARGEST, QuantizedRows, dequantize_rows, quantize_rows


def inputs(shape, dtype):
    x = np.random.default_rng(0).standard_normal(shape) * np.exp2(np.arange(shape[-2]) * 3.0 - 9)[:, None]
    return jnp.asarray(x.astype(jnp.dtype(dtype)))


def half_steps(x, rows, kind):
    """Returns the largest error that rounding to nearest may leave, element by element, in float64."""
    scaled = np.abs(x / np.asarray(rows.scales, np.float64)[..., None])
    if kind == "int8":
        return 0.5 * np.asarray(rows.scales, np.float64)[..., None]
    exponent = np.floor(np.log2(np.maximum(scaled, 2.0**-6)))
    return np.exp2(exponent - 4) * np.asarray(rows.scales, np.float64)[..., None]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_error_is_at_most_half_a_step(kind, dtype):
    with jax.enable_x64(dtype == "float64"):
        x = inputs((3, 5, 192), dtype)
        rows = quantize_rows(x, kind)
        assert rows.values.dtype == KINDS[kind]
        assert rows.values.shape == x.shape
        assert rows.scales.dtype == (jnp.float64 if dtype == "float64" else jnp.float32)
        exact = np.asarray(x).astype(np.float64)
        absmax = np.abs(exact).max(-1)
        np.testing.assert_allclose(np.asarray(rows.scales), absmax / LARGEST[kind], rtol=3e-7)
        error = np.abs(np.asarray(dequantize_rows(rows)).astype(np.float64) - exact)
        # XLA on a CPU converts to fp8 through f16, whose own rounding moves the ties by 2^-11 of the value
        slack = 1e-6 * absmax[..., None] if kind == "int8" else 2.0**-11 * np.abs(exact)
        assert np.all(error <= half_steps(exact, rows, kind) + slack)
        assert np.abs(np.asarray(rows.values).astype(np.float64)).max() == LARGEST[kind]


def test_ties_round_to_even_and_the_last_code_is_127():
    x = jnp.asarray([[127.0, -127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5]])
    rows = quantize_rows(x, "int8")
    assert rows.scales.tolist() == [1.0]
    assert rows.values.tolist() == [[127, -127, 0, 2, 2, 0, -2, 126]]


@pytest.mark.parametrize("kind", KINDS)
def test_groups_of_columns_are_rows_of_their_own(kind):
    x = inputs((3, 5, 192), "bfloat16")
    rows, apart = quantize_rows(x, kind, group=64), quantize_rows(x.reshape(3, 5, 3, 64), kind)
    assert rows.scales.shape == (3, 5, 3)
    np.testing.assert_array_equal(rows.scales, apart.scales)
    np.testing.assert_array_equal(np.asarray(rows.values), np.asarray(apart.values.reshape(x.shape)))
    np.testing.assert_array_equal(dequantize_rows(rows), dequantize_rows(apart).reshape(x.shape))
    for wrong in ({"group": 80}, {"group": 64, "per_tensor": True}, {"group": 0}, {"group": 64, "axis": "ranks"}):
        with pytest.raises(ValueError, match=r"group=\d+ of x \[3, 5, 192\], expected a divisor of E"):
            quantize_rows(x, kind, **wrong)


@pytest.mark.parametrize("kind", KINDS)
def test_zero_rows_and_tiny_rows(kind):
    x = jnp.asarray([[0.0, -0.0], [1e-40, 0.0], [1.0, -1.0]])
    rows = quantize_rows(x, kind)
    back = np.asarray(dequantize_rows(rows))
    assert np.all(np.asarray(rows.scales) > 0)
    np.testing.assert_array_equal(back[0], [0, 0])
    np.testing.assert_allclose(back[1:], np.asarray(x)[1:], atol=2.0**-125, rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [None, 0.5])
def test_nan_and_infinity_stay_visible_and_in_their_rows(kind, scale):
    x = jnp.asarray([[1.0, jnp.nan], [1.0, 2.0], [1.0, -jnp.inf]])
    given = None if scale is None else jnp.asarray([scale], jnp.float32)
    back = np.asarray(dequantize_rows(quantize_rows(x, kind, scale=given)))
    assert np.isnan(back[0]).all()
    assert np.isfinite(back[1]).all()
    assert not np.isfinite(back[2]).any()


@pytest.mark.parametrize("kind", KINDS)
def test_rows_do_not_depend_on_their_company_unless_asked(kind):
    x = inputs((7, 64), "bfloat16")
    together, alone = quantize_rows(x, kind), [quantize_rows(row, kind) for row in x]
    for t, rows in enumerate(alone):
        np.testing.assert_array_equal(np.asarray(rows.values), np.asarray(together.values[t]))
        assert rows.scales == together.scales[t]
    shared = quantize_rows(x, kind, per_tensor=True)
    assert shared.scales.shape == (7,)
    assert len(set(shared.scales.tolist())) == 1
    assert shared.scales[0] == jnp.max(together.scales)
    assert quantize_rows(x[:0], kind, per_tensor=True).values.shape == (0, 64)


def test_a_given_scale_is_that_of_all_rows_and_clips_what_is_beyond():
    x, scale = jnp.asarray([[0.0, 0.26, 63.4], [-64.1, -1000.0, 1000.0]]), jnp.asarray([0.5], jnp.float32)
    rows = quantize_rows(x, "int8", scale=scale)
    np.testing.assert_array_equal(rows.values, [[0, 1, 127], [-128, -128, 127]])
    np.testing.assert_array_equal(rows.scales, [0.5, 0.5])
    floats = quantize_rows(x, "fp8", scale=scale)
    np.testing.assert_array_equal(floats.values.astype("float32"), [[0, 0.5, 128], [-128, -448, 448]])
    np.testing.assert_array_equal(quantize_rows(x[1], "fp8", scale=scale).values, floats.values[1])
    with pytest.raises(ValueError, match=r"scale has shape \(2,\) and per_tensor=False, expected one scale"):
        quantize_rows(x, "int8", scale=jnp.ones(2))
    with pytest.raises(ValueError, match=r"per_tensor=True, expected one scale or per_tensor"):
        quantize_rows(x, "int8", scale=scale, per_tensor=True)


def test_is_a_pytree_and_casts():
    rows = jax.jit(lambda x: quantize_rows(x, "int8"))(inputs((4, 32), "float32"))
    assert isinstance(rows, QuantizedRows)
    assert dequantize_rows(rows, jnp.bfloat16).dtype == jnp.bfloat16
    assert jax.tree.map(lambda a: a[:2], rows).values.shape == (2, 32)


@pytest.mark.parametrize(
    ("x", "kind", "message"),
    [
        (jnp.zeros((2, 4)), "int4", "unknown kind of quantized rows 'int4'; kinds: int8, fp8"),
        (jnp.zeros((2, 4), jnp.int32), "int8", r"x is int32\[2, 4\], expected floating point"),
        (jnp.zeros((2, 0)), "int8", "E of at least 1"),
        (jnp.zeros(()), "fp8", "E of at least 1"),
    ],
)
def test_bad_arguments(x, kind, message):
    with pytest.raises(ValueError, match=message):
        quantize_rows(x, kind)
