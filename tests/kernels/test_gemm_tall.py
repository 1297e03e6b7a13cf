"""Checks the Hopper matmul for many rows: interpreted on the CPU with race detection, lowered for CUDA, run on a
GPU."""

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.hopper.gemm_sm90 import tall
from pallas_kernels.hopper.gemm_sm90.tall_config import Config
from pallas_kernels.hopper.hopper import SHARED_MEMORY
from pallas_kernels.hopper.smem_sm90 import shared_bytes
from pallas_kernels.scaled_matmul import reference
from pallas_kernels.scaled_matmul.cases import Case
from pallas_kernels.scaled_matmul.config import TILES, choose_config
from tests.kernels.helpers import TOLERANCE, error, same_bits
from tests.kernels.interpreter import FIND_RACES, INTERPRET

# Hopper's tensor cores add float8 products with some 14 bits, over up to 11008 of them.
FP8_TOLERANCE = 4e-3


def run(case: Case, config: Config, inputs, **options) -> jax.Array:
    x, w, x_scale, w_scale, bias, residual = inputs
    bias = None if bias is None else bias.astype(jnp.float32)
    extra = {"x_scale": x_scale, "w_scale": w_scale, "bias": bias, "residual": residual}
    return tall.gemm(x, w, **extra, out_dtype=jnp.dtype(case.out_dtype), config=config, **options)


def interpreted(case: Case, config: Config, inputs) -> jax.Array:
    """Runs the kernel under the GPU interpreter; a race fails."""
    return jax.block_until_ready(run(case, config, inputs, interpret=FIND_RACES))


def case_of(m: int, n: int, k: int, operand: str = "int8", **options) -> Case:
    return Case(m, n, k, operand, **options)


INTERPRETED = [
    (case_of(200, 160, 96, bias=True), Config(128, 128, 2, ctas=2)),  # tails of all three axes, two tiles a CTA
    (case_of(5, 96, 160, residual=True, out_dtype="float16"), Config(128, 96, 2, ctas=2)),
    (case_of(300, 96, 160, "float8_e4m3fn", residual=True, out_dtype="float32"), Config(256, 96, 2, ctas=1)),
    (case_of(130, 192, 128, "float8_e4m3fn", out_dtype="float32", bias=True), Config(128, 64, 3, ctas=2)),
    (case_of(256, 128, 256, zero_rows=True, residual=True, bias=True), Config(128, 64, 3, group=1, ctas=2)),
    (case_of(136, 96, 640), Config(128, 96, 2, ctas=1)),
    (case_of(104, 96, 160, residual=True, bias=True), Config(128, 96, 2, ctas=1)),  # fewer rows than a tile
    (case_of(72, 64, 128, "float8_e4m3fn"), Config(256, 64, 2, ctas=1)),  # copies of whole rows
    (case_of(136, 96, 96, residual=True), Config(256, 96, 2, ctas=1)),  # whose last chunks lie past the end
]


@pytest.mark.parametrize(("case", "config"), INTERPRETED, ids=str)
def test_matches_the_formula_without_races(case, config):
    inputs = case.inputs()
    out = interpreted(case, config, inputs)
    assert out.dtype == case.out_dtype
    assert error(out, reference.scaled_matmul(*inputs)) < TOLERANCE[case.out_dtype]


def test_rows_are_padded_only_to_eight():
    for m, n, tile_m, padded in ((104, 96, 128, 104), (136, 22016, 256, 136), (100, 96, 256, 104), (1, 96, 128, 64)):
        plan = tall.Plan(m, n, 4096, jnp.dtype("int8"), jnp.dtype("bfloat16"), (), Config(tile_m, 64))
        assert plan.padded_rows == padded


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_takes_16_bits_without_scales(dtype):
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.standard_normal(shape).astype(jnp.dtype(dtype))) for shape in ((128, 96), (64, 96)))
    options = {"out_dtype": jnp.dtype("float32"), "config": Config(128, 64, 2, ctas=1)}
    out = tall.gemm(x, w, **options, interpret=INTERPRET)
    assert error(out, reference.product(x, w)) < TOLERANCE["float32"]


def test_int8_sums_are_exact():
    """Compares without scales, in float32: up to 2^24, so what is seen are the sums themselves."""
    case = case_of(136, 64, 512, saturated=True)
    x, w, *_ = case.inputs()
    x = x.at[:, ::3].set(127)
    options = {"out_dtype": jnp.dtype("float32"), "config": Config(128, 64, 2, ctas=2)}
    out = tall.gemm(x, w, **options, interpret=INTERPRET)
    assert np.array_equal(np.asarray(out), reference.product(x, w))


def test_a_row_has_the_same_bits_in_any_company_and_again():
    case, config = case_of(144, 64, 256, "float8_e4m3fn", residual=True, out_dtype="float32"), Config(128, 64, 2)
    x, w, x_scale, w_scale, bias, residual = inputs = case.inputs()
    out = interpreted(case, config, inputs)
    assert same_bits(out, interpreted(case, config, inputs))
    few = x[:70], w, x_scale[:70], w_scale, bias, residual[:70]
    assert same_bits(out[:70], interpreted(case, config, few))


@pytest.mark.parametrize(
    ("target", "name", "change"),
    [
        (tall.Plan, "steps", lambda real: property(lambda plan: real.fget(plan) - 1)),
        (tall.Plan, "chunks", lambda real: property(lambda plan: real.fget(plan)[::-1][:-1])),
        (tall, "load_residual", lambda real: lambda plan, refs, at, c: real(plan, refs, at._replace(row=64), c)),
        (tall.Place, "chunk", lambda real: lambda place, *rest: real(place._replace(column=place.column ^ 64), *rest)),
    ],
    ids=("a step less", "a chunk not stored", "another residual", "tiles exchanged"),
)
def test_seeded_faults_are_caught(monkeypatch, target, name, change):
    case, config = case_of(128, 128, 256, residual=True, out_dtype="float32"), Config(128, 64, 2, ctas=2)
    inputs = case.inputs()
    monkeypatch.setattr(target, name, change(getattr(target, name)))
    monkeypatch.setattr(tall, "gemm", tall.gemm.__wrapped__)  # past the cache of the jit
    out = run(case, config, inputs, interpret=INTERPRET)
    assert not error(out, reference.scaled_matmul(*inputs)) < 2 * TOLERANCE["float32"]


CONFIGS = (*TILES, Config(256, 176))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_tile_lowers_for_cuda(config):
    shape = jax.ShapeDtypeStruct
    types = shape((300, 640), "int8"), shape((416, 640), "int8"), shape((416,), "float32"), shape((300, 416), "float32")

    def gemm(x, w, bias, residual):
        return tall.gemm(x, w, bias=bias, residual=residual, out_dtype=jnp.dtype("float32"), config=config)

    text = jax.jit(gemm).trace(*types).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 1


def test_the_chosen_configurations_fit():
    """Tries all that can be added, or nothing; shapes that were never timed, too."""
    every = "x_scale", "w_scale", "bias", "residual"
    for m, n, k in product((65, 128, 512, 1024, 4096), (32, 96, 4096, 22016, 28672), (32, 160, 4096, 11008)):
        config = choose_config(m, n, k)
        for out, optional in product(("bfloat16", "float32"), ((), every)):
            plan = tall.Plan(m, n, k, jnp.dtype("int8"), jnp.dtype(out), optional, config)
            assert shared_bytes(plan.scratch()) <= SHARED_MEMORY


@pytest.mark.gpu
@pytest.mark.parametrize("operand", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_gpu_every_tile_matches_the_formula(config, operand):
    case = case_of(300, 416, 640, operand, bias=True, residual=True, out_dtype="float32")
    inputs = case.inputs()
    out = run(case, config, inputs)
    tolerance = TOLERANCE["float32"] if operand == "int8" else FP8_TOLERANCE
    assert error(out, reference.scaled_matmul(*inputs)) < tolerance
    assert same_bits(out, run(case, config, inputs))


def test_configurations_are_checked():
    for options, message in (
        ({"tile_m": 64}, "tile_m is 64, expected 128 or 256"),
        ({"tile_n": 100}, "tile_n is 100, expected a multiple of 16 up to 256"),
        ({"tile_m": 256, "tile_n": 256}, "a tile of 256x256 is more than registers hold"),
        ({"stages": 1}, "stages=1, ctas=132 and group=8, expected at least 2, 1 and 1"),
    ):
        with pytest.raises(ValueError, match=message):
            Config(**options)
    x, w = (jnp.zeros((256, 256), jnp.bfloat16) for _ in range(2))
    as_many_as_fit = Config(128, 128, stages=99)
    gemm = partial(tall.gemm, out_dtype=jnp.dtype("bfloat16"), config=as_many_as_fit)
    assert jax.eval_shape(gemm, x, w).shape == (256, 256)
