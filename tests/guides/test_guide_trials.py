"""Guides are tried in a process of their own: what kills it is the guide's error, and what passes goes on for long."""

import json
import os
import random
import sys

import pytest

from jllm.errors import RequestError
from jllm.guides import guide_trials
from jllm.guides import matcher as guides
from jllm.guides.guide import Guide
from jllm.guides.guide_trials import Trials, Verdict, Words
from jllm.guides.matcher import Guides
from tests.ascii import EOS, TOKENIZER
from tests.tiny import CONFIG

pytest.importorskip("llguidance")
pytest.importorskip("hypothesis")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

BYTES = Words([b"", *(bytes([byte]) for byte in range(256))], [0])


@pytest.fixture(scope="module")
def trials():
    return Trials(BYTES)


def chain(length: int, link) -> Guide:
    """A schema whose definitions refer to each other, one to the next."""
    defs = {f"d{i}": link({"$ref": f"#/$defs/d{i + 1}"}) for i in range(length)}
    return Guide.json({"$ref": "#/$defs/d0", "$defs": {**defs, f"d{length}": {"type": "integer"}}})


def rules(length: int) -> Guide:
    middle = "\n".join(f"r{i}: r{i + 1}" for i in range(length))
    return Guide.grammar(f'start: r0\n{middle}\nr{length}: "a"')


BAD = {
    "references": (lambda: chain(5000, lambda inner: inner), "compiling it went deeper than a stack holds"),
    "objects": (
        lambda: chain(2000, lambda inner: {"type": "object", "properties": {"a": inner}}),
        "compiling it went deeper than a stack holds",
    ),
    "rules": (lambda: rules(20_000), "compiling it went deeper than a stack holds"),
    "no character": (lambda: Guide.regex(r"[^\s\S]"), "allows no text"),
    "itself": (lambda: Guide.json({"$ref": "#"}), "allows no text"),
    "itself in a grammar": (lambda: Guide.grammar("start: start"), "allows no text"),
    "never": (lambda: Guide.json({"allOf": [{"type": "string"}, False]}), "not valid: Unsatisfiable"),
    "options": (lambda: Guide.json({"x-guidance": {"spaces": 7}}), "not valid: "),
    "repeats": (lambda: Guide.regex("(a{1000}){1000}"), "its first mask took too much processor time|too complex"),
    "look-ahead": (lambda: Guide.regex("a(?=b)"), "not valid: .*look-around"),
    "no rule": (lambda: Guide.grammar("start: foo"), 'not valid: .*unknown name: "foo"'),
    "not": (lambda: Guide.json({"not": {"type": "string"}}), "not valid: Unimplemented keys"),
    "another draft": (
        lambda: Guide.json({"$schema": "http://json-schema.org/draft-04/schema#", "propertyNames": {"maxLength": 2}}),
        "not valid: Unimplemented keys",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_guide_is_an_error_of_one_line(trials, name):
    make, why = BAD[name]
    verdict = trials.verdict(make())
    with pytest.raises(RequestError, match=why):
        raise RequestError(verdict.problem)
    assert "\n" not in verdict.problem
    assert len(verdict.problem) < 500
    assert verdict.lasting
    assert trials.verdict(Guide.regex("[a-z]+")) == Verdict(None)


def test_a_schema_nested_too_deep_is_refused_at_once():
    arrays = '{"type":"array","items":' * 300 + "true" + "}" * 300
    defs = '{"$defs":{"a":' * 2000 + "true" + "}}" * 2000
    beyond_python = '{"items":' * 200_000 + "true" + "}" * 200_000
    for text in (arrays, defs, beyond_python):
        with pytest.raises(RequestError, match="the JSON schema is nested deeper than 120 objects and lists"):
            Guide.json(text)


# What ends a process, in which stage: "bad" is a guide that does it.
FAULTS = {
    "time": "while True: pass",
    "memory": "raise MemoryError if not bytearray(1 << 40) else 0",
    "crash": "signal.raise_signal(signal.SIGSEGV)",
    "assertion": "os.abort()",
    "hang": "time.sleep(600)",
}
STAGE = {
    "compiling it": "t.make_matcher = lambda words, guide: fail() if guide.text == 'bad' else make(words, guide)",
    "its first mask": "t.make_matcher = lambda words, guide: Matcher() if guide.text == 'bad' else make(words, guide)",
    "feeding it tokens": "t._walk = lambda *given: fail() if guides[-1].text == 'bad' else walk(*given)",
}
PATCHED = """
import os, signal, time
import jllm.guides.guide_trials as t
make, walk, trial, guides = t.make_matcher, t._walk, t.trial, []
def fail():
    {fault}
class Matcher:
    def deep_copy(self): return self
    def compute_bitmask(self): fail()
def noted(tokenizer, words, guide, begin):
    guides.append(guide)
    return trial(tokenizer, words, guide, begin)
t.trial = noted
{patch}
t.main()
"""
WHY = {
    "time": "{} took too much processor time",
    "memory": "MemoryError",
    "crash": "{} went deeper than a stack holds",
    "assertion": "{} took more than 1024 MiB of memory, or failed",
    "hang": "{} took more than 1 s",
}


@pytest.mark.parametrize("stage", STAGE)
def test_whatever_ends_a_trial_is_the_guide_s_error_and_the_next_one_passes(monkeypatch, stage):
    for fault, code in FAULTS.items():
        program = PATCHED.format(fault=code, patch=STAGE[stage])
        trials = Trials(BYTES, (sys.executable, "-P", "-c", program))
        trials.begin()
        with monkeypatch.context() as patch:
            patch.setattr(guide_trials, "SECONDS", 0.2)
            patch.setattr(guide_trials, "MASK_SECONDS", 0.2)
            patch.setattr(guide_trials, "PATIENCE", 1.0 if fault == "hang" else 60.0)
            problem, lasting = trials.verdict(Guide.regex("bad"))
        assert WHY[fault].format(stage) in problem
        assert lasting == (fault != "hang")
        assert trials.verdict(Guide.regex("good")) == Verdict(None)


def test_a_process_that_cannot_begin_is_said():
    for command, why in (((sys.executable, "-c", "raise SystemExit(3)"), "status 3"), (("/nowhere",), "cannot start")):
        with pytest.raises(RequestError, match=f"a guide needs a trial process.*{why}"):
            Trials(BYTES, command).verdict(Guide.regex("a"))


def test_processes_end_with_what_began_them():
    trials = Trials(BYTES)
    trials.begin()
    (child,) = trials._all
    del trials
    assert child.wait(60) is not None
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)


GOOD = [
    Guide.json(),
    Guide.json(True),
    Guide.json({"type": "array", "items": {"type": "array", "items": {"type": "number", "minimum": -1e9}}}),
    Guide.json({"$ref": "#/$defs/t", "$defs": {"t": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/t"}}]}}}),
    Guide.json({"type": "array", "minItems": 1_000_000}),
    Guide.json({"type": "string", "minLength": 1_000_000_000}),
    Guide.json({"type": "object", "patternProperties": {"^[a-f]{3}$": {"type": "string", "pattern": "^(ab?)*c"}}}),
    Guide.regex(r"(.|\n)*"),
    Guide.regex(r"(a|aa)+b{2,500}[^x]{5,900}"),
    Guide.grammar('start: "(" start* ")" | /[a-z]+/ start'),
    Guide.choice([f"text number {7919 * i}" for i in range(3000)]),
]


@pytest.mark.parametrize("guide", GOOD, ids=lambda guide: guide.text[:40])
def test_what_passed_takes_a_thousand_tokens(trials, guide):
    assert trials.verdict(guide) == Verdict(None)
    tokenizer, rng = guide_trials._tokenizer(BYTES), random.Random(7)
    begin = guide_trials.make_matcher(tokenizer, guide)
    state = begin.deep_copy()
    for _ in range(1000):
        token = guide_trials._one_of(state.compute_bitmask(), [0], rng)
        if token is None:  # a whole text
            assert state.is_accepting()
            state = begin.deep_copy()
            continue
        assert state.consume_token(token)
    assert not state.is_error()


def test_sixty_thousand_texts_are_a_guide(trials):
    """As rules of a grammar they were more than a step may hold, and the second token of each failed."""
    texts = [f"text number {7919 * i}" for i in range(60_000)]
    matcher = guide_trials.make_matcher(guide_trials._tokenizer(BYTES), Guide.choice(texts))
    assert matcher.consume_tokens([1 + byte for byte in texts[-1].encode()])
    assert matcher.is_accepting()


@settings(max_examples=40, deadline=None)
@given(
    texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6), min_size=1, max_size=4)
)
def test_a_choice_allows_its_texts_as_they_are(texts):
    matcher = guide_trials.make_matcher(guide_trials._tokenizer(BYTES), Guide.choice(texts))
    for text in texts:
        state = matcher.deep_copy()
        assert state.consume_tokens([1 + byte for byte in text.encode()])
        assert state.is_accepting()
    assert not matcher.deep_copy().consume_tokens([1 + byte for byte in (max(texts) + "~").encode()])


@settings(max_examples=60, deadline=None)
@given(
    text=st.text(st.sampled_from(list('ab.*+?|()[]{}\\^$d,19-pPLs\n"/:<>%&~ ')), max_size=14), kind=st.integers(0, 2)
)
def test_any_text_as_a_guide_passes_or_is_an_error(trials, text, kind):
    """Its process never has to say more than that."""
    try:
        guide = (Guide.regex, lambda text: Guide.grammar(f"start: {text}"), Guide.json)[kind](text)
    except RequestError:
        return
    problem = trials.verdict(guide).problem
    assert problem is None or " is refused: " not in problem
    assert problem is None or "\n" not in problem


# What an engine keeps


def guides_that_count(monkeypatch):
    """Guides, and those that were compiled for them so far."""
    found, compiled = Guides(TOKENIZER, CONFIG.vocab_size, [EOS]), []

    def compile(self, guide):
        compiled.append(guide)
        return Fake()

    monkeypatch.setattr(Guides, "_compile", compile)
    return found, compiled


class Fake:
    def deep_copy(self):
        return self


def test_past_64_guides_the_one_asked_for_longest_ago_goes(monkeypatch):
    known, compiled = guides_that_count(monkeypatch)
    some = [Guide.regex(f"a{i}") for i in range(guides.KEPT + 1)]
    for guide in some[:-1]:
        known.matcher(guide)
    known.matcher(some[0])  # so that the second is the one
    for _ in range(3):
        known.matcher(some[-1])
    assert compiled == some
    for guide in (*some[2:], some[0]):
        known.matcher(guide)
    assert compiled == some
    known.matcher(some[1])
    assert compiled == [*some, some[1]]


def test_large_guides_are_kept_up_to_a_size(monkeypatch):
    known, compiled = guides_that_count(monkeypatch)
    monkeypatch.setattr(guides, "LARGE", 100)
    small, large, huge = (Guide.regex("a" * size) for size in (40, 70, 200))
    for guide in (small, large, large, huge, huge, small, small):
        known.matcher(guide)
    assert compiled == [small, large, huge, small]


@pytest.mark.parametrize("lasting", [True, False])
def test_a_verdict_is_kept_where_it_would_be_the_same_again(monkeypatch, lasting):
    asked = []

    def verdict(self, guide):
        asked.append(guide)
        return Verdict("no", lasting)

    monkeypatch.setattr(Trials, "verdict", verdict)
    monkeypatch.setattr(Trials, "begin", lambda self: None)
    known = Guides(TOKENIZER, CONFIG.vocab_size, [EOS])
    for _ in range(3):
        with pytest.raises(RequestError, match="^no$"):
            known.matcher(Guide.regex("a"))
    assert len(asked) == (1 if lasting else 3)


def test_engines_of_one_tokenizer_share_their_guides():
    one, same = (guides.guides_of(TOKENIZER, 97, [EOS]) for _ in range(2))
    assert one is same
    assert guides.guides_of(TOKENIZER, 96, [EOS]) is not one


def test_what_takes_long_is_logged(monkeypatch, caplog):
    monkeypatch.setattr(guides, "SLOW", 0.0)
    caplog.set_level("INFO", "jllm")
    Guides(TOKENIZER, CONFIG.vocab_size, [EOS]).matcher(Guide.regex("ab"))
    said = [record.getMessage() for record in caplog.records]
    assert any(text.startswith("guides are ready after") for text in said)
    assert any(text.startswith("a guide (regex, 2 characters) took") for text in said)


def test_json_in_a_guide_of_the_snapshot_s_json():
    """What Guide.json was given is what its text says, whatever was mapped."""
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", "uniqueItems": False, "minLength": 2.0}
    assert json.loads(Guide.json(schema).text) == schema


def test_an_answer_that_nobody_read_is_of_no_other_guide(monkeypatch):
    """Ctrl-C while a guide is tried: its process ends, and the next guide gets a verdict of its own."""
    own, ask = Trials(BYTES), guide_trials._ask

    def interrupted(child, job):
        child.stdin.write(guide_trials.pickle.dumps(job))
        child.stdin.flush()
        raise KeyboardInterrupt

    own.begin()
    monkeypatch.setattr(guide_trials, "_ask", interrupted)
    with pytest.raises(KeyboardInterrupt):
        own.verdict(Guide.regex("[A-Z]{2}"))
    monkeypatch.setattr(guide_trials, "_ask", ask)
    assert own.verdict(Guide.regex(r"[^\s\S]")).problem is not None
    assert own.verdict(Guide.regex("[A-Z]{2}")) == Verdict(None)


def test_a_process_that_ended_while_it_waited_is_not_the_next_guides_fault():
    own = Trials(BYTES)
    own.begin()
    for child in list(own._all):
        child.kill()
        child.wait()
    assert own.verdict(Guide.regex("[0-9]{7}")) == Verdict(None)
