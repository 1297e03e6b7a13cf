"""The experiment that chooses formats by layer: its choice is the best one, and its scheme is one that jllm takes."""

import json
from itertools import product

import numpy as np
import pytest

from experiments import mixed_precision
from experiments.mixed_precision import choose, layer_bytes, mixed_scheme, sensitivities
from jllm.model.params import matrices
from jllm.quant.quantize import quantize
from jllm.quant.schemes import find_scheme
from tests.experiments.test_quant_accuracy import Pieces
from tests.tiny import tiny_model

FORMATS = ("w4a16-g32", "w8a16")
SCHEMES = {name: find_scheme(name) for name in FORMATS}


def small_model():
    return tiny_model(hidden_size=32, intermediate_size=64, num_layers=3, tokenizer=Pieces())


@pytest.mark.parametrize("seed", range(20))
def test_no_other_choice_within_the_budget_costs_less(seed):
    rng = np.random.default_rng(seed)
    costs, sizes = rng.exponential(1e-3, (4, 3)), rng.integers(100, 200, (4, 3))
    budget = int(rng.integers(sizes.min(axis=1).sum(), sizes.max(axis=1).sum() + 1))
    every = [tuple(zip(range(4), found)) for found in product(range(3), repeat=4)]
    fitting = [found for found in every if sum(sizes[i] for i in found) <= budget]
    chosen = list(enumerate(choose(costs, sizes, budget)))
    assert sum(sizes[i] for i in chosen) <= budget
    assert sum(costs[i] for i in chosen) == pytest.approx(min(sum(costs[i] for i in found) for found in fitting))


def test_bytes_and_sensitivities_are_those_of_each_layer():
    model = small_model()
    sizes, weights = layer_bytes(model, SCHEMES)
    params = quantize(model.params, mixed_scheme("m", ["w8a16", "w4a16-g32", "w8a16"], SCHEMES))
    formats = [{leaf.format.name for leaf in matrices(layer).values()} for layer in params.layers]
    assert formats == [{"w8a16"}, {"w4a16-g32"}, {"w8a16"}]
    stored = [sum(x.nbytes for leaf in matrices(layer).values() for x in leaf_arrays(leaf)) for layer in params.layers]
    assert stored == [sizes[0, 1], sizes[1, 0], sizes[2, 1]]
    assert weights.tolist() == [sum(leaf.size for leaf in matrices(layer).values()) for layer in model.params.layers]
    costs = sensitivities(model, SCHEMES, np.arange(24, dtype=np.int32).reshape(2, 12))
    assert costs.shape == (3, 2)
    assert (costs[:, 0] > 10 * costs[:, 1]).all()  # 4 bits cost more than 8
    assert (costs > 0).all()


def leaf_arrays(leaf):
    return [x for x in (leaf.values, leaf.scales, leaf.zeros) if x is not None]


def test_a_run_writes_a_scheme_and_its_rows(tmp_path, monkeypatch):
    model = small_model()
    monkeypatch.setattr(mixed_precision.jllm, "load", lambda *args, **options: model)
    tokens = np.arange(24, dtype=np.int32).reshape(2, 12)
    monkeypatch.setattr(mixed_precision, "own_tokens", lambda *args, **options: tokens)
    monkeypatch.setattr(mixed_precision, "run_of", lambda args: {})
    monkeypatch.setattr(mixed_precision, "read_tokens", lambda model, args: ([list(r) for r in tokens], "document"))
    options = ["--results", str(tmp_path), "--formats", *FORMATS, "--seeds", "0"]
    file = tmp_path / "mixed.toml"
    assert mixed_precision.main([*options, "--budgets", "0.9", "--write", str(file)]) == 0
    (result,) = tmp_path.glob("*.json")
    rows = json.loads(result.read_text())["rows"]
    assert [row["part"] for row in rows] == ["uniform", "uniform", "mixed", "shuffled"]
    mixed, shuffled = rows[2:]
    assert sorted(mixed["formats"]) == sorted(shuffled["formats"])
    assert 0.6 < mixed["bytes_per_weight"] == shuffled["bytes_per_weight"] <= 0.9
    assert mixed["ratio"] < 1 == rows[0]["ratio"]
    assert mixed["over"] == "w4a16-g32"
    assert find_scheme(str(file)).rules == mixed_scheme("mixed", mixed["formats"], SCHEMES).rules


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--formats", "w8a8"], "w8a8 is not one format for all linear layers"),
        (["--formats", "w8a16+rotate-kv"], "is not one format for all linear layers"),
        (["--budgets", "0.1"], "none of the formats fits 0.1: the smallest takes 0.5625"),
    ],
)
def test_what_cannot_be_chosen_from_is_refused(options, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(mixed_precision.jllm, "load", lambda *args, **options: small_model())
    monkeypatch.setattr(mixed_precision, "run_of", lambda args: {})
    monkeypatch.setattr(mixed_precision, "read_tokens", lambda model, args: ([[1, 2, 3], [4, 5, 6]], "document"))
    assert mixed_precision.main(["--results", str(tmp_path), "--formats", *FORMATS, *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--write", "x.toml"], ["--write", "x.json", "--budgets", "0.7"]])
def test_a_scheme_file_takes_one_budget_and_a_name(options):
    with pytest.raises(SystemExit, match="2"):
        mixed_precision.parse_args(options)
