"""Checks int8_matmul and fp8_matmul: reference and xla, which share all but the product."""

import dataclasses
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import backends
from pallas_kernels.fp8_matmul import fp8_matmul
from pallas_kernels.fp8_matmul.cases import CASES as FP8_CASES
from pallas_kernels.int8_matmul import int8_matmul
from pallas_kernels.int8_matmul.cases import CASES as INT8_CASES
from pallas_kernels.scaled_matmul import api, reference, xla
from pallas_kernels.scaled_matmul.cases import Case
from tests.kernels.helpers import TOLERANCE, error, missed, same_bits

CASES = (*INT8_CASES, *FP8_CASES)


def matmul_of(case: Case):
    return int8_matmul if case.operand == "int8" else fp8_matmul


def call(case: Case, x, w, x_scale, w_scale, bias, residual, **options):
    options = {"out_dtype": case.out_dtype} | options
    return matmul_of(case)(x, w, x_scale, w_scale, bias=bias, residual=residual, **options)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_the_formula(case):
    inputs = case.inputs()
    out, expected = call(case, *inputs), reference.scaled_matmul(*inputs)
    assert out.dtype == case.out_dtype
    assert error(out, expected) < TOLERANCE[case.out_dtype]
    assert same_bits(out, call(case, *inputs))


@pytest.mark.parametrize("case", INT8_CASES, ids=str)
def test_int8_sums_are_exact(case):
    x, w, *_ = case.inputs()
    assert np.array_equal(np.asarray(xla.product(x, w, jnp.float32)), reference.product(x, w))


def test_largest_codes_reach_the_result_whole():
    """Takes -128 * -128 * 11008, beyond float32's 2^24, and a float32 nevertheless; so is the doubled scale's
    product."""
    case = next(case for case in INT8_CASES if case.saturated)
    x, w, *_ = case.inputs()
    ones = [jnp.ones(size, jnp.float32) for size in (case.m, case.n)]
    out = int8_matmul(x, w, ones[0], 2 * ones[1], out_dtype="float32")
    assert np.array_equal(np.asarray(out), np.full((case.m, case.n), 2 * 128 * 128 * case.k, np.float32))


@pytest.mark.parametrize("case", [INT8_CASES[6], FP8_CASES[6], INT8_CASES[0], FP8_CASES[0]], ids=str)
def test_float64(case):
    with jax.enable_x64(True):
        inputs = dataclasses.replace(case, out_dtype="float64").inputs()
        inputs = [a if a is None or a.dtype != jnp.float32 else a.astype("float64") for a in inputs]
        out = call(case, *inputs, out_dtype="float64")
        assert out.dtype == jnp.float64
        assert error(out, reference.scaled_matmul(*inputs)) < TOLERANCE["float64"]


@pytest.mark.parametrize("case", [INT8_CASES[3], FP8_CASES[3]], ids=str)
def test_a_row_does_not_depend_on_its_company(case):
    x, w, x_scale, w_scale, bias, residual = case.inputs()
    whole = call(case, x, w, x_scale, w_scale, bias, residual)
    for rows in (slice(0, 1), slice(3, 20)):
        part = call(case, x[rows], w, x_scale[rows], w_scale, bias, residual[rows])
        if case.operand == "int8":
            assert same_bits(part, whole[rows])
        else:  # the order of sums is XLA's
            assert error(part, np.asarray(whole[rows])) < TOLERANCE["float32"]


def test_a_nan_code_stays_in_its_row():
    case = FP8_CASES[3]
    x, *rest = case.inputs()
    out, whole = (np.asarray(call(case, values, *rest)) for values in (x.at[2, 5].set(jnp.nan), x))
    assert np.isnan(out[2]).all()
    assert same_bits(np.delete(out, 2, axis=0), np.delete(whole, 2, axis=0))


@pytest.mark.parametrize("case", [INT8_CASES[3], FP8_CASES[3]], ids=str)
def test_seeded_faults_are_caught(case):
    x, w, x_scale, w_scale, bias, residual = inputs = case.inputs()
    expected = reference.scaled_matmul(*inputs)
    faults = {
        "no bias": call(case, x, w, x_scale, w_scale, None, residual),
        "bias of the next column": call(case, x, w, x_scale, w_scale, jnp.roll(bias, 1), residual),
        "no residual": call(case, x, w, x_scale, w_scale, bias, None),
        "residual of the next row": call(case, x, w, x_scale, w_scale, bias, jnp.roll(residual, 1, 0)),
        "scales of the next row": call(case, x, w, jnp.roll(x_scale, 1), w_scale, bias, residual),
        "scales of the next column": call(case, x, w, x_scale, jnp.roll(w_scale, 1), bias, residual),
        "a product less": call(case, x.at[:, 7].set(0), w, x_scale, w_scale, bias, residual),
        "rounded before the residual": call(case, x, w, x_scale, w_scale, bias, None, out_dtype="bfloat16").astype(
            "float32"
        )
        + residual,
    }
    assert not missed({name: error(out, expected) for name, out in faults.items()}, TOLERANCE["float32"])


def test_under_jit_and_in_another_dtype_than_its_addends():
    x, w, x_scale, w_scale, bias, residual = INT8_CASES[6].inputs()
    addends = {"bias": bias.astype("float32"), "residual": residual.astype("float16")}
    out = jax.jit(lambda *a: int8_matmul(*a, **addends))(x, w, x_scale, w_scale)
    expected = reference.scaled_matmul(x, w, x_scale, w_scale, *addends.values())
    assert out.dtype == jnp.bfloat16
    assert error(out, expected) < TOLERANCE["bfloat16"]


def test_the_kernel_is_chosen_unless_another_is_named(monkeypatch):
    """Chooses as on a Hopper GPU."""
    monkeypatch.setattr(backends, "on_hopper", lambda: True)
    for name, each in api.BACKENDS.items():
        monkeypatch.setitem(api.BACKENDS, name, replace(each, run=lambda *_, name=name: name))
    for m, operand, columns, backend, expected in (
        (1, "int8", 4096, None, "mosaic"),
        (1, "int8", 4096, "xla", "xla"),
        (600, "int8", 4096, None, "mosaic"),
        (1, "float8_e4m3fn", 4096, None, "mosaic"),
        (2, "int8", 4080, None, "xla"),  # no multiple of 32
    ):
        x, w = (jnp.zeros((rows, columns), operand) for rows in (m, 4096))
        matmul = int8_matmul if operand == "int8" else fp8_matmul
        assert matmul(x, w, jnp.ones(m), jnp.ones(4096), backend=backend) == expected


def test_no_rows():
    _, w, _, w_scale, bias, _ = INT8_CASES[1].inputs()
    assert int8_matmul(jnp.zeros((0, 128), jnp.int8), w, jnp.zeros(0), w_scale, bias=bias).shape == (0, 160)


def test_bad_arguments_say_what_is_wrong():
    x, w, x_scale, w_scale, bias, residual = INT8_CASES[6].inputs()
    scales = x_scale, w_scale
    call = partial(int8_matmul, x, w, *scales)
    mosaic = partial(int8_matmul, backend="mosaic")
    other = residual.astype("float16")
    for error_type, message, run in (
        (ValueError, r"w has shape \(224, 511\), expected \[N, K\]", lambda: int8_matmul(x, w[:, 1:], *scales)),
        (ValueError, "x has dtype int8, expected float8_e4m3fn", lambda: fp8_matmul(x, w, *scales)),
        (ValueError, r"x_scale has shape \(199,\)", lambda: int8_matmul(x, w, x_scale[1:], w_scale)),
        (ValueError, "scales are float32 and bfloat16", lambda: int8_matmul(x, w, x_scale, w_scale.astype("bfloat16"))),
        (ValueError, r"bias has shape \(1,\), expected \[N\]", lambda: call(bias=bias[:1])),
        (ValueError, "residual has dtype int8", lambda: call(residual=x)),
        (ValueError, "out_dtype is int32", lambda: call(out_dtype="int32")),
        (ValueError, "unknown backend 'cuda'", lambda: call(backend="cuda")),
        (ValueError, "K=131072 may overflow", lambda: int8_matmul(jnp.zeros((1, 131072), jnp.int8), w, *scales)),
        (NotImplementedError, "K=500 .* multiples of 32", lambda: mosaic(x[:, :500], w[:, :500], *scales)),
        (NotImplementedError, "a float16 residual", lambda: mosaic(x, w, *scales, residual=other)),
    ):  # fmt: skip
        with pytest.raises(error_type, match=message):
            run()
