"""Claims C30 and C31: attention by CUDA or tensor cores, and behind a pass that dequantizes."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from experiments.claims import c30, c31
from pallas_kernels.decode_attention import bench_runs
from pallas_kernels.decode_attention.cases import BENCH_CASES

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
        document = {"rows": found, "date": day, "device": "NVIDIA H200", "complete": True}
        (tmp_path / f"decode_attention-{name}.json").write_text(json.dumps(document))
    equal, slower = c30.recorded(tmp_path)
    assert (equal["cuda_us"], equal["tensor_us"], equal["us"], equal["times"]) == (66.0, 67.0, 60.0, 1.015)
    assert (slower["K"], slower["times"], "us" in slower) == (8, 0.733, False)
    assert equal["file"] == "decode_attention-a.json"


def test_c31_counts_the_bytes_of_a_pass_of_its_own_unless_caches_hold_them():
    small, *_, large = (row for row in c31.measure(False) if row["kv"] == "int8-g8" and row["K"] == 32)
    assert small["separate_mb"] == small["fused_mb"] == round(2 * 1024 * 32 * 128 * 1.25 / 1e6, 3)
    assert large["over_fused"] == pytest.approx((1.25 + 2 + 2) / 1.25, abs=1e-3)
    assert large["over_library"] == pytest.approx((1.25 + 2 + 2) / 2, abs=1e-3)
    assert small["over_library"] < 1


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
