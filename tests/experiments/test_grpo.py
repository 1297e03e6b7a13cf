"""Checks GRPO: rewards, no gap, and that a run goes on as if it had not been interrupted. Its losses are checked by
tests/training/test_other_trainers.py."""

import json
from dataclasses import replace

import pytest

pytest.importorskip("optax")
import jllm  # noqa: E402
from experiments import grpo  # noqa: E402
from experiments.grpo import Objective, reward_of  # noqa: E402
from tests.tiny import tiny_model  # noqa: E402


def test_a_reward_counts_words_and_the_end():
    words = ("king", "wolf", "bird")
    assert reward_of("The King met a wolf. The wolf ran.", words, ended=False) == pytest.approx(2 / 3)
    assert reward_of("Nothing.", words, ended=True) == 0.5


@pytest.fixture
def small(monkeypatch):
    """A model of one layer, whose rewards are there from the first step on."""
    bundled = jllm.load(dtype="float32")
    made = tiny_model(vocab_size=bundled.config.vocab_size, num_layers=1, context=256, hidden_size=64)
    model = replace(made, tokenizer=bundled.tokenizer)
    monkeypatch.setattr(grpo.jllm, "load", lambda *args, **options: model)
    monkeypatch.setattr(grpo, "reward_of", lambda text, words, ended: len(text) % 7 / 7)
    return model


SIZES = ["--prompts", "2", "--group", "2", "--new-tokens", "6"]


def curve(model, *asked):
    args = grpo.parse_arguments([*SIZES, *asked])
    recipe = grpo.Recipe(Objective(**grpo.of(Objective, args)), **grpo.of(grpo.Recipe, args))
    return list(grpo.curve(model, recipe, 2, None, {}))


def test_an_adapter_of_quantized_weights_has_no_gap_and_is_what_trains(small):
    rows = curve(small, "--lora", "2", "--quantize", "w8a16", "--lr", "0.1", "--ahead", "3")
    assert [row["gap"] for row in rows] == [0, 0]
    assert rows[0]["kl"] == rows[0]["old"] == 0 < rows[1]["old"] < 1
    assert rows[1]["kl"] > 0


def test_samples_that_run_while_the_weights_change_become_what_is_asked(small, monkeypatch):
    """Kept ones go on over the K and V of the old weights, so that the trainer computes other values."""
    engine = jllm.Engine(small, max_slots=4, max_step_tokens=8, deterministic=True)
    monkeypatch.setattr(grpo.jllm, "Engine", lambda *args, **options: engine)
    monkeypatch.setattr(engine, "close", lambda: None)
    kept, finished = (curve(small, "--lr", "0.1", "--ahead", "3", "--running", how)[1] for how in ("keep", "finish"))
    assert 0 < kept["old"] < 1
    assert kept["gap"] > 0
    assert finished["old"] == 1


def test_options_that_would_do_nothing_are_refused(capsys):
    for wrong in (["--running", "keep"], ["--ahead", "2", "--checkpoint", "kept"]):
        with pytest.raises(SystemExit):
            grpo.parse_arguments(wrong)
    assert capsys.readouterr().err.count("--ahead") >= 2


def test_a_run_has_no_gap_and_goes_on_with_the_same_curve(small, tmp_path):
    """With two inner steps, samples that are cut, and rewards of a tiny model."""
    asked = [*SIZES, "--inner", "2", "--lr", "0.01", "--loss", "dr_grpo"]
    curves = []
    for name, runs in (("whole", [["2"]]), ("parts", [["1", "--checkpoint", "kept"], ["2", "--checkpoint", "kept"]])):
        for steps, *more in runs:
            where = ["--results", str(tmp_path / name), *(str(tmp_path / x) if x == "kept" else x for x in more)]
            assert grpo.main(["--steps", steps, *asked, *where]) == 0
        (file,) = (tmp_path / name).glob("*.json")
        rows = json.loads(file.read_text())["rows"]
        curves.append([{key: row[key] for key in row if not key.endswith("_s")} for row in rows])
    whole, parts = curves
    assert whole == parts
    assert [row["gap"] for row in whole] == [0, 0]
    assert whole[0]["kl"] == 0 < whole[1]["kl"]
