"""Claim C29: models that differ in KV heads alone."""

import json

import pytest

from experiments.claims import c29


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
