"""Checks Triton matmuls by weights alone quantized in Triton's interpreter against the formula."""

import jax
import pytest

pytest.importorskip("triton")  # of extras and development, for Linux alone

from pallas_kernels.formats.weight_formats import TABLES  # noqa: E402
from pallas_kernels.triton import triton_call  # noqa: E402
from pallas_kernels.weight_only_matmul import reference, triton  # noqa: E402
from pallas_kernels.weight_only_matmul.cases import Case  # noqa: E402
from tests.kernels import triton_tools  # noqa: E402
from tests.kernels.helpers import missed, same_bits  # noqa: E402
from tests.kernels.triton_tools import launched_with  # noqa: E402
from tests.kernels.triton_weights_cases import allowed, run, within  # noqa: E402

CASES = (
    Case((1,), 40, 96, "w4a16-g32", shuffled=True),
    Case((1,), 64, 1152, "w4a16-g128-zp", "float16", bias=True, residual=True, out_dtype="float32"),
    Case((1,), 32, 64, "nf4-dq", residual=True),
    Case((1,), 33, 50, "w8a16", bias=True, out_dtype="float32"),
    Case((1,), 32, 96, "w8a16-g32", "float16"),
    Case((1,), 32, 64, "mxfp4-weight"),
    Case((1,), 33, 130, "fp8-weight", "float16"),
    Case((2, 3), 96, 128, "w4a16-g64", "float16", bias=True, out_dtype="float32"),
    Case((17,), 40, 96, "w4a16-g32-zp", residual=True),
    Case((5,), 40, 256, "w4a16-g128-zp", bias=True, shuffled=True, out_dtype="float32"),
    Case((5,), 40, 1024, "w4a16-g32", bias=True, residual=True),  # shared by two programs
    Case((3,), 64, 128, "iq4nl-g32"),
    Case((65,), 130, 128, "nf4", "float16", residual=True),
    Case((66,), 40, 256, "w4a16-g128-zp", out_dtype="float32"),
    Case((9,), 33, 50, "uint8-zp", bias=True, out_dtype="float32"),
    Case((5,), 64, 128, "w8a16-g64-zp"),
    Case((4,), 32, 128, "fp8-weight"),
    Case((4,), 32, 64, "mxfp8-weight"),
)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setattr(triton_call, "call", triton_tools.interpret)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_the_formula(case):
    arrays = case.inputs()
    out = run(case, arrays)
    assert within(case, out, arrays)
    x, w, bias, residual = arrays
    sizes = case.k, case.n, w.format.codes
    if triton.triton_config(len(x), *sizes) == triton.triton_config(2, *sizes):
        last = run(case, (x[-2:], w, bias, None if residual is None else residual[-2:]))
        assert same_bits(out[-2:], last)
    assert run(case, (x[:0], w, bias, None if residual is None else residual[:0])).shape[0] == 0


@pytest.mark.parametrize("rows", [1, 2])
def test_seeded_faults_are_caught(monkeypatch, rows):
    case = Case((rows,), 64, 128, "w4a16-g32-zp", bias=True, residual=True, out_dtype="float32")
    arrays = case.inputs()
    expected = reference.weight_only_matmul(*arrays)

    def wrong(**fault):
        with launched_with(triton, **fault):
            return allowed(case, run(case, arrays), expected)

    assert wrong() < 1
    broken = {"BIAS": False, "RESIDUAL": False, "ZEROS": False, "MIDDLE": 128, "K": 96, "STORED": 32, "GROUPED": False}
    faults = {name: wrong(**{name: value}) for name, value in broken.items()}
    swapped = tuple(-number for number in TABLES["nf4"])
    table_case = Case((rows,), 32, 64, "nf4")
    inputs = table_case.inputs()
    monkeypatch.setitem(triton.CODE_VALUES, "nf4", swapped)
    faults["table"] = allowed(table_case, run(table_case, inputs), reference.weight_only_matmul(*inputs))
    jax.clear_caches()
    assert not missed(faults, 1.0)
