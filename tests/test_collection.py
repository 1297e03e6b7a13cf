"""Where only the library's own dependencies are installed, tests that need more are skipped, not broken."""

import os
import subprocess
import sys
from pathlib import Path

BLOCK = """import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("hypothesis", "chex", "optax", "jax_triton"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""


def test_device_tests_are_collected_without_development_packages(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(BLOCK)
    command = ["-m", "pytest", "-o", "addopts=", "-p", "no:hypothesispytest", "-m", "gpu", "--collect-only", "-q"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, *command], cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]
    assert "tests/test_gpu.py::test_parity_in_float32" in done.stdout
