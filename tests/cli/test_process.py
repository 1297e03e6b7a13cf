"""The package and the process: imports, signals, terminals, closed streams."""

import contextlib
import importlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import jllm
from jllm.cli.interrupt import catch_interrupts
from jllm.cli.main import main
from jllm.errors import OutputError
from jllm.programs.folder import default_path, make_compile_cache
from tests.cli.cases import SUMMARY


def test_names_of_the_package():
    errors = {name for name, value in vars(importlib.import_module("jllm.errors")).items() if isinstance(value, type)}
    assert errors <= set(jllm.__all__)
    for name in jllm.__all__:
        assert getattr(jllm, name).__module__.startswith("jllm.")
    assert dir(jllm) == jllm.__all__  # and nothing of what the package itself imports
    with pytest.raises(AttributeError, match="has no attribute 'generator'"):
        jllm.generator  # noqa: B018
    for name in jllm.GONE:
        with pytest.raises(ImportError, match=f"jllm.{name} is gone: "):
            exec(f"from jllm import {name}")


def test_submodules_of_the_package():
    code = "import jllm; print(jllm.errors.JllmError is jllm.JllmError, jllm.config.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("True jllm.config\n", "")


def test_generate_is_always_the_function():
    code = """if True:
        import importlib, jllm
        from jllm.api import generate
        assert jllm.generate is generate
        module = importlib.import_module("jllm.generate")
        print(jllm.generate is module, len(jllm.generate(jllm.load(), [], max_slots=1)))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("True 0\n", "")


def test_help_needs_no_jax():
    code = """if True:
        import runpy, sys
        sys.argv[1:] = ["--help"]
        try:
            runpy.run_module("jllm.generate", run_name="__main__")
        except SystemExit as exit:
            slow = {"jax", "numpy", "tqdm", "sentencepiece"} & sys.modules.keys()
            sys.exit(f"{exit.code} {sorted(slow)}")
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr == "0 []\n"
    assert done.stdout.startswith("usage: python -m jllm.generate [PROMPT ...] [options]\n")


@pytest.mark.parametrize("module", ["argparse", "jax._src.core", "jllm.files.load"])
def test_interrupt_while_modules_are_imported(folder, module):
    code = f"""if True:
        import os, runpy, signal, sys, threading, time
        signal.signal(signal.SIGINT, signal.default_int_handler)
        def press():
            while {module!r} not in sys.modules:
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGINT)
        threading.Thread(target=press, daemon=True).start()
        sys.argv[1:] = ["--model", {str(folder)!r}, "--no-compile-cache", "--max-new-tokens", "100", "hi"]
        runpy.run_module("jllm.generate", run_name="__main__")
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_interrupt_while_steps_are_compiled(folder):
    code = f"""if True:
        import os, signal, sys
        signal.signal(signal.SIGINT, signal.default_int_handler)
        from jllm.cli.main import main
        from jllm.engine.device import Device
        compile_ahead = Device.compile_ahead
        def press(*args):
            os.kill(os.getpid(), signal.SIGINT)
            return compile_ahead(*args)
        Device.compile_ahead = press
        sys.exit(main(["--model", {str(folder)!r}, "--no-compile-cache", "hi"]))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_second_interrupt_raises_and_the_handler_is_put_back():
    before = signal.getsignal(signal.SIGINT)
    try:
        for handler in (signal.default_int_handler, signal.SIG_IGN):
            signal.signal(signal.SIGINT, handler)
            with catch_interrupts() as interrupt:
                interrupt.deferred = True
                signal.raise_signal(signal.SIGINT)
                assert interrupt.asked == (handler is not signal.SIG_IGN)  # what a shell's background jobs ignore
                if interrupt.asked:
                    with pytest.raises(KeyboardInterrupt):
                        signal.raise_signal(signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_no_handler_outside_the_main_thread(capsys):
    statuses = []
    thread = threading.Thread(target=lambda: statuses.append(main(["--version"])))
    thread.start()
    thread.join()
    assert statuses == [0]


CLOSED = {
    ">&-": (("hi",), 2, "", "error: standard output is closed; give --input and --output, or a place to print to\n"),
    "2>&-": (("--bogus",), 2, "", ""),
    ">&- 2>&-": (("--bogus",), 2, "", ""),
}


@pytest.mark.parametrize(("streams", "args", "status", "out", "err"), [(k, *v) for k, v in CLOSED.items()])
def test_closed_streams(streams, args, status, out, err):
    done = run_closed(streams, *args)
    assert (done.returncode, done.stdout, done.stderr) == (status, out, err)


def test_a_file_needs_no_streams(folder, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"prompt": "a king", "max_new_tokens": 3}\n')
    flags = ("--model", str(folder), "--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl"))
    done = run_closed("<&- >&- 2>&-", *flags, "--no-compile-cache", "--ignore-eos")
    assert done.returncode == 0
    (line,) = (tmp_path / "out.jsonl").read_text().splitlines()
    assert len(json.loads(line)["token_ids"]) == 3


def run_closed(streams: str, *args: str) -> subprocess.CompletedProcess:
    command = ["sh", "-c", f'exec "$0" -m jllm.generate "$@" {streams}', sys.executable, *args]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_terminal(folder, tmp_path):
    """On a terminal: the prompt is echoed in a colour, Ctrl-C stops cleanly, and the compilation cache fills."""
    cache = tmp_path / "cache"
    flags = ["--model", folder, "--compile-cache", cache, "--ignore-eos", "--max-new-tokens", 100, "a king"]
    code = f"""if True:
        import signal, sys, time
        signal.signal(signal.SIGINT, signal.default_int_handler)  # where tests run in the background, it is ignored
        from jllm.cli.main import main
        from jllm.engine.engine import Engine
        step = Engine.step
        Engine.step = lambda engine: (time.sleep(0.1), step(engine))[1]  # or it would be over before it is interrupted
        sys.exit(main({[str(flag) for flag in flags]}))
    """
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "NO_COLOR": ""}
    ends = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, **ends) as process:
        os.close(theirs)
        seen, prompt = b"", b"\x1b[36ma king\x1b[0m"
        while len(seen.partition(prompt)[2]) < 5:
            seen += os.read(ours, 1024)
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # how Linux says that the other end is closed
            while data := os.read(ours, 1024):
                seen += data
    os.close(ours)
    assert process.returncode == 130, seen
    last = seen.decode(errors="replace").splitlines()[-1]
    assert 0 < int(SUMMARY.fullmatch(last)[1]) < 100
    assert "interrupted" in last
    assert b"Traceback" not in seen
    assert any(cache.iterdir())


def test_compile_cache_folder(monkeypatch, tmp_path, run):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_path() == tmp_path / "jllm" / "steps"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored
    assert default_path() == Path.home() / ".cache" / "jllm" / "steps"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert default_path() == Path.home() / "Library" / "Caches" / "jllm" / "steps"
    with pytest.raises(OutputError, match="compile cache .* cannot be made"):
        make_compile_cache(Path("/proc/none"))


@pytest.mark.filterwarnings("always")
def test_unwritable_compile_cache_is_only_a_warning(folder, capsys):
    flags = ["--max-slots", "4", "--max-step-tokens", "32", "--max-new-tokens", "2", "--ignore-eos"]
    assert main(["--model", str(folder), *flags, "--compile-cache", "/proc/none", "a king"]) == 0
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith("warning: compile cache /proc/none: cannot be made")
    assert SUMMARY.fullmatch(last)


def test_version(run):
    status, out, _ = run("--version")
    assert status == 0
    assert re.fullmatch(r"jllm \d+\.\d+\.\d+, jax \d+\.\d+\.\d+\n", out)
