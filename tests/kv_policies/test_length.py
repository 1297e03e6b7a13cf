"""Predictors of output lengths."""

import numpy as np
import pytest

from jllm.engine.request import SamplingParams
from jllm.kv_policies.length import Longest, Oracle, Predictor, Quantile

LONG = SamplingParams(max_new_tokens=100_000)


def told(lengths, ended=True) -> Quantile:
    quantile = Quantile()
    for n in lengths:
        quantile.observe((), LONG, int(n), ended)
    return quantile


def test_longest_and_oracle():
    params = SamplingParams(max_new_tokens=7, seed=3)
    assert Longest().predict((1, 2), params, 0.5) == 7
    assert Oracle(lambda prompt, p: len(prompt) + p.seed).predict((1, 2), params, 0.5) == 5
    assert all(isinstance(p, Predictor) for p in (Longest(), Oracle(lambda *_: 1), Quantile()))
    assert not isinstance(object(), Predictor)


@pytest.mark.parametrize("q", [0.1, 0.5, 0.9, 0.99])
def test_a_quantile_of_what_has_ended(q):
    lengths = np.random.default_rng(0).lognormal(5, 1, 2000).astype(int) + 1
    assert told(lengths).predict((), LONG, q) == pytest.approx(np.quantile(lengths, q), rel=0.06)
    assert told(lengths).predict((), SamplingParams(max_new_tokens=3), q) == 3


def test_what_is_produced_already_counts():
    lengths = np.random.default_rng(1).lognormal(5, 1, 4000).astype(int) + 1
    quantile = told(lengths)
    for produced in (50, 200, 800):
        left = lengths[lengths > produced]
        got = quantile.predict((), LONG, 0.9, produced)
        assert got > produced
        assert got == pytest.approx(np.quantile(left, 0.9), rel=0.12)
    assert quantile.predict((), LONG, 0.9, 10**6) == LONG.max_new_tokens


def test_the_share_that_outgrows_a_prediction_is_that_of_the_quantile():
    """Also of those that have come so far already."""
    rng = np.random.default_rng(2)
    quantile = told(rng.geometric(0.01, 4000))
    fresh = rng.geometric(0.01, 20_000)
    for q in (0.5, 0.9):
        for produced in (0, 100):
            left = fresh[fresh > produced]
            outgrown = np.mean(left > quantile.predict((), LONG, q, produced))
            assert 1 - q - 0.04 < outgrown < 1 - q + 0.015  # a bucket on the safe side


def test_without_observations_the_longest():
    assert told([5] * (Quantile.FEWEST - 1)).predict((), LONG, 0.9) == LONG.max_new_tokens
    assert told([5] * Quantile.FEWEST).predict((), LONG, 0.9) == 5
    assert told([5] * 100, ended=False).predict((), LONG, 0.9) == LONG.max_new_tokens


def test_the_living_are_no_shorter_than_they_are():
    """All begin at once and are looked at as the shortest third has ended: by these alone, outputs are short."""
    rng = np.random.default_rng(3)
    lengths = rng.geometric(0.01, 3000)
    now = int(np.quantile(lengths, 0.35))
    naive = told(lengths[lengths <= now])
    assert naive.predict((), LONG, 0.3) < 0.6 * np.quantile(lengths, 0.3)
    naive.alive([now] * int((lengths > now).sum()))
    assert naive.predict((), LONG, 0.3) == pytest.approx(np.quantile(lengths, 0.3), rel=0.15)
    assert naive.predict((), LONG, 0.9) == LONG.max_new_tokens  # nothing is known yet
    naive.alive([])
    assert naive.predict((), LONG, 0.3) < 0.6 * np.quantile(lengths, 0.3)


def test_cut_off_ones_count_as_at_least_as_long():
    rng = np.random.default_rng(4)
    lengths, caps = rng.geometric(0.01, 4000), rng.integers(20, 400, 4000)
    quantile = Quantile()
    for length, cap in zip(lengths.tolist(), caps.tolist()):
        quantile.observe((), LONG, min(length, cap), length <= cap)
    assert quantile.predict((), LONG, 0.8) == pytest.approx(np.quantile(lengths, 0.8), rel=0.1)


def test_old_observations_fade_and_memory_is_bounded():
    quantile = told([10] * 20_000)
    size = len(quantile._ended) + len(quantile._cut)
    for _ in range(20_000):
        quantile.observe((), LONG, 1000, True)
    assert quantile.predict((), LONG, 0.5) == pytest.approx(1000, rel=0.06)
    assert len(quantile._ended) + len(quantile._cut) == size
    assert quantile._seen <= 2 * Quantile.WINDOW
