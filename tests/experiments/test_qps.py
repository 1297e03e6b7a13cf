"""Requests a second: figures of hand-made runs, the schedule's slack, and a run at toy size."""

import json
import os
from typing import Any

import pytest

from experiments import disaggregation, qps
from experiments.arguments import MEMORY_SHARE, claim_memory
from experiments.qps import main, name_of, parse_args
from experiments.serving import engines, run
from experiments.serving.engines import HostOnly
from experiments.serving.run import serve
from experiments.serving.workload import WORKLOAD, Request, Served, half_interval, percentile, read_workload, repeat_row
from experiments.simulation.trace import load_trace
from experiments.steps.floors import schedule
from experiments.steps.words import words_tokenizer
from jllm.engine.engine import Engine
from jllm.engine.request import SamplingParams
from jllm.engine.scheduler import Limits
from jllm.errors import ConfigError, InputFileError
from jllm.step.buckets import Bucket
from tests.experiments.test_throughput import TINY
from tests.tiny import tiny_model

METRICS: dict[str, Any] = dict.fromkeys(
    ("slack", "preemptions", "recomputed_tokens", "steps", "pages_peak", "pages_total", "compiled_steps",
     "running_mean", "running_peak", "wasted_share", "fragmentation_mean"), 0
)  # fmt: skip
METRICS |= {"inter_token_s": {"p50": 0.01, "p90": 0.02, "p99": 0.03}}


def test_percentiles_and_intervals():
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [percentile(values, p) for p in (1, 20, 21, 50, 99, 100)] == [1, 1, 2, 3, 5, 5]
    assert half_interval([1.0]) is None
    assert half_interval([1.0, 2.0, 3.0]) == pytest.approx(4.303 / 3**0.5, rel=1e-3)


def test_goodput_wants_both_a_first_token_and_a_pace():
    request = Request(prompt=4, output=11, arrival=0.0)
    served = [
        Served(request, 2.0, 2.5),
        Served(request, 2.1, 2.2),
        Served(request, 0.1, 0.61),
        Served(request, 0.1, 0.2),
    ]
    row = repeat_row(served, 2.0, METRICS, cut=0)
    assert row["good_share"] == 0.5
    assert row["goodput"] == 1.0
    assert (row["qps"], row["input_tokens_s"], row["output_tokens_s"]) == (2.0, 8.0, 22.0)
    assert (row["ttft_ms_p50"], row["ttft_ms_p99"]) == (100.0, 2100.0)
    assert row["itl_ms_p99"] == 30.0
    late = [Served(Request(4, 11, 1.0), 5.0, 6.0), *served[3:]]
    assert repeat_row(late, 2.0, METRICS, cut=1)["good_share"] == 0.0  # the first to arrive is left out


def test_arrivals_are_those_of_the_seed():
    at_once = read_workload(WORKLOAD, None, None, 0)
    assert len(at_once) == 1024
    assert sum(r.output for r in at_once) == 328_942
    assert not any(r.arrival for r in at_once)
    poisson = read_workload(WORKLOAD, None, 20.0, 3)
    assert poisson == read_workload(WORKLOAD, None, 20.0, 3) != read_workload(WORKLOAD, None, 20.0, 4)
    assert poisson[0].arrival == 0
    assert 1023 / poisson[-1].arrival == pytest.approx(20, rel=0.1)


@pytest.mark.parametrize("text", ["{", "{}", "[[5, 6]]", '{"requests": [[1]]}'])
def test_what_is_no_workload_is_refused_with_the_format(tmp_path, text):
    (tmp_path / "w.json").write_text(text)
    with pytest.raises(InputFileError, match=r'w\.json: not a workload {"requests": \[\[prompt, output\], \.\.\]}: '):
        read_workload(tmp_path / "w.json", None, None, 0)


@pytest.mark.parametrize("text", ['{"requests": []}', '{"requests": [[0, 4]]}'])
def test_a_workload_without_tokens_is_refused(tmp_path, text):
    (tmp_path / "w.json").write_text(text)
    with pytest.raises(InputFileError, match=r"w\.json: a workload needs requests, each of at least 1 prompt"):
        read_workload(tmp_path / "w.json", None, None, 0)


def test_the_schedule_computes_every_token_once():
    lengths = [(5, 3), (9, 2), (2, 1)]
    steps = list(schedule(lengths, Limits(2, 8, 6, 2, 4, 20, 8)))
    assert sum(w.tokens for w in steps) == 16
    assert sum(w.rows for w in steps) == 6
    assert sum(w.decodes for w in steps) == 3
    assert sum(w.pairs for w in steps) == 15 + 45 + 3
    assert sum(w.keys for w in steps if w.decodes and not w.tokens) > 0


def test_times_count_from_the_arrival(monkeypatch):
    engine = Engine(tiny_model(num_layers=1), max_slots=1, page_size=8, num_pages=8, max_step_tokens=8)
    requests = [Request(4, 3, 0.0), Request(4, 3, 0.3)]
    midway = []
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)
    served, seconds = serve(engine, requests, sampling, 0, midway=lambda: midway.append(engine.has_work))
    assert len(midway) == 1
    assert [s.request for s in served] == requests
    assert seconds >= 0.3 + served[1].total - 1e-3
    assert all(0 < s.first_token <= s.total for s in served)
    assert served[0].total < seconds


def test_a_client_hangs_up_at_its_length():
    engine = Engine(
        tiny_model(num_layers=1), max_slots=1, page_size=8, num_pages=8, max_step_tokens=8, kv_policy="reserve"
    )
    requests = [Request(4, 3, 0.0), Request(4, 1, 0.0), Request(4, 20, 0.0)]
    served, _ = serve(engine, requests, SamplingParams(temperature=0.0, ignore_eos=True), 0, allow=20)
    assert sorted(s.request.output for s in served) == [1, 3, 20]
    assert engine.metrics()["pages_used"] == 0


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_a_share_is_guided_and_as_long(share):
    pytest.importorskip("llguidance")
    model = tiny_model(tokenizer=words_tokenizer(97), num_layers=1)
    engine = Engine(model, max_slots=3, page_size=8, max_step_tokens=16, buckets=(Bucket(3, 13, 3),))
    asked = []
    submit = engine.submit
    engine.submit = lambda ids, params: asked.append(params.guide is not None) or submit(ids, params)
    requests = [Request(4, 3 + i, 0.0) for i in range(8)]
    served, _ = serve(engine, requests, SamplingParams(temperature=1.0, ignore_eos=True), 0, guided=share)
    assert sorted(s.request.output for s in served) == list(range(3, 11))
    assert sum(asked) == 8 * share


def test_memory_policies_are_options(tmp_path, capsys):
    """Half a GiB holds a page for each slot, but no longest output for all at once."""
    command = ["--host-only", "--repeats", "1", "--warmup", "0", "--requests", "40", "--slots", "8", "--results"]
    memory = ["--pool-gib", "1", "--kv-policy", "extent", "--length-predictor", "longest", "--allow", "1100"]
    assert main([*command, str(tmp_path), *memory, "--json"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    row = document["rows"][-1]
    assert document["experiment"] == "qps_host_llama-2-7b_bfloat16_extent_longest_1gib"
    assert (row["kv_policy"], row["length_predictor"], row["pool_gib"], row["allow"]) == (
        "extent",
        "longest",
        1.0,
        1100,
    )
    assert document["bars"] == []
    assert main([*command, str(tmp_path), "--kv-policy", "reserve", "--length-predictor", "quantile"]) == 2
    assert "takes no length predictor" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse_args(["--pool-gib", "1", "--pages", "4"])
    capsys.readouterr()
    with pytest.raises(SystemExit):
        parse_args(["--replicas", "2", "--length-predictor", "quantile"])
    assert "of one engine: leave --replicas out" in capsys.readouterr().err


def test_a_trace_has_the_warm_up_and_then_each_repeat(tmp_path):
    command = ["--host-only", "--requests", "3", "--slots", "4", "--repeats", "2", "--warmup", "1"]
    assert main([*command, "--trace", str(tmp_path / "run.jsonl"), "--results", str(tmp_path)]) == 0
    first, *repeats = ((r.known, r.output) for r in load_trace(tmp_path / "run.jsonl").requests)
    requests = [(r.prompt, r.output) for r in read_workload(WORKLOAD, 3, None, 0)]
    assert first == (requests[0][0], 16)
    assert repeats == requests * 2


def test_the_whole_workload_without_a_device(tmp_path, capsys):
    """512 slots at 7B shapes: the share of rows that the buckets waste; the floor, worked out
    elsewhere as 23.8 s at 4.41 TB/s and 786 TFLOP/s, both 3 % less than today's."""
    command = ["--host-only", "--repeats", "1", "--warmup", "0", "--results", str(tmp_path), "--json"]
    assert main(command) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    last = document["rows"][-1]
    assert last["requests"] == 1024
    assert last["slack"] < 0.06
    assert last["floor_s"] == pytest.approx(23.8 * 4.41 / 4.55, rel=0.01)
    assert {bar["name"].split(", ")[-1] for bar in document["bars"]} >= {"ladder slack"}


def test_a_pool_that_the_workload_fills_wastes_few_rows(tmp_path, capsys):
    """Prompts that wait for pages, not for slots, begin no step that they can't fill. The pool is an H200's where JAX
    takes three quarters of its memory; the buckets are for batches that slots bound, hence more than 5 %."""
    command = ["--host-only", "--repeats", "1", "--warmup", "0", "--pages", "10324", "--results", str(tmp_path)]
    assert main([*command, "--json"]) == 0
    row = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"][-1]
    assert row["slack"] < 0.08
    assert row["preemptions"] == 0


def test_repeats_begin_alike_and_their_mean_is_what_a_floor_is_a_share_of(monkeypatch):
    """A repeat that found prompts in the prefix cache would be faster than the workload is; so would the best one."""
    model = tiny_model(num_layers=1)
    args = parse_args(["--repeats", "3", "--warmup", "2", "--slots", "2"])
    engine = Engine(model, device=HostOnly, max_slots=2, page_size=8, num_pages=40, max_step_tokens=16)
    cached, seconds = [], iter((0.5, 2.0, 4.0, 6.0))  # of the warmup, and of each repeat

    def timed(*arguments, **options):
        served, _ = serve(*arguments, **options)
        cached.append(engine.metrics()["prefix_hit_tokens"])
        return served, next(seconds)

    monkeypatch.setattr(qps, "make_engine", lambda model, args, **_: engine)
    monkeypatch.setattr(run, "serve", timed)
    rows = list(qps.measure(model, [Request(21, 4, 0.0), Request(13, 3, 0.0)], args))
    assert cached == [0, 0, 0, 0]
    assert [row["seconds"] for row in rows] == [2.0, 4.0, 6.0, 4.0]
    assert rows[-1]["floor_fraction"] == pytest.approx(rows[-1]["floor_s"] / 4.0, rel=1e-4)


def test_as_many_processes_trace_steps_as_are_asked_for(monkeypatch):
    asked = []
    monkeypatch.setattr(engines, "engine_with", lambda model, **options: asked.append(options["compile_processes"]))
    for options in ([], ["--compile-processes", "3"]):
        engines.make_engine(tiny_model(num_layers=1), parse_args(options))
    assert asked == [None, 3]


def test_each_replica_has_the_workload_and_several_are_held_to_one(monkeypatch):
    asked = []
    about = {"model": "m", "scheme": "bfloat16", "kv": "bf16", "backend": "default", "rate": None, "slots": 512}

    def one(model, requests, args, backend):
        asked.append((len(requests), args.replicas))
        yield about | {
            "replicas": args.replicas,
            "repeat": "mean",
            "requests": 1024 * args.replicas,
            "qps": args.replicas**0.9,
        }

    monkeypatch.setattr(qps, "measure_one", one)
    args = parse_args(["--replicas", "1", "2"])
    rows = list(qps.measure(None, [Request(5, 4, 0.0)] * 3, args))
    assert asked == [(3, 1), (6, 2)]
    (found,) = qps.bars(rows)
    assert (found["name"], found["bar"], found["met"]) == (
        "QPS workload, m bfloat16 KV bf16, 2 replicas over one", 1.9, False
    )  # fmt: skip
    assert list(qps.bars(rows[:1])) == []
    plain = {key: rows[0][key] for key in rows[0] if key != "replicas"} | {"qps": 1.01}
    assert [(bar["name"].split(", ")[-1], bar["value"], bar["bar"]) for bar in qps.bars([plain, *rows])] == [
        ("a replica over a plain engine", 0.99, 0.98),
        ("2 replicas over one", 1.866, 1.9),
        ("2 replicas over a plain engine", 1.848, 1.95),
    ]
    assert name_of(args) == "qps_llama-2-7b_bfloat16_replicas1-2"
    changed = [*rows, rows[1] | {"change": "kill", "qps": 0.1}]
    assert [bar["value"] for bar in qps.bars(changed)] == [bar["value"] for bar in qps.bars(rows)]
    on_meshes = [row | {"devices": 2} for row in rows]
    (found,) = qps.bars(on_meshes)
    assert found["name"] == "QPS workload, m bfloat16 KV bf16, 2 replicas of 2 devices over one"
    assert not list(qps.bars([{key: on_meshes[0][key] for key in on_meshes[0] if key != "replicas"}])), "of one device"
    assert name_of(parse_args(["--devices", "2", "--replicas", "2"])) == "qps_llama-2-7b_bfloat16_devices2_replicas2"
    rate = parse_args(["--replicas", "2", "--rate", "3"])
    list(qps.measure(None, [Request(5, 4, 0.0)] * 3, rate))
    assert asked[-1] == (3, 2), "one stream of arrivals"


@pytest.mark.parametrize("name", ["XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"])
def test_memory_is_claimed_unless_somebody_did(monkeypatch, name):
    for each in ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"):
        monkeypatch.setenv(each, "")  # restored after the test, whatever claim_memory does
        monkeypatch.delenv(each)
    claim_memory()
    assert os.environ["XLA_CLIENT_MEM_FRACTION"] == str(MEMORY_SHARE)
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION")
    monkeypatch.setenv(name, "0.3")
    claim_memory()  # JAX refuses both at once
    assert {k: v for k, v in os.environ.items() if k.endswith("CLIENT_MEM_FRACTION")} == {name: "0.3"}


def test_memory_that_others_hold_is_not_claimed(monkeypatch, tmp_path):
    """But what a process that just ended gives back; of the GPUs alone that are seen, none on a CPU."""
    preallocate = "XLA_PYTHON_CLIENT_PREALLOCATE"
    for each in ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION", "JAX_PLATFORMS", preallocate):
        monkeypatch.setenv(each, "")
        monkeypatch.delenv(each)
    tool = tmp_path / "nvidia-smi"
    first = f"[ -e {tmp_path}/asked ] && echo '1, 80000, 81559' || {{ touch {tmp_path}/asked; echo '1, 2100, 81559'; }}"
    tool.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/said\necho "0, [N/A], [N/A]"\n{first}\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(ConfigError, match=r"GPU 1: 95% .* 2100 of 81559 MiB are free: .*MEM_FRACTION below 0\.03"):
        claim_memory(patience=-1.0)
    assert "XLA_CLIENT_MEM_FRACTION" not in os.environ
    (tmp_path / "asked").unlink()
    claim_memory(patience=30.0)
    assert os.environ["XLA_CLIENT_MEM_FRACTION"] == str(MEMORY_SHARE)
    asked = (tmp_path / "said").read_text().splitlines()
    assert len(asked) == 3
    assert all(line.endswith("-i 0,1") for line in asked)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION")
    claim_memory()
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setenv(preallocate, "false")
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION")
    claim_memory()
    assert os.environ["XLA_CLIENT_MEM_FRACTION"] == str(MEMORY_SHARE)
    assert len((tmp_path / "said").read_text().splitlines()) == 3, "nothing was asked where nothing is claimed ahead"


def test_a_run_without_a_device_of_its_own_claims_none(monkeypatch, tmp_path, capsys):
    """Of a server's GPUs the server holds the memory."""

    def held() -> None:
        raise ConfigError("it is held")

    for module in (qps, disaggregation):
        monkeypatch.setattr(module, "claim_memory", held)
    (tmp_path / "work.json").write_text(json.dumps({"requests": [[5, 6]]}))
    asked = ["--workload", str(tmp_path / "work.json"), "--results", str(tmp_path)]
    assert main([*asked, "--url", "http://127.0.0.1:9"]) == 2
    assert "it is held" not in capsys.readouterr().err
    monkeypatch.setattr(qps, "measure", lambda *args: [])
    for options, status in ((["--host-only"], 0), ([], 2)):
        monkeypatch.setattr(qps, "rehearse", lambda *args: None)
        monkeypatch.setattr(qps, "make_model", lambda args: None)
        assert main([*asked, *options]) == status
    assert capsys.readouterr().err == "error: it is held\n"
    monkeypatch.setattr(disaggregation, "simulate", lambda args: [])
    monkeypatch.setattr(disaggregation, "with_claim", lambda rows: rows)
    assert disaggregation.main(["--simulate", "--results", str(tmp_path)]) == 0
    assert disaggregation.main(["--results", str(tmp_path)]) == 2


def test_a_run_at_toy_size(tmp_path, capsys):
    (tmp_path / "tiny.json").write_text(json.dumps(TINY))
    (tmp_path / "work.json").write_text(json.dumps({"requests": [[5, 6], [3, 4], [9, 3], [2, 5]]}))
    command = ["--config", str(tmp_path / "tiny.json"), "--workload", str(tmp_path / "work.json"), "--slots", "1"]
    command += ["--step-tokens", "8", "--pages", "8", "--dtype", "float32", "--warmup", "1", "--repeats", "2"]
    command += ["--rate", "200", "--host", "wait", "--results", str(tmp_path), "--json"]
    assert main(command) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["complete"]
    assert document["experiment"] == "qps_tiny_float32_wait_rate200"
    assert [row["repeat"] for row in document["rows"]] == [0, 1, "mean"]
    mean = document["rows"][-1]
    assert (mean["requests"], mean["host"], mean["batching"]) == (4, "wait", "merge")
    assert mean["qps_ci"] > 0
    assert mean["output_tokens_s"] / mean["qps"] == pytest.approx(18 / 4, rel=1e-3)
    assert mean["ttft_ms_p50"] <= mean["e2e_ms_p50"]
    assert not document["bars"]


def test_bad_arguments_are_named(capsys):
    assert main(["--requests", "4", "--cut", "4", "--host-only"]) == 2
    assert "--cut must leave some of 4 requests" in capsys.readouterr().err
    for bad in (
        ["--replicas", "0", "--update"],
        ["--replicas", "1", "--kill"],
        ["--devices", "2", "--host-only"],
        ["--quantize", "w9"],
        ["--rate", "0"],
        ["--prefill", "none"],
        ["--batching", "none"],
    ):
        with pytest.raises(SystemExit):
            parse_args(bad)
