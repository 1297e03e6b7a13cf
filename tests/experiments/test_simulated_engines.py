"""Engines side by side, simulated: where requests go, and how far their figures are from measured ones."""

import json

import pytest

from experiments import disaggregation, simulation_error
from experiments.simulation.apart import merged
from experiments.simulation.replicas import serve
from experiments.steps.cost_model import RESULTS
from experiments.steps.links import read_link
from tests.experiments.test_simulate import sent, simulation


def test_requests_go_where_there_is_least_to_do():
    """A step takes a second: a prompt of 40 takes a second as one of 5 does, and keeps its engine's load the larger."""
    engines = [simulation(longest=8) for _ in range(2)]
    tallies = serve(engines, sent((40, 8, 0.0), (5, 8, 0.0), (5, 8, 0.0), (5, 2, 0.0)))
    assert [tally.requests for tally in tallies] == [1, 3]
    assert [tally.output_tokens for tally in tallies] == [8, 18]
    assert [tally.seconds for tally in tallies] == pytest.approx([8.0, 8.0])
    assert [engine.load.tokens for engine in engines] == [0, 0], "one that made less than it might counts no more"


def test_what_is_done_counts_no_more():
    """At 6.5 s the first engine's request has two of its eight tokens left; the second's came later, and has more."""
    engines = [simulation(longest=8) for _ in range(2)]
    where = serve(engines, sent((5, 8, 0.0), (5, 8, 4.0), (5, 8, 6.5)))
    assert [tally.requests for tally in where] == [2, 1]


def test_one_engine_serves_as_it_does_alone():
    coming = sent((5, 3, 0.0), (9, 8, 0.4), (30, 2, 7.3), (5, 1, 20.0))
    alone, side_by_side = simulation(longest=8).run(coming), merged(lambda kind: simulation(longest=8), coming, 1)
    assert alone.figures() == side_by_side.figures()
    two = merged(lambda kind: simulation(longest=8), coming, 2)
    assert (two.requests, two.output_tokens, two.first_token.count) == (4, 14, 4)


def test_figures_are_near_the_measured_ones():
    path = sorted(RESULTS.glob("disaggregation-16-layers-*.json"))[-1]
    rows = list(simulation_error.of_levels(path, read_link(disaggregation.LINK)))
    assert {row["level"] for row in rows if row["gpus"] == 2} == {-1, 1}
    assert {row["file"] for row in rows} == {path.name}
    for row in rows:
        assert row["off_by"] == pytest.approx(row["simulated"] / row["measured"] - 1, abs=1e-3)
        if row["figure"] == "qps":
            assert abs(row["off_by"]) < 0.25


def test_one_engine_is_simulated_as_the_newest_claim_c23_was_served(tmp_path, monkeypatch):
    """All at once, and by the arrivals that were measured, in as many pages; files of labels are others'."""
    at_once = {"load": None, "rate": None, "qps": 10.0}
    arriving = {"load": 0.5, "rate": 5.0, "arrivals_s": 30.0, "qps": 4.0}
    files = {
        "claims-C23-20260101": [at_once | {"qps": 1.0}],
        "claims-C23-20260102": [at_once, arriving, {"verdict": "yes"}],
        "claims-C23-bursts-20260103": [at_once | {"qps": 2.0}],
        "qps_llama-2-7b_bfloat16-20260101": [{"repeat": 0, "peer": "vLLM"}, {"repeat": 0, "pages_total": 7}],
        "qps_llama-2-7b_bfloat16-vllm-20260102": [{"repeat": 0, "pages_total": 6}],
    }
    for name, rows in files.items():
        (tmp_path / f"{name}-h100-80gb-hbm3.json").write_text(json.dumps({"rows": rows}))
    asked = []
    monkeypatch.setattr(simulation_error, "simulated", lambda costs, **given: asked.append(given) or {"qps": 5.0})
    found = list(simulation_error.of_one_engine(tmp_path))
    assert [(row["load"], row["measured"], row["off_by"]) for row in found] == [(None, 10.0, -0.5), (0.5, 4.0, 0.25)]
    assert {row["file"] for row in found} == {"claims-C23-20260102-h100-80gb-hbm3.json"}
    early = asked[1].pop("cut")
    assert asked == [{"num_pages": 7}, {"num_pages": 7, "rate": 5.0, "seconds": 30.0}]
    assert 20 < early < 90  # those of the first ten seconds
    (tmp_path / "qps_llama-2-7b_bfloat16-20260101-h100-80gb-hbm3.json").unlink()
    assert not list(simulation_error.of_one_engine(tmp_path))
