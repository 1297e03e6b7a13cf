"""experiments/RESULTS.md, the page in short: steps beside floors and peers, bars, claims; and what is behind."""

import re

import pytest

from experiments import measure_all
from experiments.campaign import TOPICS
from experiments.report import behind, overview, pictures
from experiments.report.asked import ASKED
from experiments.report.commands import parses
from experiments.report.documents import read_all
from experiments.report.figures import Results
from experiments.report.strips import compared, strips
from experiments.steps.devices import ceilings_of
from tests.test_results_page import page, short, write


def what_is_behind(directory) -> str:
    return behind.page(Results(read_all(directory)))


def test_steps_stand_beside_their_floor_and_peers_of_as_many_bits(tmp_path):
    row = {"batch": 32, "input": 8, "decode_ms": 4.0, "decode_floor_ms": 3.2, "h800_decode_ms": 7.0}
    row |= {"model": "m", "scheme": "s", "kv": "k", "floor_fraction": 0.8, "prefill_floor_fraction": 0.7}
    for name in ("bf16_kv-bf16", "bf16_kv-int8-g8", "w8a8_kv-int8-g8"):
        rows = [row, row | {"input": 1024, "decode_ms": 9.0, "floor_fraction": 0.9}]
        if name == "bf16_kv-bf16":  # two variants, of which the faster counts
            peer = {"peer": "torch.compile and CUDA graphs", "batch": 32}
            rows += [peer | {"decode_ms": ms} for ms in (5.5, 5.0, 6.0)]
        write(tmp_path, f"throughput_llama-2-7b_{name}-20261120-h200", experiment=name, rows=rows)
    text = short(tmp_path)
    assert "**jllm bf16**: 1.25 to 1.25 times its floor; PyTorch takes 1.25 to 1.25 times as long; vLLM*" in text
    assert text.count(" | 80% to 80% | 90% to 90% | 70% to 70% |") == 3
    scaled = 7.0 * 3350 / 4800
    assert f"| 32 | 3.20 | 4.00 | 5.00 | 5.76 | 3.20 | 4.00 | {scaled:.2f} | 3.20 | 4.00 | 5.09 |" in text
    assert "vLLM*: [peers_h200](workloads/peers_h200.json)" in text
    vllm = {"peer": "vLLM", "weights": "bf16", "batch": 32, "input": 8}
    write(tmp_path, "qps_llama-2-7b_x-20261120-h200", experiment="x", rows=[vllm | {"decode_ms": 7.0}])
    assert "| 32 | 3.20 | 4.00 | 5.00 | 7.00 |" in (text := short(tmp_path))
    assert "vLLM*: [qps_llama-2-7b_x-20261120-h200](" in text  # of a job that timed no steps of ours
    write(tmp_path, "throughput_llama-2-7b_y-20261119-h200", experiment="y", rows=[vllm | {"decode_ms": 6.5}])
    assert "| 32 | 3.20 | 4.00 | 5.00 | 6.50 |" in (text := short(tmp_path))
    assert "; vLLM: [throughput_llama-2-7b_y-20261119-h200](" in text


def test_requests_a_second_have_their_interval_and_peers_say_that_they_ran_elsewhere(tmp_path):
    row = {"scheme": "bfloat16", "kv": "bfloat16", "rate": None}
    rows = [row | {"repeat": i, "qps": qps} for i, qps in enumerate((30.0, 32.0))]
    mean = row | {"repeat": "mean", "qps": 31.0, "qps_ci": 2.5, "floor_fraction": 0.8}
    cut = {"peer": "transformers' continuous batching", "qps": 99.0, "cut_off": True}
    write(tmp_path, "qps_llama-2-7b_bfloat16-20261120-h200", rows=[*rows, mean, cut])
    text = short(tmp_path)
    assert "| jllm bf16, KV bf16 | 31.0 | ± 2.5 | 80% | [2 runs](results/qps_llama-2-7b_bfloat16" in text
    assert re.search(r"\| vLLM\* bf16, KV bf16 \| 30\.1 \|  \|  \| \[another run\]", text)
    assert "99.0" not in text
    served = [{"peer": "vLLM", "weights": "bf16", "kv": "bf16", "requests": 1024, "qps": qps} for qps in (28.0, 29.0)]
    write(tmp_path, "qps_llama-2-7b_bfloat16-20261121-h200", rows=[*rows, *served], date="2026-11-21")
    text = short(tmp_path)
    assert "| vLLM bf16, KV bf16 | 28.5 | ± 6.4 |  | [2 runs](results/qps_llama-2-7b_bfloat16-20261121-h200" in text
    assert "vLLM* bf16" not in text
    assert "vLLM* fp8" in text


def test_a_peer_of_the_same_file_stands_in_place_of_pasted_figures(tmp_path):
    ours = {"kernel": "decode_attention", "peer": "mosaic", "R": 16, "length": 1024, "H": 32, "K": 8, "kv": "bf16"}
    rows = [ours | {"us": 20.0}, ours | {"us": 25.0, "Q": 4}]
    write(tmp_path, "decode_attention-20261120-h200", rows=rows)
    (strip,) = strips(Results(read_all(tmp_path)))
    assert (strip.kernel, strip.cells, strip.elsewhere) == ("decode attention, 32/8", {"16 x 1024": [22.6 / 20]}, True)
    theirs = [ours | {"peer": "FlashInfer", "variant": v, "us": us, "Q": 1} for v, us in (("tc", 24.0), ("cuda", 30.0))]
    write(tmp_path, "decode_attention-20261120-h200", rows=[*rows, *theirs])
    (strip,) = strips(Results(read_all(tmp_path)))
    assert (strip.cells, strip.elsewhere) == ({"16 x 1024": [1.2]}, False)
    assert "FlashInfer, tc | FlashInfer, cuda |" in page(tmp_path, "kernels")


def test_kernels_stand_beside_peers_on_each_device_that_has_both(tmp_path):
    pytest.importorskip("matplotlib")
    h100, heads = "NVIDIA H100 80GB HBM3", {"H": 32, "K": 32, "kv": "bf16"}
    ours = {"kernel": "decode_attention", "peer": "mosaic", "R": 1, "length": 1024, **heads, "us": 10.0}
    prompt = {"kernel": "prefill_attention", "peer": "mosaic", "q_lens": [64], "kv_lens": [64], **heads, "us": 10.0}
    product = {"kernel": "scaled_matmul", "M": 16, "K": 4096, "N": 4096, "us": 10.0}

    def measured(name: str, day: int, *rows: dict) -> None:
        found = {"experiment": name, "date": f"2026-11-{day}", "rows": [*rows]}
        write(tmp_path, f"{name}-202611{day}-h100-80gb-hbm3", device=h100, **found)

    write(tmp_path, "decode_attention-20261120-h200", rows=[ours])
    measured("decode_attention", 20, ours)
    everything = Results(read_all(tmp_path))
    assert compared(everything) == ["NVIDIA H200"], "another device's pasted figures say nothing of this one"
    measured("decode_attention", 25, ours, ours | {"peer": "FlashInfer", "variant": "tc", "us": 12.0})
    measured("decode_attention-narrow", 26, ours | {"us": 5.0})
    cudnn = prompt | {"peer": "cudnn", "us": 9.0}
    measured("prefill_attention", 25, prompt, cudnn, prompt | {"peer": "FlashInfer", "variant": "fa3", "us": 11.0})
    for name, times in (("int8_matmul", 13.0), ("fp8_matmul", 14.0)):
        torch = product | {"peer": "torch fp8", "variant": "a scale a row", "us": times}
        measured(name, 25, torch, product | {"peer": name, "dtype": "int8"})
    everything = Results(read_all(tmp_path))
    assert compared(everything) == [h100, "NVIDIA H200"]
    found = strips(everything.on(h100))
    assert not any(strip.elsewhere for strip in found)
    assert {(strip.kernel, strip.peer): strip.cells for strip in found} == {
        ("decode attention, 32/32", "FlashInfer"): {"1 x 1024": [1.2]},
        ("prefill attention", "FlashInfer"): {"1x64": [1.1]},
        ("prefill attention", "cuDNN"): {"1x64": [0.9]},
        ("int8 product, by rows", "torch fp8"): {"16": [1.3]},
        ("fp8 product, by rows", "torch fp8"): {"16": [1.4]},
    }
    drawn = {path.stem: path.read_text(encoding="utf-8") for path in pictures.draw_all(everything, tmp_path)}
    shown = re.findall(r"!\[Kernels against peers, .*\]\(results/(.*)\.svg\)", short(tmp_path))
    assert shown == ["summary-kernels-h100-80gb-hbm3", "summary-kernels-h200"] == [*drawn]
    assert "Kernels on one H100 80GB HBM3" in drawn[shown[0]]
    assert ">1.20</text>" in drawn[shown[0]]


def test_strips_pair_rows_of_one_case_and_keep_the_range_over_shapes(tmp_path):
    def row(peer: str, k: int, us: float) -> dict:
        return {"kernel": "matmul", "peer": peer, "M": 128, "K": k, "N": 8, "us": us, "gb_s": int(us)}

    rows = [row("mosaic", 1, 10.0), row("xla", 1, 12.0), row("mosaic", 2, 10.0), row("xla", 2, 9.0)]
    write(tmp_path, "matmul-many-20261120-h200", experiment="matmul", rows=[*rows, row("xla", 3, 5.0)])
    (strip,) = strips(Results(read_all(tmp_path)))
    assert (strip.kernel, strip.peer, strip.cells) == ("bf16 product, by rows", "XLA", {"128": [1.2, 0.9]})
    red, white, green = (pictures.cell_color(times) for times in (0.5, 1.0, 2.0))
    assert (red[0] > red[1], white, green[1] > green[0]) == (True, (1, 1, 1), True)


def test_bars_show_the_farthest_behind_of_the_newest_files(tmp_path):
    def bars(first: float, second: float) -> list[dict]:
        asked = {"unit": "us", "bar": 60.0}, {"unit": "us", "bar": 450.0}
        found = zip((1, 512), (first, second), asked)
        return [
            {"name": f"R={r} V=128256 top-k, top-p", "value": us, **each, "met": us <= each["bar"]}
            for r, us, each in found
        ]

    write(tmp_path, "sample-old-20261120-h200", experiment="sample-old", bars=bars(900.0, 900.0))
    write(tmp_path, "sample-20261122-h200", date="2026-11-22", experiment="sample", bars=bars(40.0, 500.0))
    text = short(tmp_path)
    assert re.search(r"\| drawing one of 128,256 tokens \| .* \| 1 of 2 \| 500 us for 450 \| \[sample\]\(", text)
    assert "Further results that miss bars of their own: 1; " in text
    assert re.search(r"^- \[sample-old\]\([^)]*\): 2 of 2$", what_is_behind(tmp_path), re.M)
    write(tmp_path, "sample-20261122-h200", date="2026-11-22", experiment="sample", bars=bars(40.0, 400.0))
    assert "| 2 of 2 | 400 us for 450 |" in short(tmp_path)


def test_stale_files_say_why(tmp_path):
    bench = "python -m pallas_kernels.sample.bench"
    write(tmp_path, "norm_quant-20261122-h200", experiment="norm_quant", command="a sweep")
    write(tmp_path, "qps_x-20261120-h200", experiment="qps_x", command="python -m experiments.qps --gone 1")
    write(tmp_path, "gone-20261122-h200", experiment="gone", command="python -m experiments.gone")
    write(tmp_path, "sample-20261122-h200", experiment="sample", command=bench)
    write(tmp_path, "sample-a-20261122-h200", experiment="sample-a", command=f"{bench} --label a", commit="12ab+")
    write(tmp_path, "sample-b-20261122-h200", experiment="sample-b", command=f"{bench} --label b", commit="12ab")
    write(
        tmp_path, "claims-C5-20261122-h200", experiment="claims-C5", command="python -m experiments.claims C5 C6",
        commit="12ab", complete=False,
    )  # fmt: skip
    assert "; stale ones, which cannot be traced to a commit or made again by the command that they name: 6. " in short(
        tmp_path
    )
    text = what_is_behind(tmp_path)
    for reason, label in (
        ("no command: a sweep while the kernel was built", "norm_quant"),
        ("its command is refused today", "qps_x"),
        ("experiments.gone is gone", "gone"),
        ("measured before commits were recorded", "sample"),
        ("measured with changes that its commit does not have", "sample-a"),
        ("cut off before its end", "claims-C5"),
    ):
        assert re.search(rf"^- {reason}: \[{label}\]\(\w+.md#[^)]*\)$", text, re.M), reason
    again = "`measure_all --only C5 sample norm_quant` measures them again, but for gone, qps_x, sample-a:"
    assert set(re.findall(r"[\w-]+", again)) == set(
        re.findall(r"[\w-]+", re.search(r"`measure_all --only .*:$", text, re.M)[0])
    )
    assert "sample-b" not in text[text.index("## What is stale") :]


def test_what_takes_two_gpus_is_measured_again_by_a_command_of_its_own(tmp_path):
    two = "python -m experiments.decode_step --label two --devices 2 1"
    write(tmp_path, "decode_step-two-20261124-h100", experiment="decode_step-two", command=two)
    write(tmp_path, "sample-20261122-h200", experiment="sample", command="python -m pallas_kernels.sample.bench")
    again = re.search(r"On a GPU (`.*) measure them again:$", what_is_behind(tmp_path), re.M)
    assert again is not None
    assert again[1] == "`measure_all --only sample` and `measure_all --only two --gpus 2`"
    for command in again[1].split(" and "):
        options = [*command.strip("`").split()[1:], "--seconds", "0.001", "--results", str(tmp_path)]
        assert measure_all.main(options) == 1


def test_bars_without_a_figure_are_named_with_the_line_that_measures_them(tmp_path):
    lines = {line for asked in ASKED for line in asked.lines.split()}
    assert lines <= {command.name for commands in TOPICS.values() for command in commands}
    row = {"model": "llama-2-7b", "batch": 1, "kv": "bfloat16", "backend": "default", "devices": 2, "decode_ms": 9.0}
    command = "python -m experiments.decode_step --label two"
    step = {"experiment": "decode_step-two", "command": command, "complete": False, "rows": [row]}
    write(tmp_path, "decode_step-two-20261124-h100", device="NVIDIA H100", **step)
    assert "; LLaMA-2-7B on two H200s, bf16 (2.6 ms at batch 1, 3.7 at 64: `two`); LLaMA-2-70B" in short(tmp_path)
    write(tmp_path, "decode_step-two-20261124-h200", **step)
    assert "| LLaMA-2-7B on two H200s, bf16 | 2.6 ms at batch 1, 3.7 at 64 | 0 of 1 | 9 ms for 2.6 |" in short(tmp_path)


def test_every_bar_that_is_asked_for_has_a_rule():
    """The committed files have bars of its names, or another test judges rows that would."""
    entries = read_all()
    without = {asked.what for asked in ASKED if not asked.found(entries)}
    assert without <= {
        "decode attention, bf16", "prefill attention", "8-bit products", "QPS workload in `w8a8`, over vLLM's in fp8",
        "QPS workload, Triton's kernels over Mosaic's", "LLaMA-2-7B on two H200s, bf16",
        "LLaMA-2-70B on two GPUs, bf16",
    }  # fmt: skip


def test_what_rotating_adds_is_judged_by_two_files_of_one_run(tmp_path):
    def step(kv: str, ms: float, commit: str = "ab") -> None:
        row = {"model": "m", "batch": 64, "kv": kv, "backend": "mosaic", "decode_ms": ms}
        command = f"python -m experiments.decode_step --kv-cache {kv} --label {kv}"
        write(tmp_path, f"decode_step-{kv}-20261120-h200", experiment=f"decode_step-{kv}", command=command,
              rows=[row], commit=commit)  # fmt: skip

    step("int4-g32", 5.0), step("int4-g32-h", 5.2)
    assert "| 0 of 1 | 1.04 times for 1.03 | [decode_step-int4-g32-h]" in short(tmp_path)
    step("int4-g32-h", 5.1)
    assert "| 1 of 1 | 1.02 times for 1.03 |" in short(tmp_path)
    step("int4-g32-h", 5.1, commit="cd")
    assert "rotating K and V in `int4-g32-h` (1.03 of a decode step without: `unrotated`, `rotated`)" in short(tmp_path)


def test_other_gpus_have_bars_of_their_own_ceilings_and_none_of_an_h200s(tmp_path):
    """A share of the floor is by the device that ran; milliseconds are an H200's."""
    row = {"model": "llama-2-7b", "batch": 1, "kv": "bfloat16", "backend": "default", "decode_ms": 4.0}
    row |= {"floor_ms": 2.0, "floor_fraction": 0.5}
    step = {"experiment": "decode_step", "command": "python -m experiments.decode_step", "rows": [row]}
    four = {"scheme": "w4a16-g128", "batch": 1, "kv": "bf16", "decode_ms": 1.7}
    scheme = {"experiment": "quant_steps", "command": "python -m experiments.quant_steps", "rows": [four]}
    for name, device in (("h200", "NVIDIA H200"), ("h100", "NVIDIA H100 80GB HBM3")):
        write(tmp_path, f"decode_step-20261120-{name}", device=device, complete=False, **step)
        write(tmp_path, f"quant_steps-20261120-{name}", device=device, complete=False, **scheme)
    entries = read_all(tmp_path)
    found = {(entry.device, bar["unit"]): bar["value"] for entry in entries for bar in entry.document["bars"]}
    h200, h100 = found["NVIDIA H200", "1"], found["NVIDIA H100 80GB HBM3", "1"]
    assert h100 / h200 == pytest.approx(4.55e12 / ceilings_of("NVIDIA H100 80GB HBM3").bandwidth, rel=0.01)
    assert found["NVIDIA H200", "ms"] == 1.7
    assert ("NVIDIA H100 80GB HBM3", "ms") not in found
    text = page(tmp_path)
    assert "those of today, not the file's own: 4.55 TB/s, 813 TFLOP/s (1,673 in 8 bits) and 652 TFLOP/s" in text
    assert f"not the file's own: {ceilings_of('NVIDIA H100 80GB HBM3').rates}" in text


def test_options_of_peers_count_for_no_refusal():
    assert parses("python -m experiments.throughput --scheme bf16 --peers ../gone --peer-seconds 110")
    assert parses("python -m experiments.qps --peer-names transformers vllm --repeats 2 --peer-seconds=50")
    assert not parses("python -m experiments.qps --peer-names vllm --repeats two")
    assert not parses("python -m experiments.throughput --gone")
    assert parses("python -m experiments.claims C1 C3")
    assert parses("python -m experiments.train_needle")  # which wants an --out


def test_long_figures_of_a_claim_end_at_a_part():
    assert overview.shortened("short; whole") == "short; whole."
    assert overview.shortened("first; " + "x, " * 100) == "first; " + ", ".join("x" * 47) + " …"
