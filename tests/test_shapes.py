"""The shapes in signatures are those of the arrays in steps of many kinds, and other arrays are refused."""

import doctest
import os
import subprocess
import sys
from pathlib import Path

import pytest

import jllm.step.batch

ROOT = Path(__file__).parent.parent


def test_shapes_of_signatures():
    pytest.importorskip("beartype")
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    more = {"JLLM_CHECK_SHAPES": "1", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, "-m", "tests.checked_steps"]
    run = subprocess.run(command, cwd=ROOT, env=os.environ | more, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]


def test_the_example_of_a_batch():
    found = doctest.testmod(jllm.step.batch)
    assert found.attempted
    assert not found.failed
