"""Interprets kernels as strictly as a GPU runs them, and clears what is compiled for that."""

import ctypes
import gc
from pathlib import Path

import jax
import pytest

from tests.kernels.interpreter import make_strict

MOST_PAGES = 400_000  # of memory, of 4 KB: an interpreted kernel takes some 200 MB, which JAX and malloc keep


@pytest.fixture(autouse=True)
def strict_interpreter(monkeypatch):
    make_strict(monkeypatch)


@pytest.fixture(autouse=True, scope="module")
def room_for_interpreted_kernels():
    """Gives memory back between modules, once there is much."""
    yield
    sizes = Path("/proc/self/statm")
    if sizes.exists() and int(sizes.read_text().split()[1]) > MOST_PAGES:
        jax.clear_caches()
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
