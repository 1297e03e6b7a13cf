"""Checks Triton matmuls in Triton's interpreter against the formula."""

import jax
import pytest

pytest.importorskip("triton")  # of extras and development, for Linux alone

from pallas_kernels.fp8_matmul import fp8_matmul  # noqa: E402
from pallas_kernels.int8_matmul import int8_matmul  # noqa: E402
from pallas_kernels.ragged_matmul import triton as ragged_triton  # noqa: E402
from pallas_kernels.scaled_matmul import reference, triton  # noqa: E402
from pallas_kernels.scaled_matmul.cases import Case  # noqa: E402
from pallas_kernels.triton import triton_call  # noqa: E402
from tests.kernels import ragged_cases, triton_tools  # noqa: E402
from tests.kernels.helpers import TOLERANCE, error, missed, same_bits  # noqa: E402
from tests.kernels.triton_tools import launched_with  # noqa: E402

CASES = (
    Case(1, 96, 96, "int8"),
    Case(5, 160, 128, "int8", bias=True, out_dtype="float16"),
    Case(65, 128, 256, "int8", bias=True, residual=True, out_dtype="float32"),
    Case(127, 33, 50, "int8", residual=True, out_dtype="float16"),
    Case(130, 160, 32, "int8", bias=True, zero_rows=True),
    Case(3, 32, 11008, "int8", saturated=True, out_dtype="float32"),
    Case(1, 96, 160, "float8_e4m3fn", bias=True, out_dtype="float32"),
    Case(66, 33, 50, "float8_e4m3fn", residual=True),
    Case(3, 160, 384, "float8_e4m3fn", bias=True, out_dtype="float32", in_blocks=True),
    Case(66, 33, 300, "float8_e4m3fn", residual=True, in_blocks=True),
)


RAGGED = (  # kind, sizes of groups, M, N, K, gated
    ("bfloat16", (3, 0, 5, 1), 12, 40, 72, False),
    ("bfloat16", (3, 0, 60, 20), 90, 96, 160, True),
    ("int8", (3, 0, 70), 80, 64, 128, True),
    ("fp8", (0, 130, 2), 140, 64, 96, False),
    ("w4a16-g128", (3, 0, 30), 35, 72, 256, True),
    ("w4a16-g32-zp", (0, 5, 1), 7, 40, 96, False),
    ("nf4", (1, 0, 0), 1, 64, 128, False),
    ("mxfp4-weight", (1, 0, 9), 12, 72, 160, True),
)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setattr(triton_call, "call", triton_tools.interpret)


def run(case, arrays, backend="triton"):
    x, w, x_scale, w_scale, bias, residual = arrays
    added = {"bias": bias, "residual": residual, "out_dtype": case.out_dtype}
    matmul = int8_matmul if case.operand == "int8" else fp8_matmul
    return matmul(x, w, x_scale, w_scale, **added, backend=backend)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_the_formula(case):
    arrays = case.inputs()
    out = run(case, arrays)
    assert error(out, reference.scaled_matmul(*arrays)) < TOLERANCE[case.out_dtype]
    last = [a if a is None or a.shape[:1] != (case.m,) else a[-1:] for a in arrays]
    assert case.operand != "int8" or same_bits(out[-1:], run(case, last))
    assert (
        run(case, [None if a is None else a[:0] if i in (0, 2, 5) else a for i, a in enumerate(arrays)]).shape[0] == 0
    )


@pytest.mark.parametrize(("kind", "sizes", "m", "n", "k", "gated"), RAGGED, ids=str)
def test_groups_of_rows_match_the_formula(kind, sizes, m, n, k, gated):
    (x, w, counts, *options), expected = ragged_cases.arguments(kind, sizes, m, n, k, gated)
    out = ragged_triton.ragged_matmul(x, w, counts, *options)
    assert error(out, expected) < TOLERANCE["bfloat16"]
    assert not out[sum(sizes) :].any()
    first = sum(sizes[:-1])
    alone = jax.tree.map(lambda each: each[first : first + 1], x)  # of the last group
    if sizes[-1]:
        one = counts.at[:-1].set(0).at[-1].set(1)
        assert same_bits(ragged_triton.ragged_matmul(alone, w, one, *options), out[first : first + 1])


@pytest.mark.parametrize("number", [2, 7])
def test_seeded_faults_of_groups_are_caught(number):
    arguments, expected = ragged_cases.arguments(*RAGGED[number])

    def wrong(**fault):
        with launched_with(ragged_triton, **fault):
            out = ragged_triton.ragged_matmul(*arguments)
            return error(jax.numpy.nan_to_num(out), expected)

    assert wrong() < TOLERANCE["bfloat16"]
    faults = {name: wrong(**{name: value}) for name, value in {"HALVES": 1, "GROUPS": 1, "K": 64}.items()}
    assert not missed(faults, TOLERANCE["bfloat16"])


def test_seeded_faults_are_caught():
    case = Case(33, 96, 160, "int8", bias=True, residual=True)
    arrays = case.inputs()
    expected = reference.scaled_matmul(*arrays)

    def wrong(**fault):
        with launched_with(triton, **fault):
            return error(run(case, arrays), expected)

    assert wrong() < TOLERANCE[case.out_dtype]
    faults = {name: wrong(**{name: value}) for name, value in {"BIAS": False, "RESIDUAL": False, "K": 128}.items()}
    assert not missed(faults, TOLERANCE[case.out_dtype])
