"""What stands in the engine's place where an experiment takes one of its ideas away."""

from typing import Any

import pytest

from experiments.baselines import BASELINES, PaddedPrefill, StaticBatches, engine_with
from experiments.serving.engines import HostOnly
from jllm.engine.engine import Engine
from jllm.engine.loop import Loop as EngineLoop
from jllm.engine.request import SamplingParams
from jllm.engine.scheduler import Limits
from jllm.errors import ConfigError
from jllm.programs.packed_step import WHOLE_STEP, packed_step
from jllm.programs.sizes import StepSizes
from jllm.step.buckets import Bucket
from jllm.step.state import Variant
from tests.engine.scheduler_harness import Loop
from tests.tiny import greedy, tiny_model

OPTIONS: dict[str, Any] = {
    "max_slots": 2,
    "page_size": 8,
    "num_pages": 4,
    "buckets": (Bucket(2, 0, 0), Bucket(2, 16, 2)),
}
PROMPTS = [[5, 6, 7], [8] * 10, [9, 10]]


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.mark.parametrize(
    "choices",
    [
        {"host": "wait"},
        {"sampling": "sort"},
        {"batching": "static"},
        {"prefill": "padded"},
        {"batching": "static", "prefill": "padded"},
    ],
)
def test_a_baseline_changes_no_token(model, choices):
    sampling = [SamplingParams(temperature=0.9, top_k=20, top_p=0.9, seed=i, max_new_tokens=6) for i in range(3)]

    def tokens(**options):
        engine = engine_with(model, **{**OPTIONS, **options})
        ids = [engine.submit(p, s) for p, s in zip(PROMPTS, sampling)]
        done = {e.id: e.completion.token_ids for e in engine.run() if e.completion}
        return [done[i] for i in ids]

    assert tokens(**choices) == tokens()


def test_a_host_that_waits_reads_a_step_before_it_dispatches_the_next(model, monkeypatch):
    order = []
    dispatch, read = EngineLoop.dispatch, EngineLoop.read
    monkeypatch.setattr(EngineLoop, "dispatch", lambda self, plan: order.append(plan.step) or dispatch(self, plan))
    monkeypatch.setattr(EngineLoop, "read", lambda self, step: order.append(-step.plan.step) or read(self, step))
    engine = engine_with(model, **OPTIONS, host="wait")
    engine.submit(PROMPTS[0], greedy(4))
    list(engine.run())
    assert order == [0, 0, 1, -1, 2, -2, 3, -3]


def test_sorting_sorts_and_thresholds_do_not(model):
    for sampling in BASELINES["sampling"]:
        shapes = engine_with(model, **OPTIONS, sampling=sampling)._device.shapes
        key = OPTIONS["buckets"][0], Variant(), WHOLE_STEP
        text = packed_step.lower(*shapes.arguments(*key), **shapes.static(*key)).as_text()
        assert ("stablehlo.sort" in text) == (sampling == "sort")


def test_padded_prompts_count_as_long_as_the_longest_and_are_not_cut_to_fit():
    loop = Loop(
        Limits(4, 20, 16, 4, 4, 64, 20), scheduler=lambda limits: PaddedPrefill(limits, StepSizes(((4, 16),), (16,)))
    )
    lengths = [3, 6, 2, 1, 30, 5, 5, 5]
    for n in lengths:
        loop.add(n, 3)
    seen = []
    while not loop.scheduler.idle:
        plan = loop.scheduler.schedule()
        if plan is not None:
            chunks = [len(c.tokens) for c in plan.chunks]
            assert plan.size[1] == len(chunks) * max(chunks, default=0) <= 16
            assert all(c.start == 0 and c.final for c in plan.chunks[1:])
            seen += [chunks] if chunks else []
            loop.unread.append((plan, loop.device.run(plan), []))
        while loop.unread and (plan is None or len(loop.unread) > 1):
            loop.read()
        assert loop.scheduler.dispatched < 200, "no progress"
    loop.check_end()
    assert seen[0] == [3, 6]  # a third would make it 18
    assert sum(map(sum, seen)) == sum(lengths)


def test_a_padded_step_computes_the_rows_of_the_longest(model):
    buckets = (Bucket(3, 0, 0), Bucket(3, 8, 3), Bucket(3, 12, 3), Bucket(3, 24, 3))
    rows = {}
    for prefill in ("ragged", "padded"):
        options = {"max_slots": 3, "num_pages": 12, "buckets": buckets, "max_step_tokens": 24, "prefill": prefill}
        engine = engine_with(model, **{**OPTIONS, **options}, device=HostOnly)
        for n in (8, 1, 2):
            engine.submit([5] * n, greedy(1))
        list(engine.run())
        m = engine.metrics()
        rows[prefill] = m["slack"], m["prefill_tokens"]
    assert rows["ragged"] == (pytest.approx(1 - 11 / 15), 11)
    assert rows["padded"] == (pytest.approx(1 - 11 / 27), 11)


def static_loop(pages: int = 64) -> Loop:
    return Loop(Limits(3, 12, 12, 3, 4, pages, 16), scheduler=StaticBatches)


def test_a_static_batch_waits_for_its_longest_member():
    loop = static_loop()
    seqs = [loop.add(9, n) for n in (2, 12, 3, 4, 4)]
    first, second, began = set(seqs[:3]), set(seqs[3:]), False
    while not loop.scheduler.idle:
        plan = loop.scheduler.schedule()
        if plan is not None:
            loop.unread.append((plan, loop.device.run(plan), []))
            members = {*plan.decodes, *(c.seq for c in plan.chunks)}
            began |= bool(members & second)
            assert members <= (second if began else first)
            assert not began or all(seq.finished for seq in first)
            assert not (plan.decodes and plan.chunks), "a batch prefills before it decodes"
            assert plan.size[0] == (len(second if began else first) if plan.decodes else 0)
        while loop.unread and (plan is None or len(loop.unread) > 1):
            loop.read()
    loop.check_end()
    assert began


def test_a_static_batch_waits_for_slots_that_an_unread_step_uses():
    loop, rows = static_loop(), []
    seqs = [loop.add(3, n) for n in (1, 9, 9, 4, 4, 4)]
    while not loop.scheduler.idle:
        plan = loop.scheduler.schedule()
        if plan is not None:
            loop.unread.append((plan, loop.device.run(plan), []))
            rows.append(plan.size[0])
        if len(rows) == 3 and plan is not None:  # the first has ended, and the others take part in a step in flight
            assert seqs[0].finished
            loop.abort(seqs[1])
            loop.abort(seqs[2])
        while loop.unread and (plan is None or len(loop.unread) > 1):
            loop.read()
    loop.check_end()
    assert rows == [0, 3, 3, 0, 3, 3, 3], "three began together, twice"


def test_a_static_batch_that_the_pool_cannot_hold_still_ends():
    loop = static_loop(pages=7)
    for n in (9, 12, 10, 3):
        loop.add(9, n)
    while not loop.scheduler.idle:
        plan = loop.scheduler.schedule()
        if plan is not None:
            loop.unread.append((plan, loop.device.run(plan), []))
        while loop.unread and (plan is None or len(loop.unread) > 1):
            loop.read()
        assert loop.scheduler.dispatched < 200, "no progress"
    loop.check_end()


@pytest.mark.parametrize("name", BASELINES)
def test_an_engine_has_no_option_of_its_own_for_them(model, name):
    with pytest.raises(ConfigError, match=f"unknown engine option '{name}'"):
        Engine(model, **{**OPTIONS, name: BASELINES[name][1]})
