"""Checks matmuls of rows that are quantized on the way, by their operations one after the other, and what a kernel
takes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.bench.cases import normal
from pallas_kernels.formats.quantized_rows import KINDS
from pallas_kernels.formats.reference_rows import quantize_rows
from pallas_kernels.hopper.gemm_sm90 import gemv
from pallas_kernels.scaled_matmul import plain_rows, reference
from pallas_kernels.scaled_matmul.plain_rows import of_plain_rows, one_kernel
from pallas_kernels.silu_mul_quant import reference as silu_reference
from tests.kernels.helpers import error, same_bits
from tests.kernels.interpreter import INTERPRET

EPS = 1e-5


def inputs(m: int, n: int, k: int, kind: str = "int8", dtype: str = "float32"):
    """Returns x, w, w_scale and a norm: products are about 1."""
    rng = np.random.default_rng(m + n + k)
    codes = rng.integers(-127, 128, (n, k), np.int8) if kind == "int8" else normal(rng, (n, k), KINDS[kind]) * 0.5
    size = np.sqrt(np.mean(np.square(np.asarray(codes).astype(np.float64))))
    scale = rng.uniform(0.5, 1.5, n) / (size * k**0.5)
    return normal(rng, (m, k), dtype), jnp.asarray(codes), jnp.asarray(scale, "float32"), normal(rng, (k,), dtype)


def by_definition(x, w, scale, norm, gated: bool, **added) -> np.ndarray:
    """Computes in float64, of a norm that is not rounded."""
    rows = np.asarray(x).astype(np.float64)
    if norm is not None:
        rows = rows / np.sqrt(np.mean(rows**2, axis=-1, keepdims=True) + EPS) * np.asarray(norm).astype(np.float64)
    kind = "int8" if w.dtype == jnp.int8 else "fp8"
    codes = quantize_rows(rows.astype(x.dtype), kind)
    y = reference.scaled_matmul(codes.values, w, codes.scales, scale, added.get("bias"), added.get("residual"))
    return silu_reference.silu_mul(y) if gated else y


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("normed", "gated"), [(False, False), (True, False), (True, True)])
def test_is_one_operation_after_the_other(kind, normed, gated):
    x, w, scale, norm = inputs(5, 64, 96, kind)
    norm = norm if normed else None
    rng = np.random.default_rng(0)
    added = {} if gated else {"bias": normal(rng, (64,), "float32"), "residual": normal(rng, (5, 64), "float32")}
    out = of_plain_rows(x, w, scale, norm=norm, eps=EPS, gated=gated, **added)
    assert out.shape == (5, 32 if gated else 64)
    assert error(out, by_definition(x, w, scale, norm, gated, **added)) < (0.005 if normed else 1e-5)  # codes may flip
    assert of_plain_rows(x, w, scale, norm=norm, eps=EPS, gated=gated, out_dtype="bfloat16").dtype == jnp.bfloat16


def test_a_row_does_not_depend_on_its_company(monkeypatch):
    """Runs one row in one kernel, and more in others: here XLA's, which have its bits without a norm."""
    x, w, scale, _ = inputs(5, 64, 512, dtype="bfloat16")
    whole = of_plain_rows(x, w, scale)
    monkeypatch.setattr(gemv, "gemv", partial(gemv.gemv, interpret=INTERPRET))
    monkeypatch.setattr(plain_rows, "choose", lambda backends, *_: backends["mosaic"])
    for rows in (slice(0, 1), slice(4, 5)):
        assert same_bits(of_plain_rows(x[rows], w, scale), whole[rows])


def test_rows_without_a_norm_are_quantized_by_what_can(monkeypatch):
    """Names triton, which has no kernel that quantizes them, and has one for the matmul."""
    x, w, scale, norm = inputs(5, 64, 512, dtype="bfloat16")
    monkeypatch.setattr(plain_rows, "scaled_matmul", lambda *rows, backend, **_: (rows, backend))
    rows, backend = of_plain_rows(x, w, scale, backend="triton")
    assert same_bits(rows, of_plain_rows(x, w, scale)[0])
    assert backend == "triton"
    with pytest.raises(NotImplementedError, match="triton"):
        of_plain_rows(x, w, scale, norm=norm, backend="triton")


def test_what_one_kernel_takes():
    def takes(m=1, n=64, k=512, dtype="bfloat16", codes="int8", gated=False, backend="hopper", **more) -> bool:
        x, w = jax.ShapeDtypeStruct((m, k), dtype), jax.ShapeDtypeStruct((n, k), codes)
        return one_kernel(x, w, gated=gated, backend=backend, **more) is not None

    assert takes()
    assert takes(dtype="float16", backend="mosaic", out_dtype="float32")
    assert takes(n=128, gated=True)
    assert takes(k=16384)
    for one in (
        {"m": 2}, {"m": 0}, {"k": 480}, {"n": 36}, {"n": 72, "k": 16384}, {"dtype": "float32"},
        {"codes": "float8_e4m3fn"}, {"backend": "xla"}, {"backend": "triton"}, {"backend": None},
        {"backend": "deterministic"},
    ):  # fmt: skip
        assert not takes(**one), one


def test_deterministic_takes_it_on_hopper(monkeypatch):
    x, w = jax.ShapeDtypeStruct((1, 512), "bfloat16"), jax.ShapeDtypeStruct((64, 512), "int8")
    chosen = plain_rows.BACKENDS["deterministic"]
    monkeypatch.setattr(plain_rows, "choose", lambda *_: chosen)
    assert one_kernel(x, w, gated=False, backend="deterministic") is None
    monkeypatch.setattr(plain_rows, "on_hopper", lambda: True)
    assert one_kernel(x, w, gated=False, backend="deterministic") is not None


def test_bad_arguments_say_what_is_wrong():
    x, w, scale, norm = inputs(2, 64, 96)
    for message, run in (
        ("w has dtype int32, expected int8", lambda: of_plain_rows(x, w.astype("int32"), scale)),
        (r"w_scale has shape \(63,\)", lambda: of_plain_rows(x, w, scale[1:])),
        ("x has dtype int8", lambda: of_plain_rows(x.astype("int8"), w, scale)),
        (r"norm is float32\[95\], expected float32\[96\]", lambda: of_plain_rows(x, w, scale, norm=norm[1:])),
        (r"gated product with w of \(63, 96\)", lambda: of_plain_rows(x, w[1:], scale[1:], gated=True)),
        ("neither bias nor residual", lambda: of_plain_rows(x, w, scale, gated=True, bias=scale)),
    ):
        with pytest.raises(ValueError, match=message):
            run()
