"""`jllm COMMAND` is `python -m` of the command's module."""

import os
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from jllm.__main__ import COMMANDS
from tests.cli.cases import FLAGS, expected, params


def jllm(*args: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "jllm", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_script_is_this_module():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"jllm": "jllm.__main__:main"}
    assert all(find_spec(module) for module, _ in COMMANDS.values())


def test_generate(folder, model):
    done = jllm("generate", "--model", folder, "--max-slots", 4, "--max-step-tokens", 32, *FLAGS, "a king")
    assert (done.returncode, done.stdout) == (0, expected(model, "a king", params())[0].text + "\n")


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "batch"])
def test_exit_status_and_help(command):
    wrong = jllm(command, "--bogus")
    assert (wrong.returncode, wrong.stderr) == (2, "error: unrecognized arguments: --bogus (see --help)\n")
    shown = jllm(command, "--help")
    assert (shown.returncode, shown.stdout.split()[:3]) == (0, ["usage:", "jllm", command])
    module, _ = COMMANDS[command]
    assert f"  jllm {command} " in shown.stdout
    assert "python -m" not in shown.stdout
    alone = subprocess.run([sys.executable, "-m", module, "--help"], capture_output=True, text=True, check=False)
    assert alone.stdout.split()[:4] == ["usage:", "python", "-m", module]


@pytest.mark.skipif(
    find_spec("lm_eval") is None, reason="lm-eval is not installed: `uv run --extra eval pytest` runs it"
)
def test_eval_is_the_command_of_lm_eval():
    assert "Language Model Evaluation Harness" in jllm("eval", "--help").stdout


@pytest.mark.parametrize("command", [["-m", "jllm.analysis.lm_eval"], ["-m", "jllm", "eval"]])
def test_eval_without_lm_eval(command, tmp_path):
    (tmp_path / "lm_eval.py").write_text("raise ImportError('it is not there')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])

    def run(*words):
        words = [sys.executable, *command, *words]
        return subprocess.run(words, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False)

    shown, refused = run("--help"), run("run", "--tasks", "x")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "--model_args" in shown.stdout
    assert "uv pip install -e '.[eval]'" in shown.stdout
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "lm-eval is not installed (it is not there): uv pip install -e '.[eval]'" in refused.stderr


KNOWN = "known are generate, chat, serve, batch, eval (see --help)"
WRONG = {
    "none": ((), f"error: no command given: {KNOWN}\n"),
    "near": (("chta",), "error: no command 'chta': did you mean chat? (see --help)\n"),
    "far": (
        ("--model", "x"),
        f"error: no command '--model': {KNOWN}\n",
    ),
}


@pytest.mark.parametrize(("args", "message"), WRONG.values(), ids=WRONG)
def test_wrong_commands(args, message):
    done = jllm(*args)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message)


def test_help_and_version_name_all():
    assert all(f"  {name} " in jllm("--help").stdout for name in COMMANDS)
    assert jllm("--version").stdout.startswith("jllm ")
