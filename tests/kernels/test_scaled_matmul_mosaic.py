"""Checks int8_matmul and fp8_matmul on the Hopper kernels: all configurations lowered for CUDA, and run on a GPU."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.int8_matmul import int8_matmul
from pallas_kernels.int8_matmul.cases import BENCH_CASES
from pallas_kernels.scaled_matmul import reference
from pallas_kernels.scaled_matmul.cases import Case
from pallas_kernels.scaled_matmul.config import TILES, choose_config, is_skinny
from tests.kernels.helpers import TOLERANCE, error, same_bits
from tests.kernels.test_gemm_tall import FP8_TOLERANCE
from tests.kernels.test_scaled_matmul import CASES, FP8_CASES, INT8_CASES, call, matmul_of

LAYERS = 32


def shapes(case: Case, **options):
    """Returns the types of the case's inputs: operands and scales, and the addends by name."""
    shape = jax.ShapeDtypeStruct
    x, w = (shape((rows, case.k), case.operand) for rows in (case.m, case.n))
    x_scale, w_scale = (shape((rows,), "float32") for rows in (case.m, case.n))
    addends = {"bias": shape((case.n,), case.out_dtype)} if case.bias else {}
    addends |= {"residual": shape((case.m, case.n), case.out_dtype)} if case.residual else {}
    return (x, w, x_scale, w_scale), addends


def lower(case: Case) -> str:
    arguments, addends = shapes(case)
    run = jax.jit(partial(matmul_of(case), out_dtype=case.out_dtype, backend="mosaic"))
    return run.trace(*arguments, **addends).lower(lowering_platforms=("cuda",)).as_text()


def custom_calls(text: str) -> int:
    return text.count("stablehlo.custom_call @mosaic_gpu")


def test_every_configuration_lowers_for_cuda():
    """Lowers one operand's, as both share them."""
    bench = {choose_config(case.m, case.n, case.k): case for case in BENCH_CASES}
    tiles = {(config.tile_m, config.tile_n) for config in TILES}  # lowered in test_gemm_tall.py
    rare = [case for config, case in bench.items() if is_skinny(config) or (config.tile_m, config.tile_n) not in tiles]
    for case in (*INT8_CASES[::3], *FP8_CASES[1::3], *rare):
        assert custom_calls(lower(case)) == 1


def layers(x, ws, x_scale, w_scale, residual):
    """Calls an inner jit once a layer, whose result is the next layer's residual."""

    @jax.jit
    def layer(w, residual):
        return int8_matmul(x, w, x_scale, w_scale, residual=residual, backend="mosaic")

    for w in ws:
        residual = layer(w, residual)
    return residual


def test_layers_share_one_lowering():
    (x, w, *scales), addends = shapes(INT8_CASES[-1])
    text = jax.jit(layers).trace(x, [w] * LAYERS, *scales, addends["residual"])
    assert custom_calls(text.lower(lowering_platforms=("cuda",)).as_text()) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gpu_matches_the_formula(case):
    inputs = case.inputs()
    out = call(case, *inputs, backend="mosaic")
    assert out.dtype == case.out_dtype
    tolerance = TOLERANCE[case.out_dtype] if case.operand == "int8" else FP8_TOLERANCE + TOLERANCE[case.out_dtype]
    assert error(out, reference.scaled_matmul(*inputs)) < tolerance
    assert same_bits(out, call(case, *inputs, backend="mosaic"))


@pytest.mark.gpu
@pytest.mark.parametrize("case", INT8_CASES, ids=str)
def test_gpu_int8_sums_are_exact(case):
    """Scales by powers of two, float32 out: the bits of the sums, rounded as float32 is."""
    x, w, *_ = case.inputs()
    scales = jnp.full(case.m, 2.0**-20, jnp.float32), jnp.ones(case.n, jnp.float32)
    out = int8_matmul(x, w, *scales, out_dtype="float32", backend="mosaic")
    expected = reference.product(x, w)
    assert np.array_equal(np.asarray(out), (expected * 2.0**-20).astype(np.float32))


@pytest.mark.gpu
def test_gpu_layers_in_an_inner_jit():
    x, _, x_scale, w_scale, _, residual = INT8_CASES[-1].inputs()
    ws = [INT8_CASES[-1].inputs(seed)[1] for seed in range(4)] * (LAYERS // 4)
    out = jax.jit(layers)(x, ws, x_scale, w_scale, residual)
    for w in ws:
        residual = int8_matmul(x, w, x_scale, w_scale, residual=residual, backend="mosaic")
    assert same_bits(out, residual)
