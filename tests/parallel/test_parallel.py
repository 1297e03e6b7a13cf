"""Models on several devices: tests/parallel/spread_*.py, in two processes with eight virtual CPU devices."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(path.name for path in (ROOT / "tests/parallel").glob("spread_*.py"))


@pytest.mark.parametrize("files", [FILES[:4], FILES[4:]], ids=lambda files: f"{files[0]} to {files[-1]}")
def test_on_eight_devices(files: list[str]):
    flags = "--xla_force_host_platform_device_count=8"
    env = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "NPROC": "16"}
    command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider"]
    command += [f"tests/parallel/{file}" for file in files]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_there_are_files():
    assert len(FILES) >= 8
