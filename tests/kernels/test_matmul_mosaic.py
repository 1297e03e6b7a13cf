"""Checks matmul on Hopper's kernel for few rows: interpreted, lowered for CUDA, and run on a GPU."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.hopper.gemm_sm90.skinny_config import TUNED, Config, choose_config
from pallas_kernels.matmul import matmul, mosaic_sm90, reference
from pallas_kernels.matmul.cases import BENCH_CASES, CASES, Case
from pallas_kernels.matmul.config import FASTER, check_faster, check_supported
from tests.kernels.helpers import TOLERANCE, same_bits, thinned
from tests.kernels.interpreter import FIND_RACES, INTERPRET
from tests.kernels.test_matmul import error


def supported(case: Case) -> bool:
    x, w = (jax.ShapeDtypeStruct(shape, case.dtype) for shape in ((*case.leading, case.k), (case.n, case.k)))
    try:
        check_supported(x, w, None, x.dtype)
    except NotImplementedError:
        return False
    return True


SUPPORTED = [case for case in CASES if supported(case)]


@pytest.mark.parametrize("case", [SUPPORTED[2], SUPPORTED[-1]], ids=str)
def test_matches_the_formula_without_races(case):
    x, w, added = case.inputs()
    how = case.out_dtype or case.dtype, Config(64, 32, ctas=2), FIND_RACES
    out = mosaic_sm90.matmul(x, w, added.get("bias"), added.get("residual"), *how)
    assert out.shape == (*case.leading, case.n)
    assert out.dtype == (case.out_dtype or case.dtype)
    assert error(out, reference.matmul(x, w, **added)) < TOLERANCE[str(out.dtype)]


def test_gradients_are_those_of_the_xla_backend():
    x, w, added = Case((3,), 32, 64, "bfloat16", bias=True, residual=True).inputs()
    interpret, config = INTERPRET, Config(64, 32)

    def kernel(*arguments):
        return mosaic_sm90.matmul(*arguments, "bfloat16", config, interpret)

    def xla(x, w, bias, residual):
        return matmul(x, w, bias=bias, residual=residual, backend="xla")

    arguments = x, w, added["bias"], added["residual"]
    gradient = jnp.ones((3, 32), jnp.bfloat16)
    assert same_bits(jax.vjp(kernel, *arguments)[1](gradient), jax.vjp(xla, *arguments)[1](gradient))


def config_of(case: Case) -> Config:
    return choose_config(math.prod(case.leading), case.n, case.k, 2, jnp.dtype(case.out_dtype or case.dtype).itemsize)


def lowered(case: Case, layers: int = 1) -> str:
    shape = jax.ShapeDtypeStruct
    x, w = (shape(size, case.dtype) for size in ((*case.leading, case.k), (case.n, case.k)))
    residual = shape((*case.leading, case.n), case.out_dtype or case.dtype) if case.residual else None
    bias = shape((case.n,), case.dtype) if case.bias else None

    @jax.jit
    def run(x, w, bias, residual):
        for _ in range(layers):
            out = matmul(x, w, bias=bias, residual=residual, out_dtype=case.out_dtype, backend="mosaic")
            x = out if layers > 1 else x
        return out

    return run.trace(x, w, bias, residual).lower(lowering_platforms=("cuda",)).as_text()


# At the ends of what FASTER has, with the residual that those products add.
ENDS = [
    Case((m,), n, k, "bfloat16", residual=n == k or n == 4096)
    for m, n, k in (
        (1, 12288, 4096), (128, 12288, 4096), (128, 4096, 4096), (512, 4096, 4096), (384, 4096, 11008),
        (300, 6144, 4096), (512, 4096, 14336), (256, 5120, 5120),
    )
]  # fmt: skip


@pytest.mark.parametrize("which", thinned(range(2), (0,)))
def test_every_configuration_lowers_for_cuda(which):
    bench = {(config_of(case), case.out_dtype): case for case in BENCH_CASES}
    for case in (*[*SUPPORTED, *bench.values()][which::2], *ENDS):
        assert lowered(case).count("stablehlo.custom_call @mosaic_gpu") == 1


def test_the_faster_backend_is_the_one_that_was_measured_or_should_be():
    def choice(m: int, n: int, k: int, dtype="bfloat16", residual=None, out_dtype="float32") -> str:
        x, w = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((m, k), (n, k)))
        added = None if residual is None else jax.ShapeDtypeStruct((m, n), residual)
        try:
            check_faster(x, w, added, jnp.dtype(out_dtype))
        except NotImplementedError:
            return "xla"
        return "mosaic"

    assert choice(64, 12288, 4096) == "mosaic"
    assert choice(64, 12288, 4096, "float16") == "xla"
    assert choice(64, 512, 512) == "xla"
    assert choice(64, 12288, 4096, residual="float32") == "mosaic"
    assert choice(64, 12288, 4096, residual="bfloat16") == "xla"  # the result is float32
    for (n, k), (low, high) in FASTER.items():
        around = {m: choice(m, n, k) for m in (low - 1, low, high, high + 1) if m}
        assert around == {m: "mosaic" if low <= m <= high else "xla" for m in around}
    assert choice(512, 4096, 11008) == "xla"
    assert choice(512, 4096, 11008, residual="float32") == choice(384, 4096, 11008) == "mosaic"
    unmeasured = partial(choice, out_dtype="bfloat16")
    assert unmeasured(1, 2560, 2048) == unmeasured(128, 2560, 2048) == "mosaic"
    assert unmeasured(129, 2560, 2048) == unmeasured(64, 2560, 2050) == unmeasured(64, 512, 512) == "xla"
    assert unmeasured(1, 2560, 2064) == "xla"  # its kernel takes multiples of 64
    assert unmeasured(2, 2560, 2064) == unmeasured(256, 2560, 8192, residual="bfloat16") == "mosaic"
    for (n, k, itemsize), tuned in TUNED.items():  # ranges that overlap would hide one another
        for low, high, config in tuned:
            assert choose_config(low, n, k, itemsize) == choose_config(high, n, k, itemsize) == config


def test_layers_share_one_lowering():
    text = lowered(Case((16,), 4096, 4096, "bfloat16", residual=True), layers=32)
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 1


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*SUPPORTED, *BENCH_CASES[:21:3], *ENDS], ids=str)
def test_gpu_matches_the_formula(case):
    x, w, added = case.inputs()
    out = matmul(x, w, **added, out_dtype=case.out_dtype, backend="mosaic")
    sums = 2 if out.dtype == "float32" else 1  # tensor cores truncate where they align what they add
    assert error(out, reference.matmul(x, w, **added)) < sums * TOLERANCE[str(out.dtype)]
    assert same_bits(out, matmul(x, w, **added, out_dtype=case.out_dtype, backend="mosaic"))
