"""Checks int8_matmul of rows with a scale for each group of columns, which plain jnp runs on every device."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import backends
from pallas_kernels.formats.quantized_rows import QuantizedRows, dequantize_rows
from pallas_kernels.fp8_matmul import fp8_matmul
from pallas_kernels.int8_matmul import int8_matmul
from pallas_kernels.scaled_matmul import reference
from tests.kernels.helpers import TOLERANCE, error, missed, same_bits


@dataclass(frozen=True)
class Product:
    """Describes one matmul of int8 rows by groups."""

    m: int
    n: int
    k: int
    group: int
    out_dtype: str

    def inputs(self) -> tuple[tuple[jax.Array, jax.Array], dict[str, jax.Array]]:
        rng = np.random.default_rng(self.k)

        def scales(*shape: int) -> np.ndarray:
            return rng.uniform(0.5, 1.5, shape).astype(np.float32)

        x, w = (jnp.asarray(rng.integers(-127, 128, (rows, self.k), np.int8)) for rows in (self.m, self.n))
        options = {
            "x_scale": scales(self.m, self.k // self.group),
            "w_scale": scales(self.n) / np.float32(5000 * self.k**0.5),
            "bias": rng.standard_normal(self.n).astype(np.float32),
            "residual": rng.standard_normal((self.m, self.n)).astype(jnp.dtype(self.out_dtype)),
        }
        return (x, w), {name: jnp.asarray(array) for name, array in options.items()}

    def formula(self, arguments, options) -> np.ndarray:
        return reference.scaled_matmul(*arguments, **options)


CASES = [
    Product(1, 96, 128, 32, "float32"), Product(5, 64, 256, 128, "bfloat16"), Product(70, 40, 176, 88, "float16"),
    Product(3, 32, 96, 96, "float32"),
]  # fmt: skip


@pytest.mark.parametrize("backend", ["xla", "deterministic"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_products_match_the_formula(case, backend):
    arguments, options = case.inputs()
    out = int8_matmul(*arguments, **options, out_dtype=case.out_dtype, backend=backend)
    assert error(out, case.formula(arguments, options)) < TOLERANCE[case.out_dtype]


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


def test_a_hopper_gpu_takes_xla_unless_a_kernel_is_named(monkeypatch):
    monkeypatch.setattr(backends, "on_hopper", lambda: True)
    (x, w), options = CASES[1].inputs()
    run = partial(int8_matmul, x, w, **options)
    for backend in (None, "hopper", "ampere"):
        assert same_bits(run(backend=backend), run(backend="xla"))
    for backend in ("mosaic", "triton"):
        with pytest.raises(NotImplementedError, match=f"no {backend} kernel yet; backends: xla, deterministic"):
            run(backend=backend)


def test_bad_arguments_say_what_is_wrong():
    (x, w), options = CASES[0].inputs()
    five = jnp.ones((1, 5), jnp.float32)
    narrow = x.astype("float8_e4m3fn"), w.astype("float8_e4m3fn")
    for message, run in (
        (r"x_scale has shape \(1, 5\), expected \[M\], or", lambda: int8_matmul(x, w, five, options["w_scale"])),
        (r"x_scale has shape \(2, 4\)", lambda: int8_matmul(x, w, jnp.ones((2, 4)), options["w_scale"])),
        ("or of int8", lambda: fp8_matmul(*narrow, options["x_scale"], options["w_scale"])),
    ):
        with pytest.raises(ValueError, match=message):
            run()


def test_numbers_are_those_that_codes_stand_for():
    (x, w), options = CASES[1].inputs()
    numbers = np.asarray(dequantize_rows(QuantizedRows(x, options["x_scale"]))).astype(np.float64)
    y = numbers @ np.asarray(w).astype(np.float64).T * np.asarray(options["w_scale"]).astype(np.float64)
    plain = {name: options[name] for name in ("x_scale", "w_scale")}
    assert error(int8_matmul(x, w, **plain, out_dtype="float32"), y) < TOLERANCE["float32"]
