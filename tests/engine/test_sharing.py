"""What is shared never changes a result: the oracle with a prefix cache in any state, samples, forks, snapshots."""

from contextlib import suppress
from dataclasses import replace

import jax
import numpy as np
import pytest

from jllm.engine import device as device_module
from jllm.engine.engine import Engine
from jllm.engine.pages import PagePool
from jllm.engine.request import Completion, SamplingParams
from jllm.engine.reuse import ReusedPrefix, Sharing
from jllm.engine.sequence import Sequence
from jllm.errors import ConfigError, RequestError, SnapshotError
from jllm.files import snapshot as snapshots
from jllm.step.buckets import Bucket
from tests.tiny import greedy, tiny_model

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

# 96 tokens: more than any one request here needs, less than four may. One size, so that one step is compiled.
SMALL = {"max_slots": 4, "page_size": 8, "num_pages": 12, "max_step_tokens": 16, "buckets": (Bucket(4, 16, 4),)}
ALONE = {**SMALL, "prefix_cache": False}


@pytest.fixture(scope="module")
def model():
    with jax.enable_x64(True):
        yield tiny_model("float64", num_layers=1)


@pytest.fixture
def wide():
    with jax.enable_x64(True):
        yield


def finish(engine: Engine) -> dict[tuple[int, int], Completion]:
    return {(e.id, e.sample): e.completion for e in engine.run() if e.completion}


def complete(engine: Engine, prompt, sampling) -> Completion:
    request = engine.submit(prompt, sampling)
    return finish(engine)[request, 0]


def alone(model, prompt, sampling, **options) -> Completion:
    return complete(Engine(model, **{**ALONE, **options}), list(prompt), sampling)


def same(got: Completion, want: Completion) -> bool:
    return (got.token_ids, got.finish_reason) == (want.token_ids, want.finish_reason)


def check_pool(engine: Engine):
    m = engine.metrics()
    assert m["pages_free"] == m["pages_total"], "pages were lost"
    assert m["pages_used"] == 0


STEMS = [tuple(range(3, 40)), (*range(3, 20), *range(60, 80)), tuple(range(50, 62))]
prompts = st.builds(
    lambda stem, length, tail: (*STEMS[stem][:length], *tail),
    st.integers(0, 2),
    st.integers(1, 37),
    st.lists(st.integers(80, 82), max_size=3),
)
samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1.0]),
    max_new_tokens=st.integers(1, 16),
    stop_token_ids=st.sampled_from([(), tuple(range(20, 32))]),
    seed=st.integers(0, 3),
)
waves = st.lists(st.lists(st.tuples(prompts, samplings), min_size=1, max_size=5), min_size=1, max_size=3)
HYPOTHESIS = settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("options", [{}, {"kv_policy": "extent"}, {"kv_policy": "reserve"}], ids=str)
@HYPOTHESIS
@given(waves=waves, forks=st.lists(st.integers(0, 12), max_size=2), error=st.sampled_from([None, None, 3]))
def test_any_state_of_the_cache_same_tokens(model, options, waves, forks, error):
    """Waves of prompts that begin alike, of which later ones find what earlier ones left; some are forked, and the
    device may fail. Twins have another sample's key: only greedy ones are compared."""
    with jax.enable_x64(True):
        engine = Engine(model, **SMALL, **options)
        step = 0
        for jobs in waves:
            ids = [engine.submit(list(prompt), sampling) for prompt, sampling in jobs]
            done: dict[tuple[int, int], Completion] = {}
            while engine.has_work:
                if step == error:
                    engine._loop.recover(jax.errors.JaxRuntimeError("lost"))
                    assert engine.metrics()["cached_pages"] == 0
                if step in forks:
                    with suppress(RequestError):  # it has ended
                        engine.fork(ids[0])
                done |= {(e.id, e.sample): e.completion for e in engine.step() if e.completion}
                step += 1
                assert step < 2000, "the engine makes no progress"
            check_pool(engine)
            for (request, sample), got in done.items():
                prompt, sampling = jobs[ids.index(request)]
                if sample == 0 or sampling.temperature == 0:
                    assert same(got, alone(model, prompt, sampling))


@pytest.mark.parametrize(("kv_cache", "size", "found"), [("int8-g8", 8, 36), ("int8-g8", 16, 32), ("int4-g8", 8, 36)])
def test_formats_and_page_sizes(model, wide, kv_cache, size, found):
    """A page that is found, or copied, holds what would be computed, as stored."""
    prompts = [STEMS[0], STEMS[0][:21], (*STEMS[0][:27], 9), STEMS[0]]
    wants = [alone(model, p, greedy(6), kv_cache=kv_cache) for p in prompts]
    engine = Engine(model, **{**SMALL, "page_size": size}, kv_cache=kv_cache)
    for prompt, want in zip(prompts, wants, strict=True):
        assert same(complete(engine, list(prompt), greedy(6)), want)
    m = engine.metrics()
    # Of the second prompt all but the last token, of the third what is the first one's, of the fourth as much as full
    # pages have: 42 tokens had K and V.
    assert m["prefix_hit_tokens"] == 20 + 27 + found
    assert m["prefill_tokens"] == sum(map(len, prompts)) - m["prefix_hit_tokens"]


def test_off_means_that_nothing_is_kept(model, wide):
    engine = Engine(model, **SMALL, prefix_cache=False)
    for _ in range(2):
        complete(engine, list(STEMS[0]), greedy(3))
    m = engine.metrics()
    assert m["prefill_tokens"] == 2 * 37
    assert m["cached_pages"] == m["prefix_lookups"] == m["prefix_hit_tokens"] == 0
    with pytest.raises(ConfigError, match="prefix_cache must be True or False, not 'yes'"):
        Engine(model, **SMALL, prefix_cache="yes")


def test_reset_forgets(model, wide):
    engine = Engine(model, **SMALL)
    complete(engine, list(STEMS[0]), greedy(3))
    assert engine.metrics()["cached_pages"] == 4  # 39 tokens have K and V
    engine.reset_prefix_cache()
    assert engine.metrics()["cached_pages"] == 0
    complete(engine, list(STEMS[0]), greedy(3))
    assert engine.metrics()["prefix_hit_tokens"] == 0
    check_pool(engine)


def test_the_pool_takes_back_what_the_cache_keeps_before_it_preempts(model, wide):
    engine = Engine(model, **SMALL)
    for first in (3, 4, 5, 6):
        complete(engine, [first] * 30, greedy(8))
    m = engine.metrics()
    assert m["preemptions"] == 0
    assert m["prefix_pages_evicted"] > 0
    assert m["prefix_pages_kept"] == m["prefix_pages_evicted"] + m["cached_pages"]


def test_who_asks_for_what_only_computing_gives_computes(model, wide):
    """Log-probabilities of a prompt's tokens, and penalties, which count tokens on the device."""
    params = greedy(12, repetition_penalty=1.5), greedy(4, prompt_logprobs=True), greedy(12, frequency_penalty=1.0)
    engine = Engine(model, **SMALL)
    complete(engine, list(STEMS[0]), greedy(2))
    for sampling in params:
        got, want = complete(engine, list(STEMS[0]), sampling), alone(model, STEMS[0], sampling)
        assert same(got, want)
        if sampling.prompt_logprobs:
            np.testing.assert_allclose(got.prompt_logprobs, want.prompt_logprobs, rtol=1e-10)
    assert engine.metrics()["prefix_hit_tokens"] == 0
    biased = greedy(12, logit_bias={5: 3.0})
    assert same(complete(engine, list(STEMS[0]), biased), alone(model, STEMS[0], biased))
    assert engine.metrics()["prefix_hit_tokens"] == 36


@pytest.mark.parametrize("keep", [True, False])
def test_samples_share_the_prompt(model, wide, keep):
    sampling = SamplingParams(n=3, seed=7, max_new_tokens=8, ignore_eos=True)
    engine = Engine(model, **SMALL, prefix_cache=keep)
    request = engine.submit(list(STEMS[0]), sampling)
    peak, done = 0, {}
    while engine.has_work:
        done |= {e.sample: e.completion for e in engine.step() if e.completion}
        peak = max(peak, engine.metrics()["pages_used"])
    m = engine.metrics()
    assert m["prefix_forked_tokens"] + m["prefix_hit_tokens"] == 2 * 36
    assert m["prefill_tokens"] == 37 + 2
    assert peak <= 4 + 3 * 2, "full pages of the prompt once, the rest of each sample its own"
    wants = compute_samples(model, STEMS[0], sampling)
    assert {sample: c.token_ids for sample, c in done.items()} == wants
    check_pool(engine)
    assert request == 0


def compute_samples(model, prompt, sampling) -> dict[int, tuple[int, ...]]:
    """Each sample's tokens with nothing shared: log-probabilities of the prompt forbid it."""
    engine = Engine(model, **SMALL, prefix_cache=False)
    engine.submit(list(prompt), replace(sampling, prompt_logprobs=True))
    found = {e.sample: e.completion.token_ids for e in engine.run() if e.completion}
    assert engine.metrics()["prefix_forked_tokens"] == 0
    return found


def steps_until(engine: Engine, tokens: int) -> list[int]:
    seen: list[int] = []
    while len(seen) < tokens:
        seen += [t for e in engine.step() if e.sample == 0 for t in e.token_ids]
    return seen


@pytest.mark.parametrize("keep", [True, False])
def test_a_tree_of_forks(model, wide, keep):
    """A fork of a fork; each goes on from the tokens that it began with as a sample that computed them would."""
    sampling = SamplingParams(temperature=1.0, seed=3, max_new_tokens=20, ignore_eos=True)
    engine = Engine(model, **SMALL, prefix_cache=keep)
    request = engine.submit(list(STEMS[2]), sampling)
    steps_until(engine, 6)
    known = {1: list(engine._ledger.find(request, 0).answer.tokens)}
    assert engine.fork(request) == 1
    for _ in range(5):
        engine.step()
    known[2] = list(engine._ledger.find(request, 1).answer.tokens)
    assert len(known[2]) > len(known[1])
    assert engine.fork(request, sample=1) == 2
    done = finish(engine)
    m = engine.metrics()
    assert m["prefix_forked_tokens"] + m["prefix_hit_tokens"] >= 2 * 12 + 6
    assert m["prefill_tokens"] == 12 + 2  # one token for each fork
    for sample, tokens in known.items():
        assert done[request, sample].token_ids == with_key(model, STEMS[2], sampling, sample, tokens)
    check_pool(engine)


def with_key(model, prompt, sampling, sample: int, begun: list[int]) -> tuple[int, ...]:
    """What a sample that begins with these output tokens comes to, with nothing shared."""
    engine = Engine(model, **ALONE)
    engine.submit(list(prompt), sampling)
    request = engine._ledger.request(0)
    request.unfinished[sample] = seq = request.unfinished.pop(0)
    seq.sample, seq.output = sample, list(begun)
    for token in begun:
        seq.answer.push(token)
    request.started = sample + 1
    return next(iter(finish(engine).values())).token_ids


def origin_and_fork() -> tuple[Sharing, Sequence, Sequence]:
    """A sequence of 10 tokens, in pages of 4, and one that has 7 in common with it."""
    sharing = Sharing(keep=True)
    sharing.renew(PagePool(8, 4))
    prompt, rest = tuple(range(6)), (SamplingParams(), 0, 20)
    pages = sharing.pool.allocate(3)
    origin = Sequence(0, 0, prompt, *rest, [50, 51, 52, 53, 54], slot=0, pages=pages, computed=11, prefill_end=6)
    return sharing, origin, Sequence(0, 1, prompt, *rest, [50, 61, 62, 63, 64], origin=origin, common=7)


def test_what_a_sequence_leaves_to_its_forks_and_to_the_cache():
    """To a fork what both begin with; to neither anything, once its logits were no numbers."""
    sharing, origin, fork = origin_and_fork()
    for reason, held, tokens, kept in ((None, (0, 1), 7, 0), ("error", (), 0, 0), ("stop", (0, 1), 7, 2)):
        origin.finish_reason = reason
        reused = next(sharing.candidates(fork, alone=False))
        assert (reused.held, reused.tokens) == (held, tokens)
        if reason is not None:
            sharing.on_release(origin)
        assert sharing.num_pages == kept


def test_a_fork_waits_for_what_both_begin_with_and_no_longer():
    sharing, origin, fork = origin_and_fork()
    origin.prefill_end = 11  # it was preempted, and computes all of its tokens again
    waits = []
    for origin.computed in (0, 6, 7, 11):
        waits.append(sharing.must_wait(fork))
    assert waits == [True, True, False, False]


def test_what_a_sequence_begins_with_is_counted_once():
    sharing, origin, fork = origin_and_fork()
    found = Sequence(1, 0, (*range(6), 50, 51, 52), SamplingParams(), 0, 20)
    for seq, tokens in ((fork, 7), (found, 8)):
        reused = next(sharing.candidates(seq, alone=False))
        sharing.take(seq, reused)
        assert (seq.pages, seq.computed) == (list(reused.pages), tokens)
        assert seq.cached == 4 * len(reused.pages), "a page that is copied is its own"
        sharing.begin(seq, reused)
        assert len(seq.pages) == 2
        sharing.on_release(origin)
    counts = sharing.counts
    assert (counts.lookups, counts.hits, counts.hit_tokens, counts.forked_tokens) == (2, 1, 8, 7)


def test_snapshot_and_resume(model, wide, tmp_path):
    """Through a file, into an engine with other pages; and again after preemptions there."""
    sampling = SamplingParams(temperature=1.0, seed=3, max_new_tokens=30, ignore_eos=True)
    options = {**SMALL, "kv_cache": "int8-g8"}
    engine = Engine(model, **options)
    request = engine.submit(list(STEMS[0]), sampling)
    steps_until(engine, 11)
    value = engine.snapshot(request)
    assert value.length == len(value.tokens) - 1
    rest = finish(engine)[request, 0].token_ids[len(value.tokens) - 37 :]
    snapshots.save_snapshot(tmp_path / "one", value)
    back = snapshots.load_snapshot(tmp_path / "one")
    short = snapshots.cut(back, 5)
    for size, company in ((8, 0), (16, 0), (8, 2)):
        other = Engine(model, **{**options, "page_size": size})
        noise = [other.submit([9, 8, i], greedy(50)) for i in range(company)]
        other._scheduler.policy.victim = lambda running, pages: running[-1]
        again = other.resume(back, replace(sampling, max_new_tokens=len(rest)))
        done = finish(other)
        assert done[again, 0].token_ids == rest
        assert bool(other.metrics()["preemptions"]) == bool(noise)
        check_pool(other)
        if not noise:
            assert other.metrics()["prefill_tokens"] == 1
            assert other.metrics()["cached_pages"] == 0, "a snapshot may have been edited"
    early = engine.resume(short, greedy(8))
    assert finish(engine)[early, 0].token_ids == alone(model, short.tokens, greedy(8), kv_cache="int8-g8").token_ids


def test_an_edited_snapshot_is_taken_as_it_is_and_kept_apart(model, wide):
    engine = Engine(model, **SMALL)
    prompt = list(STEMS[0])
    request = engine.submit(prompt, greedy(12))
    steps_until(engine, 2)
    value = engine.snapshot(request)
    plain = finish(engine)[request, 0]
    edited = jax.tree.map(lambda x: -x if x.ndim == 4 else x, snapshots.cut(value, 37))
    one, two = engine.resume(edited, greedy(12)), engine.resume(edited, greedy(12, n=2))
    done = finish(engine)
    assert done[one, 0].token_ids != plain.token_ids
    assert done[one, 0].token_ids == done[two, 0].token_ids == done[two, 1].token_ids
    assert same(complete(engine, prompt, greedy(12)), plain)


def test_a_snapshot_that_may_be_shared_is_a_prefix_of_later_requests(model, wide):
    engine = Engine(model, **SMALL)
    prompt = list(STEMS[0])
    request = engine.submit(prompt, greedy(12))
    steps_until(engine, 2)
    value = snapshots.cut(engine.snapshot(request), 37)
    plain = finish(engine)[request, 0]
    other = Engine(model, **SMALL)
    again = other.resume(value, greedy(12), share=True)
    assert same(finish(other)[again, 0], plain)
    assert same(complete(other, prompt, greedy(12)), plain)
    assert other.metrics()["prefix_hit_tokens"] >= 32
    check_pool(other)


def test_a_snapshot_of_what_waits_has_no_keys_yet(model, wide):
    engine = Engine(model, **SMALL)
    for token in range(4):
        engine.submit([token], greedy(4))
    waits = engine.submit(list(STEMS[2]), greedy(4))
    engine.step()
    value = engine.snapshot(waits)
    assert (value.length, value.tokens.tolist()) == (0, list(STEMS[2]))
    want = finish(engine)[waits, 0]
    again = engine.resume(value, greedy(4))
    assert same(finish(engine)[again, 0], want)
    with pytest.raises(RequestError, match="no running sample"):
        engine.snapshot(waits)


def test_resume_refuses_what_it_cannot_do(model, wide):
    engine = Engine(model, **SMALL)
    request = engine.submit(list(STEMS[0]), greedy(8))
    steps_until(engine, 2)
    value = engine.snapshot(request)
    with pytest.raises(RequestError, match="prompt_logprobs need the prompt computed"):
        engine.resume(value, greedy(4, prompt_logprobs=True))
    with pytest.raises(RequestError, match="penalties of tokens need the prompt computed"):
        engine.resume(value, greedy(4, presence_penalty=1.0))
    with pytest.raises(SnapshotError, match="k=f64, v=f64, the cache 2 heads of 16, k=int8-g8"):
        Engine(model, **SMALL, kv_cache="int8-g8").resume(value, greedy(4))
    with pytest.raises(RequestError, match=r"token id 97 is not in \[0, 97\)"):
        engine.resume(replace(value, tokens=np.asarray([97] * 40)), greedy(4))
    with pytest.raises(SnapshotError, match="resume takes a Snapshot, .* not str"):
        engine.resume("hello")
    finish(engine)
    check_pool(engine)


def test_a_snapshot_of_other_weights_is_refused(model, wide, tmp_path):
    engine = Engine(model, **SMALL)
    request = engine.submit(list(STEMS[0]), greedy(8))
    steps_until(engine, 2)
    snapshots.save_snapshot(tmp_path / "one", engine.snapshot(request))
    value = snapshots.cut(snapshots.load_snapshot(tmp_path / "one"), 20)
    norm = model.params.norm
    other = replace(model, params=replace(model.params, norm=norm.at[3].add(1e-6)))
    turned = replace(model, config=replace(model.config, rope_theta=500.0))  # the same weights, read otherwise
    resumed = Engine(other, **SMALL)
    for engine in (resumed, Engine(turned, **SMALL)):
        with pytest.raises(SnapshotError, match="the snapshot was made with other weights, or another config,"):
            engine.resume(value, greedy(4))
    assert not resumed.has_work
    resumed.resume(replace(value, weights=None), greedy(4))  # as of one that no engine made
    assert resumed.has_work


class SharesUnread(Sharing):
    """Shares the page that the copy should be made of."""

    def candidates(self, seq, alone):
        for b in super().candidates(seq, alone):
            yield b if b.source is None else ReusedPrefix((*b.pages, b.source), None, b.tokens, cached=b.cached)


def test_the_oracle_notices_a_page_that_is_not_copied(model, wide, monkeypatch):
    """Seeded faults: copies that are forgotten, and a page that two sequences write."""
    prompts = STEMS[0][:24], (*STEMS[0][:20], 90, 91)
    wants = [alone(model, p, greedy(30)) for p in prompts]

    def play() -> list[bool]:
        engine = Engine(model, **SMALL)
        first = engine.submit(list(prompts[0]), greedy(30))
        steps_until(engine, 3)
        second = engine.submit(list(prompts[1]), greedy(30))
        done = finish(engine)
        return [same(done[first, 0], wants[0]), same(done[second, 0], wants[1])]

    assert play() == [True, True]
    with monkeypatch.context() as patch:
        patch.setattr(device_module.Device, "copy_pages", lambda self, copies: None)
        assert not all(play())
    with monkeypatch.context() as patch:
        patch.setattr("jllm.engine.page_tables.Sharing", SharesUnread)
        assert not all(play())
