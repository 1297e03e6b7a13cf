"""Checks the benchmark's counting and bars, and a run in which every matmul is pretended to take 5 us."""

import json

import jax

from pallas_kernels.bench import layers as layers_bench
from pallas_kernels.matmul import bench
from pallas_kernels.matmul.cases import Case

TINY = Case((16,), 64, 128, "bfloat16", out_dtype="float32")


def test_bytes_are_those_of_both_operands_and_the_result():
    assert bench.moved_bytes(TINY) == 2 * 64 * 128 + 2 * 16 * 128 + 4 * 16 * 64


def test_bars_are_xlas_time_and_for_few_rows_the_bandwidth():
    rows = [{"kernel": "copy", "gb_s": 4000}, {"peer": "mosaic", "M": 1, "K": 8, "N": 8, "error": "no"}]
    for m, own, xla in ((64, 10.0, 9.0), (128, 10.0, 11.0)):
        shape = {"M": m, "K": 8, "N": 8}
        rows.append({"peer": "mosaic", **shape, "us": own, "gb_s": 3600, "tflop_s": 390})
        rows.append({"peer": "xla", **shape, "us": xla, "gb_s": 3000, "tflop_s": 400})
    found = {bar["name"]: (bar["value"], bar["bar"], bar["met"]) for bar in bench.bars(rows)}
    assert found == {
        "(M, K, N)=(64, 8, 8) xla": (10.0, 9.0, False),
        "(M, K, N)=(64, 8, 8) bandwidth": (0.9, 0.85, True),
        "(M, K, N)=(128, 8, 8) xla": (10.0, 11.0, True),
    }
    assert [row["fraction"] for row in rows if "us" in row] == [0.9, 0.75, 0.9, 0.75]


def test_one_row_a_product_and_a_failure_costs_its_own(monkeypatch, tmp_path):
    monkeypatch.setattr(layers_bench, "copy_bandwidth", lambda: 4e12)
    monkeypatch.setattr(bench, "SHAPES", {"64x128": (64, 128), "32x128": (32, 128)})
    monkeypatch.setattr(layers_bench, "layers_for", lambda w: 2)
    times = lambda runs: [10.0 for run in runs if jax.block_until_ready(run())]  # noqa: E731
    monkeypatch.setattr(layers_bench, "device_us_of_each", times)
    assert bench.main(["--results", str(tmp_path), "--rows", "16", "--shapes", "64x128", "--label", "few"]) == 0
    (path,) = tmp_path.glob("matmul-few-*.json")
    result = json.loads(path.read_text())
    found = {row.get("peer"): row for row in result["rows"]}
    assert found["xla"]["us"] == 5.0
    assert {(row["M"], row["K"], row["N"]) for row in result["rows"] if "M" in row} == {(16, 128, 64)}
    assert "error" in found["mosaic"]  # a CPU has no Hopper kernels
    assert not result["complete"]
