"""A step that advances a sequence by any number of tokens gives each request what one token a step would."""

import random
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from experiments.serving.engines import HostOnly
from jllm.engine.engine import Engine
from jllm.engine.request import Completion, SamplingParams
from jllm.engine.scheduler import Scheduler
from jllm.model.sampling import STOP_IDS
from jllm.programs.sizes import EngineSizes
from jllm.step.buckets import Bucket
from jllm.step.state import NOT_FINITE, TOP_LOGPROBS, Outputs
from tests.engine.test_texts import Pieces
from tests.tiny import tiny_model

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

OPTIONS = {"max_slots": 3, "page_size": 8, "num_pages": 9, "max_step_tokens": 20, "buckets": (Bucket(3, 8, 3),)}


def token_of(request: int, index: int) -> int:
    """What the model says at this place: mostly letters, now and then an end token."""
    return random.Random(f"{request} {index}").choice([2, *range(33, 60)])


class Advancing(HostOnly):
    """Decodes of up to `rows` rows yield some tokens each, as a model with drafts would; a broken request, one whose
    logits are not finite at some place."""

    def __init__(self, *arguments, rows: int, plans: list, broken: int | None = None):
        self.rows, self.plans, self.broken, self.made = rows, plans, broken, {}
        self.random = random.Random(0)
        super().__init__(*arguments)

    @property
    def sizes(self) -> EngineSizes:
        buckets = tuple(replace(bucket, rows=self.rows) for bucket in self._sizes.buckets)
        return replace(self._sizes, limits=replace(self._sizes.limits, short_rows=self.rows), buckets=buckets)

    @sizes.setter
    def sizes(self, sizes: EngineSizes) -> None:
        self._sizes = sizes

    def run(self, buffer, layout, variant) -> Outputs:
        plan, bucket = self.plans[-1], layout.bucket
        tokens = np.full(bucket.decodes * self.rows + bucket.chunks, -1, np.int32)
        for i, (seq, rows) in enumerate(zip(plan.decodes, plan.rows, strict=True)):
            self.write(tokens, i * self.rows, seq, self.random.randint(1, rows))
        for b, chunk in enumerate(plan.chunks):
            if chunk.final:
                self.made[chunk.seq] = len(chunk.seq.output), False
                self.write(tokens, bucket.decodes * self.rows + b, chunk.seq, 1)
        top = np.tile(np.arange(TOP_LOGPROBS), (len(tokens), 1))
        return Outputs(tokens, -tokens / 100.0, top, -top / 10.0, None)

    def write(self, tokens: np.ndarray, row: int, seq, count: int) -> None:
        """A sequence's next tokens, up to one that the device knows to be its last."""
        made, done = self.made[seq]
        for i in range(row, row + count * (not done)):
            tokens[i] = token_of(seq.request_id, made)
            if seq.request_id == self.broken and made == 5:
                tokens[i] = NOT_FINITE
            made += 1
            ends = {2, *sorted(seq.params.stop_token_ids)[: STOP_IDS - 1], NOT_FINITE}
            done = tokens[i] in ends or len(seq.prompt) + made >= seq.max_length
            if done:
                break
        self.made[seq] = made, done


class Shown(Scheduler):
    """Shows its plans."""

    def __init__(self, *arguments, plans: list, **options):
        self.plans = plans
        super().__init__(*arguments, **options)

    def schedule(self):
        plan = super().schedule()
        self.plans.append(plan)
        return plan


def serve(model, rows: int, samplings: list[SamplingParams], broken=None) -> tuple[list[Completion], dict, str]:
    plans: list = []
    device = partial(Advancing, rows=rows, plans=plans, broken=broken)
    engine = Engine(model, device=device, scheduler=partial(Shown, plans=plans), **OPTIONS)
    ids = [engine.submit([5 + i] * (2 + 3 * i), params) for i, params in enumerate(samplings)]
    done, text = {}, dict.fromkeys(ids, "")
    for event in engine.run():
        text[event.id] += event.text
        if event.completion is not None:
            done[event.id] = event.completion
    assert [done[i].text or "" for i in ids] == list(text.values()), "events and completion differ"
    return [done[i] for i in ids], engine.metrics(), str([plan.rows for plan in plans if plan])


def known(done: Completion) -> Completion:
    return replace(done, timings=replace(done.timings, first_token=None, total=0.0))


letters = st.integers(33, 59)
samplings = st.builds(
    lambda stop, ids, ignore, most, logprobs: SamplingParams(
        stop=stop, stop_token_ids=ids, ignore_eos=ignore, max_new_tokens=most, logprobs=logprobs, seed=0
    ),
    st.lists(st.lists(letters.map(lambda i: chr(i + 32)), min_size=1, max_size=2).map("".join), max_size=2),
    st.lists(letters, max_size=2),
    st.just(False),
    st.integers(1, 24),
    st.sampled_from([None, 0, 3]),
)


@pytest.fixture(scope="module", params=["text", "ids"])
def model(request):
    return tiny_model(num_layers=1, tokenizer=Pieces() if request.param == "text" else None)


@settings(max_examples=20, derandomize=True, suppress_health_check=list(HealthCheck))
@given(given=st.lists(samplings, min_size=1, max_size=5), rows=st.integers(2, 5))
def test_any_number_of_tokens_a_step_gives_the_same(model, given, rows):
    if model.tokenizer is None:
        given = [replace(params, stop=()) for params in given]
    one, before, _ = serve(model, 1, given)
    several, after, _ = serve(model, rows, given)
    assert [known(done) for done in several] == [known(done) for done in one]
    for done, params in zip(several, given, strict=True):
        assert not {2, *params.stop_token_ids} & {*done.token_ids}, "what ends a sequence is no part of it"
    same = ("requests_finished", "output_tokens")
    assert [after[name] for name in same] == [before[name] for name in same]
    for m in (before, after):
        assert m["inter_token_s"]["count"] == m["output_tokens"] - len(given)


def test_tokens_before_one_that_is_not_finite_are_kept(model):
    params = [SamplingParams(max_new_tokens=20, stop_token_ids=(), seed=0)] * 2
    broken = next(i for i in range(2) if 2 not in [token_of(i, n) for n in range(6)])
    for rows in (1, 4):
        done = serve(model, rows, params, broken)[0][broken]
        assert (done.finish_reason, done.token_ids) == ("error", tuple(token_of(broken, n) for n in range(5)))


def test_steps_are_fewer_with_rows_for_drafts(model):
    params = [SamplingParams(max_new_tokens=24, stop_token_ids=(), seed=i) for i in range(3)]
    steps = {rows: serve(model, rows, params)[1]["steps"] for rows in (1, 4)}
    assert steps[4] < 0.75 * steps[1]
