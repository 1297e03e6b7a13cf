"""What a step's tokens make of its samples, all taken in by one call: plain ones beside those that are looked at."""

import numpy as np
import pytest

from jllm.engine.ledger import Ledger
from jllm.engine.request import SamplingParams
from jllm.engine.sequence import Sequence
from jllm.step.state import NOT_FINITE, Outputs
from tests.engine.test_engine import Letters
from tests.tiny import CONFIG

pytest.importorskip("hypothesis")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

PROMPT = (5, 6, 7)
STEPS = 6
tokens = st.sampled_from([*range(33, 40), *range(33, 40), *CONFIG.eos_ids])  # "A" to "G"
ROWS = 5  # at most, of a sample in a step


@st.composite
def drawn(draw) -> tuple[int, ...]:
    """What a sample's rows of a step draw, at least a token or what is not finite; -1 behind the last one."""
    bad = draw(st.sampled_from([()] * 9 + [(NOT_FINITE,)]))
    some = draw(st.lists(tokens, min_size=0 if bad else 1, max_size=3))
    return (*some, *bad, *(-1,) * draw(st.sampled_from([0, 0, 1])))


@st.composite
def samplings(draw, text: bool) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=draw(st.integers(1, 12)),
        stop=draw(st.sampled_from([(), (), ("AB",), ("C", "FG")])) if text else (),
        stop_token_ids=draw(st.sampled_from([(), (34,), (36, 39)])),
        ignore_eos=draw(st.booleans()),
        logprobs=draw(st.sampled_from([None, None, 2])),
        include_end=draw(st.booleans()),
    )


@st.composite
def runs(draw):
    """Whether there is text; each sample's sampling, and what each of its steps draws: None where it sits out."""
    text = draw(st.booleans())
    steps = st.lists(st.none() | drawn(), min_size=STEPS, max_size=STEPS)
    return text, draw(st.lists(st.tuples(samplings(text), steps), min_size=1, max_size=6))


def outcome(sampling: SamplingParams, steps, text: bool):
    """By hand: the sample's tokens and its text, how many tokens each step counts, and the reason of its end if it has
    one."""
    kept, counts, ends = [], [], {*sampling.stop_token_ids, *(() if sampling.ignore_eos else CONFIG.eos_ids)}
    for step in steps:
        counts.append(0)
        for token in step or ():
            if token == NOT_FINITE:
                return kept, counts, "error"
            if token < 0:
                break
            counts[-1] += 1
            if token in ends:
                return kept + [token] * sampling.include_end, counts, "stop"
            kept.append(token)
            written = "".join(chr(id + 32) for id in kept)
            cuts = [written.index(stop) for stop in sampling.stop if stop in written] if text else []
            if cuts:
                return kept[: min(cuts)], counts, "stop"
            if len(kept) == sampling.max_new_tokens:
                return kept, counts, "length"
    return kept, counts, None


def outputs_of(rows: int) -> Outputs:
    """Log-probabilities that tell the rows apart."""
    own = np.arange(rows, dtype=np.float32)
    top = np.tile(np.arange(20, dtype=np.int32), (rows, 1))
    return Outputs(np.zeros(rows, np.int32), -own, top, top - own[:, None], None)  # type: ignore[arg-type]


@settings(deadline=None, max_examples=300)
@given(runs())
def test_each_sample_of_a_step_has_what_it_would_have_alone(run):
    """Tokens, text, ends, versions, log-probabilities, counts and times, whatever is drawn for the others of its steps,
    and whether the host looks at its tokens one by one or not; events come in the order of the step."""
    text, samples = run
    ledger = Ledger(CONFIG, Letters() if text else None)  # type: ignore[arg-type]
    seqs = [
        Sequence(*divmod(i, 2), PROMPT, sampling, 0, len(PROMPT) + sampling.max_new_tokens)
        for i, (sampling, _) in enumerate(samples)
    ]
    at = {(seq.request_id, seq.sample): i for i, seq in enumerate(seqs)}
    for seq in seqs:
        ledger.add(seq)
    want = [outcome(sampling, steps, text) for sampling, steps in samples]
    events, taken, scored = [], [0] * len(seqs), [[] for _ in seqs]
    for step in range(STEPS):
        rows = [(seqs[i], i, ROWS * i, steps[step]) for i, (_, steps) in enumerate(samples) if steps[step]]
        before = [len(seq.output) for seq in seqs]
        for seq, i, kept, reason in ledger.take(rows, outputs_of(ROWS * len(seqs)), step, float(step)):
            assert seq is seqs[i]
            seq.output += kept
            assert len(kept) == want[i][1][step]
            scored[i] += [-(ROWS * i + row) for row in range(len(kept))]
            if reason is not None:
                ledger.end(seq, reason, float(step), kept[:-1] if reason == "stop" else kept)
        news = ledger.news(at_once=True)
        told = [at[e.id, e.sample] for e in news]
        assert told == sorted(set(told))
        new = {i for i, seq in enumerate(seqs) if len(seq.output) > before[i]}
        assert {i for i in new if not samples[i][0].stop} <= set(told)
        events += news
        taken = [n + len(seq.output) - had for n, seq, had in zip(taken, seqs, before)]
    for i, (kept, counts, reason) in enumerate(want):
        mine = [e for e in events if at[e.id, e.sample] == i]
        told = [token for e in mine for token in e.token_ids]
        done = [e.completion for e in mine if e.completion]
        assert (not seqs[i].live) == (reason is not None) == bool(done)
        assert taken[i] == sum(counts)
        if reason is None:
            assert told == kept[: len(told)]
            assert len(told) == len(kept) or samples[i][0].stop  # what may begin a stop string is held back
            assert seqs[i].answer.tokens == kept
            continue
        assert [done[0].finish_reason, list(done[0].token_ids)] == [reason, kept]
        assert told == kept
        assert done[0].text == "".join(e.text for e in mine) if text else done[0].text is None
        versions = [step for step, count in enumerate(counts) for _ in range(count)]
        assert list(done[0].versions) == versions[: len(kept)]
        if text:
            ended = kept[:-1] if kept and reason == "stop" and kept[-1] in seqs[i].stop_ids else kept
            assert done[0].text == "".join(chr(id + 32) for id in ended)
        if samples[i][0].logprobs is not None:
            each = [score for e in mine for score in e.logprobs]
            assert tuple(each) == done[0].logprobs
            assert [(score.token_id, score.logprob) for score in each] == list(zip(kept, scored[i]))
            assert all(len(score.top) == 2 for score in each)
    firsts = sum(count > 0 for count in taken)
    assert ledger.counts.output_tokens == sum(taken)
    assert (ledger.times.first_token.count, ledger.times.inter_token.count) == (firsts, sum(taken) - firsts)


def test_times_between_tokens_are_those_of_each_sample():
    """One sits out a step, one has two tokens of a step: between these there is no time."""
    ledger = Ledger(CONFIG, None)
    one, two = (Sequence(i, 0, PROMPT, SamplingParams(ignore_eos=True), 0, 99) for i in range(2))
    ledger.add(one)
    ledger.add(two)
    for now, rows in (
        (1.0, [(one, 1, 0, (7,))]),
        (4.0, [(one, 2, 0, (7, 8)), (two, 1, 2, (9,))]),
        (5.0, [(two, 1, 0, (9,))]),
    ):
        assert [kept for _, _, kept, _ in ledger.take(rows, outputs_of(4), 0, now)] == [row[-1] for row in rows]
    times = ledger.times.inter_token
    assert (times.count, times.total, times.least, times.largest) == (3, 4.0, 0.0, 3.0)


def test_a_row_without_a_token_of_a_sample_that_goes_on_is_an_internal_error():
    ledger = Ledger(CONFIG, None)
    seq = Sequence(3, 0, PROMPT, SamplingParams(), 0, 99)
    ledger.add(seq)
    with pytest.raises(AssertionError, match="request 3: the device ended a sequence that the host runs"):
        list(ledger.take([(seq, 1, 0, (-1,))], outputs_of(1), 0, 1.0))
