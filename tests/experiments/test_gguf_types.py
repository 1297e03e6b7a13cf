"""llama.cpp's types as quantizers of quant_accuracy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

gguf = pytest.importorskip("gguf")
from experiments import gguf_types  # noqa: E402

W = np.random.default_rng(0).standard_normal((24, 704)).astype(np.float32)  # 704: the last block is filled up
W[0] = 0


def error(got):
    return np.linalg.norm(got - W) / np.linalg.norm(W)


@pytest.mark.parametrize("name", ["q8_0", "q6_k", "q5_0", "q4_k", "q4_0"])
def test_a_type_has_its_bits_and_its_error(name):
    quantizer = getattr(gguf_types, name)
    values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name.upper()]]
    assert quantizer.bits == 8 * size / values
    assert jax.eval_shape(quantizer, jax.ShapeDtypeStruct(W.shape, np.float32)).shape == W.shape
    got = np.asarray(quantizer(jnp.asarray(W)))
    assert not got[0].any()
    step = 2.0 ** (1 - int(name[1]))  # the error of uniform codes over about six deviations of a normal distribution
    assert 0.25 * step < error(got) < 0.75 * step


@pytest.mark.parametrize(("name", "group", "codes"), [("q6_k", 16, 64), ("q4_k", 32, 16)])
def test_the_values_of_a_k_type_lie_on_its_grid(name, group, codes):
    """Each group has few equally spaced values, and rounding them again changes next to nothing."""
    got = np.asarray(getattr(gguf_types, name)(jnp.asarray(W)))
    for values in got[1:5, :512].reshape(-1, group):
        steps = np.diff(np.unique(values))
        units = steps.min() / np.arange(1, 17)  # the nearest two values may lie some codes apart
        whole = np.rint(steps[None] / units[:, None])
        fits = np.abs(steps[None] / units[:, None] - whole).max(axis=1) < 1e-3
        assert (fits & (whole.sum(axis=1) < codes)).any()
    assert np.linalg.norm(np.asarray(getattr(gguf_types, name)(jnp.asarray(got))) - got) < 0.03 * np.linalg.norm(W)


def test_the_search_beats_the_range_of_a_group():
    """A scale of float32 for each group's range has finer scales than Q4_K, and a larger error."""
    x = W[:, :512].reshape(24, -1, 32)
    low = x.min(axis=-1, keepdims=True)
    step = np.maximum((x.max(axis=-1, keepdims=True) - low) / 15, 1e-9)
    plain = (np.rint((x - low) / step) * step + low).reshape(24, -1)
    found = np.asarray(gguf_types.q4_k(jnp.asarray(W)))[:, :512]
    assert np.linalg.norm(found - W[:, :512]) < np.linalg.norm(plain - W[:, :512])
