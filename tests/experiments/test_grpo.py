"""Checks GRPO: rewards, no gap, and that a run goes on as if it had not been interrupted. Its losses are checked by
tests/training/test_other_trainers.py."""

import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

pytest.importorskip("optax")
import jllm  # noqa: E402
from experiments import grpo  # noqa: E402
from experiments.grpo import Objective, reward_of  # noqa: E402
from jllm.step.buckets import Bucket  # noqa: E402
from tests.tiny import tiny_model  # noqa: E402

WORDS = ("king", "wolf", "bird")


def test_a_reward_counts_words_and_the_end():
    assert reward_of("The King met a wolf. The wolf ran.", WORDS, ended=False) == pytest.approx(2 / 3)
    assert reward_of("Nothing.", WORDS, ended=True) == 0.5


@pytest.fixture
def small(monkeypatch):
    """A model of one layer, whose rewards are there from the first step on; its engines have one size of step."""
    bundled = jllm.load(dtype="float32")
    made = tiny_model(vocab_size=bundled.config.vocab_size, num_layers=1, context=256, hidden_size=64)
    model = replace(made, tokenizer=bundled.tokenizer)
    monkeypatch.setattr(grpo.jllm, "load", lambda *args, **options: model)
    monkeypatch.setattr(grpo, "reward_of", lambda text, words, ended: len(text) % 7 / 7)
    monkeypatch.setattr(grpo.jllm, "Engine", partial(jllm.Engine, buckets=(Bucket(4, 4, 4),)))
    return model


SIZES = ["--prompts", "2", "--group", "2", "--new-tokens", "6"]


def recipe_of(*asked):
    args = grpo.parse_arguments([*SIZES, *asked])
    return grpo.Recipe(Objective(**grpo.of(Objective, args)), **grpo.of(grpo.Recipe, args))


def curve(model, *asked):
    return list(grpo.curve(model, recipe_of(*asked), 2, None, {}))


@pytest.mark.parametrize(("how", "bars"), [("recompute", 1), ("keep", 0)])
def test_samples_over_older_values_may_have_a_gap(how, bars):
    found = grpo.bars_of([{"reward": 0.2, "gap": 0.1}], recipe_of("--ahead", "1", "--running", how))
    assert [bar["met"] for bar in found if bar["name"] == "largest gap"] == [False] * bars


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


def test_cut_samples_train_nothing_if_so_asked():
    def done(tokens, reason):
        entries = [SimpleNamespace(logprob=-1.0)] * tokens
        own = {"token_ids": range(tokens), "logprobs": entries, "versions": [0] * tokens}
        return SimpleNamespace(**own, finish_reason=reason, text="")

    asked = grpo.Asked([WORDS], [[5, 6]], [0], {(0, 0): done(3, "stop"), (0, 1): done(4, "length")})
    for more, trained in (([], [3, 4]), (["--mask-cut"], [3, 0])):
        batch = grpo.rollouts(SimpleNamespace(run=list), asked, recipe_of(*more), 0, 16)
        assert batch.mask.sum(axis=1).tolist() == trained
        assert (batch.versions >= 0).sum(axis=1).tolist() == [3, 4]


def test_options_that_do_not_go_together_are_refused(small, monkeypatch, capsys):
    for wrong, said in (
        (["--running", "keep"], "--running keep needs --ahead"),
        (["--ahead", "2", "--checkpoint", "kept"], "--ahead and --checkpoint do not go together"),
        (["--group", "1"], "--group 1 must be at least 2"),
    ):
        with pytest.raises(SystemExit):
            grpo.parse_arguments(wrong)
        assert f"error: {said}" in capsys.readouterr().err
    monkeypatch.setattr(grpo.jllm, "load", lambda *args, **options: replace(small, tokenizer=None))
    assert grpo.main(SIZES) == 2
    assert "error: the rewards are of texts, and this model has no tokenizer" in capsys.readouterr().err


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
