"""Estimates steps from data sheets of devices, and times of links."""

import json

import pytest

from experiments.steps import links, sheets
from experiments.steps.cost_model import model_shapes
from experiments.steps.devices import device_sheet
from experiments.steps.floors import Work
from experiments.steps.links import Table, read_link
from jllm.errors import ConfigError, InputFileError

TABLE = Table(2, ((1000.0, 10e-6), (2000.0, 12e-6), (10_000.0, 40e-6)))


def test_the_measured_device_gets_its_own_steps_back():
    model, shares = model_shapes("llama-2-7b"), sheets.triton_shares()
    cost = sheets.cost_on(device_sheet("h200-sxm"), model, shares)
    rows = json.loads((sheets.RESULTS / shares.source).read_text())["rows"]
    measured = {row["batch"]: row["decode_ms"] for row in rows if row["backend"] == "triton"}
    assert measured
    for batch, ms in measured.items():
        work = Work(batch, 0, batch, batch * 257)
        assert 1e3 * cost.seconds(work) == pytest.approx(ms, rel=2 * (shares.error or 0) + 1e-6)


def test_half_the_bandwidth_takes_twice_the_bytes_time(tmp_path):
    model, shares = model_shapes("llama-2-7b"), sheets.triton_shares()
    fast, slow = (sheets.cost_on(device_sheet(name), model, shares) for name in ("h200-sxm", "a10"))
    ratio = device_sheet("h200-sxm").bandwidth / device_sheet("a10").bandwidth
    work = Work(1, 0, 1, 257)
    over_fixed = [cost.seconds(work) - 32 * shares.fixed for cost in (slow, fast)]
    assert over_fixed[0] == pytest.approx(ratio * over_fixed[1], rel=0.01)
    with pytest.raises(InputFileError, match="no decode_step-triton-DATE-h200.json"):
        sheets.triton_shares(tmp_path)


def test_a_table_gives_what_was_measured_and_what_lies_between():
    assert [TABLE.seconds(n) for n in (1000, 2000, 10_000)] == pytest.approx([10e-6, 12e-6, 40e-6])
    assert TABLE.seconds(1) == TABLE.seconds(1000)
    assert TABLE.seconds(1500) == pytest.approx(11e-6)
    assert TABLE.seconds(20_000) == pytest.approx(80e-6), "at the rate of the last"


def test_links_are_read_and_broken_ones_are_refused(tmp_path, monkeypatch):
    link = read_link("h200-nvlink")
    assert {"xla", "peer"} <= link.all_reduce.keys()
    assert link.all_reduce["peer"].seconds(8192) < link.all_reduce["xla"].seconds(8192)
    with pytest.raises(ConfigError, match="no link is called 'rope'; known are .*h200-nvlink"):
        read_link("rope")
    monkeypatch.setattr(links, "LINKS", tmp_path)
    for text in (
        "{",
        '{"name": "x"}',
        '{"name": "x", "copy": {"ranks": 1, "points": []}, "all_reduce": {}, "source": ""}',
    ):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ConfigError):
            read_link("bad")
