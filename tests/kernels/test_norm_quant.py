"""Checks norm_quant: the reference against hand-made rows, the xla backend against the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jllm.model.norms import rms_norm
from pallas_kernels.formats.quantized_rows import LARGEST, dequantize_rows, quantize_rows
from pallas_kernels.norm_quant import norm_quant, reference, xla
from pallas_kernels.norm_quant.cases import CASES, EPS, Case
from tests.kernels.helpers import TOLERANCE, error, missed, same_bits

DOUBLE = [Case(3, 96, "float64", kind, residual) for kind, residual in ((None, True), ("int8", True), ("fp8", False))]
# Of a row's norm: int8's error is uniform within half a step, which is 1 / 127 of the largest value, up to 9 standard
# deviations for a product of two normal numbers; fp8's is within 1 / 16 of each value.
STEP = {None: 0.0, "int8": 0.03, "fp8": 0.04}


def numbers(rows):
    return rows if isinstance(rows, jax.Array) else dequantize_rows(rows)


def tolerance(case: Case) -> float:
    """Allows two roundings to the dtype, then codes."""
    return 2 * TOLERANCE[case.dtype] + STEP[case.kind]


def exact(case: Case, x, weight, residual) -> np.ndarray:
    """Returns the norm in float64; only the sum is rounded."""
    _, summed = reference.norm_quant(x, weight, eps=EPS, residual=residual)
    return reference.normalize(summed, EPS) * np.asarray(weight).astype(np.float64)


def test_reference_by_hand():
    x = np.float64([[3.0, -4.0], [0.0, 0.0]])
    rows, summed = reference.norm_quant(x, np.float64([1.0, 2.0]), eps=0.5, residual=np.float64([[0, 1], [0, 0]]))
    rms = np.sqrt((9 + 9) / 2 + 0.5)
    np.testing.assert_allclose(rows, [[3 / rms, -6 / rms], [0, 0]], rtol=1e-15)
    np.testing.assert_array_equal(summed, [[3, -3], [0, 0]])
    codes, _ = reference.norm_quant(np.float32([[3.0, -4.0]]), np.float32([1, 1]), eps=1e-5, kind="int8")
    assert codes.values.tolist() == [[95, -127]]


@pytest.mark.parametrize("case", [*CASES, *DOUBLE], ids=str)
def test_xla_matches_the_definition(case):
    with jax.enable_x64(case.dtype == "float64"):
        x, weight, residual = case.inputs()
        rows, summed = norm_quant(x, weight, residual=residual, backend="xla", **case.options())
        found = reference.norm_quant(x, weight, residual=residual, **case.options())
        expected, expected_sum = jax.tree.map(jnp.asarray, found)
        assert same_bits(summed, expected_sum)
        assert jax.tree.map(lambda a: (a.shape, a.dtype), rows) == jax.tree.map(lambda a: (a.shape, a.dtype), expected)
        wanted = exact(case, x, weight, residual)
        assert error(numbers(rows), wanted) < tolerance(case)
        assert error(numbers(expected), wanted) < tolerance(case)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_without_a_weight_there_is_no_norm(kind):
    x, _, residual = Case(4, 256, "bfloat16", kind).inputs()
    assert same_bits(norm_quant(x, None, eps=EPS, kind=kind), (quantize_rows(x, kind), x))
    rows, summed = norm_quant(x, None, eps=EPS, residual=residual, kind=kind)
    assert same_bits((rows, summed), (quantize_rows(x + residual, kind), x + residual))
    with pytest.raises(NotImplementedError, match="no triton kernel yet; backends: mosaic, xla, deterministic"):
        norm_quant(x, None, eps=EPS, kind=kind, backend="triton")
    found = reference.norm_quant(x, None, eps=EPS, residual=residual, kind=kind)
    assert error(numbers(rows), np.asarray(numbers(jax.tree.map(jnp.asarray, found[0])))) < STEP[kind]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_xla_rounds_as_the_model_does(dtype):
    x, weight, residual = Case(4, 256, dtype, None).inputs()
    rows, summed = xla.norm_quant(x, weight, residual=residual, eps=EPS)
    assert same_bits(summed, x + residual)
    plain, same = xla.norm_quant(x, weight, eps=EPS)
    assert same_bits(same, x)
    for found, expected in ((rows, rms_norm(x + residual, weight, EPS)), (plain, rms_norm(x, weight, EPS))):
        np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=5e-7 if dtype == "float32" else 0)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_codes_are_those_of_the_rounded_rows(kind):
    x, weight, residual = Case(4, 256, "bfloat16", kind).inputs()
    rows, _ = xla.norm_quant(x, weight, residual=residual, eps=EPS, kind=kind)
    plain, _ = xla.norm_quant(x, weight, residual=residual, eps=EPS)
    assert same_bits(rows, quantize_rows(plain, kind))
    assert np.abs(np.asarray(rows.values).astype(np.float32)).max() == LARGEST[kind]


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_zeros_stay_zeros_and_nan_stays_in_its_row(kind):
    x = jnp.zeros((3, 128), jnp.bfloat16).at[1].set(jnp.nan).at[2].set(1)
    rows, _ = norm_quant(x, jnp.ones(128, jnp.bfloat16), eps=EPS, kind=kind)
    back = np.asarray(dequantize_rows(rows))
    assert not back[0].any()
    assert np.isnan(back[1]).all()
    np.testing.assert_allclose(back[2], 1, rtol=1e-2)


def test_a_row_does_not_depend_on_the_others():
    x, weight, residual = Case(5, 384, "float32", "int8").inputs()
    rows, summed = xla.norm_quant(x, weight, residual=residual, eps=EPS, kind="int8")
    for t in range(5):
        alone = xla.norm_quant(x[t : t + 1], weight, residual=residual[t : t + 1], eps=EPS, kind="int8")
        assert same_bits(alone, jax.tree.map(lambda a, t=t: a[t : t + 1], (rows, summed)))


def test_works_inside_jit_and_for_no_rows():
    x, weight, _ = Case(2, 64, "bfloat16", "fp8").inputs()
    inside = jax.jit(lambda x: jax.jit(lambda x: norm_quant(x, weight, eps=EPS, kind="fp8"))(x))(x)
    assert same_bits(inside, norm_quant(x, weight, eps=EPS, kind="fp8"))
    rows, summed = norm_quant(x[:0], weight, eps=EPS, kind="int8")
    assert (rows.values.shape, rows.scales.shape, summed.shape) == ((0, 64), (0,), (0, 64))


def test_seeded_faults_are_caught():
    case = Case(4, 256, "bfloat16", None)
    x, weight, residual = case.inputs()
    wanted = exact(case, x, weight, residual)

    def run(x=x, weight=weight, residual=residual, eps=EPS, kind=None):
        return error(numbers(norm_quant(x, weight, eps=eps, residual=residual, kind=kind)[0]), wanted)

    assert run() < tolerance(case)
    faults = {
        "no residual": run(residual=None),
        "another row's residual": run(residual=jnp.roll(residual, 1, axis=0)),
        "weight shifted": run(weight=jnp.roll(weight, 1)),
        "eps forgotten where rows are small": error(
            numbers(norm_quant(x * 2**-8, weight, eps=0.0)[0]),
            reference.normalize(np.asarray(x * 2**-8).astype(np.float64), EPS) * np.asarray(weight).astype(np.float64),
        ),
        "one value dropped": run(x=x.at[0, 7].set(0), residual=residual.at[0, 7].set(0)),
    }
    assert not missed(faults, tolerance(case))
    rows, _ = norm_quant(x, weight, eps=EPS, residual=residual, kind="int8")
    swapped = dequantize_rows(type(rows)(rows.values, rows.scales[::-1]))
    assert error(swapped, wanted) > 2 * tolerance(Case(4, 256, "bfloat16", "int8"))


def test_a_hopper_gpu_takes_the_kernel_for_what_it_supports(monkeypatch):
    from pallas_kernels.norm_quant import mosaic_sm90

    monkeypatch.setattr("pallas_kernels.backends.on_hopper", lambda: True)
    called = []
    monkeypatch.setattr(mosaic_sm90, "norm_quant", lambda *_, **options: called.append(options["kind"]))
    x = jnp.zeros((2, 256), jnp.bfloat16)
    for kind in (None, "int8", "fp8"):
        norm_quant(x, x[0], eps=EPS, kind=kind)
    assert called == [None, "int8", "fp8"]
    assert norm_quant(x.astype("float32"), x[0].astype("float32"), eps=EPS, kind="int8") is not None  # by xla
    assert called == [None, "int8", "fp8"]


def test_bad_arguments():
    x, weight = jnp.zeros((2, 256), jnp.bfloat16), jnp.zeros(256, jnp.bfloat16)
    for arguments, options, message in (
        ((x, None), {}, "neither a weight nor a kind"),
        ((x, weight), {"kind": "int4"}, "unknown kind of quantized rows 'int4'; kinds: int8, fp8"),
        ((x, weight[:8]), {}, r"weight has shape \(8,\), expected \[E\] with E=256"),
        ((x, weight), {"residual": x[:1]}, r"residual has shape \(1, 256\), expected \[T, E\] with T=2, E=256"),
        ((x, weight.astype("float32")), {}, "weight has dtype float32, expected bfloat16 as x has"),
        ((x[:, :0], weight[:0]), {}, r"x has shape \(2, 0\), expected \[T, E\] with E of at least 1"),
        ((x, weight), {"backend": "tpu"}, "unknown backend 'tpu'"),
    ):
        with pytest.raises(ValueError, match=message):
            norm_quant(*arguments, eps=EPS, **options)
    for arguments, message in (
        ((x.astype("float32"), weight.astype("float32")), "dtype float32 is not supported by backend mosaic"),
        (
            (x[:, :160], weight[:160]),
            "E=160 is not supported by backend mosaic, which does multiples of 64 from 128 to 16384",
        ),
        ((x[:0], weight), "T=0 is not supported by backend mosaic"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            norm_quant(*arguments, eps=EPS, backend="mosaic")
