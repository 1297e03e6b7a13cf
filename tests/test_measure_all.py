"""All measurements in one go: each line names a command that exists and options that it has."""

import importlib
import shlex
from pathlib import Path

import pytest

from experiments import measure_all
from experiments.measure_all import COMMANDS, Command, main, run


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_lines_are_valid(command, capsys, monkeypatch):
    dash_m, module, *words = shlex.split(command.line.format(results="somewhere"))
    assert dash_m == "-m"
    if module == "pytest":
        assert not command.timed
        assert all(Path(word).is_file() for word in words if word.startswith("tests/"))
        return
    entry = importlib.import_module(module + (".__main__" if module == "experiments.claims" else ""))
    with pytest.raises(SystemExit) as stopped:  # --help at the end: everything before it was parsed
        entry.main([*words, "--help"])
    assert stopped.value.code == 0
    options = capsys.readouterr().out
    assert all(word in options for word in words if word.startswith("--"))


def test_one_that_fails_costs_only_itself(tmp_path, monkeypatch, capsys):
    commands = (
        Command("bad", "-c 'import sys; print(1); sys.exit(3)'", 60, timed=False),
        Command("good", "-c 'print(\"{results}\")'", 60),
    )
    monkeypatch.setattr(measure_all, "COMMANDS", commands)
    assert main(["--only", "bad", "good", "--results", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "bad: exit status 3" in said
    assert "good: ok" in said
    assert (tmp_path / "logs" / "good.txt").read_text().strip() == str(tmp_path)
    assert run(commands[1], tmp_path, deadline=0.0) == "no time left"


def test_unknown_name(capsys):
    assert main(["--only", "C99"]) == 2
    assert "C99" in capsys.readouterr().err


def test_list_runs_nothing(capsys, tmp_path):
    assert main(["--list", "--results", str(tmp_path / "none")]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(COMMANDS)
    assert not (tmp_path / "none").exists()
