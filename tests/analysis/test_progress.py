"""Evaluations that were interrupted: what is scored stays, what another evaluation left is refused."""

from dataclasses import asdict, replace

import numpy as np
import pytest

from jllm.analysis import evaluate as module
from jllm.analysis import scoring
from jllm.analysis.evaluate import evaluate, record
from jllm.analysis.progress import open_progress
from jllm.analysis.protocols import Protocol
from jllm.errors import EvaluationError
from jllm.quant.quantize import quantize
from tests.tiny import tiny_model

IDS = np.random.default_rng(3).integers(3, 90, 150).tolist()
OPTIONS = {"max_slots": 2, "max_step_tokens": 24, "page_size": 8}


@pytest.fixture(scope="module")
def model():
    return tiny_model(num_layers=1)


def texts(count: int = 6) -> list[list[int]]:
    return [IDS[i * 20 : i * 20 + 11 + i] for i in range(count)]


def interrupt(monkeypatch, after: int) -> list[int]:
    """Ctrl-C when `after` windows have been scored; returns the list that numbers the windows scored."""
    scored, cut = [], scoring._scored

    def one(window, pieces):
        if len(scored) == after:
            raise KeyboardInterrupt
        scored.append(window.text)
        return cut(window, pieces)

    monkeypatch.setattr(scoring, "_scored", one)
    return scored


def close(a, b) -> bool:
    numbers = [[x for part in e.parts for x in asdict(part).values() if x is not None] for e in (a, b)]
    return np.allclose(*numbers, rtol=1e-5) and [p.tokens for p in a.parts] == [p.tokens for p in b.parts]


@pytest.mark.parametrize("after", [0, 1, 4])
@pytest.mark.parametrize("reference", ["none", "model", "recorded"])
def test_an_interrupted_evaluation_goes_on(model, monkeypatch, tmp_path, after, reference):
    changed = model if reference == "none" else quantized(model)
    other = {"none": None, "model": model, "recorded": record(model, texts(), "document", **OPTIONS)}[reference]
    run = {"reference": other, **OPTIONS}
    straight = evaluate(changed, texts(), "document", **run)
    file = tmp_path / "progress.jsonl"
    with monkeypatch.context() as patch:
        before = interrupt(patch, after)
        with pytest.raises(KeyboardInterrupt):
            evaluate(changed, texts(), "document", resume=file, **run)
    with monkeypatch.context() as patch:
        rest = interrupt(patch, 99)
        resumed = evaluate(changed, texts(), "document", resume=file, **run)
    assert sorted(before + rest) == list(range(6))
    assert len(before) == after
    assert close(resumed, straight)
    with monkeypatch.context() as patch:
        nothing = interrupt(patch, 99)
        assert evaluate(changed, texts(), "document", resume=file, **run) == resumed
    assert nothing == []


def quantized(model):
    return replace(model, params=quantize(model.params, "w8a16"))


def test_a_line_that_was_cut_off_is_scored_again(model, tmp_path):
    file = tmp_path / "progress.jsonl"
    whole = evaluate(model, texts(), "document", resume=file, **OPTIONS)
    written = file.read_bytes()
    for cut in (1, 40, len(written.splitlines(keepends=True)[-1]) - 1, len(written) - 20, len(written)):
        file.write_bytes(written[:-cut])
        assert close(evaluate(model, texts(), "document", resume=file, **OPTIONS), whole)
        assert len(file.read_bytes().splitlines()) == len(written.splitlines())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"texts": 5}, "of other text"),
        ({"kv_cache": "int8-g8"}, "of other KV format"),
        ({"protocol": Protocol("mine", 32, last="short", joined=False)}, "of other protocol"),
        ({"scheme": "w8a16"}, "of other models"),
        ({"reference": True}, "of other models"),
        ({"backend": "xla"}, "of other backend"),
    ],
    ids=str,
)
def test_another_evaluation_is_refused(model, tmp_path, change, says):
    file = tmp_path / "progress.jsonl"
    evaluate(model, texts(), "document", resume=file, **OPTIONS)
    before = file.read_bytes()
    other = quantized(model) if "scheme" in change else model
    options = {name: change[name] for name in ("kv_cache", "backend") if name in change}
    options |= {"reference": model} if "reference" in change else {}
    with pytest.raises(EvaluationError, match=says):
        evaluate(
            other, texts(change.get("texts", 6)), change.get("protocol", "document"), resume=file, **options, **OPTIONS
        )
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("once upon a time\n", "is not the progress of an evaluation"),
        ('{"window": 1}\n', "is not the progress of an evaluation"),
        ("[1, 2]\n", "is not the progress of an evaluation"),
        ("a line without an end", "is not the progress of an evaluation"),
        ("{}", "is not the progress of an evaluation"),
    ],
)
def test_another_kind_of_file_is_refused(model, tmp_path, text, says):
    file = tmp_path / "notes.txt"
    file.write_text(text)
    with pytest.raises(EvaluationError, match=says):
        evaluate(model, texts(), "document", resume=file, **OPTIONS)
    assert file.read_text() == text


@pytest.mark.parametrize("line", ['{"window": 1, "scores": {"nats": ["float32", "?"]}}', '{"scores": {}}', "[]"])
def test_damage_is_named(model, tmp_path, line):
    file = tmp_path / "progress.jsonl"
    evaluate(model, texts(), "document", resume=file, **OPTIONS)
    file.write_text(file.read_text().splitlines()[0] + f"\n{line}\n")
    with pytest.raises(EvaluationError, match=r"progress\.jsonl: is damaged"):
        evaluate(model, texts(), "document", resume=file, **OPTIONS)


def test_one_process_writes_and_machines_are_told_apart(model, tmp_path, monkeypatch):
    file, key = tmp_path / "progress.jsonl", {"text": "1", "device": "x"}
    with open_progress(file, key) as (found, add):
        assert found == {}
        add(3, {"nats": np.ones(2, np.float32)})
        with (
            pytest.raises(EvaluationError, match=r"progress\.jsonl: another process writes it"),
            open_progress(file, key),
        ):
            pass
    with open_progress(file, key) as (found, add):
        assert found.keys() == {3}
    with (
        pytest.raises(EvaluationError, match="of other device; name another file"),
        open_progress(file, key | {"device": "y"}),
    ):
        pass
    asked = []
    monkeypatch.setattr(module, "open_progress", lambda path, key: asked.append(key) or open_progress(path, key))
    monkeypatch.setattr(module, "score_windows", lambda *args: [{"nats": np.ones(1)} for _ in args[2]])
    for embed in (model.params.embed, model.params.embed.at[0, 5].add(1e-3)):
        changed = replace(model, params=replace(model.params, embed=embed))
        evaluate(changed, texts(), "document", resume=tmp_path / f"{len(asked)}.jsonl", **OPTIONS)
    assert {"device", "jax", "models"} <= asked[0].keys()
    assert [name for name in asked[0] if asked[0][name] != asked[1][name]] == ["models"]


def test_a_directory_and_a_missing_one(model, tmp_path):
    with pytest.raises(EvaluationError, match="cannot be written: Is a directory"):
        evaluate(model, texts(), "document", resume=tmp_path, **OPTIONS)
    with pytest.raises(EvaluationError, match="cannot be written"):
        evaluate(model, texts(), "document", resume=tmp_path / "no" / "file", **OPTIONS)
