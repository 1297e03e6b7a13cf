"""Figures of two devices on the pages of results: each with its own ceilings, peers and heading, never mixed."""

import re

import pytest

from experiments.report import by_device, pictures
from experiments.report.documents import read_all
from experiments.report.figures import Results, devices
from experiments.report.overview import overview
from experiments.steps.devices import ceilings_of
from tests.test_results_page import write

H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
STEP = {"model": "llama-2-7b", "scheme": "bf16", "kv": "bf16", "input": 8, "output": 256, "prefill_ms": 9.0}
STEP |= {"decode_floor_ms": 1.0, "floor_fraction": 0.1, "prefill_floor_ms": 1.0, "prefill_floor_fraction": 0.1}
SERVED = {"model": "llama-2-7b", "scheme": "bfloat16", "kv": "bfloat16", "rate": None, "slots": 512, "requests": 1024}
TABLE = "python -m experiments.throughput --scheme bf16 --kv-cache bf16"


@pytest.fixture
def both(tmp_path):
    """An H200's campaign, and two days later an H100's of other batches."""
    for device, day, batches, ms, qps in ((H200, 22, (1, 64), 4.0, 36.25), (H100, 24, (1, 16, 384), 5.0, 25.75)):
        end = f"202611{day}-{device.removeprefix('NVIDIA ').lower().replace(' ', '-')}"
        run = {"device": device, "date": f"2026-11-{day}"}
        steps = [STEP | {"batch": batch, "decode_ms": ms + batch / 100} for batch in batches]
        if device == H100:
            steps[0] |= {"decode_ms_median": 5.01, "decode_ms_most": 5.01 * 1.012}
        peer = {"peer": "vLLM", "weights": "bf16", "kv": "bf16", "input": 8, "output": 256}
        steps += [peer | {"batch": batch, "decode_ms": 1.5 * (ms + batch / 100)} for batch in batches]
        name = "throughput_llama-2-7b_bf16_kv-bf16"  # of a job that had peers: they are no steps of jllm's
        write(tmp_path, f"{name}-{end}", experiment=name, command=TABLE, rows=steps, complete=False, **run)
        served = [SERVED | {"repeat": repeat, "qps": qps, "seconds": 1024 / qps} for repeat in (0, 1, "mean")]
        if device == H100:
            served += [SERVED | {"replicas": 2, "repeat": repeat, "qps": 49.0} for repeat in (0, 1, "mean")]
        else:  # slower, and not what is told in short
            served += [SERVED | {"backend": "triton", "repeat": repeat, "qps": 30.0} for repeat in (0, 1, "mean")]
        served += [{"peer": "vLLM", "weights": "bf16", "kv": "bf16", "repeat": 0, "qps": qps - 4}]
        write(tmp_path, f"qps_llama-2-7b_bfloat16-{end}", experiment="qps_llama-2-7b_bfloat16", rows=served, **run)
    return Results(read_all(tmp_path))


def test_the_newest_device_is_in_full_and_the_other_in_short(both):
    assert devices(both) == [H100, H200]
    text = overview(both)
    assert "## Decode steps, H100 80GB HBM3\n" in text
    assert "## Requests a second, H100 80GB HBM3\n" in text
    full, _, short = text.partition("\nOn one ")
    assert "LLaMA-2-7B on one H100 80GB HBM3" in full
    assert short.startswith("H200 ([all of it](results/devices.md#h200)): **jllm bf16**: ")
    assert "jllm bf16, KV bf16: 36.2 requests a second" in short
    assert "| 5.16 |" in full, "batch 16, as the H100 has no batch 8"
    assert "36.2" not in full, "the H200's"
    assert "others took more, by up to 1.2% in bf16." in full
    assert "| jllm bf16, KV bf16, 2 replicas | 49.0 |" in full
    assert "| jllm bf16, KV bf16 | 25.8 |" in full
    older = [entry for entry in both.entries if entry.device == H200]
    assert "## Decode steps, H200\n" in overview(Results(older)), "by what there is"


def test_of_as_many_runs_those_beside_a_peer_count_then_the_newest(tmp_path):
    """By single runs, whose share of the floor is shown as that of a mean is."""
    peer = {"peer": "vLLM", "weights": "bf16", "kv": "bf16", "repeat": 0, "qps": 21.0}
    for day, label, qps, others in ((23, "", 24.0, []), (24, "", 25.0, [peer]), (25, "-again", 26.0, [])):
        name = f"qps_llama-2-7b_bfloat16{label}"
        served = SERVED | {"repeat": 0, "qps": qps, "seconds": 1024 / qps, "floor_fraction": qps / 100}
        run = {"experiment": name, "device": H100, "date": f"2026-11-{day}"}
        write(tmp_path, f"{name}-202611{day}-h100-80gb-hbm3", rows=[served, *others], **run)
    shown = overview(Results(read_all(tmp_path)))
    assert "| jllm bf16, KV bf16 | 25.0 |  | 25% | [1 run](" in shown
    for file in tmp_path.glob("*20261124*"):
        file.unlink()
    assert "| jllm bf16, KV bf16 | 26.0 |  | 26% | [1 run](" in overview(Results(read_all(tmp_path)))


def test_a_device_has_its_own_floors_and_peers(both):
    text = by_device.page(both)
    parts = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", text, re.M | re.S))
    assert list(parts) == ["H100 80GB HBM3", "H200"]
    for device, qps, mark in ((H100, "25.8", "20261124"), (H200, "36.2", "20261122")):
        part = parts[device.removeprefix("NVIDIA ")]
        assert ceilings_of(device).rates in part
        assert f"| {qps} |" in part
        assert "vLLM takes 1.50 to 1.50 times as long" in part
        assert set(re.findall(r"_kv-\S*?-(202611\d\d)-", part)) == {mark}, "files of that device alone"
        row = re.search(r"^\| 1 \| ([\d.]+) \| ([\d.]+) \|", part, re.M)
        assert row is not None
        floor = 1e3 * 2 * 6.607e9 / ceilings_of(device).bandwidth  # of the weights alone
        assert float(row[1]) == pytest.approx(floor, rel=0.03), "the floor at one sequence"
    assert "another run" not in parts["H100 80GB HBM3"], "peers of an H200 are none of an H100"
    assert "another run" in parts["H200"]
    assert "](results/" not in text, "the page lies in that folder"


def test_a_ratio_is_within_one_job_where_one_timed_both(tmp_path):
    name, run = "throughput_llama-2-7b_bf16_kv-bf16", {"device": H200, "command": TABLE, "complete": False}
    step = STEP | {"batch": 1, "decode_ms": 4.0}
    peer = {"peer": "torch.compile and CUDA graphs", "batch": 1, "input": 8, "decode_ms": 6.0}
    write(tmp_path, f"{name}-20261122-h200", experiment=name, rows=[step], **run)
    job = [step | {"decode_ms": 5.0}, step | {"decode_ms": 9.0, "input": 1024}, peer]
    write(tmp_path, f"{name}-peers-20261123-h200", experiment=f"{name}-peers", rows=job, **run)
    assert "PyTorch takes 1.20 to 1.20 times as long" in by_device.page(Results(read_all(tmp_path)))


def test_each_device_has_a_picture(both, tmp_path):
    pytest.importorskip("matplotlib")
    drawn = {path.name: path.read_text() for path in pictures.draw_all(both, tmp_path)}
    names = [f"summary-steps-{name}.svg" for name in ("h100-80gb-hbm3", "h200")]
    assert list(drawn) == names
    for name, own, other in zip(names, ("H100 80GB HBM3", "H200"), ("H200", "H100 80GB HBM3")):
        assert f"LLaMA-2-7B on one {own}" in drawn[name]
        assert f"on one {other}" not in drawn[name]
        assert name in overview(both) + by_device.page(both)


def test_bars_are_counted_by_device(both):
    """Shares of floors have bars on both; requests a second on an H200 alone."""
    text = overview(both)
    line = next(line for line in text.splitlines() if line.startswith("| LLaMA-2-7B decode steps, bf16"))
    assert "of 3 on H100 80GB HBM3" in line
    assert "of 2 on H200" in line
