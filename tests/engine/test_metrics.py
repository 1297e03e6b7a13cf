"""What the engine counts, and how steps are filled."""

import json
from typing import Any

import numpy as np
import pytest

from jllm.engine.engine import Engine
from jllm.engine.metrics import Histogram
from jllm.engine.request import SamplingParams
from jllm.engine.scheduler import Limits, Scheduler
from jllm.engine.sequence import Sequence
from jllm.programs.sizes import StepSizes
from jllm.step.buckets import FEW_SLOTS, Bucket
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
    return tiny_model(num_layers=1)


def test_percentiles_are_those_of_the_nearest_rank():
    values = np.random.default_rng(0).lognormal(-4, 2, 5000)
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    for p, rank in ((1, 50), (50, 2500), (90, 4500), (99, 4950), (99.9, 4995), (99.91, 4996), (100, 5000)):
        assert histogram.percentile(p) == pytest.approx(np.sort(values)[rank - 1], rel=0.0051)
    assert len(histogram._buckets) < 2500
    found = histogram.summary()
    assert (found["count"], found["max"]) == (5000, values.max())
    assert found["mean"] == pytest.approx(values.mean())


def test_few_values():
    nothing = dict.fromkeys(("mean", "p50", "p90", "p95", "p99", "max"))
    assert Histogram().summary() == {"count": 0, **nothing}
    histogram = Histogram()
    histogram.add(0.25, times=3)
    histogram.add(0.0)
    assert histogram.percentile(25) == pytest.approx(1e-7, rel=0.01)
    for p in (26, 99):
        assert histogram.percentile(p) == pytest.approx(0.25, rel=0.0051)
    for p in (0, 101):
        with pytest.raises(ValueError, match="percentile must be in"):
            histogram.percentile(p)


def test_counts_and_times_add_up(model):
    engine = Engine(model, **OPTIONS)
    for prompt in PROMPTS:
        engine.submit(prompt, greedy(5))
    events = list(engine.run())
    m = json.loads(json.dumps(engine.metrics()))
    assert (m["requests"], m["requests_finished"]) == (3, 3)
    assert m["prompt_tokens"] == m["prefill_tokens"] == 15
    assert m["first_token_s"]["count"] == m["end_to_end_s"]["count"] == 3
    assert m["inter_token_s"]["count"] == m["output_tokens"] - 3 == 12
    assert m["tokens"] == 15 + 12
    assert m["slack"] == pytest.approx(1 - m["tokens"] / m["rows"])
    assert (m["pages_used"], m["pages_peak"]) == (0, 3)  # 3 + 5 - 1 tokens in one page of 8, 10 + 5 - 1 in two
    timings = [e.completion.timings for e in events if e.completion]
    assert m["first_token_s"]["max"] == max(t.first_token for t in timings)
    assert m["end_to_end_s"]["max"] == max(t.total for t in timings)
    between = sum(t.total - t.first_token for t in timings)
    assert m["inter_token_s"]["mean"] * 12 == pytest.approx(between, rel=1e-6)


def test_a_reset_begins_anew_and_what_runs_goes_on(model):
    engine = Engine(model, **OPTIONS)
    engine.submit(PROMPTS[0], greedy(5))
    while not engine.metrics()["output_tokens"]:
        engine.step()
    before = engine.metrics()["output_tokens"]
    engine.reset_metrics()
    assert engine.metrics()["requests"] == engine.metrics()["steps"] == engine.metrics()["slack"] == 0
    list(engine.run())
    m = engine.metrics()
    assert m["output_tokens"] == 5 - before
    assert m["requests_finished"] == m["end_to_end_s"]["count"] == 1
    assert m["first_token_s"]["count"] == 0


def test_an_aborted_request_has_no_end_to_end_time_and_preemptions_are_counted(model):
    engine = Engine(model, **OPTIONS)
    aborted = engine.submit(PROMPTS[0], greedy(12))
    engine.step()
    engine.abort(aborted)
    list(engine.run())
    m = engine.metrics()
    assert m["end_to_end_s"]["count"] == 0
    assert (m["requests"], m["requests_finished"], m["requests_aborted"]) == (1, 0, 1)
    for prompt in ([3] * 7, [4] * 7):
        engine.submit(prompt, greedy(18))
    list(engine.run())
    m = engine.metrics()
    assert m["preemptions"] == 1
    assert m["recomputed_tokens"] > 7
    assert m["prefill_tokens"] == 3 + 7 + 7 + m["recomputed_tokens"] + 1  # and the newest token, which had no KV yet
    assert m["output_tokens"] == 36
    assert (m["requests_finished"], m["requests_aborted"]) == (2, 1)


def test_what_is_left_in_the_prefix_cache_is_no_fragmentation(model):
    engine = Engine(model, **{**OPTIONS, "num_pages": 8, "kv_policy": "extent"})
    for start in (10, 30):  # together: of each one, the first page of two is kept
        engine.submit(list(range(start, start + 9)), greedy(2))
    list(engine.run())
    m = engine.metrics()
    assert (m["pages_used"], m["cached_pages"], m["pages_free"]) == (0, 2, 8)
    assert engine._scheduler.pool.fragmentation > 0
    assert m["fragmentation"] == 0


def fill(scheduler: Scheduler, prompts, tokens: int = 40) -> None:
    for i, n in enumerate(prompts):
        scheduler.add(Sequence(i, 0, (1,) * n, SamplingParams(), 0, n + tokens))


def prompt_tokens(scheduler: Scheduler) -> int:
    """Of the next step, which is read at once."""
    plan = scheduler.schedule()
    assert plan is not None
    for seq in [*plan.decodes, *(c.seq for c in plan.chunks if c.final)]:
        scheduler.on_tokens(seq, [1])
    scheduler.step_read(plan.step)
    return sum(len(c.tokens) for c in plan.chunks)


def test_prompts_fill_sizes_or_wait_for_others_but_not_for_long():
    scheduler = Scheduler(Limits(4, 36, 32, 4, 4, 200, 40), StepSizes(((4, 8), (4, 32)), (8, 32)))
    fill(scheduler, [5, 5])
    assert prompt_tokens(scheduler) == 10  # nothing decodes: one step, not two
    fill(scheduler, [21])
    assert prompt_tokens(scheduler) == 8
    assert prompt_tokens(scheduler) == 8
    assert [prompt_tokens(scheduler) for _ in range(Scheduler.PATIENCE + 1)] == [0] * Scheduler.PATIENCE + [5]
    fill(scheduler, [6])
    assert prompt_tokens(scheduler) == 0
    assert scheduler.held == 1


@pytest.mark.parametrize("slots", [128, 64])
def test_prompts_are_cut_where_that_computes_the_fewest_rows(slots):
    """Thirty decode. Of the two smallest sizes only the second has rows for them."""
    sizes = StepSizes(((8, 64), (64, 64), (64, 448), (128, 1024)), (1024,) if slots > FEW_SLOTS else ())
    scheduler = Scheduler(Limits(slots, 1152, 1024, 64, 4, 4000, 400), sizes)
    fill(scheduler, [1] * 30)
    assert prompt_tokens(scheduler) == 30

    def steps(*prompts: int) -> list[int]:
        fill(scheduler, prompts, tokens=1)  # they end at once
        found = []
        while sum(found) < sum(prompts):
            found.append(prompt_tokens(scheduler))
        for seq in list(scheduler.running)[30:]:
            scheduler.finish(seq, "length")
        return found

    assert steps(20) == [20]
    assert steps(20, 130) == [64, 64, 22]  # 3 x 128 rows, not 512
    assert steps(64 * 4) == [64 * 4]  # as many rows in one step
    assert steps(448 + 64) == [448, 64]  # 512 and 128 rows, not 1152
    assert steps(1000) == [1000]  # 1152 rows, not 2 x 512 and 2 x 128


def test_an_engine_that_others_hand_requests_computes_prompts_in_large_steps():
    sizes = StepSizes(((128, 16), (128, 1024)))
    scheduler = Scheduler(Limits(128, 1152, 1024, 64, 4, 4000, 400, block=4), sizes, most_joining=16)
    fill(scheduler, [1] * 30)
    prompt_tokens(scheduler)
    fill(scheduler, [100])
    assert prompt_tokens(scheduler) == 100


def test_a_few_decodes_too_many_sit_out_in_turn():
    def decodes(slots: int, sizes: tuple[int, ...]) -> list[list[int]]:
        """Whose turn it is in each of 20 steps in which `slots` sequences want to decode."""
        scheduler = Scheduler(Limits(slots, 64, 64, slots, 4, 400, 80), StepSizes(decodes=sizes))
        fill(scheduler, [1] * slots)
        prompt_tokens(scheduler)
        steps = []
        for _ in range(20):
            plan = scheduler.schedule()
            assert plan is not None
            assert all(len(seq.pages) * 4 >= seq.computed for seq in plan.decodes)
            for seq in plan.decodes:
                scheduler.on_tokens(seq, [1])
            scheduler.step_read(plan.step)
            steps.append([seq.request_id for seq in plan.decodes])
        return steps

    steps = decodes(18, (8, 16, 32))
    assert all(len(set(step)) == 16 for step in steps)
    times = [sum(i in step for step in steps) for i in range(18)]
    assert max(times) - min(times) <= 1, "some wait more often than others"
    assert all(i in a or i in b for i in range(18) for a, b in zip(steps, steps[1:])), "one waits twice in a row"
    assert all(len(step) == 19 for step in decodes(19, (8, 16, 32)))  # more than one in eight: all go on
    assert all(len(step) == 16 for step in decodes(16, (8, 16, 32)))


def test_prompts_that_pages_do_not_admit_fill_no_step():
    """Six of twelve slots decode, with prompts for the others that the pool has no room for, but one at a time."""
    scheduler = Scheduler(Limits(12, 44, 32, 12, 4, 16, 40), StepSizes(((12, 16), (12, 32)), (16,)))
    fill(scheduler, [1] * 6)
    assert prompt_tokens(scheduler) == 6
    fill(scheduler, [11] * 3)  # of 10 pages left, 6 stay available and 3 are the first one's
    held = [prompt_tokens(scheduler) for _ in range(3)]
    assert held == [0, 0, 0], "a step began with prompts that only fill a part of it"
    for seq in list(scheduler.running):
        scheduler.finish(seq, "length")
    fill(scheduler, [1] * 6)
    assert prompt_tokens(scheduler) == 32, "no sequence decodes: all that there is"


@pytest.mark.parametrize(("pages", "rows"), [(40, 16), (200, 18)])
def test_who_pages_do_not_admit_keeps_no_decodes_in_a_larger_step(pages, rows):
    scheduler = Scheduler(Limits(20, 64, 64, 20, 4, pages, 80), StepSizes(decodes=(8, 16, 32)))
    fill(scheduler, [1] * 18)
    prompt_tokens(scheduler)
    fill(scheduler, [40])
    plan = scheduler.schedule()
    assert plan is not None
    assert (len(plan.decodes), len(plan.chunks)) == (rows, int(rows > 16))
