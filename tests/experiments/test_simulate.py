"""Simulated serving: hand-worked times, nothing leaks, the same twice, policies in their order, bad input refused."""

import gc
import json
from dataclasses import replace

import numpy as np
import pytest

from experiments.policies import policy_with
from experiments.simulate import Case, Costs, bars, cases, main, make_costs, parse_args, predictors_of, simulate
from experiments.simulation.requests import WORKLOADS, Arrival, Sample, Workload, arrivals, read_workload
from experiments.simulation.run import Simulation, Truth
from experiments.steps.cost_model import CostModel, Shares
from experiments.steps.floors import Floor, Matrix
from jllm.config import LlamaConfig
from jllm.engine.options import EngineOptions
from jllm.engine.sequence import Sequence
from jllm.errors import ConfigError, InputFileError, RequestError
from jllm.kv_policies.extent import Extent
from jllm.kv_policies.length import Longest
from tests.tiny import CONFIG

FLOOR = Floor((), Matrix(1, 1, 1, 1e18), 1, 1e18, 1e18)  # nothing costs anything
SECOND = CostModel(FLOOR, 64.0, Shares(fixed=1.0))  # but a step
LONG = replace(CONFIG, context=1024)
POLICIES = [
    {"policy": "paged"},
    {"policy": "paged", "predictor": "quantile"},
    {"policy": "reserve"},
    {"policy": "extent", "predictor": "quantile"},
    {"policy": "extent", "predictor": "longest"},
    {"policy": "extent", "predictor": "quantile", "overflow": "move", "quantile": 0.5},
]


def simulation(cost: CostModel = SECOND, longest: int = 8, config: LlamaConfig = LONG, **options) -> Simulation:
    options = {"max_slots": 4, "page_size": 8, "num_pages": 64} | options
    return Simulation(config, EngineOptions(**options), cost, longest)


def sent(*samples: tuple[int, int, float]) -> list[Arrival]:
    return [Arrival(Sample((1,) * prompt, output), at) for prompt, output, at in samples]


def workload(count: int, seed: int = 0) -> list[Arrival]:
    """Conversations of every kind, 20 a second."""
    found = [Sample((1,) * (1 + i * 7 % 60), 1 + i * i % 90) for i in range(97)]
    return list(arrivals(found, count, 20.0, seed))


def test_times_of_one_request():
    one = simulation()
    steps = list(one.steps(sent((5, 3, 0.0))))
    tally = one.tally
    assert [plan.step for plan, _ in steps] == [0, 1, 2, 3]  # the last one before its end was known
    times = (tally.seconds, tally.first_token.total, tally.inter_token.total, tally.inter_token.count)
    assert times == pytest.approx((3, 1, 2, 2))
    row = one.row()
    assert (row["qps"], row["output_tokens_s"], row["held_peak"]) == pytest.approx((1 / 3, 1, 1))
    assert row["goodput"] == 0.0  # a second a token is too slow
    assert row["source"] == "simulated"


def test_a_request_waits_for_the_step_in_flight():
    two = simulation()
    two.run(sent((5, 3, 0.0), (5, 1, 0.5)))
    # the second comes while step 0 runs, and joins step 2, the first that is planned after step 0 was read
    assert two.tally.first_token.largest == pytest.approx(3 - 0.5)
    late = simulation()
    late.run(sent((5, 1, 0.0), (5, 1, 10.0)))
    assert (late.tally.first_token.largest, late.tally.seconds) == pytest.approx((1.0, 11.0))


def test_a_slow_host_holds_the_device_up():
    quick, slow = simulation(), simulation()
    slow.host_us = 2e6
    for each in (quick, slow):
        each.run(sent((5, 4, 0.0)))
    assert quick.tally.seconds == pytest.approx(4)
    assert slow.tally.seconds > 8.0


class Hasty(Longest):
    """Thinks that everything is over in a moment."""

    def predict(self, prompt, params, quantile, produced=0):
        return produced + 1


def test_moved_pages_cost_their_copies():
    cost = CostModel(replace(FLOOR, bandwidth=64.0), 8.0, Shares(products=0.0, attention=0.0))
    moving = simulation(cost, 90, max_slots=16, num_pages=60, kv_policy=Extent(Hasty(), overflow="move"))
    seconds = sum(seconds for _, seconds in moving.steps(arrivals([a.sample for a in workload(97)], 60, None, 0)))
    copied = moving.scheduler.counts.copied_pages
    assert copied > 0
    assert seconds == pytest.approx(copied * 8 * 8.0 * 2 / 64.0)


def sequences() -> int:
    """How many are alive."""
    gc.collect()
    return sum(isinstance(thing, Sequence) for thing in gc.get_objects())


@pytest.mark.parametrize("options", POLICIES, ids=lambda options: "-".join(map(str, options.values())))
def test_nothing_is_lost_or_leaks(options):
    cost = CostModel(FLOOR, 64.0, Shares(fixed=0.01))
    run = simulation(cost, 90, max_slots=16, num_pages=70, kv_policy=policy_with(**options))
    tally = run.run(workload(500))
    pool = run.scheduler.pool
    assert (tally.requests, run.scheduler.counts.finished) == (500, 500)
    assert tally.first_token.count == 500
    assert tally.first_token.count + tally.inter_token.count == tally.output_tokens
    assert (pool.num_free, run.truth.outputs, run.scheduler.idle) == (pool.num_pages, {}, True)
    assert not any((run.scheduler.draining, run.scheduler.retired, run.scheduler.empty, run._live))


def test_a_long_run_in_bounded_memory():
    cost = CostModel(FLOOR, 64.0, Shares(fixed=0.01))
    run = simulation(cost, 90, max_slots=16, num_pages=128)
    before, most = sequences(), 0
    for plan, _ in run.steps(arrivals([a.sample for a in workload(97)], 500, 25.0, 1)):
        if plan.step % 500 == 0:
            most = max(most, sequences() - before)
    assert run.tally.requests == 500
    assert 5 < most < 100  # those that wait or run
    assert sequences() - before < 5  # of the last plans


def test_the_same_twice():
    def rows(seed):
        found = simulation(CostModel(FLOOR, 64.0, Shares(fixed=0.01)), 90, max_slots=16, num_pages=70)
        found.run(workload(300, seed))
        return {key: value for key, value in found.row().items() if key != "host_us"}

    assert rows(0) == rows(0) != rows(1)


def test_who_knows_more_holds_more():
    """2 GiB, outputs of 5 to 400 tokens."""
    samples = tuple(
        Sample((1,) * 20, int(n)) for n in np.geomspace(5, 400, 300)[np.random.default_rng(0).permutation(300)]
    )
    crowd = Workload("crowd", samples, texts=False)
    costs = Costs(make_costs("llama-2-7b", None, None, floor=True).model, CostModel(FLOOR, 524288, Shares(fixed=0.01)))
    case = Case("llama-2-7b", None, None, "paged", None, 64, 2.0)
    found = {
        (policy, predictor): simulate(replace(case, policy=policy, predictor=predictor), costs, crowd)
        for policy, predictor in (("reserve", None), ("paged", None), ("paged", "longest"), ("paged", "oracle"))
    }
    reserve, paged, longest, oracle = found.values()
    assert oracle["qps"] > 1.3 * longest["qps"] >= reserve["qps"]
    assert oracle["held_mean"] > 1.3 * longest["held_mean"]
    assert reserve["wasted_pages"] > 0.4 > 0.1 > paged["wasted_pages"]
    assert oracle["preemption_rate"] == longest["preemption_rate"] == 0 < paged["preemption_rate"]


def test_the_oracle_knows_each_request():
    truth = Truth()
    run = Simulation(
        LONG,
        EngineOptions(max_slots=4, page_size=8, num_pages=40, kv_policy=Extent(truth.oracle())),
        SECOND, 90, truth=truth,
    )  # fmt: skip
    run.run(sent((10, 3, 0.0), (10, 70, 0.0)))
    counts = run.scheduler.counts
    assert counts.preempted == counts.copied_pages == 0
    assert counts.page_steps <= (counts.steps + 2) * 10 + 2 * 5  # 79 tokens of KV in the one and 12 in the other


def test_arrivals_come_at_their_rate():
    samples = [Sample((1,), n) for n in range(1, 11)]
    assert [a.sample.output for a in arrivals(samples, None, None, 0)] == list(range(1, 11))
    drawn = list(arrivals(samples, 4000, 8.0, 0))
    assert drawn == list(arrivals(samples, 4000, 8.0, 0)) != list(arrivals(samples, 4000, 8.0, 1))
    assert drawn[-1].at == pytest.approx(500, rel=0.05)
    assert {a.sample.output for a in drawn} == set(range(1, 11))


def test_workloads_are_read(tmp_path):
    talks = read_workload("ppl_samples_1024")
    assert (talks.name, len(talks.samples), talks.texts, talks.longest_output) == (
        "ppl_samples_1024",
        1024,
        False,
        1051,
    )
    path = tmp_path / "w.jsonl"
    path.write_text('{"prompt": [5, 6], "output": 7}\n\n{"prompt": [8], "output": 1}\n')
    assert read_workload(str(path)) == Workload("w", (Sample((5, 6), 7), Sample((8,), 1)), texts=True)
    for text, message in (
        ("{]\n", "w.jsonl:1: expected"),
        ('{"prompt": [], "output": 1}', "at least 1 prompt token"),
        ('{"prompt": 3, "output": 0}', "1 output token"),
        ('{"prompt": true, "output": 1}', "at least 1 prompt token"),
        ("", "needs requests"),
    ):
        path.write_text(text)
        with pytest.raises(InputFileError, match=message):
            read_workload(str(path))
    (tmp_path / "w.json").write_text('{"requests": 3}')
    for name, message in (("w.json", "not a workload"), ("none", "no such workload")):
        with pytest.raises(InputFileError, match=message):
            read_workload(str(tmp_path / name))


def test_cases_are_every_combination_that_makes_sense():
    args = parse_args(["--policy", "paged", "reserve", "extent", "--predictor", "none", "oracle", "--pool-gib", "4"])
    assert [(case.policy, case.predictor) for case in cases(args)] == [
        ("paged", None), ("paged", "oracle"), ("reserve", None), ("extent", "oracle"),
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="extent needs a predictor"):
        predictors_of("extent", ["none"])


def test_one_file_of_rows(tmp_path, capsys):
    path = tmp_path / "w.json"
    path.write_text(json.dumps({"requests": [[30, 20], [50, 10]]}))
    command = ["--workload", str(path), "--results", str(tmp_path), "--pool-gib", "1", "--slots", "8", "--json"]
    assert main([*command, "--policy", "paged", "extent", "--predictor", "quantile", "--requests", "50"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    (written,) = tmp_path.glob("simulate_llama-2-7b-*.json")
    assert json.loads(written.read_text()) == document
    assert document["complete"]
    assert "decode_step-" in document["cost_model"]["source"]
    assert [row["kv_policy"] for row in document["rows"]] == ["paged", "extent"]
    assert all(row["source"] == "simulated" and row["requests"] == 50 for row in document["rows"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "llama-9"], "no configuration is called 'llama-9'"),
        (["--workload", "nothing"], "nothing: no such workload"),
        (["--kv-cache", "int7"], "int7"),
        (["--pool-gib", "0.05"], "need"),
        (["--policy", "extent"], "extent needs a predictor"),
        (["--quantile", "2", "--predictor", "quantile"], "quantile must be a number in (0, 1), not 2"),
        (["--quantile", "0.5", "--predictor", "none", "longest"], "--quantile has no meaning"),
        (["--overflow", "move"], "--overflow has no meaning"),
        (["--predictor", "learned:nothing"], "nothing: cannot be read as a length predictor"),
        (["--predictor", "taught"], "a length predictor must be one of"),
    ],
)
def test_bad_options_are_one_line(arguments, message, tmp_path, capsys):
    assert main([*arguments, "--results", str(tmp_path), "--slots", "4"]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error


def test_a_learned_predictor_goes_by_its_file(tmp_path, capsys):
    learned = f"learned:{WORKLOADS / 'stories_length.safetensors'}"
    command = [
        "--workload",
        "stories",
        "--requests",
        "20",
        "--slots",
        "8",
        "--pool-gib",
        "1",
        "--results",
        str(tmp_path),
    ]
    assert main([*command, "--predictor", learned, "quantile", "--quantile", "0.5", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [(row["predictor"], row["quantile"]) for row in rows] == [("learned", 0.5), ("quantile", 0.5)]


def test_a_request_that_never_fits_is_refused():
    with pytest.raises(RequestError, match="the page pool has 4"):
        simulation(num_pages=4, longest=90).run(sent((5, 3, 0.0)))


def test_an_hour_has_a_bar():
    row = {"requests": 100_000, "seconds": 3600.0, "host_us": 2.0, "kv_policy": "paged"}
    assert [bar["met"] for bar in bars([row, row | {"host_us": 9.0}, row | {"requests": 5}])] == [True, False]
