"""Learned rotations: steps keep matrices orthonormal and the model its function, and what is rounded strays less."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jllm.analysis.evaluate import evaluate
from jllm.analysis.outliers import plant
from jllm.errors import QuantizationError
from jllm.quant import calibration as ptq
from jllm.quant.calibration.rotation_learning import cayley_sgd, nearest_orthonormal, passing
from jllm.quant.quantize import quantize
from jllm.quant.rotation import Rotation, hadamard_rotation, quantize_model, rotate, rotate_by
from pallas_kernels.quantized_weights import decode, encode
from pallas_kernels.weight_formats import parse_weight_format
from tests.quant.test_rotation import IDS, SIZES, with_biases
from tests.tiny import full_logits, tiny_model

pytest.importorskip("hypothesis")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

optax = pytest.importorskip("optax")
TOKENS = np.random.default_rng(0).integers(3, 97, (8, 24))


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def orthonormal(*shape, seed=0):
    return np.linalg.qr(np.random.default_rng(seed).normal(size=shape))[0]


def assert_orthonormal(x, atol=1e-12):
    np.testing.assert_allclose(x @ np.swapaxes(x, -1, -2), np.broadcast_to(np.eye(x.shape[-1]), x.shape), atol=atol)


@pytest.mark.parametrize("tied", [True, False])
def test_any_orthonormal_matrices_leave_the_function(tied):
    model = with_biases(tiny_model("float64", tie_embeddings=tied))
    turned = rotate_by(model, Rotation(orthonormal(32, 32), orthonormal(2, 16, 16)))
    wanted = full_logits(model, IDS[0])
    np.testing.assert_allclose(full_logits(turned, IDS[0]), wanted, rtol=1e-10, atol=1e-10)
    assert not turned.config.tie_embeddings
    skewed = rotate_by(model, Rotation(1.01 * orthonormal(32, 32), orthonormal(2, 16, 16)))  # a fault that is seen
    assert not np.allclose(full_logits(skewed, IDS[0]), wanted, atol=1e-3)


def test_hadamard_matrices_are_one_case():
    model = tiny_model("float64")
    dense, fast = rotate_by(model, hadamard_rotation(model, seed=3)).params, rotate(model, "all", seed=3).params
    assert jax.tree.all(jax.tree.map(lambda a, b: np.allclose(a, b, rtol=1e-12, atol=1e-12), dense, fast))


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 99), st.sampled_from([0.0, 0.9]), st.floats(1e-3, 100))
def test_steps_by_the_formula(seed, momentum, rate):
    with jax.enable_x64(True):
        rng = np.random.default_rng(seed)
        x, optimizer = (
            orthonormal(3, 6, 6, seed=seed),
            cayley_sgd(lambda count: rate / (1.0 + count.astype(float)), momentum),
        )
        state, given, m = optimizer.init(jnp.asarray(x)), jnp.asarray(x), np.zeros_like(x)
        for step in range(3):
            g = rng.normal(size=x.shape)
            updates, state = optimizer.update(jnp.asarray(g), state, given)
            given = optax.apply_updates(given, updates)
            m = momentum * m - g
            for i in range(3):  # Li et al., algorithm 1: W-hat and W, a step of at most 1 / |W|, Cayley's transform
                hat = m[i] @ x[i].T - x[i] @ (x[i].T @ m[i] @ x[i].T) / 2
                w = hat - hat.T
                a, m[i] = min(rate / (1 + step), 1 / np.linalg.norm(w, 1)), w @ x[i]
                x[i] = np.linalg.inv(np.eye(6) - a / 2 * w) @ (np.eye(6) + a / 2 * w) @ x[i]
            np.testing.assert_allclose(given, x, rtol=1e-9, atol=1e-9)
            assert_orthonormal(np.asarray(given), 1e-9)


def test_steps_go_down():
    """To the orthonormal matrix nearest to another one, of the same orientation."""
    wanted = jnp.asarray(orthonormal(8, 8))
    start = wanted @ jax.scipy.linalg.expm(
        0.3 * jnp.asarray(np.tril(np.ones((8, 8)), -1) - np.triu(np.ones((8, 8)), 1))
    )
    loss = lambda x: jnp.square(x - wanted).sum()  # noqa: E731
    x, optimizer = start, cayley_sgd(lambda count: 0.3)
    state = optimizer.init(x)
    for _ in range(60):
        updates, state = optimizer.update(jax.grad(loss)(x), state, x)
        x = optax.apply_updates(x, updates)
    assert loss(x) < 1e-3 * loss(start)
    assert_orthonormal(nearest_orthonormal(np.asarray(x) * 1.001))


@pytest.mark.parametrize("name", ["mxfp4-weight", "mxfp4-h-weight", "w8a16"])
def test_gradients_of_rounding(name):
    """Straight through, and of an error as its block's largest magnitude grows: LSQ's, where scales are its share."""
    fmt = parse_weight_format(name)
    w = jnp.asarray(np.random.default_rng(0).normal(size=(32, 64)))
    rounding = lambda x, fmt: decode(encode(x, fmt), x.dtype)  # noqa: E731
    found = passing(w, rounding, fmt, fmt.group)
    np.testing.assert_allclose(found, decode(encode(w, fmt), w.dtype), atol=1e-12)
    if fmt.rotated:
        return
    by = np.random.default_rng(1).normal(size=w.shape)
    gradient = jax.grad(lambda w: jnp.sum(passing(w, rounding, fmt, fmt.group) * by))(w)
    block = fmt.group or 64
    blocks, errors = (np.asarray(a).reshape(32, -1, block) for a in (w, found - w))
    at = np.abs(blocks).argmax(-1)[..., None]
    largest = np.take_along_axis(blocks, at, -1)
    extra = np.zeros_like(blocks)
    np.put_along_axis(extra, at, (errors * by.reshape(blocks.shape)).sum(-1, keepdims=True) / largest, -1)
    np.testing.assert_allclose(gradient, by + extra.reshape(w.shape), rtol=1e-9, atol=1e-9)


def test_learning_lowers_the_divergence():
    scheme = "mxfp4"
    model = tiny_model("float64", **SIZES)
    planted = plant(model, channels=2, gated=0, massive=False, strength=1.0, stream=TOKENS[:2])
    first = ptq.learn_rotation(planted, scheme, TOKENS, steps=0)
    wanted = hadamard_rotation(planted)
    np.testing.assert_allclose(first.stream, wanted.stream, atol=1e-12)
    np.testing.assert_allclose(first.values, wanted.values, atol=1e-12)
    found = ptq.learn_rotation(planted, scheme, TOKENS, steps=12, rate=5.0, batch=8)
    assert_orthonormal(found.stream)
    assert_orthonormal(found.values)
    assert np.abs(found.stream - first.stream).max() > 1e-3
    assert np.abs(found.values - first.values).max() > 1e-4
    turned = rotate_by(planted, found)
    np.testing.assert_allclose(full_logits(turned, IDS[0]), full_logits(model, IDS[0]), rtol=1e-9, atol=1e-9)
    after, before = (
        evaluate(quantize_model(rotate_by(planted, r), scheme), TOKENS.tolist(), "document", reference=model).kl
        for r in (found, first)
    )
    assert after < 0.97 * before
    params = ptq.gptq(turned, "w4a16-g32", TOKENS)  # as any model
    assert jnp.isfinite(full_logits(replace(turned, params=params), IDS[0])).all()


def test_what_cannot_be_learned_says_so():
    model = tiny_model("float64", **SIZES)
    sizes = r"of shapes \(64, 64\) and \(2, 16, 16\), not \(32, 32\), \(2, 16, 16\)"
    for call, message in (
        (lambda: ptq.learn_rotation(model, "mxfp4", TOKENS, steps=-1), "steps and rate must be at least 0 and batch 1"),
        (lambda: ptq.learn_rotation(model, "mxfp4+rotate-all", TOKENS), "rotates the model first"),
        (lambda: ptq.learn_rotation(model, "mxfp4", [1, 2]), "calibration tokens must be integers"),
        (
            lambda: rotate_by(replace(model, params=quantize(model.params, "w8a8")), hadamard_rotation(model)),
            "is quant",
        ),
        (lambda: rotate_by(model, Rotation(np.eye(32), np.zeros((2, 16, 16)))), sizes),
    ):
        with pytest.raises(QuantizationError, match=message):
            call()
