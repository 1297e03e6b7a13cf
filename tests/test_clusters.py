"""Engines side by side, simulated, on meshes: where requests go, what steps cost there, rows that say what they are."""

import json

import pytest

from experiments import clusters, simulation_error
from experiments.meshes import Mesh
from experiments.simulation.apart import merged
from experiments.simulation.replicas import serve
from experiments.simulation_error import figures
from experiments.steps.cost_model import CONFIGS, RESULTS
from experiments.steps.floors import step_work
from experiments.steps.links import read_link
from jllm.config import load_config
from tests.test_simulate import sent, simulation

LINK = read_link("h200-nvlink")
SMALL = load_config(CONFIGS / "llama-2-7b.json")


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


def test_a_mesh_s_steps_have_exchanges_of_all_rows_that_are_computed():
    one, two = (Mesh(SMALL, ranks, None, None, LINK, "peer") for ranks in (1, 2))
    work, each = step_work(3, 900, [(0, 50, True)]), LINK.all_reduce["peer"]
    assert one.cost.exchange(64) == 0.0
    assert two.cost.exchange(64) == pytest.approx(66 * each.seconds(64 * 8192, 2))
    share = two.cost.floor.parts(work, two.kv_bytes, 64)
    shares = two.cost.shares
    parts = 32 * shares.fixed + shares.products * share[0] + shares.attention * share[1]
    assert two.cost.seconds(work, 64) == pytest.approx(parts + two.cost.exchange(64))
    assert two.cost.seconds(work) < two.cost.seconds(work, 64)


def test_rows_say_that_they_are_simulated_and_splits_share_out_engines(tmp_path, capsys):
    command = ["--gpus", "4", "--ranks", "1", "2", "3", "--requests", "6", "--load", "0.5", "--splits", "0.25", "0.3"]
    assert clusters.main([*command, "--results", str(tmp_path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = document["rows"]
    assert document["experiment"] == "clusters_llama-2-7b"
    assert {row["kind"] for row in rows} == {"simulated"}
    assert {row["requests"] for row in rows} == {24}
    assert [(row["ranks"], row["engines"], row["load"]) for row in rows if row["how"] == "merged"] == [
        (1, 4, None), (2, 2, None), (1, 4, 0.5), (2, 2, 0.5),
    ]  # fmt: skip
    best = max((row for row in rows if row["how"] == "merged" and row["load"] is None), key=lambda row: row["qps"])
    apart = [row for row in rows if row["how"] == "apart"]
    assert {row["ranks"] for row in apart} == {best["ranks"]}
    assert {row["split"] for row in apart} == ({"1+3"} if best["ranks"] == 1 else {"1+1"})
    assert all(row["rate"] == pytest.approx(0.5 * best["qps"], rel=1e-3) for row in rows if row["load"])
    assert clusters.main(["--step-ms", "0.1", "--gpus", "1", "--results", str(tmp_path)]) == 2
    assert "llama-2-7b fits no mesh of --ranks with steps under 0.1 ms" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        clusters.parse_args(["--splits", "1"])


def test_figures_are_of_files_that_are_there_and_no_throughput_is_far_off():
    rows = list(figures())
    assert {row["of"] for row in rows} == {"step", "serving", "replicas", "level"}
    assert {row["gpus"] for row in rows} == {1, 2, 4}
    assert {row["level"] for row in rows if row["of"] == "level" and row["gpus"] == 2} == {-1, 1}
    assert all((RESULTS / row["file"]).exists() for row in rows)
    for row in rows:
        assert row["off_by"] == pytest.approx(row["simulated"] / row["measured"] - 1, abs=1e-3)
        one_host = row["of"] == "level" and row["gpus"] == 2  # two loops in a process, of steps that take it as long
        if row["figure"] in ("qps", "decode_ms"):
            assert abs(row["off_by"]) < (1.0 if one_host else 0.25)


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
    found = list(simulation_error.of_one_engine(tmp_path, LINK))
    assert [(row["load"], row["measured"], row["off_by"]) for row in found] == [(None, 10.0, -0.5), (0.5, 4.0, 0.25)]
    assert {row["file"] for row in found} == {"claims-C23-20260102-h100-80gb-hbm3.json"}
    early = asked[1].pop("cut")
    assert asked == [{"num_pages": 7}, {"num_pages": 7, "rate": 5.0, "seconds": 30.0}]
    assert 20 < early < 90  # those of the first ten seconds
    (tmp_path / "qps_llama-2-7b_bfloat16-20260101-h100-80gb-hbm3.json").unlink()
    assert not list(simulation_error.of_one_engine(tmp_path, LINK))
