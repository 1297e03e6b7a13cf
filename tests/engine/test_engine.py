"""What the engine promises besides the oracle: ends, text, logprobs, penalties, forks, aborts, compilations."""

from collections import defaultdict
from dataclasses import dataclass, replace

import jax
import numpy as np
import pytest

import jllm
from jllm.engine.engine import Engine
from jllm.engine.request import SamplingParams
from jllm.errors import RequestError
from jllm.files.tokenizer import Tokenizer
from jllm.model.sampling import STOP_IDS, neutral_sampling, sample
from jllm.programs import packed_step as packed_step_module
from jllm.programs import programs as programs_module
from jllm.programs.packed_step import Layout, packed_step
from jllm.step import forward as step_forward
from jllm.step.buckets import Bucket
from jllm.step.merge import STATIC
from tests.ascii import Ascii
from tests.tiny import CONFIG, full_logits, greedy, log_softmax, serve, tiny_model

OPTIONS = {"max_slots": 4, "page_size": 8, "max_step_tokens": 16, "buckets": (Bucket(4, 16, 4),)}
SMALL = {"num_layers": 1, "seed": 3}  # of no end token where tests want none
PROMPTS = [[5, 6, 7], list(range(30, 60)), [9]]


class Letters:
    """A tokenizer of one letter a token: token i is chr(i + 32), and 2 is the end."""

    def encode(self, text, add_bos=True):
        return [ord(c) - 32 for c in text]

    def stream_decoder(self, prompt_ids=()):
        return self

    def push(self, id):
        return chr(id + 32)

    def finish(self):
        return ""


@pytest.fixture(scope="module")
def model():
    return tiny_model(**SMALL)


def test_greedy_is_the_argmax_of_the_forward_without_a_cache(model):
    for prompt, done in zip(PROMPTS, serve(model, PROMPTS, [greedy(20)] * 3, **OPTIONS), strict=True):
        logits = full_logits(model, prompt + list(done.token_ids))
        assert list(done.token_ids) == logits[len(prompt) - 1 : -1].argmax(axis=-1).tolist()
        assert done.finish_reason == "length"
        assert done.timings.prompt_tokens == len(prompt)
        assert done.timings.output_tokens == 20
        assert 0 < done.timings.first_token <= done.timings.total


def test_any_finite_temperature_draws_at_random(model):
    """Also the largest: tokens are then drawn evenly, with no warning."""
    (done,) = serve(model, [[5]], [SamplingParams(temperature=2.9e38, seed=2, max_new_tokens=12)], **OPTIONS)
    assert len(set(done.token_ids)) > 6


def test_samples_are_drawn_as_asked(model):
    """By each parameter as it was given: as model/sampling.py draws from the logits of the forward without a cache."""
    plain = {"seed": 11, "temperature": 1.0, "max_new_tokens": 16, "ignore_eos": True}
    changes = [{}, {"seed": 2**32 - 1}, {"temperature": 0.6}, {"top_k": 2}, {"top_p": 0.3}, {"min_p": 0.4}]
    engine, prompt = Engine(model, **OPTIONS), PROMPTS[0]
    ids = {engine.submit(prompt, SamplingParams(n=2, **plain | change)): plain | change for change in changes}
    done = {(e.id, e.sample): e.completion.token_ids for e in engine.run() if e.completion}
    assert len(set(done.values())) == 2 * len(changes), "another test than it was: some parameter makes no difference"
    logits = np.concatenate([full_logits(model, [*prompt, *tokens])[len(prompt) - 1 : -1] for tokens in done.values()])
    asked = [{"top_k": 0, "top_p": 1.0, "min_p": 0.0, "sample": index, **ids[request]} for request, index in done]
    kinds = {"temperature": "f4", "top_k": "i4", "top_p": "f4", "min_p": "f4", "seed": "u4", "sample": "i4"}
    rows = {name: np.repeat(np.asarray([one[name] for one in asked], kind), 16) for name, kind in kinds.items()}
    positions = np.tile(np.arange(len(prompt), len(prompt) + 16, dtype=np.int32), len(done))
    want, _ = jax.jit(sample)(logits, replace(neutral_sampling(len(positions)), **rows), positions)
    np.testing.assert_array_equal(np.concatenate(list(done.values())), want)


def test_logprobs_are_of_the_raw_logits(model):
    params = SamplingParams(temperature=0.5, seed=3, logprobs=4, prompt_logprobs=True, max_new_tokens=9, top_k=3)
    asked = [params, params, replace(params, prompt_logprobs=False), params]  # chunks that stand side by side
    prompts = [[9], [5, 6, 7], [8, 8], list(range(30, 60))]
    for prompt, sampling, done in zip(prompts, asked, serve(model, prompts, asked, **OPTIONS), strict=True):
        ids = prompt + list(done.token_ids)
        want = log_softmax(full_logits(model, ids).astype(np.float64))
        got = [x.logprob for x in done.logprobs]
        np.testing.assert_allclose(got, [want[len(prompt) - 1 + i, t] for i, t in enumerate(done.token_ids)], atol=1e-4)
        assert [x.token_id for x in done.logprobs] == list(done.token_ids)
        for i, entry in enumerate(done.logprobs):
            row = want[len(prompt) - 1 + i]
            assert [t for t, _ in entry.top] == np.argsort(-row, kind="stable")[:4].tolist()
            np.testing.assert_allclose([lp for _, lp in entry.top], np.sort(row)[::-1][:4], atol=1e-4)
        if not sampling.prompt_logprobs:
            assert done.prompt_logprobs is done.prompt_ranks is None
            continue
        assert len(done.prompt_logprobs) == len(prompt) - 1
        np.testing.assert_allclose(
            done.prompt_logprobs, [want[i, t] for i, t in enumerate(prompt[1:])], atol=1e-4, rtol=0
        )
        assert list(done.prompt_ranks) == [1 + (want[i] > want[i, t]).sum() for i, t in enumerate(prompt[1:])]
        rows = range(len(prompt) - 1)
        assert [t for t, _ in done.prompt_best] == [int(want[i].argmax()) for i in rows]
        np.testing.assert_allclose([lp for _, lp in done.prompt_best], [want[i].max() for i in rows], atol=1e-4)


def test_tempered_logprobs_are_of_the_distribution_that_is_drawn_from(model):
    """Beside a request of raw ones, in the same steps."""
    raw = SamplingParams(temperature=0.5, seed=3, logprobs=4, max_new_tokens=9)
    asked = [replace(raw, logprobs_mode="tempered"), replace(raw, logprobs_mode="tempered", temperature=1.5), raw]
    prompts = [[5, 6, 7], [8, 8], [9]]
    for prompt, sampling, done in zip(prompts, asked, serve(model, prompts, asked, **OPTIONS), strict=True):
        logits = full_logits(model, prompt + list(done.token_ids)).astype(np.float64)[len(prompt) - 1 : -1]
        want = log_softmax(logits if sampling is raw else logits / sampling.temperature)
        got = [[x.logprob, *(p for _, p in x.top)] for x in done.logprobs]
        best = [[row[token], *np.sort(row)[::-1][:4]] for row, token in zip(want, done.token_ids, strict=True)]
        np.testing.assert_allclose(got, best, atol=1e-4)


def test_tempered_logprobs_need_a_distribution_that_nothing_else_changes():
    for changed in ({"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}, {"presence_penalty": 1.0}, {"logit_bias": {1: 1.0}}):
        with pytest.raises(RequestError, match=f"which {next(iter(changed))} changes: use raw"):
            SamplingParams(logprobs_mode="tempered", **changed)
    with pytest.raises(RequestError, match="which temperature 0 does not have: use raw"):
        SamplingParams(logprobs_mode="tempered", temperature=0.0)
    with pytest.raises(RequestError, match="is of drawn tokens, and prompt_logprobs are raw"):
        SamplingParams(logprobs_mode="tempered", logprobs=0, prompt_logprobs=True)
    with pytest.raises(RequestError, match="none are asked for: give logprobs=0"):
        SamplingParams(logprobs_mode="tempered")
    with pytest.raises(RequestError, match="logprobs_mode must be raw or tempered, not 'hot'"):
        SamplingParams(logprobs_mode="hot")


@pytest.mark.parametrize(("tokenizer", "stop"), [(None, ()), (Letters(), ()), (Letters(), ("\n",))])
def test_events_have_the_logprobs_of_their_tokens(tokenizer, stop):
    engine, seen, done = Engine(tiny_model(**SMALL, tokenizer=tokenizer), **OPTIONS), defaultdict(list), {}
    asked = [greedy(12, logprobs=2, stop=stop), greedy(12)]
    ids = [engine.submit(prompt, sampling) for prompt, sampling in zip(PROMPTS, asked)]
    for event in engine.run():
        assert len(event.logprobs) == (len(event.token_ids) if event.id == ids[0] else 0)
        seen[event.id] += event.logprobs
        done[event.id] = event.completion
    assert tuple(seen[ids[0]]) == done[ids[0]].logprobs
    assert len(seen[ids[0]]) == 12


def test_stop_ids_end_and_are_in_the_tokens_only_where_asked(model):
    free = serve(model, [PROMPTS[0]], [greedy(20)], **OPTIONS)[0]
    stop = free.token_ids[7]
    first = free.token_ids.index(stop)
    asked = [greedy(20, stop_token_ids=(stop,)), greedy(20, stop_token_ids=(stop,), include_end=True, logprobs=0)]
    done, whole = serve(model, [PROMPTS[0]] * 2, asked, **OPTIONS)
    assert done.token_ids == free.token_ids[:first]
    assert whole.token_ids == free.token_ids[: first + 1]
    assert [one.token_id for one in whole.logprobs] == list(whole.token_ids)
    assert done.finish_reason == whole.finish_reason == "stop"


def test_more_stop_ids_than_the_device_checks(model):
    free = serve(model, [PROMPTS[0]], [greedy(20)], **OPTIONS)[0]
    stop = max(free.token_ids)
    others = [i for i in range(stop) if i not in free.token_ids]
    assert len(others) > 2 * STOP_IDS, "the one that matters comes last, sorted or not"
    done = serve(model, [PROMPTS[0]], [greedy(20, stop_token_ids=(*others, stop))], **OPTIONS)[0]
    assert done.token_ids == free.token_ids[: free.token_ids.index(stop)]


def test_end_token_of_the_config_unless_ignored(model):
    free = serve(model, [PROMPTS[0]], [greedy(20)], **OPTIONS)[0]
    ends = tiny_model(**SMALL, eos_ids=(free.token_ids[4],))
    cut = free.token_ids.index(free.token_ids[4])
    others = tuple(i for i in range(CONFIG.vocab_size) if i not in free.token_ids)
    asked = [greedy(20, ignore_eos=False), greedy(20, ignore_eos=False, stop_token_ids=others), greedy(20)]
    *stopped, ignored = serve(ends, [PROMPTS[0]] * 3, asked, **OPTIONS)
    for done in stopped:
        assert (done.token_ids, done.finish_reason) == (free.token_ids[:cut], "stop")
    assert ignored.token_ids == free.token_ids


@dataclass(frozen=True)
class OneSpecial(Ascii):
    """A token a character, and one that is special."""

    special: int = 0

    def encode(self, text):
        return [self.special] if text == "<end>" else super().encode(text)

    def id(self, token):
        return self.special if token == "<end>" else super().id(token)

    def piece(self, id):
        return b"" if id == self.special else super().piece(id)


def test_ends_that_no_text_shows(model):
    """The tokenizer's end, which the config does not name, and a stop string that is a special token."""
    (free,) = serve(model, [PROMPTS[0]], [greedy(20)], **OPTIONS)
    end = free.token_ids[7]
    tokenizer = Tokenizer(OneSpecial(special=end), None, (end, 10**6), (), {}, None)
    named = replace(model, tokenizer=tokenizer)
    assert named.eos_ids == (*CONFIG.eos_ids, end)  # what the embedding has
    asked = [greedy(20, ignore_eos=False), greedy(20, stop=("<end>",)), greedy(20, stop=("<end>x", "\ud800"))]
    *stopped, ignored = serve(named, [PROMPTS[0]] * 3, asked, **OPTIONS)
    for done in stopped:
        assert (done.token_ids, done.finish_reason) == (free.token_ids[: free.token_ids.index(end)], "stop")
    assert ignored.token_ids == free.token_ids


def test_stop_strings_cut_text_and_tokens_and_stream_what_is_certain():
    model = tiny_model(**SMALL, tokenizer=Letters())
    free = serve(model, [PROMPTS[0]], [greedy(24)], **OPTIONS)[0]
    text = "".join(chr(i + 32) for i in free.token_ids)
    stop = text[9:12]
    engine = Engine(model, **OPTIONS)
    engine.submit(PROMPTS[0], greedy(24, stop=("never seen", stop), logprobs=0))
    events = list(engine.run())
    done = events[-1].completion
    assert done.text == text[: text.index(stop)]
    assert done.finish_reason == "stop"
    assert done.token_ids == free.token_ids[: len(done.text)]
    assert tuple(x.token_id for x in done.logprobs) == done.token_ids
    assert engine.metrics()["output_tokens"] <= len(done.token_ids) + len(stop)  # later ones are not counted
    assert engine.metrics()["steps"] <= 1 + text.index(stop) + len(stop) + 1  # at most one step too many
    assert "".join(e.text for e in events) == done.text
    assert sum((e.token_ids for e in events), ()) == done.token_ids
    assert engine.metrics()["pages_free"] == engine.metrics()["pages_total"]


def test_penalties_and_bias_follow_their_formulas(model):
    """Of a prompt of three chunks, in which the tokens occur, some of them often, that are likely next."""
    penalties = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    params = greedy(16, **penalties, logit_bias={40: 1.5}, logprobs=0)
    prompt = PROMPTS[0] + list(serve(model, [PROMPTS[0]], [greedy(33)], **OPTIONS)[0].token_ids)
    done = serve(model, [prompt, PROMPTS[1]], [params, greedy(16)], **OPTIONS)
    ids = list(prompt)
    rows = full_logits(model, [*prompt, *done[0].token_ids])[len(prompt) - 1 : -1].astype(np.float64)
    for token, reported, logits in zip(done[0].token_ids, done[0].logprobs, rows, strict=True):
        assert reported.logprob == pytest.approx(log_softmax(logits)[token], abs=1e-4), "of the raw logits"
        seen = np.isin(np.arange(CONFIG.vocab_size), ids)
        logits = np.where(seen, np.where(logits > 0, logits / 1.3, logits * 1.3), logits)
        counts = np.bincount(ids[len(prompt) :], minlength=CONFIG.vocab_size)
        logits -= 0.25 * counts + 0.5 * (counts > 0)
        logits[40] += 1.5
        assert token == logits.argmax()
        ids.append(token)
    assert done[1].token_ids == serve(model, [PROMPTS[1]], [greedy(16)], **OPTIONS)[0].token_ids


def test_a_ban_holds(model):
    free = serve(model, [PROMPTS[0]], [greedy(12)], **OPTIONS)[0]
    bans = {t: -float("inf") for t in set(free.token_ids)}
    done = serve(model, [PROMPTS[0]], [greedy(12, logit_bias=bans)], **OPTIONS)[0]
    assert not set(done.token_ids) & set(bans)


def test_samples_differ_and_seeds_repeat(model):
    engine = Engine(model, **OPTIONS)
    engine.submit(PROMPTS[0], SamplingParams(n=3, seed=11, max_new_tokens=12, ignore_eos=True))
    done = {e.sample: e.completion for e in engine.run() if e.completion}
    assert sorted(done) == [0, 1, 2]
    assert len({c.token_ids for c in done.values()}) == 3
    alone = SamplingParams(seed=11, max_new_tokens=12, ignore_eos=True)
    assert serve(model, [PROMPTS[0]], [alone], **OPTIONS)[0].token_ids == done[0].token_ids


def test_a_drawn_seed_is_reported_and_gives_the_same_tokens(model):
    params = {"max_new_tokens": 12, "ignore_eos": True}
    first = serve(model, [PROMPTS[0]], [SamplingParams(**params)], **OPTIONS)[0]
    again = serve(model, [PROMPTS[0]], [SamplingParams(**params, seed=first.seed)], **OPTIONS)[0]
    assert again.token_ids == first.token_ids


def test_fork_continues_with_a_key_of_its_own(model):
    engine = Engine(model, **OPTIONS)
    params = SamplingParams(seed=5, max_new_tokens=20, ignore_eos=True, logprobs=1)
    request = engine.submit(PROMPTS[0], params)
    seen = 0
    while seen < 6:
        seen += sum(len(e.token_ids) for e in engine.step())
    assert engine.fork(request) == 1
    events = list(engine.run())
    done = {e.sample: e.completion for e in events if e.completion}
    assert done[1].timings.first_token <= done[1].timings.total
    assert done[1].token_ids[:6] == done[0].token_ids[:6]
    assert done[1].token_ids != done[0].token_ids
    assert len(done[1].token_ids) == len(done[1].logprobs) == 20
    assert sum((e.token_ids for e in events if e.sample == 1), ()) == done[1].token_ids
    with pytest.raises(RequestError, match="no running sample"):
        engine.fork(request)


def test_abort_frees_everything_and_keeps_what_was_done(model):
    engine = Engine(model, **OPTIONS)
    running, other = engine.submit(PROMPTS[1], greedy(40)), engine.submit(PROMPTS[0], greedy(8))
    for _ in range(8):
        engine.step()
    engine.abort(running)
    done = {e.id: e.completion for e in engine.run() if e.completion}
    assert done[running].finish_reason == "abort"
    free = serve(model, [PROMPTS[1], PROMPTS[0]], [greedy(40), greedy(8)], **OPTIONS)
    assert done[running].token_ids == free[0].token_ids[: len(done[running].token_ids)]
    assert done[other].token_ids == free[1].token_ids
    assert engine.metrics()["pages_free"] == engine.metrics()["pages_total"]
    with pytest.raises(RequestError, match="not running"):
        engine.abort(running)


def test_abort_ends_every_sample(model):
    engine = Engine(model, **OPTIONS)
    request = engine.submit(PROMPTS[0], greedy(40, n=2))
    for _ in range(4):
        engine.step()
    engine.fork(request)
    engine.abort(request)
    done = {e.sample: e.completion.finish_reason for e in engine.run() if e.completion}
    assert done == {0: "abort", 1: "abort", 2: "abort"}
    assert engine.metrics()["pages_free"] == engine.metrics()["pages_total"]


def test_lower_priorities_go_first_and_stop_nothing_that_runs(model):
    engine = Engine(model, **OPTIONS | {"max_slots": 1, "buckets": (Bucket(1, 16, 1),)})
    running = engine.submit([5], greedy(4))
    engine.step()
    late, second, urgent, first = (engine.submit([6], greedy(2), priority=n) for n in (9, 0, -3, -3))
    ends = [event.id for event in engine.run() if event.completion]
    assert ends == [running, urgent, first, second, late]


def test_a_deadline_ends_every_sample_with_what_it_has(model):
    engine = Engine(model, **OPTIONS)
    (want,) = serve(model, [PROMPTS[0]], [greedy(40)], **OPTIONS)
    now = engine.submit(PROMPTS[0], greedy(40, n=2), deadline=0.0)
    never = engine.submit(PROMPTS[0], greedy(3), deadline=3600.0)
    soon = engine.submit(PROMPTS[0], greedy(40), deadline=3600.0)
    done = {(e.id, e.sample): e.completion for _ in range(9) for e in engine.step() if e.completion}
    engine._ledger.end_after(soon, 0.0)
    done |= {(e.id, e.sample): e.completion for e in engine.run() if e.completion}
    assert {key: c.finish_reason for key, c in done.items()} == {
        (now, 0): "deadline",
        (now, 1): "deadline",
        (never, 0): "length",
        (soon, 0): "deadline",
    }
    assert done[now, 0].token_ids == ()
    kept = done[soon, 0].token_ids
    assert 0 < len(kept) < 40
    assert kept == want.token_ids[: len(kept)]
    metrics = engine.metrics()
    assert (metrics["requests_finished"], metrics["requests_aborted"], metrics["pages_used"]) == (1, 2, 0)


@pytest.mark.parametrize(
    ("urgency", "says"),
    [
        ({"priority": 1.5}, "priority must be an integer, not 1.5"),
        ({"priority": True}, "priority must be an integer, not True"),
        ({"deadline": -1}, "deadline must be seconds, a finite number >= 0, or None, not -1"),
        ({"deadline": float("nan")}, "deadline must be seconds"),
        ({"deadline": "soon"}, "deadline must be seconds"),
    ],
)
def test_wrong_priorities_and_deadlines_are_named(model, urgency, says):
    engine = Engine(model, **OPTIONS)
    with pytest.raises(RequestError, match=says):
        engine.submit([5], greedy(2), **urgency)
    assert not engine.has_work


def test_penalties_cost_nothing_once_none_asks(model):
    engine = Engine(model, **OPTIONS)
    engine.submit(PROMPTS[0], greedy(3, presence_penalty=1.0))
    engine.submit(PROMPTS[1], greedy(20))
    engine.step()
    assert engine._device._state.counts is not None
    list(engine.run())
    assert engine._device._state.counts is None


def test_the_context_ends_a_sequence(model):
    prompt = list(range(2, 90))
    done = serve(model, [prompt], [greedy(1000)], **OPTIONS)[0]
    assert len(prompt) + len(done.token_ids) == CONFIG.context
    assert done.finish_reason == "length"


def test_no_mix_of_requests_compiles_anew(model, monkeypatch):
    """One bucket: every mix must run the one traced step, whatever is in it. Asking for logprobs adds a variant."""
    chex = pytest.importorskip("chex")
    counted = chex.assert_max_traces(packed_step.__wrapped__, n=1)
    jitted = jax.jit(counted, static_argnames=(*STATIC, "layout"), donate_argnames="state")
    monkeypatch.setattr(programs_module, "jitted", lambda *_: jitted)
    options = {**OPTIONS, "buckets": (Bucket(5, 17, 5),)}
    mixes = [
        ([PROMPTS[0]], [greedy(4)]),
        (PROMPTS, [greedy(9), SamplingParams(top_k=3, top_p=0.5, min_p=0.1, seed=1), greedy(2, stop_token_ids=(4, 5))]),
        ([[3] * n for n in range(1, 9)], [SamplingParams(temperature=t / 4, max_new_tokens=t + 1) for t in range(8)]),
    ]
    for prompts, params in mixes:
        serve(model, prompts, params, **options)
    with pytest.raises(AssertionError, match="traced > 1 times"):
        serve(model, [PROMPTS[0]], [greedy(4, logprobs=1)], **options)


def test_compile_ahead_leaves_nothing_to_compile(model, monkeypatch, caplog):
    """Nor with the compiler options that steps of many rows have: here the second size."""
    monkeypatch.setattr(packed_step_module, "MOST_ROWS", 8)
    options = {**OPTIONS, "buckets": (Bucket(3, 0, 0), Bucket(4, 18, 3))}
    small, large = (packed_step_module.jitted(Layout(bucket, 8)) for bucket in options["buckets"])
    assert small is packed_step is packed_step_module.jitted(Layout(options["buckets"][1], 8), "deterministic")
    assert large is not packed_step
    before = large._cache_size()
    engine = Engine(model, **options)
    assert engine.compile_ahead() == 2
    monkeypatch.setattr(step_forward, "tapped_backbone", None)  # tracing again would call it
    with jax.log_compiles():
        engine.submit(PROMPTS[0], greedy(4))
        assert [e.completion.finish_reason for e in engine.run() if e.completion] == ["length"]
    assert not [record for record in caplog.records if "packed_step" in record.getMessage()]
    assert large._cache_size() == before + 1


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype")
def test_compile_ahead_sees_the_callers_jax_settings():
    """Threads have settings of their own; 64-bit mode must reach what is compiled for later."""
    with jax.enable_x64(True):
        engine = Engine(
            tiny_model("float64", num_layers=1), **{**OPTIONS, "buckets": (Bucket(3, 0, 0), Bucket(4, 18, 3))}
        )
        engine.compile_ahead()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(step_forward, "tapped_backbone", None)
            engine.submit(PROMPTS[0], greedy(4))
            assert [e.completion.finish_reason for e in engine.run() if e.completion] == ["length"]


def test_generate_chooses_slots_that_the_other_options_allow(model):
    prompts = [[5, 6], [7], [8, 9, 10]] * 3
    small = jllm.generate(model, prompts, greedy(4), num_pages=4, page_size=8, max_step_tokens=6)
    large = serve(model, prompts, [greedy(4)] * 9, **OPTIONS)
    assert [c.token_ids for c in small] == [c.token_ids for c in large]
    for bad in (5, None, ["text", None], b"abc", [b"abc"], [[True]]):
        with pytest.raises(RequestError):
            jllm.generate(model, bad, greedy(4))
    for bad in (None, {"n": 1}, [greedy()] * 2):
        with pytest.raises(RequestError):
            jllm.generate(model, prompts, bad)


def test_reads_come_one_step_late(model):
    """The step after is dispatched before a step's tokens are read."""
    engine = Engine(model, **OPTIONS)
    order = []
    loop = engine._loop
    dispatch, read = loop.dispatch, loop.read
    loop.dispatch = lambda plan: order.append(("dispatch", plan.step)) or dispatch(plan)
    loop.read = lambda step: order.append(("read", step.plan.step)) or read(step)
    engine.submit(PROMPTS[0], greedy(6))
    list(engine.run())
    for step in range(1, 5):
        assert order.index(("dispatch", step)) < order.index(("read", step - 1))


def test_metrics_add_up(model):
    engine = Engine(model, **OPTIONS)
    for prompt in PROMPTS:
        engine.submit(prompt, greedy(5))
    list(engine.run())
    m = engine.metrics()
    assert m["prefill_tokens"] == sum(map(len, PROMPTS))
    assert m["output_tokens"] == 15
    assert m["requests_finished"] == 3
    assert m["running"] == m["waiting"] == m["device_errors"] == m["preemptions"] == 0
    assert m["slack"] == pytest.approx(1 - (34 + 12) / (20 * m["steps"]))
