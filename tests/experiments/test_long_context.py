"""Needles, a cache that forgets, and what the experiment of long contexts makes of them."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest

import jllm
from experiments import eviction, long_context
from experiments.eviction import Policy
from experiments.needles import KEYS, VALUES, questions
from experiments.training import debian_docs
from jllm.errors import InputFileError
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def needle():
    return jllm.load(long_context.NEEDLE)


def ask(model, *options, policy=None, kv="f32"):
    args = long_context.parse_args(["--contexts", "4", *options])
    return long_context.ask(model, kv, args, 256, policy)


def test_contexts_ask_for_one_pair_of_each_depth():
    ids, order, pairs = long_context.contexts(5, 101, seed=3)
    assert pairs == 42
    assert ids.shape == (5, 101)
    at = questions(pairs, 8)
    for row, depths in zip(ids, order):
        keys, values = row[1 : at.start : 2], row[2 : at.start : 2]
        assert row[0] == 0
        assert len(set(keys)) == pairs
        assert set(keys) <= set(range(1, 1 + KEYS))
        assert set(values) <= set(range(1 + KEYS, 1 + KEYS + VALUES))
        where = [int(np.flatnonzero(keys == key)[0]) for key in row[at]]
        np.testing.assert_array_equal(values[where], row[at.start + 1 :: 2])
        assert [int(8 * (i + 1) / pairs - 1e-9) for i in where] == depths.tolist()


def test_the_committed_model_finds_needles_and_none_that_was_forgotten(needle):
    found = ask(needle)
    assert found["hits"].mean() > 0.95
    kept = Policy(sinks=4, recent=60)
    forgetful = ask(needle, policy=kept)
    inside = forgetful["edges"][:-1] >= forgetful["edges"][-1] - kept.recent
    outside = forgetful["edges"][1:] <= forgetful["edges"][-1] - kept.recent
    assert inside.any()
    assert outside.sum() > 4
    assert forgetful["hits"][:, inside].mean() > 0.9
    assert forgetful["hits"][:, outside].mean() < 0.15


def test_a_cache_that_has_room_for_all_forgets_nothing():
    model = tiny_model()
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, (2, 40)).astype(np.int32)
    whole = eviction.read(model, ids, "f32")
    np.testing.assert_allclose(eviction.read(model, ids, "f32", Policy(4, 40, chunk=8)), whole, atol=1e-5)
    np.testing.assert_allclose(eviction.read(model, ids, "f32", Policy(4, 40, chunk=8), last=7), whole, atol=1e-5)
    fewer = eviction.read(model, ids, "f32", Policy(4, 12, chunk=8))
    np.testing.assert_allclose(fewer[:, :16], whole[:, :16], atol=1e-5)
    assert np.abs(fewer[:, 32:] - whole[:, 32:]).max() > 1e-3


def test_what_is_kept_has_the_positions_of_a_text_without_what_went():
    """A layer's keys depend on tokens and positions alone, if it is the first: a model of one layer that forgets is one
    that never saw what it forgot."""
    model = tiny_model()
    config = model.config.one_layer(0)
    one = replace(model, config=config, params=replace(model.params, layers=model.params.layers[:1]))
    ids = np.random.default_rng(1).integers(0, config.vocab_size, (3, 33)).astype(np.int32)
    found = eviction.read(one, ids, "f32", Policy(2, 6, chunk=4), last=5)  # 27 inputs, then five
    left = np.concatenate([ids[:, :2], ids[:, 27 - 6 :]], axis=1)
    np.testing.assert_allclose(found[:, -5:], eviction.read(one, left, "f32")[:, -5:], atol=1e-5)


def test_wilson_intervals():
    assert long_context.wilson(0, 48) == pytest.approx((0, 0.0741), abs=1e-4)
    assert long_context.wilson(48, 48) == pytest.approx((0.9259, 1), abs=1e-4)
    assert long_context.wilson(50, 100) == pytest.approx((0.4038, 0.5962), abs=1e-4)


def test_bars_can_fail():
    def rows(plain, kept, forgotten):
        shared = {"part": "needle", "tokens": 1024}
        whole = {**shared, "kv": "bf16", "policy": "all"}
        return [
            {**whole, "accuracy": plain}, {**whole, "tokens": 256, "accuracy": 0.0},
            {**shared, "kv": "model", "policy": "4+252", "kept": "all", "accuracy": kept},
            {**shared, "kv": "model", "policy": "4+252", "kept": "none", "accuracy": forgotten},
            {**shared, "kv": "model", "policy": "4+252", "kept": "some", "accuracy": 0.5},
        ]  # fmt: skip

    assert [bar["met"] for bar in long_context.bars(rows(0.96, 0.96, 0.04))] == [True] * 3
    assert [bar["met"] for bar in long_context.bars(rows(0.9, 0.9, 0.2))] == [False] * 3


def test_a_small_run_leaves_rows(tmp_path, capsys):
    options = ["--contexts", "2", "--sizes", "64", "--recent", "28", "--positions", "128"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long_context, "kv_formats", lambda dim: ("bf16",))
        patch.setattr(long_context, "ROPES", ("linear", "yarn"))
        assert long_context.main([*options, "--windows", "2", "--results", str(tmp_path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    parts = [row["part"] for row in document["rows"]]
    assert [parts.count(part) for part in ("needle", "rope", "position")] == [2 * 8, 2, 2]
    linear, yarn = (row for row in document["rows"] if row["part"] == "rope")
    assert linear["tokens"] == yarn["tokens"] == 128
    assert linear["nats"] != yarn["nats"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sizes", "10"], "--sizes 10: a context has 33 to 1024 tokens"),
        (["--sizes", "4096"], "--sizes 4096: a context has"),
        (["--positions", "10"], "a window has at least 128 tokens"),
        (["--needle", str(jllm.files.load.BUNDLED)], "4096 tokens, a model of needles has 1153"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(options, message, tmp_path, capsys):
    assert long_context.main([*options, "--results", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_training_a_model_of_needles(tmp_path, monkeypatch, capsys):
    pytest.importorskip("optax")
    from experiments import train_needle

    monkeypatch.setattr(train_needle, "SIZES", ((6, 2), (8, 4)))
    options = ["--out", str(tmp_path / "m"), "--results", str(tmp_path), "--tokens", "60", "--eval-every", "2"]
    assert train_needle.main([*options, "--steps", "2", "--valid-rows", "2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["step"] for row in document["rows"]] == [0, 2]
    assert document["rows"][0]["nats"] != document["rows"][1]["nats"]
    model = jllm.load(tmp_path / "m")
    assert (model.config.num_layers, model.config.head_dim) == (2, 128)
    assert sum(leaf.size for leaf in jax.tree.leaves(model.params)) == document["parameters"]
    assert train_needle.main(options) == 2
    assert "already holds a model" in capsys.readouterr().err


def test_prose_of_a_documentation_package(tmp_path):
    long = "This package is a collection of words that together make up one sentence of some length, as prose does."
    blocks = f"<p>{long}</p><pre>{long[::-1]}.</pre><li>short.</li><div>{long[5:]}</div>"
    (tmp_path / "a.html").write_text(f"<head><title>{long}</title></head>{blocks}")
    (tmp_path / "b.txt").write_text(f"{long}\n\nAnother\n{long}\n\n{long[:-1]}\n\n{long[:40]}.\n")
    (tmp_path / "_sources").mkdir()
    (tmp_path / "_sources" / "c.txt").write_text(f"Hidden {long}")
    assert list(debian_docs.documents(tmp_path)) == [[long, long[5:]], [f"Another {long}"]]


def test_a_package_that_apt_lacks_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))  # where there is no apt at all
    with pytest.raises(InputFileError, match="package debian-faq: "):
        debian_docs.unpack("debian-faq", tmp_path)
