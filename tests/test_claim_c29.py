"""Claim C29: models that differ in KV heads alone."""

import json

import pytest

from experiments.claims import __main__ as command
from experiments.claims import c29
from tests.test_results_page import GOOD


def heads_rows(added, count=2):
    """Of models with 8 and `count` KV heads and a seed for each of `added`, as C29 has them."""
    kept = {"heads": 8, "step": 20, "parameters": 3_100_000, "bits_per_byte": 1.0}
    whole = [
        kept | {"kv_heads": 8, "seed": seed, "nats": 3.0 + seed, "parameters": 4_000_000}
        for seed, _ in enumerate(added)
    ]
    grouped = [{"kv_heads": count, "seed": seed, "nats": 3.0 + seed + more} | kept for seed, more in enumerate(added)]
    early = [{**row, "step": 10, "nats": 9.0} for row in grouped]
    return list(c29.with_added([*whole, *early, *grouped]))


def test_c29_compares_models_of_one_seed():
    rows = heads_rows([0.010, 0.012, 0.011])
    assert [row["added"] for row in rows] == [0, 0, 0, 0.01, 0.012, 0.011]
    found = c29.judge(rows)
    assert found.verdict == "yes"
    assert found.answers[0] == "On models of 3 to 4 million parameters, trained for this, 3 seeds of each"
    mean, low, high = c29.by_heads(rows)[2]
    half = 4.302653 * 0.001 / 3**0.5  # Student's t of two degrees of freedom
    assert (mean, low, high) == pytest.approx((0.011, 0.011 - half, 0.011 + half))
    assert "2 of 8 KV heads: +0.0110 nats a token (+0.0085 to +0.0135)" in found.measured
    assert c29.judge(heads_rows([0.0, 0.02, 0.01])).verdict == "partly"  # by the mean alone
    assert c29.judge(heads_rows([0.03, 0.031, 0.032])).verdict == "no"
    one_head = heads_rows([0.5, 0.5, 0.5], count=1)
    whole = c29.judge([*rows, *(row for row in one_head if row["kv_heads"] == 1)])
    assert whole.verdict == "yes"  # one head is beside it
    assert ("not trained yet" in found.measured, "not trained yet" in whole.measured) == (True, False)


def test_c29_without_a_file_is_not_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(c29, "RESULTS", tmp_path)
    (row,) = c29.measure(False)
    assert row["error"].startswith("not measured yet: ")
    rows = [{**row, "epoch": 0} for row in heads_rows([0.1, 0.2])]
    single = [{**row, "epoch": 0} for row in heads_rows([0.4, 0.5], count=1) if row["kv_heads"] == 1]
    early = [{**row, "step": 10, "kv_heads": 4} for row in rows]
    for name, day, steps, found in (
        ("train_heads", 1, 20, rows),
        (
            "train_heads-single",
            2,
            20,
            [*single, *early],
        ),  # goes on with the first: a number that was cut off is left out
        ("train_heads-brief", 3, 10, early),  # another recipe, of which there is nothing to compare
    ):
        model = {"kv_copies": 1} if name == "train_heads-single" else {}  # its default, which the first does not say
        about = {
            "model": model,
            "recipe": {"steps": steps},
            "valid_tokens": 9,
            "device": "H",
            "date": f"2026-01-0{day}",
        }
        (tmp_path / f"{name}-2026010{day}-cpu.json").write_text(json.dumps({**about, "rows": found}))
    measured = list(c29.measure(False))
    assert {row["measured_on"] for row in measured} == {"H"}, "where they were trained, not where they are compared"
    added = {(row["kv_heads"], row["seed"]): row["added"] for row in measured}
    assert added == {(8, 0): 0, (8, 1): 0, (2, 0): 0.1, (2, 1): 0.2, (1, 0): 0.4, (1, 1): 0.5}


def test_c29_trains_toys_that_differ_by_seed_and_heads():
    pytest.importorskip("optax")
    rows = list(c29.measure(True))
    assert [(row["kv_heads"], row["seed"]) for row in rows] == [(4, 0), (4, 1), (1, 0), (1, 1)]
    assert len({row["nats"] for row in rows}) == 4
    assert all(3 < row["nats"] < 5.9 for row in rows)  # log(400) is 5.99
    assert rows[0]["parameters"] - rows[2]["parameters"] == 32 * 2 * 3 * 8  # three heads of K and V fewer


def test_c29_draws_its_rows(tmp_path):
    path = tmp_path / "claims-C29.json"
    rows = [*heads_rows([0.01, 0.02]), {"verdict": "yes"}]
    path.write_text(json.dumps(GOOD | {"experiment": "claims-C29", "rows": rows}))
    assert command.main(["--draw", str(path)]) == 0
    assert path.with_suffix(".svg").read_text().count("<path") > 10
