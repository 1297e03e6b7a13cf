"""Checks the engine under backend "triton", interpreted: a GPU's runs are those of tests/test_gpu_oracle.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")  # of extras and development, for Linux alone

ROOT = Path(__file__).parents[2]


def test_interpreted():
    """Runs the file in a process of its own: the interpreter has to be chosen before Triton is imported."""
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "tests/kernels/interpreted_triton_engine.py"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
