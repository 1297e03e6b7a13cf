"""Floors of committed rows, computed again: at the limits of then they are those of the files."""

import json

import pytest

from experiments.report import floors_today
from experiments.report.commands import module_of
from experiments.report.documents import RESULTS
from experiments.report.floors_today import with_floors
from experiments.report.judged import judged
from experiments.steps import floors

BANDWIDTH, PEAKS = floors_today.THEN
STEP = RESULTS / "decode_step-20261122-h200.json"
FILES = [
    path for path in sorted(RESULTS.glob("*2026112*.json"))
    if module_of(json.loads(path.read_text())["command"]) in floors_today.RULES
    and (not path.name.startswith("qps_llama") or "w8a8" in path.name or "wire" in path.name)  # others are as these two
]  # fmt: skip


@pytest.fixture(autouse=True)
def limits_are_others(monkeypatch):
    """As they will be: today's may be those of the first files, of which nothing has to be computed again."""
    monkeypatch.setattr(floors_today, "THEN", None)


def read(path, more: str = ""):
    document = json.loads(path.read_text(encoding="utf-8"))
    return document | {"command": f"{document['command']} {more}".strip()}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_floor_comes_out_again_at_the_limits_of_then(path, monkeypatch):
    """From the row and its command alone: steps by model, scheme, KV format, devices and depth, and whole workloads."""
    for kind, peak in PEAKS.items():
        monkeypatch.setitem(floors.PEAKS, kind, peak)
    document = read(path, f"--bandwidth {BANDWIDTH}")
    seen = []
    monkeypatch.setattr(floors_today, "changed", lambda row, floor: seen.append((row, floor)) or {})
    with_floors(document)
    for row, floor in seen:
        for key, value in floor.items():
            assert key not in row or value == pytest.approx(row[key], rel=floors_today.ROUNDED)
    has_floors = [row for row in document["rows"] if floors_today.SHARES.keys() & row.keys() and "error" not in row]
    assert len(seen) == len(has_floors)


def test_while_limits_are_those_of_the_files_nothing_is_computed(monkeypatch):
    monkeypatch.setattr(floors_today, "THEN", (floors.HBM, dict(floors.PEAKS)))
    document = read(STEP, "--bandwidth 8.82e12")
    assert with_floors(document) is document["rows"]


def test_another_limit_gives_other_shares_and_bars():
    own, faster = read(STEP), read(STEP, "--bandwidth 8.82e12")
    found = judged(faster)
    assert found["floors_again"]
    for row, before in zip(found["rows"], own["rows"]):
        assert row["floor_ms"] == pytest.approx(before["floor_ms"] / 2, rel=1e-3)
        assert row["floor_fraction"] == pytest.approx(before["floor_ms"] / 2 / before["decode_ms"], rel=1e-3)
        assert row["decode_ms"] == before["decode_ms"]
    shares = {row["batch"]: row["floor_fraction"] for row in found["rows"] if row["backend"] == "default"}
    assert {bar["value"] for bar in found["bars"]} == set(shares.values())
    assert not any(bar["met"] for bar in found["bars"])
    assert judged(faster | {"bars": []})["bars"] == [], "a run that decides nothing still decides nothing"
    cut = judged(faster | {"bars": [], "complete": False})
    assert len(cut["bars"]) == len(own["bars"])


@pytest.mark.parametrize("change", [
    {"command": "python -m experiments.decode_step --gone 1"}, {"command": "a sweep, by hand"},
    {"command": "python -m experiments.simulate"},
])  # fmt: skip
def test_what_cannot_be_computed_again_is_kept(change):
    document = read(STEP)
    assert with_floors(document | change) == document["rows"]
    rows = [row | {"model": "another"} for row in document["rows"]]
    assert with_floors(document | {"rows": rows, "command": f"{document['command']} --bandwidth 1e12"}) == rows
