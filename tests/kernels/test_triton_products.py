"""Checks Triton matmuls: interpreted against the formula, compiled for GPUs of four kinds, and run on a GPU."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.backends import choose
from pallas_kernels.fp8_matmul import fp8_matmul
from pallas_kernels.int8_matmul import int8_matmul
from pallas_kernels.scaled_matmul import api, reference
from pallas_kernels.scaled_matmul.cases import make_cases
from pallas_kernels.scaled_matmul.config import triton_config
from tests.kernels.helpers import TOLERANCE, error, same_bits
from tests.kernels.ragged_cases import CODES, operands
from tests.kernels.test_gemm_tall import FP8_TOLERANCE
from tests.kernels.triton_tools import CAPABILITIES, SHARED_MEMORY, cases_of, compile_for

pytest.importorskip("triton")  # of extras and development, for Linux alone


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_compiles(capability, tmp_path, monkeypatch):
    """Expects it within the shared memory and the registers of a block, and nothing spilled."""
    from pallas_kernels.scaled_matmul import triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    shapes = (
        (1, 4096, 11008, False, "bfloat16"),
        (64, 96, 160, True, "float32"),
        (512, 4096, 4096, True, "bfloat16"),
    )
    operands = ("int8", "float8_e4m3fn", "float8_e4m3fn-b128") if capability >= 89 else ("int8",)
    for kind, (m, n, k, added, out) in cases_of(capability, itertools.product(operands, shapes)):
        operand, in_blocks = kind.removesuffix("-b128"), kind.endswith("-b128")
        x, w = (jax.ShapeDtypeStruct((rows, k), operand) for rows in (m, n))
        config = triton_config(m, capability == 90, in_blocks)
        launch = triton.launch(x, w, added, added, out, config, in_blocks)
        addends = ["bfloat16" if added else "float32"] * 2
        made = compile_for(launch, [operand, operand, "float32", "float32", *addends], capability)
        assert f".target sm_{capability}" in made.ptx
        assert made.shared <= SHARED_MEMORY[capability], launch
        assert made.spilled == 0, launch
        assert made.registers * 32 * launch.num_warps <= 65536, launch


OF_GROUPS = (  # kind, M, X, N, K, gated: of Qwen3-30B-A3B and gpt-oss-20b
    ("bfloat16", 8, 128, 768, 2048, True),
    ("bfloat16", 32768, 128, 768, 2048, True),
    ("bfloat16", 32768, 128, 2048, 768, False),
    ("int8", 2048, 128, 768, 2048, True),
    ("fp8", 32768, 128, 768, 2048, True),
    ("w4a16-g128", 8, 128, 768, 2048, True),
    ("w4a16-g32-zp", 32768, 128, 768, 2048, True),
    ("nf4", 2048, 128, 2048, 768, False),
    ("mxfp4-weight", 16384, 32, 5760, 2880, False),
)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_products_of_groups_compile(capability, tmp_path, monkeypatch):
    from pallas_kernels.ragged_matmul import triton
    from pallas_kernels.ragged_matmul.config import triton_config

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for kind, m, groups, n, k, gated in cases_of(capability, OF_GROUPS):
        if kind == "fp8" and capability < 89:
            continue
        x, w = jax.eval_shape(partial(operands, kind, m, groups * n * (2 if gated else 1), k))
        config = triton_config(m, groups, gated, float8=kind == "fp8")
        launch = triton.launch(x, w, groups, gated, jnp.dtype("bfloat16"), config)
        rows, weights = (each.values if hasattr(each, "values") else each for each in (x, w))
        scales = ["int32", "int32"] if kind == "bfloat16" else ["float32", "float32"]
        if kind not in ("bfloat16", *CODES):
            zeros, table = (w.scales if w.zeros is None else w.zeros), "bfloat16"
            scales = [w.scales.dtype, zeros.dtype, table if launch.constants["TABLE"] else w.scales.dtype]
        made = compile_for(launch, [rows.dtype, weights.dtype, *scales, *["int32"] * 4], capability)
        assert made.shared <= SHARED_MEMORY[capability], (kind, m, made)
        assert made.spilled == 0, (kind, m, made)
        assert made.registers * 32 * launch.num_warps <= 65536, (kind, m, made)


def test_it_is_what_ampere_and_ada_run_unasked():
    sizes = 96, 96, jnp.dtype("float32"), jnp.dtype("bfloat16"), None
    assert choose(api.BACKENDS, "ampere", *sizes) is api.BACKENDS["triton"]
    assert choose(api.BACKENDS, "hopper", *sizes) is not api.BACKENDS["triton"]


def test_what_is_refused(monkeypatch):
    monkeypatch.setattr("pallas_kernels.backends.capability", lambda: "8.6")
    with pytest.raises(NotImplementedError, match=r"float8 is not supported by backend triton on 8.6, but from 8.9 on"):
        fp8_matmul(*make_cases("float8_e4m3fn")[0].inputs()[:4], backend="triton")
    x, w, *scales = make_cases("int8")[0].inputs()[:4]
    with (
        jax.enable_x64(True),
        pytest.raises(NotImplementedError, match="results of float64 is not supported by backend"),
    ):
        int8_matmul(x, w, *scales, out_dtype="float64", backend="triton")


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*make_cases("int8"), *make_cases("float8_e4m3fn")], ids=str)
def test_gpu_matches_the_formula(case):
    x, w, x_scale, w_scale, bias, residual = arrays = case.inputs()
    matmul = int8_matmul if case.operand == "int8" else fp8_matmul
    added = {"bias": bias, "residual": residual, "out_dtype": case.out_dtype, "backend": "triton"}
    out = matmul(x, w, x_scale, w_scale, **added)
    tolerance = TOLERANCE[case.out_dtype] + (0 if case.operand == "int8" else FP8_TOLERANCE)
    assert error(out, reference.scaled_matmul(*arrays)) < tolerance
    assert same_bits(out, matmul(x, w, x_scale, w_scale, **added))
    if case.operand == "int8":  # exact sums: alike in any tile
        added["residual"] = None if residual is None else residual[-1:]
        assert same_bits(out[-1:], matmul(x[-1:], w, x_scale[-1:], w_scale, **added))
