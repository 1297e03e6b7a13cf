"""Recorded schedules against the cost model."""

import json
from dataclasses import replace

import pytest

from experiments.simulate import main
from experiments.simulation.replay import recorded, replay, traced_work
from experiments.simulation.trace import Trace, TracedStep, load_trace
from experiments.steps.cost_model import CostModel, Shares
from experiments.steps.floors import Floor, Matrix, Work
from jllm.engine.engine import Engine
from jllm.errors import InputFileError
from jllm.programs.sizes import Limits
from jllm.step.buckets import Bucket
from tests.tiny import greedy, tiny_model

FLOOR = Floor(((Matrix(2_000_000, 1000, 1000, 1e9), 2),), Matrix(20_000, 10, 1000, 1e9), 4000, 1e9, 1e9)
LIMITS = Limits(4, 16, 12, 4, 8, 16, 10)


def made_up(cost: CostModel) -> Trace:
    """Steps that took what the model says, each dispatched while the one before ran."""
    steps, now = [], 0.0
    for i in range(12):
        decodes = 1 + i % 3
        step = TracedStep(i, decodes, 50 * decodes + i, (), Bucket(4, 0, 0), 1, 0, (), now, now, None)
        seconds = cost.seconds(traced_work(step), 4)
        now += seconds
        steps.append(replace(step, dispatched=now - 1.5 * seconds, read=now))
    return Trace({}, LIMITS, (), tuple(steps))


def test_work_of_a_step():
    step = TracedStep(0, 2, 70, ((0, 0, 4, 3, True), (1, 0, 0, 5, False)), Bucket(4, 12, 4), 1, 0, (), 0.0, 0.0, 1.0)
    assert traced_work(step) == Work(2, 8, 3, 70, 7 + 5, 3 * 6 + 5 * 3)


def test_a_model_that_made_the_trace_has_no_error():
    cost = CostModel(FLOOR, 5e4, Shares(1e-3, 1.2, 2.0))
    steps = recorded(made_up(cost))
    assert len(steps) == 11  # the first of a size may have been compiled
    for row in replay(made_up(cost), cost):
        assert row["error_mean"] == pytest.approx(0, abs=1e-6)
        assert row["error_sum"] == pytest.approx(0, abs=1e-6)
    off, fitted = replay(made_up(cost), replace(cost, shares=Shares()))
    assert off["error_sum"] < -0.1
    assert fitted["error_mean"] < 1e-3


def test_a_short_trace_is_refused():
    whole = made_up(CostModel(FLOOR, 5e4, Shares(1e-3)))
    with pytest.raises(InputFileError, match="a trace of 4 steps"):
        recorded(replace(whole, steps=whole.steps[:5]))
    lost = tuple(replace(step, read=None) for step in whole.steps)
    with pytest.raises(InputFileError, match="a trace of 0 steps"):
        recorded(replace(whole, steps=lost))


def test_an_engines_trace_is_replayed(tmp_path, capsys):
    path = tmp_path / "run.jsonl"
    buckets = (Bucket(4, 0, 0), Bucket(4, 12, 4))
    engine = Engine(
        tiny_model(), max_slots=4, page_size=8, max_step_tokens=16, num_pages=32, buckets=buckets, trace=str(path)
    )
    for i in range(4):
        engine.submit([3, 4, 5 + i], greedy(20))
    assert list(engine.run())
    engine.close()
    trace = load_trace(str(path))
    steps = recorded(trace)
    assert len(steps) > 15
    assert sum(s.work.decodes for s in steps) > 60
    assert all(0 < s.seconds < 100 for s in steps)
    assert main(["--replay", str(path), "--results", str(tmp_path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["experiment"] == "replay_llama-2-7b"
    assert [row["model"] for row in document["rows"]] == ["as calibrated", "fitted"]
    assert main(["--replay", str(tmp_path / "none.jsonl"), "--results", str(tmp_path)]) == 2
    assert "none.jsonl" in capsys.readouterr().err


SIZES = ("max_slots", "max_step_tokens", "max_prompt_tokens", "max_chunks", "page_size", "num_pages", "max_deltas")
HEAD = {"type": "engine", "version": 1, "limits": dict.fromkeys(SIZES, 1)}


@pytest.mark.parametrize(
    ("records", "says"),
    [
        ([{**HEAD, "limits": {}}], "line 1 is not of a trace"),
        ([HEAD, {"type": "step", "step": 0}], "line 2 is not of a trace: field 'chunks' is missing"),
        ([HEAD, {"type": "end", "request": 3, "sample": 0}], "request 3 sample 0 ends and never came"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_line(records, says):
    with pytest.raises(InputFileError, match=says):
        load_trace(records)
