"""Checks silu_mul_quant: the reference against hand-made rows, the xla backend against the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.formats.quantized_rows import LARGEST, dequantize_rows, quantize_rows
from pallas_kernels.silu_mul_quant import reference, silu_mul_quant, xla
from pallas_kernels.silu_mul_quant.cases import CASES, Case
from tests.kernels.helpers import TOLERANCE, error, missed, same_bits

DOUBLE = [Case(3, 96, "float64", kind) for kind in (None, "int8", "fp8")]
# Of a row's norm: int8's error is uniform within half a step, which is 1 / 127 of the largest value, up to 20 standard
# deviations for such products; fp8's is within 1 / 16 of each value.
STEP = {None: 0.0, "int8": 0.06, "fp8": 0.04}


def numbers(rows):
    return rows if isinstance(rows, jax.Array) else dequantize_rows(rows)


def tolerance(case: Case) -> float:
    return TOLERANCE[case.dtype] + STEP[case.kind]


def test_reference_by_hand():
    gate_up = np.float64([[0.0, 1.0, -800.0, 800.0, 5.0, 3.0, 2.0, -2.0]])
    rows = reference.silu_mul_quant(gate_up)
    np.testing.assert_allclose(rows, [[0, 3 / (1 + np.exp(-1)), 0, -1600]], rtol=1e-15)
    codes = reference.silu_mul_quant(np.float32(gate_up), kind="int8")
    assert codes.values.tolist() == [[0, 0, 0, -127]]
    np.testing.assert_allclose(np.asarray(codes.scales), 1600 / 127, rtol=1e-7)


@pytest.mark.parametrize("case", [*CASES, *DOUBLE], ids=str)
def test_xla_matches_the_definition(case):
    with jax.enable_x64(case.dtype == "float64"):
        gate_up = case.inputs()
        rows = silu_mul_quant(gate_up, kind=case.kind, backend="xla")
        expected = jax.tree.map(jnp.asarray, reference.silu_mul_quant(gate_up, kind=case.kind))
        assert jax.tree.map(lambda a: (a.shape, a.dtype), rows) == jax.tree.map(lambda a: (a.shape, a.dtype), expected)
        wanted = reference.silu_mul(gate_up)
        assert error(numbers(rows), wanted) < tolerance(case)
        assert error(numbers(expected), wanted) < tolerance(case)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_xla_computes_in_float32_and_rounds_once(dtype):
    """Allows for the last bit of float32, in which compiled sigmoids differ."""
    gate_up = Case(4, 256, dtype, None).inputs()
    rows = xla.silu_mul_quant(gate_up)
    gate, up = jnp.split(gate_up.astype("float32"), 2, axis=-1)
    expected = (jax.nn.silu(gate) * up).astype(dtype)
    rtol = {"bfloat16": 2**-7, "float16": 2**-10, "float32": 1e-6}[dtype]
    np.testing.assert_allclose(np.asarray(rows, np.float32), np.asarray(expected, np.float32), rtol=rtol)
    if dtype != "float32":
        assert np.mean(np.asarray(rows != expected)) < 2e-3


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_codes_are_those_of_the_rounded_rows(kind):
    gate_up = Case(4, 256, "bfloat16", kind).inputs()
    rows = xla.silu_mul_quant(gate_up, kind=kind)
    assert same_bits(rows, quantize_rows(xla.silu_mul_quant(gate_up), kind))
    assert np.abs(np.asarray(rows.values).astype(np.float32)).max() == LARGEST[kind]


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_zeros_stay_zeros_and_nan_stays_in_its_row(kind):
    gate_up = jnp.zeros((3, 256), jnp.bfloat16).at[1, 5].set(jnp.nan).at[2].set(-1)
    back = np.asarray(dequantize_rows(silu_mul_quant(gate_up, kind=kind)))
    assert not back[0].any()
    assert np.isnan(back[1]).all()
    np.testing.assert_allclose(back[2], 1 / (1 + np.e), rtol=1e-2)


def test_a_row_does_not_depend_on_the_others():
    gate_up = Case(5, 384, "float32", "int8").inputs()
    rows = xla.silu_mul_quant(gate_up, kind="int8")
    for t in range(5):
        alone = xla.silu_mul_quant(gate_up[t : t + 1], kind="int8")
        assert same_bits(alone, jax.tree.map(lambda a, t=t: a[t : t + 1], rows))


def test_works_inside_jit_and_for_no_rows():
    gate_up = Case(2, 64, "bfloat16", "fp8").inputs()
    inside = jax.jit(lambda x: jax.jit(lambda x: silu_mul_quant(x, kind="fp8"))(x))(gate_up)
    assert same_bits(inside, silu_mul_quant(gate_up, kind="fp8"))
    rows = silu_mul_quant(gate_up[:0], kind="int8")
    assert (rows.values.shape, rows.scales.shape) == ((0, 64), (0,))


def test_seeded_faults_are_caught():
    case = Case(4, 256, "bfloat16", None)
    gate_up = case.inputs()
    gate, up = jnp.split(gate_up, 2, axis=-1)
    wanted = reference.silu_mul(gate_up)

    def run(gate_up):
        return error(silu_mul_quant(gate_up), wanted)

    assert run(gate_up) < tolerance(case)
    faults = {
        "halves swapped": run(jnp.concatenate([up, gate], axis=-1)),
        "halves interleaved": run(jnp.stack([gate, up], axis=-1).reshape(4, -1)),
        "another row": run(jnp.roll(gate_up, 1, axis=0)),
        "one vector dropped": run(gate_up.at[0, 248:256].set(0)),
        "no sigmoid": error(gate * up, wanted),
    }
    assert not missed(faults, tolerance(case))
    rows = silu_mul_quant(gate_up, kind="int8")
    swapped = dequantize_rows(type(rows)(rows.values, rows.scales[::-1]))
    assert error(swapped, wanted) > 2 * tolerance(Case(4, 256, "bfloat16", "int8"))


def test_a_hopper_gpu_takes_the_kernel_for_what_it_was_measured_faster(monkeypatch):
    from pallas_kernels.silu_mul_quant import mosaic_sm90

    monkeypatch.setattr("pallas_kernels.backends.on_hopper", lambda: True)
    called = []
    monkeypatch.setattr(mosaic_sm90, "silu_mul_quant", lambda *_, **options: called.append(options["kind"]))
    x = jnp.zeros((2, 256), jnp.bfloat16)
    for kind in (None, "int8", "fp8"):
        silu_mul_quant(x, kind=kind)
    assert called == ["int8", "fp8"]
    assert silu_mul_quant(x.astype("float32"), kind="int8") is not None  # by xla
    assert called == ["int8", "fp8"]


def test_bad_arguments():
    gate_up = jnp.zeros((2, 512), jnp.bfloat16)
    for array, options, message in (
        (gate_up, {"kind": "int4"}, "unknown kind of quantized rows 'int4'; kinds: int8, fp8"),
        (gate_up[:, :7], {}, r"gate_up has shape \(2, 7\), expected \[T, 2F\] with F of at least 1"),
        (gate_up[:, :0], {}, r"gate_up has shape \(2, 0\), expected \[T, 2F\] with F of at least 1"),
        (gate_up[0], {}, r"gate_up has shape \(512,\), expected \[T, X\]"),
        (gate_up.astype("int8"), {}, "gate_up has dtype int8, expected one of bfloat16"),
        (gate_up, {"backend": "tpu"}, "unknown backend 'tpu'"),
    ):
        with pytest.raises(ValueError, match=message):
            silu_mul_quant(array, **options)
    for array, message in (
        (gate_up.astype("float32"), "dtype float32 is not supported by backend mosaic"),
        (gate_up[:, :320], "F=160 is not supported by backend mosaic, which does multiples of 64 from 128 to 32768"),
        (gate_up[:0], "T=0 is not supported by backend mosaic"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            silu_mul_quant(array, backend="mosaic")
