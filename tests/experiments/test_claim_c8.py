"""Claim C8: its rows, and its run at toy size."""

import json

import pytest

from experiments.claims import __main__ as command
from experiments.claims import c8


def test_a_run_at_toy_size_leaves_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(c8, "TOY_BATCHES", (2,))
    assert command.main(["C8", "--toy", "--results", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("claims-C8-*.json")
    document = json.loads(path.read_text())
    assert document["complete"]
    found = document["rows"]
    assert [(row["scheme"], row["batch"], row["context"]) for row in found] == [("bf16", 2, 136), (c8.INT4, 2, 136)]
    bf16, int4 = found
    assert int4["over_bf16"] == pytest.approx(bf16["decode_ms"] / int4["decode_ms"], rel=0.05)
    assert int4["floor_ms"] < bf16["floor_ms"]


def test_without_a_gpu_the_rows_are_those_of_the_newest_file(tmp_path):
    steps = [
        {"scheme": scheme, "batch": batch, "kv": "bf16", "decode_ms": ms, "floor_ms": ms / 2, "over_bf16": 4 / ms}
        for scheme, ms in (("bf16", 4.0), (c8.INT4, 2.0), ("nf4", 3.0))
        for batch in (1, 64)
    ]
    prefill = {"scheme": "bf16", "batch": 1, "kv": "bf16", "prefill_ms": 9.0}
    for day, rows in (("20260101", []), ("20260102", [*steps, prefill])):
        document = {"experiment": "quant_steps", "device": "NVIDIA H200", "command": "", "rows": rows}
        (tmp_path / f"quant_steps-{day}-h200.json").write_text(json.dumps(document))
    found = [*c8.recorded(tmp_path)]
    assert [(row["scheme"], row["batch"]) for row in found] == [("bf16", 1), ("bf16", 64), (c8.INT4, 1), (c8.INT4, 64)]
    assert {row["file"] for row in found} == {"quant_steps-20260102-h200.json"}


def test_each_device_answers_from_its_newest_complete_file(tmp_path):
    def write(name, device, int4_ms, complete=True):
        ms = {"bf16": 4.0, c8.INT4: int4_ms}
        row = {"batch": 1, "kv": "bf16"}
        steps = [row | {"scheme": of, "decode_ms": each, "over_bf16": 4 / each} for of, each in ms.items()]
        document = {"experiment": "quant_steps", "device": device, "command": "", "rows": steps, "complete": complete}
        (tmp_path / f"quant_steps-{name}.json").write_text(json.dumps(document))

    write("20260101-h100", "NVIDIA H100", 1.0)
    write("20260102-h200", "NVIDIA H200", 1.0)
    write("20260103-h200", "NVIDIA H200", 4.0)
    write("20260104-h100", "NVIDIA H100", 9.0, complete=False)
    rows = [*c8.recorded(tmp_path)]
    assert list(dict.fromkeys(row["file"] for row in rows)) == [
        "quant_steps-20260101-h100.json",
        "quant_steps-20260103-h200.json",
    ]
