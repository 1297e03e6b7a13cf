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


def test_an_adapter_of_quantized_weights_has_no_gap_and_is_what_trains(monkeypatch):
    bundled = jllm.load(dtype="float32")
    small = tiny_model(vocab_size=bundled.config.vocab_size, num_layers=1, context=256, hidden_size=64)
    monkeypatch.setattr(grpo.jllm, "load", lambda *args, **options: replace(small, tokenizer=bundled.tokenizer))
    monkeypatch.setattr(grpo, "reward_of", lambda text, words, ended: len(text) % 7 / 7)
    asked = ["--steps", "2", "--prompts", "2", "--group", "2", "--new-tokens", "6", "--lr", "0.1"]
    args = grpo.parse_arguments([*asked, "--lora", "2", "--quantize", "w8a16"])
    recipe = grpo.Recipe(Objective(**grpo.of(Objective, args)), **grpo.of(grpo.Recipe, args))
    rows = list(grpo.curve(grpo.jllm.load(), recipe, 2, None, {}))
    assert [row["gap"] for row in rows] == [0, 0]
    assert rows[0]["kl"] == 0 < rows[1]["kl"]


def test_a_run_has_no_gap_and_goes_on_with_the_same_curve(tmp_path, monkeypatch):
    """With two inner steps, samples that are cut, and rewards of a tiny model."""
    bundled = jllm.load(dtype="float32")
    small = tiny_model(vocab_size=bundled.config.vocab_size, num_layers=1, context=256)
    model = replace(small, tokenizer=bundled.tokenizer)
    monkeypatch.setattr(grpo.jllm, "load", lambda *args, **options: model)
    monkeypatch.setattr(grpo, "reward_of", lambda text, words, ended: len(text) % 7 / 7)
    asked = ["--prompts", "2", "--group", "2", "--new-tokens", "6", "--inner", "2", "--lr", "0.01", "--loss", "dr_grpo"]
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
