"""sample's definition, its backends and its errors; jllm's own tests are in tests/test_sampling.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import backends
from pallas_kernels.sample import sample
from tests.kernels.sample_helpers import distance, extreme_rows, jax_arguments, misses, mixed_rows, odd_rows


@pytest.mark.parametrize("vocabulary", [3, 300, 4099])
@pytest.mark.parametrize("make", [mixed_rows, odd_rows])
def test_xla_matches_the_definition(make, vocabulary):
    for seed in range(4):
        logits, asked = make(vocabulary, seed)
        assert not misses(*sample(*jax_arguments(logits, asked, seed), backend="xla"), logits, asked, seed)


@pytest.mark.parametrize("x64", [False, True])
def test_parameters_at_the_ends_of_their_ranges_and_beyond(x64):
    logits, asked = extreme_rows(300)
    with jax.enable_x64(x64):
        arrays = jax_arguments(logits.astype(np.float64) if x64 else logits, asked)
        assert not misses(*sample(*arrays, backend="xla"), logits, asked)


def test_a_temperature_without_end_draws_evenly_and_the_most_likely_token_is_kept():
    logits = jnp.asarray([[0.0, 2.0, -jnp.inf, 1.0]] * 3)
    columns = jnp.asarray([jnp.inf, jnp.inf, 1.0]), jnp.zeros(3, jnp.int32), jnp.ones(3), jnp.asarray([0.0, 0.0, 5.0])
    for backend in ("reference", "xla"):
        tokens, _ = sample(logits, *columns, jnp.asarray([0.3, 0.6, 0.0]), backend=backend)
        assert np.asarray(tokens).tolist() == [0, 1, 1]


def test_the_definition_on_a_row_by_hand():
    logits = np.log(np.asarray([[0.1, 0.4, 0.2, 0.3]] * 5, np.float32))
    rows = [1.0] * 5, [0, 3, 0, 3, 0], [1, 1, 0.6, 0.6, 1], [0, 0, 0, 0, 0.6]
    columns = [np.asarray(x, np.int32 if i == 1 else np.float32) for i, x in enumerate(rows)]
    kept = ([0, 1, 2, 3], [1, 2, 3], [1, 3], [1, 3], [1, 3])  # 4/9 + 3/9 reach 0.6 as 0.4 + 0.3 do
    for uniform, pick in ((0.0, 0), (0.9999, -1)):
        expected = [ids[pick] for ids in kept]
        for backend in ("reference", "xla"):
            out = sample(*map(jnp.asarray, (logits, *columns, np.full(5, uniform, np.float32))), backend=backend)
            assert np.asarray(out[0]).tolist() == expected
            assert np.asarray(out[1]).all()


def test_what_counts_as_wrong():
    row, asked = np.log(np.asarray([0.25, 0.5, 0.25], np.float32)), (1.0, 0, 1.0, 0.0)
    assert distance(0, row, *asked, 0.25 - 1e-9) == 0
    assert distance(1, row, *asked, 0.25 - 1e-9) < 1e-6
    assert distance(2, row, *asked, 0.25) == pytest.approx(0.5)
    assert distance(2, row, 1.0, 1, 1.0, 0.0, 0.9) == np.inf
    assert distance(0, row, 0.0, 0, 1.0, 0.0, 0.1) == np.inf


def args(vocabulary=2048, dtype=jnp.float32):
    logits, asked = mixed_rows(vocabulary)
    logits, *rest = jax_arguments(logits, asked)
    return logits.astype(dtype), *rest


def test_what_mosaic_does_not_do_is_refused_where_it_is_named():
    with jax.enable_x64(True), pytest.raises(NotImplementedError, match="logits of float64 are not supported"):
        sample(*args(dtype=jnp.float64), backend="mosaic")
    with pytest.raises(
        NotImplementedError, match="V=2049 is not supported by backend mosaic, which does multiples of 4"
    ):
        sample(*args(2049), backend="mosaic")
    with pytest.raises(NotImplementedError, match="V=300 is not supported"):
        sample(*args(300), backend="mosaic")
    with pytest.raises(NotImplementedError, match="R=0 is not supported"):
        sample(*(x[:0] for x in args()), backend="mosaic")
    with pytest.raises(NotImplementedError, match="concrete arrays only"):
        jax.jit(lambda *x: sample(*x, backend="reference"))(*args())


def test_unnamed_mosaic_runs_on_a_hopper_gpu_for_what_it_supports(monkeypatch):
    def kernels(arguments) -> int:
        trace = jax.jit(lambda *x: sample(*x)).trace(*arguments)
        return trace.lower(lowering_platforms=("cuda",)).as_text().count("stablehlo.custom_call @mosaic_gpu")

    monkeypatch.setattr(backends, "on_hopper", lambda: True)
    assert kernels(args()) == 1
    assert kernels(args(2050)) == 0
    assert kernels(args(dtype=jnp.bfloat16)) == 0


def test_errors():
    logits, temperature, top_k, *rest = args()
    with pytest.raises(ValueError, match="temperature has shape"):
        sample(logits, temperature[:3], top_k, *rest)
    with pytest.raises(ValueError, match="top_k has dtype float32, expected int32"):
        sample(logits, temperature, top_k.astype(jnp.float32), *rest)
    with pytest.raises(ValueError, match="logits has dtype int32"):
        sample(logits.astype(jnp.int32), temperature, top_k, *rest)
    with pytest.raises(ValueError, match="expected at least one token"):
        sample(logits[:, :0], temperature, top_k, *rest)
