import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.rounding import round_to


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_rounds_as_a_cast_does_and_stays_rounded(dtype):
    """Magnitudes from below the smallest to above the largest that each type holds, ties among them."""
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
