"""What an experiment leaves behind."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import experiments.result_file
import pallas_kernels
from experiments.report.documents import RESULTS
from experiments.result_file import ResumedFile
from jllm.errors import OutputError
from pallas_kernels.bench.command import interruptible, make_parser
from pallas_kernels.bench.result_file import FOLDERS, QUOTED, ResultFile, commit_of, gpu_of, host_now, portable
from pallas_kernels.one_writer import open_alone


@pytest.mark.parametrize(
    ("command", "kept"),
    [
        ("python -m x --steps 5", "python -m x --steps 5"),
        ("python -m x --results /home/me/r --steps 5 --out out/model", "python -m x --steps 5"),
        ("python -m x --results=/home/me/r --out=out", "python -m x"),
        ("/usr/bin/python -m x --model /data/llama-7b --text=/data/a.txt", "python -m x --model llama-7b --text=a.txt"),
        ("python -m x --corpus .corpus/train.txt --results", "python -m x --corpus .corpus/train.txt"),
        ("python -m x --record --label few", "python -m x --label few"),
    ],
)
def test_commands_hold_no_paths_of_a_machine(command, kept):
    assert portable(command.split()) == kept.split()


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        (
            "exit status 2: /opt/me/bin/python3: can't open file '/home/me/peer.py': [Errno 2] No such file",
            "exit status 2: python3: can't open file 'peer.py': [Errno 2] No such file",
        ),
        ('File "/home/me/a-b/c.py", line 3; cache=/tmp/x/y', 'File "c.py", line 3; cache=y'),
        ("wrong by 3/4 at 512 / 8 rows; see https://a.org/b/c and docs/x.md", None),
    ],
)
def test_what_a_row_quotes_holds_no_folders_of_a_machine(said, kept, tmp_path):
    with ResultFile(tmp_path, "x", ["python"]) as result:
        for row in ({"error": said, "us": 1.0}, {"report": said}, {"error": None}, {"stated": said}):
            result.add(row)
    kept = said if kept is None else kept
    found = json.loads(result.path.read_text())["rows"]
    assert found == [{"error": kept, "us": 1.0}, {"report": kept}, {"error": None}, {"stated": said}]


def test_commits_of_results_are_in_the_history():
    """A commit that a rebase replaces cannot be looked at: results are measured at commits that are merged."""
    git = ["git", "-C", str(RESULTS)]
    shallow = subprocess.run([*git, "rev-parse", "--is-shallow-repository"], capture_output=True, text=True)
    if shallow.stdout.strip() != "false":
        pytest.skip("not all of the history is here")
    history = subprocess.run([*git, "log", "--format=%H"], capture_output=True, text=True, check=True).stdout.split()
    commits = {json.loads(path.read_text()).get("commit") or "" for path in RESULTS.glob("*.json")}
    names = {commit.removesuffix("+") for commit in commits}
    assert not {name for name in names if not any(whole.startswith(name) for whole in history)}


def test_begun_incomplete_and_finished(tmp_path):
    command = ["python", "-m", "x", "--results", str(tmp_path)]
    with ResultFile(tmp_path / "results", "x", command, size=3) as result:
        result.add({"step": 1})
        begun = json.loads(result.path.read_text())
        assert (begun["command"], begun["complete"], begun["rows"]) == ("python -m x", False, [{"step": 1}])
        result.finish(bars=[], complete=True, loss=2.5)
    done = json.loads(result.path.read_text())
    assert (done["complete"], done["loss"], done["size"], done["rows"]) == (True, 2.5, 3, [{"step": 1}])
    assert str(tmp_path) not in result.path.read_text()
    assert list(result.path.parent.iterdir()) == [result.path]


def test_the_experiment_the_file_and_the_command_share_a_label(tmp_path):
    """Whatever a name is made of is fit for a file."""
    parser = make_parser(None)
    argv = ["--label", "few.rows", "--results", str(tmp_path)]
    args = parser.parse_args(argv)
    with ResultFile(args.results, "x_k=int8,v=a/b", ["python", "-m", "x", *argv], args.label) as result:
        pass
    assert result.document["experiment"] == "x_k-int8-v-a-b-few.rows"
    assert result.path.name.startswith("x_k-int8-v-a-b-few.rows-20")
    assert result.document["command"] == "python -m x --label few.rows"
    with pytest.raises(SystemExit):
        parser.parse_args(["--label", "../x"])


def test_only_record_writes_where_results_are_committed(capsys):
    """Every command has its option from one place, and every experiment ends at Ctrl-C as the others do."""
    root = Path(experiments.__file__).parent
    assert make_parser(None).parse_args([]).results == Path("results")
    assert make_parser(None).parse_args(["--record"]).results == root / "results" == RESULTS
    with pytest.raises(SystemExit):
        make_parser(None).parse_args(["--record", "--results", "x"])
    for file in [*root.rglob("*.py"), *Path(pallas_kernels.__file__).parent.rglob("*.py")]:
        if file.name != "command.py":
            assert 'add_argument("--results"' not in file.read_text(), file
        if root in file.parents and "\ndef main(" in file.read_text():
            alone = file.name == "torch_attention.py"  # run by a Python that has PyTorch and none of ours
            guarded = r"\n@(interruptible|refusing)\ndef main\(|\n    return command\(run, options\)\n"  # or a peer's
            assert alone or re.search(guarded, file.read_text()), file
    assert "/results/" in (root.parent / ".gitignore").read_text().splitlines()


def resumed(tmp_path, run, steps=(), fail=True, label=None):
    """Runs over `steps`; returns the rows that were there before, and the document."""
    with ResumedFile(tmp_path, "x", ["python", "-m", "x"], label, run=run) as result:
        for step in steps:
            result.add({"step": step})
        if not fail:
            result.finish(bars=[], complete=True)
    return result.before, json.loads(result.path.read_text()) if result.path.exists() else None


def test_a_run_goes_on_with_its_own_rows_alone(tmp_path):
    ours = {"weights": "1", "text": "2"}
    assert resumed(tmp_path, ours) == ([], None)
    assert resumed(tmp_path, ours, [1, 2])[0] == []
    before, left = resumed(tmp_path, ours, [1])  # interrupted again before it had as many
    assert before == left["rows"] == [{"step": 1}, {"step": 2}]
    for other, named in (({"weights": "3"}, "weights"), ({"text": "3", "device": "x"}, "text, device")):
        with pytest.raises(
            OutputError, match=rf"x-.*\.json: has rows of another run \({named} differ\): give this one a"
        ):
            resumed(tmp_path, ours | other, [7])
        assert resumed(tmp_path, ours | other, [7], label=f"l{len(other)}")[0] == []
    before, done = resumed(tmp_path, ours, [1, 2, 3], fail=False)
    assert (len(before), done["complete"], len(done["rows"])) == (2, True, 3)
    assert resumed(tmp_path, ours)[0] == []  # since it came to its end


def test_a_run_of_an_earlier_day_is_gone_on_with(tmp_path):
    ours = {"weights": "1"}
    _, left = resumed(tmp_path, ours, [1, 2])
    (path,) = tmp_path.glob("*.json")
    path.rename(tmp_path / "x-20010101-cpu.json")
    (tmp_path / "x-20010102-cpu.json").write_text(json.dumps(left | {"run": {"weights": "2"}}))
    (tmp_path / "x-20010103-cpu.json").write_text("[]")
    (tmp_path / "x-20010104-cpu.json").write_text("{")
    (tmp_path / "x-y-20010105-cpu.json").write_text(json.dumps(left | {"rows": []}))
    assert resumed(tmp_path, ours)[0] == [{"step": 1}, {"step": 2}]
    (tmp_path / "x-20010106-cpu.json").write_text(json.dumps(left | {"complete": True}))
    assert resumed(tmp_path, ours)[0] == []


def test_rows_are_kept_until_another_run_has_one(tmp_path, capsys):
    @interruptible
    def main(ends):
        with ResultFile(tmp_path, "x", ["python"]) as result:
            if ends:
                result.finish(bars=[], complete=True)
            raise KeyboardInterrupt

    with ResultFile(tmp_path, "x", ["python"]) as first:
        first.add({"step": 1})
    kept = first.path.read_text()
    assert [main(ends) for ends in (False, True)] == [130, 130]
    assert first.path.read_text() == kept
    assert capsys.readouterr().err == 2 * "interrupted; no row was finished\n"
    with ResultFile(tmp_path, "x", ["python"]) as second:
        assert first.path.read_text() == kept
        second.add({"step": 2})
        assert json.loads(first.path.read_text())["rows"] == [{"step": 2}]


@pytest.mark.parametrize(("kind", "error"), [(ResultFile, OSError), (experiments.result_file.ResultFile, OutputError)])
def test_says_where_it_cannot_be_written(tmp_path, monkeypatch, kind, error):
    monkeypatch.setattr(kind, "packages", ("jax",))
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(error, match=r"file/results/x-.*\.json: cannot be written: Not a directory"),
        kind(tmp_path / "file" / "results", "x", ["python"]),
    ):
        pass


def test_a_second_writer_is_refused(tmp_path):
    with ResultFile(tmp_path, "x", ["python"]) as first:
        first.add({"step": 1})
        with (
            pytest.raises(OSError, match=r"x-.*\.json: another process writes it: wait for its end, or give another"),
            ResultFile(tmp_path, "x", ["python"]),
        ):
            pass
        with ResultFile(tmp_path, "y", ["python"]):
            pass
        assert json.loads(first.path.read_text())["rows"] == [{"step": 1}]
    with ResultFile(tmp_path, "x", ["python"]):
        pass


def test_what_a_killed_process_held_is_free(tmp_path):
    code = f"""if True:
        import os, signal, sys
        from pathlib import Path
        from pallas_kernels.one_writer import open_alone
        file = open_alone(Path({str(tmp_path / "x")!r}))
        print(file is not None, flush=True)
        sys.stdin.read()
    """
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "True\n"
        assert open_alone(tmp_path / "x") is None
        process.kill()
    open_alone(tmp_path / "x").close()


def test_ctrl_c_is_one_line_that_says_how_to_go_on(tmp_path, capsys):
    @interruptible
    def main(kind, **options):
        with kind(tmp_path, "x", ["python"], **options) as result:
            for step in range(3):
                result.add({"step": step})
            raise KeyboardInterrupt

    assert main(ResumedFile, run={}) == 130
    assert capsys.readouterr().err == "interrupted; run the same command again to go on with row 4\n"
    assert main(ResultFile) == 130
    (file,) = tmp_path.glob("x-*.json")
    assert capsys.readouterr().err == f"interrupted; {file} has the rows so far (3)\n"


def test_committed_results_hold_no_paths_of_a_machine():
    results = list((Path(experiments.result_file.__file__).parent / "results").glob("*.json"))
    assert results
    for file in results:
        document = json.loads(file.read_text())
        command = document["command"].split()
        assert portable(command) == command
        quoted = [str(row[key]) for row in document["rows"] for key in QUOTED if key in row]
        assert not [text for text in quoted if FOLDERS.search(text)]


def test_a_result_names_the_commit_of_its_sources(tmp_path):
    def git(*words: str) -> str:
        options = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
        done = subprocess.run(
            ["git", "-C", str(tmp_path), *options, *words], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    assert commit_of(tmp_path) is None
    git("init", "-q")
    (tmp_path / "a.py").write_text("1")
    git("add", "a.py")
    git("commit", "-qm", "first")
    assert commit_of(tmp_path) == git("rev-parse", "--short=12", "HEAD")
    (tmp_path / "a.py").write_text("2")
    assert commit_of(tmp_path) == f"{git('rev-parse', '--short=12', 'HEAD')}+"


def test_what_else_ran_on_the_host_is_recorded(tmp_path, monkeypatch):
    """Before and after: a figure beside other work may be the other's."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {1, 3})
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "getloadavg", lambda: (28.44, 5.0, 1.0))
    with ResultFile(tmp_path, "x", ["python"]) as result:
        assert json.loads(result.path.read_text() or "{}")["host"] == {"cores": 64, "own_cores": 2, "load": 28.4}
        monkeypatch.setattr(os, "getloadavg", lambda: (51.61, 5.0, 1.0))
        result.finish(bars=[], complete=True)
    assert json.loads(result.path.read_text())["host"]["load_after"] == 51.6
    monkeypatch.delattr(os, "getloadavg")  # as on Windows
    monkeypatch.delattr(os, "sched_getaffinity")
    assert host_now() == {"cores": 64, "own_cores": 64, "load": None}


def test_a_gpus_driver_and_clocks_are_recorded(tmp_path, monkeypatch):
    """As nvidia-smi says them of the GPU that is visible; without one, nothing."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        '#!/bin/sh\ncase "$*" in *"-i 3,1") echo "570.10, 1755, 1980, 3201"; echo "570.10, 345, 1980, 3201";; esac\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    found = gpu_of("NVIDIA H200")
    assert found == {"driver": "570.10", "clocks_mhz": {"sm": 1755, "most_sm": 1980, "memory": 3201}}
    assert gpu_of("cpu") == {}
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert gpu_of("NVIDIA H200") == {}
    tool.unlink()
    assert gpu_of("NVIDIA H200") == {}
