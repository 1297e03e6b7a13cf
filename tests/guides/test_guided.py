"""Guides: what is drawn is what they allow, in any company what is drawn alone, and others draw what they would."""

import json
import re
import threading
import warnings
from dataclasses import dataclass, replace

import jax
import numpy as np
import pytest

import jllm
from jllm.engine import device
from jllm.engine.engine import Engine
from jllm.engine.request import SamplingParams
from jllm.errors import RequestError, SnapshotError
from jllm.files import snapshot as snapshots
from jllm.guides.guide import Guide
from jllm.guides.matcher import Guides, Matcher
from jllm.model.sampling import constrain
from jllm.speculative.ngram import NGram
from jllm.step import sample as step_sample
from jllm.step.buckets import Bucket
from jllm.step.state import Guidance
from tests.ascii import EOS, FIRST, TOKENIZER
from tests.engine.test_oracle import COMPANY, Job, alone, assert_same, play
from tests.tiny import CONFIG, full_logits, one_size, tiny_model

llguidance = pytest.importorskip("llguidance")
pytest.importorskip("hypothesis")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

POOL = "pool that forces preemption"
GUIDES = [
    Guide.regex("[a-f]{3,12}"),
    Guide.choice(["yes", "no", "no, never", 'say "so"']),
    Guide.json({"type": "array", "items": {"enum": ["a", "b", 7]}, "minItems": 1, "maxItems": 4}),
    Guide.grammar('start: "(" start ")" | "x"'),
]
FITS = [r"[a-f]{3,12}", r'yes|no|no, never|say "so"', r"\[.*\]", r"\(*x\)*"]


@pytest.fixture(scope="module")
def model64():
    with jax.enable_x64(True):
        yield tiny_model("float64", tokenizer=TOKENIZER, num_layers=1)


@pytest.fixture(scope="module")
def tales():
    return jllm.load()


def make_jobs(**more) -> list[Job]:
    """Guided ones, and as many that are not."""
    found = []
    for i, guide in enumerate(GUIDES):
        params = {"temperature": (0.0, 1.0, 0.8)[i % 3], "seed": 7 + i, "max_new_tokens": 24, **more}
        prompt = tuple(range(5 + i, 20 + 3 * i))
        found.append(Job(prompt, SamplingParams(**params, guide=guide), 2 * i, None))
        found.append(Job(prompt, SamplingParams(**params), 2 * i + 1, None))
    return found


COMPANIES = {
    POOL: {},
    "two slots, pages of 16": {"speculate": NGram(3, shortest=1), "drafts": 3},
}


@pytest.fixture(scope="module")
def wants(model64):
    """Returns what each job gets alone. Guides beside a job without one change nothing for it."""
    jobs = make_jobs()
    with jax.enable_x64(True):
        found, plain = list(alone(model64, jobs)), list(alone(model64, jobs[1::2]))
    for completion, want in zip(found[1::2], plain, strict=True):
        assert_same(completion, want, False)
    return found


@pytest.mark.parametrize("company", COMPANIES)
def test_any_company_same_tokens(model64, wants, company):
    jobs, seen = make_jobs(), {}
    with jax.enable_x64(True):
        got = play(model64, jobs, COMPANY[company] | COMPANIES[company], seen)
    for completion, want in zip(got, wants, strict=True):
        assert_same(completion, want, False)
    for completion, fits in zip(got[::2], FITS, strict=True):
        if completion.finish_reason == "stop":
            assert re.fullmatch(fits, completion.text)
    assert {c.finish_reason for c in got[:4:2]} == {"stop"}
    if company == POOL:
        assert seen["preemptions"]
    if COMPANIES[company]:
        assert seen["draft_segments"]


def greedy_reference(model, prompt, guide: Guide, most: int) -> list[int]:
    """The likeliest token that a matcher of its own allows, by the forward without a cache, until the end token."""
    matcher = Guides(model.tokenizer, model.config.vocab_size, model.config.eos_ids).matcher(guide).state
    found: list[int] = []
    while len(found) < most:
        logits = full_logits(model, [*prompt, *found])[-1]
        allowed = [i for i in range(FIRST, len(logits)) if matcher.validate_tokens([i])]
        allowed += [EOS] if matcher.is_accepting() else []
        token = max(allowed, key=lambda i: logits[i])
        if token == EOS:
            break
        assert matcher.consume_token(token)
        found.append(token)
    return found


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.kind)
def test_greedy_tokens_are_the_likeliest_that_are_allowed(model64, guide):
    prompt = list(range(20, 40))
    with jax.enable_x64(True):
        params = SamplingParams(temperature=0.0, max_new_tokens=20, guide=guide, logprobs=3)
        (got,) = jllm.generate(model64, [prompt], params, **one_size())
        assert list(got.token_ids) == greedy_reference(model64, prompt, guide, 20)
        raw = full_logits(model64, [*prompt, *got.token_ids])[len(prompt) - 1 : -1]
    wanted = raw - np.log(np.exp(raw).sum(axis=1, keepdims=True))
    for i, (token, found) in enumerate(zip(got.token_ids, got.logprobs, strict=True)):
        assert found.logprob == pytest.approx(wanted[i, token]), "log-probabilities are of the model's own logits"


schemas = st.recursive(
    st.sampled_from(
        [
            {"type": "integer", "minimum": -5, "maximum": 120},
            {"type": "boolean"},
            {"enum": ["red", "green", 3, None]},
            {"type": "string", "maxLength": 6},
            {"type": "string", "pattern": "^[A-C]{2}-[0-9]{1,3}$"},
        ]
    ),
    lambda inner: (
        st.builds(lambda item: {"type": "array", "items": item, "minItems": 1, "maxItems": 2}, inner)
        | st.builds(
            lambda a, b: {
                "type": "object",
                "properties": {"a": a, "b": b},
                "required": ["a"],
                "additionalProperties": False,
            },
            inner,
            inner,
        )
    ),
    max_leaves=4,
)


@pytest.fixture(scope="module")
def teller(tales):
    engine = Engine(tales, max_slots=4, max_step_tokens=32, buckets=(Bucket(4, 28, 4),), page_size=16)
    yield engine
    engine.close()


@settings(max_examples=6)
@given(schema=schemas, seed=st.integers(0, 2**32 - 1))
def test_json_of_a_schema_is_valid(teller, schema, seed):
    """At a temperature at which the model would write anything, and some hundred spaces between values."""
    jsonschema = pytest.importorskip("jsonschema")
    params = SamplingParams(temperature=1.3, seed=seed, n=2, max_new_tokens=900, guide=Guide.json(schema))
    teller.submit("Once upon a time", params)
    done = [event.completion for event in teller.run() if event.completion]
    assert len(done) == 2
    for completion in done:
        assert completion.finish_reason == "stop"
        jsonschema.validate(json.loads(completion.text), schema)


def test_a_guide_that_allows_everything_changes_nothing(teller):
    """And a sample that stops at a string of its own does so within a guide."""
    params = SamplingParams(temperature=1.0, seed=3, max_new_tokens=20)
    for more in ({}, {"stop": ("he",), "max_new_tokens": 60}):
        found = []
        for guide in (None, Guide.regex(r"(.|\n)*")):
            teller.submit("Once upon a time there was", replace(params, guide=guide, **more))
            found += [event.completion for event in teller.run() if event.completion]
        assert found[0].token_ids == found[1].token_ids
        assert found[0].finish_reason == found[1].finish_reason == ("stop" if more else "length")


def test_forks_and_aborts(model64):
    guide = Guide.regex("([a-e]{2}-){6,9}[a-e]{2}")
    params = SamplingParams(temperature=1.0, seed=5, max_new_tokens=30, guide=guide)
    with jax.enable_x64(True):
        engine = Engine(model64, max_slots=3, page_size=8, max_step_tokens=40, buckets=(Bucket(3, 37, 3),))
        first, second = engine.submit([9] * 12, params), engine.submit([7] * 5, params)
        for _ in range(6):
            engine.step()
        fork = engine.fork(first)
        engine.abort(second)
        done = {(e.id, e.sample): e.completion for e in engine.run() if e.completion}
        assert engine.metrics()["pages_free"] == engine.metrics()["pages_total"]
    for sample in (0, fork):
        text = done[first, sample].text
        assert re.fullmatch("([a-e]{2}-)*([a-e]{0,2})", text)
    assert done[first, 0].token_ids[:3] == done[first, fork].token_ids[:3]


def test_a_guide_goes_on_after_a_snapshot(model64, tmp_path):
    """Through a file, from the snapshot of what was resumed or still waits, in a fork and a second sample; or it begins
    anew."""
    pattern = "[a-f]{4}-[0-9]{4}"
    params = SamplingParams(temperature=1.0, seed=5, max_new_tokens=20, guide=Guide.regex(pattern))
    with jax.enable_x64(True):
        engine = Engine(model64, max_slots=6, page_size=8, max_step_tokens=40, buckets=(Bucket(6, 34, 4),))
        plain = replace(params, guide=None, ignore_eos=True)
        first, other = engine.submit([9] * 12, params), engine.submit([9] * 12, plain)
        for _ in range(4):
            engine.step()
        snapshot, free = engine.snapshot(first), engine.snapshot(other)
        assert (snapshot.guided, free.guided, snapshots.cut(snapshot, 5).guided) == (12, None, 5)
        assert len(snapshot.tokens) > 13
        snapshots.save_snapshot(tmp_path / "one", snapshot)
        loaded = snapshots.load_snapshot(tmp_path / "one")
        with pytest.raises(
            RequestError, match="does not allow the text that the snapshot's guide has begun .to restart it"
        ):
            engine.resume(snapshot, replace(params, guide=Guide.regex("[0-9]+")))
        for at in (-1, len(snapshot.tokens) + 1, "12"):
            with pytest.raises(SnapshotError, match="guide begins at a token in"):
                engine.resume(replace(snapshot, guided=at), params)
        again, anew = engine.resume(loaded, replace(params, n=2)), engine.resume(replace(snapshot, guided=None), params)
        waiting = engine.snapshot(again)
        assert (waiting.length, waiting.guided) == (0, 12)
        begun = engine.resume(free, params)
        for _ in range(3):
            engine.step()
        later = engine.snapshot(again)
        fork = engine.fork(again)
        third, fourth = engine.resume(later, params), engine.resume(waiting, params)
        done = {(event.id, event.sample): event.completion for event in engine.run() if event.completion}
    assert later.guided == 12
    assert len(later.tokens) > len(snapshot.tokens)
    whole = done[first, 0]
    for id, known in ((again, snapshot), (third, later), (fourth, waiting)):
        assert (*known.tokens[12:], *done[id, 0].token_ids) == whole.token_ids
    head = TOKENIZER.decode([int(token) for token in snapshot.tokens[12:]])
    others = [head + done[again, sample].text for sample in (1, fork)]
    for text in (whole.text, *others, done[anew, 0].text, done[begun, 0].text):
        assert re.fullmatch(pattern, text)


def test_what_no_token_can_write_ends_as_an_error(model64):
    with jax.enable_x64(True):
        ask = {"temperature": 0.0, "max_new_tokens": 5}
        params = [SamplingParams(**ask, guide=Guide.regex("aé+")), SamplingParams(**ask)]
        with pytest.warns(UserWarning, match="its guide allows none of the model's tokens"):
            stuck, other = jllm.generate(model64, [[5, 6, 7]] * 2, params, **one_size())
        (want,) = jllm.generate(model64, [[5, 6, 7]], params[1], **one_size())
    assert (stuck.finish_reason, stuck.text) == ("error", "a")
    assert other.token_ids == want.token_ids


@pytest.mark.parametrize(
    ("ask", "why"),
    [
        (lambda: Guide.json("{"), "the JSON schema is not JSON"),
        (lambda: Guide.json([1]), "a JSON schema must be a mapping"),
        (lambda: Guide.json({"type": "frog"}), r"the guide \(json\) is not valid: Invalid type: frog"),
        (lambda: Guide.regex("(("), r"the guide \(regex\) is not valid: .*invalid regex.*unclosed group"),
        (lambda: Guide.regex(5), "a regular expression must be a string, not 5"),
        (lambda: Guide.choice([]), "a choice must be a list of non-empty strings"),
        (lambda: Guide.choice("ab"), "a choice must be a list of non-empty strings"),
        (lambda: Guide.grammar("start: foo"), r"the guide \(grammar\) is not valid: .*unknown name"),
        (lambda: Guide.grammar(" "), "a grammar must be a non-empty string"),
        (lambda: Guide("xml", "a"), "a guide is made by Guide.json, Guide.regex, Guide.choice, Guide.grammar"),
        (lambda: "[a-z]", "guide must be a Guide, such as"),
        (lambda: Guide.parse({"xml": "a"}), "a guide must be like"),
    ],
)
def test_what_is_refused(model64, ask, why):
    with jax.enable_x64(True), pytest.raises(RequestError, match=why) as error:
        jllm.generate(model64, [[5, 6]], SamplingParams(guide=ask()), **one_size())
    assert "\n" not in str(error.value)


def test_what_a_guide_needs(model64, monkeypatch):
    guide = Guide.regex("a")
    with pytest.raises(RequestError, match="ignore_eos has no meaning with a guide"):
        SamplingParams(guide=guide, ignore_eos=True)
    with pytest.raises(RequestError, match="needs a tokenizer, and this model has none"):
        Guides(None, 97, [2]).matcher(guide)
    with pytest.raises(RequestError, match="needs an end token, and this model has none"):
        Guides(TOKENIZER, 97, []).matcher(guide)
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(RequestError, match=r"needs llguidance: uv pip install -e '\.\[guided\]'"):
        Guides(TOKENIZER, 97, [2]).matcher(guide)


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.kind)
def test_a_guide_goes_through_json(guide):
    assert Guide.parse(json.loads(json.dumps(guide.as_json()))) == guide


@given(rows=st.integers(1, 3), vocab=st.integers(1, 70), data=st.data())
@settings(max_examples=30)
def test_bits_from_the_definition(rows, vocab, data):
    words = data.draw(st.lists(st.integers(0, 2**32 - 1), min_size=rows * 3, max_size=rows * 3))
    bits = np.array(words, np.uint32).reshape(rows, 3)[:, : -(-vocab // 32)]
    logits = np.arange(rows * vocab, dtype=np.float32).reshape(rows, vocab)
    found = np.asarray(constrain(logits, bits))
    for r in range(rows):
        for i in range(vocab):
            allowed = (int(bits[r, i // 32]) >> (i % 32)) & 1
            assert found[r, i] == (logits[r, i] if allowed else -np.inf)


@dataclass(frozen=True)
class Held:
    """What Device.guide changes of a state."""

    guidance: Guidance


@pytest.mark.parametrize("samples", [1, 4, 5, 32, 33, 70])
def test_each_slot_gets_its_own_masks_however_many_there_are(samples):
    rng, slots, nodes = np.random.default_rng(samples), 80, 3
    old = Guidance(rng.integers(0, 2**32, (slots, nodes, 2), np.uint32), rng.integers(0, 9, (slots, 4), np.int32))
    allowed = rng.integers(0, 2**32, (samples, 2, 2), np.uint32)  # of a step of fewer nodes
    coming = rng.integers(0, 9, (samples, 4), np.int32)
    where = rng.permutation(slots)[:samples]
    holder = type("Holder", (), {"_state": Held(jax.tree.map(jax.numpy.array, old))})()
    device.Device.guide(holder, where.tolist(), allowed, coming)
    expected = Guidance(old.allowed.copy(), old.coming.copy())
    expected.allowed[where, :2], expected.coming[where] = allowed, coming
    jax.tree.map(np.testing.assert_array_equal, holder._state.guidance, expected)


@pytest.mark.parametrize(
    ("asked", "drafts"),
    [(True, {"speculate": NGram(2, shortest=1), "drafts": 2}), (False, {})],
    ids=["asked for, drafts", "prepared, plain"],
)
def test_what_uploads_masks_is_compiled_before_steps_need_it(caplog, asked, drafts):
    """Where compile_ahead was told of guides, and where the first guided request has their steps compiled."""
    params = SamplingParams(guide=GUIDES[0], max_new_tokens=12, n=7)  # more than the fewest that are put in at once
    model = tiny_model(tokenizer=TOKENIZER, num_layers=1)
    slots = 7 + 2 * bool(drafts) + asked  # as no other engine has, whose compiled steps this one would use
    engine = Engine(model, max_slots=slots, num_pages=16, buckets=(Bucket(slots, 4, 2),), **drafts)
    engine.compile_ahead([params] if asked else [])
    with jax.log_compiles():
        engine.submit([5, 6], params)
        list(engine.run())
        engine.close()
    found = [record for record in caplog.records if "Compiling jit(put_masks)" in record.getMessage()]
    assert not [record for record in found if record.thread == threading.get_ident()]
    assert bool(found) != asked


def test_a_guide_that_is_being_compiled_holds_up_no_other(monkeypatch):
    guides, compile_, began, go_on = Guides(TOKENIZER, CONFIG.vocab_size, [EOS]), Guides._compile, *events(2)

    def slow(self, guide):
        if guide == GUIDES[0]:
            began.set()
            assert go_on.wait(60)
        return compile_(self, guide)

    monkeypatch.setattr(Guides, "_compile", slow)
    found = []
    threads = [threading.Thread(target=lambda: found.append(guides.matcher(GUIDES[0]))) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert began.wait(60)
    other = guides.matcher(GUIDES[1])
    assert not found
    go_on.set()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    assert list(guides._compiled) == [GUIDES[1], GUIDES[0]]
    assert not other.state.is_error()


def test_steps_go_on_while_the_guide_of_what_is_resumed_is_compiled(monkeypatch):
    model, compile_, began, go_on = tiny_model(tokenizer=TOKENIZER, num_layers=1), Guides._compile, *events(2)
    waited, resumed = [], []

    def slow(self, guide):
        began.set()
        waited.append(go_on.wait(60))
        return compile_(self, guide)

    engine = Engine(model, max_slots=2, num_pages=16, buckets=(Bucket(2, 8, 2),))
    first = engine.submit([5, 6], SamplingParams(max_new_tokens=8, ignore_eos=True))
    engine.step()
    monkeypatch.setattr(Guides, "_compile", slow)
    guide = Guide.regex("(one of its own)+")  # engines share compiled guides, so another test may have compiled GUIDES
    snapshot, params = engine.snapshot(first), SamplingParams(guide=guide, max_new_tokens=4)
    thread = threading.Thread(target=lambda: resumed.append(engine.resume(snapshot, params)))
    thread.start()
    assert began.wait(60)
    engine.step()
    go_on.set()
    thread.join()
    assert waited == [True]
    assert {event.id for event in engine.run() if event.completion} == {first, *resumed}
    engine.close()


def events(count):
    return [threading.Event() for _ in range(count)]


def a_step_late(self, tokens):
    new, self.taken = list(tokens[self.taken : -1]), max(0, len(tokens) - 1)
    return bool(self.state.consume_tokens(new)) if new else True


FAULTS = {
    "nothing is masked": (step_sample, "constrain", lambda logits, allowed: logits),
    "the mask is of the token before": (Matcher, "feed", a_step_late),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(monkeypatch, fault):
    module, name, wrong = FAULTS[fault]
    monkeypatch.setattr(module, name, wrong)
    # another config: nothing that was compiled before serves it
    model = tiny_model(tokenizer=TOKENIZER, context=127, num_layers=1)
    params = [SamplingParams(temperature=0.0, max_new_tokens=20, guide=guide) for guide in GUIDES]
    with warnings.catch_warnings(action="ignore"):  # some end where their matchers see what they do not allow
        found = jllm.generate(model, [list(range(20, 40))] * 4, params, **one_size())
    assert not all(c.finish_reason == "stop" and re.fullmatch(fits, c.text) for c, fits in zip(found, FITS))
