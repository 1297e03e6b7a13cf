import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.formats.rounding import round_to, to_float8


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_rounds_as_a_cast_does_and_stays_rounded(dtype):
    """Tries magnitudes from below the smallest to above the largest that each type holds, ties among them."""
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(4096) * np.exp2(rng.uniform(-32, 20, 4096))).astype(np.float32)
    x[:8] = 0.0, -0.0, np.inf, -np.inf, 65504, 65519.99, 2.0**-24, 2.0**-25
    with np.errstate(over="ignore"):
        x[8:512] = x[8:512].astype(jnp.dtype(dtype)).astype(np.float32) * np.float32(1 + 2.0**-9)
        expected = x.astype(jnp.dtype(dtype))
    rounded, back = jax.jit(lambda x: (round_to(x, dtype), round_to(x, dtype).astype(jnp.float32)))(x)
    np.testing.assert_array_equal(np.asarray(rounded), expected)
    np.testing.assert_array_equal(np.asarray(back), expected.astype(np.float32))


def test_float64_and_nan():
    assert jnp.isnan(round_to(jnp.float32(jnp.nan), "float16"))
    with jax.enable_x64(True):
        x = jnp.asarray([1 + 2.0**-30, 2.0**-100, 1e300])
        np.testing.assert_array_equal(np.asarray(round_to(x, "float32")), np.float32([1, 2.0**-100, np.inf]))
        np.testing.assert_array_equal(np.asarray(round_to(x, "float64")), np.asarray(x))


def floats_and_middles(dtype):
    """Returns all numbers of that type of 8 bits, the middles of two, and the float32 beside these. ml_dtypes rounds
    float64 to float32 first."""
    found = np.arange(256).astype(np.uint8).view(jnp.dtype(dtype)).astype(np.float32)
    found = np.unique(found[np.isfinite(found)])
    middles = (found[1:] + found[:-1]) / 2
    beside = [np.nextafter(middles, middles * np.float32(k)) for k in (0, 2)]
    return np.concatenate([found, np.float32([-0.0]), middles, *beside])


@pytest.mark.parametrize("x_dtype", ["float32", "float64"])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_eight_bits_as_a_cast_rounds(dtype, x_dtype):
    with jax.enable_x64(x_dtype == "float64"):
        x = floats_and_middles(dtype).astype(x_dtype)
        got, back = jax.jit(lambda x: (to_float8(x, dtype), to_float8(x, dtype).astype(x_dtype)))(x)
        want = x.astype(jnp.dtype(dtype))
        np.testing.assert_array_equal(np.asarray(got).view(np.uint8), want.view(np.uint8))
        np.testing.assert_array_equal(np.asarray(back), want.astype(x_dtype))
        assert jnp.isnan(to_float8(jnp.asarray(jnp.nan, x_dtype), dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_eight_bits_stay_rounded_on_a_device(dtype):
    x = floats_and_middles(dtype)
    back = jax.jit(lambda x: to_float8(x, dtype).astype("float32"))(x)
    np.testing.assert_array_equal(np.asarray(back), x.astype(jnp.dtype(dtype)).astype(np.float32))
