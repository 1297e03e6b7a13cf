"""What speculative decoding gains, at toy size: workloads, acceptance of documents, steps with imposed acceptance."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import speculation
from experiments.drafts import acceptance, rejection, steps
from experiments.drafts.acceptance import Served, interval, summary
from experiments.drafts.imposed import VerifyingTimer, draw, imposed, verifying_step
from experiments.drafts.steps import break_even
from experiments.drafts.workloads import WORKLOADS
from experiments.steps.timer import pool_for
from jllm.files.load import BUNDLED
from jllm.files.tokenizer import load_tokenizer
from jllm.model.sampling import neutral_sampling
from jllm.speculative.draft_model import DraftModel
from jllm.speculative.tree import Tree, chain
from tests.experiments.test_decode_step import TOY
from tests.tiny import tiny_model


class Characters:
    """Each character a token."""

    def encode(self, text):
        return [1, *(3 + ord(c) % 90 for c in text[:60])]


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Runs the command with a tiny model; returns its status, and its result if there is one."""
    model = tiny_model(tokenizer=Characters(), num_layers=1)
    for module in (acceptance, rejection):
        monkeypatch.setattr(module, "load", lambda *args, **options: model)

    def run(*words):
        status = speculation.main([*words, "--results", str(tmp_path)])
        files = list(tmp_path.glob("speculation-*.json"))
        return status, json.loads(files[0].read_text()) if files else None

    return run


def served(seconds=1.0, tokens=(5, 6), segments=4, advanced=8.0, accepted=None):
    return Served(seconds, 2 * seconds, tokens, segments, advanced, accepted or {})


@pytest.mark.parametrize("name", WORKLOADS)
def test_prompts_fit_the_bundled_model(name):
    prompts = WORKLOADS[name](load_tokenizer(BUNDLED), 8)
    assert len(prompts) == len({tuple(prompt) for prompt in prompts}) == 8
    assert all(1 < len(prompt) < 400 for prompt in prompts)


def test_repetitive_prompts_repeat_themselves():
    """Most tokens follow the two before them as they did earlier in the prompt."""
    for prompt in WORKLOADS["repetitive"](load_tokenizer(BUNDLED), 8):
        seen = [tuple(prompt[i : i + 3]) for i in range(len(prompt) - 2)]
        assert len(set(seen)) < 0.8 * len(seen)


def test_documents_are_served_by_every_engine(command):
    status, document = command(
        "acceptance", "--drafters", "ngram", "--temperatures", "0", "1", "--documents", "2", "--tokens", "12", "20"
    )
    assert (status, document["complete"], document["experiment"]) == (0, True, "speculation-acceptance")
    totals = [row for row in document["rows"] if "times" in row]
    choices = [("none", ""), ("none, again", ""), ("ngram", "fixed"), ("ngram", "automatic")]
    assert [(row["drafter"], row["choice"]) for row in totals] == 4 * choices
    assert all(row["same_tokens"] == row["documents"] == 2 for row in totals)
    assert all("tokens_a_step" in row for row in totals if row["choice"] == "fixed")
    depths = [row for row in document["rows"] if "depth" in row]
    assert {row["depth"] for row in depths} == set(range(1, 8))
    assert all(0 <= row["acceptance_95"][0] <= row["acceptance"] <= row["acceptance_95"][1] <= 1 for row in depths)
    names = [bar["name"] for bar in document["bars"]]
    assert [name.split(",")[0] for name in names] == ["ngram", "automatic choice", "automatic choice"]


def test_a_documents_time_is_held_against_its_own():
    plain = [served(4.0), served(1.0), served(9.0)]
    fast = [served(2.0), served(0.5), served(9.0, tokens=(5, 7), advanced=12.0)]
    found = summary(fast, plain)
    assert (found["times"], found["tokens_a_step"], found["same_tokens"]) == (2.0, round(28 / 12, 4), 2)
    assert found["tokens_s"] == round(6 / 11.5, 1)
    assert found["cpu_times"] == 2.0
    assert "tokens_a_step" not in summary([served(segments=0)], [served()])


def test_intervals_hold_the_mean_of_many_documents():
    values = list(np.random.default_rng(1).normal(3.0, 1.0, 400))
    low, high = interval(values, np.mean)
    assert 2.8 < low < np.mean(values) < high < 3.2
    assert interval([7.0], np.mean) == [7.0, 7.0]


def test_bars_are_of_the_slowest_case():
    rows = [
        {"workload": "repetitive", "temperature": 0.0, "drafter": "ngram", "choice": "fixed", "times": 1.7},
        {"workload": "repetitive", "temperature": 0.0, "drafter": "ngram", "choice": "automatic", "times": 1.2},
        {"workload": "repetitive", "temperature": 1.0, "drafter": "ngram", "choice": "automatic", "times": 0.97},
        {"workload": "repetitive", "temperature": 1.0, "drafter": "none, again", "choice": "", "times": 0.99},
    ]
    fixed, automatic = acceptance.bars(rows)
    assert (fixed["value"], fixed["met"]) == (1.7, False)
    assert (automatic["value"], automatic["met"]) == (0.97, False)
    assert "up to 1.0%" in automatic["name"]


@pytest.mark.parametrize("tree", [chain(3), Tree((0, 0, 1))], ids=["chain", "tree"])
def test_acceptance_is_as_imposed(tree):
    model = tiny_model()
    timer = VerifyingTimer(model.params, model.config, pool_for(5, 8 + 80 * 4, 16, None), drafter=imposed(tree, 0.5))
    layout, buffer = verifying_step(5, tree)
    step = timer.lower(layout).compile()

    def made(acceptance):
        timer.drafter = imposed(tree, acceptance)
        timer.renew()
        timer.place(8)
        tokens = []
        for _ in range(80):
            found = timer.run(step, [jax.device_put(buffer)])
            tokens.append((np.asarray(found) >= 0).sum() / 5)
        return tokens

    assert made(0.0) == [1.0] * 80
    assert made(1.0) == [1.0, *[1.0 + tree.depth] * 79]  # before the first step nothing is drafted
    if tree.is_chain:
        assert made([1.0, 0.0, 1.0]) == [1.0, *[2.0] * 79]
        assert np.mean(made(0.5)[1:]) == pytest.approx(1 + 0.5 + 0.25 + 0.125, abs=0.2)


def test_sampling_is_part_of_a_step_with_imposed_tokens():
    """A row that is not finite is found."""
    model = tiny_model()
    params = jax.tree.map(jnp.asarray, neutral_sampling(2))
    logits = jnp.zeros((2, model.config.vocab_size)).at[1, 3].set(jnp.nan)
    tokens, finite = jax.jit(lambda x: draw(x, params, jnp.zeros(2, jnp.int32), backend=None))(logits)
    assert list(finite) == [True, False]
    assert list(tokens) == [1, 1]


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 1.0])
def test_break_even(share):
    assert break_even(sum(share**i for i in range(5)), 4) == pytest.approx(share, abs=1e-3)
    assert break_even(5.1, 4) is None


def test_steps_at_toy_size(command, tmp_path):
    config = tmp_path / "toy.json"
    config.write_text(json.dumps(TOY))
    options = ["--config", str(config), "--dtype", "float32", "--context", "20", "--steps", "2", "--repeats", "1"]
    status, document = command("steps", *options, "--batch", "2", "--rows", "2", "4", "--copies", "w8a16")
    assert (status, document["experiment"], document["bars"]) == (0, "speculation-steps-toy", [])
    timed = document["rows"]
    assert all(row["simulated"] and "error" not in row for row in timed)
    assert [(row["context"], row["Q"]) for row in timed] == [(20, q) for q in (1, 2, 4, 4, 2, 4)]
    plain, _, checked, gained, _, copy = timed
    assert copy["drafting_over_plain"] == pytest.approx(copy["step_ms"] / plain["step_ms"], rel=1e-2)
    assert checked["over_plain"] == pytest.approx(checked["step_ms"] / plain["step_ms"], rel=1e-2)
    assert gained["times"] == pytest.approx(3 * plain["step_ms"] / gained["step_ms"], rel=1e-2)


def test_bars_of_steps():
    rows = [
        {"Q": 4, "batch": 16, "context": 136, "over_plain": 1.11},
        {"Q": 4, "batch": 64, "context": 1024, "over_plain": 1.19},
        {"Q": 8, "batch": 64, "context": 1024, "over_plain": 1.5},
        {"Q": 4, "batch": 1, "context": 136, "times": 2.6},
    ]
    assert [bar["met"] for bar in steps.bars(rows)] == [False, True, True]


def test_drafts_by_equality_and_by_rejection(command, monkeypatch):
    options = ["rejection", "--documents", "2", "--tokens", "10", "--drafter", "ngram"]
    assert command(*options)[0] == 2
    other = tiny_model(seed=1, num_layers=1)
    monkeypatch.setattr(rejection, "find_drafter", lambda *_: DraftModel(other.params, other.config, chain(4)))
    status, document = command(*options)
    assert (status, document["experiment"]) == (0, "speculation-rejection")
    accepted = {(row["temperature"], row["acceptance"]): row["accepted"] for row in document["rows"]}
    assert accepted.keys() == {(temperature, mode) for temperature in (0.7, 1.0) for mode in rejection.MODES}
    assert all(0.02 < share < 0.5 for share in accepted.values())
    assert all(accepted[temperature, "rejection"] > accepted[temperature, "equal"] for temperature in (0.7, 1.0))


def test_both_ways_keep_the_targets_distribution():
    p, q = np.asarray([[0.6, 0.3, 0.1]] * 20_000), np.asarray([[0.2, 0.3, 0.5]] * 20_000)
    for mode, least, most in ((rejection.by_equality, 0.6 / 1.4, 0.6), (rejection.by_rejection, 0.59, 0.61)):
        tokens, accepted = mode(p, q, np.random.default_rng(0))
        assert np.bincount(tokens) / len(tokens) == pytest.approx(p[0], abs=0.02)
        assert least - 0.01 < accepted.mean() < most + 0.01


def test_what_is_refused(command, capsys):
    assert command("steps", "--rows", "1")[0] == 2
    assert "--rows 1: each must be from 2 to 64" in capsys.readouterr().err
    assert command("acceptance", "--drafters", "oracle")[0] == 2
    assert "oracle" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command("speed")
