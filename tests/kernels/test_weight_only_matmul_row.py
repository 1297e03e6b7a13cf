"""Checks the kernel for one row of x, and what takes the norm and SiLU along. It is interpreted on the CPU with race
detection, lowered for CUDA, and run on a GPU."""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.bench.cases import normal
from pallas_kernels.formats.quantized_weights import decode
from pallas_kernels.formats.weight_formats import parse_weight_format
from pallas_kernels.norm_quant import mosaic_sm90 as norm_kernel
from pallas_kernels.norm_quant import reference as norm_reference
from pallas_kernels.weight_only_matmul import (
    mosaic_sm90,
    reference,
    row_sm90,
    weight_only_matmul,
    weight_only_swiglu,
)
from pallas_kernels.weight_only_matmul.cases import Case
from pallas_kernels.weight_only_matmul.config import ONE_ROW, RowConfig, choose_config, takes_one_row
from tests.kernels.helpers import same_bits, thinned
from tests.kernels.interpreter import FIND_RACES, INTERPRET
from tests.kernels.test_weight_only_matmul_mosaic import FORMATS, TOLERANCE, every_code, lower, row_error, shapes

EPS = 1e-5


class Call(NamedTuple):
    case: Case
    config: RowConfig = ONE_ROW
    gated: bool = False  # the case's n is that of both halves
    normed: bool = False

    def inputs(self):
        """Returns x, w, norm, bias, residual."""
        x, w, bias, residual = self.case.inputs()
        norm = normal(np.random.default_rng(1), (self.case.k,), self.case.dtype) if self.normed else None
        return x, w, norm, bias, residual

    def run(self, x, w, norm, bias, residual, interpret=None):
        out_dtype = jnp.dtype(self.case.out_dtype or self.case.dtype)
        options = {"eps": EPS, "gated": self.gated, "config": self.config, "interpret": interpret}
        return row_sm90.product(x, w, norm, bias, residual, out_dtype, **options)

    def expected(self, x, w, norm, bias, residual) -> np.ndarray:
        rows = x if norm is None else norm_reference.norm_quant(x, norm, eps=EPS)[0]
        y = reference.weight_only_matmul(rows, w, bias, residual)
        if not self.gated:
            return y
        gate, up = np.split(y, 2, axis=-1)
        return gate / (1 + np.exp(-gate)) * up

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.case.dtype] * (2 if self.gated else 1)


# All formats; columns that fill whole steps of four warps, some of these, or less than one; rows beyond the last.
INTERPRETED = [
    Call(Case((1,), 32, 4096, "w4a16-g128"), normed=True),
    Call(Case((1,), 32, 1024, "w4a16-g128", residual=True)),
    Call(Case((1,), 64, 5888, "w4a16-g128", "float16"), gated=True, normed=True),
    Call(Case((1,), 40, 5888, "w4a16-g128-zp", bias=True), RowConfig(8)),
    Call(Case((1,), 32, 4352, "w4a16-g32-zp", "float16")),
    Call(Case((1,), 32, 2048, "w4a16-g64", out_dtype="float32"), RowConfig(32), gated=True),
    Call(Case((1,), 32, 1280, "nf4", residual=True, out_dtype="float32"), normed=True),
    Call(Case((1,), 32, 256, "nf4-g128", "float16"), gated=True),
    Call(Case((1,), 32, 2304, "w8a16")),
    Call(Case((1,), 32, 2304, "w8a16-g64-zp", "float16"), RowConfig(8)),
    Call(Case((1,), 32, 640, "w8a16-g32")),
    Call(Case((1,), 32, 640, "uint8-zp"), gated=True),
    Call(Case((1,), 32, 640, "uint8-zp", "float16")),
    Call(Case((1,), 32, 640, "fp8-weight"), RowConfig(8)),
    Call(Case((1,), 32, 768, "fp8-weight", "float16"), RowConfig(32)),
]  # fmt: skip


@pytest.mark.parametrize("call", thinned(INTERPRETED, (0, 2, 3, 4, 5, 6, 7, 9, 10, 11, 14)), ids=str)
def test_interpreted(call):
    inputs = call.inputs()
    out = call.run(*inputs, interpret=FIND_RACES)
    assert out.dtype == (call.case.out_dtype or call.case.dtype)
    assert row_error(out, call.expected(*inputs)) < call.tolerance


@pytest.mark.parametrize("call", [call for call in INTERPRETED if call.normed], ids=str)
def test_the_norm_has_the_bits_of_its_own_kernel(call):
    x, w, norm, *added = call.inputs()
    rows = norm_kernel.norm_quant(x, norm, eps=EPS, interpret=INTERPRET)[0]
    expected = call.run(rows, w, None, *added, interpret=INTERPRET)
    assert same_bits(call.run(x, w, norm, *added, interpret=INTERPRET), expected)


def test_rows_of_a_block_do_not_change_bits():
    x, w, *rest = Call(Case((1,), 64, 1280, "w4a16-g128-zp")).inputs()
    first, *others = (Call(Case((1,), 64, 1280, ""), RowConfig(n)).run(x, w, *rest, INTERPRET) for n in (8, 16, 32))
    assert all(same_bits(first, other) for other in others)


@pytest.mark.parametrize("name", ["w4a16-g64-zp", "nf4", "w8a16-g32"])
def test_scales_of_groups_that_a_quad_of_lanes_cuts_go_with_weights(name):
    """Rounds values of codes, scales and their products to x's dtype; every sum is one of float32."""
    x, w, *_ = Case((1,), 32, 1024, name, out_dtype="float32").inputs()
    codes = reference.decoded(replace(w, scales=jnp.ones_like(w.scales))).astype(x.dtype)
    scales = np.repeat(np.asarray(w.scales).astype(x.dtype), w.format.group, axis=0).T
    weights = (codes.astype(np.float64) * scales.astype(np.float64)).astype(x.dtype)
    expected = np.asarray(x, np.float64) @ weights.astype(np.float64).T
    found = row_sm90.product(x, w, None, None, None, jnp.dtype("float32"), config=ONE_ROW, interpret=INTERPRET)
    assert row_error(found, expected) < 1e-6


@pytest.mark.parametrize(
    ("method", "fault"),
    [
        ("packed_pairs", lambda real: lambda self, words: real(self, words[::-1])),
        ("load_x", lambda real: lambda self, step: real(self, step - 1 if step else 0)),
        ("load_vectors", lambda real: lambda self, step, name: real(self, step, name)[::-1]),
        ("load_row", lambda real: lambda self, step, row: real(self, step, row ^ 1)),
        ("load_row", lambda real: lambda self, step, row: real(self, 0, row)),
        ("product", lambda real: lambda self, rows, x: real(self, rows[::-1], x)),
    ],
    ids=("words", "x of the step before", "scales", "rows", "codes of the first step", "rows of the product"),
)
def test_seeded_faults_are_caught(monkeypatch, method, fault):
    call = Call(Case((1,), 32, 4608, "w4a16-g128-zp"))
    inputs = call.inputs()
    monkeypatch.setattr(row_sm90.Row, method, fault(getattr(row_sm90.Row, method)))
    assert row_error(call.run(*inputs, interpret=INTERPRET), call.expected(*inputs)) > 0.05


def test_what_lies_beyond_the_last_column_is_not_added(monkeypatch):
    """Expects zeros of x where the last columns stand for those beyond."""
    call = Call(Case((1,), 32, 640, "w4a16-g128"))
    inputs = call.inputs()
    monkeypatch.setattr(row_sm90.StreamEmitter, "select", lambda self, condition, a, b: a)
    assert not row_error(call.run(*inputs, interpret=INTERPRET), call.expected(*inputs)) < 0.05


def test_padded_rows_are_not_seen():
    x, w, *_ = Case((1,), 33, 128, "w8a16").inputs()
    out = row_sm90.product(x, w, None, None, None, x.dtype, config=ONE_ROW, interpret=INTERPRET)
    assert out.shape == (1, 33)
    assert row_error(out, reference.weight_only_matmul(x, w, None, None)) < TOLERANCE["bfloat16"]


# QKV, output, gate and up, and down of LLaMA-7B, -3-8B and -13B, and a head.
LARGE = (
    (Case((1,), 12288, 4096, ""), False, True), (Case((1,), 4096, 4096, "", residual=True), False, False),
    (Case((1,), 22016, 4096, ""), True, True), (Case((1,), 4096, 11008, "", residual=True), False, False),
    (Case((1,), 28672, 4096, ""), True, True), (Case((1,), 5120, 13824, "", residual=True), False, False),
    (Case((1,), 32000, 4096, "", out_dtype="float32"), False, True),
)  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_lowers_for_cuda(name):
    for case, gated, normed in LARGE if name == "w4a16-g128" else (LARGE[0], LARGE[2], LARGE[3]):
        call = Call(case, ONE_ROW, gated, normed)
        x, w = shapes(replace_format(case, name))
        norm = jax.ShapeDtypeStruct((case.k,), x.dtype) if normed else None
        residual = jax.ShapeDtypeStruct((1, case.n), x.dtype) if case.residual else None
        text = lower(call.run, x, w, norm, None, residual)
        assert text.count("stablehlo.custom_call @mosaic_gpu") == 1


def replace_format(case: Case, name: str) -> Case:
    return Case(case.leading, case.n, case.k, name, residual=case.residual, out_dtype=case.out_dtype)


def test_operations_take_the_norm_along_where_they_can(monkeypatch):
    """Takes one row's kernel, and norm_quant's before that for several; with xla's gradients."""
    x, w, norm, *_ = Call(Case((1,), 64, 512, "w4a16-g64"), normed=True).inputs()
    plain = partial(weight_only_matmul, w=w, norm=norm, eps=EPS, backend="xla")
    gated = partial(weight_only_swiglu, w=w, norm=norm, eps=EPS, backend="xla")
    for operation in (plain, gated):
        rows = jnp.concatenate([x] * 3)
        assert row_error(operation(rows)[:1], np.asarray(operation(x)).astype(np.float64)) < TOLERANCE["bfloat16"]
    kernel = partial(mosaic_sm90.weight_only_matmul, bias=None, residual=None, eps=EPS, interpret=INTERPRET)
    for gate, operation in ((False, plain), (True, gated)):
        run = lambda x, norm, gate=gate: kernel(x, w, out_dtype=x.dtype, norm=norm, gated=gate)  # noqa: E731
        out, back = jax.vjp(run, x, norm)
        wanted, plain_back = jax.vjp(lambda x, norm, operation=operation: operation(x, norm=norm), x, norm)
        assert row_error(out, np.asarray(wanted).astype(np.float64)) < 3 * TOLERANCE["bfloat16"]
        assert same_bits(back(jnp.ones_like(out)), plain_back(jnp.ones_like(wanted)))


@pytest.mark.parametrize(
    ("rows", "name", "options", "kernels"),
    [
        (1, "w4a16-g128", {}, {"weight_only_row": 1}),
        (1, "w4a16-g128", {"gated": True}, {"weight_only_row_gated": 1}),
        (2, "w4a16-g128", {}, {"norm_quant": 1, "weight_only_matmul": 1}),
        (2, "w4a16-g128", {"gated": True}, {"norm_quant": 1, "weight_only_matmul": 1}),
        (1, "w4a16-g128", {"shuffled": True}, {"norm_quant": 1, "weight_only_row": 1}),
        (1, "w4a16-g128", {"shuffled": True, "gated": True}, {"norm_quant": 1, "weight_only_row": 1}),
    ],
)
def test_kernels_of_a_call(rows, name, options, kernels):
    from collections import Counter

    from tests.kernels_of import kernels_of

    gated = options.get("gated", False)
    case = Case((rows,), 64, 512, name, shuffled=options.get("shuffled", False))
    x, w, *_ = case.inputs()
    operation = weight_only_swiglu if gated else weight_only_matmul
    run = partial(operation, norm=jnp.ones(case.k, x.dtype), eps=EPS, backend="mosaic")
    traced = jax.jit(run).trace(x, w)
    found = kernels_of(traced.jaxpr.jaxpr)
    assert Counter(kernels) == Counter({name: n for name, n in found.items() if not name.startswith("silu")})


def test_what_is_refused():
    x, w, *_ = Case((2,), 40, 512, "w4a16-g128").inputs()
    w8 = Case((1,), 40, 512, "w8a16").inputs()[1]
    for rows, weight, options in (
        (x, w, {}),
        (x[:1], w, {"config": RowConfig(32), "gated": True}),
        (x[:1], w8, {"gated": True}),
    ):
        with pytest.raises(NotImplementedError, match="is for one row of x and a weight"):
            row_sm90.product(rows, weight, None, None, None, x.dtype, **{"config": RowConfig(32), **options})
    with pytest.raises(ValueError, match="rows is 4, expected 8, 16 or 32"):
        RowConfig(4)
    with pytest.raises(ValueError, match=r"norm is float32\[512\], expected bfloat16\[512\]"):
        weight_only_matmul(x, w, norm=jnp.ones(512), eps=EPS)
    odd = Case((2,), 33, 512, "w4a16-g128").inputs()[1]
    with pytest.raises(ValueError, match=r"w has shape \(33, 512\), expected \[2F, K\]"):
        weight_only_swiglu(x, odd)


def test_one_row_chooses_it():
    fmt = parse_weight_format("w4a16-g128")
    assert choose_config(1, 4096, 4096, fmt) == ONE_ROW
    assert choose_config(2, 4096, 4096, fmt) == choose_config(8, 4096, 4096, fmt) != ONE_ROW
    assert takes_one_row(22016, fmt, gated=True)
    assert not takes_one_row(22016, parse_weight_format("fp4"))
    assert not takes_one_row(22016, fmt, gated=True, config=RowConfig(8))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", FORMATS)
def test_gpu_every_code_in_every_place(name, dtype):
    """Picks one column at a time by x: the product is the decoded weight itself, rounded to x's dtype."""
    w = every_code(name)
    x = jnp.eye(256, dtype=dtype)
    expected = np.asarray(decode(w, dtype)).astype(np.float64).T
    run = jax.jit(lambda x: row_sm90.product(x, w, None, None, None, jnp.dtype("float32"), config=ONE_ROW))
    for i in range(256):
        assert (np.asarray(run(x[i : i + 1])).astype(np.float64) == expected[i]).all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("case", "gated", "normed"), LARGE[:4], ids=str)
def test_gpu_at_the_size_of_a_layer(case, gated, normed, name):
    call = Call(replace_format(case, name), ONE_ROW, gated, normed)
    inputs = call.inputs()
    run = jax.jit(call.run)
    out = run(*inputs)
    assert row_error(out, call.expected(*inputs)) < call.tolerance
    assert same_bits(run(*inputs), out)
