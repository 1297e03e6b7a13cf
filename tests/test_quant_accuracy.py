"""The sweep of quantization schemes: its rows, and what an interrupted one goes on with."""

import json

import pytest

import experiments.quant_accuracy as quant_accuracy
import jllm.evaluate
from jllm.evaluate import Evaluation, Part
from jllm.protocols import PROTOCOLS

TEXT = "Once upon a time there was a king who had three daughters. " * 40


@pytest.fixture
def sweep(tmp_path):
    """Runs the command on a text; returns its status and, if there is one, its result."""
    (tmp_path / "text.txt").write_text(TEXT)

    def run(*options):
        given = ["--text", str(tmp_path / "text.txt"), "--results", str(tmp_path), "--tokens", "512", *options]
        status = quant_accuracy.main(given)
        results = list(tmp_path.glob("quant_accuracy-*.json"))
        return status, json.loads(results[0].read_text()) if results else None

    return run


@pytest.fixture
def evaluated(monkeypatch):
    """What was evaluated, by KV format; the formats of `fail` are interrupted."""
    calls, fail = [], []

    def evaluate(model, ids, protocol, *, reference, kv_cache):
        calls.append(kv_cache)
        if kv_cache in fail:
            raise KeyboardInterrupt
        return Evaluation(
            PROTOCOLS["windows-512"], (Part(10, None, 12.0, 11.0, 0.5, 9), Part(10, None, 9.0, 9.0, 0.1, 8))
        )

    monkeypatch.setattr(quant_accuracy, "evaluate", evaluate)
    evaluate.calls, evaluate.fail = calls, fail
    return evaluate


def test_goes_on_where_it_was_interrupted(sweep, evaluated):
    options = ["--schemes", "bf16", "--kv", "int8-g8", "int4-g8"]
    evaluated.fail.append("int4-g8")
    with pytest.raises(KeyboardInterrupt):
        sweep(*options)
    assert evaluated.calls == [None, "int8-g8", "int4-g8"]
    evaluated.fail.clear()
    status, result = sweep(*options)
    assert (status, evaluated.calls[3:]) == (0, ["int4-g8"])
    assert result["complete"]
    assert [(row["scheme"], row["kv"]) for row in result["rows"]] == [
        ("bf16", "model"),
        ("bf16", "int8-g8"),
        ("bf16", "int4-g8"),
    ]
    assert {row["protocol"] for row in result["rows"]} == {"windows-512"}
    sweep(*options)  # one that was finished begins anew
    assert len(evaluated.calls) == 7


def test_another_sweep_does_not_go_on_with_it(sweep, evaluated):
    evaluated.fail.append("int4-g8")
    for tokens in ("512", "513"):
        with pytest.raises(KeyboardInterrupt):
            sweep("--schemes", "bf16", "--kv", "int4-g8", "--tokens", tokens)
    assert evaluated.calls == [None, "int4-g8"] * 2


def test_the_grid(sweep, evaluated):
    _, result = sweep("--schemes", "bf16", "w8a16", "--kv", "model", "int8-g8", "--grid")
    pairs = [(row["scheme"], row["kv"]) for row in result["rows"]]
    assert pairs == [("bf16", "model"), ("bf16", "int8-g8"), ("w8a16", "model"), ("w8a16", "int8-g8")]
    row = result["rows"][0]
    assert (row["kl"], row["top1"], row["added"]) == (0.03, 0.85, pytest.approx(0.05127, abs=1e-5))
    assert [row["bytes_per_kv"] for row in result["rows"]] == [2.0, 1.25, 2.0, 1.25]
    assert row["kl_95"][0] <= row["kl"] <= row["kl_95"][1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--schemes", "w8a61"], "unknown quantization scheme 'w8a61'"),
        (["--kv", "int8-g7"], "int8-g7"),
        (["--protocol", "windows"], "unknown protocol 'windows'; near ones: windows-512"),
        (["--tokens", "100"], "the text has 100 tokens, a window takes 512"),
        (["--protocol", "wikitext2-2048"], "the model's context is 1024"),
    ],
)
def test_refused_before_anything_is_written(sweep, capsys, monkeypatch, options, message):
    monkeypatch.setattr(jllm.evaluate, "score_step", None)
    status, result = sweep("--schemes", "bf16", *options)
    error = capsys.readouterr().err
    assert (status, result) == (2, None)
    assert message in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1
