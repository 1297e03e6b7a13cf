"""What generation_config.json asks for and does not get is said, in one line."""

import json
import warnings

import pytest

from jllm.cli.generation_config import warn_of_ignored
from jllm.engine.request import SamplingParams
from tests.cli.cases import FLAGS


def write(folder, **fields) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, **fields}))


def test_unsupported_and_unapplied_fields_are_named(tmp_path):
    write(tmp_path, do_sample=True, temperature=0.6, top_p=0.9, top_k=50, num_beams=4, typical_p=0.9, max_length=4096)
    with pytest.warns(UserWarning, match="asks for") as seen:
        warn_of_ignored(tmp_path, SamplingParams(top_k=50))
    assert str(seen[0].message) == (
        f"{tmp_path}/generation_config.json asks for num_beams = 4, typical_p = 0.9 (not supported) and "
        "temperature = 0.6, top_p = 0.9 (applied only where it is asked for): ignored"
    )


SILENT = {
    "nothing": {},
    "neutral": {
        "num_beams": 1,
        "typical_p": 1.0,
        "repetition_penalty": 1.0,
        "no_repeat_ngram_size": 0,
        "min_length": 0,
    },
    "null": {"num_beams": None, "temperature": None, "do_sample": True},
    "greedy": {"temperature": 0.6, "top_p": 0.9, "do_sample": False},
}


@pytest.mark.parametrize("fields", SILENT.values(), ids=SILENT)
def test_what_changes_nothing_is_not_named(tmp_path, fields):
    write(tmp_path, **fields)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_ignored(tmp_path)
        (tmp_path / "generation_config.json").unlink()
        warn_of_ignored(tmp_path)


@pytest.mark.filterwarnings("always")
def test_the_command_says_it(run, folder, tmp_path):
    for name in ("config.json", "model.safetensors", "tokenizer.model"):
        (tmp_path / name).symlink_to(folder / name)
    write(tmp_path, repetition_penalty=1.1, num_beams=2)
    status, _, err = run("a king", *FLAGS, model=tmp_path)
    assert status == 0
    first, *_ = err.splitlines()
    assert first.startswith("warning: ")
    assert "num_beams = 2 (not supported) and repetition_penalty = 1.1 (applied only" in first
    assert "repetition_penalty" not in run("a king", *FLAGS, "--repetition-penalty", 1.1, model=tmp_path)[2]
