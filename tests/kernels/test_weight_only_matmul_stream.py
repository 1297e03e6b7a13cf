"""Checks the kernel for few rows of x and codes of 8 bits. It is interpreted on the CPU with race detection, lowered
for CUDA, and run on a GPU."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.formats.quantized_weights import decode
from pallas_kernels.formats.weight_formats import parse_weight_format
from pallas_kernels.weight_only_matmul import mosaic_sm90, reference, stream_sm90
from pallas_kernels.weight_only_matmul.cases import Case
from pallas_kernels.weight_only_matmul.config import StreamConfig, candidates
from tests.kernels.helpers import same_bits
from tests.kernels.interpreter import INTERPRET
from tests.kernels.test_weight_only_matmul_mosaic import (
    TOLERANCE,
    check_company,
    check_interpreted,
    every_code,
    interpreted,
    lower,
    row_error,
    shapes,
)

STREAM = StreamConfig()
BYTES = ("w8a16", "w8a16-g32", "w8a16-g128-zp", "uint8-zp", "fp8-weight")

# Chunks of all warps and of some, more and fewer of them than are ahead.
INTERPRETED = [
    (Case((2,), 64, 640, "w8a16"), STREAM),
    (Case((2,), 64, 512, "w8a16-g32-zp"), STREAM),
    (Case((1,), 64, 512, "w8a16-g128-zp", "float16"), STREAM),
    (Case((8,), 48, 2304, "w8a16-g128", residual=True), StreamConfig(stages=2)),
    (Case((7,), 32, 1024, "w8a16-g64"), StreamConfig(stages=1)),
    (Case((1,), 32, 640, "w8a16-g32-zp", bias=True), STREAM),
    (Case((8,), 64, 512, "uint8-zp"), STREAM),
    (Case((5,), 64, 128, "uint8-zp", "float16", out_dtype="float32"), STREAM),
    (Case((4,), 64, 512, "fp8-weight"), STREAM),
    (Case((1,), 64, 512, "fp8-weight", "float16"), StreamConfig(stages=2)),
]


@pytest.mark.parametrize(("case", "config"), INTERPRETED, ids=str)
def test_interpreted(case, config):
    check_interpreted(case, config)


@pytest.mark.parametrize("name", ["w8a16-g64-zp", "fp8-weight"])
def test_parts_are_added_in_their_order(name):
    check_company(Case((8,), 32, 1280, name), STREAM)


def test_how_many_chunks_are_ahead_does_not_change_bits():
    case = Case((3,), 32, 1152, "w8a16-g128-zp")
    x, w, *_ = case.inputs()
    few, many = (interpreted(x, w, None, None, case, StreamConfig(stages=stages)) for stages in (1, 8))
    assert same_bits(few, many)


def test_padded_rows_are_not_seen():
    case = Case((2,), 33, 128, "w8a16")
    x, w, *_ = case.inputs()
    poisoned = replace(w, scales=w.scales.at[33:].set(jnp.nan))
    assert same_bits(interpreted(x, poisoned, None, None, case, STREAM), interpreted(x, w, None, None, case, STREAM))


@pytest.mark.parametrize("name", BYTES)
def test_lowers_for_cuda(name):
    for dtype, m, k in (("bfloat16", 3, 1280), ("float16", 8, 1024)):
        x, w = shapes(Case((m,), 64, k, name, dtype))
        run = partial(mosaic_sm90.weight_only_matmul, bias=None, residual=None, out_dtype=x.dtype, config=STREAM)
        assert "mosaic_gpu" in lower(run, x, w)


@pytest.mark.parametrize(
    ("method", "fault"),
    [
        ("byte_pairs", lambda real: lambda self, words: real(self, words[::-1])),
        ("load_x", lambda real: lambda self, chunk: real(self, chunk ^ 1)),
        ("load_vectors", lambda real: lambda self, chunk: real(self, chunk)[::-1]),
        ("groups_of_runs", lambda real: lambda self: real(self)[::-1]),
        ("load_codes", lambda real: lambda self, chunk: real(self, max(chunk - 1, 0))),
    ],
)
def test_seeded_faults_are_caught(monkeypatch, method, fault):
    monkeypatch.setattr(stream_sm90.Stream, method, fault(getattr(stream_sm90.Stream, method)))
    x, w, _, _ = Case((2,), 32, 1024, "w8a16-g32-zp").inputs()
    product = mosaic_sm90.product.__wrapped__  # past the cache of the jit
    out = product(x, w, out_dtype=x.dtype, config=STREAM, interpret=INTERPRET)[0]
    assert row_error(out, reference.weight_only_matmul(x, w, None, None)) > 0.05


def test_what_is_refused():
    with pytest.raises(ValueError, match="stages is 0, expected at least 1"):
        StreamConfig(stages=0)
    for case in (Case((9,), 64, 512, "w8a16"), Case((2,), 64, 512, "w4a16-g128")):
        x, w = shapes(case)
        with pytest.raises(NotImplementedError, match="multiples of 16 rows of the weight and 8 bits"):
            jax.eval_shape(partial(mosaic_sm90.product, out_dtype=x.dtype, config=STREAM), x, w)


def test_where_it_runs():
    for m, n, name, first in ((2, 64, "w8a16", True), (8, 64, "fp8-weight", True), (9, 64, "w8a16", False),
                              (2, 24, "w8a16", False), (2, 64, "nf4", False), (1, 64, "w8a16", False)):  # fmt: skip
        assert isinstance(candidates(m, n, 512, parse_weight_format(name))[0], StreamConfig) == first


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", BYTES)
def test_gpu_every_code_in_every_place(name, dtype):
    """Picks one column at a time by x: the product is the decoded weight itself, rounded to x's dtype."""
    w = every_code(name)
    x = jnp.eye(256, dtype=dtype)
    expected = np.asarray(decode(w, dtype)).astype(np.float64).T
    for rows, end in ((8, 256), (7, 256), (1, 32)):
        for first in range(0, end, rows):
            some = x[first : first + rows]
            out = mosaic_sm90.weight_only_matmul(some, w, None, None, jnp.dtype("float32"), config=STREAM)
            assert (np.asarray(out).astype(np.float64) == expected[first : first + rows]).all()


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (4096, 11008)])
@pytest.mark.parametrize("name", BYTES)
def test_gpu_at_the_size_of_a_layer(name, n, k):
    x, w, _, _ = Case((8,), n, k, name).inputs()
    expected = reference.weight_only_matmul(x, w, None, None)
    run = partial(mosaic_sm90.weight_only_matmul, w=w, bias=None, residual=None, out_dtype=x.dtype, config=STREAM)
    out = run(x)
    assert row_error(out, expected) < TOLERANCE["bfloat16"]
    assert same_bits(run(x), out)
    assert same_bits(run(x[5:6]), out[5:6])
