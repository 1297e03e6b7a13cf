"""Checks fp8_matmul with a scale a block of 128 columns: xla against the formula, the Hopper kernels interpreted with
race detection, lowered for CUDA, and all of them run on a GPU."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.fp8_matmul import fp8_matmul
from pallas_kernels.hopper.gemm_sm90 import skinny, skinny_config, tall, tall_config
from pallas_kernels.hopper.hopper import SHARED_MEMORY
from pallas_kernels.hopper.smem_sm90 import shared_bytes
from pallas_kernels.scaled_matmul import reference
from pallas_kernels.scaled_matmul.cases import BENCH_SHAPES, BLOCKS, E4M3, Case
from pallas_kernels.scaled_matmul.config import choose_blocks, is_skinny
from tests.kernels.helpers import TOLERANCE, error, missed, same_bits
from tests.kernels.interpreter import FIND_RACES

# Hopper's tensor cores add the products of a block with some 14 bits.
BLOCK_TOLERANCE = 1e-3
blocks = partial(Case, operand=E4M3, in_blocks=True)
RAGGED = (blocks(3, 40, 300, out_dtype="float32"), blocks(20, 33, 50, bias=True), blocks(2, 130, 1000, residual=True))


def call(case: Case, x, w, x_scale, w_scale, bias, residual, **options) -> jax.Array:
    added = {"bias": bias, "residual": residual, "out_dtype": case.out_dtype}
    return fp8_matmul(x, w, x_scale, w_scale, **added | options)


@pytest.mark.parametrize("case", [*BLOCKS, *RAGGED], ids=str)
def test_matches_the_formula(case):
    inputs = case.inputs()
    expected = reference.scaled_matmul(*inputs)
    for backend in (None, "deterministic"):
        assert error(call(case, *inputs, backend=backend), expected) < TOLERANCE[case.out_dtype]


def test_float64():
    with jax.enable_x64(True):
        inputs = RAGGED[0].inputs()
        inputs = [a if a is None or a.dtype != jnp.float32 else a.astype("float64") for a in inputs]
        out = call(RAGGED[0], *inputs, out_dtype="float64")
        assert error(out, reference.scaled_matmul(*inputs)) < TOLERANCE["float64"]


def test_scales_that_do_not_fit_are_named():
    x, w, x_scale, w_scale, *_ = RAGGED[0].inputs()
    for scales in ((x_scale[:, 0], w_scale), (x_scale[:, :2], w_scale[:2])):
        with pytest.raises(ValueError, match="scales? .*expected .*G"):
            fp8_matmul(x, w, *scales)
    with pytest.raises(NotImplementedError, match="K=300 is not supported by backend mosaic, .* multiples of 128"):
        fp8_matmul(x.repeat(32, 0), w[:32], x_scale.repeat(32, 0), w_scale[:, :32], backend="mosaic")


INTERPRETED = (  # tails of rows and columns, two tiles a CTA, two blocks a stage
    (blocks(5, 96, 512, bias=True, residual=True), skinny_config.Config(64, 64, 256, 2, ctas=1)),
    (blocks(70, 160, 384, out_dtype="float32"), skinny_config.Config(128, 64, 128, 2, ctas=2)),
    (blocks(130, 96, 384, bias=True, residual=True, out_dtype="float32"), tall_config.Config(128, 64, 2, ctas=2)),
    (blocks(140, 64, 256, zero_rows=True), tall_config.Config(256, 64, 2, ctas=1)),
)


def run(case: Case, config, inputs, **options) -> jax.Array:
    gemm = skinny.gemm if is_skinny(config) else tall.gemm
    added = dict(zip(("x_scale", "w_scale", "bias", "residual"), inputs[2:], strict=True))
    added["bias"] = None if added["bias"] is None else added["bias"].astype(jnp.float32)
    return gemm(*inputs[:2], **added, out_dtype=jnp.dtype(case.out_dtype), config=config, **options)


def with_poisoned_ends(case: Case, inputs) -> list:
    """Returns the inputs with a row of NaN after x's, and NaN in the last columns of w and of its scales, which hold no
    row of the weight."""
    x, w, x_scale, w_scale, bias, residual = inputs
    nan = jnp.full((1, case.k), jnp.nan, x.dtype)
    x, x_scale = jnp.concatenate([x, nan]), jnp.concatenate([x_scale, jnp.full_like(x_scale[:1], jnp.nan)])
    w, w_scale = w.at[-20:].set(nan), w_scale.at[:, -20:].set(jnp.nan)
    return [x, w, x_scale, w_scale, bias, None if residual is None else jnp.pad(residual, ((0, 1), (0, 0)))]


@pytest.mark.parametrize(("case", "config"), INTERPRETED, ids=str)
def test_kernels_match_the_formula_without_races_and_keep_nan_at_the_edges(case, config):
    inputs = case.inputs()
    out = jax.block_until_ready(run(case, config, with_poisoned_ends(case, inputs), interpret=FIND_RACES))
    assert error(out[:-1, :-20], reference.scaled_matmul(*inputs)[:, :-20]) < TOLERANCE[case.out_dtype]
    assert np.isnan(np.asarray(out[-1].astype("float32"))).all()


def test_seeded_faults_are_caught():
    case = INTERPRETED[2][0]
    x, w, x_scale, w_scale, *added = inputs = case.inputs()
    expected = reference.scaled_matmul(*inputs)

    def wrong(of_rows=x_scale, of_columns=w_scale) -> float:
        return error(call(case, x, w, of_rows, of_columns, *added), expected)

    faults = {
        "scales of the next group": wrong(of_rows=jnp.roll(x_scale, 1, axis=1)),
        "scales of the next row": wrong(of_rows=jnp.roll(x_scale, 1, axis=0)),
        "scales of the block below": wrong(of_columns=jnp.roll(w_scale, 1, axis=0)),
        "scales of the block beside": wrong(of_columns=jnp.roll(w_scale, 1, axis=1)),
        "a block less": wrong(of_columns=w_scale.at[-1].set(0)),
    }
    assert not missed(faults, TOLERANCE["float32"])


def test_the_chosen_configurations_fit_and_lower_for_cuda():
    shape, lowered = jax.ShapeDtypeStruct, set()
    for m in (1, 64, 200, 4096):
        for k, n in BENCH_SHAPES:
            config = choose_blocks(m, n, k)
            out, dtype = jnp.dtype("bfloat16"), jnp.dtype(E4M3)
            if is_skinny(config):
                extra = {"x_scale": jnp.dtype("float32"), "w_scale": jnp.dtype("float32"), "residual": out}
                plan = skinny.Plan(m, n, k, dtype, out, extra, config, in_blocks=True)
            else:
                names = ("x_scale", "w_scale", "bias", "residual")
                plan = tall.Plan(m, n, k, dtype, out, names, config, in_blocks=True)
            assert shared_bytes(plan.scratch()) <= SHARED_MEMORY
            if config in lowered:
                continue
            lowered.add(config)
            scales = shape((m, k // 128), "float32"), shape((k // 128, n), "float32")
            traced = jax.jit(partial(fp8_matmul, backend="mosaic")).trace(
                shape((m, k), E4M3), shape((n, k), E4M3), *scales
            )
            assert traced.lower(lowering_platforms=("cuda",)).as_text().count("stablehlo.custom_call @mosaic_gpu") == 1


@pytest.mark.gpu
@pytest.mark.parametrize("case", BLOCKS, ids=str)
@pytest.mark.parametrize("backend", ["mosaic", "triton"])
def test_gpu_matches_the_formula(backend, case):
    inputs = case.inputs()
    out = call(case, *inputs, backend=backend)
    assert error(out, reference.scaled_matmul(*inputs)) < BLOCK_TOLERANCE + TOLERANCE[case.out_dtype]
    assert same_bits(out, call(case, *inputs, backend=backend))
    poisoned = call(case, *with_poisoned_ends(case, inputs), backend=backend)
    assert same_bits(poisoned[:-1, :-20], out[:, :-20])
