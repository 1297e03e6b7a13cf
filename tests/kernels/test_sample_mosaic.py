"""Checks the Mosaic GPU kernel: interpreted on the CPU with race detection, lowered for CUDA, and run on a GPU."""

import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import thread_map

from pallas_kernels.hopper.hopper import SHARED_MEMORY
from pallas_kernels.hopper.smem_sm90 import shared_bytes
from pallas_kernels.sample import (
    block_sm90,
    cut_sm90,
    mosaic_sm90,
    noise_sm90,
    reference,
    row_sm90,
    sample,
    thresholds_sm90,
    xla,
)
from pallas_kernels.sample.cases import MIXED, arguments
from pallas_kernels.sample.config import CONFIGS, Config, choose_config, padded
from tests.kernels import interpreter
from tests.kernels.helpers import same_bits, thinned
from tests.kernels.interpreter import FIND_RACES, INTERPRET
from tests.kernels.sample_helpers import extreme_rows, jax_arguments, misses, mixed_rows, odd_rows


@pytest.fixture(autouse=True)
def compiled_threads(monkeypatch, strict_interpreter):
    """Lets XLA compile threads: each of twenty blocks takes thousands of operations, which takes longer than that."""
    monkeypatch.setattr(thread_map, "_run_jaxpr", interpreter.COMPILED)


INTERPRETED = [  # one chunk and more, with and without a rest, held and not; what parts keep, enough and not
    (516, Config(1, 1)),
    (516, Config(1, 1, held=0, kept=0)),
    (516, Config(1, 1, held=0)),
    (1500, Config(2, 1)),
    (1500, Config(2, 1, held=0, kept=0)),
    (1500, Config(2, 1, held=0, kept=2)),
    (1500, Config(1, 2, held=0)),
    (2052, Config(1, 2)),
    (2560, Config(4, 1, held=0)),
    (5000, Config(1, 1, held=0, kept=1)),
    (301, Config(1, 1)),
    (1501, Config(2, 1, held=0)),
]


def interpreted(logits, asked, config, seed=0):
    """Runs the kernel under the GPU interpreter; a race fails."""
    out = mosaic_sm90.sample(*jax_arguments(logits, asked, seed), config=config, interpret=FIND_RACES)
    return jax.block_until_ready(out)


@pytest.mark.parametrize(("vocabulary", "config"), thinned(INTERPRETED, (0, 2, 3, 4, 7, 8, 9, 10)), ids=str)
def test_interpreted_matches_the_definition(vocabulary, config):
    """Puts all filters, greedy rows, odd ones and parameters at the ends of their ranges in one batch. So blocks of one
    grid take different branches."""
    seed = config.warpgroups
    kinds = [mixed_rows(vocabulary), odd_rows(vocabulary, seed)] if vocabulary != 516 else [extreme_rows(vocabulary)]
    logits, asked = np.concatenate([rows for rows, _ in kinds]), sum([asked for _, asked in kinds], [])
    assert not misses(*interpreted(logits, asked, config, seed), logits, asked, seed)


def three_rows(logits, asked, seed):
    """Returns the tokens of three rows, compiled once."""
    arrays = jax_arguments(logits, asked, seed)
    tokens, finite = mosaic_sm90.sample(*arrays, config=Config(2, 1), interpret=FIND_RACES)
    return np.asarray(tokens).tolist(), np.asarray(finite), reference.sample(*arrays)[0].tolist()


@pytest.mark.parametrize("seed", range(3))
def test_the_ends_of_a_row(seed):
    """Tries two tokens, where bans and the part shared by two chunks come first and last."""
    logits, two = np.full((3, 1500), -np.inf, np.float32), [[7, 1400], [1020, 1030], [0, 1499]]
    for row, ids in zip(logits, two):
        row[ids] = 0.5
    tokens, finite, expected = three_rows(logits, [{}, {"top_k": 2}, {"top_p": 0.99}], seed)
    assert tokens == expected
    assert all(token in ids for token, ids in zip(tokens, two))
    assert not finite.any()


def test_top_p_is_of_what_top_k_left():
    """Takes 50 tokens of 1500, whose weights are nearly equal, and not of all."""
    logits = np.broadcast_to(-np.arange(1500, dtype=np.float32) / 1000, (3, 1500))
    for seed in range(4):
        tokens, _, expected = three_rows(logits, [{"top_k": 50, "top_p": p} for p in (0.2, 0.5, 0.8)], seed)
        assert tokens == expected
        assert max(tokens) < 41


@pytest.mark.parametrize("shift", [3000.0, -3000.0])
def test_noise_decides_among_large_logits(shift):
    """Scores near 3000 would round noise to 2^-12: it is drawn anew, below the largest logit."""
    logits = np.float32(shift) + np.random.default_rng(3).integers(-8, 9, (3, 1500)).astype(np.float32) / 4
    arrays = jax_arguments(logits, [{}, {"temperature": 0.5}, {"temperature": 1e-30}], 2)
    tokens, _ = mosaic_sm90.sample(*arrays, config=Config(1, 1), interpret=INTERPRET)
    assert np.asarray(tokens).tolist() == reference.sample(*arrays)[0].tolist()


def test_a_row_does_not_depend_on_the_others():
    logits, asked = mixed_rows(1500, spread=0.5)
    some = [4, 1, 6]
    arrays = jax_arguments(logits[some], [asked[i] for i in some])
    options = {"config": Config(2, 1), "interpret": FIND_RACES}
    together = mosaic_sm90.sample(*arrays, **options)
    for r in (1, 2):
        alone = mosaic_sm90.sample(*(x[r : r + 1] for x in arrays), **options)
        assert same_bits(alone, jax.tree.map(lambda x, r=r: x[r : r + 1], together))


FAULTS = [  # where, what, and what becomes of it
    (row_sm90.Row, "own", lambda real: lambda self, chunk, raw: [row_sm90.clean(x) for x in raw]),
    (row_sm90.Row, "start", lambda real: lambda self, chunk: real(self, chunk) * 0),
    (row_sm90, "clean", lambda real: lambda x: x),
    (row_sm90.Weights, "of", lambda real: lambda self, x: real(self, x) * real(self, x)),
    (row_sm90.Weights, "scaled", lambda real: lambda self, x: real(self, x) * 0.5),
    (noise_sm90, "_draw", lambda real: lambda words, ids: real([words[1], *words[1:]], ids)),
    (noise_sm90, "_philox", lambda real: lambda counter, key: real(counter, key)[::-1]),
    (noise_sm90, "_log2", lambda real: lambda x: noise_sm90.arith.mulf(real(x), noise_sm90._float(0.5))),
    (noise_sm90, "SMALL", lambda real: 0.9999),
    (row_sm90.Held, "counts", lambda real: lambda self, lowest: [2.0 * x for x in real(self, lowest)]),
    (row_sm90.Streamed, "masses", lambda real: lambda self, lowest: real(self, [low + 0.5 for low in lowest])),
    (thresholds_sm90, "last", lambda real: lambda *args: real(*args) + 1),
    (thresholds_sm90, "last", lambda real: lambda *args: real(*args) - 1),
    (block_sm90.Block, "sums", lambda real: lambda self, pieces, area: [2 * x for x in real(self, pieces, area)]),
]


HELD = Config(2, 1)


def wrong_rows(config: Config = HELD) -> list[str]:
    """Returns what the tests above would find in a few rows, without their compiled kernel; no race detection, for
    speed."""
    logits, asked = mixed_rows(1500)
    rng, few = np.random.default_rng(0), {"top_p": 0.3}
    steps = (1 + np.arange(1500) * 2.0**-23).astype(np.float32)  # whose neighbours thresholds must tell apart
    shuffled = np.stack([np.append(rng.permutation(steps[:750]), rng.permutation(steps[750:])) for _ in range(4)])
    logits = np.concatenate([logits[:4], np.roll(shuffled, 200, axis=1), np.tile(logits[3], (8, 1))])
    asked = [{}, asked[0], {}, asked[1], *[{"top_k": 3}, {"top_k": 1}] * 2, *[few] * 8]
    logits[0, [600, 700]], logits[1, 1::2], logits[2, ::2] = np.inf, -np.inf, np.nan
    arrays, interpret = jax_arguments(logits, asked), INTERPRET
    return misses(*mosaic_sm90.sample.__wrapped__(*arrays, config=config, interpret=interpret), logits, asked)


@pytest.mark.parametrize(("owner", "name", "change"), FAULTS)
def test_seeded_faults_are_caught(monkeypatch, owner, name, change):
    changed = change(getattr(owner, name))
    monkeypatch.setattr(owner, name, changed)
    if name == "clean":
        monkeypatch.setattr(mosaic_sm90, name, changed)
    assert wrong_rows(Config(2, 1, held=0, kept=0) if owner is row_sm90.Streamed else HELD)


def test_without_a_fault_nothing_is_wrong():
    assert not wrong_rows()


def wrong_padded_rows() -> list[str]:
    """Returns the same of rows that end within a vector, whose logits are all below zero, plain, filtered and
    greedy."""
    logits = -5 - np.abs(np.random.default_rng(0).normal(size=(4, 301)).astype(np.float32))
    logits[3, 300] = -1.0
    asked = [{}, {"top_p": 0.9}, {"top_k": 301}, {"temperature": 0.0}]
    found = mosaic_sm90.sample.__wrapped__(*jax_arguments(logits, asked), config=Config(1, 1), interpret=INTERPRET)
    return misses(*found, logits, asked)


def test_seeded_faults_of_padding_are_caught(monkeypatch):
    assert not wrong_padded_rows()
    with monkeypatch.context() as patch:
        patch.setattr(row_sm90.Row, "given", lambda self, x, ids: x)
        assert all("finite is False" in one for one in wrong_padded_rows())
    pad = jnp.pad
    monkeypatch.setattr(jnp, "pad", lambda x, width, constant_values=0: pad(x, width))
    assert any("token" in one for one in wrong_padded_rows())


def wrong_cut_rows(kept: int = 2) -> list[str]:
    """Returns the same of rows that are searched in what their two parts keep. The 40 likely tokens share ten slots of
    the first part, of which `kept` each are kept. Or they are in the only chunk of the second."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(12, 2560)).astype(np.float32) - 30
    likely = 1 + rng.permuted(np.tile(np.arange(40, dtype=np.float32) / 1000, (12, 1)), axis=1)
    logits[:6, (np.arange(10) + 512 * np.arange(4)[:, None]).ravel()] = likely[:6]
    logits[6:, 2048:2088] = likely[6:]
    asked = [{"top_k": 30}, {"top_p": 0.5}, {"top_k": 36, "top_p": 0.5}] * 4
    arrays, config = jax_arguments(logits, asked), Config(1, 1, held=0, kept=kept)
    found = mosaic_sm90.sample.__wrapped__(*arrays, config=config, interpret=INTERPRET)
    return misses(*found, logits, asked)


CUT_FAULTS = [
    (cut_sm90, "insert", lambda real: lambda kept, x: (real(kept, x)[0], row_sm90.full(-np.inf))),
    (cut_sm90, "insert", lambda real: lambda kept, x: ([x, *kept[:-1]], row_sm90.full(-np.inf))),
    (cut_sm90, "mass", lambda real: lambda *args: 0.5 * real(*args)),
    (mosaic_sm90, "proven_threshold", lambda real: lambda *args: (real(*args)[0], jnp.bool_(True))),
]


@pytest.mark.parametrize(("owner", "name", "change"), CUT_FAULTS)
def test_seeded_faults_of_what_parts_keep_are_caught(monkeypatch, owner, name, change):
    monkeypatch.setattr(owner, name, change(getattr(owner, name)))
    assert wrong_cut_rows()


def test_what_is_past_the_last_chunk_does_not_count(monkeypatch):
    """Reads the second part's chunk four times."""
    assert not wrong_cut_rows(kept=4)
    monkeypatch.setattr(row_sm90.Row, "own", lambda self, chunk, raw: [row_sm90.clean(x) for x in raw])
    assert wrong_cut_rows(kept=4)


def test_what_parts_keep_is_enough_or_known_not_to_be(monkeypatch):
    real, proven = mosaic_sm90.proven_threshold, []

    def watched(*args):
        found = real(*args)
        jax.debug.callback(lambda each: proven.append(bool(each)), found[1])
        return found

    monkeypatch.setattr(mosaic_sm90, "proven_threshold", watched)
    assert not wrong_cut_rows()
    jax.effects_barrier()
    assert {*proven} == {True, False}


@pytest.mark.parametrize("late", [0, 1])
def test_a_shared_area_is_a_race(monkeypatch, late):
    """Expects a race where reductions follow each other too closely without their areas, whoever comes first."""
    real, wait = block_sm90.Block._reduce, interpreter.Barrier.wait

    def wait_longer(self, thread, logging_info=None):
        wait(self, thread, logging_info)
        time.sleep(0.1 * (thread.warpgroup_id == late))

    monkeypatch.setattr(interpreter.Barrier, "wait", wait_longer)
    monkeypatch.setattr(block_sm90.Block, "_reduce", lambda self, pairs, area: real(self, pairs, 0))
    logits, asked = mixed_rows(1500)[0], [MIXED[5]] * 2  # nothing waits for what a race made wrong
    arrays = jax_arguments(logits[:2], asked)
    with pytest.raises(jax.errors.JaxRuntimeError, match="a race in"):
        jax.block_until_ready(mosaic_sm90.sample.__wrapped__(*arrays, config=Config(2, 1), interpret=FIND_RACES))


@pytest.mark.parametrize("vocabulary", thinned([128256, 151936, 32768, 32772, 1, 32001], (0, 3, 4, 5)))
def test_lowers_for_cuda_and_fits_shared_memory(vocabulary):
    """Leaves rows out: they are the grid's size alone."""
    config = choose_config(padded(vocabulary))
    assert shared_bytes(mosaic_sm90.scratch(padded(vocabulary), config)) <= SHARED_MEMORY
    logits = jax.ShapeDtypeStruct((64, vocabulary), jnp.float32)
    row = [jax.ShapeDtypeStruct((64,), dtype) for dtype in ("float32", "int32", "float32", "float32")]
    row.append(jax.ShapeDtypeStruct((64, 4), jnp.uint32))
    trace = jax.jit(lambda *x: sample(*x, backend="mosaic")).trace(logits, *row)
    text = trace.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 2
    assert not any(word in text for word in ("stablehlo.if", "stablehlo.case", "stablehlo.while", "stablehlo.slice"))


@pytest.mark.parametrize(("vocabulary", "config"), thinned(INTERPRETED, (4, 7, 11)), ids=str)
def test_interpreted_configurations_lower(vocabulary, config):
    """Takes each way to hold, cut and keep logits."""
    arrays = jax_arguments(*mixed_rows(vocabulary))
    trace = jax.jit(partial(mosaic_sm90.sample, config=config)).trace(*arrays)
    assert "mosaic_gpu" in trace.lower(lowering_platforms=("cuda",)).as_text()


def test_configurations_are_checked():
    with pytest.raises(ValueError, match="warpgroups is 3, expected 1, 2, 4 or 8"):
        Config(3)
    with pytest.raises(ValueError, match="pieces is 0, expected at least 1"):
        Config(pieces=0)
    with pytest.raises(ValueError, match="V=4096 is less than the 8192 logits"):
        Config().check(4096)
    with pytest.raises(ValueError, match="kept is 2, expected a multiple of the 4 warpgroups"):
        Config(kept=2)
    for config in CONFIGS:
        assert choose_config(config.chunk) == config


# On a device


def many_rows(vocabulary: int, copies: int, spread: float, seed: int):
    logits, asked = zip(*(mixed_rows(vocabulary, seed + i, spread) for i in range(copies)))
    return np.concatenate(logits), sum(asked, [])


@pytest.mark.gpu
@pytest.mark.parametrize("vocabulary", [300, 512, 1028, 4096, 32000, 32001, 32768, 32772, 128256, 151936])
@pytest.mark.parametrize("spread", [0.01, 3.0])
def test_gpu_matches_the_definition_and_xla(vocabulary, spread):
    """Allows tokens to differ where the two scores are within rounding of each other. The same bits come again."""
    for seed, (logits, asked) in enumerate(
        (many_rows(vocabulary, 6, spread, 0), odd_rows(vocabulary, 1), odd_rows(vocabulary, 6))
    ):
        arrays = jax_arguments(logits, asked, seed)
        tokens, finite = sample(*arrays, backend="mosaic")
        assert not misses(tokens, finite, logits, asked, seed)
        plain, plain_finite = xla.sample(*arrays)
        assert same_bits(finite, plain_finite)
        assert np.mean(np.asarray(tokens) != np.asarray(plain)) < 0.02
        for _ in range(3):
            assert same_bits(sample(*arrays, backend="mosaic"), (tokens, finite))


@pytest.mark.gpu
@pytest.mark.parametrize("vocabulary", [512, 32000, 32772, 151936])
def test_gpu_parameters_at_the_ends_of_their_ranges_and_beyond(vocabulary):
    """Tries the approximate logarithm of 1, too, which must not ban the most likely token."""
    logits, asked = extreme_rows(vocabulary)
    for seed in range(8):
        assert not misses(*sample(*jax_arguments(logits, asked, seed), backend="mosaic"), logits, asked, seed)


@pytest.mark.gpu
@pytest.mark.parametrize("vocabulary", [32000, 128256])
def test_gpu_a_row_does_not_depend_on_the_others(vocabulary):
    logits, asked = many_rows(vocabulary, 30, 3.0, 9)  # 330 rows
    arrays = jax_arguments(logits, asked)
    together = sample(*arrays, backend="mosaic")
    for rows in (slice(0, 1), slice(7, 8), slice(100, 164)):
        part = sample(*(x[rows] for x in arrays), backend="mosaic")
        assert same_bits(part, jax.tree.map(lambda x, rows=rows: x[rows], together))


@pytest.mark.gpu
@pytest.mark.parametrize("vocabulary", [300, 32000, 32001])
def test_gpu_a_step_of_the_sampler_has_no_copy_to_the_host(vocabulary):
    arrays = jax_arguments(*mixed_rows(vocabulary))
    text = jax.jit(lambda *x: sample(*x, backend="mosaic")).lower(*arrays).compile().as_text()
    assert text.count("custom-call") >= 1
    assert not any(word in text for word in (" conditional(", " while("))


@pytest.mark.gpu
def test_gpu_draws_follow_the_distribution():
    """Checks shares of 20,000 draws, by a chi-square."""
    vocabulary, rows = 4096, 20_000
    row = np.random.default_rng(0).normal(size=vocabulary).astype(np.float32) * 3
    row[100:] -= 8
    arrays = arguments([MIXED[1]] * rows, seed=1)
    tokens, _ = sample(jnp.broadcast_to(jnp.asarray(row), (rows, vocabulary)), *arrays, backend="mosaic")
    p = np.exp(row.astype(np.float64))
    likely = np.append(p[:100], p[100:].sum()) / p.sum()
    counts = np.bincount(np.minimum(np.asarray(tokens), 100), minlength=101)
    many = likely * rows > 5
    statistic = ((counts - rows * likely)[many] ** 2 / (rows * likely)[many]).sum()
    assert statistic < many.sum() + 6 * np.sqrt(2 * many.sum())
