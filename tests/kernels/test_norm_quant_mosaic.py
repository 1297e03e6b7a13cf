"""Checks the Mosaic GPU kernel: interpreted on the CPU with race detection, lowered for CUDA, and run on a GPU."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.formats.quantized_rows import dequantize_rows, quantize_rows
from pallas_kernels.hopper import row_pieces_sm90
from pallas_kernels.norm_quant import mosaic_sm90, norm_quant, reference, xla
from pallas_kernels.norm_quant.cases import BENCH_CASES, CASES, EPS, Case
from tests.kernels.helpers import error, same_bits
from tests.kernels.interpreter import FIND_RACES, INTERPRET
from tests.kernels.row_helpers import units_apart
from tests.kernels.test_norm_quant import exact, numbers, tolerance

SUPPORTED = [case for case in CASES if case.dtype != "float32"]
INTERPRETED = [  # parts of vectors of fewer lanes and warps, one and more full pieces
    Case(3, 128, "bfloat16", None),
    Case(2, 1408, "bfloat16", "int8"),
    Case(2, 1664, "float16", "fp8"),
    Case(1, 2560, "bfloat16", "fp8", residual=False),
    Case(1, 384, "float16", "int8", residual=False),
    Case(1, 5120, "bfloat16", None),
    Case(2, 2880, "bfloat16", "int8"),
]


def simple(case: Case):
    """Returns inputs whose sum and whose product with the weight are exact. XLA, which interprets the kernel, drops
    conversions to 16 bits and back."""
    rng = np.random.default_rng(0)
    x, residual = (rng.integers(-32, 32, (case.rows, case.width), endpoint=True) / 8 for _ in range(2))
    weight = rng.choice([-0.5, 1.0, 2.0], case.width)
    x, residual, weight = (jnp.asarray(array.astype(jnp.dtype(case.dtype))) for array in (x, residual, weight))
    return x, weight, residual if case.residual else None


def interpreted(case: Case, x, weight, residual, **options):
    """Runs the kernel under the GPU interpreter; a race fails."""
    options["interpret"] = FIND_RACES
    out = mosaic_sm90.norm_quant(x, weight, residual=residual, **case.options(), **options)
    return jax.block_until_ready(out)


@pytest.mark.parametrize("case", INTERPRETED, ids=str)
def test_interpreted_gives_the_bits_of_xla(case):
    arguments = simple(case)
    rows, summed = interpreted(case, *arguments)
    expected, expected_sum = xla.norm_quant(*arguments[:2], residual=arguments[2], **case.options())
    assert same_bits(summed, expected_sum)
    assert same_bits(rows, expected)


@pytest.mark.parametrize("case", [Case(2, 640, "bfloat16", "int8"), Case(1, 384, "float16", "fp8", residual=False)])
def test_interpreted_without_a_weight_quantizes(case):
    x, _, residual = simple(case)
    rows, summed = interpreted(case, x, None, residual)
    assert same_bits(summed, x if residual is None else x + residual)
    assert same_bits(rows, quantize_rows(summed, case.kind))


def test_gradients_are_those_of_xla():
    x, weight, residual = simple(Case(2, 128, "bfloat16", None))

    def gradients(run, **options):
        def loss(x, weight, residual):
            rows, summed = run(x, weight, residual=residual, eps=EPS, **options)
            return jnp.sum(jnp.sin(rows.astype("float32"))) + jnp.sum(jnp.cos(summed.astype("float32")))

        return jax.grad(loss, (0, 1, 2))(x, weight, residual)

    interpret = INTERPRET
    assert same_bits(gradients(mosaic_sm90.norm_quant, interpret=interpret), gradients(xla.norm_quant))


@pytest.mark.parametrize(
    ("module", "name", "change"),
    [
        (row_pieces_sm90, "_normed", lambda real: lambda row, weights, mean, eps: real(row, weights, mean * 1.02, eps)),
        (row_pieces_sm90, "scale_of", lambda real: lambda peak, kind: real(peak * 1.01, kind)),
        (row_pieces_sm90, "pieces", lambda real: lambda vectors: real(vectors)[:-1] or real(vectors)),
    ],
)
def test_seeded_faults_are_caught(monkeypatch, module, name, change):
    case = Case(2, 1280, "bfloat16", "int8")
    arguments = simple(case)
    monkeypatch.setattr(module, name, change(getattr(module, name)))
    x, weight, residual = arguments
    options = {"interpret": INTERPRET}
    out = mosaic_sm90.norm_quant.__wrapped__(x, weight, residual=residual, **case.options(), **options)
    assert not same_bits(out, xla.norm_quant(x, weight, residual=residual, **case.options()))


def shapes(case: Case) -> tuple:
    row = jax.ShapeDtypeStruct((case.rows, case.width), case.dtype)
    return row, jax.ShapeDtypeStruct((case.width,), case.dtype), row if case.residual else None


def test_every_kind_of_case_lowers_for_cuda():
    """Leaves rows out: they are the grid's size."""

    def run(x, weight, residual, case):
        weights = (weight,) if case.kind is None else (weight, None)
        return [mosaic_sm90.norm_quant(x, each, residual=residual, **case.options()) for each in weights]

    for case in (*SUPPORTED[::4], *BENCH_CASES[:9:4], *INTERPRETED):
        jitted = jax.jit(partial(run, case=case))
        text = jitted.trace(*shapes(case)).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("stablehlo.custom_call @mosaic_gpu") == (1 if case.kind is None else 2)


def test_unrolled_layers_share_one_lowering():
    case = Case(4, 1024, "bfloat16", "int8")

    def step(x, weight, residual):
        layer = jax.jit(lambda x, weight, residual: norm_quant(x, weight, eps=EPS, residual=residual, backend="mosaic"))
        for _ in range(32):
            x, residual = layer(x, weight, residual)
        return x, residual

    text = jax.jit(step).trace(*shapes(case)).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 1


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", [*SUPPORTED, Case(33, 4096, "bfloat16", "int8"), Case(7, 8192, "float16", "fp8")], ids=str
)
def test_gpu_matches_the_definition(case):
    """Compares with float64. Codes are those of the kernel's own rows. xla differs by at most a unit in few values. The
    same bits come again."""
    x, weight, residual = case.inputs()
    rows, summed = norm_quant(x, weight, residual=residual, backend="mosaic", **case.options())
    plain, same = norm_quant(x, weight, residual=residual, backend="mosaic", eps=EPS)
    other, other_sum = xla.norm_quant(x, weight, residual=residual, eps=EPS)
    _, expected_sum = reference.norm_quant(x, weight, residual=residual, eps=EPS)
    assert error(numbers(rows), exact(case, x, weight, residual)) < tolerance(case)
    assert same_bits((summed, other_sum), (same, jnp.asarray(expected_sum)))
    assert same_bits(summed, same)
    units = units_apart(plain, other)
    assert units.max() <= 1
    assert np.mean(units > 0) < 5e-3
    assert case.kind is None or same_bits(rows, jax.jit(partial(quantize_rows, kind=case.kind))(plain))
    assert same_bits(norm_quant(x, weight, residual=residual, backend="mosaic", **case.options()), (rows, summed))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_gpu_zeros_and_nan(kind):
    x = jnp.zeros((3, 4096), jnp.bfloat16).at[1, 77].set(jnp.nan).at[2].set(1)
    rows, _ = norm_quant(x, jnp.ones(4096, jnp.bfloat16), eps=EPS, kind=kind, backend="mosaic")
    back = np.asarray(dequantize_rows(rows))
    assert not back[0].any()
    assert np.isnan(back[1]).all()
    np.testing.assert_allclose(back[2], 1, rtol=1e-2)


@pytest.mark.gpu
def test_gpu_a_row_does_not_depend_on_the_others():
    x, weight, residual = Case(300, 4096, "bfloat16", "int8").inputs()
    options = {"eps": EPS, "kind": "int8", "backend": "mosaic"}
    rows, summed = norm_quant(x, weight, residual=residual, **options)
    for t in (0, 150, 299):
        alone = norm_quant(x[t : t + 1], weight, residual=residual[t : t + 1], **options)
        assert same_bits(alone, jax.tree.map(lambda a, t=t: a[t : t + 1], (rows, summed)))


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "kind"), [(1, "int8"), (300, "fp8"), (2048, "int8")])
def test_gpu_without_a_weight_quantizes(rows, kind):
    x, _, _ = Case(rows, 4096, "bfloat16", kind).inputs()
    assert same_bits(norm_quant(x, None, eps=EPS, kind=kind, backend="mosaic")[0], quantize_rows(x, kind))
