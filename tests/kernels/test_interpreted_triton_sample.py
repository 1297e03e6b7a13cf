"""Checks the Triton kernels of sample in Triton's interpreter against the definition."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton")  # of extras and development, for Linux alone

from pallas_kernels.sample import reference, sample, triton  # noqa: E402
from pallas_kernels.sample.cases import arguments  # noqa: E402
from pallas_kernels.triton import triton_call  # noqa: E402
from tests.kernels import triton_tools  # noqa: E402
from tests.kernels.helpers import missed, same_bits  # noqa: E402
from tests.kernels.sample_helpers import extreme_rows, jax_arguments, misses, mixed_rows, odd_rows  # noqa: E402


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setattr(triton_call, "call", triton_tools.interpret)


@pytest.fixture
def cut_small(monkeypatch):
    """Cuts rows of a few hundred logits into parts and blocks as large ones are."""
    launches, small = triton.launches, triton.TritonConfig(part=64, block=128)
    monkeypatch.setattr(triton, "launches", lambda logits: launches(logits, small))
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.parametrize("vocabulary", [1, 3, 300])
@pytest.mark.parametrize("make", [mixed_rows, odd_rows])
@pytest.mark.usefixtures("cut_small")
def test_matches_the_definition(make, vocabulary):
    for seed in range(2 if vocabulary < 300 else 1):  # each step of a bisection takes the interpreter long
        logits, asked = make(vocabulary, seed)
        assert not misses(*sample(*jax_arguments(logits, asked, seed), backend="triton"), logits, asked, seed)


@pytest.mark.usefixtures("cut_small")
def test_parameters_at_the_ends_of_their_ranges_and_beyond():
    logits, asked = extreme_rows(300)
    assert not misses(*sample(*jax_arguments(logits, asked), backend="triton"), logits, asked)


def many_filters(vocabulary, seed):
    """Returns a row for each of many numbers of tokens, of many shares, and of shares of a number of tokens."""
    asked = [{"top_k": k} for k in (1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, vocabulary - 1)]
    asked += [{"top_p": p} for p in (0.01, 0.1, 0.3, 0.6, 0.97)]
    asked += [{"top_k": 20, "top_p": p} for p in (0.3, 0.6, 0.9)]
    return np.random.default_rng(seed).normal(size=(len(asked), vocabulary)).astype(np.float32), asked


@pytest.mark.usefixtures("cut_small")
@pytest.mark.parametrize("make", [odd_rows, many_filters])
def test_exactly_the_definitions_tokens_are_kept(make):
    """Checks each token, which a few draws do not tell."""
    logits, asked = make(300, 1)
    arrays = jax_arguments(logits, asked)
    largest, cut, _ = triton.launches(arrays[0])
    (lowest,) = triton_tools.interpret(cut, arrays[0], triton_tools.interpret(largest, arrays[0])[0], *arrays[1:5])
    for row, bound, *filters in zip(reference.clean(logits), np.asarray(lowest), *map(np.asarray, arrays[1:5])):
        if filters[0] > 0:
            kept = reference.probabilities(row, *filters) > 0
            assert np.array_equal((row >= bound) & (row > -np.inf), kept), filters


@pytest.mark.usefixtures("cut_small")
def test_a_rows_token_does_not_depend_on_other_rows():
    logits, asked = mixed_rows(300)
    arrays = jax_arguments(logits, asked)
    tokens, _ = sample(*arrays, backend="triton")
    alone, _ = sample(*(x[3:4] for x in arrays), backend="triton")
    assert same_bits(tokens[3:4], alone)


def test_logits_of_16_bits():
    logits = np.asarray(jnp.asarray(mixed_rows(300)[0], jnp.bfloat16).astype(jnp.float32))
    asked = mixed_rows(300)[1]
    wide, narrow = (jnp.asarray(logits, dtype) for dtype in (jnp.float32, jnp.bfloat16))
    rest = arguments(asked)
    assert same_bits(*(sample(x, *rest, backend="triton")[0] for x in (wide, narrow)))


@pytest.mark.usefixtures("cut_small")
def test_seeded_faults_are_caught(monkeypatch):
    launches = triton.launches

    def wrong(which: int, **fault: object) -> float:
        def changed(logits):
            made = list(launches(logits))
            made[which] = dataclasses.replace(made[which], constants={**made[which].constants, **fault})
            return tuple(made)

        monkeypatch.setattr(triton, "launches", changed)
        jax.clear_caches()
        logits, asked = mixed_rows(300)
        return len(misses(*sample(*jax_arguments(logits, asked), backend="triton"), logits, asked))

    assert wrong(0) == 0
    faults = {
        "a part's end is not read": wrong(0, V=290),
        "thresholds of a row's first logits": wrong(1, V=60),
        "another row's parts": wrong(2, PARTS=4),
        "noise of fewer rounds": wrong(2, ROUNDS=9),
        "another row's keys": wrong(2, KEYS=3),
        "draws end early": wrong(2, V=290),
    }
    assert not missed(faults, 1)
