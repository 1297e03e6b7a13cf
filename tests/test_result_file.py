"""What an experiment leaves behind."""

import json
from pathlib import Path

import pytest

import experiments.result_file
from jllm.errors import OutputError
from pallas_kernels.result_file import ResultFile, portable


@pytest.mark.parametrize(
    ("command", "kept"),
    [
        ("python -m x --steps 5", "python -m x --steps 5"),
        ("python -m x --results /home/me/r --steps 5 --out out/model", "python -m x --steps 5"),
        ("python -m x --results=/home/me/r --out=out", "python -m x"),
        ("/usr/bin/python -m x --model /data/llama-7b --text=/data/a.txt", "python -m x --model llama-7b --text=a.txt"),
        ("python -m x --corpus .corpus/train.txt --results", "python -m x --corpus .corpus/train.txt"),
    ],
)
def test_commands_hold_no_paths_of_a_machine(command, kept):
    assert portable(command.split()) == kept.split()


def test_begun_incomplete_and_finished(tmp_path):
    result = ResultFile(tmp_path / "results", "x", ["python", "-m", "x", "--results", str(tmp_path)], size=3)
    result.add({"step": 1})
    begun = json.loads(result.path.read_text())
    assert (begun["command"], begun["complete"], begun["rows"]) == ("python -m x", False, [{"step": 1}])
    result.finish(bars=[], complete=True, loss=2.5)
    done = json.loads(result.path.read_text())
    assert (done["complete"], done["loss"], done["size"], done["rows"]) == (True, 2.5, 3, [{"step": 1}])
    assert str(tmp_path) not in result.path.read_text()


@pytest.mark.parametrize(("kind", "error"), [(ResultFile, OSError), (experiments.result_file.ResultFile, OutputError)])
def test_says_where_it_cannot_be_written(tmp_path, monkeypatch, kind, error):
    monkeypatch.setattr(kind, "packages", ("jax",))
    (tmp_path / "file").write_text("")
    with pytest.raises(error, match=r"file/results/x-.*\.json: cannot be written: Not a directory"):
        kind(tmp_path / "file" / "results", "x", ["python"])


def test_committed_results_hold_no_paths_of_a_machine():
    results = list((Path(experiments.result_file.__file__).parent / "results").glob("*.json"))
    assert results
    for file in results:
        command = json.loads(file.read_text())["command"].split()
        assert portable(command) == command
