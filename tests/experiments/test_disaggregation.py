"""The experiment on prefill and decode apart: simulated by hand, its claim, steps of prompts or decodes alone."""

import json

import pytest

from experiments.baselines import SeparateSteps
from experiments.disaggregation import main, parse_args, with_claim, workload
from experiments.simulation.apart import Decodes, Prompts, apart, merged
from experiments.simulation.requests import Arrival, Sample
from jllm.distributed.handover import joining_buckets
from jllm.engine.options import EngineOptions
from jllm.engine.request import SamplingParams
from jllm.engine.sequence import Sequence
from jllm.programs.sizes import Limits
from tests.experiments.test_simulate import LONG, SECOND

SIZES = {"max_slots": 4, "page_size": 8, "num_pages": 64, "max_step_tokens": 64}


def engine(kind):
    buckets = joining_buckets(4, 64) if kind is Decodes else None
    return kind(LONG, EngineOptions(**SIZES, buckets=buckets), SECOND, 16)


def sent(*samples):
    return [Arrival(Sample((1,) * prompt, output), at) for prompt, output, at in samples]


def test_times_of_a_request_that_changes_engines():
    one = apart(engine, sent((20, 3, 0.0)), 1, 1, lambda tokens: tokens / 8)
    # its prompt takes a step, its pages 2.5 s, and two more tokens a step each
    assert (one.first_token.total, one.seconds) == pytest.approx((1.0, 1 + 2.5 + 2))
    assert (one.inter_token.count, one.inter_token.total) == (2, pytest.approx(4.5))
    assert (one.requests, one.output_tokens, one.prompt_tokens) == (1, 3, 20)


def test_apart_none_waits_for_prompts():
    coming = sent((4, 12, 0.0), *((60, 1, 3.0 + i) for i in range(6)))
    both = {"merged": merged(engine, coming, 1), "apart": apart(engine, coming, 1, 1, float)}
    assert [tally.requests for tally in both.values()] == [7, 7]
    assert [tally.output_tokens for tally in both.values()] == [18, 18]
    assert both["apart"].first_token.count == both["merged"].first_token.count == 7
    decodes = engine(Decodes)
    prompts = engine(Prompts)
    prompts.run(coming)
    assert [each.sample.output for each in prompts.done][0] == 12
    plans = [plan for plan, _ in decodes.steps(sorted(prompts.done[:1], key=lambda each: each.at))]
    assert sum(plan.prompt_tokens for plan in plans) == 1, "the first token, and none of the prompt"


def test_steps_have_prompts_or_decodes():
    limits = Limits(
        max_slots=4, max_step_tokens=16, max_prompt_tokens=12, max_chunks=4, page_size=8, num_pages=40, max_deltas=16
    )
    scheduler, plans, before = SeparateSteps(limits), [], None
    for i in range(6):
        scheduler.add(Sequence(i, 0, (5,) * (3 + 5 * i), SamplingParams(), 0, 10 + 5 * i))
    while not scheduler.idle:
        plan = scheduler.schedule()
        if before is not None:
            for seq in [*before.decodes, *(c.seq for c in before.chunks if c.final)]:
                scheduler.on_tokens(seq, [1])
                if not seq.finished and seq.length == seq.max_length:
                    scheduler.finish(seq, "length")
            scheduler.step_read(before.step)
        plans += [] if plan is None else [plan]
        before = plan
    assert all(not (plan.decodes and plan.chunks) for plan in plans)
    assert any(plan.decodes for plan in plans)
    assert sum(plan.prompt_tokens for plan in plans) == sum(3 + 5 * i for i in range(6))


def test_the_simulation_yields_rows_and_the_claim(tmp_path, capsys):
    command = ["--simulate", "--gpus", "2", "--requests", "12", "--load", "0.5", "--splits", "0.5", "--slots", "8"]
    assert main([*command, "--results", str(tmp_path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["experiment"] == "disaggregation_simulated"
    *runs, first, second = document["rows"]
    levels = [(how, load) for how in ("merged", "separate", "apart") for load in (None, 0.5)]
    assert [(row["how"], row["load"]) for row in runs] == levels
    assert {row["gpus"] for row in runs} == {2}
    assert [(row["part"], row["of"], row["split"], row["load"]) for row in (first, second)] == [
        ("claim", "simulated", "1+1", load) for load in (None, 0.5)
    ]


def test_the_claim_compares_equal_loads_on_as_many_gpus():
    def row(how, level, gpus, load, tokens, tail):
        same = {"part": "measured", "model": "m", "how": how, "level": level, "gpus": gpus, "load": load}
        return same | {"output_tokens_s": tokens, "itl_ms_p99": tail, "ttft_ms_p99": 1.0}

    rows = [row("merged", -1, 1, None, 50.0, 9.0), row("replicas", -1, 2, None, 100.0, 9.0)]
    rows += [
        row("replicas", -1, 2, 0.5, 60.0, 8.0),
        row("apart", 1, 2, None, 80.0, 5.0),
        row("apart", 1, 2, 0.5, 60.0, 4.0),
    ]
    found = [each for each in with_claim(iter(rows)) if each["part"] == "claim"]
    assert [(each["output_tokens_s_over_merged"], each["itl_ms_p99_over_merged"]) for each in found] == [
        (0.8, pytest.approx(5 / 9, rel=1e-4)), (1.0, 0.5),
    ]  # fmt: skip


def test_requests_are_the_same_for_every_level():
    args = parse_args(["--requests", "9", "--prompt", "10", "--output", "4"])
    assert workload(args, 2.0) == workload(args, 2.0)
    lengths = [(r.prompt, r.output) for r in workload(args, None)]
    assert lengths == [(r.prompt, r.output) for r in workload(args, 5.0)]
    assert all(5 <= p <= 15 and 2 <= o <= 6 for p, o in lengths)
    assert {r.arrival for r in workload(args, None)} == {0.0}
    with pytest.raises(SystemExit):
        parse_args(["--levels", "apart", "merged"])
