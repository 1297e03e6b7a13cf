from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.matmul import matmul, reference
from pallas_kernels.matmul.cases import CASES, Case
from tests.kernels.helpers import TOLERANCE, missed, same_bits


def error(out, expected):
    """Returns the error of the whole result: single entries may be near zero."""
    return np.linalg.norm(np.asarray(out).astype(np.float64) - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_the_formula(case):
    x, w, added = case.inputs()
    out = matmul(x, w, **added, out_dtype=case.out_dtype)
    assert out.dtype == (case.out_dtype or case.dtype)
    assert out.shape == (*case.leading, case.n)
    # Accumulation and bias are in float32: a result kept in float32 is right to float32, from 16-bit inputs too.
    assert error(out, reference.matmul(x, w, **added)) < TOLERANCE[str(out.dtype)]
    assert same_bits(out, matmul(x, w, **added, out_dtype=case.out_dtype))


def test_float64():
    with jax.enable_x64(True):
        x, w, added = Case((7,), 33, 65, "float64", bias=True, residual=True).inputs()
        out = matmul(x, w, **added)
        assert out.dtype == jnp.float64
        assert error(out, reference.matmul(x, w, **added)) < TOLERANCE["float64"]


@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[3]], ids=str)
def test_gradients_are_products_too(case):
    x, w, _ = case.inputs()
    dy = jax.random.normal(jax.random.key(0), (*case.leading, case.n)).astype(case.dtype)
    dx, dw = jax.vjp(matmul, x, w)[1](dy)
    flat_x, flat_dy = (np.asarray(a).astype(np.float64).reshape(-1, a.shape[-1]) for a in (x, dy))
    assert error(dx.reshape(-1, case.k), flat_dy @ np.asarray(w).astype(np.float64)) < TOLERANCE[case.dtype]
    assert error(dw, flat_dy.T @ flat_x) < TOLERANCE[case.dtype]


def test_one_row_under_vmap_and_jit():
    x, w, _ = CASES[0].inputs()
    rows = jnp.concatenate([x, 2 * x, -x])
    out = jax.jit(jax.vmap(lambda row: matmul(row, w)))(rows)
    assert error(out, reference.matmul(rows, w)) < TOLERANCE["bfloat16"]


def test_seeded_faults_are_caught():
    case = CASES[2]
    x, w, added = case.inputs()
    bias, residual = added["bias"], added["residual"]
    expected = reference.matmul(x, w, **added)
    run = partial(matmul, x, w, out_dtype="float32")
    faults = {
        "no bias": run(residual=residual),
        "no residual": run(bias=bias),
        "bias of the next column": run(bias=jnp.roll(bias, 1), residual=residual),
        "residual of the next row": run(bias=bias, residual=jnp.roll(residual, 1, axis=0)),
        "a product less": matmul(x.at[:, 7].set(0), w, **added, out_dtype="float32"),
        "rounded before the bias": (matmul(x, w) + bias[None, :]).astype(jnp.float32) + residual,
    }
    assert not missed({name: error(out, expected) for name, out in faults.items()}, TOLERANCE["float32"])


def test_bad_arguments_say_what_is_wrong():
    x, w, added = CASES[2].inputs()
    bias, residual = added["bias"], jnp.zeros((5, 64), jnp.bfloat16)
    mosaic = partial(matmul, out_dtype="float32", backend="mosaic")
    f32, many = (x.astype(jnp.float32), w.astype(jnp.float32)), jnp.zeros((513, 2048), jnp.bfloat16)
    for error_type, message, call in (
        (ValueError, r"x has shape \(5, 2048\) and w \(64, 2047\)", lambda: matmul(x, w[:, 1:])),
        (ValueError, r"x has shape \(5, 2048\) and w \(2048,\)", lambda: matmul(x, w[0])),
        (ValueError, "w has dtype float32, expected bfloat16 as x has", lambda: matmul(x, w.astype(jnp.float32))),
        (ValueError, "x has dtype int32", lambda: matmul(x.astype(jnp.int32), w)),
        (ValueError, r"bias has shape \(63,\), expected \(64,\)", lambda: matmul(x, w, bias=bias[1:])),
        (ValueError, "bias has dtype int32", lambda: matmul(x, w, bias=bias.astype(jnp.int32))),
        (ValueError, "out_dtype is int32, expected one of bfloat16", lambda: matmul(x, w, out_dtype="int32")),
        (NotImplementedError, "a bfloat16 residual .* out_dtype, float32", lambda: mosaic(x, w, residual=residual)),
        (ValueError, "unknown backend 'pallas'", lambda: matmul(x, w, backend="pallas")),
        (ValueError, r"residual has shape \(5, 63\), expected \(5, 64\)", lambda: matmul(x, w, residual=x[:, :63])),
        (NotImplementedError, "no float32 matmul; supported: bfloat16", lambda: matmul(*f32, backend="mosaic")),
        (NotImplementedError, "x has 513 rows; .* at most 512", lambda: matmul(many, w, backend="mosaic")),
        (NotImplementedError, "multiples of 16", lambda: matmul(x, w[:63], backend="mosaic")),
    ):
        with pytest.raises(error_type, match=message):
            call()
