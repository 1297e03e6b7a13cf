"""What a run of tests leaves, and what the processes of one share."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from jaxlib.xla_client import generate_pjrt_gpu_plugin_options

from tests import conftest, run_record

ROOT = Path(__file__).parents[1]


def test_counts_by_file_and_what_failed(tmp_path):
    def report(nodeid, seconds):
        return SimpleNamespace(nodeid=nodeid, duration=seconds)

    reports = {
        "passed": [report("tests/test_a.py::test_x", 1.25), report("tests/test_b.py::test_y[a::b]", 2.0)],
        "failed": [report("tests/test_a.py::test_z", 0.5)],
        "error": [report("tests/test_b.py::test_w", 0.0)],
        "": [report("tests/test_a.py::test_x", 9.0)],  # setup and teardown
        "warnings": [object()],
    }
    command = ["python", "-m", "pytest", "-m", "gpu", "--record"]
    path = run_record.write(str(tmp_path), command, reports, 61.4, whole=True)
    document = json.loads(path.read_text())
    assert path.name.startswith("tests-")
    assert [document[key] for key in ("passed", "failed", "error", "skipped", "seconds")] == [2, 1, 1, 0, 61]
    assert document["failures"] == ["tests/test_a.py::test_z", "tests/test_b.py::test_w"]
    assert document["rows"] == [
        {"file": "tests/test_a.py", "passed": 1, "failed": 1, "seconds": 1.8},
        {"file": "tests/test_b.py", "passed": 1, "error": 1, "seconds": 2.0},
    ]
    assert (document["command"], document["complete"]) == ("python -m pytest -m gpu", True)
    assert {"device", "driver", "versions"} <= document.keys()


def test_a_recorded_run_says_why_a_test_failed_as_soon_as_it_has(tmp_path):
    """The run is cut off after one of two workers is done. Each failure has its line by then, of others nothing is
    said, and a worker that has nothing left to do records nothing."""
    (tmp_path / "test_it.py").write_text(
        "import os, pathlib, pytest, signal, time\n\ndef test_skipped():\n    pytest.skip('no GPU')\n\n"
        "def test_it():\n    assert [1, 2] == [1], 'too many'\n    \ndef test_cuts_the_run_off():\n"
        "    until = time.time() + 3\n"
        "    while time.time() < until and not any(pathlib.Path('results').glob('*.json')):\n        time.sleep(0.1)\n"
        "    os.kill(os.getppid(), signal.SIGKILL)\n"
    )
    options = ["-q", f"--rootdir={tmp_path}", "-p", "tests.conftest", "-p", "no:cacheprovider", "-n", "2"]
    command = [sys.executable, "-m", "pytest", *options, "--dist", "load", "--results", "results", "test_it.py"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=env)
    assert done.returncode == -9, done.stdout + done.stderr
    assert done.stdout.count("\ntest_it.py::test_it: AssertionError: too many\n") == 1
    assert done.stdout.count("test_it.py::") == 1
    assert not list((tmp_path / "results").glob("*.json"))


@pytest.mark.parametrize(("results", "worker", "plugins"), [("here", False, 1), ("here", True, 0), (None, False, 0)])
def test_reasons_are_those_of_a_recorded_run(results, worker, plugins):
    """A worker leaves them to the process that started it."""
    registered = []
    config = SimpleNamespace(
        stash={}, getoption=lambda name: results, pluginmanager=SimpleNamespace(register=registered.append)
    )
    if worker:
        config.workerinput = {}
    conftest.pytest_configure(config)
    assert len(registered) == plugins


@pytest.mark.parametrize(
    ("longrepr", "why"),
    [
        (SimpleNamespace(reprcrash=SimpleNamespace(message="ValueError: no\nmore")), "ValueError: no"),
        ("a trace\nKilled: by whom\n", "Killed: by whom"),
        ("", "no reason was given"),
    ],
)
def test_a_reason_is_a_line(longrepr, why):
    assert run_record.reason(SimpleNamespace(longrepr=longrepr)) == why


def test_processes_of_a_run_share_a_gpu():
    """Each takes memory as it needs it, the processes that tests start as well."""
    assert generate_pjrt_gpu_plugin_options()["preallocate"] is False
    assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
