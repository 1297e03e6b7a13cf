"""Checks sample's definition, its backends and its errors; jllm's own tests are in tests/model/test_sampling.py."""

import decimal
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import backends
from pallas_kernels.sample import noise, reference, sample
from pallas_kernels.sample.cases import arguments
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
    rows = 300
    logits = jnp.tile(jnp.asarray([0.0, 2.0, -jnp.inf, 1.0]), (rows, 1))
    keys = arguments([{}] * rows)[-1]
    temperature = jnp.full(rows, jnp.inf)
    for implementation in (reference.sample, sample):
        run = partial(implementation, logits, temperature, jnp.zeros(rows, jnp.int32), jnp.ones(rows))
        assert np.bincount(run(jnp.zeros(rows), keys)[0]).min(where=[True, True, False, True], initial=rows) > 70
        one = sample(logits, temperature, jnp.ones(rows, jnp.int32), jnp.ones(rows), jnp.full(rows, 5.0), keys)[0]
        assert set(np.asarray(one).tolist()) == {1}


def test_the_definition_on_a_row_by_hand():
    """Expects the largest logit plus noise of what is kept."""
    rows = [1.0] * 5, [0, 3, 0, 3, 0], [1, 1, 0.75, 0.75, 1], [0, 0, 0, 0, 0.6]
    columns = [jnp.asarray(x, jnp.int32 if i == 1 else jnp.float32) for i, x in enumerate(rows)]
    logits = jnp.log(jnp.asarray([[0.1, 0.4, 0.2, 0.3]] * 5))
    # 4/9 + 3/9, of what top-k left, reach 0.75, and 0.4 + 0.3 do not.
    kept = ([0, 1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 3], [1, 3])
    seen: list[set[int]] = [set() for _ in kept]
    for seed in range(40):
        keys = jnp.asarray([[seed, 1, 2, 0]] * 5, jnp.uint32)
        scores = np.asarray(logits[0]) + reference.gumbel(keys[0], 4)
        expected = [max(ids, key=lambda i: scores[i]) for ids in kept]
        for implementation in (reference.sample, sample):
            tokens, finite = implementation(logits, *columns, keys)
            assert np.asarray(tokens).tolist() == expected
            assert np.asarray(finite).all()
        for ids, token in zip(seen, expected):
            ids.add(token)
    assert [sorted(ids) for ids in seen] == list(kept)


def test_what_counts_as_wrong():
    row, keys = np.log(np.asarray([0.25, 0.5, 0.25], np.float32)), np.asarray([3, 0, 9, 0], np.uint32)
    scores = row + reference.gumbel(keys, 3)
    best = int(np.argmax(scores))
    for token in range(3):
        assert distance(token, row, 1.0, 0, 1.0, 0.0, keys) == pytest.approx(scores[best] - scores[token])
    assert distance(2, row, 1.0, 1, 1.0, 0.0, keys) == np.inf
    assert distance(0, row, 0.0, 0, 1.0, 0.0, keys) == np.inf


# Noise


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_gives_its_published_words(counter, key, words):
    """Compares with Random123's known answers."""
    ours = noise.philox([jnp.uint32(x) for x in counter], [jnp.uint32(x) for x in key])
    written_out = reference.philox(np.asarray(counter), np.asarray(key))
    for found in (ours, written_out):
        assert " ".join(f"{int(x):08x}" for x in found) == words


def test_a_token_s_bits_follow_from_its_keys_and_id_alone():
    keys = arguments([{}] * 5)[-1]
    bits = np.asarray(noise.bits(keys, 30))
    for row, key in zip(bits, np.asarray(keys)):
        np.testing.assert_array_equal(row, reference.bits(key, 120))
    np.testing.assert_array_equal(noise.bits(keys[3:4], 10, first=15), bits[3:4, 60:100])
    changed = [keys.at[:, i].add(1) for i in range(4)] + [keys[:, [1, 0, 2, 3]], keys[:, [0, 1, 3, 2]]]
    for other in changed:
        assert np.mean(np.asarray(noise.bits(other, 30)) == bits) < 0.01
    whole = np.asarray(noise.gumbel(keys, 60, jnp.float32))
    for first in (0, 3, 40):
        np.testing.assert_array_equal(noise.gumbel(keys, 17, jnp.float32, first), whole[:, first : first + 17])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_noise_is_accurate_at_both_ends(monkeypatch, dtype):
    """Bounds E's relative error, for bits from all over and from either end, against 50 digits."""
    ends = [0, 1, 2, 100, 2**12 + 1, 2**24 + 3, 2**30 - 1, 2**30, 2**31 - 1]
    random = [*ends, *(2**32 - 1 - x for x in ends), *np.random.default_rng(0).integers(0, 2**32, 22).tolist()]
    with jax.enable_x64(dtype == np.float64), decimal.localcontext(prec=50):
        monkeypatch.setattr(noise, "bits", lambda *_: jnp.asarray([random], jnp.uint32))
        found = np.asarray(noise.gumbel(jnp.zeros((1, 4), jnp.uint32), len(random), dtype))[0]
        assert found.dtype == dtype
        exact = [-(1 - (decimal.Decimal(b) + decimal.Decimal("0.5")) / 2**32).ln() for b in random]
        wanted = np.asarray([float(-e.ln()) for e in exact])
    assert np.abs(found - wanted).max() < 8 * np.finfo(dtype).eps * 23  # that of E is the error of its logarithm


def test_shards_of_the_vocabulary_draw_what_the_whole_draws():
    vocabulary = 1024
    logits, asked = mixed_rows(vocabulary)[0][:6], [{"temperature": 0.7}] * 6
    temperature, *rest, keys = arguments(asked)
    tokens, _ = sample(jnp.asarray(logits), temperature, *rest, keys, backend="xla")
    shards = []
    for first in range(0, vocabulary, 256):
        scores = (logits[:, first : first + 256] - logits.max(axis=1, keepdims=True)) / temperature[:, None]
        shards.append(np.asarray(scores + noise.gumbel(keys, 256, jnp.float32, first)))
    best = np.argmax([shard.max(axis=1) for shard in shards], axis=0)
    merged = [256 * best[r] + np.argmax(shards[best[r]][r]) for r in range(len(asked))]
    assert merged == np.asarray(tokens).tolist()


def test_close_models_agree_as_often_as_gumbel_coupling_promises():
    """Expects at least (1 - TV) / (1 + TV) of draws with equal keys (Daliri et al., arXiv 2408.07978)."""
    rng, draws = np.random.default_rng(0), 4000
    arrays = arguments([{}] * draws, seed=2)
    for spread in (0.05, 0.3, 1.0):
        p = rng.normal(size=64)
        q = p + spread * rng.normal(size=64)
        probabilities = [np.exp(x) / np.exp(x).sum() for x in (p, q)]
        distance = np.abs(probabilities[0] - probabilities[1]).sum() / 2
        tokens = [sample(jnp.tile(jnp.asarray(x, jnp.float32), (draws, 1)), *arrays)[0] for x in (p, q)]
        agreement, least = float(jnp.mean(tokens[0] == tokens[1])), (1 - distance) / (1 + distance)
        assert agreement > least - 5 * np.sqrt(least * (1 - least) / draws)
        assert agreement > 1 - 4 * distance  # what independent draws would not reach
    unlike = sample(jnp.tile(jnp.asarray(p, jnp.float32), (draws, 1)), *arrays[:-1], arguments([{}] * draws, 3)[-1])[0]
    assert float(jnp.mean(unlike == tokens[0])) < 0.2


# Errors


def args(vocabulary=2048, dtype=jnp.float32):
    logits, asked = mixed_rows(vocabulary)
    logits, *rest = jax_arguments(logits, asked)
    return logits.astype(dtype), *rest


def test_what_mosaic_does_not_do_is_refused_where_it_is_named():
    with jax.enable_x64(True), pytest.raises(NotImplementedError, match="logits of float64 are not supported"):
        sample(*args(dtype=jnp.float64), backend="mosaic")
    with pytest.raises(NotImplementedError, match="V=16777220 is not supported by backend mosaic, which does up to"):
        jax.eval_shape(
            partial(sample, backend="mosaic"), jax.ShapeDtypeStruct((11, (1 << 24) + 4), jnp.float32), *args()[1:]
        )
    with pytest.raises(NotImplementedError, match="R=0 is not supported"):
        sample(*(x[:0] for x in args()), backend="mosaic")


def test_unnamed_mosaic_runs_on_a_hopper_gpu_for_what_it_supports(monkeypatch):
    def kernels(arguments) -> int:
        trace = jax.jit(lambda *x: sample(*x)).trace(*arguments)
        return trace.lower(lowering_platforms=("cuda",)).as_text().count("stablehlo.custom_call @mosaic_gpu")

    monkeypatch.setattr(backends, "on_hopper", lambda: True)
    assert kernels(args()) == 2
    assert kernels(args(2050)) == kernels(args(30)) == 2
    assert kernels(args(dtype=jnp.bfloat16)) == 0


def test_errors():
    logits, temperature, top_k, *rest = args()
    with pytest.raises(ValueError, match="temperature has shape"):
        sample(logits, temperature[:3], top_k, *rest)
    with pytest.raises(ValueError, match="top_k has dtype float32, expected int32"):
        sample(logits, temperature, top_k.astype(jnp.float32), *rest)
    with pytest.raises(ValueError, match=r"keys is float32\[11, 4\], expected uint32\[R, 4\]"):
        sample(logits, temperature, top_k, *rest[:-1], rest[-1].astype(jnp.float32))
    with pytest.raises(ValueError, match=r"keys is uint32\[11, 3\], expected uint32\[R, 4\]"):
        sample(logits, temperature, top_k, *rest[:-1], rest[-1][:, :3])
    with pytest.raises(ValueError, match="logits has dtype int32"):
        sample(logits.astype(jnp.int32), temperature, top_k, *rest)
    with pytest.raises(ValueError, match="expected at least one token"):
        sample(logits[:, :0], temperature, top_k, *rest)
