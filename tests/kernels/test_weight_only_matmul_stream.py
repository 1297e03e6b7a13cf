"""The kernel for few rows of x: interpreted on the CPU with race detection, lowered for CUDA, and run where there is a
GPU."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.quantized_weights import decode
from pallas_kernels.weight_only_matmul import mosaic_sm90, reference, stream_sm90
from pallas_kernels.weight_only_matmul.cases import Case
from pallas_kernels.weight_only_matmul.config import Config
from tests.kernels.helpers import same_bits
from tests.kernels.interpreter import INTERPRET
from tests.kernels.test_weight_only_matmul_mosaic import (
    FORMATS,
    TOLERANCE,
    check_company,
    check_interpreted,
    every_code,
    lower,
    row_error,
    shapes,
)

STREAM = Config(fold=4, warpgroups=1, stream=True)


INTERPRETED = [
    (Case((1,), 96, 1024, "w4a16-g128", residual=True), STREAM),
    (Case((3,), 64, 1536, "w4a16-g128-zp"), replace(STREAM, warpgroups=2)),
    (Case((8,), 64, 1280, "w4a16-g64", "float16"), replace(STREAM, stages=2)),
    (Case((1,), 64, 768, "w4a16-g32-zp", "float16", out_dtype="float32"), replace(STREAM, fold=2)),
    (Case((5,), 64, 512, "nf4", out_dtype="float32"), STREAM),
    (Case((13,), 64, 1280, "w4a16-g128"), replace(STREAM, tokens=16, row_tiles=2)),
    (Case((16,), 64, 512, "nf4"), replace(STREAM, tokens=16, row_tiles=2, fold=2)),
    (Case((9,), 64, 512, "uint8-zp"), replace(STREAM, tokens=16, row_tiles=2, warpgroups=2)),
    (Case((2,), 64, 512, "w8a16-g32-zp"), replace(STREAM, row_tiles=4)),
    (Case((1,), 32, 1280, "nf4-g128", "float16"), replace(STREAM, warpgroups=2)),
    (Case((2,), 64, 640, "w8a16"), STREAM),
    (Case((1,), 64, 512, "w8a16-g128-zp", "float16"), STREAM),
    (Case((7,), 32, 1024, "w8a16-g64"), STREAM),
    (Case((1,), 32, 640, "w8a16-g32-zp", bias=True), replace(STREAM, warpgroups=3)),
    (Case((8,), 64, 512, "uint8-zp"), replace(STREAM, fold=2, warpgroups=2)),
    (Case((1,), 64, 640, "uint8-zp", "float16"), STREAM),
    (Case((4,), 64, 512, "fp8-weight"), STREAM),
    (Case((1,), 64, 512, "fp8-weight", "float16"), replace(STREAM, stages=2)),
]


@pytest.mark.parametrize(("case", "config"), INTERPRETED, ids=str)
def test_interpreted(case, config):
    check_interpreted(case, config)


def test_parts_are_added_in_their_order():
    check_company(Case((8,), 32, 1280, "w4a16-g128"), replace(STREAM, warpgroups=2))


@pytest.mark.parametrize("name", FORMATS)
def test_lowers_for_cuda(name):
    wide = replace(STREAM, tokens=16, row_tiles=2)
    some = ("bfloat16", STREAM, 1280), ("float16", replace(STREAM, warpgroups=2, fold=2), 1024), ("float16", wide, 512)
    for dtype, config, k in some:
        x, w = shapes(Case((3,), 64, k, name, dtype))
        run = partial(mosaic_sm90.weight_only_matmul, bias=None, residual=None, out_dtype=x.dtype, config=config)
        text = lower(lambda x, w, run=run: run(x, w), x, w)
        assert "mosaic_gpu" in text


@pytest.mark.parametrize(
    ("method", "fault"),
    [
        ("packed_pairs", lambda real: lambda self, words: real(self, words[::-1])),
        ("load_x", lambda real: lambda self, chunk: real(self, chunk ^ 1)),
        ("load_vectors", lambda real: lambda self, chunk: real(self, chunk)[::-1]),
        ("load_codes", lambda real: lambda self, chunk: real(self, max(chunk - 1, 0))),
    ],
)
def test_seeded_faults_are_caught(monkeypatch, method, fault):
    monkeypatch.setattr(stream_sm90.Stream, method, fault(getattr(stream_sm90.Stream, method)))
    x, w, _, _ = Case((1,), 32, 1024, "w4a16-g128").inputs()
    product = mosaic_sm90.product.__wrapped__  # past the cache of the jit
    out = product(x, w, out_dtype=x.dtype, config=STREAM, interpret=INTERPRET)[0]
    assert row_error(out, reference.weight_only_matmul(x, w, None, None)) > 0.1


def test_configurations_are_checked():
    with pytest.raises(ValueError, match="tokens is 24, but a streaming kernel has 8 or 16"):
        Config(tokens=24, stream=True)
    with pytest.raises(ValueError, match="split is 2, but a streaming kernel has 1"):
        Config(split=2, stream=True)
    for m, fold, message in (
        (9, 4, "streams for at most 8 rows of x, not M=9"),
        (1, 1, "64 rows of the weight, which are 96"),
    ):
        x, w = shapes(Case((m,), 96, 512, "w4a16-g128"))
        with pytest.raises(NotImplementedError, match=message):
            jax.eval_shape(partial(mosaic_sm90.product, out_dtype=x.dtype, config=replace(STREAM, fold=fold)), x, w)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", FORMATS)
def test_gpu_every_code_in_every_place(name, dtype):
    """x picks one column at a time: the product is the decoded weight itself, rounded to x's dtype."""
    w = every_code(name)
    x = jnp.eye(256, dtype=dtype)
    expected = np.asarray(decode(w, dtype)).astype(np.float64).T
    wide = replace(STREAM, tokens=16, row_tiles=2)
    for config, rows in ((STREAM, 8), (replace(STREAM, warpgroups=2, fold=2), 7), (wide, 13), (STREAM, 1)):
        for first in range(0, 256 if rows > 1 else 32, rows):
            some = x[first : first + rows]
            out = mosaic_sm90.weight_only_matmul(some, w, None, None, jnp.dtype("float32"), config=config)
            assert (np.asarray(out).astype(np.float64) == expected[first : first + rows]).all()


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (4096, 11008)])
@pytest.mark.parametrize("name", ["w4a16-g128", "w4a16-g32-zp", "nf4", "w8a16", "fp8-weight"])
def test_gpu_at_the_size_of_a_layer(name, n, k):
    x, w, _, _ = Case((8,), n, k, name).inputs()
    expected = reference.weight_only_matmul(x, w, None, None)
    for config in (STREAM, replace(STREAM, warpgroups=2)):
        run = partial(mosaic_sm90.weight_only_matmul, w=w, bias=None, residual=None, out_dtype=x.dtype, config=config)
        out = run(x)
        assert row_error(out, expected) < TOLERANCE["bfloat16"]
        assert same_bits(run(x), out)
        assert same_bits(run(x[5:6]), out[5:6])
