"""A device's ceilings, at tiny sizes and by a made-up clock: a CPU has neither cuDNN nor a profiler's record."""

import json

import jax
import jax.numpy as jnp
import pytest

from experiments import ceilings
from experiments.ceilings import Sizes, best, keep, measure, subjects
from experiments.steps.devices import SHEETS, read_sheet
from jllm.errors import ConfigError

TINY = Sizes(8, 16, 2, 4, 6, 2, 8, products=((4, 8, 16),))


def tiny_rows(monkeypatch: pytest.MonkeyPatch, us: float = 2.0) -> list[dict]:
    def clock(run, repeats):
        assert all(bool(jnp.isfinite(leaf.astype("float32")).all()) for leaf in jax.tree.leaves(run()))
        return us

    monkeypatch.setattr(ceilings, "device_us", clock)
    with jax.numpy_dtype_promotion("standard"):  # as XLA's attention needs
        return list(measure(list(subjects(TINY, "xla")), 2, 0.05))


def test_every_quantity_is_measured_and_counted(monkeypatch):
    rows = tiny_rows(monkeypatch)
    held = [row["quantity"] for row in rows if "seconds" in row and row["rate"] > 0]
    assert sorted(held) == ["attention", "bandwidth", "bf16", "fp8", "int8"]
    found = {(row["quantity"], row["what"]): row for row in rows if "seconds" not in row}
    assert not [row for row in found.values() if "error" in row]
    assert {quantity for quantity, _ in found} == {"bandwidth", "attention", "bf16", "int8", "fp8"}
    rates = {key: row["rate"] for key, row in found.items()}
    assert rates["bandwidth", "row sums by XLA"] == pytest.approx(8 * 16 * 2 / 2e-6)
    assert rates["bandwidth", "decode attention by xla"] == pytest.approx(2 * 2 * 4 * 2 * 8 * 2 / 2e-6)
    assert rates["attention", "causal attention by xla"] == pytest.approx(4 * 2 * 8 * (6 * 7 / 2) / 2e-6)
    assert rates["int8", "M=4 N=8 K=16 by int8_matmul"] == pytest.approx(2 * 4 * 8 * 16 / 2e-6)
    assert found["bf16", "M=4 N=8 K=16 by matmul"]["unit"] == "operations/s"


def test_the_best_of_each_quantity_counts():
    rows = [
        {"quantity": "bf16", "what": "a", "rate": 3.0},
        {"quantity": "bf16", "what": "b", "rate": 4.0},
        {"quantity": "bf16", "what": "b", "rate": 3.5, "seconds": 6.0},
        {"quantity": "int8", "what": "c", "rate": 1.0},
        {"quantity": "fp8", "what": "d", "error": "none"},
    ]
    assert best(rows) == {"bf16": 4.0, "int8": 1.0}
    assert best(rows, sustained=True) == {"bf16": 3.5}


def test_the_best_rates_are_kept_in_the_sheet_of_their_device(tmp_path):
    sheets = tmp_path / "devices"
    sheets.mkdir()
    sheet = sheets / "h100-sxm.json"
    sheet.write_text((SHEETS / sheet.name).read_text())
    rates = {"bandwidth": 3.17e12, "attention": 6.41e14, "bf16": 7.9e14, "int8": 1.6e15, "fp8": 1.5e15}
    rows = [{"quantity": name, "what": "x", "rate": rate * x} for name, rate in rates.items() for x in (0.5, 1.0)]
    document = {"experiment": "ceilings", "date": "2026-11-25", "device": "NVIDIA H100 80GB HBM3", "versions": {}}
    document |= {"command": "python -m experiments.ceilings", "complete": True, "bars": [], "rows": rows}
    result = tmp_path / "ceilings-20261125-h100.json"
    result.write_text(json.dumps(document))
    assert keep(result, sheets) == sheet
    assert "790 TFLOP/s (1,600 in int8, 1,500 in fp8)" in read_sheet(sheet).ceilings.rates
    assert read_sheet(sheet).sustained.dense_tflops == {"bf16": 705}, "of before, where none is in the file"
    held = [{"quantity": name, "what": "x", "rate": rate * 0.9, "seconds": 6.0} for name, rate in rates.items()]
    result.write_text(json.dumps(document | {"rows": rows + held}))
    keep(result, sheets)
    ours = read_sheet(sheet).ceilings
    assert (ours.sustained.peaks[None], ours.sustained.bandwidth) == (711e12, 2853e9)
    assert ours.sustained.attention == ours.attention
    found = read_sheet(sheet).measured
    assert (found.bandwidth_gb_s, found.attention_tflops) == (3170, 641)
    assert (found.dense_tflops, found.source) == (
        {"bf16": 790, "int8": 1600, "fp8": 1500},
        f"experiments/results/{result.name}",
    )
    result.write_text(json.dumps(document | {"rows": rows[:-2]}))
    with pytest.raises(ConfigError, match="no rate of fp8"):  # as where all of its products failed
        keep(result, sheets)
    result.write_text(json.dumps(document | {"device": "cpu"}))
    with pytest.raises(ConfigError, match="device_kind 'cpu'"):
        keep(result, sheets)
    result.write_text(json.dumps(document | {"device": "NVIDIA H200"}))
    with pytest.raises(ConfigError, match="device_kind 'NVIDIA H200'"):  # whose sheet lies elsewhere
        keep(result, sheets)


def test_what_fails_costs_its_own_row(monkeypatch):
    monkeypatch.setattr(ceilings, "device_us", lambda run, repeats: 1.0)
    rows = list(measure([s for s in subjects(TINY, "cudnn") if s.quantity != "fp8"], 2, 0.01))
    assert {row["what"] for row in rows if "error" in row} == {
        "decode attention by cudnn",
        "causal attention by cudnn",
    }
    assert all("rate" in row for row in rows if "error" not in row)


def test_the_sizes_are_those_that_limits_are_quoted_at():
    """4 GiB of numbers and of K and V, 16,384 tokens: by shapes alone."""
    found = {subject.what: subject for subject in subjects(Sizes())}
    assert found["row sums by XLA"].amount == 4 << 30
    assert found["decode attention by cudnn"].amount == 128 * 2048 * 32 * 128 * 2 * 2
    assert found["causal attention by cudnn"].amount / 652e12 == pytest.approx(3372e-6, rel=0.001)
