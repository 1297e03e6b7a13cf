"""Claims about policies and formats at a load: what is simulated in place of a GPU, what they ask for, and judge."""

import json

import jax.numpy as jnp
import pytest

from experiments.claims import __main__ as command
from experiments.claims import c23, c24, c25, c26, c28, loads, serving, shapes
from experiments.serving.workload import WORKLOAD, Request, read_workload
from experiments.simulate import make_costs
from experiments.steps.batches import WholeBatch
from experiments.steps.floors import Work
from jllm.step.buckets import choose_bucket, make_buckets
from pallas_kernels.formats.quantized_weights import QuantizedWeight
from tests.experiments.test_throughput import TINY

MEAN = dict.fromkeys(serving.KEPT, 1.0) | {"repeat": "mean"}


@pytest.fixture(scope="module")
def costs():
    return make_costs(loads.MODEL, None, None)


@pytest.fixture
def served(monkeypatch):
    """A GPU is pretended, on which runs take no time: what was asked of each, as (model, requests, settings)."""
    seen, kept = [], (serving.make_model, serving._served)

    def measure(model, requests, args):
        seen.append((model, requests, args))
        yield {"repeat": 0}
        yield MEAN | {"qps": 10.0 - len(seen), "good_share": c23.GOOD if len(seen) < 4 else 0.5}

    monkeypatch.setattr(serving, "measure", measure)
    monkeypatch.setattr(loads, "on_hopper", lambda: True)
    yield seen
    for cached in kept:
        cached.cache_clear()


@pytest.fixture
def no_model(monkeypatch):
    monkeypatch.setattr(serving, "make_model", lambda toy: None)


def test_a_request_alone_takes_its_steps(costs):
    """One prompt's step and two decode steps, in the compiled sizes that hold them, and nothing else."""
    row = loads.simulate(costs, [Request(5, 3, 0.0)], slots=4, max_step_tokens=40)
    buckets = make_buckets(4, 40)
    prompt, one = (choose_bucket(buckets, *size).size for size in ((0, 5, 1), (1, 0, 0)))
    first = costs.cost.seconds(Work(0, 5, 1, 0, 5, 15.0), prompt)
    then = [costs.cost.seconds(Work(1, 0, 1, keys), one) for keys in (6, 7)]
    assert row["source"] == "simulated"
    assert row["ttft_ms_p50"] == pytest.approx(1e3 * first, rel=1e-3)
    assert row["e2e_ms_p50"] == pytest.approx(1e3 * (first + sum(then)), rel=1e-3)
    assert row["qps"] == pytest.approx(1 / (first + sum(then)), rel=1e-3)
    assert row["steps"] == 3


def test_policies_differ_in_what_is_simulated(costs):
    requests = [Request(40, 4 + 8 * (i % 2), 0.0) for i in range(16)]
    rows = {
        policy: loads.simulate(costs, requests, slots=4, max_step_tokens=68, batching=policy)
        for policy in ("merge", "separate", "static")
    }
    assert {row["requests"] for row in rows.values()} == {16}
    assert rows["merge"]["steps"] < rows["separate"]["steps"]
    assert rows["merge"]["itl_ms_p99"] < rows["separate"]["itl_ms_p99"]
    assert rows["merge"]["qps"] > rows["static"]["qps"]
    with pytest.raises(ValueError, match="sampling sort is not simulated, but threshold alone"):
        loads.simulate(costs, requests, sampling="sort")


def test_requests_arrive_for_so_many_seconds():
    known = {(r.prompt, r.output) for r in read_workload(WORKLOAD, None, None, 0)}
    requests = serving.workload(False, None, 20.0, 30.0)
    assert requests == serving.workload(False, None, 20.0, 30.0)
    assert len(requests) == pytest.approx(600, abs=100)
    assert 29 < requests[-1].arrival < 30
    assert {(r.prompt, r.output) for r in requests} <= known
    with pytest.raises(ValueError, match="need a rate"):
        serving.workload(False, None, None, 30.0)


def test_the_first_third_of_the_seconds_is_not_counted(served, no_model):
    row = loads.from_settled(loads.server(False), False, 20.0, 30.0, batching="static")
    ((_, requests, args),) = served
    assert (args.rate, args.batching) == (20.0, "static")
    assert requests[args.cut - 1].arrival < 10 <= requests[args.cut].arrival
    assert (row["rate"], row["arrivals_s"], row["source"]) == (20.0, 30.0, "measured")


def test_c23_raises_the_load_until_it_fails(served, no_model):
    rows = list(c23.measure(False))
    assert [row["load"] for row in rows] == [None, 0.8, 0.9, 1.0]
    assert [args.rate for *_, args in served] == [None, 7.2, 8.1, 9.0]
    assert {row["arrivals_s"] for row in rows[1:]} == {c23.SECONDS["measured"]}
    assert list(c23.measure(False, 60.0))[1]["arrivals_s"] == 60.0


def test_c23_raises_the_loads_that_are_asked_for_until_one_fails(served, no_model, tmp_path):
    asked = ["--seconds", "60", "--loads", "0.9", "1.2", "1.05", "1.0"]
    assert command.main(["C23", *asked, "--results", str(tmp_path)]) == 0
    most, *rows = json.loads(next(tmp_path.glob("claims-C23-*.json")).read_text())["rows"]
    assert (most["load"], [row["load"] for row in rows]) == (None, [0.9, 1.0, 1.05])
    assert {row["arrivals_s"] for row in rows} == {60.0}
    assert rows[-1]["good_share"] < c23.GOOD


def test_c24_compares_the_two_at_once_and_at_a_load(served, no_model):
    rows = [row for row in c24.measure(False) if row["part"] != "two policies"]
    asked = [(args.batching, args.slots, args.max_step_tokens, args.rate) for *_, args in served]
    assert asked[:2] == [(policy, 128, 640, None) for policy in ("merge", "separate")]
    assert asked[2:] == [(policy, 128, 640, 6.3) for policy in ("merge", "separate")]
    assert [len(requests) for _, requests, _ in served[:2]] == [512, 512]
    assert [(row["part"], row["policy"]) for row in rows] == [
        (part, policy) for part in ("at once", "at a load") for policy in ("merged", "separate")
    ]


def test_c24_at_toy_size_through_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(shapes, "TOY", shapes.TOY | {"num_layers": 1, "hidden_size": 32, "intermediate_size": 32})
    try:
        assert command.main(["C24", "--toy", "--results", str(tmp_path), "--json"]) == 0
    finally:
        serving.make_model.cache_clear()
        serving._served.cache_clear()
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["claims-C24"]["rows"]
    ours = [row for row in rows if row["part"] != "two policies"]
    assert {(row["slots"], row["step_tokens"], row["source"]) for row in ours} == {(2, 6, "measured")}
    assert [(row["policy"], "rate" in row) for row in ours] == [
        ("merged", False), ("separate", False), ("merged", True), ("separate", True)
    ]  # fmt: skip
    merged, separate = ours[:2]
    assert merged["steps"] < separate["steps"]
    assert merged["requests"] == separate["requests"] == len(serving.TOY_LENGTHS)


def test_c24_reads_what_was_measured_before(tmp_path):
    rows = [{"how": how, "load": load, "slots": 4, "layers": 8, "prompt": 9, "output": 5, "qps": 2.0}
            for how in ("merged", "replicas", "separate") for load in (None, 0.5)]  # fmt: skip
    for name in ("disaggregation-20260101-h100.json", "disaggregation_simulated-20270101-cpu.json"):
        (tmp_path / name).write_text(json.dumps({"device": "H100", "rows": rows}))
    found = list(c24.recorded(tmp_path))
    assert [row["policy"] for row in found] == ["merged", "separate"]
    assert {(row["file"], row["source"]) for row in found} == {("disaggregation-20260101-h100.json", "measured")}


def test_c25_serves_each_scheme(served, monkeypatch):
    rows = [row for row in c25.measure(True) if row["part"] == "requests"]
    assert [args.quantize for *_, args in served] == ["fp8", "w8a8-all", c25.TOY_INT4]
    kinds = [model.params.layers[0].attention.qkv for model, *_ in served]
    assert all(isinstance(weight, QuantizedWeight) for weight in kinds)
    assert len({weight.format for weight in kinds}) == 3
    assert [row["format"] for row in rows] == list(c25.SCHEMES)
    assert isinstance(serving.make_model(True).params.layers[0].attention.qkv, jnp.ndarray)  # is not itself changed


def test_c25_costs_are_those_of_the_steps_they_are_fitted_to():
    """Steps that a cost model makes up give that cost model."""
    made = c25.make_cost_model(c25.model_shapes(c25.MODEL, "fp8"), None, c25.Shares(1e-4, 2.0, 3.0))
    rows = []
    for kind in ("decode", "prefill"):
        for batch in (1, 64, 512):
            case = c25.Case("fp8", kind, batch, "bf16")
            context = 136 if kind == "decode" else 0
            ms = 1e3 * made.seconds(case.work(context, 8))
            rows.append({**vars(case), "context": context, "ms": ms})
    found = c25.fitted("fp8", rows, "x.json").cost.shares
    assert (found.fixed, found.products, found.attention) == pytest.approx((1e-4, 2.0, 3.0), rel=1e-3)
    assert found.error == pytest.approx(0, abs=1e-6)


def test_c26_fills_an_h200(costs):
    wide, small = (c26.full_batches(costs, kv, ((1024, 1024),))[0].batch for kv in (c26.WIDE, c26.SMALL))
    (less,) = c26.full_batches(costs, c26.WIDE, ((1024, 1024),), memory=72 << 30)
    assert 40 < less.batch < wide, "what an H100 holds"
    assert small / wide == pytest.approx(1.6, abs=0.01)
    assert 100 * 2**30 < wide * 2048 * costs.cost.token_bytes < 120 * 2**30


def test_c26_asks_once_for_free_memory(monkeypatch):
    """Both formats have what was free before anything ran."""
    free, batches = iter([72 << 30]), []
    monkeypatch.setattr(c26, "simulates", lambda toy: False)
    monkeypatch.setattr(c26, "free_memory", lambda: next(free))
    monkeypatch.setattr(c26, "timed", lambda config, kv, cases: batches.append(cases[0].batch) or iter(()))
    assert all(row["part"] == "recorded" for row in c26.measure(False))
    wide, small = batches
    assert small / wide == pytest.approx(1.6, abs=0.02)


def test_c26_times_whole_batches_of_a_format(tmp_path):
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(TINY))
    cases = [WholeBatch(2, 8, 4)]
    more = ("--dtype", "float32", "--steps", "2", "--repeats", "1", "--seconds", "0.001")
    (row,) = c26.timed(path, "int8-g8", cases, *more)
    assert (row["source"], row["batch"], row["input"], row["output"]) == ("measured", 2, 8, 4)
    assert row["tokens_s"] == pytest.approx(1e3 * 8 / (row["prefill_ms"] + 4 * row["decode_ms"]), rel=1e-3)


def test_c26_takes_the_files_of_one_day(tmp_path):
    def write(name: str, *batches: int) -> None:
        kept = {"input": 8, "output": 9, "prefill_ms": 1.0, "decode_ms": 1.0, "memory_gib": 1.0}
        rows = [{"batch": batch, "tokens_s": 7.0, **kept} for batch in batches]
        rows.append(rows[0] | {"batch": 99, "peer": "torch"})
        text = json.dumps({"device": "H", "rows": rows})
        (tmp_path / f"throughput_llama-2-7b_bf16_kv-{name}-h200.json").write_text(text)

    write("bf16-20260101", 1)
    write("bf16-20260202", 1, 2)
    write("int8-g8-20260202", 1)
    write("int8-g8-last-20260202", 1, 2)
    write("int8-g8-last-20260303", 4)
    found = c26.recorded(tmp_path)
    assert [(row["kv"], row["batch"]) for row in found] == [("bf16", 1), ("bf16", 2), ("int8-g8", 1), ("int8-g8", 2)]
    assert found[2]["file"].endswith("int8-g8-20260202-h200.json")


def test_c28_serves_both_policies_at_each_rate(served, no_model):
    rows = list(c28.measure(False, 9.0))
    assert [(args.rate, args.batching) for *_, args in served] == [
        (rate, batching) for rate in c28.RATES["measured"] for batching in ("merge", "static")
    ]
    assert {row["arrivals_s"] for row in rows} == {9.0}
