"""RESULTS.md: the schema of result files, the newest of each, and the page that they make."""

import json
import re
from dataclasses import replace

import pytest

from experiments import results_page
from experiments.report import pictures
from experiments.report.documents import RESULTS, is_flat, label_of, problems, read_all, read_result
from experiments.report.figures import H100, H200, Results, decode_series, requests_rows, with_sustained
from experiments.report.page import page
from experiments.report.strips import strips
from experiments.results_page import PAGE
from experiments.steps.devices import ceilings_of
from jllm.errors import InputFileError
from tests.test_docs import slug

GOOD = {
    "experiment": "decode_attention", "date": "2026-11-20", "device": H100, "versions": {"jax": "1"},
    "command": "python -m x", "complete": True, "bars": [], "rows": [],
}  # fmt: skip
VERDICT = {
    "claim": "C1", "title": "more", "stated": "+100 %", "measured": "+26 %", "direction": "yes", "size": "no",
    "line": "It serves 26 % more.",
}  # fmt: skip


def write(directory, name: str, **changes) -> None:
    (directory / f"{name}.json").write_text(json.dumps(GOOD | changes))


def read(directory) -> Results:
    return Results(read_all(directory))


# Files


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_every_result_keeps_to_one_schema(path):
    document = read_result(path)
    device = re.sub(r"\W+", "-", document["device"].lower().removeprefix("nvidia "))
    assert path.stem == f"{label_of(path)}-{document['date'].replace('-', '')}-{device}"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"complete": "yes"}, "complete must be there, a bool"),
        ({"device": None}, "device must be there, a str"),
        ({"date": "20.11.2026"}, "date must be YYYY-MM-DD"),
        ({"rows": {}}, "rows must be a list of objects"),
        ({"rows": [{"a": {"b": 1}}]}, "rows 0: a must be a value"),
        ({"bars": [{"name": "x"}]}, "bar 0 must have bar, met, name, unit, value"),
    ],
)
def test_what_breaks_the_schema_is_named(tmp_path, changes, problem):
    write(tmp_path, "x", **changes)
    with pytest.raises(InputFileError, match=rf"x\.json: {re.escape(problem)}"):
        read_all(tmp_path)


def test_values_are_plain_or_lists_of_plain():
    assert all(map(is_flat, (1, 1.5, "x", None, True, [1, "x"])))
    assert not any(map(is_flat, ({}, [[1]], [{}])))
    assert list(problems([])) == ["not an object"]


def test_the_newest_complete_file_of_each_name_and_device_counts(tmp_path):
    write(tmp_path, "a-20261120-h100")
    write(tmp_path, "a-20261122-h100", date="2026-11-22")
    write(tmp_path, "a-20261123-h100", date="2026-11-23", complete=False)
    write(tmp_path, "a-20261119-cpu", date="2026-11-19", device="cpu", complete=False)
    write(tmp_path, "a-few-20261119-h100", date="2026-11-19")
    assert {entry.path.stem for entry in read_all(tmp_path)} == {
        "a-20261122-h100", "a-20261119-cpu", "a-few-20261119-h100",
    }  # fmt: skip


def test_of_each_name_and_device_one_file_is_kept():
    assert {entry.path for entry in read_all()} == set(RESULTS.glob("*.json")), "delete the older ones"


def test_files_that_rows_name_are_there():
    rows = [row for path in RESULTS.glob("*.json") for row in read_result(path)["rows"]]
    named = {name for row in rows for name in str(row.get("file", "")).split(", ") if name}
    assert named
    assert not {name for name in named if not (RESULTS / name).exists()}


# The committed page


def test_the_committed_page_is_what_the_results_say():
    text = page(read(RESULTS))
    assert PAGE.read_text(encoding="utf-8") == text, "run python -m experiments.results_page"
    assert text.count("\n") <= 145


def test_every_link_of_the_page_leads_somewhere():
    text = PAGE.read_text(encoding="utf-8")
    headings = {slug(title) for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}
    found = re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", text)
    assert len(found) > 30
    for target, anchor in found:
        assert (PAGE.parent / target).exists(), target
        assert target or anchor in headings


def test_every_committed_picture_is_shown():
    shown = set(re.findall(r"results/([\w.-]+\.svg)", PAGE.read_text(encoding="utf-8")))
    assert shown == {path.name for path in RESULTS.iterdir() if path.suffix != ".json"}
    assert len(shown) == 4


def test_the_command_writes_and_checks(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(results_page, "PAGE", tmp_path / "RESULTS.md")
    monkeypatch.setattr(results_page, "RESULTS", tmp_path)
    write(tmp_path, "claims-C1-20261120-h100", experiment="claims-C1", verdict=VERDICT)
    assert results_page.main(["--check"]) == 1
    assert "stale" in capsys.readouterr().out
    assert results_page.main([]) == 0
    assert results_page.main(["--check"]) == 0
    write(tmp_path, "bad", rows=1)
    assert results_page.main([]) == 2
    assert "bad.json: rows must be" in capsys.readouterr().err


# Figures


def steps(**changes) -> dict:
    row = {"batch": 16, "input": 8, "decode_ms": 4.0, "decode_floor_ms": 3.2, "h800_decode_ms": 7.0}
    row |= {"model": "m", "scheme": "s", "kv": "k", "floor_fraction": 0.8, "prefill_floor_fraction": 0.7}
    return row | changes


def test_rows_of_older_files_have_both_shares():
    """By hand: a step of one row is bound by bytes, and one of 4,096 prompt tokens by operations."""
    row = {"model": "llama-2-7b", "scheme": "bf16", "kv": "bf16", "batch": 1, "input": 4096, "output": 2}
    row |= {"floor_fraction": 0.8, "prefill_floor_fraction": 0.7}
    device = ceilings_of(H100)
    (found,) = with_sustained([row], device)
    assert found["sustained_fraction"] == pytest.approx(0.8 * device.bandwidth / device.sustained.bandwidth)
    products, attention = 2 * 6.476e9 / device.peaks[None], 524_288 * 4097 / 2 / device.attention  # a token
    slower = (products * device.peaks[None] / 705e12 + attention) / (products + attention)
    assert found["prefill_sustained_fraction"] == pytest.approx(0.7 * slower, rel=1e-3)
    assert with_sustained([found], device) == [found]
    assert (
        with_sustained([row], replace(device, sustained=None)) == with_sustained([row | {"model": "m"}], device) == []
    )


def test_steps_stand_beside_their_floor_and_peers_of_the_same_job(tmp_path):
    peer = {"peer": "vLLM", "weights": "bf16", "batch": 16, "input": 8}
    rows = [steps(), steps(input=1024, decode_ms=9.0, floor_fraction=0.9), *(peer | {"decode_ms": ms} for ms in (6, 5))]
    write(tmp_path, "throughput_llama-2-7b_bf16_kv-bf16-20261120-h100", rows=rows)
    later = [steps(decode_ms=8.0), peer | {"decode_ms": 12.0}]
    write(tmp_path, "throughput_llama-2-7b_x-20261119-h100", date="2026-11-19", rows=later)
    write(tmp_path, "throughput_llama-2-7b_bf16_kv-int8-g8-20261120-h100", rows=[steps()])
    decode = decode_series(read(tmp_path))
    floor, ours, vllm = decode["bf16"]
    assert (floor.ms, ours.ms, vllm.ms, vllm.ours) == ({16: 3.2}, {16: 4.0}, {16: 5}, {16: 4.0})
    assert decode["bf16, int8-g8 KV"][2].ms == {16: pytest.approx(7.0 * 4800 / 4800, rel=0.5)}
    text = page(read(tmp_path))
    assert "decode steps on one H100 are in bf16 1.25 to 1.25 times as fast as vLLM's." in text
    assert "| 16 | 3.20 | 4.00 | 5.00 |" in text
    assert ") | 80% | 90% | 70% |" in text, "shares are those of the file"
    assert "Steps of vLLM were timed in running engines." in text
    timed = {"engine_ms": 4.5, "engine_fraction": 0.71}
    write(tmp_path, "throughput_llama-2-7b_bf16_kv-bf16-20261120-h100", rows=[rows[0] | timed, *rows[1:]])
    assert "| 16 | 3.20 | 4.00 |" in page(read(tmp_path)), "engines' steps stand there for all formats or none"
    write(tmp_path, "throughput_llama-2-7b_bf16_kv-int8-g8-20261120-h100", rows=[steps(engine_ms=4.4)])
    text = page(read(tmp_path))
    assert "| 16 | 3.20 | 4.50 | 5.00 |" in text
    assert "Steps of jllm and vLLM were timed in running engines." in text
    assert ", H100](results/throughput_llama-2-7b_bf16_kv-bf16-20261120-h100.json) | 71% | 90% | 70% |" in text


def test_an_h200s_steps_are_shown_once_its_engines_were_timed_in_all_formats(tmp_path):
    formats = ("bf16_kv-bf16", "bf16_kv-int8-g8", "w8a8_kv-int8-g8")
    for name in formats:
        write(tmp_path, f"throughput_llama-2-7b_{name}-20261120-h100", rows=[steps()])
    torch = {"peer": "torch.compile and CUDA graphs", "weights": "bf16", "batch": 16, "input": 8, "decode_ms": 5.0}
    write(tmp_path, "throughput_llama-2-7b_bf16_kv-bf16-torch-20261120-h100", rows=[steps(), torch])
    for i, name in enumerate(formats):
        assert "## Decode steps, H100" in page(read(tmp_path))
        rows = [steps(engine_ms=2.5 + i, engine_fraction=0.75)]
        write(tmp_path, f"throughput_llama-2-7b_{name}-20261120-h200", device="NVIDIA H200", rows=rows)
    text = page(read(tmp_path))
    assert "## Decode steps, H200" in text
    assert "| 16 | 3.20 | 2.50 |" in text
    assert "variant counts. Steps of jllm and vLLM were timed in running engines." in text
    assert "On one H100 PyTorch's steps take 1.25 to 1.25 times as long as ours ([file](results/" in text
    assert text.count("kv-bf16-20261120-h200.json) | 75% |") == 1
    assert "kv-bf16-20261120-h100.json) |" not in text, "each model has one row"


def test_a_picture_holds_a_peer_against_the_steps_of_its_own_job(tmp_path):
    pytest.importorskip("matplotlib")
    write(tmp_path, "throughput_llama-2-7b_bf16_kv-bf16-20261120-h100", rows=[steps(batch=32)])
    torch = {"peer": "torch.compile and CUDA graphs", "weights": "bf16", "batch": 32, "input": 8, "decode_ms": 10.0}
    rows = [steps(batch=32, decode_ms=8.0), torch]
    write(tmp_path, "throughput_llama-2-7b_bf16_kv-bf16-torch-20261120-h100", rows=rows)
    (drawn,) = pictures.draw_all(read(tmp_path), tmp_path)
    assert re.findall(r">([\d.]+x)</text>", drawn.read_text(encoding="utf-8")) == ["1.25x"]


def test_requests_have_their_interval_and_are_those_of_the_job_with_most_runs(tmp_path):
    row = {"scheme": "bfloat16", "kv": "bfloat16", "rate": None, "start_s": 52.1, "loaded": 0}
    runs = [row | {"repeat": i, "qps": qps} for i, qps in enumerate((26.0, 32.0))]
    mean = row | {"repeat": "mean", "qps": 29.0, "qps_ci": 2.5}
    triton = row | {"repeat": 0, "qps": 20.0, "backend": "triton"}
    arrivals = row | {"repeat": 0, "qps": 5.0, "rate": 5.0}
    vllm = [{"peer": "vLLM", "weights": "bf16", "kv": "bf16", "qps": qps} for qps in (24.0, 24.2)]
    cut = {"peer": "transformers' continuous batching", "qps": 99.0, "cut_off": True}
    vllm += [vllm[0] | {"qps": 5.0, "rate": 5.0}, vllm[0] | {"qps": 19.0, "rate": None, "settings": "x=1"}]
    write(tmp_path, "qps_llama-2-7b_bfloat16-20261120-h100", rows=[*runs, mean, triton, arrivals, *vllm, cut])
    write(tmp_path, "qps_llama-2-7b_x-20261121-h100", date="2026-11-21", rows=[runs[0] | {"qps": 50.0}])
    found = requests_rows(read(tmp_path))
    assert [(row["name"], row["qps"], row["runs"]) for row in found] == [
        ("jllm bf16, KV bf16", 29.0, 2), ("vLLM bf16, KV bf16", 24.1, 2), ("jllm bf16, KV bf16, triton", 20.0, 1),
        ("vLLM bf16, KV bf16, x=1", 19.0, 1),
    ]  # fmt: skip
    text = page(read(tmp_path))
    assert "| LLaMA-2-7B, H100 | bf16 | 29.0 | 24.1 | +20% | 52 |  | [2 runs](results/qps_llama-2-7b_b" in text
    assert "LLaMA-2-7B, requests a second on one H100: jllm bf16 29.0 vs. vLLM 24.1 (+20%)." in text
    assert "[vLLM bf16, KV bf16, x=1](" in text
    assert "triton](" not in text, "told among what is behind"
    write(tmp_path, "qps_llama-2-7b_bfloat16-20261120-h100", rows=[*runs, mean | {"qps_ci": 9.0}, *vllm])
    assert "vLLM 24.1 (equal within noise)." in page(read(tmp_path))
    faster = [row | {"qps": 2 * row["qps"]} for row in vllm]
    write(tmp_path, "qps_llama-2-7b_bfloat16-20261120-h100", rows=[*runs, mean, *faster])
    assert "vLLM 48.2 (-40%)." in page(read(tmp_path)), "a peer that is ahead is no noise"


def test_another_model_and_a_steady_load_have_rows_of_their_own(tmp_path):
    row = {"scheme": "w8a8", "kv": "int8-g8", "rate": None, "repeat": 0, "start_s": 3.0, "loaded": 17}
    peer = {"peer": "vLLM", "weights": "fp8", "kv": "fp8", "rate": None, "repeat": 0, "start_s": 99.6}
    name = "qps_llama-3.1-8b_w8a8_kv-int8-g8"
    rows = [peer | {"qps": 48.0}, row | {"qps": 72.0}]
    write(tmp_path, f"{name}-20261120-h200", device="NVIDIA H200", rows=rows)
    times = {"rate": 30.0, "ttft_ms_p50": 41.2, "ttft_ms_p99": 95.8, "itl_ms_p50": 12.6, "itl_ms_p99": 33.0}
    times |= {"good_share": 1.0}
    steady = [peer | times | {"good_share": share} for share in (0.4, 0.6)]
    steady += [row | times | {"good_share": 0.8}, row | times | {"repeat": "mean"}]
    steady += [peer | {"peer": "transformers' continuous batching", "rate": 30.0, "ttft_ms_p50": 9.0}]
    write(tmp_path, f"{name}_rate30-20261120-h200", device="NVIDIA H200", rows=steady)
    text = page(read(tmp_path))
    assert "| LLaMA-3.1-8B, H200 | w8a8 | 72.0 | 48.0 | +50% |  | 100 | [1 run](" in text, "a start from files is none"
    for said, share in (("vLLM fp8, KV fp8", "50%"), ("jllm w8a8, KV int8-g8", "100%")):
        assert f"| {said}, LLaMA-3.1-8B, H200 | 30 | 41, 96 | 13, 33 | {share} | [file](" in text
    assert "transformers" not in text, "it has no times between tokens"


def test_requests_that_no_job_served_beside_vllm_are_held_against_nothing(tmp_path):
    row = {"scheme": "bfloat16", "kv": "bfloat16", "rate": None, "repeat": 0, "qps": 50.0}
    vllm = {"peer": "vLLM", "weights": "bf16", "kv": "bf16", "qps": 40.0}
    name = "qps_llama-3.1-8b_bfloat16"
    write(tmp_path, f"{name}-vllm-20261120-h200", device="NVIDIA H200", rows=[vllm])
    text = page(read(tmp_path))
    assert "LLaMA-3.1-8B: [vLLM bf16, KV bf16](" in text
    assert "20261120-h200.json): 40.0 (H200, one run)." in text
    assert "summary-requests.svg" not in text, "the picture is of another model"
    write(tmp_path, f"{name}-20261120-h200", device="NVIDIA H200", rows=[row])
    write(tmp_path, f"{name}_static-20261120-h200", device="NVIDIA H200", rows=[row | {"batching": "static"}] * 2)
    text = page(read(tmp_path))
    assert "| LLaMA-3.1-8B, H200 | bf16 | 50.0 |  |  |  |  | [1 run](" in text
    assert text.index("LLaMA-3.1-8B: [") < text.index("[jllm bf16, KV bf16, static](")
    assert "[vLLM bf16, KV bf16](" in text
    assert "vs. vLLM" not in text


def test_a_system_is_held_against_the_other_of_its_own_job(tmp_path):
    row = {"scheme": "bfloat16", "kv": "bfloat16", "rate": None}
    runs = [row | {"repeat": i, "qps": qps} for i, qps in enumerate((30.0, 32.0))]
    write(tmp_path, "qps_llama-2-7b_bfloat16-20261120-h100", rows=runs)
    beside = [row | {"repeat": 0, "qps": 20.0}, row | {"repeat": 0, "qps": 18.0, "backend": "triton"}]
    write(tmp_path, "qps_llama-2-7b_bfloat16-triton-20261120-h100", rows=beside)
    four = [row | {"repeat": 0, "qps": 10.0, "replicas": 1}, row | {"repeat": 0, "qps": 25.0, "replicas": 4}]
    write(tmp_path, "qps_llama-2-7b_bfloat16_replicas1-4-20261120-h200", device="NVIDIA H200", rows=four)
    text = page(read(tmp_path))
    assert "Triton's kernels serve 90% of the requests" in text
    assert "Four engines in one process serve 2.50 times" in text


def test_strips_pair_rows_of_one_case_and_keep_the_range_over_shapes(tmp_path):
    def row(peer: str, k: int, us: float) -> dict:
        return {"kernel": "matmul", "peer": peer, "M": 128, "K": k, "N": 8, "us": us, "gb_s": int(us)}

    rows = [row("mosaic", 1, 10.0), row("xla", 1, 12.0), row("mosaic", 2, 10.0), row("xla", 2, 9.0)]
    write(tmp_path, "matmul-many-20261120-h100", experiment="matmul", rows=[*rows, row("xla", 3, 5.0)])
    (strip,) = strips(read(tmp_path))
    assert (strip.kernel, strip.peer, strip.cells) == ("bf16 product, by rows", "XLA", {"128": [1.2, 0.9]})
    red, white, green = (pictures.cell_color(times) for times in (0.5, 1.0, 2.0))
    assert (red[0] > red[1], white, green[1] > green[0]) == (True, (1, 1, 1), True)


def test_a_kernel_stands_beside_a_peers_fastest_variant_of_the_same_file(tmp_path):
    pytest.importorskip("matplotlib")
    ours = {"kernel": "decode_attention", "peer": "mosaic", "R": 16, "length": 1024, "H": 32, "K": 8, "kv": "bf16"}
    theirs = [ours | {"peer": "FlashInfer", "variant": v, "us": us, "Q": 1} for v, us in (("tc", 24.0), ("cuda", 30.0))]
    write(tmp_path, "decode_attention-20261120-h100", rows=[ours | {"us": 20.0}, ours | {"us": 25.0, "Q": 4}, *theirs])
    (strip,) = strips(read(tmp_path))
    assert (strip.cells, strip.device) == ({"16 x 1024": [1.2]}, H100)
    assert "FlashInfer's time" not in page(read(tmp_path)), "it is not ahead"
    newer = [row | {"us": row["us"] / 2, "script": "peer_flashinfer.py", "version": "0.7"} for row in theirs]
    write(tmp_path, "decode_attention-20261121-h200", device="NVIDIA H200", rows=[ours | {"us": 15.0}, *newer])
    (strip,) = strips(read(tmp_path))
    assert (strip.cells, strip.device) == ({"16 x 1024": [0.8]}, H200)
    assert "Our decode attention takes up to 1.25 times the time of FlashInfer (one H200)." in page(read(tmp_path))
    (drawn,) = pictures.draw_all(read(tmp_path), tmp_path)
    assert drawn.name == "summary-kernels.svg"
    assert ">0.80</text>" in drawn.read_text(encoding="utf-8")


def test_methods_are_by_bits(tmp_path):
    row = {"model": "plain", "scheme": "nf4", "method": "awq", "bytes_per_weight": 0.5312, "kl": 0.01, "parts": 22}
    q4 = {"scheme": "experiments.gguf_types:q4_k", "method": "round", "bytes_per_weight": 0.5625, "kl": 0.0089}
    rows = [row | q4, row, row | {"method": "gptq", "kl": 0.02}, row | {"model": "stream", "kl": 9}]
    write(tmp_path, "ptq_methods-20261120-cpu", device="cpu", rows=rows)
    assert page(read(tmp_path)).splitlines()[-5:] == [
        "| KL of the bundled model, its own first 22 texts | nf4, 4.25 bits | q4_k, 4.50 bits |",
        "| --- | --- | --- |",
        "| round |  | 0.0089 |",
        "| awq | 0.01 |  |",
        "| gptq | 0.02 |  |",
    ]


def test_parts_of_a_mixture_are_by_bits(tmp_path):
    row = {"part": "mixture", "bits": 2, "kl": 0.123, "kl_95": [0.1, 0.2], "kl_replayed": 0.09, "routes": 0.0512}
    rows = [row | {"module": "experts"}, row | {"module": "router"}]
    rows += [each | {"bits": 4, "kl": 0.001, "routes": 0.0} for each in rows]
    write(tmp_path, "quant_accuracy_mixture_oz-20261120-cpu", device="cpu", rows=rows)
    assert page(read(tmp_path)).splitlines()[-1] == (
        "Of a small mixture one part alone has 4 and then 2 bits "
        "([all bits](results/quant_accuracy_mixture_oz-20261120-cpu.json)). "
        "Experts: KL 0.001 [0.1, 0.2] and 0.12 [0.1, 0.2], changed routes 0.0 % and 5.1 %. "
        "Router: KL 0.001 [0.1, 0.2] and 0.12 [0.1, 0.2], changed routes 0.0 % and 5.1 %."
    )


def test_promises_have_a_row_each(tmp_path):
    step = {"cost": "determinism", "model": "llama-2-7b", "batch": 64, "context": 1024, "added": 0.051}
    rows = [step | {"kind": "decode", "kv": kv} for kv in ("model", "int8-g8")]
    rows.append(step | {"kind": "scored", "kv": "model"})
    updates = [{"cost": "update", "model": "llama-2-7b"} | each for each in ({"update_ms": 0.91}, {"wake_ms": 133.7})]
    long = [step | {"model": "llama-3.1-8b", "kind": "long", "kv": "model", "batch": 1, "context": 8192}]
    steered = [{"cost": "steering", "batch": 256, "added": 0.004}]
    trained = {"cost": "training", "model": "llama-3.2-1b", "trained_tokens_s": 44036, "drawn_tokens_s": 43338}
    trained |= {"between_ms": 14.4, "peak_gb": 35.36}
    adapters = {"step": "decode", "requests": 64, "rank": 16, "added": 0.1, "bytes": 1.44, "backend": "default"}
    steps = [adapters | {"adapters": use} for use in ("none", "one", "each")]
    costs = {"engine_costs": steered, "engine_costs-7b": rows, "engine_costs-8b": long}
    costs |= {"engine_costs-update": updates, "engine_costs-training": [trained]}
    for name, of in (costs | {"adapter_steps": steps}).items():
        about = {"command": "python -m x --layers 8", "complete": name != "engine_costs-8b"}
        write(tmp_path, f"{name}-20261120-h200", device="NVIDIA H200", rows=of, **about)
    share = [{"batch": batch, "floor_fraction": 0.75} for batch in (1, 32)]
    for name in ("qwen3-30b", "gpt-oss-20b"):
        write(tmp_path, f"decode_step-{name}-20261120-h200", device="NVIDIA H200", rows=share)
    lines = [line.split(" | ") for line in page(read(tmp_path)).splitlines() if "(results/" in line]
    names, cells, files = zip(*lines)
    assert names[2] == "| adapters and steering by request"
    assert "[file](results/engine_costs-7b-2" in files[0]
    assert "[part of a run](results/engine_costs-8b-" in files[0]
    assert [*cells] == [
        "llama-2-7b: 64 decodes at 1,024 tokens +5.1 %, 64 decodes at 1,024 tokens in int8-g8 +5.1 %, "
        "scoring prompts +5.1 %; llama-3.1-8b: one at 8,192 +5.1 %",
        "llama-2-7b: an update 0.91 ms, waking 134 ms; llama-3.2-1b with Adam in float32: "
        "44,036 tokens a second trained, 43,338 sampled, 14 ms to switch, 35 GB at the peak",
        "adapters on all linear layers, a model of 8 layers: 64 decodes, rank 16, one for all +10.0 %, "
        "64 decodes, rank 16, each its own +10.0 % (1.4 times its bytes); "
        "steering 256 requests, each by its own vector +0.4 %",
        "Qwen3-30B-A3B 75% at batch 1, 75% at batch 32; gpt-oss-20b in mxfp4 75% at batch 1, 75% at batch 32",
    ]


def test_accuracy_is_by_bytes(tmp_path):
    pytest.importorskip("matplotlib")
    row = {"part": "scheme", "kv": "model", "kl": 0.00061, "added": 0.0006, "added_95": [-0.0001, 0.0012]}
    row |= {"bytes_per_weight": 1.0125, "bytes_per_kv": 2.0, "protocol": "document"}
    kv = row | {"scheme": "bf16", "kv": "int8-g8", "added": -0.00001, "bytes_per_kv": 1.25}
    parts = {"part_tokens": [9, 9], "part_nats": [9.0, 9.0], "part_reference_nats": [9.0, 9.0], "part_same": [9, 9]}
    row |= parts | {"context": 8, "stride": 8, "parts": 2, "part_kl": [0.9, 1.8]}
    finer = row | {"scheme": "mine:q6_k", "part_kl": [1.8, 1.8]}
    rows = [row | {"scheme": "w8a8"}, finer, row | {"scheme": "other"}, kv]
    write(tmp_path, "quant_accuracy-20261120-cpu", device="cpu", rows=rows)
    write(tmp_path, "quant_accuracy_oz-20261120-cpu", device="cpu", rows=[row | {"scheme": "w8a8", "kl": 0.2}])
    text = page(read(tmp_path))
    (drawn,) = pictures.draw_all(read(tmp_path), tmp_path)
    for shown in ("bytes a weight", "bytes a value of K or V", "w8a8"):
        assert shown in drawn.read_text(encoding="utf-8")
    measured = "0.00061 | +0.06 [-0.01, +0.12]"
    assert f"| weights w8a8 | 1.012 | {measured} |  | 0.2 | +0.06 [-0.01, +0.12] |  |" in text
    assert f"| weights q6_k | 1.012 | {measured} | +0.05 [+0, +0.1] |  |  |  |" in text
    assert "| KV int8-g8 | 1.250 |" in text
    assert "other" not in text
    assert "Perplexity changes by +0.00 % with K and V in `int8-g8`, +0.06 % with `w8a8`." in text


# Claims


def claims_of(directory) -> list[str]:
    return re.findall(r"^\| (\[C.*) \|$", page(read(directory)), re.MULTILINE)


def test_claims_have_the_verdicts_that_their_files_carry(tmp_path):
    write(tmp_path, "claims-C10-20261120-h100", experiment="claims-C10", verdict=VERDICT | {"direction": "no"})
    write(tmp_path, "claims-C2-20261120-h100", experiment="claims-C2", verdict=VERDICT)
    write(tmp_path, "claims-C3-20261120-h100", experiment="claims-C3", rows=[{"verdict": "partly"}])
    second, third, tenth = claims_of(tmp_path)
    assert second.endswith("| more | +100 % | +26 % | yes | no | It serves 26 % more.")
    assert second.startswith("[C2](results/claims-C2-20261120-h100.json) |")
    assert third.endswith("|  | Its file has no verdict: run `python -m experiments.claims C3`.")
    assert "| no | no |" in tenth


def test_another_device_or_model_has_a_row_where_its_answer_differs(tmp_path):
    write(tmp_path, "claims-C1-20261121-h100", experiment="claims-C1", date="2026-11-21", verdict=VERDICT)
    write(tmp_path, "claims-C1-20261120-h200", experiment="claims-C1", device="NVIDIA H200", verdict=VERDICT)
    assert len(claims_of(tmp_path)) == 1
    other = VERDICT | {"size": "yes"}
    write(tmp_path, "claims-C1-20261120-h200", experiment="claims-C1", device="NVIDIA H200", verdict=other)
    write(tmp_path, "claims-C1-subject-20261127-h100", experiment="claims-C1-subject", date="2026-11-27",
          verdict=VERDICT | {"size": "more"})  # fmt: skip
    found = claims_of(tmp_path)
    assert [row.partition(" |")[0].rpartition(", ")[2] for row in found] == ["H100", "H200", "a larger model"]


def test_what_was_measured_answers_before_what_is_simulated_or_was_cut_off(tmp_path):
    rows = [{"source": "simulated"}]
    other = {"verdict": VERDICT | {"direction": "no"}, "device": "cpu", "date": "2026-11-27"}
    write(tmp_path, "claims-C1-20261120-h100", experiment="claims-C1", complete=False)
    write(tmp_path, "claims-C1-20261127-cpu", experiment="claims-C1", rows=rows, **other)
    assert ["-cpu" in row for row in claims_of(tmp_path)] == [True]
    write(tmp_path, "claims-C1-20261120-h100", experiment="claims-C1", verdict=VERDICT)
    assert ["-h100" in row for row in claims_of(tmp_path)] == [True]
