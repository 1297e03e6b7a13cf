"""How compute-sanitizer's output is read, and a run in which a script stands for it."""

import json
from pathlib import Path

import pytest

from experiments import sanitizer
from experiments.report.documents import RESULTS, read_result
from experiments.sanitized_calls import Kernel

HEAD = "========= COMPUTE-SANITIZER\n"
KINDS = (  # with a case "bf16" or "8"
    "decode_attention", "decode_attention of segments", "prefill_attention",
    "decode_attention with sinks and a softcap", "prefill_attention with sinks and a softcap", "cache_update",
    "move_tokens", "matmul",
)  # fmt: skip


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
    arguments = ["--sanitizer", str(fake), "--cases", "bf16", "8", "--results", str(tmp_path), "--json"]
    assert sanitizer.main(arguments) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["complete"]
    assert [(row["tool"], row["kernel"], row["errors"]) for row in document["rows"]] == [
        (tool, kernel, errors) for tool, errors in (("memcheck", 0), ("racecheck", 1)) for kernel in KINDS
    ]
    assert {row["backend"] for row in document["rows"]} == {"mosaic"}
    assert not any("tries" in row for row in document["rows"])
    assert [bar["met"] for bar in document["bars"]] == [True] * len(KINDS)
    assert document["bars"][-1]["name"] == "matmul 8 mosaic, errors of memcheck"


def test_a_process_that_waits_for_ever_is_ended_with_its_children_and_begun_again(tmp_path, capsys):
    fake = tmp_path / "fake"
    fake.write_text(
        "#!/bin/sh\n"
        f'if mkdir {tmp_path}/"$2"; then sleep 60 >&- 2>&- & echo $! > {tmp_path}/"$2"/child; wait; fi\n'
        f'case "$2" in racecheck) exec sleep 60;; esac\n'
        'echo "wrong by 1e-3"; echo "========= ERROR SUMMARY: 0 errors" >&2\n'
    )
    fake.chmod(0o755)
    arguments = ["--sanitizer", str(fake), "--kernels", "cache_update", "--cases", "bf16", "--timeout", "0.5"]
    assert sanitizer.main([*arguments, "--results", str(tmp_path), "--json"]) == 1
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert not document["complete"]
    first, second = document["rows"]
    assert (first["tries"], first["errors"]) == (2, 0)
    assert (second["tool"], second["error"]) == ("racecheck", "not done after 0.5 s, 2 times")
    for tool in sanitizer.TOOLS:
        child = Path(f"/proc/{(tmp_path / tool / 'child').read_text().strip()}/status")
        assert not child.exists() or "zombie" in child.read_text()


def test_a_process_may_take_longer_than_the_longest_that_was_recorded():
    rows = [row for path in RESULTS.glob("sanitizer*.json") for row in read_result(path)["rows"] if "error" not in row]
    assert sanitizer.parse_args([]).timeout > 2 * max(row["seconds"] for row in rows)


def test_what_leaves_nothing_to_run_is_said(tmp_path, capsys):
    arguments = ["--sanitizer", "true", "--kernels", "matmul", "--backend", "triton", "--results", str(tmp_path)]
    assert sanitizer.main(arguments) == 2
    assert capsys.readouterr().err == "error: --kernels, --backend and --cases leave nothing to run\n"


@pytest.mark.parametrize("kernel", sanitizer.KERNELS)
def test_each_case_is_a_call_that_a_backend_computes(kernel):
    for case in sanitizer.KERNELS[kernel].cases:
        assert sanitizer.run_kernel(kernel, case, "xla") == 0


def test_what_runs_under_it_is_checked(monkeypatch, capsys):
    for last, status in ((2.001, 0), (3.0, 1)):
        kernel = Kernel(lambda case, backend, last=last: ([1.0, 2.0], [1.0, last]), ("bf16",))
        monkeypatch.setattr(sanitizer, "KERNELS", {"a": kernel})
        assert sanitizer.run_kernel("a", "bf16", "mosaic") == status
    assert capsys.readouterr().out == "wrong by 4.47e-04\nwrong by 3.16e-01\n"
