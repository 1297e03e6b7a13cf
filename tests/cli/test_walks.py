"""What a stranger types first: the pages' shell commands, run in their order with tiny models where a page has large
ones. The notebook user's walk is tests/test_notebooks.py, and the Python of all pages tests/test_docs.py."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jllm.files.save import save
from tests.test_docs import ROOT, blocks, shallow

SETUP = re.compile(r"python3 -m pip install -q uv && python3 -m uv run ")  # this has happened
RUNS = re.compile(r"(python -m jllm|jllm )")


def lines(page: str) -> Iterator[str]:
    """The commands of a page's shell blocks that need no device and no download."""
    for block in blocks(ROOT / page, "sh"):
        for line in block.replace("\\\n", "").splitlines():
            line = SETUP.sub("", line)
            if RUNS.search(line) or line.startswith("curl "):
                yield line


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    """The packages, with two layers of the bundled model, whose steps compile in a third of the time."""
    path = tmp_path_factory.mktemp("sources")
    bundled = path / "jllm" / "assets" / "fairytale"
    bundled.mkdir(parents=True)
    model = shallow(dtype="bfloat16")
    save(bundled, model.params, model.config)
    for folder in (".", "jllm", "jllm/assets/fairytale"):
        for each in (ROOT / folder).iterdir():
            if not (path / folder / each.name).exists() and (folder != "." or each.name == "pallas_kernels"):
                (path / folder / each.name).symlink_to(each)
    return path


@pytest.fixture
def home(folder, sources, tmp_path) -> Path:
    """A home with the models that pages name, `python` and `jllm` to be called, and some prompts."""
    (tmp_path / "sources").symlink_to(sources)
    for name in {name for page in ROOT.glob("**/*.md") for name in re.findall(r"~/models/([\w.-]+)", page.read_text())}:
        (tmp_path / "models").mkdir(exist_ok=True)
        (tmp_path / "models" / name).symlink_to(folder)
    (tmp_path / "bin").mkdir()
    for name, command in (("python", ""), ("jllm", " -m jllm")):
        (tmp_path / "bin" / name).write_text(f'#!/bin/sh\nexec "{sys.executable}"{command} "$@"\n')
        (tmp_path / "bin" / name).chmod(0o755)
    prompts = ({"prompt": "once upon a time"}, {"prompt": [5, 6, 7], "temperature": 0})
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    asked = {"method": "POST", "url": "/v1/completions", "body": {"prompt": "once upon a time", "max_tokens": 4}}
    (tmp_path / "requests.jsonl").write_text(json.dumps({"custom_id": "1", **asked}) + "\n")
    (tmp_path / "half.toml").write_text(blocks(ROOT / "docs/quantization.md", "toml")[0])
    return tmp_path


def environment(home: Path) -> dict[str, str]:
    path = f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}"
    paths = {"HOME": str(home), "PATH": path, "PYTHONPATH": str(home / "sources")}
    return {**os.environ, **paths, "JAX_PLATFORMS": "cpu"}


def shorter(line: str) -> str:
    """The command for fewer tokens, where the page asks for many or doesn't say."""
    few = "--max-new-tokens 12"
    line, found = re.subn(r"--max-new-tokens \d+", few, line)
    return line if found else re.sub(r"\bjllm[. ](generate|chat)\b", rf"\g<0> {few}", line)


def run(line: str, home: Path) -> str:
    """Standard output of a command that must do well."""
    typed = "who was old?\n"  # where it asks
    options = {"shell": True, "cwd": home, "env": environment(home), "input": typed, "text": True, "timeout": 300}
    done = subprocess.run(shorter(line), capture_output=True, check=False, **options)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), f"{line}\n{done.stderr}"
    return done.stdout


WALKED = ["README.md", "docs/serving.md", "docs/speculation.md", "docs/quantization.md"]


def serves(line: str) -> bool:
    """Returns whether a command is a server, or asks one."""
    return "jllm.serve" in line or line.startswith("curl ")


def goes_on(longer: str, line: str) -> bool:
    """Whether a command is another one with more options."""
    words, more = (re.sub(r"\s+#.*", "", each).split() for each in (line, longer))
    return len(more) > len(words) and more[: len(words)] == words


@pytest.mark.parametrize("page", WALKED)
def test_the_shell_and_quantization_users_walk(page, home):
    commands = [line for line in lines(page) if not serves(line) and "--input requests" not in line]
    assert commands
    for line in commands:
        if any(goes_on(longer, line) for other in WALKED for longer in lines(other)):
            continue  # the other is run
        out = run(line, home)
        assert out.strip() or "--output" in line, line
    if page == "README.md":
        assert len((home / "results.jsonl").read_text().splitlines()) == 2


def test_the_serving_users_walk(home):
    """Each server starts, answers what the page asks it and ends in order; and a file is answered without one."""
    served = 0
    files = [line for line in lines("docs/serving.md") if line.startswith("jllm batch")]
    for line in files:
        run(line, home)
        (answer,) = map(json.loads, (home / "answers.jsonl").read_text().splitlines())
        assert (answer["custom_id"], answer["response"]["status_code"]) == ("1", 200)
    commands = [line for line in lines("docs/serving.md") if serves(line)]
    assert files
    assert commands[0].startswith("python -m jllm.serve")
    requests = [line for line in commands if line.startswith("curl ")]
    assert requests
    if shutil.which("curl") is None:
        pytest.skip("there is no curl")
    for line in commands:
        if line.startswith("curl "):
            continue
        line = f"exec {re.sub(r' --port \d+', '', line)} --port 0"
        with subprocess.Popen(
            line, shell=True, cwd=home, env=environment(home), stderr=subprocess.PIPE, text=True
        ) as server:
            address = next(text for text in server.stderr if text.startswith("serving ")).split()[-1]
            for request in requests if served == 0 else ():
                answer = json.loads(run(request.replace("http://", "").replace("localhost:8000/v1", address), home))
                assert answer["choices"][0]["text"], answer
                served += 1
            server.send_signal(signal.SIGTERM)
            assert "Traceback" not in server.stderr.read()
        assert server.returncode == 0
    assert served
