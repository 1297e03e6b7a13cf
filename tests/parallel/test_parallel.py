"""Models on several devices: tests/parallel/spread_*.py, each in a process with eight virtual CPU devices."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(path.name for path in (ROOT / "tests/parallel").glob("spread_*.py"))


@pytest.mark.parametrize("file", FILES)
def test_on_eight_devices(file: str):
    flags = "--xla_force_host_platform_device_count=8"
    env = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "NPROC": "16"}
    command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", f"tests/parallel/{file}"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_there_are_files():
    assert len(FILES) >= 2
