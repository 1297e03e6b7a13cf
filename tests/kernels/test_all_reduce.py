"""Checks the exchange over peer memory without a GPU: what it refuses, and how its source is compiled.
test_all_reduce_protocol.py tries its protocols, tests/test_gpu.py its sums on GPUs."""

import ctypes
import shutil
import stat
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.all_reduce import MeshAxis, all_reduce, peer
from pallas_kernels.all_reduce.api import BACKENDS
from pallas_kernels.backends import choose

TWO = MeshAxis("model", (0, 1))
X = jax.ShapeDtypeStruct((3, 64), jnp.bfloat16)


@pytest.mark.parametrize(
    ("x", "axis", "why"),
    [
        (X, MeshAxis("model"), "is for GPUs of one host that one process has"),
        (X, MeshAxis("model", tuple(range(9))), "9 devices: .* is for 2 to 8"),
        (X, MeshAxis("model", (0,)), "1 devices: .* is for 2 to 8"),
        (jax.ShapeDtypeStruct((3, 64), jnp.float64), TWO, "float64: .* takes float32, float16, bfloat16"),
        (jax.ShapeDtypeStruct((3, 60), jnp.bfloat16), TWO, r"bfloat16\[3, 60\]: rows must have a multiple of 16 bytes"),
        (jax.ShapeDtypeStruct((0, 64), jnp.bfloat16), TWO, r"bfloat16\[0, 64\]: rows must have"),
    ],
)
def test_what_is_refused(x, axis, why):
    with jax.enable_x64(True), pytest.raises(NotImplementedError, match=why):
        choose(BACKENDS, "peer", x, axis)


def test_without_nvcc_a_name_is_refused_and_no_name_is_the_exchange_of_xla(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    peer.refusal.cache_clear()
    with pytest.raises(NotImplementedError, match="^no nvcc, which compiles .*: put CUDA's compiler on PATH$"):
        choose(BACKENDS, "peer", X, TWO)
    assert choose(BACKENDS, "hopper", X, TWO) is BACKENDS["xla"]
    peer.refusal.cache_clear()


def test_few_bytes_take_it_unasked(monkeypatch):
    monkeypatch.setattr(peer, "refusal", lambda gpus: None)
    assert choose(BACKENDS, "hopper", X, TWO) is BACKENDS["peer"]
    many = jax.ShapeDtypeStruct((1, peer.FASTER // 2 + 8), jnp.bfloat16)
    assert choose(BACKENDS, "hopper", many, TWO) is BACKENDS["xla"]
    assert choose(BACKENDS, "peer", many, TWO) is BACKENDS["peer"]
    assert choose(BACKENDS, "xla", X, TWO) is BACKENDS["xla"]
    with pytest.raises(ValueError, match="unknown backend 'nccl'; backends: .*, peer"):
        all_reduce(jnp.zeros((3, 64)), TWO, backend="nccl")


def compiler(folder: Path, script: str) -> None:
    """Stands in for nvcc."""
    path = folder / "nvcc"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IEXEC)


def test_the_source_is_compiled_once_for_a_capability(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    compiler(tmp_path, f'echo "$@" >> {tmp_path}/calls; for last; do :; done; echo library > "$last"')
    first, again, other = (peer.compiled(arch) for arch in ("90", "90", "80"))
    assert first == again != other
    assert first.read_text() == "library\n"
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 2
    assert "arch=compute_90,code=sm_90" in calls[0]
    assert sorted(first.parent.iterdir()) == sorted([first, other]), "nothing half made is left"


def test_a_library_that_is_damaged_is_said_in_a_line(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(peer, "capability", lambda: "9.0")
    compiler(tmp_path, 'for last; do :; done; echo library > "$last"')
    with pytest.raises(RuntimeError, match="^/.*so cannot be loaded .*: remove it, and it is compiled again$"):
        peer.register.__wrapped__()


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ('echo "peer.cu(3): error: nothing" >&2; exit 2', "nvcc cannot compile peer.cu: .*error: nothing$"),
        ("exit 1", "nvcc cannot compile peer.cu: it ended with 1"),
    ],
)
def test_what_nvcc_refuses_is_said_in_a_line(monkeypatch, tmp_path, script, why):
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    compiler(tmp_path, script)
    with pytest.raises(RuntimeError, match=why):
        peer.compiled("90")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "nvcc"))
    with pytest.raises(RuntimeError, match="nvcc/pallas_kernels: cannot be written: Not a directory"):
        peer.compiled("90")


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
@pytest.mark.parametrize("arch", ["90", pytest.param("80", marks=pytest.mark.exhaustive)])
def test_nvcc_takes_the_source(monkeypatch, tmp_path, arch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library = ctypes.CDLL(str(peer.compiled(arch)))
    assert all(hasattr(library, name) for name in ("peer_all_reduce", "peer_all_reduce_initialize", "peer_can_access"))
