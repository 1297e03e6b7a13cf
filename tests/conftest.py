"""JAX as strict as it gets: what is implicit in library code fails here."""

import contextlib
import gc
import os
import time
from collections import Counter
from pathlib import Path

# Tests compile much and run little. XLA verifies a program after each of its passes, which its own tests need and these
# do not. On a CPU the least optimization, LLVM's emitters in place of MLIR's (which set a
# pass manager up for each fusion) and one module a program take two thirds off a step's compile time and memory.
QUICK = (
    "--xla_disable_hlo_passes=hlo-verifier",
    "--xla_backend_optimization_level=0",
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
    "--xla_cpu_parallel_codegen_split_count=1",
)
os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *QUICK))

# Each operation of a lowered program names the Python lines that made it. Finding them slows lowering, and no test
# reads them.
os.environ.setdefault("JAX_INCLUDE_FULL_TRACEBACKS_IN_LOCATIONS", "0")
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")

# XLA's thread pool has a thread a core. Each thread of an interpreted kernel that waits at a barrier holds one of them:
# with two cores, three threads wait forever.
os.environ.setdefault("NPROC", "16")

# What shares a GPU (workers of pytest, and processes that tests start) takes memory as it needs it: left to itself, the
# first one takes three quarters.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax  # noqa: E402
import pytest  # noqa: E402

from jllm.programs import tracing  # noqa: E402
from pallas_kernels.bench.command import RECORDED  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

with contextlib.suppress(ImportError):  # tests that need it are skipped without it
    from hypothesis import HealthCheck, settings

    # a busy machine is no failure
    settings.register_profile("no clock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("no clock")


# Tracing and lowering make objects by the million. With Python's own settings a tenth of a run is spent on garbage.
gc.set_threshold(20_000, 10, 10)

MAPPINGS = 35_000  # Linux lets a process have 65,530, a compiled step takes 180, and XLA crashes past that


@pytest.fixture(autouse=True, scope="session")
def own_compile_cache(request, tmp_path_factory):
    """Gives generate() and commands a folder of this run for compiled steps. Its workers share the folder."""
    base = tmp_path_factory.getbasetemp()
    cache = (base.parent if hasattr(request.config, "workerinput") else base) / "cache"
    cache.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        yield


@pytest.fixture(autouse=True, scope="session")
def no_tracing_processes():
    """Lets engines on a GPU trace by themselves, since many tests share its host."""
    tracing.MOST_USUAL = 0


@pytest.fixture(autouse=True, scope="module")
def room_for_compiled_functions():
    """Drops compiled functions between modules, once there are many: those that nothing holds before all others."""
    yield
    maps = Path("/proc/self/maps")
    for drop in (gc.collect, jax.clear_caches, gc.collect):
        if maps.exists() and maps.read_bytes().count(b"\n") > MAPPINGS:
            drop()


def pytest_addoption(parser):
    parser.addoption("--results", metavar="DIR", help="keep the counts of this run in a result file there")
    text = "the same in experiments/results, which are committed"
    parser.addoption("--record", dest="results", action="store_const", const=str(RECORDED), help=text)


def pytest_collection_finish(session):
    """Spares the objects of imports and collection each full garbage collection."""
    gc.freeze()


STARTED = pytest.StashKey[float]()


def pytest_configure(config):
    config.stash[STARTED] = time.monotonic()
    if config.getoption("results") and not hasattr(config, "workerinput"):
        from tests.run_record import Reasons

        config.pluginmanager.register(Reasons(config))


def pytest_terminal_summary(terminalreporter, exitstatus, config):
    """Of the run as a whole, of which a worker that has nothing left to do knows its own tests alone."""
    if hasattr(config, "workerinput"):
        return
    for line in skipped_lines(terminalreporter.stats.get("skipped", ())):
        terminalreporter.write_line(line)
    if directory := config.getoption("results"):
        from tests import run_record

        command = ["python", "-m", "pytest", *config.invocation_params.args]
        seconds = time.monotonic() - config.stash[STARTED]
        whole = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        path = run_record.write(directory, command, terminalreporter.stats, seconds, whole)
        terminalreporter.write_line(f"counts: {path}")


def skipped_lines(reports) -> list[str]:
    """What was skipped and why, a line for each module and reason."""
    whys = [(report.nodeid.partition("::")[0], str(report.longrepr[2]).removeprefix("Skipped: ")) for report in reports]
    return [f"skipped: {count} of {file}: {why}" for (file, why), count in Counter(whys).items()]
