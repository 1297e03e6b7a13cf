"""The slides' table of hardware, our estimate beside it, and how far that is from what was measured."""

import json

import pytest

from experiments import hardware
from experiments.steps.cost_model import RESULTS, model_shapes
from experiments.steps.devices import DeviceSheet, Price, device_sheet, device_sheets

PRICE = Price(1.8, "somebody's", "made up", "2026-11-25")
SHEET = DeviceSheet("NVIDIA X", 80, 2000, {"bf16": 300}, "PCIe", 32, "made up", PRICE)


def test_the_slides_rules_by_hand():
    row = hardware.slides_row(SHEET)
    assert row == pytest.approx({
        "slides_requests": 272, "slides_ms": 50.0, "slides_tokens_s": 5440.0,
        "slides_compute_ms": 272 * 22.8 / 300, "slides_mtokens_usd": 5440 * 3600 / 1.8 / 1e6,
    })  # fmt: skip


def test_the_devices_of_the_slides_are_there():
    """Those that the issue names, and which kernels run on each."""
    names = {"v100-pcie-16gb", "l40", "a100-pcie-80gb", "a800-pcie-80gb", "a40", "a2", "h100-sxm", "h200-sxm"}
    sheets = device_sheets()
    assert names <= sheets.keys()
    found = {name: hardware.backend_of(sheet) for name, sheet in sheets.items()}
    assert {name for name, backend in found.items() if backend == "mosaic"} == {
        "h100-pcie", "h100-sxm", "h200-sxm", "h800-sxm", "gh200",
    }  # fmt: skip
    assert {name for name, backend in found.items() if backend == "xla"} == {
        "v100-pcie-16gb", "v100-sxm-32gb", "mi300x",
    }  # fmt: skip


def test_the_largest_batch_fits_and_one_more_does_not():
    model, shares = model_shapes("llama-2-7b"), hardware.shares_by_backend()["triton"]
    row = hardware.estimate_row(SHEET, model, shares, 272)
    weights, each = 2 * 6_738_415_616, 512 * 32 * 2 * 2 * 4096
    assert weights + row["requests"] * each <= 0.9 * 80e9 < weights + (row["requests"] + 1) * each
    assert row["tokens_s"] == pytest.approx(1e3 * row["requests"] / row["step_ms"])
    assert row["mtokens_usd"] == pytest.approx(row["tokens_s"] * 3600 / 1.8 / 1e6)
    assert row["step_ms"] < row["same_ms"] < 2 * row["step_ms"], "the slides' batch is the larger one"
    small = hardware.estimate_row(DeviceSheet("X", 12, 200, {"bf16": 18}, "PCIe", 16, "made up"), model, shares, 1)
    assert (small["requests"], small["tokens_s"], small["mtokens_usd"]) == (0, None, None)


def test_checks_are_of_files_and_no_worse_than_said():
    shares = hardware.shares_by_backend()
    rows = list(hardware.checks(shares))
    assert {(row["device"], row["backend"]) for row in rows} == {
        ("NVIDIA H100 SXM", "mosaic"), *(("NVIDIA H200 SXM", backend) for backend in ("mosaic", "triton", "xla")),
    }  # fmt: skip
    assert len({(row["device"], row["backend"], row["batch"], row["context"]) for row in rows}) == len(rows)
    for row in rows:
        measured = json.loads((RESULTS / row["file"]).read_text())["rows"]
        assert (row["batch"], row["measured_ms"]) in {(r["batch"], r["decode_ms"]) for r in measured}
        assert row["off_by"] == pytest.approx(row["estimated_ms"] / row["measured_ms"] - 1, abs=1e-4)
    found = {(row["device"], row["backend"]): row for row in hardware.errors(rows)}
    h100 = found["NVIDIA H100 SXM", "mosaic"]
    assert h100["steps"] == 4, "its steps on two devices are another matter"
    assert h100["largest"] == max(-h100["least"], h100["most"]) < 0.15


def test_a_case_that_two_files_measured_counts_once_by_the_newest(tmp_path):
    for label, day, decode_ms in (("", 2, 4.0), ("-three-default", 1, 9.0)):
        row = {"model": "llama-2-7b", "batch": 1, "context": 128, "decode_ms": decode_ms}
        document = {
            "experiment": "throughput", "date": f"2026-01-0{day}", "device": "NVIDIA H200", "versions": {},
            "command": "python -m experiments.throughput", "complete": True, "bars": [], "rows": [row],
        }  # fmt: skip
        path = tmp_path / f"throughput_llama-2-7b_bf16_kv-bf16{label}-2026010{day}-h200.json"
        path.write_text(json.dumps(document))
    (row,) = hardware.checks(hardware.shares_by_backend(), tmp_path)
    assert (row["measured_ms"], row["context"]) == (4.0, 128)


def test_a_table_a_file_and_a_picture(tmp_path, capsys):
    assert hardware.main(["--devices", "a10", "mi300x", "--results", str(tmp_path)]) == 0
    (file,) = tmp_path.glob("hardware-*.json")
    document = json.loads(file.read_text())
    assert not any("error" in row for row in document["rows"]), "that is what counts as not measured"
    priced, free = [row for row in document["rows"] if row["part"] == "table"]
    assert priced["usd_hour"] == device_sheet("a10").price.usd_hour  # type: ignore[union-attr]
    assert (free["usd_hour"], free["offer"], free["slides_mtokens_usd"], free["mtokens_usd"]) == (None,) * 4
    assert {row["kind"] for row in (priced, free)} == {"estimated"}
    assert "NVIDIA A10" in capsys.readouterr().out


def test_a_mixture_has_our_estimate_alone_by_the_experts_that_rows_touch(tmp_path):
    assert hardware.main(["--config", "qwen3-30b-a3b", "--devices", "h200-sxm", "a10", "--results", str(tmp_path)]) == 0
    (file,) = tmp_path.glob("hardware-*.json")
    large, small = json.loads(file.read_text())["rows"]
    assert not any(name.startswith("slides_") for name in large)
    assert large["requests"] > 0 == small["requests"]
    sheet, model = device_sheet("h200-sxm"), model_shapes("qwen3-30b-a3b")
    one = hardware.estimate_row(sheet, model, hardware.shares_by_backend()["mosaic"], 1)
    assert one["same_ms"] < large["same_ms"] / 4, "a row touches 8 of 128 experts"


def test_bad_input(tmp_path, capsys):
    assert hardware.main(["--devices", "a11", "--results", str(tmp_path)]) == 2
    assert "no data sheet of a device called 'a11'; near: a10" in capsys.readouterr().err
    assert hardware.main(["--config", "llama-9", "--results", str(tmp_path)]) == 2
    assert "llama-9: cannot be read" in capsys.readouterr().err
    with pytest.raises(hardware.InputFileError, match="no decode_step-DATE-h200.json"):
        hardware.shares_by_backend(tmp_path)
