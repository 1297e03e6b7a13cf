"""Others' side beside our own, by scripts that stand in for those that need torch."""

import argparse
import ast
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from experiments import qps, throughput
from experiments.peers import peer_hf, peer_torch, peer_vllm, shared
from experiments.result_file import ResultFile
from experiments.serving.workload import Request, Served, served_row
from experiments.steps import peers
from pallas_kernels.bench import peers as kernel_peers
from pallas_kernels.decode_attention import bench as decode_bench
from pallas_kernels.prefill_attention import bench as prefill_bench
from tests.experiments.test_throughput import TINY

ROW = {"quant": "bf16", "input_len": 8, "output_len": 256, "prefill_ms": 44.0, "mem_gib": 13.0, "mode": "cdt"}
SCRIPT = """
import argparse, json
parser = argparse.ArgumentParser()
for name in (
    "rows", "budget-s", "parts", "workload", "cb-limit-s", "out", "modes", "batches", "budget", "repeats", "seqs",
    "attn", "passes",
):
    parser.add_argument("--" + name)
parser.add_argument("--config")
parser.add_argument("--cut")
parser.add_argument("--settings", nargs="*")
args = parser.parse_args()
rows = {rows}
print(vars(args), file=open(__file__ + ".asked", "w"))
if args.workload:
    rows = [row | {{"req_s": len(json.load(open(args.workload)))}} for row in rows]
if args.modes:
    rows = {{"what": "vLLM", "rows": rows}}
json.dump(rows, open(args.out, "w"))
"""


def script(folder, name, rows):
    (folder / name).write_text(SCRIPT.format(rows=repr(rows)))


def asked(folder, name):
    return ast.literal_eval((folder / f"{name}.asked").read_text())


CASES = [(1, 8, 256), (32, 8, 256), (8, 1024, 1024), (2, 8, 4)]


def test_every_variant_is_kept(tmp_path):
    script(tmp_path, "peer_torch.py", [
        ROW | {"batch": 1, "decode_ms": 5.0, "attn": "flex"}, ROW | {"batch": 1, "decode_ms": 4.0, "attn": "fa2"},
        ROW | {"batch": 32, "attn": "fa2", "error": "out of memory"},
    ])  # fmt: skip
    slow, fast, failed = peers.compiled_steps(tmp_path, CASES, False, 60)
    assert [(row["decode_ms"], row["variant"]) for row in (slow, fast)] == [(5.0, "cdt/flex"), (4.0, "cdt/fa2")]
    assert fast["tokens_s"] == pytest.approx(256 / (0.044 + 256 * 0.004), rel=1e-4)
    assert (failed["batch"], failed["variant"], failed["error"]) == (32, "cdt/fa2", "out of memory")
    assert asked(tmp_path, "peer_torch.py")["rows"] == "bf16:b1:in8,bf16:b32:in8,bf16:b8:in1024"
    assert [row["weights"] for row in peers.compiled_steps(tmp_path, CASES[:1], True, 60)] == ["bf16"] * 3  # as it says
    assert asked(tmp_path, "peer_torch.py")["rows"] == "wo8:b1:in8,w8a8:b1:in8"
    assert peers.compiled_steps(tmp_path, CASES[3:], False, 60) == []


@pytest.mark.parametrize(("quantized", "bits"), [(False, "bf16"), (True, "fp8")])
def test_vllm_decodes_the_cases_that_it_can(tmp_path, quantized, bits):
    script(tmp_path, "peer_vllm.py", [
        {"kind": "engine", "start_s": 60.0},
        {"kind": "decode", "batch": 32, "ms": 4.5, "wall_ms": 5, "tok_s": 70.0, "settings": "x=1"},
    ])  # fmt: skip
    (step,) = peers.vllm_steps(tmp_path, CASES, quantized, 5)
    assert (step["peer"], step["weights"], step["kv"], step["batch"]) == (peers.VLLM, bits, bits, 32)
    assert (step["decode_ms"], step["input"], step["output"], step["settings"]) == (4.5, 8, 256, "x=1")
    said = asked(tmp_path, "peer_vllm.py")
    assert (said["modes"], said["batches"], said["repeats"], said["budget"]) == (bits, "1,32", "0", "155")


def test_serving_has_the_workload(tmp_path):
    row = {
        "run": 0, "attn": "flash", "finished": 2, "seconds": 1.0, "tok_s": 9.123456, "ttft_p50_s": 0.5,
        "ttft_p99_s": 0.7, "latency_p50_s": 0.9, "cut_off": False,
    }  # fmt: skip
    script(tmp_path, "peer_hf.py", [row, row | {"run": 1}, {"part": "cb", "error": "no room"}])
    script(tmp_path, "peer_vllm.py", [
        {"kind": "engine", "start_s": 60.0}, {"kind": "qps", "run": 0, "wall_s": 30.0, "out_tok_s": 8.0},
    ])  # fmt: skip
    served, again, failed, all_at_once = found = peers.serving(tmp_path, [(3, 4, 0.0), (5, 6, 0.0)], False, 3, 60)
    assert (served["repeat"], again["repeat"]) == (peers.WARM_UP, 0)
    assert [row for row in found if peers.counts(row)] == [again, all_at_once]
    assert (served["qps"], served["ttft_ms_p50"], served["output_tokens_s"]) == (2, 500.0, 9.1235)
    assert (served["attention"], served["weights"]) == ("flash", "bf16")
    assert failed["error"] == "no room"
    assert all_at_once == {
        "peer": peers.VLLM, "weights": "bf16", "kv": "bf16", "repeat": 0, "requests": 2, "seconds": 30.0,
        "output_tokens_s": 8.0, "qps": 2, "start_s": 60.0,
    }  # fmt: skip
    assert (asked(tmp_path, "peer_hf.py")["passes"], asked(tmp_path, "peer_vllm.py")["repeats"]) == ("3", "3")
    peers.serving(tmp_path, [(3, 4, 0.0), (5, 6, 0.5)], False, 2, 60, ["vllm"])
    assert asked(tmp_path, "peer_vllm.py")["budget"] == "271.0", "each run waits for the last arrival"
    assert [row["peer"] for row in peers.serving(tmp_path, [(3, 4, 0.0)], False, 1, 60, ["vllm"])] == [peers.VLLM]
    alone = peers.serving(tmp_path, [(3, 4, 0.0)], False, 1, 60, ["transformers"])
    assert {row["peer"] for row in alone} == {peers.SERVING}
    (fp8,) = peers.serving(tmp_path, [(3, 4, 0.0)], True, 1, 60)  # transformers has no 8 bits here
    assert (fp8["peer"], fp8["weights"], fp8["requests"]) == (peers.VLLM, "fp8", 1)


def test_flashinfers_variants_are_rows_like_ours_and_the_fastest_is_the_bar(tmp_path):
    shape = {"part": "decode", "hq": 32, "hk": 8, "page": 16, "batch": 16, "ctx": 1024, "rel_err": 1e-4}
    script(tmp_path, "peer_flashinfer.py", [
        shape | {"backend": "fi-cuda", "us": 24.987, "gbs": 2700.4}, shape | {"backend": "fi-tc", "us": 22.6, "gbs": 1},
        {"part": "decode", "backend": "fi-xqa", "hq": 32, "hk": 8, "error": "BAD"},
        shape | {"backend": "fi-fa3", "error": "no room"},
    ])  # fmt: skip
    cuda, tc, xqa, fa3 = kernel_peers.decode_attention(tmp_path, 60)
    assert cuda == {
        "kernel": "decode_attention", "peer": "FlashInfer", "variant": "cuda", "R": 16, "Q": 1, "length": 1024, "H": 32,
        "K": 8, "D": 128, "P": 16, "dtype": "bfloat16", "kv": "bf16", "us": 24.99, "gb_s": 2700,
    }  # fmt: skip
    assert (xqa["variant"], xqa["error"], fa3["variant"], fa3["error"]) == ("xqa", "BAD", "fa3", "no room")
    ours = {**cuda, "peer": "mosaic", "us": 25.0}
    del ours["variant"]
    (bar,) = decode_bench.bars([ours, cuda, tc, xqa, fa3])
    assert (bar["value"], bar["bar"], bar["met"]) == (25.0, 22.6, False)
    assert not list(decode_bench.bars([ours, xqa, fa3]))


def test_prefill_and_products_are_rows_like_ours(tmp_path):
    row = {"part": "prefill", "backend": "fi-fa3", "hq": 32, "hk": 32, "page": 16, "batch": 2, "ctx": 64, "us": 9.87}
    script(tmp_path, "peer_flashinfer.py", [row | {"tflops": 450.4}])
    (found,) = kernel_peers.prefill_attention(tmp_path, 60)
    assert (found["q_lens"], found["kv_lens"], found["us"], found["tflop_s"]) == ([64, 64], [64, 64], 9.9, 450)
    (bar,) = prefill_bench.bars([{**found, "peer": "mosaic", "us": 9.0}, found])
    assert (bar["name"], bar["bar"], bar["met"]) == ("2x64 causal", 9.9, True)
    shape = {"part": "gemm", "M": 16, "K": 64, "N": 32, "tflops": 1.2}
    script(tmp_path, "peer_kernels.py", [
        shape | {"kind": "int8", "us": 8.0, "note": "padded to 32"}, shape | {"kind": "fp8t", "us": 7.0, "note": ""},
        shape | {"kind": "fp8r", "us": 6.0, "note": ""}, {"part": "gemm", "kind": "bf16", "M": 1, "K": 1, "N": 1,
        "error": "no"},
    ])  # fmt: skip
    tensor, rows, failed = kernel_peers.products(tmp_path, 60)
    assert [tensor["peer"], rows["peer"], failed["peer"], failed["error"]] == ["torch fp8"] * 2 + ["torch bf16", "no"]
    assert kernel_peers.best([tensor, rows, failed], "torch fp8", ("M", "K", "N")) == {(16, 64, 32): 6.0}


def test_a_kernels_benchmark_keeps_them_in_its_file(tmp_path, monkeypatch):
    """All of a run but the device: the command with a script that stands in, and no part of our own."""
    shape = {"part": "decode", "hq": 32, "hk": 8, "page": 16, "batch": 16, "ctx": 1024}
    script(tmp_path, "peer_flashinfer.py", [shape | {"backend": "fi-cuda", "us": 25.0, "gbs": 2700.0}])
    monkeypatch.setattr(decode_bench, "copy_bandwidth", lambda: 4e12)
    options = ["--parts", "--peers", str(tmp_path), "--results", str(tmp_path / "out")]
    assert decode_bench.main(options) == 0
    (file,) = (tmp_path / "out").glob("decode_attention-*.json")
    document = json.loads(file.read_text())
    assert [row.get("peer") for row in document["rows"]] == ["FlashInfer", None]
    assert document["rows"][0]["fraction"] == 0.675


@pytest.mark.parametrize(("text", "seconds", "why"), [
    ("raise SystemExit('no module torch')", 60, "exit status 1: no module torch"), ("", 60, "exit status 0"),
    ("import time; time.sleep(60)", 1, "took more than 2 s"),
])  # fmt: skip
def test_what_fails_says_why(tmp_path, text, seconds, why):
    (tmp_path / "peer_torch.py").write_text(text)
    (row,) = peers.compiled_steps(tmp_path, CASES, False, seconds)
    assert row["error"] == why


def test_what_fails_later_says_why_too(tmp_path):
    script(tmp_path, "peer_torch.py", [ROW | {"batch": 1, "decode_ms": 5.0, "attn": "flex"}])
    with (tmp_path / "peer_torch.py").open("a") as file:
        file.write("raise SystemExit('out of memory')")
    done, failed = peers.compiled_steps(tmp_path, CASES, False, 60)
    assert done["decode_ms"] == 5.0
    assert failed["error"] == "exit status 1: out of memory"


def test_a_file_that_says_why_names_no_folder(tmp_path):
    (row,) = peers.compiled_steps(tmp_path, CASES, False, 60)
    assert str(tmp_path) in row["error"], "python's own words, as they are printed"
    with ResultFile(tmp_path / "results", "x", ["python"]) as result:
        result.add(row)
    assert "peer_torch.py" in result.document["rows"][0]["error"]
    assert str(tmp_path) not in result.path.read_text()


def test_a_missing_script_or_another_model_is_said(tmp_path, capsys):
    (row,) = peers.compiled_steps(tmp_path, CASES, False, 60)
    assert "peer_torch.py" in row["error"]
    for options, says in (
        ([str(tmp_path / "none")], "is not a folder"),
        ([str(tmp_path), "--config", "a/b.json"], "not b"),
    ):
        with pytest.raises(SystemExit):
            throughput.parse_args(["--peers", *options])
        assert says in capsys.readouterr().err


def test_vllm_measures_another_model_where_the_rest_cannot(tmp_path, capsys):
    def of(name, *options, parse=qps.parse_args):
        return parse(["--peers", str(tmp_path), "--config", str(shared.LLAMA_2_7B.with_name(name)), *options])

    alone = "--peer-names", "vllm"
    for wrong, says in (
        (lambda: of("llama-3.1-8b.json"), "measures llama-2-7b, not llama-3.1-8b: another takes --config, and --peer-"),
        (lambda: of("qwen3-8b.json", *alone, "torch", parse=throughput.parse_args), "and --peer-names vllm alone"),
        (lambda: of("qwen3-8b.json", *alone, "--model", "a/b"), "not b: another takes --config"),
        (lambda: of("gemma-2-2b.json", *alone), "qwen3 by vLLM, not gemma-2-2b, whose model_type is gemma2"),
        (lambda: of("llama-2-7b.json", *alone, "--peer-settings", "x"), "'x' is not NAME=VALUE, such as max_num"),
        (lambda: of("llama-2-7b.json", "--peer-names", "transformers", "--peer-settings", "x=1"), "add vllm to --peer"),
    ):
        with pytest.raises(SystemExit):
            wrong()
        assert says in capsys.readouterr().err
    script(tmp_path, "peer_vllm.py", [{"kind": "qps", "run": 0, "wall_s": 30.0, "out_tok_s": 8.0}])
    args = of("qwen3-8b.json", *alone, "--rate", "4", "--cut", "1", "--peer-settings", "x=1", "y=b")
    (row,) = qps.serve_peers([Request(3, 4, 0.0), Request(3, 4, 0.5)], args)
    said = asked(tmp_path, "peer_vllm.py")
    assert (said["config"], said["cut"], said["settings"]) == (args.config, "1", ["x=1", "y=b"])
    assert (row["rate"], peers.counts(row), peers.counts(row | {"rate": None})) == (4, False, True)
    steps = of("mistral-7b-v0.3.json", "--rows", "1x8x256", *alone, parse=throughput.parse_args)
    throughput.peers_rows(steps)
    assert asked(tmp_path, "peer_vllm.py")["config"] == steps.config


def test_they_are_beside_ours_and_decide_nothing(tmp_path):
    (tmp_path / "llama-2-7b.json").write_text(json.dumps(TINY | {"max_position_embeddings": 512}))
    script(tmp_path, "peer_torch.py", [ROW | {"batch": 1, "decode_ms": 5.0, "attn": "flex"}])
    options = ["--config", str(tmp_path / "llama-2-7b.json"), "--rows", "1x8x256", "--dtype", "float32"]
    options += ["--repeats", "1", "--seconds", "0.01", "--peers", str(tmp_path), "--results", str(tmp_path)]
    assert throughput.main(options) == 0
    (file,) = tmp_path.glob("throughput_*.json")
    document = json.loads(file.read_text())
    compiled, vllm, ours = document["rows"]  # what was measured first is kept, whatever becomes of ours
    assert "peer" not in ours
    assert (compiled["peer"], vllm["peer"]) == (peers.COMPILED, peers.VLLM)
    assert "peer_vllm.py" in vllm["error"]
    assert document["complete"]


# The project's own scripts

OWN = ("peer_flashinfer", "peer_hf", "peer_kernels", "peer_torch", "peer_vllm")


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """A folder of packages that PEER_PACKAGES names, and no other peers."""
    folder = tmp_path / "packages"
    folder.mkdir()
    monkeypatch.setenv("PEER_PACKAGES", str(folder))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    monkeypatch.setattr(shared, "UNPACKED", tmp_path / "unpacked")
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "somepeer"]:
        del sys.modules[name]


def own(script, *options):
    return subprocess.run(
        [sys.executable, "-m", f"experiments.peers.{script}", *options], capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("script", OWN)
def test_a_script_explains_itself_and_says_what_to_install(script, tmp_path):
    (tmp_path / "w.json").write_text('[{"prompt_len": 3, "output_len": 4}]')
    said = own(script, "--help")
    assert said.returncode == 0, said.stderr
    assert "pip install" in said.stdout
    assert "--out" in said.stdout
    missing = own(script, *(["--workload", str(tmp_path / "w.json")] if script in ("peer_hf", "peer_vllm") else []))
    assert missing.returncode == 2
    assert re.fullmatch(r"error: \w+ cannot be imported: pip install .*\d.*\n", missing.stderr), missing.stderr


def test_every_script_and_version_is_in_the_readme():
    readme = (kernel_peers.SCRIPTS / "README.md").read_text()
    for script in OWN:
        assert f"({script}.py)" in readme
        for needed in re.findall(r"[\w-]+==[\w.]+", (kernel_peers.SCRIPTS / f"{script}.py").read_text()):
            assert needed in readme, needed


def test_peers_alone_takes_the_projects_own_scripts(tmp_path):
    assert throughput.parse_args(["--peers"]).peers == kernel_peers.SCRIPTS
    assert throughput.parse_args(["--peers", str(tmp_path)]).peers == tmp_path
    assert throughput.parse_args([]).peers is None
    (row,) = peers.compiled_steps(kernel_peers.SCRIPTS, CASES[:1], False, 60)
    assert "error: torch cannot be imported: pip install torch==" in row["error"]


@pytest.mark.parametrize("packed", [False, True])
def test_a_peer_comes_from_a_folder_or_an_archive(packages, packed):
    site = packages / "site" / "somepeer"
    site.mkdir(parents=True)
    (site / "__init__.py").write_text("__version__ = '1.2'\n")
    if packed:
        with tarfile.open(packages / "built.tar.xz", "w:xz") as archive:
            archive.add(packages / "site", "site")
        shutil.rmtree(packages / "site")
    assert shared.load("somepeer", "somepeer==1").__version__ == "1.2"
    assert shared.versions_of("somepeer") == "somepeer 1.2"
    assert os.environ["PYTHONPATH"].split(os.pathsep)[0] == sys.path[0], "an engine's own processes find it too"
    assert list(shared.UNPACKED.glob("*")) == ([shared.UNPACKED / "built"] if packed else [])


def test_what_a_peer_lacks_itself_is_said(packages):
    (packages / "somepeer").mkdir()
    (packages / "somepeer" / "__init__.py").write_text("import nothing_like_it\n")
    with pytest.raises(shared.Missing, match=r"somepeer cannot be imported \(No module named 'nothing_like_it'\): pip"):
        shared.load("somepeer", "somepeer==1")


@pytest.mark.parametrize("text", ["{", '[{"prompt_len": 3}]', "[3]", '{"prompt_len": 3}'])
def test_a_workload_that_is_none_is_refused(tmp_path, text):
    path = tmp_path / "w.json"
    path.write_text('[{"prompt_len": 3, "output_len": 4, "arrival": 0.5}, {"prompt_len": 5, "output_len": 6}]')
    assert [(each["prompt_len"], each["output_len"], each["arrival"]) for each in shared.read_workload(path)] == [
        (3, 4, 0.5),
        (5, 6, 0.0),
    ]
    path.write_text(text)
    with pytest.raises(ValueError, match=r"w.json: must be a JSON list of objects with prompt_len and output_len"):
        shared.read_workload(path)


def test_rows_of_steps_are_read_and_wrong_ones_refused():
    assert peer_torch.row_of("w8a8:b32:in1024") == ("w8a8", 32, 1024, 1024)
    for wrong in ("bf16", "bf16:1:in8", "bf16:b1:in9", "int4:b1:in8", "bf16:b:in8"):
        with pytest.raises(argparse.ArgumentTypeError, match="must be like bf16:b1:in8"):
            peer_torch.row_of(wrong)


class Engine:
    """Stands in for vLLM's, and for its clock. A step has the seconds and each request's tokens of `steps`; a prompt
    takes none."""

    def __init__(self):
        self.clock, self.steps, self.left = 100.0, itertools.repeat((1e-3, 1)), {}
        self.llm_engine = self

    def generate(self, prompts, params, use_tqdm):
        self.clock += max(each.max_tokens for each in params) / 1e3
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=range(each.max_tokens))]) for each in params]

    def add_request(self, request_id, prompt, params):
        assert (params.output_kind, params.ignore_eos) == ("delta", True)
        assert prompt["prompt_token_ids"]
        self.left[request_id] = params.max_tokens

    def has_unfinished_requests(self):
        return bool(self.left)

    def step(self):
        seconds, tokens = next(self.steps)
        self.clock += seconds
        made = {each: min(tokens, left) for each, left in self.left.items()}
        self.left = {each: left - made[each] for each, left in self.left.items() if left > made[each]}
        return [
            SimpleNamespace(request_id=i, finished=i not in self.left, outputs=[SimpleNamespace(token_ids=[7] * count)])
            for i, count in made.items()
        ]

    def sleep(self, seconds):
        assert not self.left
        self.clock += seconds


@pytest.fixture
def engine(monkeypatch):
    made = Engine()
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace, LLM=dict))
    kinds = SimpleNamespace(RequestOutputKind=SimpleNamespace(DELTA="delta"))
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", kinds)
    monkeypatch.setattr(peer_vllm, "time", SimpleNamespace(perf_counter=lambda: made.clock, sleep=made.sleep))
    return made


def test_vllms_latencies_are_those_of_a_known_schedule(engine):
    """The steps end at 10, 40, 140 and 150 ms, then at 1010 and 1510. The second arrival waits for a step."""
    requests = [
        {"prompt_len": 5, "output_len": 4, "arrival": 0.0},  # tokens at 10, 25, 40 and 140 ms
        {"prompt_len": 3, "output_len": 2, "arrival": 0.02},  # 140, 150
        {"prompt_len": 2, "output_len": 2, "arrival": 1.0},  # 1010, 1510: too slow to be good
    ]
    engine.steps = iter([(0.01, 1), (0.03, 2), (0.1, 1), (0.01, 1), (0.01, 1), (0.5, 1)])
    seconds, came = peer_vllm.serve(engine, requests, random.Random(0))
    assert seconds == pytest.approx(1.51)
    row = peer_vllm.latencies(requests, came, seconds, 0)
    assert row == pytest.approx({
        "ttft_ms_p50": 10, "ttft_ms_p90": 120, "ttft_ms_p99": 120,  # 10, 120, 10
        "itl_ms_p50": 15, "itl_ms_p90": 500, "itl_ms_p99": 500,  # 15, 15, 100, 10, 500
        "e2e_ms_p50": 140, "e2e_ms_p90": 510, "e2e_ms_p99": 510,  # 140, 130, 510
        "good_share": 2 / 3, "goodput": 2 / 1.51,
    })  # fmt: skip
    for cut in (0, 1):
        served = [
            Served(Request(*each.values()), times[0] - each["arrival"], times[-1] - each["arrival"])
            for each, times in zip(requests, came, strict=True)
        ]
        row = peer_vllm.latencies(requests, came, seconds, cut)
        ours = served_row(served, seconds, {p: row[f"itl_ms_p{p}"] / 1e3 for p in (50, 90, 99)}, cut)
        assert {name: ours[name] for name in row} == pytest.approx(row)
    assert peer_vllm.latencies(requests[:1], [[0.5]], 1.0, 0)["itl_ms_p99"] is None
    with pytest.raises(ValueError, match="made 7 tokens where 8 were asked for"):
        peer_vllm.check(7, [(5, 4), (5, 4)])


def test_vllm_takes_further_settings(tmp_path, monkeypatch, engine):
    for name in (*peer_vllm.ENVIRONMENT, "VLLM_CACHE_ROOT"):
        monkeypatch.setenv(name, "")  # which the engine sets
    args = peer_vllm.options().parse_args(["--settings", "max_num_seqs=64", "enforce_eager=true", "kv_cache_dtype=fp8"])
    made = peer_vllm.engine("bf16", shared.LLAMA_2_7B, 512, 8192, args.settings, str(tmp_path))
    assert (made["max_num_seqs"], made["max_num_batched_tokens"], made["kv_cache_dtype"]) == (64, 8192, "fp8")
    assert made["enforce_eager"] is True
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize("late", [0.0, 0.5])
def test_vllms_rows_have_the_shape_that_is_read(tmp_path, engine, late):
    requests = [{"prompt_len": 3, "output_len": 4}, {"prompt_len": 5, "output_len": 10, "arrival": late}]
    (tmp_path / "w.json").write_text(json.dumps(requests))
    args = argparse.Namespace(batches=["1", "32"], workload=tmp_path / "w.json", repeats=2, budget_s=600)
    args.settings, args.cut = ["x=1", "y=a"], 0
    output = shared.Output(tmp_path / "out.json", "vllm 9")
    peer_vllm.measure(engine, "bf16", args, output)
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["rows"] == output.rows
    assert [(row["kind"], row.get("batch"), row.get("ms")) for row in output.rows] == [
        ("decode", 1, pytest.approx(1.0)), ("decode", 32, pytest.approx(1.0)), ("qps", None, None), ("qps", None, None),
    ]  # fmt: skip
    script(tmp_path, "peer_vllm.py", [])
    (tmp_path / "peer_vllm.py").write_text(f"import sys\nopen(sys.argv[-1], 'w').write({json.dumps(document)!r})")
    steps, (served, again) = (
        peers.vllm_steps(tmp_path, CASES, False, 5)[:2],
        peers.serving(tmp_path, [(3, 4, 0.0), (5, 10, late)], False, 2, 60, ["vllm"])[2:],
    )
    assert [(row["batch"], row["tokens_s"]) for row in steps] == [(1, pytest.approx(1e3)), (32, pytest.approx(32e3))]
    seconds = late + 0.01
    assert (served["qps"], served["output_tokens_s"]) == pytest.approx((2 / seconds, 14 / seconds), rel=1e-4)
    assert (served.get("ttft_ms_p99"), served.get("e2e_ms_p50")) == ((1.0, 4.0) if late else (None, None))
    for row in (*steps, served, again):
        assert (row["script"], row["version"], row["settings"]) == ("peer_vllm.py", "vllm 9", "x=1 y=a")


def test_transformers_rows_have_the_shape_that_is_read(tmp_path):
    def result(at, first, last, tokens):
        return SimpleNamespace(error=None, created_time=at, timestamps=[first, last], generated_tokens=range(tokens))

    row = peer_hf.summary([result(0.0, 0.5, 2.0, 6), result(1.0, 2.0, 4.0, 4)], 2, 9.0)
    assert (row["seconds"], row["tok_s"], row["req_s"], row["cut_off"]) == (4.0, 2.5, 0.5, False)
    assert (row["ttft_p50_s"], row["ttft_p99_s"], row["latency_p50_s"]) == (0.5, 1.0, 2.0)
    read = peers._served(row | {"run": 1, "attn": "flash"})
    assert (read["qps"], read["ttft_ms_p99"], read["repeat"]) == (0.5, 1000.0, 0)
    failed = SimpleNamespace(error="no room", timestamps=[], generated_tokens=[])
    cut = peer_hf.summary([result(0.0, 1.0, 2.0, 6), failed], 3, 9.0)
    assert (cut["cut_off"], cut["finished"], cut["seconds"], cut["errors"]) == (True, 1, 9.0, ["no room"])


def test_a_script_that_takes_too_long_leaves_nothing_running(tmp_path):
    (tmp_path / "peer_torch.py").write_text(
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "open(__file__ + '.pid', 'w').write(str(child.pid))\n"
        "time.sleep(60)\n"
    )
    (row,) = kernel_peers.run_script(tmp_path / "peer_torch.py", [], 5)
    assert row["error"] == "took more than 5 s"
    child = int((tmp_path / "peer_torch.py.pid").read_text())
    for _ in range(100):
        try:
            state = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return
        if state == "Z":
            return
        time.sleep(0.05)
    pytest.fail("its child runs on")
