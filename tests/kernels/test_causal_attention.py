import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.backends import TRAINING, choose
from pallas_kernels.causal_attention import causal_attention, cudnn, reference
from pallas_kernels.causal_attention.api import BACKENDS
from pallas_kernels.causal_attention.cases import CASES, Case
from tests.kernels.helpers import TOLERANCE, error, missed, same_bits


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_the_formula(case):
    arguments = case.inputs()
    expected = reference.causal_attention(*arguments, case.scale, case.window)
    out = causal_attention(*arguments, scale=case.scale, window=case.window)
    assert out.dtype == arguments[0].dtype
    assert error(out, expected) < TOLERANCE[case.dtype]
    assert same_bits(out, causal_attention(*arguments, scale=case.scale, window=case.window))


@pytest.mark.parametrize("window", [None, 6])
def test_gradients_are_the_analytic_ones(window):
    with jax.enable_x64(True):
        case = dataclasses.replace(CASES[2], dtype="float64")
        q, k, v, segments = case.inputs()
        dout = case.inputs(seed=1)[0]

        def loss(q, k, v):
            return jnp.sum(causal_attention(q, k, v, segments, scale=case.scale, window=window) * dout)

        expected = reference.causal_attention_grad(q, k, v, segments, case.scale, window, dout)
        for gradient, formula in zip(jax.grad(loss, (0, 1, 2))(q, k, v), expected):
            # row norms: the first row of a segment has no gradient by q, up to rounding
            assert error(gradient[None], formula[None]) < 1e-12


def test_vmap_is_a_loop():
    case = CASES[0]
    batches = [case.inputs(seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *rows: jnp.stack(rows), *batches)
    out = jax.vmap(lambda *row: causal_attention(*row, scale=case.scale))(*stacked)
    for row, arguments in zip(out, batches):
        assert error(row, causal_attention(*arguments, scale=case.scale)) < TOLERANCE["float32"]


def test_segments_need_not_be_contiguous_and_do_not_see_each_other():
    case = CASES[0]
    q, k, v, _ = case.inputs()
    segments = jnp.arange(33, dtype=jnp.int32) % 2
    expected = reference.causal_attention(q, k, v, segments, case.scale, None)
    assert error(causal_attention(q, k, v, segments, scale=case.scale), expected) < TOLERANCE["float32"]
    one, other = slice(0, None, 2), slice(1, None, 2)
    for rows in (one, other):
        alone = causal_attention(q[rows], k[rows], v[rows], segments[rows], scale=case.scale)
        assert error(alone, expected[rows]) < TOLERANCE["float32"]


def test_seeded_faults_are_caught():
    case = dataclasses.replace(CASES[1], segments=(20, 13))
    q, k, v, segments = case.inputs()
    expected = reference.causal_attention(q, k, v, segments, case.scale, case.window)

    def wrong_by(k=k, v=v, segments=segments, scale=case.scale, window=case.window):
        return error(causal_attention(q, k, v, segments, scale=scale, window=window), expected)

    tolerance = TOLERANCE[case.dtype]
    assert wrong_by() < tolerance
    faults = {
        "a longer window": wrong_by(window=case.window + 1),
        "a shorter window": wrong_by(window=case.window - 1),
        "a segment one longer": wrong_by(segments=segments.at[20].set(0)),
        "a wrong scale": wrong_by(scale=case.scale * 1.1),
        "swapped keys": wrong_by(k=k[::-1]),
        "swapped heads": wrong_by(v=v[:, ::-1]),
    }
    assert not missed(faults, tolerance)


def test_bad_arguments_say_what_is_wrong():
    q, k, v, segments = CASES[1].inputs()

    def call(q=q, k=k, v=v, segments=segments, **options):
        causal_attention(q, k, v, segments, scale=1.0, **options)

    for error_type, message, arguments in (
        (ValueError, r"v has shape \(33, 1, 64\), expected \[T, K, D\] with T=33, D=64, K=2", {"v": v[:, :1]}),
        (ValueError, "k has dtype float32, expected bfloat16 as q has", {"k": k.astype(jnp.float32)}),
        (ValueError, "segments has dtype float32", {"segments": segments.astype(jnp.float32)}),
        (ValueError, "3 query heads cannot share 2", {"q": q[:, :3]}),
        (ValueError, "window is 0", {"window": 0}),
        (NotImplementedError, "no mosaic kernel yet", {"backend": "mosaic"}),
    ):
        with pytest.raises(error_type, match=message):
            call(**arguments)


def test_training_takes_cudnn_where_it_can(monkeypatch):
    q, k, v, segments = Case((20, 13), (4, 2), 64, "bfloat16").inputs()
    chosen = partial(choose, BACKENDS, TRAINING)
    assert chosen(64, 64, q.dtype, None, True) is BACKENDS["xla"], "there is no GPU"
    for capability, backend in (("7.5", "xla"), ("10.0", "cudnn"), ("9.0", "cudnn")):
        monkeypatch.setattr(cudnn, "capability", lambda said=capability: said)
        assert chosen(64, 64, q.dtype, None, True) is BACKENDS[backend], capability
    for arguments in ((33, 64, q.dtype, None, True), (64, 256, q.dtype, None, True), (64, 64, q.dtype, 5, True)):
        assert chosen(*arguments) is BACKENDS["xla"]
        with pytest.raises(NotImplementedError, match="T=.* is not supported by backend cudnn, which does even T"):
            choose(BACKENDS, "cudnn", *arguments)
    assert choose(BACKENDS, None, 64, 64, q.dtype, None, True) is BACKENDS["xla"], "unless training is said"
    monkeypatch.undo()
    with pytest.raises(NotImplementedError, match="backend cudnn is for GPUs"):
        causal_attention(q, k, v, segments, scale=0.1, backend="cudnn")


@pytest.mark.gpu
@pytest.mark.parametrize("case", [Case((500, 1, 523), (8, 2), 64, "bfloat16"), Case((200, 312), (8, 8), 64, "float16")])
def test_cudnn_matches_xla_and_its_gradients(case):
    """Takes rows under vmap, as training has them."""
    rows = jax.tree.map(lambda *each: jnp.stack(each), *(case.inputs(seed) for seed in range(3)))
    cotangents = jnp.stack([case.inputs(seed)[0] for seed in range(3, 6)])

    def loss(q, k, v, segments, backend):
        attend = lambda *row: causal_attention(*row, scale=case.scale, backend=backend)  # noqa: E731
        out = jax.vmap(attend)(q, k, v, segments)
        return jnp.sum(out.astype(jnp.float32) * cotangents.astype(jnp.float32)), out

    def found(*inputs, backend):
        return jax.jit(jax.grad(partial(loss, backend=backend), (0, 1, 2), has_aux=True))(*inputs)

    wide = [each.astype(jnp.float32) for each in rows[:3]]
    gradients, out = found(*rows, backend="cudnn")
    expected, exact = found(*wide, rows[3], backend="xla")
    for got, want in zip((out, *gradients), (exact, *expected)):
        assert error(got, want) < 3 * TOLERANCE[case.dtype]
