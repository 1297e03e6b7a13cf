"""Checks what XLA makes of programs for an H100, compiled without one: no copies of pools, and no passes that kernels
save. It runs where the CUDA plugin is installed (the extra cuda13)."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("compiled_for_h100.py")


def compiled(case: str) -> dict:
    if find_spec("jax_plugins") is None or find_spec("jax_plugins.xla_cuda13") is None:
        pytest.skip("needs jax-cuda13-plugin, which compiles for GPUs: uv sync --extra cuda13")
    ran = subprocess.run([sys.executable, SCRIPT, case], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", ["decodes", "normed"])
def test_decodes_copy_no_pool_and_run_kernels_alone(case):
    found = compiled(case)
    assert found["copies"] == found["shared"] == []
    assert ["gemm" in name for name in found["passes"]] == [True], "the head's product"


def test_many_rows_add_residuals_in_products():
    found = compiled("prompts")
    assert found["copies"] == found["shared"] == []
    assert not any("[8192,4096]" in name for name in found["passes"]), "a residual in a pass of its own"
    assert sum("[8192,11008]" in kind for kind in found["passes"]) == 2, "SiLU, a pass a layer"


def test_pools_that_begin_equal_have_places_of_their_own():
    """Scores make K's and V's pools in the program, of zeros. Of 700 rows kernels read slices, and XLA fuses both."""
    assert compiled("scores")["shared"] == []
