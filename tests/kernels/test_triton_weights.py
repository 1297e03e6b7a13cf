"""Checks Triton matmuls by weights alone quantized: interpreted, compiled for GPUs of four kinds, and run on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.backends import choose
from pallas_kernels.formats.quantized_weights import encode, group_scales
from pallas_kernels.formats.weight_formats import parse_weight_format
from pallas_kernels.weight_only_matmul import api
from pallas_kernels.weight_only_matmul.cases import CASES, Case
from pallas_kernels.weight_only_matmul.config import triton_config
from tests.kernels.helpers import same_bits
from tests.kernels.triton_tools import CAPABILITIES, SHARED_MEMORY, cases_of, compile_for
from tests.kernels.triton_weights_cases import run, within

pytest.importorskip("triton")  # of extras and development, for Linux alone

HALVES = [case for case in CASES if case.dtype != "float32"]
LARGE = [  # configurations of all rows, loops that do not end at once
    Case((m,), 4096, 11008, fmt, residual=True)
    for m, fmt in ((1, "w4a16-g128"), (16, "nf4"), (64, "w4a16-g64"), (512, "w8a16"))
]


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_compiles(capability, tmp_path, monkeypatch):
    """Expects it within the shared memory and the registers of a block, and nothing spilled."""
    from pallas_kernels.weight_only_matmul import triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    cases = (
        (1, "w4a16-g128", True), (1, "nf4", False), (1, "w8a16", True), (16, "w4a16-g32-zp", True),
        (64, "w4a16-g64", True), (512, "w4a16-g128-zp", True), (512, "nf4", True), (512, "w8a16", False),
        (512, "fp8-weight", True),
    )  # fmt: skip
    for m, name, added in cases_of(capability, cases):
        fmt = parse_weight_format(name)
        w = jax.eval_shape(lambda fmt=fmt: encode(jnp.zeros((4096, 4096)), fmt))
        x = jax.ShapeDtypeStruct((m, 4096), jnp.bfloat16)
        launch = triton.launch(x, w, added, added, x.dtype, triton_config(m, 4096, 4096, fmt.codes))
        scales = jax.eval_shape(group_scales, w).dtype
        zeros = "int8" if fmt.zero_point else scales
        made = compile_for(
            launch,
            [x.dtype, "uint8" if name == "fp8-weight" else w.values.dtype, scales, zeros, *[x.dtype] * 3],
            capability,
        )
        assert f".target sm_{capability}" in made.ptx
        assert made.shared <= SHARED_MEMORY[capability], name
        assert made.spilled == 0, (m, name)
        assert made.registers * 32 * launch.num_warps <= 65536, name


def test_it_is_what_ampere_and_ada_run_unasked():
    x, w, *_ = Case((3,), 64, 256, "nf4").inputs()
    for kind, expected in (("ampere", "triton"), ("hopper", "mosaic")):
        assert choose(api.BACKENDS, kind, w, x.dtype, 3, 64, 256, w.format) is api.BACKENDS[expected]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (Case((3,), 64, 128, "nf4", "float32"), "x of float32 is not supported by backend triton, which does bfloat16"),
        (Case((3,), 64, 128, "w4a16-g8"), "groups of 8 is not supported by backend triton, which does 32, 64, 128"),
        (Case((3,), 64, 128, "mxfp8-e5m2-weight"), "codes e5m2 is not supported by backend triton, which does int8"),
    ],
)
def test_what_is_refused(case, message):
    with pytest.raises(NotImplementedError, match=message):
        run(case, case.inputs())


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*HALVES, *LARGE], ids=str)
def test_gpu_matches_the_formula(case):
    x, w, bias, residual = arrays = case.inputs()
    out = run(case, arrays)
    assert within(case, out, arrays)
    assert same_bits(out, run(case, arrays))
    m = int(np.prod(case.leading))
    sizes = case.k, case.n, w.format.codes
    if len(case.leading) == 1 and triton_config(m, *sizes) == triton_config(max(m - 1, 1), *sizes):
        fewer = x[1:], w, bias, None if residual is None else residual[1:]
        assert same_bits(out[1:], run(case, fewer))
