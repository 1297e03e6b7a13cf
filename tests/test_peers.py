"""Others' side beside our own, by scripts that stand in for those that need torch."""

import json

import pytest

from experiments import throughput
from experiments.result_file import ResultFile
from experiments.steps import peers
from tests.test_throughput import TINY

ROW = {"quant": "bf16", "input_len": 8, "output_len": 256, "prefill_ms": 44.0, "mem_gib": 13.0, "mode": "cdt"}
SCRIPT = """
import argparse, json
parser = argparse.ArgumentParser()
for name in ("rows", "budget-s", "parts", "workload", "cb-limit-s", "out", "modes", "batches", "budget"):
    parser.add_argument("--" + name)
args = parser.parse_args()
rows = {rows}
if args.workload:
    rows = [row | {{"req_s": len(json.load(open(args.workload)))}} for row in rows]
if args.batches:
    rows = {{"what": "vLLM", "rows": rows}}
json.dump(rows, open(args.out, "w"))
"""


def script(folder, name, rows):
    (folder / name).write_text(SCRIPT.format(rows=repr(rows)))


def test_the_best_variant_of_each_batch_counts(tmp_path):
    script(tmp_path, "peer_torch.py", [
        ROW | {"batch": 1, "decode_ms": 5.0, "attn": "flex"}, ROW | {"batch": 1, "decode_ms": 4.0, "attn": "fa2"},
        {"quant": "bf16", "batch": 32, "error": "out of memory"}, ROW | {"batch": 32, "decode_ms": 6.0, "attn": "fa2"},
        ROW | {"batch": 32, "decode_ms": 7.0, "attn": "flex"}, {"quant": "bf16", "batch": 128, "error": "no"},
    ])  # fmt: skip
    one, many, failed = peers.compiled_steps(tmp_path, 60)
    assert (one["batch"], one["decode_ms"], one["variant"], many["decode_ms"]) == (1, 4.0, "cdt/fa2", 6.0)
    assert one["tokens_s"] == pytest.approx(256 / (0.044 + 256 * 0.004), rel=1e-4)
    assert (failed["peer"], failed["error"]) == (peers.COMPILED, "no")


def test_serving_has_the_workload(tmp_path):
    row = {
        "run": 0, "attn": "flash", "finished": 2, "seconds": 1.0, "tok_s": 9.123456, "ttft_p50_s": 0.5,
        "ttft_p99_s": 0.7, "latency_p50_s": 0.9, "cut_off": False,
    }  # fmt: skip
    script(tmp_path, "peer_hf.py", [row, {"part": "cb", "error": "no room"}])
    script(tmp_path, "peer_vllm.py", [
        {"kind": "engine", "start_s": 60.0}, {"kind": "decode", "batch": 32, "ms": 4.5, "wall_ms": 5, "tok_s": 70.0},
        {"kind": "qps", "run": 0, "wall_s": 30.0, "out_tok_s": 8.0},
    ])  # fmt: skip
    served, failed, step, all_at_once = peers.serving(tmp_path, [(3, 4, 0.0), (5, 6, 0.0)], 60)
    assert (served["qps"], served["ttft_ms_p50"], served["output_tokens_s"]) == (2, 500.0, 9.1235)
    assert failed["error"] == "no room"
    assert (step["peer"], step["batch"], step["decode_ms"]) == (peers.VLLM, 32, 4.5)
    assert (all_at_once["peer"], all_at_once["qps"], all_at_once["seconds"]) == (peers.VLLM, 2, 30.0)
    *_, late = peers.serving(tmp_path, [(3, 4, 0.0), (5, 6, 0.5)], 60)
    assert late == {"peer": peers.VLLM, "error": "its script sends all requests at once"}


@pytest.mark.parametrize(("text", "seconds", "why"), [
    ("raise SystemExit('no module torch')", 60, "exit status 1: no module torch"), ("", 60, "exit status 0"),
    ("import time; time.sleep(60)", 1, "took more than 2 s"),
])  # fmt: skip
def test_what_fails_says_why(tmp_path, text, seconds, why):
    (tmp_path / "peer_torch.py").write_text(text)
    (row,) = peers.compiled_steps(tmp_path, seconds)
    assert row["error"] == why


def test_what_fails_later_says_why_too(tmp_path):
    script(tmp_path, "peer_torch.py", [ROW | {"batch": 1, "decode_ms": 5.0, "attn": "flex"}])
    with (tmp_path / "peer_torch.py").open("a") as file:
        file.write("raise SystemExit('out of memory')")
    done, failed = peers.compiled_steps(tmp_path, 60)
    assert done["decode_ms"] == 5.0
    assert failed["error"] == "exit status 1: out of memory"


def test_a_file_that_says_why_names_no_folder(tmp_path):
    (row,) = peers.compiled_steps(tmp_path, 60)
    assert str(tmp_path) in row["error"], "python's own words, as they are printed"
    with ResultFile(tmp_path / "results", "x", ["python"]) as result:
        result.add(row)
    assert "peer_torch.py" in result.document["rows"][0]["error"]
    assert str(tmp_path) not in result.path.read_text()


def test_a_missing_script_or_another_model_is_said(tmp_path, capsys):
    (row,) = peers.compiled_steps(tmp_path, 60)
    assert "peer_torch.py" in row["error"]
    for options, says in (
        ([str(tmp_path / "none")], "is not a folder"),
        ([str(tmp_path), "--config", "a/b.json"], "not b"),
    ):
        with pytest.raises(SystemExit):
            throughput.parse_args(["--peers", *options])
        assert says in capsys.readouterr().err


def test_they_are_beside_ours_and_decide_nothing(tmp_path):
    (tmp_path / "llama-2-7b.json").write_text(json.dumps(TINY))
    script(tmp_path, "peer_torch.py", [ROW | {"batch": 1, "decode_ms": 5.0, "attn": "flex"}])
    options = ["--config", str(tmp_path / "llama-2-7b.json"), "--rows", "1x8x4", "--dtype", "float32", "--repeats", "1"]
    assert throughput.main([*options, "--peers", str(tmp_path), "--results", str(tmp_path)]) == 0
    (file,) = tmp_path.glob("throughput_*.json")
    ours, theirs = json.loads(file.read_text())["rows"]
    assert "peer" not in ours
    assert theirs["peer"] == peers.COMPILED
