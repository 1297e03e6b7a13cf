"""What the engine counts, and the policies that experiments switch."""

import json
from typing import Any

import numpy as np
import pytest

from experiments.qps import HostOnly
from jllm.batch import Rung
from jllm.engine.layout import packed_step
from jllm.engine.loop import Engine
from jllm.engine.metrics import Histogram
from jllm.engine.request import SamplingParams
from jllm.engine.scheduler import Limits, Scheduler
from jllm.engine.sequence import Sequence
from jllm.errors import ConfigError
from jllm.merge_step import Variant
from tests.engine.scheduler_harness import Loop
from tests.tiny import CONFIG, greedy, tiny_model

OPTIONS: dict[str, Any] = {"max_slots": 2, "page_size": 8, "num_pages": 4, "ladder": (Rung(2, 0, 0), Rung(2, 16, 2))}
PROMPTS = [[5, 6, 7], [8] * 10, [9, 10]]


@pytest.fixture(scope="module")
def model():
    return tiny_model()


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
    engine = Engine(model, **{**OPTIONS, "num_pages": 8})
    for start in (10, 30):  # together: of each one, the first page of two is kept
        engine.submit(list(range(start, start + 9)), greedy(2))
    list(engine.run())
    m = engine.metrics()
    assert (m["pages_used"], m["cached_pages"], m["pages_free"]) == (0, 2, 8)
    assert engine._scheduler.pool.fragmentation > 0
    assert m["fragmentation"] == 0


@pytest.mark.parametrize(
    "policy", [{"host": "wait"}, {"sampling": "sort"}, {"batching": "static"}, {"prefill": "padded"}]
)
def test_a_policy_changes_no_token(model, policy):
    sampling = [SamplingParams(temperature=0.9, top_k=20, top_p=0.9, seed=i, max_new_tokens=6) for i in range(3)]

    def tokens(**options):
        engine = Engine(model, **{**OPTIONS, **options})
        ids = [engine.submit(p, s) for p, s in zip(PROMPTS, sampling)]
        done = {e.id: e.completion.token_ids for e in engine.run() if e.completion}
        return [done[i] for i in ids]

    assert tokens(**policy) == tokens()


def test_a_host_that_waits_reads_a_step_before_it_dispatches_the_next(model, monkeypatch):
    order = []
    dispatch, read = Engine._dispatch, Engine._read
    monkeypatch.setattr(Engine, "_dispatch", lambda self, plan: order.append(plan.step) or dispatch(self, plan))
    monkeypatch.setattr(Engine, "_read", lambda self, step: order.append(-step.plan.step) or read(self, step))
    engine = Engine(model, **OPTIONS, host="wait")
    engine.submit(PROMPTS[0], greedy(4))
    list(engine.run())
    assert order == [0, 0, 1, -1, 2, -2, 3, -3]


def test_sorting_sorts_and_thresholds_do_not(model):
    engine = Engine(model, **OPTIONS)
    layout = engine._device.layout(OPTIONS["ladder"][0], Variant())
    for sort in (False, True):
        text = packed_step.lower(
            model.params, engine._device._state, np.zeros(layout.size, np.int32), config=CONFIG, layout=layout,
            variant=Variant(sort=sort),
        ).as_text()  # fmt: skip
        assert ("stablehlo.sort" in text) == sort


def test_padded_prompts_count_as_long_as_the_longest_and_are_not_cut_to_fit():
    loop = Loop(Limits(4, 20, 16, 4, 4, 64, 20), scheduler=lambda limits: Scheduler(limits, (16,), padded=True))
    lengths = [3, 6, 2, 1, 30, 5, 5, 5]
    for n in lengths:
        loop.add(n, 3)
    seen = []
    while not loop.scheduler.idle:
        plan = loop.scheduler.schedule()
        if plan is not None:
            chunks = [len(c.tokens) for c in plan.chunks]
            assert plan.prompt_rows == len(chunks) * max(chunks, default=0) <= 16
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
    ladder = (Rung(3, 0, 0), Rung(3, 8, 3), Rung(3, 12, 3), Rung(3, 24, 3))
    rows = {}
    for prefill in ("ragged", "padded"):
        options = {"max_slots": 3, "num_pages": 12, "ladder": ladder, "max_step_tokens": 24, "prefill": prefill}
        engine = Engine(model, **{**OPTIONS, **options}, device=HostOnly)
        for n in (8, 1, 2):
            engine.submit([5] * n, greedy(1))
        list(engine.run())
        m = engine.metrics()
        rows[prefill] = m["slack"], m["prefill_tokens"]
    assert rows["ragged"] == (pytest.approx(1 - 11 / 15), 11)
    assert rows["padded"] == (pytest.approx(1 - 11 / 27), 11)


def static_loop(pages: int = 64) -> Loop:
    return Loop(Limits(3, 12, 12, 3, 4, pages, 16), scheduler=lambda limits: Scheduler(limits, static=True))


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
            assert plan.decode_rows == (len(second if began else first) if plan.decodes else 0)
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
            rows.append(plan.decode_rows)
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


def fill(scheduler: Scheduler, prompts, tokens: int = 40) -> None:
    for i, n in enumerate(prompts):
        scheduler.add(Sequence(i, 0, (1,) * n, SamplingParams(), 0, n + tokens))


def prompt_tokens(scheduler: Scheduler) -> int:
    """Of the next step, which is read at once."""
    plan = scheduler.schedule()
    assert plan is not None
    for seq in [*plan.decodes, *(c.seq for c in plan.chunks if c.final)]:
        scheduler.on_token(seq, 1)
    scheduler.step_read(plan.step)
    return sum(len(c.tokens) for c in plan.chunks)


def test_prompts_fill_sizes_or_wait_for_others_but_not_for_long():
    scheduler = Scheduler(Limits(4, 36, 32, 4, 4, 200, 40), (8, 32))
    fill(scheduler, [5, 5])
    assert prompt_tokens(scheduler) == 10  # too few decode for rows to cost anything: all that there is
    fill(scheduler, [21])
    assert prompt_tokens(scheduler) == 8
    assert prompt_tokens(scheduler) == 8
    assert [prompt_tokens(scheduler) for _ in range(Scheduler.PATIENCE + 1)] == [0] * Scheduler.PATIENCE + [5]
    fill(scheduler, [6])
    assert prompt_tokens(scheduler) == 0
    assert scheduler.held == 1


def test_a_few_decodes_too_many_sit_out_in_turn():
    def decodes(slots: int, sizes: tuple[int, ...]) -> list[list[int]]:
        """Whose turn it is in each of 20 steps in which `slots` sequences want to decode."""
        scheduler = Scheduler(Limits(slots, 64, 64, slots, 4, 400, 80), (), sizes)
        fill(scheduler, [1] * slots)
        prompt_tokens(scheduler)
        steps = []
        for _ in range(20):
            plan = scheduler.schedule()
            assert plan is not None
            assert all(len(seq.pages) * 4 >= seq.computed for seq in plan.decodes)
            for seq in plan.decodes:
                scheduler.on_token(seq, 1)
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
    scheduler = Scheduler(Limits(12, 44, 32, 12, 4, 16, 40), (16,))
    fill(scheduler, [1] * 6)
    assert prompt_tokens(scheduler) == 6
    fill(scheduler, [11] * 3)  # of 10 pages left, 6 stay available and 3 are the first one's
    held = [prompt_tokens(scheduler) for _ in range(3)]
    assert held == [0, 0, 0], "a step began with prompts that only fill a part of it"
    for seq in list(scheduler.running):
        scheduler.finish(seq, "length")
    fill(scheduler, [1] * 6)
    assert prompt_tokens(scheduler) == 32, "nobody decodes: all that there is"


@pytest.mark.parametrize(("pages", "rows"), [(40, 16), (200, 18)])
def test_who_pages_do_not_admit_keeps_no_decodes_in_a_larger_step(pages, rows):
    scheduler = Scheduler(Limits(20, 64, 64, 20, 4, pages, 80), (), (8, 16, 32))
    fill(scheduler, [1] * 18)
    prompt_tokens(scheduler)
    fill(scheduler, [40])
    plan = scheduler.schedule()
    assert plan is not None
    assert (len(plan.decodes), len(plan.chunks)) == (rows, int(rows > 16))


@pytest.mark.parametrize("name", ["batching", "sampling", "host"])
def test_an_unknown_policy_is_named(model, name):
    with pytest.raises(ConfigError, match=f"{name} must be .* or .*, not 'none'"):
        Engine(model, **{**OPTIONS, name: "none"})
