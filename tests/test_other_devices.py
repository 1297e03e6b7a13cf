"""The estimate of decode steps on devices that were never measured."""

import json

import pytest

from experiments import other_devices
from experiments.steps.cost_model import model_shapes
from experiments.steps.devices import device_sheet
from experiments.steps.floors import Work


def test_the_measured_device_gets_its_own_steps_back():
    model, shares = model_shapes("llama-2-7b"), other_devices.triton_shares()
    cost = other_devices.cost_on(device_sheet("h200-sxm"), model, shares)
    rows = json.loads((other_devices.RESULTS / shares.source).read_text())["rows"]
    measured = {row["batch"]: row["decode_ms"] for row in rows if row["backend"] == "triton"}
    for batch, ms in measured.items():
        work = Work(batch, 0, batch, batch * 257)
        assert 1e3 * cost.seconds(work) == pytest.approx(ms, rel=2 * (shares.error or 0) + 1e-6)


def test_half_the_bandwidth_takes_twice_the_bytes_time():
    model, shares = model_shapes("llama-2-7b"), other_devices.triton_shares()
    fast, slow = (other_devices.cost_on(device_sheet(name), model, shares) for name in ("h200-sxm", "a10"))
    ratio = device_sheet("h200-sxm").bandwidth / device_sheet("a10").bandwidth
    work = Work(1, 0, 1, 257)
    over_fixed = [cost.seconds(work) - 32 * shares.fixed for cost in (slow, fast)]
    assert over_fixed[0] == pytest.approx(ratio * over_fixed[1], rel=0.01)


def test_rows_say_that_they_are_estimated_and_what_does_not_fit(tmp_path, capsys):
    command = ["--devices", "a10", "--batch", "1", "64", "--context", "1024", "--results", str(tmp_path)]
    assert other_devices.main(command) == 0
    (file,) = tmp_path.glob("other_devices-*.json")
    small, large = json.loads(file.read_text())["rows"]
    assert small["kind"] == large["kind"] == "estimated"
    assert small["fits"]
    assert small["decode_ms"] > 20
    assert not large["fits"]
    assert "decode_ms" not in large


def test_bad_input(tmp_path, capsys, monkeypatch):
    assert other_devices.main(["--devices", "a11", "--results", str(tmp_path)]) == 2
    assert "no data sheet of a device called 'a11'; near: a10" in capsys.readouterr().err
    with pytest.raises(other_devices.InputFileError, match="no decode_step-triton-DATE-h200.json"):
        other_devices.triton_shares(tmp_path)
