"""Claims C30 and C31: attention by CUDA or tensor cores, and behind a pass that dequantizes."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from experiments.claims import c30, c31
from experiments.claims.claim import draw
from pallas_kernels.decode_attention import bench_runs
from pallas_kernels.decode_attention.cases import BENCH_CASES
from tests.test_results_page import GOOD

CELL = {"kernel": "decode_attention", "R": 16, "length": 1024, "H": 32, "K": 32, "kv": "bf16", "Q": 1}


def variants(cell=CELL, **us):
    return [cell | {"peer": "FlashInfer", "variant": name.replace("_", "-"), "us": each} for name, each in us.items()]


def test_c30_reads_the_faster_variant_of_a_kind_from_one_job(tmp_path):
    (missing,) = c30.recorded(tmp_path)
    assert "--peers" in missing["error"]
    grouped = CELL | {"K": 8}
    rows = [
        CELL | {"peer": "mosaic", "us": 60.0}, CELL | {"peer": "mosaic", "us": 5.0, "kv": "int8-g8"},
        *variants(cuda=70.0, cuda_g=66.0, tc=72.0, xqa=67.0), *variants(grouped, cuda=30.0, fa3=22.0),
    ]  # fmt: skip
    old = [*variants(cuda=1.0, tc=9.0)]
    for name, found, day in (("a", rows, "2026-11-25"), ("b", old, "2026-11-24"), ("c", rows[:2], "2026-11-26")):
        document = GOOD | {"rows": found, "date": day, "bars": []}
        (tmp_path / f"decode_attention-{name}.json").write_text(json.dumps(document))
    equal, slower = found = list(c30.recorded(tmp_path))
    assert (equal["cuda_us"], equal["tensor_us"], equal["us"], equal["times"]) == (66.0, 67.0, 60.0, 1.015)
    assert (slower["K"], slower["times"], "us" in slower) == (8, 0.733, False)
    assert equal["file"] == "decode_attention-a.json"
    assert [c30.judge(some).verdict for some in (found, [equal], [slower])] == ["partly", "yes", "no"]
    near = [equal | {"times": times} for times in (0.945, 0.955)]
    assert c30.judge(near).answers == (
        "Open: enough with 32/32 heads in all 2 cases (16 x 1024: 0.945, 16 x 1024: 0.955)",
    )
    said = c30.judge(found)
    assert said.answers[1].startswith("No: enough with 32/8 heads")
    assert said.figures[1] == "32/8 heads: 0.73 to 0.73 times as fast by CUDA cores as by tensor cores"


def test_c31_counts_the_bytes_of_a_pass_of_its_own_unless_caches_hold_them():
    small, *_, large = (row for row in c31.measure(False) if row["kv"] == "int8-g8" and row["K"] == 32)
    assert small["separate_mb"] == small["fused_mb"] == round(2 * 1024 * 32 * 128 * 1.25 / 1e6, 3)
    assert large["over_fused"] == pytest.approx((1.25 + 2 + 2) / 1.25, abs=1e-3)
    assert large["over_library"] == pytest.approx((1.25 + 2 + 2) / 2, abs=1e-3)
    found = c31.judge([small, large])
    assert found.verdict == "partly"
    assert found.answers[1] == "No: pointless by bytes in 1 of 2 cases (int8-g8 1 x 1024 32/32)"
    gains = {**large, "part": "time"} | c31.ratios(4.0, 5.0, 5.5, "us")
    assert c31.judge([large, gains]).verdict == "no"  # slower than fused, and yet it gains: time decides, not bytes
    assert c31.judge([small, {**gains, "over_library": 1.2}]).verdict == "yes"


@pytest.mark.parametrize("kv", c31.FORMATS)
def test_c31s_pass_and_library_give_what_the_fused_kernel_gives(monkeypatch, kv):
    (case, *_) = (case for case in BENCH_CASES if case.k_format == kv)
    case = dataclasses.replace(case, lengths=(37, 37), heads=(4, 2), dtype="float32")
    monkeypatch.setattr(bench_runs, "layers_for", lambda case: 2)

    separate, fused = c31.separate(case, "xla"), bench_runs.paged(case, "xla")
    arguments = fused.make(bench_runs.random_key())
    np.testing.assert_allclose(jax.jit(separate.attend)(*arguments), jax.jit(fused.attend)(*arguments), atol=2e-3)
    k, v = c31.dequantize(case).attend(*arguments)[0]
    assert k.shape == v.shape == (2, 37, 2, 128)


def test_their_pictures_have_their_bars(tmp_path):
    rows = [dict(zip(c30.SHAPE, (16, 1024, 32, 8))) | {"cuda_us": 2.0, "tensor_us": 1.0, "us": 1.0, "times": 0.5}]
    for claim, found in ((c30.CLAIM, rows), (c31.CLAIM, list(c31.measure(True)))):
        document = {"device": "cpu", "rows": [*found, {"verdict": "partly"}]}
        draw(claim, "title", document, tmp_path / "x.svg")
        assert (tmp_path / "x.svg").read_text().count("<path") > 10
