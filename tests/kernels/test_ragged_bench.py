"""Checks the benchmark's bytes, routes and bars, and a run in which every product is pretended to take 80 us."""

import json

import numpy as np

from pallas_kernels.ragged_matmul import bench
from pallas_kernels.ragged_matmul.cases import Product, routed

TINY = Product(8, 2, 64, 128, gated=True)


def test_a_token_has_distinct_experts_and_the_next_layers_other_ones():
    one = [np.flatnonzero(routed(TINY, 1, layer)).tolist() for layer in range(4)]
    assert sorted(sum(one, [])) == list(range(8))
    assert routed(TINY, 50, 0).sum() == 100
    assert routed(TINY, 50, 0).max() <= 50


def test_bars_are_of_the_floor_of_bf16_and_of_xla():
    rows = [{"kernel": "copy", "gb_s": 4000}]
    for scheme, us in (("bf16", 22.0), ("w4a16-g128", 9.0)):
        labels = {"kernel": "ragged_matmul", "product": "qwen3-30b-a3b-down", "scheme": scheme, "tokens": 32}
        rows.append({**labels, "peer": "mosaic", "us": us, "gb_s": 3000, "off": 0.02})
    many = {**rows[1], "tokens": 4096, "us": 1e3, "gb_s": 900, "off": 0.0}  # bound by operations
    assert [bar["name"] for bar in bench.bars([rows[0], many])] == [
        "qwen3-30b-a3b-down bf16 4096 tokens mosaic: off XLA's"
    ]
    rows.append({**rows[1], "peer": "tokamax", "us": 21.0, "off": 0.0})
    found = {bar["name"].split(" mosaic: ")[-1]: (bar["value"], bar["met"]) for bar in bench.bars(rows)}
    assert found == {
        "off XLA's": (0.02, False), "of the floor": (0.75, True), "speed over bf16's": (2.444, True),
        "beside tokamax": (22.0, False), "qwen3-30b-a3b-down bf16 32 tokens tokamax: off XLA's": (0.0, True),
    }  # fmt: skip


def test_a_run_counts_touched_experts_and_a_failure_costs_its_own_row(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "copy_bandwidth", lambda: 4e12)
    monkeypatch.setattr(bench, "device_us", lambda run, repeats: 80.0)
    monkeypatch.setattr(bench, "LAYERS", 2)
    monkeypatch.setitem(bench.PRODUCTS, "qwen3-30b-a3b-down", TINY)
    arguments = ["--products", "qwen3-30b-a3b-down", "--tokens", "1", "--peers", "xla", "mosaic", "ragged_dot"]
    assert bench.main(["--results", str(tmp_path), *arguments, "--formats", "bf16", "mxfp4-weight", "w8a8"]) == 0
    result = json.loads(next(tmp_path.glob("*.json")).read_text())
    found = {row["scheme"]: row for row in result["rows"] if row.get("peer") == "xla"}
    assert {row["us"] for row in found.values()} == {40.0}
    assert {row["off"] for row in found.values()} == {0.0}
    (own,) = [row for row in result["rows"] if row.get("peer") == "ragged_dot"]  # of plain weights alone
    assert own["scheme"] == "bf16"
    assert own["off"] < 0.01
    x, w = bench.inputs(2, 128, "mxfp4-weight"), bench.weights(TINY, "mxfp4-weight")
    assert len([row for row in result["rows"] if "error" in row]) == 3  # a CPU has no Hopper kernels
    expert = 2 * 64 * (128 // 2 + 128 // 32)
    assert bench.moved_bytes(TINY, x, w, [routed(TINY, 1, 0)]) == 2 * expert + 2 * 2 * (128 + 64)
