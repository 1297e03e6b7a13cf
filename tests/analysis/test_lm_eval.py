"""lm-eval's tasks through the engine: the scores that its own class for transformers gave (data/make_lm_eval.py)."""

import json
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from jllm.errors import ConfigError, EvaluationError
from jllm.files.load import load
from jllm.step.buckets import Bucket
from tests.lm_eval_cases import CONTEXT, EXPECTED, kept, write_checkpoint, write_tasks
from tests.tiny import tiny_model

pytestmark = [
    pytest.mark.filterwarnings("default"),  # other people's
    # Test by test: of a whole module that is skipped, pytest-xdist says nothing.
    pytest.mark.skipif(
        find_spec("lm_eval") is None, reason="lm-eval is not installed: `uv run --extra eval pytest` runs them"
    ),
]

OPTIONS = {"max_slots": 4, "page_size": 8, "max_step_tokens": 64, "buckets": (Bucket(4, 64, 4),)}


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("lm_eval")
    assert write_checkpoint(path) == json.loads(EXPECTED.read_text())["weights"], "not the checkpoint of the references"
    write_tasks(path)
    return path


@pytest.fixture(scope="module")
def lm(directory):
    from jllm.analysis.lm_eval import JllmLM

    return JllmLM(directory, dtype="float32", **OPTIONS)


def instances(kind: str, *arguments: tuple) -> list:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, args, i, ("task", i, 1)) for i, args in enumerate(arguments)]


def test_every_answer_is_that_of_transformers(lm, directory):
    """Multiple choice, a continuation after no, a short, and too long a context, documents longer than the context,
    and generation: log-probabilities, whether they are greedy, texts, and the metrics that lm-eval makes of them."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    expected = json.loads(EXPECTED.read_text())
    tasks = [name for name in expected if name.startswith("small_")]
    manager = TaskManager(include_path=str(directory), include_defaults=False)
    results = lm_eval.simple_evaluate(model=lm, tasks=tasks, task_manager=manager, log_samples=True, bootstrap_iters=0)
    found = kept(results)
    assert len(tasks) == 4
    for name in tasks:
        for ours, theirs in zip(flat(found[name]["answers"]), flat(expected[name]["answers"]), strict=True):
            assert ours == (pytest.approx(theirs, abs=1e-3) if isinstance(theirs, float) else theirs)
        assert found[name]["metrics"] == pytest.approx(expected[name]["metrics"], rel=1e-4)
    assert {True, False} <= {x for x in flat(expected["small_last"]["answers"]) if isinstance(x, bool)}
    assert results["config"]["model_dtype"] == "float32"


def flat(answers) -> list:
    return [x for each in answers for x in flat(each)] if isinstance(answers, list) else [answers]


def test_the_command_takes_schemes_and_kv_formats(directory, tmp_path, monkeypatch, capsys):
    from lm_eval import tasks

    from jllm.analysis import lm_eval

    only_ours = partial(tasks.TaskManager, include_defaults=False)  # to read its ten thousand takes long
    monkeypatch.setattr(tasks, "TaskManager", only_ours)
    model = f"pretrained={directory},dtype=float32,quantize=w8a8,kv_cache=int8-g8,max_slots=1,max_step_tokens=64"
    command = ["lm_eval", "run", "--model", "jllm", "--model_args", model, "--tasks", "small_choice"]
    command += ["--include_path", str(directory), "--output_path", str(tmp_path / "out.json"), "--log_samples"]
    monkeypatch.setattr(sys, "argv", command)
    assert lm_eval.main() == 0
    (file,) = tmp_path.glob("out*.json")
    document = json.loads(file.read_text())
    (samples,) = tmp_path.glob("samples_small_choice*.jsonl")
    lines = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda line: line["doc_id"])
    found = np.array([float(answer[0][0]) for line in lines for answer in line["resps"]])
    expected = json.loads(EXPECTED.read_text())["small_choice"]["answers"]
    plain = np.array([x for x in flat(expected) if not isinstance(x, bool)])
    assert 1e-5 < np.linalg.norm(found - plain) / np.linalg.norm(plain) < 0.02  # quantized, and hardly different
    assert (document["config"]["quantize"], document["config"]["kv_cache"]) == ("w8a8", "int8-g8")
    monkeypatch.setattr(sys, "argv", [*command[:5], model.replace("w8a8", "w9"), *command[6:]])
    assert lm_eval.main() == 2
    assert "error: " in capsys.readouterr().err


def test_sampled_answers_have_seeds_of_their_own(lm):
    given = {"until": [], "max_gen_toks": 8, "do_sample": True, "temperature": 1.0}
    requests = instances("generate_until", ("the wolf", given), ("the wolf", given))
    first = lm.generate_until(requests, disable_tqdm=True)
    assert first[0] != first[1]
    assert lm.generate_until(requests, disable_tqdm=True) == first


def test_answers_are_kept_for_lm_evals_cache(lm, monkeypatch):
    seen = []
    monkeypatch.setattr(lm.cache_hook, "add_partial", lambda kind, key, answer: seen.append((kind, key, answer)))
    answers = lm.loglikelihood(instances("loglikelihood", ("the", " wolf")), disable_tqdm=True)
    assert seen == [("loglikelihood", ("the", " wolf"), answers[0])]


def test_scores_are_those_of_a_forward_pass(lm, directory):
    from tests.tiny import full_logits, log_softmax

    model = load(directory, dtype="float32")
    ids = model.tokenizer.encode("the wolf ran")
    logprobs = log_softmax(full_logits(model, ids, pad=64).astype(np.float64))
    want = sum(logprobs[i, token] for i, token in enumerate(ids[1:]))
    # The tokenizer's own prefix is scored as well, after lm-eval's, as "hf" does.
    own = full_logits(model, [0, *ids], pad=64).astype(np.float64)
    want_rolling = sum(log_softmax(own)[i, token] for i, token in enumerate(ids))
    assert want_rolling != pytest.approx(want)
    (found,) = lm.loglikelihood_rolling(instances("loglikelihood_rolling", ("the wolf ran",)), disable_tqdm=True)
    assert found == pytest.approx(want_rolling, abs=1e-4)


def test_windows_are_as_long_as_a_small_pool_has_room_for(lm, directory):
    """By default; a length that is asked for and does not fit is refused."""
    from jllm.analysis.lm_eval import JllmLM

    small = OPTIONS | {"num_pages": 4}
    short = JllmLM(directory, **small, dtype="float32")
    assert short.max_length == 4 * 8 + 1 - 2
    text = "the wolf ran in the small house and the girl " * 3
    request = instances("loglikelihood_rolling", (text,))
    (found,) = short.loglikelihood_rolling(request, disable_tqdm=True)
    same = JllmLM(directory, max_length=short.max_length, dtype="float32", **OPTIONS)
    assert found == pytest.approx(same.loglikelihood_rolling(request, disable_tqdm=True)[0], abs=1e-4)
    with pytest.raises(EvaluationError, match=r"max_length must be in 1 \.\. 31, what the page pool"):
        JllmLM(directory, max_length=40, **small)


def test_what_cannot_be_evaluated_is_named(lm, directory):
    from jllm.analysis.lm_eval import JllmLM

    for options, message in (
        ({"device": "cuda:1"}, "device='cuda:1' has no meaning"),
        ({"max_length": CONTEXT + 1}, f"1 .. {CONTEXT}"),
        ({"max_length": "long"}, "not 'long'"),
        ({"max_gen_toks": 0}, "max_gen_toks must be a number from 1 on, not 0"),
        ({"prefix_token_id": 10**6}, "the model's vocabulary, not 1000000"),
        ({"batch_size": "many"}, "batch_size must be a number"),
        ({"batch_size": 8, "max_slots": 4}, "the same as max_slots"),
    ):
        with pytest.raises(EvaluationError, match=message):
            JllmLM(directory, **options)
    for options in ({"slots": 4}, {"max_slots": 0}):
        with pytest.raises(ConfigError, match="slots"):
            JllmLM(directory, **options)
    with pytest.raises(EvaluationError, match="no tokenizer"):
        JllmLM(tiny_model())
    for given, message in (({"num_beams": 4}, "'num_beams' is not known"), ({"max_gen_toks": CONTEXT}, "no room")):
        with pytest.raises(EvaluationError, match=message):
            lm.generate_until(instances("generate_until", ("the", given)))
    with pytest.raises(EvaluationError, match=r"1 \.\. 48 tokens"):
        lm.loglikelihood(instances("loglikelihood", ("the", "")), disable_tqdm=True)
    with pytest.raises(EvaluationError, match=r"1 \.\. 48 tokens"):
        lm.loglikelihood(instances("loglikelihood", ("the", "{" * 49)), disable_tqdm=True)
