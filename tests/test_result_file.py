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


def test_an_interrupted_run_is_found_by_its_setup(tmp_path):
    def write(name, **document):
        (tmp_path / name).write_text(json.dumps(document))

    setup = {"command": "python -m x", "sha256": "1"}
    write("x-20260102-cpu.json", complete=True, rows=[2], **setup)
    write("x-20260103-cpu.json", complete=False, rows=[1], **setup)
    write("x-20260104-cpu.json", complete=False, rows=[3], **setup | {"sha256": "2"})
    write("x_y-20260105-cpu.json", complete=False, rows=[4], **setup)
    write("x-20260106-cpu.json", rows=[5])
    (tmp_path / "x-20260107-cpu.json").write_text("[]")
    (tmp_path / "x-20260108-cpu.json").write_text("{")
    assert experiments.result_file.rows_before(tmp_path, "x", setup) == [1]
    assert experiments.result_file.rows_before(tmp_path, "x", setup | {"sha256": "3"}) == []
    assert experiments.result_file.rows_before(tmp_path / "nowhere", "x", setup) == []
    write("x-20260109-cpu.json", complete=True, rows=[6], **setup)  # since then it came to its end
    assert experiments.result_file.rows_before(tmp_path, "x", setup) == []


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
