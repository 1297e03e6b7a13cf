"""Checks the Mosaic GPU kernel: interpreted on the CPU with race detection, lowered for CUDA, and run on a GPU."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.formats.quantized_rows import dequantize_rows, quantize_rows
from pallas_kernels.hopper import row_pieces_sm90
from pallas_kernels.silu_mul_quant import mosaic_sm90, reference, silu_mul_quant, xla
from pallas_kernels.silu_mul_quant.cases import BENCH_CASES, CASES, Case
from pallas_kernels.silu_mul_quant.config import Config, choose_config
from tests.kernels.helpers import error, same_bits
from tests.kernels.interpreter import FIND_RACES, INTERPRET
from tests.kernels.row_helpers import units_apart
from tests.kernels.test_silu_mul_quant import numbers, tolerance

SUPPORTED = [case for case in CASES if case.dtype != "float32"]
INTERPRETED = [  # parts of vectors of fewer lanes and warps, one and more full pieces
    (Case(3, 128, "bfloat16", None), Config()),
    (Case(1, 3456, "bfloat16", None), Config()),
    (Case(2, 1408, "bfloat16", "int8"), Config()),
    (Case(2, 2048, "float16", "fp8"), Config()),
    (Case(1, 3200, "bfloat16", "int8"), Config()),
    (Case(1, 2560, "bfloat16", "fp8"), Config(warpgroups=2)),
    (Case(1, 2816, "bfloat16", "int8"), Config(warpgroups=2)),
    (Case(1, 1408, "float16", "int8"), Config(warpgroups=8)),
]
FEW = {"bfloat16": 1e-3, "float16": 5e-3}  # the share of values that may be rounded the other way


def interpreted(case: Case, gate_up, **options):
    """Runs the kernel under the GPU interpreter; a race fails."""
    options["interpret"] = FIND_RACES
    return jax.block_until_ready(mosaic_sm90.silu_mul_quant(gate_up, kind=case.kind, **options))


@pytest.mark.parametrize(("case", "config"), INTERPRETED, ids=str)
def test_interpreted_matches_the_definition_and_xla(case, config):
    """Expects the codes of the kernel's own rows; these are one unit in the last place from xla's at most."""
    gate_up = case.inputs()
    rows = interpreted(case, gate_up, config=config)
    plain = interpreted(replace(case, kind=None), gate_up, config=config)
    assert error(numbers(rows), reference.silu_mul(gate_up)) < tolerance(case)
    units = units_apart(plain, xla.silu_mul_quant(gate_up))
    assert units.max() <= 1
    assert np.mean(units > 0) < FEW[case.dtype]
    assert case.kind is None or same_bits(rows, quantize_rows(plain, case.kind))


def test_gradients_are_those_of_xla():
    gate_up = Case(2, 128, "float16", None).inputs()

    def gradient(run, **options):
        return jax.grad(lambda x: jnp.sum(run(x, **options).astype("float32")))(gate_up)

    interpret = INTERPRET
    assert same_bits(gradient(mosaic_sm90.silu_mul_quant, interpret=interpret), gradient(xla.silu_mul_quant))
    scales = jax.grad(lambda x: jnp.sum(mosaic_sm90.silu_mul_quant(x, kind="int8", interpret=interpret).scales))
    assert same_bits(scales(gate_up), jax.grad(lambda x: jnp.sum(xla.silu_mul_quant(x, kind="int8").scales))(gate_up))


@pytest.mark.parametrize(
    ("module", "name", "change"),
    [
        (row_pieces_sm90, "silu_mul", lambda real: lambda gate, up: real(up, gate)),
        (row_pieces_sm90, "scale_of", lambda real: lambda peak, kind: real(peak * 1.01, kind)),
        (row_pieces_sm90, "_fold_full", lambda real: lambda values: real(values)[:-1] + [real(values)[-1] * 0]),
    ],
)
def test_seeded_faults_are_caught(monkeypatch, module, name, change):
    case = Case(2, 1280, "bfloat16", "int8")
    gate_up = case.inputs().at[:, 1279].set(30).at[:, -1].set(0.5)  # the largest value is in the last piece
    monkeypatch.setattr(module, name, change(getattr(module, name)))
    options = {"interpret": INTERPRET, "config": Config()}
    out = mosaic_sm90.silu_mul_quant.__wrapped__(gate_up, kind="int8", **options)
    assert error(numbers(out), reference.silu_mul(gate_up)) > 0.005
    assert not same_bits(out.scales, xla.silu_mul_quant(gate_up, kind="int8").scales)


def lower(case: Case, config: Config) -> str:
    run = partial(mosaic_sm90.silu_mul_quant, kind=case.kind, config=config)
    gate_up = jax.ShapeDtypeStruct((case.rows, 2 * case.width), case.dtype)
    return jax.jit(run).trace(gate_up).lower(lowering_platforms=("cuda",)).as_text()


def test_every_kind_of_case_lowers_for_cuda():
    """Leaves rows out: they are the grid's size."""
    large = [
        (replace(case, rows=8), config)
        for case in (BENCH_CASES[1], BENCH_CASES[5])  # 11008 to int8, 28672 to fp8
        for config in (choose_config(1, case.width), choose_config(2048, case.width))
    ]
    small = [(case, choose_config(case.rows, case.width)) for case in SUPPORTED[::4]]
    for case, config in (*small, *large, *INTERPRETED):
        text = lower(case, config)
        assert text.count("stablehlo.custom_call @mosaic_gpu") == 1
        assert "stablehlo.slice" not in text


def test_unrolled_layers_share_one_lowering():
    def step(x):
        layer = jax.jit(lambda x: silu_mul_quant(x, backend="mosaic"))
        for _ in range(32):
            half = layer(x)
            x = jnp.concatenate([half, half], axis=-1)
        return x

    gate_up = jax.ShapeDtypeStruct((4, 2048), jnp.bfloat16)
    text = jax.jit(step).trace(gate_up).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 1


def test_configurations_are_checked():
    with pytest.raises(ValueError, match="warpgroups is 3, expected 1, 2, 4 or 8"):
        Config(warpgroups=3)
    with pytest.raises(ValueError, match="F=36 cannot be split among 1 warpgroups in whole vectors of 8"):
        Config().check(36)
    for case in BENCH_CASES:
        choose_config(case.rows, case.width).check(case.width)


CONFIGS = [Config(warpgroups) for warpgroups in (1, 2, 4, 8)]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", [*SUPPORTED, Case(33, 11008, "bfloat16", "int8"), Case(7, 28672, "float16", "fp8")], ids=str
)
def test_gpu_matches_the_definition(case):
    """Compares with float64. Codes are those of the kernel's own rows. xla differs by at most a unit in few values. The
    same bits come again, and in every configuration."""
    gate_up = case.inputs()
    rows = silu_mul_quant(gate_up, kind=case.kind, backend="mosaic")
    plain = silu_mul_quant(gate_up, backend="mosaic")
    assert error(numbers(rows), reference.silu_mul(gate_up)) < tolerance(case)
    units = units_apart(plain, xla.silu_mul_quant(gate_up))
    assert units.max() <= 1
    assert np.mean(units > 0) < FEW[case.dtype]
    assert case.kind is None or same_bits(rows, jax.jit(partial(quantize_rows, kind=case.kind))(plain))
    for config in CONFIGS:
        assert same_bits(mosaic_sm90.silu_mul_quant(gate_up, kind=case.kind, config=config), rows)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_gpu_zeros_and_nan(kind):
    gate_up = jnp.zeros((3, 2 * 11008), jnp.bfloat16).at[1, 77].set(jnp.nan).at[2].set(-1)
    back = np.asarray(dequantize_rows(silu_mul_quant(gate_up, kind=kind, backend="mosaic")))
    assert not back[0].any()
    assert np.isnan(back[1]).all()
    np.testing.assert_allclose(back[2], 1 / (1 + np.e), rtol=1e-2)


@pytest.mark.gpu
def test_gpu_extremes_of_the_sigmoid():
    gate = jnp.asarray(
        [[-3e38, -1000, -100, -88, -20, -0.0, 0.0, 1e-30, 20, 88, 100, 1000, 3e38] + [0] * 115], jnp.bfloat16
    )
    rows = silu_mul_quant(jnp.concatenate([gate, jnp.ones_like(gate)], axis=-1), backend="mosaic")
    expected = reference.silu_mul(np.concatenate([np.asarray(gate), np.ones_like(gate)], axis=-1))
    np.testing.assert_allclose(np.asarray(rows, np.float64), expected, rtol=2**-7, atol=1e-37)  # smaller ones are 0


@pytest.mark.gpu
def test_gpu_a_row_does_not_depend_on_the_others():
    gate_up = Case(300, 11008, "bfloat16", "int8").inputs()
    rows = silu_mul_quant(gate_up, kind="int8", backend="mosaic")
    for t in (0, 150, 299):
        alone = silu_mul_quant(gate_up[t : t + 1], kind="int8", backend="mosaic")
        assert same_bits(alone, jax.tree.map(lambda a, t=t: a[t : t + 1], rows))
