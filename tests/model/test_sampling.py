import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jllm.model.sampling import neutral_sampling, perturbed, sample, sample_reference, threshold
from pallas_kernels.sample import reference

pytest.importorskip("hypothesis")
from hypothesis import assume, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

jit_sample = jax.jit(lambda *rows: sample(*rows)[0])
jit_threshold = jax.jit(threshold)
jit_perturbed = jax.jit(perturbed)
FALSE_ALARM = 1e-6
ALL_ON = {"temperature": 0.8, "top_k": 6, "top_p": 0.9, "min_p": 0.05}


def make(rows, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=7, sample=0, dtype=np.float32):
    def full(x, kind):
        return jnp.asarray(np.broadcast_to(np.asarray(x, kind), rows))

    real = [full(x, dtype) for x in (temperature, top_p, min_p)]
    names = {"temperature": real[0], "top_k": full(top_k, np.int32), "top_p": real[1], "min_p": real[2]}
    return replace(neutral_sampling(rows), **names, seed=full(seed, np.uint32), sample=full(sample, np.int32))


def positions(rows, first=0):
    return jnp.arange(first, first + rows, dtype=jnp.int32)


def weights_of(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Unnormalized probabilities of one row after all filters, from their definitions in float64; and the margin, by
    which the closest decision was clear of its boundary."""
    logits = np.asarray(logits, np.float64)
    weights = np.exp((logits - logits.max()) / temperature)
    if 0 < top_k < logits.size:
        weights = np.where(logits >= np.sort(logits)[-top_k], weights, 0)
    margin = math.inf
    if top_p < 1:
        total = math.fsum(weights)
        for lowest in np.unique(logits)[::-1]:
            mass = math.fsum(weights[logits >= lowest]) / total
            margin = min(margin, abs(mass - top_p))
            if mass >= top_p:
                weights = np.where(logits >= lowest, weights, 0)
                break
    if min_p > 0:
        margin = min(margin, np.abs(weights / min_p - 1)[logits < logits.max()].min(initial=math.inf))
        weights = np.where(weights >= min_p, weights, 0)  # the largest weight is 1
    return weights, margin


# Greedy


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_greedy_takes_the_lowest_of_the_most_likely(dtype):
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(64, 300)), dtype)  # bfloat16: many ties
    expected = np.argmax(np.asarray(logits, np.float32), axis=1)
    np.testing.assert_array_equal(jit_sample(logits, make(64, temperature=0), positions(64)), expected)
    tied = jnp.zeros((64, 300), dtype)
    np.testing.assert_array_equal(jit_sample(tied, make(64, temperature=0), positions(64)), 0)


def test_top_k_1_is_greedy_but_draws_among_exact_ties():
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(64, 300)), jnp.float32)
    tokens = jit_sample(logits, make(64, temperature=5.0, top_k=1), positions(64))
    np.testing.assert_array_equal(tokens, np.argmax(np.asarray(logits), axis=1))
    tied = logits.at[:, 250].set(9.0).at[:, 31].set(9.0)
    assert set(np.asarray(jit_sample(tied, make(64, top_k=1), positions(64))).tolist()) == {31, 250}


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-45])
def test_tiny_temperatures_are_greedy_in_the_limit(temperature):
    logits = jnp.asarray(1e4 * np.random.default_rng(2).normal(size=(64, 300)), jnp.float32)
    tokens = jit_sample(logits, make(64, temperature=temperature, top_p=0.9, min_p=0.1), positions(64))
    np.testing.assert_array_equal(tokens, np.argmax(np.asarray(logits), axis=1))


# Filters: the sets they keep


@settings(max_examples=50, derandomize=True)
@given(data=st.data())
def test_thresholds_keep_exactly_the_sets_of_the_definitions(data):
    vocabulary = data.draw(st.sampled_from([1, 2, 7, 33, 100]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    rows, grid = 6, data.draw(st.sampled_from([0.0, 0.125, 1.0]))
    logits = rng.normal(size=(rows, vocabulary)) * data.draw(st.sampled_from([1e-3, 1.0, 30.0]))
    if grid:
        logits = np.round(logits / grid) * grid  # ties, and zeros of both signs
    logits[:, 1:][rng.random((rows, vocabulary - 1)) < data.draw(st.sampled_from([0.0, 0.5]))] = -np.inf
    off = rng.random((3, rows)) < 0.4
    asked = {
        "temperature": np.exp(rng.uniform(-3, 3, rows)),
        "top_k": np.where(off[0], 0, rng.integers(1, vocabulary + 3, rows)),
        "top_p": np.where(off[1], 1.0, rng.uniform(1e-3, 1, rows)),
        "min_p": np.where(off[2], 0.0, rng.uniform(0, 1, rows)),
    }
    with jax.enable_x64(True):
        lowest = np.asarray(jit_threshold(jnp.asarray(logits), make(rows, **asked, dtype=np.float64)))
    assert lowest.dtype == np.float64
    for row in range(rows):
        weights, margin = weights_of(logits[row], **{name: values[row] for name, values in asked.items()})
        assume(margin > 1e-12)
        possible = np.exp((logits[row] - logits[row].max()) / asked["temperature"][row]) > 0
        np.testing.assert_array_equal((logits[row] >= lowest[row]) & possible, weights > 0)
        assert (logits[row] >= lowest[row]).any()


def test_thresholds_tell_adjacent_floats_apart():
    logits = np.random.default_rng(3).normal(size=(64, 300)).astype(np.float32)
    lowest = jit_threshold(logits, make(64, temperature=1e9, top_k=5))  # float32 sees equal probabilities here
    assert (logits >= np.asarray(lowest)[:, None]).sum(axis=1).tolist() == [5] * 64
    logits[:, 7], logits[:, 8] = 20, np.nextafter(np.float32(20), np.float32(0))
    for asked in ({"top_k": 1}, {"top_p": 0.4}):
        np.testing.assert_array_equal(jit_threshold(logits, make(64, **asked)), 20)


def test_tokens_equal_those_of_sorting():
    rng = np.random.default_rng(4)
    logits = rng.normal(size=(256, 300)) * 3
    logits[:64] = np.round(logits[:64])
    asked = {
        "temperature": rng.choice([0.0, 0.5, 1.0, 2.0], 256),
        "top_k": rng.choice([0, 1, 5, 50, 1000], 256),
        "top_p": rng.choice([0.1, 0.5, 0.95, 1.0], 256),
        "min_p": rng.choice([0.0, 0.01, 0.3], 256),
    }
    with jax.enable_x64(True):
        args = jnp.asarray(logits), make(256, **asked, seed=np.arange(256), dtype=np.float64), positions(256)
        np.testing.assert_array_equal(jit_sample(*args), jax.jit(sample_reference)(*args))


# Distributions

LOGITS = np.asarray([0.3, -0.5, 1.1, -np.inf, 0.9, -1.3, 1.1, 0.0, 2.0, -0.7, 0.4, 1.6])


def p_value(tokens, weights):
    """Of Pearson's chi-square test; 0 if anything impossible was drawn."""
    counts = np.bincount(np.asarray(tokens), minlength=weights.size)
    expected = weights / weights.sum() * counts.sum()
    possible = weights > 0
    if counts[~possible].any():
        return 0.0
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    return stats.chi2.sf(statistic, possible.sum() - 1)


def draw_many(keys="position", logits=LOGITS, draws=20_000, **asked):
    key = {} if keys == "position" else {keys: np.arange(draws)}
    where = positions(draws, 100) if keys == "position" else jnp.full(draws, 100, jnp.int32)
    rows = jnp.asarray(np.broadcast_to(logits.astype(np.float32), (draws, logits.size)))
    return jit_sample(rows, make(draws, **asked, **key), where)


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 1.5, "top_k": 5},
        {"top_p": 0.75},
        {"min_p": 0.2},
        ALL_ON,
    ],
)
def test_draws_follow_the_distribution(asked):
    weights, margin = weights_of(LOGITS, **asked)
    assert margin > 1e-3
    assert p_value(draw_many(**asked), weights) > FALSE_ALARM


@pytest.mark.parametrize("keys", ["position", "seed", "sample"])
def test_every_part_of_the_key_gives_independent_draws(keys):
    tokens = np.asarray(draw_many(keys, **ALL_ON))
    weights, _ = weights_of(LOGITS, **ALL_ON)
    assert p_value(tokens, weights) > FALSE_ALARM
    pairs = np.outer(weights, weights).ravel()
    assert p_value(tokens[0::2] * weights.size + tokens[1::2], pairs) > FALSE_ALARM  # neighbours are independent


@pytest.mark.parametrize(
    "fault",
    [{"temperature": 1.0}, {"temperature": 0.95}, {"top_k": 7}, {"top_k": 5}, {"top_p": 0.95}, {"min_p": 0.3}],
)
def test_the_chi_square_catches_faults(fault):
    asked = {"temperature": 0.8, "top_k": 6, "top_p": 0.97, "min_p": 0.05} if "top_k" in fault else ALL_ON
    weights, _ = weights_of(LOGITS, **asked)
    assert p_value(draw_many(**asked), weights) > FALSE_ALARM
    assert p_value(draw_many(**(asked | fault)), weights) < FALSE_ALARM


def test_draws_follow_the_distribution_over_many_blocks():
    logits = np.random.default_rng(5).normal(size=997)
    tokens = np.asarray(draw_many(logits=logits, draws=5000, top_p=0.9))
    weights, _ = weights_of(logits, top_p=0.9)
    assert (weights[tokens] > 0).all()
    order = np.arange(997) // 20  # expected counts of bins, not of tokens
    assert p_value(order[tokens], np.bincount(order, weights)) > FALSE_ALARM
    assert p_value(tokens % 50, np.bincount(np.arange(997) % 50, weights)) > FALSE_ALARM


def test_float32_draws_the_best_of_a_large_vocabulary():
    """Keys and scores from their definition; a nearly flat tail, where the winners' noise is the rarest."""
    rows, vocabulary = 6, 128_256
    logits = np.random.default_rng(6).normal(size=(rows, vocabulary)).astype(np.float32)
    logits[:, 17] += 5
    params = make(rows, temperature=2.0, seed=np.arange(rows) + 2**31, sample=np.arange(rows) % 3)
    tokens = np.asarray(jit_sample(jnp.asarray(logits), params, positions(rows, 50)))
    for row, token in enumerate(tokens):
        noise = reference.gumbel([row + 2**31, row % 3, 50 + row, 0], vocabulary)
        scores = logits[row].astype(np.float64) / 2 + noise
        assert scores[token] >= scores.max() - 1e-5


def test_keys_differ_by_seed_sample_and_position():
    rows, vocabulary = 64, 300
    logits = jnp.zeros((rows, vocabulary))
    base = np.asarray(jit_sample(logits, make(rows), positions(rows)))
    np.testing.assert_array_equal(base, jit_sample(logits, make(rows), positions(rows)))
    others = [
        jit_sample(logits, make(rows, seed=8), positions(rows)),
        jit_sample(logits, make(rows, seed=7 + 2**31), positions(rows)),
        jit_sample(logits, make(rows, sample=1), positions(rows)),
        jit_sample(logits, make(rows), positions(rows, 1)),
        jit_sample(logits, make(rows, seed=0, sample=7), positions(rows)),  # parts are not merely added up
    ]
    for other in others:
        assert (base == np.asarray(other)).sum() <= 3


# The scores that tokens are drawn by


@settings(max_examples=50, derandomize=True)
@given(data=st.data())
def test_the_largest_perturbed_score_is_the_token_and_only_kept_tokens_have_one(data):
    vocabulary, x64 = data.draw(st.sampled_from([1, 2, 7, 300])), data.draw(st.booleans())
    rng, rows = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1))), 6
    logits = rng.normal(size=(rows, vocabulary)) * data.draw(st.sampled_from([1e-3, 1.0, 30.0]))
    if data.draw(st.booleans()):
        logits = np.round(logits)  # ties
    spoilt = data.draw(st.sampled_from([None, -np.inf, np.nan, np.inf]))
    if spoilt is not None:
        logits[rng.random(logits.shape) < 0.4] = spoilt
    off = rng.random((4, rows)) < 0.4
    asked = {
        "temperature": np.where(off[0], 0.0, np.exp(rng.uniform(-3, 3, rows))),
        "top_k": np.where(off[1], 0, rng.integers(1, vocabulary + 3, rows)),
        "top_p": np.where(off[2], 1.0, rng.uniform(0, 1, rows)),
        "min_p": np.where(off[3], 0.0, rng.uniform(0, 1, rows)),
    }
    dtype = np.float64 if x64 else np.float32
    with jax.enable_x64(x64):
        arguments = jnp.asarray(logits.astype(dtype)), make(rows, **asked, dtype=dtype), positions(rows)
        scores, tokens = np.asarray(jit_perturbed(*arguments)), np.asarray(jit_sample(*arguments))
        lowest = np.asarray(jit_threshold(*arguments[:2]))
    assert scores.dtype == dtype
    np.testing.assert_array_equal(np.argmax(scores, axis=1), tokens)
    clean = np.where(np.isnan(logits), -np.inf, np.minimum(logits, np.finfo(dtype).max)).astype(dtype)
    kept = (clean > -np.inf) & ((clean >= lowest[:, None]) | off[0][:, None])
    if spoilt != np.inf:  # what is that far below it has a score of -inf, too
        np.testing.assert_array_equal(scores > -np.inf, kept)
    np.testing.assert_array_equal(scores[off[0]], clean[off[0]])


def test_perturbed_scores_are_their_definition():
    rng, vocabulary = np.random.default_rng(10), 300
    logits = rng.normal(size=(2, vocabulary))
    with jax.enable_x64(True):
        params = make(2, temperature=[0.7, 1.5], seed=[3, 4], sample=[1, 0], top_k=[20, 0], dtype=np.float64)
        scores = np.asarray(perturbed(jnp.asarray(logits), params, jnp.asarray([9, 10], jnp.int32)))
    for row, keys, temperature, kept in ((0, [3, 1, 9, 0], 0.7, 20), (1, [4, 0, 10, 0], 1.5, vocabulary)):
        defined = (logits[row] - logits[row].max()) / temperature + reference.gumbel(keys, vocabulary)
        dropped = logits[row] < np.sort(logits[row])[-kept]
        np.testing.assert_allclose(scores[row], np.where(dropped, -np.inf, defined), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_second_best_score_is_the_token_without_the_first(temperature):
    """What a tree drafts beside the token is what would be drawn, were that one banned."""
    rows = 64
    logits = np.random.default_rng(11).normal(size=(rows, 300)) * 3
    with jax.enable_x64(True):
        params = make(rows, temperature=temperature, seed=np.arange(rows), dtype=np.float64)
        best = np.asarray(jax.lax.top_k(jit_perturbed(jnp.asarray(logits), params, positions(rows)), 4)[1])
        for rank in range(4):
            np.testing.assert_array_equal(jit_sample(jnp.asarray(logits), params, positions(rows)), best[:, rank])
            logits[np.arange(rows), best[:, rank]] = -np.inf


# Rows are on their own


@pytest.mark.parametrize(("vocabulary", "x64"), [(50, False), (4099, False), (1000, True)])
def test_a_row_gets_the_same_token_alone_and_in_any_batch(vocabulary, x64):
    rng = np.random.default_rng(vocabulary)
    rows, dtype = 9, np.float64 if x64 else np.float32
    logits = (rng.normal(size=(rows, vocabulary)) * 2).astype(dtype)
    temperature = np.asarray([0, 1, 0.7, 1, 1.3, 1, 0.9, 3, 1])
    top_k = np.asarray([0, 0, 0, 40, 5, 0, 7, 0, 0])
    top_p = np.asarray([1, 1, 1, 1, 1, 0.8, 0.9, 1, 0.3])
    min_p = np.asarray([0, 0, 0, 0, 0, 0, 0.05, 0.1, 0])

    def run(index):
        asked = {"temperature": temperature[index], "top_k": top_k[index], "top_p": top_p[index], "min_p": min_p[index]}
        params = make(len(index), **asked, seed=np.asarray(index) * 31, dtype=dtype)
        out = [both(logits[index], params, jnp.asarray(index, jnp.int32) + p) for p in range(5)]
        return np.stack([tokens for tokens, _ in out], axis=1), np.asarray(out[0][1])

    @jax.jit
    def both(logits, params, position):
        return sample(logits, params, position)[0], threshold(logits, params)

    with jax.enable_x64(x64):
        together, lowest = run(list(range(rows)))
        for index in [[row] for row in range(rows)] + [[8, 3, 0], [6, 6, 6], list(range(rows))[::-1]]:
            tokens, thresholds = run(index)
            np.testing.assert_array_equal(tokens, together[index])
            np.testing.assert_array_equal(thresholds, lowest[index])
    assert len(np.unique(together[1:])) > 10


def test_padding_rows_may_hold_anything():
    rng = np.random.default_rng(8)
    logits = rng.normal(size=(64, 300)).astype(np.float32)
    params, where = make(64, **ALL_ON, seed=np.arange(64)), positions(64)
    expected = np.asarray(jit_sample(jnp.asarray(logits), params, where))
    logits[58:] = np.asarray([np.nan, -np.inf, np.inf, 0, 3e38, -3e38])[:, None]
    odd = np.asarray([0, np.nan, -1, np.inf, 1e38, 0])
    spoilt = replace(
        params,
        temperature=params.temperature.at[58:].set(odd),
        top_k=params.top_k.at[58:].set(jnp.asarray([0, -5, 2**31 - 1, -(2**31), 3, 0])),
        top_p=params.top_p.at[58:].set(odd),
        min_p=params.min_p.at[58:].set(odd),
        sample=params.sample.at[58:].set(0),
    )
    for shift in range(6):  # every odd row with every odd parameter
        tokens = np.asarray(
            jit_sample(jnp.asarray(logits[[*range(58), *np.roll(range(58, 64), shift)]]), spoilt, where)
        )
        np.testing.assert_array_equal(tokens[:58], expected[:58])
        assert ((tokens >= 0) & (tokens < 300)).all()


@pytest.mark.parametrize("asked", [{"temperature": 0.0}, {}, ALL_ON])
def test_bans_and_broken_logits(asked):
    logits = np.full((64, 300), -np.inf, np.float32)
    logits[:, 5], logits[:, 299] = 1.0, 0.5
    logits[:, 11] = np.nan
    params = make(64, **asked)
    assert set(np.asarray(jit_sample(jnp.asarray(logits), params, positions(64))).tolist()) <= {5, 299}
    logits[:, 20] = np.inf
    assert (np.asarray(jit_sample(jnp.asarray(logits), params, positions(64))) == 20).all()
    for nothing in (-np.inf, np.nan):
        tokens = jit_sample(jnp.full((64, 300), nothing), params, positions(64))
        np.testing.assert_array_equal(tokens, 0)


# Compilation


def test_compiles_once_whatever_is_asked_and_sorts_nothing():
    chex = pytest.importorskip("chex")
    chex.clear_trace_counter()
    run = jax.jit(chex.assert_max_traces(lambda *args: sample(*args)[0], n=1))
    logits = jnp.asarray(np.random.default_rng(9).normal(size=(4, 60)), jnp.float32)
    for asked in ({"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}, ALL_ON):
        assert run(logits, make(4, **asked), positions(4)).dtype == jnp.int32
    assert "stablehlo.sort" not in run.lower(logits, make(4), positions(4)).as_text()
