import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.head_logprobs import head_logprobs, reference, xla
from tests.kernels.helpers import error

T, E = 9, 24


def arguments(vocabulary: int, dtype: str):
    rng = np.random.default_rng(vocabulary)
    x, w = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((T, E), (vocabulary, E)))
    tokens = jnp.asarray(rng.integers(0, vocabulary, T), jnp.int32).at[0].set(vocabulary - 1)
    return x, w, tokens, jnp.asarray(rng.uniform(0.5, 2, T))


@pytest.mark.parametrize(("vocabulary", "softcap"), [(16, None), (37, None), (37, 3.0), (48, None)])
def test_values_and_gradients_are_those_of_the_formula_in_any_number_of_tiles(vocabulary, softcap, monkeypatch):
    monkeypatch.setattr(xla, "TILE", 16)
    with jax.enable_x64(True):
        x, w, *others = arguments(vocabulary, "float64")
        out, pull = jax.vjp(lambda x, w: head_logprobs(x, w, *others, softcap=softcap), x, w)
        assert error(np.stack(out).T, reference.head_logprobs(x, w, *others, softcap).T) < 1e-12
        dout = np.random.default_rng(1).standard_normal((2, T))
        expected = reference.head_logprobs_grad(x, w, *others, dout, softcap)
        for gradient, formula in zip(pull(tuple(jnp.asarray(dout))), expected):
            assert error(gradient, formula) < 1e-12


def test_bfloat16_adds_in_float32_and_makes_no_array_of_all_logits(monkeypatch):
    monkeypatch.setattr(xla, "TILE", 16)
    x, w, *others = arguments(37, "bfloat16")
    others[1] = others[1].astype(jnp.float32)

    def of(x, w):
        return sum(each.sum() for each in head_logprobs(x, w, *others))

    traced = jax.jit(jax.value_and_grad(of, (0, 1))).trace(x, w)
    assert f"[{T},37]" not in str(traced.jaxpr)
    dx, dw = traced.lower().compile()(x, w)[1]
    expected = reference.head_logprobs_grad(x, w, *others, np.ones((2, T)))
    assert dx.dtype == dw.dtype == jnp.bfloat16
    assert error(dx, expected[0]) < 1e-2
    assert np.abs(np.asarray(dw, np.float64) - expected[1]).max() < 1e-2 * np.abs(expected[1]).max()
    whole = np.asarray(head_logprobs(x, w, *others))
    np.testing.assert_allclose(whole, reference.head_logprobs(x, w, *others), rtol=2e-5, atol=2e-5)


def test_arguments_that_disagree_are_refused():
    x, w, tokens, temperature = arguments(37, "float32")
    with pytest.raises(ValueError, match=r"tokens has shape \(8,\), expected \[T\] with"):
        head_logprobs(x, w, tokens[1:], temperature)
    with pytest.raises(ValueError, match="tokens has dtype int16, expected int32"):
        head_logprobs(x, w, tokens.astype(jnp.int16), temperature)
