"""Checks the benchmarks' counting and bars, and a run in which every matmul is pretended to take 10 us."""

import json

import jax
import pytest

from pallas_kernels.bench import measure
from pallas_kernels.fp8_matmul import bench as fp8_bench
from pallas_kernels.int8_matmul import bench as int8_bench
from pallas_kernels.scaled_matmul import bench
from pallas_kernels.scaled_matmul.cases import Case


def row(peer: str, m: int, k: int, n: int, us: float, **more) -> dict:
    return {"peer": peer, "M": m, "K": k, "N": n, "us": us, "gb_s": 3000, "tflop_s": 1400} | more


TORCH_FP8 = (
    (1, 4096, 12288, 15.9), (1, 4096, 12288, 19.0), (64, 4096, 4096, 7.7), (4096, 11008, 4096, 245.0),
)  # fmt: skip


def test_bars_are_read_off_the_rows():
    rows = [
        {"kernel": "copy", "gb_s": 4000},
        row("int8_matmul", 1, 4096, 12288, 17.0),
        *(row("torch fp8", *shape, us) for *shape, us in TORCH_FP8),
        row("xla int8", 1, 4096, 12288, 16.0),
        row("int8_matmul", 64, 4096, 4096, 9.0, gb_s=2000),
        row("int8_matmul", 4096, 11008, 4096, 280.0, tflop_s=1300),
        row("fp8_matmul", 4096, 11008, 4096, 290.0),
        row(bench.IN_BLOCKS, 4096, 11008, 4096, 320.0),
    ]
    found = {bar["name"]: bar["met"] for bar in bench.bars("int8_matmul", rows)}
    assert found == {
        "(M, K, N)=(1, 4096, 12288) torch's fp8 + 10 %": True,
        "(M, K, N)=(1, 4096, 12288) xla int8": False,
        "(M, K, N)=(1, 4096, 12288) bandwidth": False,  # 0.75 of the run's best
        "(M, K, N)=(64, 4096, 4096) torch's fp8 + 10 %": False,
        "(M, K, N)=(64, 4096, 4096) bandwidth": False,  # 0.5
        "(M, K, N)=(4096, 11008, 4096) torch's fp8 + 10 %": False,
        "(M, K, N)=(4096, 11008, 4096) rate": False,
    }
    found = {bar["name"]: bar["met"] for bar in bench.bars("fp8_matmul", rows)}
    assert found == {
        "(M, K, N)=(4096, 11008, 4096) torch's fp8 + 10 %": False,
        "(M, K, N)=(4096, 11008, 4096) int8_matmul + 5 %": True,
        "(M, K, N)=(4096, 11008, 4096) rate": True,
        "(M, K, N)=(4096, 11008, 4096) in blocks": True,
    }


def test_runs_are_told_apart_by_the_pauses_between_them(monkeypatch):
    def timeline(run):
        run()
        return [measure.Event("kernel", at, us) for at, us in ((0, 3), (4, 3), (10_005, 6), (10_012, 9), (20_030, 30))]

    monkeypatch.setattr(measure, "timeline", timeline)
    assert measure.device_us_of_each([list] * 3) == [2, 5, 10]
    with pytest.raises(RuntimeError, match="2 runs left 3 separate marks"):
        measure.device_us_of_each([list] * 2)


def test_a_product_that_fails_costs_its_own_rows(monkeypatch):
    def fail(runs):
        raise RuntimeError("nothing was recorded")

    monkeypatch.setattr(bench, "device_us_of_each", fail)
    monkeypatch.setattr(bench, "copy_bandwidth", lambda: 4e12)
    monkeypatch.setattr(bench, "layers_for", lambda case: 2)
    monkeypatch.setattr(bench, "PRODUCTS", {"xla int8": bench.PRODUCTS["xla int8"], "none": (None, "int8")})
    _, *rows = bench.table([Case(5, 32, 64, "int8")], ("xla int8", "none"), (5,), seconds=60.0)
    assert [row["error"] for row in rows] == ["nothing was recorded", "'NoneType' object is not callable"]


def test_bytes_are_those_that_must_move():
    assert bench.moved_bytes(Case(2, 64, 32, "int8"), "int8") == 2 * 32 + 64 * 32 + 2 * 2 * 64 + 4 * (2 + 64)
    assert bench.moved_bytes(Case(2, 64, 32, "int8"), "bfloat16") == 2 * (2 * 32 + 64 * 32) + 2 * 2 * 64


@pytest.mark.parametrize(
    ("module", "operation"), [(int8_bench, "int8_matmul"), (fp8_bench, "fp8_matmul")], ids=("int8", "fp8")
)
def test_a_run_leaves_its_result(monkeypatch, tmp_path, capsys, module, operation):
    monkeypatch.setattr(bench, "BENCH_SHAPES", ((32, 96),))
    monkeypatch.setattr(bench, "device_us_of_each", lambda runs: [20.0 for run in runs if jax.block_until_ready(run())])
    monkeypatch.setattr(bench, "copy_bandwidth", lambda: 4e12)
    monkeypatch.setattr(bench, "layers_for", lambda case: 2)
    product = (lambda x, w, *scales: x @ w.T), "float32"
    monkeypatch.setattr(bench, "PRODUCTS", dict.fromkeys(bench.PRODUCTS, product))
    assert module.main(["--rows", "5", "--peer-rows", "5", "--triton", "--results", str(tmp_path), "--json"]) == 0
    document = json.loads(next(tmp_path.iterdir()).read_text())
    assert document == json.loads(capsys.readouterr().out.splitlines()[-1])
    own = [row for row in document["rows"] if row.get("peer") == operation]
    assert [(row["us"], row["M"], row["K"], row["N"]) for row in own] == [(10.0, 5, 32, 96)]
    assert "triton " + operation.removesuffix("_matmul") in {row.get("peer") for row in document["rows"]}
