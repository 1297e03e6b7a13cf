"""Where only the library's own dependencies are installed, tests that need more are skipped, not broken, and said."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from tests.analysis import test_lm_eval
from tests.conftest import skipped_lines

BLOCK = """import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("hypothesis", "chex", "optax", "jax_triton"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""


def test_device_tests_are_collected_without_development_packages(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(BLOCK)
    command = ["-m", "pytest", "-o", "addopts=", "-p", "no:hypothesispytest", "-m", "gpu", "--collect-only", "-q"]
    command.append(f"--results={tmp_path}")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, *command], cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]
    assert "tests/test_gpu.py::test_parity_in_float32" in done.stdout
    (file,) = tmp_path.glob("tests-*.json")
    document = json.loads(file.read_text())
    assert document["command"] == "python -m pytest -o addopts= -p no:hypothesispytest -m gpu --collect-only -q"
    assert (document["passed"], document["complete"]) == (0, True)


def test_what_was_skipped_is_said_with_the_command_that_runs_it():
    """At the end of a run; of lm-eval's tests one by one, since of a module that skips itself a worker says nothing."""
    (reason,) = (mark.kwargs["reason"] for mark in test_lm_eval.pytestmark if mark.name == "skipif")
    why = ("tests/analysis/test_lm_eval.py", 1, f"Skipped: {reason}")
    reports = [SimpleNamespace(nodeid=f"tests/analysis/test_lm_eval.py::test_{name}", longrepr=why) for name in "ab"]
    assert skipped_lines(reports) == [f"skipped: 2 of tests/analysis/test_lm_eval.py: {reason}"]
    assert "`uv run --extra eval pytest`" in reason
