"""The first moments of every command: Ctrl-C, a GPU that is not there, and extras that are not installed."""

import json
import re
import subprocess
import sys
import tomllib

import pytest

from experiments import GONE, NEED_GPU, TRAINING
from jllm.__main__ import COMMANDS as OF_JLLM
from jllm.errors import how_to_install
from pallas_kernels import starting
from tests.experiments.test_experiment_help import COMMANDS, ROOT

MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
    for path in COMMANDS
    if "__main__" in path.read_text(encoding="utf-8")
]
BENCHES = [name for name in MODULES if name.endswith(".bench")]
# Forks a process for each command line, which Python runs as after `-m`; `happens` is called as modules are looked for.
FORKS = """
import json, os, runpy, signal, sys, tempfile
class Finder:
    def find_spec(self, name, path=None, target=None):
        happens(name)
sys.meta_path.insert(0, Finder())
os.environ["JAX_PLATFORMS"] = "cpu"
signal.signal(signal.SIGINT, signal.default_int_handler)  # where tests run in the background, it is ignored
def run(words):
    with tempfile.TemporaryFile() as file:
        pid = os.fork()
        if not pid:
            os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
            sys.argv, sys.orig_argv = ["-m", *words[1:]], [sys.executable, "-m", *words]
            status = 1
            try:
                runpy._run_module_as_main(words[0])
            except SystemExit as end:
                status = end.code
            finally:
                sys.stdout.flush(), sys.stderr.flush()
                os._exit(status)
        _, status = os.waitpid(pid, 0)
        file.seek(0)
        return [os.waitstatus_to_exitcode(status), file.read().decode()]
print(json.dumps([run(words) for words in json.loads(sys.stdin.read())]))
"""
WITHOUT_JAX = """
def happens(name):
    if name == "jax":
        print("jax was loaded")
        raise SystemExit(77)
"""
CTRL_C = """
def happens(name):
    if name in ("argparse", "jax", "lm_eval"):  # the first of them
        os.kill(os.getpid(), signal.SIGINT)
"""
WITHOUT_EXTRAS = """
import importlib, sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {extras!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
for name in {modules!r}:
    importlib.import_module(name)
"""


def run(happens: str, lines: list[str]) -> dict[str, tuple[int, str]]:
    """The exit status and the output of each command line."""
    given = json.dumps([line.split() for line in lines])
    command = [sys.executable, "-c", happens + FORKS]
    done = subprocess.run(command, input=given, cwd=ROOT, capture_output=True, text=True, check=True)
    return dict(zip(lines, map(tuple, json.loads(done.stdout)), strict=True))


def test_what_needs_a_gpu_says_so_before_jax_is_loaded():
    needing = [*BENCHES, *NEED_GPU]
    without = {line: options for line, options in NEED_GPU.items() if options}
    for line, (status, said) in run(WITHOUT_JAX, needing).items():
        instead = f"; without one: {', '.join(without[line])}" if line in without else ""
        wanted = f"error: {line} needs a GPU, and JAX has none here{instead} (see --help)\n"
        assert (status, said) == (2, wanted)
    others = [f"{line} --help" for line in needing] + [
        f"{line} {o}" for line, options in without.items() for o in options
    ]
    for line, (_, said) in run(WITHOUT_JAX, others).items():
        assert "needs a GPU, and JAX has none here" not in said, line


def test_a_command_that_is_gone_names_its_successor():
    for line, found in run(WITHOUT_JAX, [*GONE]).items():
        assert found == (2, f"error: {line} is gone: {GONE[line]}\n")


def test_what_times_a_device_or_a_large_model_is_known_to_need_a_gpu():
    known = {line.partition(" ")[0] for line in NEED_GPU}
    for path in COMMANDS:
        name, text = ".".join(path.relative_to(ROOT).with_suffix("").parts), path.read_text(encoding="utf-8")
        large = re.search(r"claim_memory\(\)|device_us\(|timeline\(|add_model_options\(", text)
        if name.startswith("experiments.") and large and name != "experiments.claims.__main__":  # toys elsewhere
            assert name in known, name
    assert len(BENCHES) > 10
    assert {*MODULES} >= known


@pytest.mark.parametrize(
    ("variables", "sees"),
    [
        ({}, True),
        ({"JAX_PLATFORMS": "cpu"}, False),
        ({"JAX_PLATFORMS": "cuda,cpu"}, True),
        ({"CUDA_VISIBLE_DEVICES": ""}, False),
        ({"CUDA_VISIBLE_DEVICES": "1"}, True),
    ],
)
def test_a_gpu_is_there_where_jax_may_use_it(variables, sees, tmp_path, monkeypatch):
    for name in ("JAX_PLATFORMS", "JAX_PLATFORM_NAME", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(starting, "DEVICES", tmp_path)
    monkeypatch.setattr(starting, "PLUGINS", "jax")
    assert not starting.sees_gpu()
    (tmp_path / "nvidia3").touch()
    assert starting.sees_gpu() == sees
    monkeypatch.setattr(starting, "PLUGINS", "no_such_package")
    assert not starting.sees_gpu()


def test_ctrl_c_during_imports_is_one_line():
    names = [*MODULES, *(module for module, _ in OF_JLLM.values())]
    for line, found in run(CTRL_C, [f"{name} --help" for name in names]).items():
        assert found == (130, "interrupted\n"), line


@pytest.mark.parametrize("name", ["tests", "json.tool"])
def test_other_peoples_commands_keep_ctrl_c(name, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["-m", "x"])
    monkeypatch.setattr(sys, "orig_argv", ["python", "-X", "dev", "-m", name, "x"])
    monkeypatch.setattr(starting, "end_at_interrupts", lambda: pytest.fail("it is not ours"))
    starting.start()
    assert starting.command() == name


def test_no_command_needs_an_extra_for_its_help():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    names = {re.split(r"[\[=]", each)[0].replace("-", "_") for some in extras.values() for each in some} - {"jax"}
    modules = [name + (".__main__" if name == "experiments.claims" else "") for name in MODULES]
    modules += [f"{name}.__main__" if name == "jllm.serve" else name for name, _ in OF_JLLM.values()]
    code = WITHOUT_EXTRAS.format(extras=names, modules=[name for name in modules if name != "jllm.analysis.lm_eval"])
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_training_without_optax_says_so_at_once():
    missing = WITHOUT_JAX + "import sys\nsys.modules['optax'] = None\n"
    for name, found in run(missing, [*TRAINING]).items():
        assert found == (2, f"error: {name} needs optax: {how_to_install('train')}\n")
