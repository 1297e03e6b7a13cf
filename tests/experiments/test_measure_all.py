"""All measurements in one go: each line names a command that exists and options that it has."""

import fcntl
import importlib
import os
import shlex
import signal
import time
from itertools import combinations, pairwise
from pathlib import Path

import pytest

from experiments import measure_all
from experiments.campaign import TOPICS
from experiments.measure_all import Command, main, run

COMMANDS = [command for commands in TOPICS.values() for command in commands]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_lines_are_valid(command, capsys, monkeypatch):
    dash_m, module, *words = shlex.split(command.line.format(results="somewhere"))
    assert dash_m == "-m"
    assert "{results}" in command.line, "its result would go elsewhere"
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


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_lines_have_time_and_run_the_backend_that_labels_them(command):
    words = shlex.split(command.line)
    for option, value in pairwise(words):
        assert option not in ("--seconds", "--limit") or float(value) < command.seconds
        backend = value.partition("-")[0]
        if option == "--label" and backend in ("mosaic", "triton"):
            rest = words[: words.index(option)] + words[words.index(option) + 2 :]
            assert {backend, f"--{backend}"} & {*rest}


def test_one_that_fails_costs_only_itself(tmp_path, monkeypatch, capsys):
    commands = (
        Command("bad", "-c 'import sys; print(1); sys.exit(3)'", 60, timed=False),
        Command("good", "-c 'print(\"{results}\")'", 60),
    )
    monkeypatch.setattr(measure_all, "TOPICS", {"campaign": commands})
    assert main(["--only", "bad", "good", "--results", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "bad: exit status 3" in said
    assert "good: ok" in said
    assert (tmp_path / "logs" / "good.txt").read_text().strip() == str(tmp_path)
    assert run(commands[1], tmp_path, deadline=0.0) == "no time left"


def test_names_are_commands_or_topics_and_each_is_there_once(capsys):
    names = [*TOPICS, *(command.name for command in COMMANDS)]
    assert len(set(names)) == len(names)
    files = [command.line.split(" --peers")[0] for command in COMMANDS]
    assert len(set(files)) == len(files)
    assert [command.name for command in measure_all.chosen(["sample", "C5", "sample"])] == ["sample", "C5"], "as asked"
    assert main(["--only", "C99"]) == 2
    assert "C99" in capsys.readouterr().err


def test_what_takes_two_gpus_gets_both_alone(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        main(["--only", "two-gpus"])
    assert "more GPUs are needed than --gpus 1" in capsys.readouterr().err
    line = "-c 'import os; print(os.environ[\"CUDA_VISIBLE_DEVICES\"])'"
    monkeypatch.setattr(measure_all, "TOPICS", {"campaign": (), "pair": (Command("p", line, 60, gpus=2),)})
    assert main(["--gpus", "2", "--only", "pair", "--results", str(tmp_path)]) == 0
    assert (tmp_path / "logs" / "p.txt").read_text().strip() == "0,1"


def test_what_is_not_timed_has_one_gpu():
    with pytest.raises(ValueError, match="p: what is not timed shares a GPU: gpus must be 1, not 2"):
        Command("p", "-c ''", 60, timed=False, gpus=2)


@pytest.mark.parametrize("peers", [False, True])
def test_options_about_others_come_with_their_scripts(peers, tmp_path):
    found = []
    for command in (each.beside(tmp_path if peers else None) for each in COMMANDS if each.peer_seconds):
        _, module, *words = shlex.split(command.line.format(results="somewhere"))
        if parse := getattr(importlib.import_module(module), "parse_args", None):
            found.append(parse(words).peers)
    assert set(found) == {tmp_path if peers else None}


def test_list_runs_nothing(capsys, tmp_path):
    assert main(["--list", "--results", str(tmp_path / "none")]) == 0
    listed = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    assert listed == [[topic, command.name] for topic, commands in TOPICS.items() for command in commands]
    assert not (tmp_path / "none").exists()


def test_commands_spread_over_gpus(tmp_path, monkeypatch, capsys):
    line = "-c 'import os; print(os.environ[\"CUDA_VISIBLE_DEVICES\"], *sorted(os.sched_getaffinity(0)))'"
    commands = tuple(Command(f"c{i}", line, 60) for i in range(4))
    monkeypatch.setattr(measure_all, "TOPICS", {"campaign": commands})
    assert main(["--gpus", "2", "--results", str(tmp_path)]) == 0
    used = [(tmp_path / "logs" / f"{command.name}.txt").read_text().split() for command in commands]
    assert len(capsys.readouterr().out.splitlines()) == 4
    mine = [str(core) for core in sorted(os.sched_getaffinity(0))]
    half = len(mine) // 2 or 1
    shares = {"0": mine[:half], "1": mine[half : 2 * half] or mine}
    assert all(cores == shares[gpu] for gpu, *cores in used), "each GPU's commands have cores of their own"


def test_a_gpu_has_one_command_at_a_time_and_what_takes_several_comes_last(tmp_path, monkeypatch):
    code = 'print(os.environ["CUDA_VISIBLE_DEVICES"], time.time()); time.sleep(.2); print(time.time())'
    line = f"-S -c 'import os, time; {code}'"
    wanted = {"all": 4, "a": 1, "pair": 2, "b": 1, "c": 1}
    commands = tuple(Command(name, line, 60, gpus=n) for name, n in wanted.items())
    monkeypatch.setattr(measure_all, "TOPICS", {"campaign": commands})
    assert main(["--gpus", "4", "--results", str(tmp_path)]) == 0
    ran = {name: (tmp_path / "logs" / f"{name}.txt").read_text().split() for name in wanted}
    assert {name: len(gpus.split(",")) for name, (gpus, *_) in ran.items()} == wanted
    spans = [({*gpus.split(",")}, float(begin), float(end)) for gpus, begin, end in ran.values()]
    for (some, _, ended), (others, began, _) in combinations(sorted(spans, key=lambda span: span[1]), 2):
        assert not some & others or ended <= began
    assert max(float(ran[name][2]) for name in "abc") <= min(float(ran[name][1]) for name in ("all", "pair"))


def test_what_has_too_little_time_left_is_not_begun(tmp_path):
    command = Command("c", "-c 'print(1)'", 60)
    assert run(command, tmp_path, time.monotonic() + 25) == "no time left"
    assert run(command, tmp_path, time.monotonic() + 35).startswith("ok")


def test_commands_share_what_is_compiled(tmp_path, monkeypatch):
    command = Command("c", "-c 'import jax; c = jax.config; print(c.jax_compilation_cache_dir, "
        "c.jax_persistent_cache_min_compile_time_secs, c.jax_persistent_cache_min_entry_size_bytes)'", 60)  # fmt: skip
    said = []
    for elsewhere in (None, "/elsewhere"):
        monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
        if elsewhere:
            monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", elsewhere)
        assert run(command, tmp_path / "results", time.monotonic() + 600).startswith("ok")
        said.append((tmp_path / "results" / "logs" / "c.txt").read_text().split())
    assert said == [[str(tmp_path / "compiled"), "0.0", "-1"], ["/elsewhere", "0.0", "-1"]]


@pytest.mark.parametrize("group", ["", ", process_group=0"], ids=["one group", "a group of its own"])
def test_what_a_command_started_ends_with_it(group, tmp_path, monkeypatch):
    """Else it would share the device with the next measurement."""
    lock = tmp_path / "lock"
    child = f"import fcntl, time; f = open({str(lock)!r}, 'w'); fcntl.flock(f, fcntl.LOCK_EX); time.sleep(60)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', {child!r}]{group})"
    monkeypatch.setattr(measure_all, "LEAST", 0)
    command = Command("slow", f"-S -c {shlex.quote(parent)}", 3)
    assert run(command, tmp_path, deadline=time.monotonic() + 60) == "cut off after 3 s"
    with lock.open() as file:  # the child had begun
        for _ in range(100):
            try:
                return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.02)
    pytest.fail("the child still runs")


@pytest.fixture
def heeds_ctrl_c():
    """A shell's background jobs, which these tests may be one of, ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeds_ctrl_c")
@pytest.mark.parametrize("timed", [True, False])
def test_ctrl_c_ends_what_runs_and_begins_nothing_more(timed, tmp_path, monkeypatch, capsys):
    sleeps = "-S -c 'import os, time; print(os.getpid(), flush=True); time.sleep(60)'"
    hits = "-S -c 'import os, signal, time; time.sleep(.5); os.kill(os.getppid(), signal.SIGINT); time.sleep(60)'"
    lines = {"sleeps": sleeps, "hits": hits, "later": sleeps}
    monkeypatch.setattr(measure_all, "TOPICS", {"campaign": tuple(Command(n, x, 90, timed) for n, x in lines.items())})
    assert main(["--gpus", "2", "--jobs", "1", "--results", str(tmp_path)]) == 130
    pid = int((tmp_path / "logs" / "sleeps.txt").read_text())
    for _ in range(200):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            break
        time.sleep(0.02)
    else:
        pytest.fail("a command still runs")
    assert not (tmp_path / "logs" / "later.txt").exists()
