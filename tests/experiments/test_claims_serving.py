"""Claims about requests a second: what they measure, at toy size, and what they judge."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.baselines import BASELINES
from experiments.claims import __main__ as command
from experiments.claims import c4, c11, contest, serving, shapes


@pytest.fixture(autouse=True)
def nothing_served():
    """What one test's claims served, another's do not share."""
    yield
    serving.make_model.cache_clear()
    serving._served.cache_clear()
    contest.contest_of.cache_clear()


@pytest.fixture
def tiny(monkeypatch) -> None:
    monkeypatch.setattr(shapes, "TOY", shapes.TOY | {"num_layers": 1, "hidden_size": 32, "intermediate_size": 32})


def test_policies_are_alternated_side_by_side(tiny, tmp_path, monkeypatch, capsys):
    """Four claims through the command: in each round every policy runs once, whatever claims ask for it."""
    ran, devices = [], []
    once = contest.run_once

    def run_once(engine, requests, args):
        ran.append(args)
        devices.append((engine._device, args.sampling))
        assert [(r.prompt, r.output) for r in requests] == [*serving.TOY_LENGTHS]
        return once(engine, requests, args)

    monkeypatch.setattr(contest, "run_once", run_once)
    monkeypatch.setattr(c4, "alone", lambda rows, vocabulary: {"rows": rows, "V": 8, "times": 2.0, "sort_us": 2.0})

    def step_of(model, lengths, rows):
        assert all(device._state is None for device, _ in devices), "a step has no room beside an engine's pages"
        return lambda: jnp.zeros(rows)

    monkeypatch.setattr(c11, "step_of", step_of)
    assert command.main(["C1", "C3", "C11", "C4", "--toy", "--results", str(tmp_path), "--json"]) == 0
    asked = [{name: getattr(args, name) for name in BASELINES} for args in ran]
    plain = {name: choices[0] for name, choices in BASELINES.items()}
    assert asked == contest.ROUNDS * [plain | changes for changes in contest.POLICIES.values()]
    assert {(args.temperature, args.top_k, args.top_p, args.slots) for args in ran} == {(0.8, 50, 0.9, 2)}
    assert len({id(each) for each, _ in devices}) == len({sampling for _, sampling in devices}) == 2
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    for name, policies in (("C1", ["dynamic", "static"]), ("C4", ["threshold", "sort"])):
        rows = found[f"claims-{name}"]["rows"]
        assert [(row["policy"], row["round"]) for row in rows if "policy" in row] == [
            (policy, at) for at in range(contest.ROUNDS) for policy in policies
        ]
        assert {row["slots"] for row in rows if "policy" in row} == {2}
    first = [row["qps"] for claim in ("C1", "C3", "C11", "C4") for row in found[f"claims-{claim}"]["rows"][:1]]
    assert len(set(first)) == 1, "the usual policy's run is that of all four"


def test_at_full_size_the_whole_workload_is_sent():
    assert len(serving.workload(False)) == 1024
    assert serving.workload(False, 8, rate=2.0)[-1].arrival > 0
    args = serving.settings(False, batching="static")
    assert (args.slots, args.batching, args.requests, args.repeats) == (512, "static", None, 1)


def test_what_was_served_is_not_served_again(monkeypatch):
    runs = []

    def measure(model, requests, args):
        runs.append((len(requests), args.batching))
        yield dict.fromkeys(serving.KEPT, float(len(runs))) | {"repeat": "mean"}

    monkeypatch.setattr(serving, "measure", measure)
    monkeypatch.setattr(serving, "make_model", lambda toy: None)
    rows = [serving.served(False, batching=name) for name in ("merge", "static", "merge")]
    assert [row["qps"] for row in rows] == [1.0, 2.0, 1.0]
    assert runs == [(1024, "merge"), (1024, "static")]


def test_a_gain_is_that_of_the_rounds_that_have_both():
    rows = [{"policy": "ours", "round": at, "qps": qps} for at, qps in ((1, 11.0), (2, 22.0))]
    rows += [{"policy": "other", "round": at, "qps": qps} for at, qps in ((0, 1.0), (1, 10.0), (2, 20.0))]
    assert contest.gain_of(rows, "ours", "other").mean == pytest.approx(0.1)
    assert contest.gain_of(rows[:2], "ours", "other") is None


def test_c4_times_samplers_that_agree(monkeypatch):
    row = c4.alone(3, 64)
    assert row["times"] == pytest.approx(row["sort_us"] / row["threshold_us"], abs=0.01)
    monkeypatch.setattr(c4, "sample_reference", lambda logits, params, at: jnp.full(3, -1, jnp.int32))
    assert "only 0.0% of the tokens are the same" in c4.alone(3, 64)["error"]


def test_c11_saves_what_padding_would_compute(tiny):
    model = serving.make_model(True)
    for rows in (8, 10):
        assert int(jnp.min(c11.step_of(model, (5, 3), rows)())) >= 0


def test_c11_groups_the_prompts_of_the_workload(monkeypatch):
    timed = []
    monkeypatch.setattr(c11, "make_model", lambda toy: None)
    monkeypatch.setattr(c11, "contest", lambda *_: iter(()))
    monkeypatch.setattr(c11, "step_of", lambda model, lengths, rows: timed.append((lengths, rows)) or float(rows))
    monkeypatch.setattr(c11, "microseconds", lambda rows: rows)
    lengths = np.array([request.prompt for request in serving.workload(False)][: c11.GROUPED])
    for row, batch in zip(c11.measure(False), c11.BATCHES, strict=True):
        groups = lengths.reshape(-1, batch)
        assert row["work_saved"] == round(1 - groups.sum() / (batch * groups.max(axis=1)).sum(), 4)
        assert ("time_saved" in row) == (batch == c11.TYPICAL)
        assert row.get("time_saved", row["work_saved"]) == pytest.approx(row["work_saved"], abs=0.05)
    assert all(rows in (sum(group), len(group) * max(group)) for group, rows in timed)


def test_c4_has_runs_and_samplers_of_the_newest_files(tmp_path, monkeypatch):
    def write(name, experiment, rows):
        document = {"experiment": experiment, "device": "H", "command": "python", "rows": rows}
        (tmp_path / name).write_text(json.dumps(document))

    us = {1: {"mosaic": 40.0, "xla": 400.0, "sort": 60.0}, 64: {"mosaic": 50.0, "xla": 400.0, "sort": 500.0}}
    rows = [{"R": r, "V": 8, "asked": c4.ASKED, "peer": p, "us": t} for r, each in us.items() for p, t in each.items()]
    write("sample-1-h.json", "sample", [*rows, {"R": 1, "V": 8, "asked": "greedy", "peer": "sort", "us": 1.0}])
    write("claims-C4-1-h.json", "claims-C4", [{"policy": "threshold", "qps": 12.0}, {"policy": "sort", "qps": 10.0}])
    monkeypatch.setattr(c4, "RESULTS", tmp_path)
    found = list(c4.measure(False))
    assert [row.get("file") for row in found] == ["claims-C4-1-h.json"] * 2 + ["sample-1-h.json"] * 2
    assert [row["times"] for row in found[2:]] == [1.5, 10.0]
    assert [row["plain_times"] for row in found[2:]] == [0.15, 1.25]
