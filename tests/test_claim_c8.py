"""Claim C8: what its rows say, and its run at toy size."""

import json

import pytest

from experiments.claims import __main__ as command
from experiments.claims import c8


def rows(times: dict[int, float]) -> list[dict]:
    bf16 = [{"scheme": "bf16", "batch": b, "kv": "bf16", "decode_ms": 5.0, "over_bf16": 1.0} for b in times]
    return bf16 + [
        {"scheme": c8.INT4, "batch": b, "kv": "bf16", "decode_ms": 5 / t, "over_bf16": t} for b, t in times.items()
    ]


@pytest.mark.parametrize(
    ("times", "verdict", "met"),
    [
        ({1: 2.9, 64: 1.3, 128: 1.1, 256: 0.9}, "yes", [True, True, True]),
        ({1: 2.9, 64: 1.6, 128: 1.4, 256: 1.0}, "partly", [True, True, False]),  # better than stated is not as stated
        ({1: 1.2, 64: 1.1, 128: 1.3}, "no", [False, False, False]),
    ],
)
def test_verdicts(times, verdict, met):
    found = c8.judge(rows(times))
    assert found.verdict == verdict
    assert [bar["met"] for bar in found.bars] == met
    assert [bar["value"] for bar in found.bars] == [times[batch] for batch in (1, 64, 128)]
    assert ("slower than bf16 from batch 256 on" in found.measured) == (times.get(256) == 0.9)


def test_a_run_at_toy_size_leaves_rows_and_a_picture(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(c8, "TOY_BATCHES", (2,))
    assert command.main(["C8", "--toy", "--results", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("claims-C8-*.json")
    document = json.loads(path.read_text())
    assert document["complete"]
    *found, verdict = document["rows"]
    assert [(row["scheme"], row["batch"], row["context"]) for row in found] == [("bf16", 2, 136), (c8.INT4, 2, 136)]
    bf16, int4 = found
    assert int4["over_bf16"] == pytest.approx(bf16["decode_ms"] / int4["decode_ms"], rel=0.05)
    assert int4["floor_over_bf16"] == pytest.approx(bf16["floor_ms"] / int4["floor_ms"], rel=1e-2)
    assert int4["floor_over_bf16"] > 1
    assert verdict["verdict"] == "toy size: no verdict"
    assert path.with_suffix(".svg").read_text().count("<path") > 10


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
    assert found[-1]["floor_over_bf16"] == 2.0


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
    found = c8.CLAIM.verdict(rows)
    assert found.verdict == "partly"
    h100, h200 = found.answers
    assert h100.startswith("On H100: partly. Yes: at least 1.5 times as fast at batch 1: 4.00. No: ")
    assert h200.startswith("On H200: no. No: at least 1.5 times as fast at batch 1: 1.00; ")
    assert [(bar["name"], bar["value"], bar["met"]) for bar in found.bars] == [
        ("INT4 over bf16, decode step, batch 1, H100: at least", 4.0, True),
        ("INT4 over bf16, decode step, batch 1, H200: at least", 1.0, False),
    ]
    assert c8.CLAIM.verdict(rows[2:]) == c8.judge(rows[2:]), "one device is not named"


def test_rounds_decide_with_their_interval():
    def rows(int4):
        kept = {"kv": "bf16", "batch": 64, "over_bf16": 1.0}
        runs = (("bf16", [4.0, 4.0, 4.0]), (c8.INT4, int4))
        return [kept | {"scheme": name, "decode_ms": min(ms), "decode_ms_runs": ms} for name, ms in runs]

    found = c8.judge(rows([2.5, 2.49, 2.51]))
    assert "Yes: at least 1.3 times as fast at batch 64: 1.60 [1.58, 1.62]" in found.answers[0]
    assert [(bar["value"], bar["met"]) for bar in found.bars] == [(1.6, True)]
    wide = c8.judge(rows([3.0, 3.3, 2.9]))  # the best time alone is 1.38 times as fast, and the mean 1.308
    assert any(text.startswith("Open: at least 1.3") for text in wide.answers)
    assert [(bar["value"], bar["met"]) for bar in wide.bars] == [(1.308, False)]
    assert c8.CLAIM.verdict(rows([3.0, 3.3, 2.9])).bars == (), "what is open is no bar"
