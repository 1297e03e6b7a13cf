"""Floors of committed rows, computed again by the limits of today."""

import json

import pytest

from experiments.report import floors_today
from experiments.report.commands import arguments_of, module_of
from experiments.report.documents import RESULTS
from experiments.report.floors_today import ceilings_read, with_floors
from experiments.report.judged import judged
from experiments.steps.devices import ceilings_of

STEP = RESULTS / "decode_step-20261127-h200.json"
OLD, NEW = 4.41, 4.55  # TB/s of the files' floors, and of today's
FILES = [
    path for path in sorted(RESULTS.glob("*2026112*.json"))
    if module_of(json.loads(path.read_text())["command"]) in floors_today.RULES
    and (not path.name.startswith("qps_llama") or "w8a8" in path.name or "wire" in path.name)  # others are as these two
]  # fmt: skip


def read(path, more: str = ""):
    document = json.loads(path.read_text(encoding="utf-8"))
    return document | {"command": f"{document['command']} {more}".strip()}


def has_floor(row) -> bool:
    return bool(floors_today.SHARES.keys() & row.keys()) and "error" not in row


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_floor_and_share_is_computed_again(path):
    """From the row and its command alone: steps by model, scheme, KV format, devices and depth, and whole workloads. By
    limits that are 3 to 17 % higher, without inputs and outputs; but for arithmetic, which the first floors of
    decode_step left out, and those of several devices for longer, and which binds their largest batches. Files that say
    which ceilings they count with are today's but for these."""
    document = read(path)
    if arguments_of(document["command"]) is None:
        pytest.skip("its command is refused today, which RESULTS.md says")
    document |= {} if "ceilings" in document else {"device": "NVIDIA H200"}  # whose limits older files have
    today = ceilings_read(document).document
    own = document.get("ceilings", today)
    lower = [own[name] / today[name] for name in ("bandwidth", "attention")]
    lower += [own["peaks"][kind] / peak for kind, peak in today["peaks"].items()]
    rows = with_floors(document)
    of_today = document["date"] >= "2026-11-25"
    assert all((a is b) != has_floor(a) for a, b in zip(document["rows"], rows, strict=True))
    for before, row in zip(document["rows"], rows):
        for name, (share, time) in floors_today.SHARES.items():
            if name in before:
                bytes_alone = "decode_step" in path.name and before["batch"] > 128
                least, most = (0.96, 1.5) if bytes_alone else (1428 / 1673 - 0.1, OLD / NEW + 1e-3)
                if of_today:
                    least, most = 0.999 * min(lower), 1.001 * max(lower)
                    most *= 1.6 if bytes_alone and before.get("devices", 1) > 1 else 1
                assert least <= row[name] / before[name] <= most
            if name in before and share in before:
                time = time if time in row else "prefill_ms"
                assert row[share] == pytest.approx(row[name] / row[time], rel=1e-3)


def test_a_floor_is_that_of_the_device_that_ran():
    """An H100's floors of steps that bytes bind, over an H200's of the same rows."""
    h100, h200 = (with_floors(read(STEP) | {"device": device}) for device in ("NVIDIA H100 80GB HBM3", "NVIDIA H200"))
    ratio = ceilings_of("NVIDIA H200").bandwidth / ceilings_of("NVIDIA H100 80GB HBM3").bandwidth
    for slow, fast in zip(h100, h200):
        if slow["batch"] < 128:
            assert slow["floor_ms"] / fast["floor_ms"] == pytest.approx(ratio, rel=1e-3)
            assert slow["floor_fraction"] / fast["floor_fraction"] == pytest.approx(ratio, rel=1e-3)


def test_another_limit_gives_other_shares_and_bars():
    own, faster = judged(read(STEP)), judged(read(STEP, "--bandwidth 9.1e12"))
    for row, before in zip(faster["rows"], own["rows"]):
        halved = row["batch"] < 128  # above, arithmetic binds
        assert not halved or row["floor_ms"] == pytest.approx(before["floor_ms"] / 2, rel=1e-3)
        assert row["floor_fraction"] == pytest.approx(row["floor_ms"] / before["decode_ms"], rel=1e-3)
        assert row["decode_ms"] == before["decode_ms"]
    shares = {row["batch"]: row["floor_fraction"] for row in faster["rows"] if row["backend"] == "default"}
    assert {bar["value"] for bar in faster["bars"]} == set(shares.values())
    assert [bar["bar"] for bar in faster["bars"]] == [0.88, 0.88, 0.86, 0.82, 0.82]
    assert not any(bar["met"] for bar in faster["bars"])
    assert judged(read(STEP) | {"bars": []})["bars"] == [], "a run that decides nothing still decides nothing"
    cut = judged(read(STEP) | {"bars": [], "complete": False})
    assert cut["bars"] == own["bars"]


@pytest.mark.parametrize("change", [
    {"command": "python -m experiments.decode_step --gone 1"}, {"command": "a sweep, by hand"},
    {"command": "python -m experiments.simulate"},
])  # fmt: skip
def test_what_cannot_be_computed_again_is_kept(change):
    document = read(STEP)
    assert with_floors(document | change) is document["rows"]
    rows = [row | {"model": "another"} for row in document["rows"]]
    assert with_floors(document | {"rows": rows}) == rows
