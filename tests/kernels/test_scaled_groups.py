"""int8_matmul of rows with a scale for each group of columns, and gate, up and SiLU that make such rows: by plain jnp,
and which kernel takes them."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import backends
from pallas_kernels.fp8_matmul import fp8_matmul
from pallas_kernels.int8_matmul import int8_matmul
from pallas_kernels.quantized_rows import QuantizedRows, dequantize_rows
from pallas_kernels.scaled_matmul import api, gated, reference
from pallas_kernels.scaled_matmul.gated import scaled_swiglu
from tests.kernels.helpers import TOLERANCE, error, missed, same_bits
from tests.kernels.test_gemm_grouped import Gated, Product, far, grouped_config

CASES = [
    Product(m, n, k, group, grouped_config(m, n, k), dtype)
    for m, n, k, group, dtype in (
        (1, 96, 128, 32, "float32"), (5, 64, 256, 128, "bfloat16"), (70, 40, 176, 88, "float16"),
        (3, 32, 96, 96, "float32"),
    )
]  # fmt: skip
ROWS = [Gated(1, 128, 96, 128), Gated(5, 64, 256, 32), Gated(70, 176, 128, 88, dtype="float32")]


def rows_of(case: Gated) -> tuple[QuantizedRows, jax.Array, jax.Array]:
    x, w, x_scale, w_scale = case.inputs()
    return QuantizedRows(x, x_scale), w, w_scale


@pytest.mark.parametrize("backend", ["xla", "deterministic"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_products_match_the_formula(case, backend):
    arguments, options = case.inputs()
    out = int8_matmul(*arguments, **options, out_dtype=case.out_dtype, backend=backend)
    assert error(out, case.formula(arguments, options)) < TOLERANCE[case.out_dtype]


@pytest.mark.parametrize("case", ROWS, ids=str)
def test_codes_match_the_formula(case):
    rows, w, w_scale = rows_of(case)
    found = scaled_swiglu(rows, w, w_scale, group=case.group, dtype=jnp.dtype(case.dtype))
    assert far(found, case.by_definition(rows.values, w, rows.scales, w_scale)) < 3e-3


def test_float64():
    with jax.enable_x64(True):
        arguments, options = CASES[1].inputs()
        options = {name: array.astype("float64") for name, array in options.items()}
        out = int8_matmul(*arguments, **options, out_dtype="float64")
        assert error(out, CASES[1].formula(arguments, options)) < TOLERANCE["float64"]


def test_a_row_does_not_depend_on_its_company():
    (x, w), options = CASES[2].inputs()
    run = partial(int8_matmul, out_dtype="float32", backend="deterministic")
    out = run(x, w, **options)
    some = options | {name: options[name][3:5] for name in ("x_scale", "residual")}
    assert same_bits(run(x[3:5], w, **some), out[3:5])


def test_seeded_faults_are_caught():
    (x, w), options = CASES[0].inputs()
    expected = reference.scaled_matmul(x, w, **options)

    def run(**changed) -> float:
        return error(int8_matmul(x, w, **options | changed, out_dtype="float32"), expected)

    scale = options["x_scale"]
    faults = {
        "scales of the next group": run(x_scale=jnp.roll(scale, 1, axis=1)),
        "the first group's for all": run(x_scale=jnp.broadcast_to(scale[:, :1], scale.shape)),
        "a scale a row": run(x_scale=scale.mean(axis=1)),
        "a group less": run(x_scale=scale.at[:, -1].set(0)),
    }
    assert not missed(faults, TOLERANCE["float32"])


def test_hopper_runs_the_kernels(monkeypatch):
    monkeypatch.setattr(backends, "on_hopper", lambda: True)
    for registry in (api.GROUPED, gated.BACKENDS):
        for name, each in registry.items():
            monkeypatch.setitem(registry, name, replace(each, run=lambda *_, name=name: name))
    (x, w), options = CASES[1].inputs()
    of_rows = rows_of(ROWS[1])
    for backend, expected in ((None, "mosaic"), ("hopper", "mosaic"), ("mosaic", "mosaic"), ("xla", "xla")):
        assert int8_matmul(x, w, **options, backend=backend) == expected
        assert scaled_swiglu(*of_rows, group=32, dtype=jnp.dtype("bfloat16"), backend=backend) == expected
    with pytest.raises(NotImplementedError, match="no triton kernel yet; backends: mosaic, xla, deterministic"):
        int8_matmul(x, w, **options, backend="triton")
    with pytest.raises(NotImplementedError, match="a scale for 96 columns is not supported.* does 32, 64, 128"):
        int8_matmul(*CASES[3].inputs()[0], **CASES[3].inputs()[1], out_dtype="float32", backend="mosaic")
    with pytest.raises(
        NotImplementedError, match="float32 is not supported by backend mosaic, which does bfloat16 and"
    ):
        scaled_swiglu(*of_rows, group=32, dtype=jnp.dtype("float32"), backend="mosaic")


def test_bad_arguments_say_what_is_wrong():
    (x, w), options = CASES[0].inputs()
    rows, up, scale = rows_of(ROWS[1])
    swiglu = partial(scaled_swiglu, dtype=jnp.dtype("bfloat16"))
    five, wrong = jnp.ones((1, 5), jnp.float32), QuantizedRows(rows.values.astype("bfloat16"), rows.scales)
    narrow = x.astype("float8_e4m3fn"), w.astype("float8_e4m3fn")
    for message, run in (
        (r"x_scale has shape \(1, 5\), expected \[M\], or", lambda: int8_matmul(x, w, five, options["w_scale"])),
        (r"x_scale has shape \(2, 4\)", lambda: int8_matmul(x, w, jnp.ones((2, 4)), options["w_scale"])),
        ("or of int8", lambda: fp8_matmul(*narrow, options["x_scale"], scale[:96])),
        (r"w has shape \(128, 256\), expected two halves .* of 24", lambda: swiglu(rows, up, scale, group=24)),
        ("rows are bfloat16", lambda: swiglu(wrong, up, scale, group=32)),
        (r"w_scale has shape \(127,\)", lambda: swiglu(rows, up, scale[1:], group=32)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            run()


def test_numbers_are_those_that_codes_stand_for():
    (x, w), options = CASES[1].inputs()
    numbers = np.asarray(dequantize_rows(QuantizedRows(x, options["x_scale"]))).astype(np.float64)
    y = numbers @ np.asarray(w).astype(np.float64).T * np.asarray(options["w_scale"]).astype(np.float64)
    plain = {name: options[name] for name in ("x_scale", "w_scale")}
    assert error(int8_matmul(x, w, **plain, out_dtype="float32"), y) < TOLERANCE["float32"]
