"""How compute-sanitizer's output is read, and a run in which a script stands for it."""

import json

import pytest

from experiments import sanitizer

HEAD = "========= COMPUTE-SANITIZER\n"


@pytest.mark.parametrize(
    ("output", "found"),
    [
        ("wrong by 1.5e-03\n========= ERROR SUMMARY: 0 errors\n", {"errors": 0, "wrong": 0.0015}),
        (
            "========= Invalid __global__ write of size 4 bytes\nwrong by 1.5e-03\n========= ERROR SUMMARY: 2 errors\n",
            {"errors": 2, "wrong": 0.0015, "report": "Invalid __global__ write of size 4 bytes"},
        ),
        (
            "========= Error: Race\nwrong by 0\n========= RACECHECK SUMMARY: 3 hazards (3 errors)\n",
            {
                "errors": 3, "wrong": 0.0,
                "report": "Error: Race | RACECHECK SUMMARY: 3 hazards (3 errors)",
            },
        ),
        ("========= Error: Device not supported\n", {"error": "the kernel did not run: Error: Device not supported"}),
        ("Traceback\nValueError: no\n", {"error": "the kernel did not run: ValueError: no"}),
        (
            "wrong by 2e-01\n========= ERROR SUMMARY: 0 errors\n",
            {"errors": 0, "wrong": 0.2, "error": "the result is wrong by 2e-01 of its norm"},
        ),
    ],
)  # fmt: skip
def test_what_it_says_is_read(output, found):
    assert sanitizer.judge(HEAD + output) == found


def test_a_missing_program_is_named(capsys):
    assert sanitizer.main(["--sanitizer", "no-such-program"]) == 2
    assert "no program 'no-such-program' on the path" in capsys.readouterr().err


def test_a_run_leaves_its_result(tmp_path, capsys):
    fake = tmp_path / "fake"
    fake.write_text(
        "#!/bin/sh\n"
        'test "$XLA_PYTHON_CLIENT_ALLOCATOR" = platform || exit 1\n'
        'case "$*" in *racecheck*) echo "=========     RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)";;\n'
        '*) echo "========= ERROR SUMMARY: 0 errors";; esac\n'
        'echo "wrong by 1e-3"\n'
    )
    fake.chmod(0o755)
    arguments = ["--sanitizer", str(fake), "--formats", "bf16", "--results", str(tmp_path), "--json"]
    assert sanitizer.main(arguments) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["complete"]
    assert [(row["tool"], row["kernel"], row["errors"]) for row in document["rows"]] == [
        (tool, kernel, errors) for tool, errors in (("memcheck", 0), ("racecheck", 1)) for kernel in sanitizer.KERNELS
    ]
    assert [bar["met"] for bar in document["bars"]] == [True] * 3


def test_what_runs_under_it_is_checked(monkeypatch, capsys):
    monkeypatch.setattr(sanitizer, "KERNELS", {"a": lambda kv: ([1.0, 2.0], [1.0, 2.001])})
    assert sanitizer.run_kernel("a", "bf16") == 0
    monkeypatch.setattr(sanitizer, "KERNELS", {"a": lambda kv: ([1.0, 2.0], [1.0, 3.0])})
    assert sanitizer.run_kernel("a", "bf16") == 1
    assert capsys.readouterr().out == "wrong by 4.47e-04\nwrong by 3.16e-01\n"
