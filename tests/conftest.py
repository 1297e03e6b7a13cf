"""JAX as strict as it gets: what is implicit in library code fails here."""

import gc
import os
from pathlib import Path

# Tests compile much and run little: the least optimization takes a third off a step's compile time on a CPU.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"

# XLA's thread pool has a thread a core. Each thread of an interpreted kernel that waits at a barrier holds one of them:
# with two cores, three threads wait forever.
os.environ.setdefault("NPROC", "16")

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


MAPPINGS = 15_000  # Linux lets a process have 65,530, a compiled function takes some twenty, and XLA crashes past that


@pytest.fixture(autouse=True, scope="module")
def room_for_compiled_functions():
    """Lets go of compiled functions between modules, once there are many."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MAPPINGS:
        jax.clear_caches()
        gc.collect()
