"""Penalties, biases and reported log-probabilities, against their formulas in float64."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jllm.model.sampling import (
    Penalties,
    TokenCounts,
    count_tokens,
    neutral_sampling,
    penalize,
    sample,
    token_logprobs,
    top_logprobs,
)

# Penalties


def penalties_of(rng, rows, vocabulary, dtype):
    ids = np.stack([rng.permutation(vocabulary)[:4] for _ in range(rows)])
    ids[:, 2:] = np.where(rng.random((rows, 2)) < 0.5, -1, ids[:, 2:])
    values = rng.normal(size=(rows, 4)).astype(dtype)
    values[:, 0] = -np.inf
    values[0], ids[0] = 0, -1
    penalties = Penalties(
        repetition_penalty=jnp.asarray(rng.uniform(0.5, 2, rows).astype(dtype)),
        presence_penalty=jnp.asarray(rng.normal(size=rows).astype(dtype)),
        frequency_penalty=jnp.asarray(rng.normal(size=rows).astype(dtype)),
        bias_ids=jnp.asarray(ids.astype(np.int32)),
        bias_values=jnp.asarray(values),
    )
    seen = jnp.asarray(rng.random((rows, vocabulary)) < 0.5)
    return penalties, TokenCounts(seen, jnp.asarray(rng.integers(0, 4, (rows, vocabulary)).astype(np.int32)))


@pytest.mark.parametrize(("x64", "dtype"), [(True, np.float64), (False, np.float32), (False, jnp.bfloat16)])
def test_penalties_are_those_of_the_formulas(x64, dtype):
    rng = np.random.default_rng(10)
    with jax.enable_x64(x64):
        logits = jnp.asarray(rng.normal(size=(5, 40)), dtype)
        penalties, counts = penalties_of(rng, 5, 40, np.float64 if x64 else np.float32)
        out = jax.jit(penalize)(logits, penalties, counts)
        assert out.dtype == (np.float64 if x64 else np.float32)
        assert penalize(logits, None, None) is logits
    expected = np.array(logits, np.float64)
    for row, values in enumerate(expected):
        for token in range(40):
            if counts.seen[row, token]:
                r = float(penalties.repetition_penalty[row])
                values[token] = values[token] / r if values[token] > 0 else values[token] * r
            count = int(counts.counts[row, token])
            frequency, presence = penalties.frequency_penalty[row], penalties.presence_penalty[row]
            values[token] -= count * float(frequency) + (count > 0) * float(presence)
        for token, value in zip(np.asarray(penalties.bias_ids[row]), np.asarray(penalties.bias_values[row])):
            if token >= 0:
                values[token] += value
    np.testing.assert_allclose(out, expected, rtol=1e-14 if x64 else 1e-5, atol=1e-14 if x64 else 1e-6)
    assert np.isinf(expected[1:]).sum() == 4


def test_drafts_count_as_tokens_of_the_output():
    """As often as they come, and beside a bias."""
    rng = np.random.default_rng(11)
    with jax.enable_x64(True):
        logits = jnp.asarray(rng.normal(size=(3, 40)))
        penalties, counts = penalties_of(rng, 3, 40, np.float64)
        drafts = jnp.asarray([[5, 5, 9], [7, -1, -1], [-1, -1, -1]], jnp.int32).at[2, 0].set(penalties.bias_ids[2, 1])
        slot = jnp.where(drafts < 0, 3, jnp.arange(3, dtype=jnp.int32)[:, None])
        entered = count_tokens(counts, slot.reshape(-1), drafts.reshape(-1), jnp.ones(9, bool))
        got, want = penalize(logits, penalties, counts, drafts), penalize(logits, penalties, entered)
    np.testing.assert_array_equal(got, want)


def test_a_banned_token_is_never_drawn():
    rows, vocabulary, ban = 64, 300, 77
    zeros, none = jnp.zeros(rows), jnp.zeros((rows, vocabulary), jnp.int32)
    ids, values = jnp.full((rows, 1), ban, jnp.int32), jnp.full((rows, 1), -jnp.inf)
    penalties = Penalties(jnp.ones(rows), zeros, zeros, ids, values)
    counts = TokenCounts(none.astype(bool), none)
    logits = jnp.zeros((rows, vocabulary)).at[:, ban].set(6.0)
    asked = replace(neutral_sampling(rows), temperature=jnp.ones(rows))
    at = jnp.arange(rows, dtype=jnp.int32)
    assert (np.asarray(sample(logits, asked, at)[0]) == ban).any()
    assert not (np.asarray(sample(penalize(logits, penalties, counts), asked, at)[0]) == ban).any()


def test_count_tokens():
    found = count_tokens(
        TokenCounts(jnp.zeros((2, 6), bool).at[1, 5].set(True), jnp.zeros((2, 6), jnp.int32).at[1, 4].set(2)),
        slot=jnp.asarray([0, 1, 1, 0, 2, 9, 1], jnp.int32),
        tokens=jnp.asarray([3, 4, 4, 3, 1, 1, 0], jnp.int32),
        is_output=jnp.asarray([False, True, True, True, True, True, False]),
    )
    np.testing.assert_array_equal(found.counts, [[0, 0, 0, 1, 0, 0], [0, 0, 0, 0, 4, 0]])
    np.testing.assert_array_equal(found.seen, np.asarray([[0, 0, 0, 1, 0, 0], [1, 0, 0, 0, 1, 1]], bool))


# Log-probabilities


@pytest.mark.parametrize(("x64", "dtype"), [(True, np.float64), (False, np.float32), (False, jnp.bfloat16)])
def test_logprobs_are_of_the_log_softmax(x64, dtype):
    rng = np.random.default_rng(11)
    with jax.enable_x64(x64):
        logits = jnp.asarray(rng.normal(size=(5, 20_000)) * 4 + 300, dtype)
        tokens = rng.integers(0, 20_000, 5).astype(np.int32)
        chosen = jax.jit(token_logprobs)(logits, jnp.asarray(tokens))
        ids, values = jax.jit(top_logprobs, static_argnums=1)(logits, 7)
        assert chosen.dtype == values.dtype == (np.float64 if x64 else np.float32)
        assert ids.dtype == np.int32
    exact = np.asarray(logits, np.float64)
    shifted = exact - exact.max(axis=1, keepdims=True)
    expected = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    tolerance = 1e-12 if x64 else 1e-4  # an absolute rounding of logits near 300
    np.testing.assert_allclose(chosen, np.take_along_axis(expected, tokens[:, None], 1)[:, 0], rtol=0, atol=tolerance)
    order = np.argsort(-exact, axis=1, kind="stable")[:, :7]
    np.testing.assert_array_equal(ids, order)
    np.testing.assert_allclose(values, np.take_along_axis(expected, order, 1), rtol=0, atol=tolerance)
