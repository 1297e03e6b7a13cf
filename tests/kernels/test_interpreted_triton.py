"""Checks Triton kernels of rows in Triton's interpreter against the references."""

import importlib
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton")  # of extras and development, for Linux alone

from pallas_kernels.formats.quantized_rows import dequantize_rows, quantize_rows  # noqa: E402
from pallas_kernels.norm_quant import cases as norm_cases  # noqa: E402
from pallas_kernels.norm_quant import norm_quant, reference  # noqa: E402
from pallas_kernels.norm_quant import xla as norm_xla  # noqa: E402
from pallas_kernels.silu_mul_quant import cases as silu_cases  # noqa: E402
from pallas_kernels.silu_mul_quant import reference as silu_reference  # noqa: E402
from pallas_kernels.silu_mul_quant import silu_mul_quant  # noqa: E402
from pallas_kernels.silu_mul_quant import xla as silu_xla  # noqa: E402
from pallas_kernels.triton import rows_triton, triton_call  # noqa: E402
from tests.kernels import triton_tools  # noqa: E402
from tests.kernels.helpers import TOLERANCE, error, same_bits  # noqa: E402
from tests.kernels.row_helpers import units_apart  # noqa: E402
from tests.kernels.test_norm_quant import STEP, exact, numbers, tolerance  # noqa: E402

KINDS = (None, "int8", "fp8")
NORMS = [case for case in norm_cases.CASES if case.dtype != "float32"]
NORMS += [norm_cases.Case(2, 100, "bfloat16", kind) for kind in KINDS]
SILUS = [case for case in silu_cases.CASES if case.dtype != "float32"]
SILUS += [silu_cases.Case(2, 100, "float16", kind) for kind in KINDS]


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setattr(triton_call, "call", triton_tools.interpret)


def norm(case, x, weight, residual, **options):
    return norm_quant(x, weight, residual=residual, backend="triton", **case.options() | options)


@pytest.mark.parametrize("case", NORMS, ids=str)
def test_norm_quant_matches_the_definition(case):
    x, weight, residual = case.inputs()
    rows, summed = norm(case, x, weight, residual)
    plain, same = norm(case, x, weight, residual, kind=None)
    _, expected_sum = reference.norm_quant(x, weight, eps=norm_cases.EPS, residual=residual)
    assert error(numbers(rows), exact(case, x, weight, residual)) < tolerance(case)
    assert same_bits((summed, same), (jnp.asarray(expected_sum),) * 2)
    assert same_bits(rows, plain if case.kind is None else quantize_rows(plain, case.kind))
    units = units_apart(plain, norm_xla.norm_quant(x, weight, residual=residual, eps=norm_cases.EPS)[0])
    assert units.max() <= 1
    assert np.sum(units > 0) <= 1 + 5e-3 * units.size


@pytest.mark.parametrize("case", SILUS, ids=str)
def test_silu_mul_quant_matches_the_definition(case):
    gate_up = case.inputs()
    rows = silu_mul_quant(gate_up, kind=case.kind, backend="triton")
    plain = silu_mul_quant(gate_up, backend="triton")
    wanted = silu_reference.silu_mul(gate_up)
    assert error(numbers(rows), wanted) < 2 * TOLERANCE[case.dtype] + STEP[case.kind]
    assert same_bits(rows, plain if case.kind is None else quantize_rows(plain, case.kind))
    units = units_apart(plain, silu_xla.silu_mul_quant(gate_up))
    assert units.max() <= 1
    assert np.sum(units > 0) <= 1 + 1e-3 * units.size


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_zeros_stay_zeros_and_nan_stays_in_its_row(kind):
    x = jnp.zeros((3, 128), jnp.bfloat16).at[1, 5].set(jnp.nan).at[2].set(1)
    rows, _ = norm_quant(x, jnp.ones(128, jnp.bfloat16), eps=norm_cases.EPS, kind=kind, backend="triton")
    back = np.asarray(dequantize_rows(rows))
    assert not back[0].any()
    assert np.isnan(back[1]).all()
    np.testing.assert_allclose(back[2], 1, rtol=1e-2)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_every_number_has_the_code_of_quantize_rows(kind):
    """Takes normal bfloat16 numbers of 190 binades, 63 to a row, so that every code occurs, denormals too."""
    bits = np.arange(0x0080, 0x7F80, dtype=np.uint16)
    up = jnp.asarray(bits.view(jnp.bfloat16)).reshape(4, -1)
    up = jnp.concatenate([up, -up], axis=1)[:-1]  # where the last row's products overflow
    gate = jnp.full(up.shape, 64.0, jnp.bfloat16)  # SiLU(64) is 64
    plain = silu_mul_quant(jnp.concatenate([gate, up], axis=1), backend="triton")
    assert same_bits(plain, up * 64)
    rows = silu_mul_quant(jnp.concatenate([gate, up], axis=1), kind=kind, backend="triton")
    assert same_bits(rows, quantize_rows(plain, kind))


def test_gradients_are_those_of_xla():
    x, weight, residual = norm_cases.Case(2, 128, "bfloat16", None).inputs()

    def gradients(**options):
        def loss(x, weight, residual):
            rows, summed = norm_quant(x, weight, residual=residual, eps=norm_cases.EPS, **options)
            return jnp.sum(rows.astype("float32")) + jnp.sum(summed.astype("float32"))

        return jax.grad(loss, (0, 1, 2))(x, weight, residual)

    assert same_bits(gradients(backend="triton"), gradients(backend="xla"))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("+ 0x7FFFF + ", "+ 0x80000 + "),  # ties away from zero
        ("size < 0x3C800000", "size < 0x3C000000"),  # e4m3's smallest normal number
        ("tl.max(y", "tl.min(y"),
        ("& 0x80)", "& 0x00)"),  # the sign
    ],
)
def test_seeded_faults_are_caught(monkeypatch, tmp_path, old, new):
    source = Path(rows_triton.__file__).read_text(encoding="utf-8")
    assert source.count(old) == 1
    faulty = tmp_path / "faulty.py"
    faulty.write_text(source.replace(old, new), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "faulty", raising=False)
    monkeypatch.setattr(rows_triton, "store_row", importlib.import_module("faulty").store_row)
    gate_up = silu_cases.Case(8, 1024, "bfloat16", "fp8").inputs() * jnp.bfloat16(1 / 16)
    jax.clear_caches()
    rows = silu_mul_quant(gate_up, kind="fp8", backend="triton")
    jax.clear_caches()
    assert not same_bits(rows, quantize_rows(silu_mul_quant(gate_up, backend="triton"), "fp8"))
