"""Estimates for meshes: exchanges as data, a rank's share of a step, and what a number of GPUs would give."""

import json

import pytest

from experiments import meshes
from experiments.meshes import BATCHES, Mesh, checks, exchanges, main, rank_of
from experiments.steps import links
from experiments.steps.cost_model import CONFIGS
from experiments.steps.links import Table, read_link
from jllm.config import load_config
from jllm.errors import ConfigError

TABLE = Table(2, ((1000.0, 10e-6), (2000.0, 12e-6), (10_000.0, 40e-6)))


def test_a_table_gives_what_was_measured_and_what_lies_between():
    assert [TABLE.seconds(n) for n in (1000, 2000, 10_000)] == pytest.approx([10e-6, 12e-6, 40e-6])
    assert TABLE.seconds(1) == TABLE.seconds(1000)
    assert TABLE.seconds(1500) == pytest.approx(11e-6)
    assert TABLE.seconds(20_000) == pytest.approx(80e-6), "at the rate of the last"
    assert TABLE.seconds(2000, 1) == 0.0
    # latency stays, and what is above it grows with 2 (n - 1) / n
    assert TABLE.seconds(2000, 4) == pytest.approx(10e-6 + 2e-6 * (3 / 4) / (1 / 2))
    assert TABLE.seconds(1000, 8) == TABLE.seconds(1000)


def test_links_are_read_and_broken_ones_are_refused(tmp_path, monkeypatch):
    link = read_link("h200-nvlink")
    assert {"xla", "peer"} <= link.all_reduce.keys()
    assert link.all_reduce["peer"].seconds(8192) < link.all_reduce["xla"].seconds(8192)
    with pytest.raises(ConfigError, match="no link is called 'rope'; known are .*h200-nvlink"):
        read_link("rope")
    monkeypatch.setattr(links, "LINKS", tmp_path)
    for text in (
        "{",
        '{"name": "x"}',
        '{"name": "x", "copy": {"ranks": 1, "points": []}, "all_reduce": {}, "source": ""}',
    ):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ConfigError):
            read_link("bad")


def test_a_rank_has_its_share_and_pays_for_exchanges():
    config = load_config(CONFIGS / "llama-2-70b.json")
    share = rank_of(config, 8)
    assert (share.num_heads, share.num_kv_heads, share.head_dim) == (8, 1, 128)
    assert (share.hidden_size, share.intermediate_size, share.vocab_size) == (8192, 3584, 4000)
    assert (exchanges(config, 1), exchanges(config, 2)) == (0, 162)
    link, small = read_link("h200-nvlink"), load_config(CONFIGS / "llama-2-7b.json")
    one, two = (Mesh(small, n, None, None, link, "peer") for n in (1, 2))
    assert one.exchange(16) == 0.0
    assert two.weights == pytest.approx(one.weights / 2, rel=1e-3)
    assert two.kv_bytes == one.kv_bytes / 2
    assert two.seconds(16, 256) < one.seconds(16, 256) < 2 * two.seconds(16, 256)
    assert one.fits(1, 256)
    assert not one.fits(2048, 1024)
    slower = Mesh(small, 2, None, None, link, "peer", "h100-sxm")
    assert slower.exchange(16) == two.exchange(16)
    assert two.seconds(16, 256) < slower.seconds(16, 256) < 4.8 / 3.35 * two.seconds(16, 256)
    assert two.fits(512, 256)
    assert not slower.fits(1024, 256)


def step(**other) -> dict:
    """A row of experiments.decode_step on two devices."""
    about = {"model": "llama-2-7b", "devices": 2, "batch": 1, "backend": "default", "kv": "bfloat16", "context": 128}
    return about | {"decode_ms": 3.0} | other


def write_steps(folder, name: str, device: str, rows: list[dict], date: str = "2026-01-02", options: str = ""):
    """A file of experiments.decode_step, whose name says nothing of `date`."""
    command = f"python -m experiments.decode_step --devices 2{options}"
    document = {"command": command, "date": date, "device": device, "rows": rows}
    (folder / f"decode_step-{name}.json").write_text(json.dumps(document))


def test_a_case_that_several_files_measured_counts_once_by_the_newest(tmp_path):
    """Whatever they are called; of files of one day the step that is further from its estimate."""
    a, h = "NVIDIA H100 80GB HBM3", "h100-80gb-hbm3"
    write_steps(tmp_path, f"a-20260102-{h}", a, [step(decode_ms=9.0), step(batch=16, decode_ms=8.0)])
    write_steps(tmp_path, f"b-20260109-{h}", a, [step(decode_ms=1.0)], "2026-01-01")
    write_steps(tmp_path, f"c-20260102-{h}", a, [step(batch=16, decode_ms=4.0)])
    same = {"kv": "bf16", "backend": "mosaic", "scheme": "bf16"}
    write_steps(tmp_path, f"d-20260101-{h}", a, [step(decode_ms=2.0, **same)], "2026-01-03", " --kv-cache bf16")
    rows = checks(tmp_path)
    assert len(rows) == 2
    found = {row["batch"]: (row["measured_ms"], row["file"]) for row in rows}
    assert found == {
        1: (2.0, f"decode_step-d-20260101-{h}.json"), 16: (8.0, f"decode_step-a-20260102-{h}.json"),
    }  # fmt: skip
    assert rows[0]["off_by"] == pytest.approx(rows[0]["estimated_ms"] / 2.0 - 1, rel=1e-3)


def test_cases_that_differ_in_anything_all_count(tmp_path):
    others = (
        {"context": 256}, {"devices": 4}, {"devices": 1}, {"batch": 2}, {"model": "llama-2-13b"}, {"scheme": "w8a8"},
        {"backend": "triton"}, {"kv": "int8-g8"},
    )  # fmt: skip
    h100, h200 = ("NVIDIA H100 80GB HBM3", "h100-80gb-hbm3"), ("NVIDIA H200", "h200")
    write_steps(tmp_path, f"a-20260101-{h100[1]}", h100[0], [step(), *(step(**other) for other in others)])
    write_steps(tmp_path, f"layers-20260102-{h100[1]}", h100[0], [step()], options=" --layers 8")
    write_steps(tmp_path, f"a-20260102-{h200[1]}", h200[0], [step()])
    assert len(checks(tmp_path)) == 1 + len(others) + 2


def test_rows_are_labelled_and_the_best_mesh_is_marked(tmp_path, capsys):
    command = ["--models", "llama-2-7b", "--ranks", "1", "2", "--exchange", "peer", "--batch", "1", "--gpus", "8"]
    assert main([*command, "--results", str(tmp_path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    steps, gpus = ([row for row in rows if row["part"] == part] for part in ("step", "gpus"))
    assert {row["kind"] for row in rows} == {"estimated"}
    assert [row["ranks"] for row in steps] == [1, 2]
    assert sum(row["best"] for row in gpus) == 1
    for row in gpus:
        assert row["decode_ms"] <= 25
        assert row["batch"] in BATCHES
        assert row["replicas"] * row["ranks"] == 8
        assert row["tokens_s"] == pytest.approx(1e3 * row["replicas"] * row["batch"] / row["decode_ms"], rel=1e-3)
    assert main(["--models", "llama-2-7b", "--step-ms", "0.1", "--gpus", "8", "--results", str(tmp_path)]) == 0
    with pytest.raises(SystemExit):
        meshes.parse_args(["--exchange", "rope"])
