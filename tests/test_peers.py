"""Others' side beside our own, by scripts that stand in for those that need torch."""

import ast
import json

import pytest

from experiments import throughput
from experiments.result_file import ResultFile
from experiments.steps import peers
from pallas_kernels.bench import peers as kernel_peers
from pallas_kernels.decode_attention import bench as decode_bench
from pallas_kernels.prefill_attention import bench as prefill_bench
from tests.test_throughput import TINY

ROW = {"quant": "bf16", "input_len": 8, "output_len": 256, "prefill_ms": 44.0, "mem_gib": 13.0, "mode": "cdt"}
SCRIPT = """
import argparse, json
parser = argparse.ArgumentParser()
for name in (
    "rows", "budget-s", "parts", "workload", "cb-limit-s", "out", "modes", "batches", "budget", "repeats", "seqs",
    "attn", "passes",
):
    parser.add_argument("--" + name)
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
        {"kind": "engine", "start_s": 60.0}, {"kind": "decode", "batch": 32, "ms": 4.5, "wall_ms": 5, "tok_s": 70.0},
    ])  # fmt: skip
    (step,) = peers.vllm_steps(tmp_path, CASES, quantized, 5)
    assert (step["peer"], step["weights"], step["kv"], step["batch"]) == (peers.VLLM, bits, bits, 32)
    assert (step["decode_ms"], step["input"], step["output"]) == (4.5, 8, 256)
    said = asked(tmp_path, "peer_vllm.py")
    assert (said["modes"], said["batches"], said["repeats"], said["budget"]) == (bits, "1,32", "0", "155")


def test_serving_has_the_workload(tmp_path):
    row = {
        "run": 0, "attn": "flash", "finished": 2, "seconds": 1.0, "tok_s": 9.123456, "ttft_p50_s": 0.5,
        "ttft_p99_s": 0.7, "latency_p50_s": 0.9, "cut_off": False,
    }  # fmt: skip
    script(tmp_path, "peer_hf.py", [row, row | {"run": 1}, {"part": "cb", "error": "no room"}])
    script(tmp_path, "peer_vllm.py", [{"kind": "qps", "run": 0, "wall_s": 30.0, "out_tok_s": 8.0}])
    served, again, failed, all_at_once = found = peers.serving(tmp_path, [(3, 4, 0.0), (5, 6, 0.0)], False, 3, 60)
    assert (served["repeat"], again["repeat"]) == (peers.WARM_UP, 0)
    assert [row for row in found if peers.counts(row)] == [again, all_at_once]
    assert (served["qps"], served["ttft_ms_p50"], served["output_tokens_s"]) == (2, 500.0, 9.1235)
    assert (served["attention"], served["weights"]) == ("flash", "bf16")
    assert failed["error"] == "no room"
    assert (all_at_once["peer"], all_at_once["qps"], all_at_once["seconds"]) == (peers.VLLM, 2, 30.0)
    assert (asked(tmp_path, "peer_hf.py")["passes"], asked(tmp_path, "peer_vllm.py")["repeats"]) == ("3", "3")
    *_, late = peers.serving(tmp_path, [(3, 4, 0.0), (5, 6, 0.5)], False, 1, 60)
    assert late == {"peer": peers.VLLM, "error": "its script sends all requests at once"}
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
