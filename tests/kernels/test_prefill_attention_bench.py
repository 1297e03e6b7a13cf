"""Checks the benchmark's counting and bars, and a run in which every kernel is pretended to take 100 us."""

import dataclasses
import json

import jax
import numpy as np

from pallas_kernels.prefill_attention import bench
from pallas_kernels.prefill_attention.cases import CASES

TINY = dataclasses.replace(
    CASES[0], q_lens=(3, 5), kv_lens=(90, 5), unused=0, heads=(4, 2), head_dim=64, k_format="bf16", v_format="bf16",
    dtype="bfloat16", window=None,
)  # fmt: skip


def test_flops_count_visible_keys():
    for window in (None, 1, 4):
        case = dataclasses.replace(TINY, window=window)
        distance = [np.subtract.outer(np.arange(kv - q, kv), np.arange(kv)) for q, kv in zip(case.q_lens, case.kv_lens)]
        seen = sum(int(np.sum((d >= 0) & (d < (window or 99)))) for d in distance)
        assert case.flops == 4 * 4 * 64 * seen


def test_bars_are_read_off_the_rows():
    shape = {"kernel": "prefill_attention", "K": 32, "kv": "bf16"}
    rows = [{"kernel": "matmul", "tflop_s": 700}, {"kernel": "prefill_attention", "peer": "xla", "error": "no"}]
    for lengths, limit in FLASHINFER.items():
        sizes = {"q_lens": list(lengths[0]), "kv_lens": list(lengths[1])}
        rows += [{**shape, **sizes, "peer": peer, "us": 100.0, "tflop_s": rate} for peer, rate in PEERS.items()]
        rows.append({**shape, **sizes, "K": 8, "peer": "mosaic", "us": 1.0, "tflop_s": 1})
        if limit:  # and a slower variant
            rows += [{**shape, **sizes, "peer": "FlashInfer", "us": us, "tflop_s": 1} for us in (limit, 2 * limit)]
    found = {bar["name"]: (bar["value"], bar["met"]) for bar in bench.bars(rows)}
    assert found == {
        "1x2048 causal": (100.0, False),
        "8x1024 causal": (100.0, True),
        "1x16384 causal": (100.0, True),
        "2048 after 6144, of cuDNN's rate": (0.75, False),
    }


FLASHINFER = {
    ((2048,), (2048,)): 93.6, ((1024,) * 8, (1024,) * 8): 191.0, ((16384,), (16384,)): 3904.0, ((2048,), (8192,)): None,
}  # fmt: skip
PEERS = {"mosaic": 450, "cudnn": 600}


def test_a_run_leaves_its_result(monkeypatch, tmp_path, capsys):
    def traced(function, *shapes):
        assert jax.eval_shape(function, *shapes)
        return lambda *arguments: None

    def attend(q, k, v, **options):
        if q.shape[1] == 6:
            raise NotImplementedError("no cuDNN for this\nat all")
        return q

    monkeypatch.setattr(bench, "compiled", traced)
    monkeypatch.setattr(bench, "device_us", lambda run: 100.0 if run() is None else 0.0)
    cases = [TINY, *(dataclasses.replace(TINY, q_lens=(n,), kv_lens=(n,)) for n in (4, 6))]
    monkeypatch.setattr(bench, "BENCH_CASES", (*cases, dataclasses.replace(TINY, k_format="fp8")))
    monkeypatch.setattr(bench, "XLA_FLOPS", cases[2].flops)
    monkeypatch.setattr(bench, "matmul_ceiling", lambda: 7e14)
    monkeypatch.setattr(bench, "sets_for", lambda case: 1)
    monkeypatch.setattr(jax.nn, "dot_product_attention", attend)
    assert bench.main(["--results", str(tmp_path), "--json"]) == 0
    (path,) = tmp_path.iterdir()
    document = json.loads(path.read_text())
    assert document == json.loads(capsys.readouterr().out.splitlines()[-1])
    both = ["mosaic", "mosaic, unpacked"]
    peers = [None, "mosaic", *both, "cudnn", "xla", *both, "cudnn", "mosaic"]
    assert [row.get("peer") for row in document["rows"]] == peers
    row = document["rows"][1]
    assert (row["us"], row["tflop_s"]) == (100.0, round(TINY.flops / 1e8))
    assert not document["complete"]
    assert [row["error"] for row in document["rows"] if "error" in row] == ["NotImplementedError: no cuDNN for this"]
