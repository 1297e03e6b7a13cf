"""Rejection sampling and equality, of which the experiments measure how much they accept: both keep the target's
distribution.

Chi-square tests have fixed seeds: one that holds holds always, and faults are far beyond the bound.
"""

import numpy as np
import pytest
from scipy import stats

from experiments.drafts import rejection
from experiments.drafts.rejection import MODES
from jllm.engine.engine import Engine
from jllm.errors import ConfigError
from tests.tiny import tiny_model

ROWS, VOCABULARY, LIKELY = 40_000, 6, 1e-6  # a p-value that chance does not reach


def p_value(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Of Pearson's chi-square; outcomes expected fewer than five times count as one. 0 if the impossible happened."""
    expected = probabilities * counts.sum()
    if counts[probabilities == 0].any():
        return 0.0
    rare = expected < 5
    seen, expected = (np.append(x[~rare], x[rare].sum()) for x in (counts, expected))
    some = expected > 0
    return stats.chisquare(seen[some], expected[some]).pvalue


def distributions(seed: int) -> np.ndarray:
    """Two of them [2, V]; with an odd seed tokens that cannot be drawn, others of each."""
    weights = np.exp(np.random.default_rng(seed).normal(scale=1.5, size=(2, VOCABULARY)))
    if seed % 2:
        weights[[0, 1], [2, 4]] = 0
    return weights / weights.sum(axis=1, keepdims=True)


def played(mode: str, p: np.ndarray, q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return MODES[mode](*(np.broadcast_to(x, (ROWS, VOCABULARY)) for x in (p, q)), np.random.default_rng(1))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("mode", MODES)
def test_tokens_have_the_target_s_distribution(mode, seed):
    """Drafts are accepted as often as the total variation distance says."""
    p, q = distributions(seed)
    tokens, accepted = played(mode, p, q)
    assert p_value(np.bincount(tokens, minlength=VOCABULARY), p) > LIKELY
    agree, noise = 1 - np.abs(p - q).sum() / 2, 5 / np.sqrt(ROWS)
    least = {"equal": agree / (2 - agree), "rejection": agree}[mode]
    assert least - noise < accepted.mean() < agree + noise
    assert played(mode, p, p)[1].all()


@pytest.mark.parametrize("wrong", [lambda weights, p, q: p, lambda weights, p, q: q])
def test_faults_are_noticed(wrong, monkeypatch):
    """Draws drafts, and what replaces a refused one, from one of the two distributions alone."""
    p, q = distributions(0)
    draw = rejection._draw

    def drawn(weights, rng):
        return draw(np.broadcast_to(wrong(weights, p, q), weights.shape), rng)

    monkeypatch.setattr(rejection, "_draw", drawn)
    tokens, _ = played("rejection", p, q)
    assert p_value(np.bincount(tokens, minlength=VOCABULARY), p) < LIKELY


def test_the_engine_says_what_it_accepts():
    with pytest.raises(
        ConfigError, match="'acceptance' is gone: drafts are accepted only where they equal the request's"
    ):
        Engine(tiny_model(num_layers=1), speculate="ngram", acceptance="rejection")
