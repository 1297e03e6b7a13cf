"""Checks the Hopper matmul of one row: interpreted, lowered for CUDA, and run on a GPU."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.bench.cases import normal
from pallas_kernels.formats.quantized_rows import quantize_rows
from pallas_kernels.formats.reference_rows import quantize_rows as quantize_by_definition
from pallas_kernels.hopper.gemm_sm90 import gemv as module
from pallas_kernels.hopper.gemm_sm90.gemv import gemv
from pallas_kernels.hopper.gemm_sm90.gemv_config import GATED, PLAIN, Config, fits, for_int8
from pallas_kernels.int8_matmul import int8_matmul
from pallas_kernels.matmul import matmul, mosaic_sm90, reference
from pallas_kernels.norm_quant import mosaic_sm90 as norm_kernel
from pallas_kernels.norm_quant import norm_quant
from pallas_kernels.norm_quant import reference as norm_reference
from pallas_kernels.scaled_matmul import reference as scaled_reference
from pallas_kernels.scaled_matmul.plain_rows import of_plain_rows
from pallas_kernels.silu_mul_quant import reference as silu_reference
from pallas_kernels.silu_mul_quant import silu_mul_quant
from pallas_kernels.swiglu import mosaic_sm90 as swiglu_kernel
from pallas_kernels.swiglu import reference as swiglu_reference
from pallas_kernels.swiglu import swiglu
from tests.kernels.helpers import TOLERANCE, same_bits, thinned
from tests.kernels.interpreter import FIND_RACES, INTERPRET
from tests.kernels.test_matmul import error

EPS = 1e-5


class Case(NamedTuple):
    n: int  # rows of w; of each half, where the product is gated
    k: int
    dtype: str = "bfloat16"
    gated: bool = False
    normed: bool = False
    added: bool = False
    out_dtype: str | None = None
    int8: bool = False

    def shapes(self):
        """Returns the shapes of `inputs`."""
        rows, dtype, result = self.n * (2 if self.gated else 1), self.dtype, self.out_dtype or self.dtype
        options = {"norm": ((self.k,), dtype)} if self.normed else {}
        options |= {"bias": ((self.n,), dtype), "residual": ((1, self.n), result)} if self.added else {}
        options |= {"w_scale": ((rows,), "float32")} if self.int8 else {}
        shapes = ((1, self.k), dtype), ((rows, self.k), "int8" if self.int8 else dtype)
        x, w = (jax.ShapeDtypeStruct(*each) for each in shapes)
        return x, w, {name: jax.ShapeDtypeStruct(*each) for name, each in options.items()}

    def inputs(self):
        """Returns x, w, and the options of both the kernel and `expected`."""
        rng = np.random.default_rng(self.n + self.k)
        halves = 2 if self.gated else 1
        x, w = normal(rng, (1, self.k), self.dtype), normal(rng, (halves * self.n, self.k), "float32")
        options = {"norm": normal(rng, (self.k,), self.dtype)} if self.normed else {}
        if self.added:
            options["bias"] = normal(rng, (self.n,), self.dtype)
            options["residual"] = normal(rng, (1, self.n), self.out_dtype or self.dtype)
        if self.int8:
            options["w_scale"] = jnp.asarray(rng.uniform(0.5, 1.5, len(w)).astype(np.float32) / (73 * self.k**0.5))
            return x, jnp.asarray(rng.integers(-127, 128, w.shape, np.int8)), options
        return x, (w * self.k**-0.5).astype(self.dtype), options

    def run(self, x, w, options, config, **more):
        out_dtype = jnp.dtype(self.out_dtype or self.dtype)
        return gemv(x, w, **options, eps=EPS, out_dtype=out_dtype, config=config, gated=self.gated, **more)

    @property
    def config(self):
        if self.int8:
            return for_int8(self.n, self.k)
        return GATED if self.gated else PLAIN

    @property
    def tolerance(self):
        """Allows for codes of a norm that is one unit in the last place off: they are other codes."""
        return 2 * TOLERANCE[self.dtype] + (0.01 if self.int8 else 0)

    def expected(self, x, w, options):
        options = dict(options)
        if self.normed:
            x = norm_reference.norm_quant(x, options.pop("norm"), eps=EPS)[0]
        if self.int8:
            rows = quantize_by_definition(np.asarray(x), "int8")
            y = scaled_reference.scaled_matmul(
                rows.values, w, rows.scales, options.pop("w_scale"), options.get("bias"), options.get("residual")
            )
            return silu_reference.silu_mul(y) if self.gated else y
        return swiglu_reference.swiglu(x, w) if self.gated else reference.matmul(x, w, **options)


SMALL = (
    (Case(8, 512), Config(8, 4)),
    (Case(16, 1792, added=True), Config(8, 3)),
    (Case(8, 1280, normed=True, added=True, out_dtype="float32"), Config(4, 2)),
    (Case(4, 2304, "float16", gated=True, normed=True), Config(4, 4)),
    (Case(8, 256, gated=True), Config(8, 4)),
    (Case(8, 2880, normed=True, added=True), Config(8, 4)),
    (Case(4, 320, gated=True, normed=True), Config(4, 4)),
    (Case(16, 1792, normed=True, added=True, int8=True), Config(8, 3)),
    (Case(8, 512, "float16", gated=True, normed=True, int8=True), Config(4, 4)),
    (Case(8, 2816, added=True, int8=True, out_dtype="float32"), Config(8, 4)),
)
# QKV, output, gate and up, and down of LLaMA-7B, -3-8B and -13B, and heads.
LARGE = (
    Case(12288, 4096, normed=True), Case(4096, 4096, added=True), Case(11008, 4096, gated=True, normed=True),
    Case(4096, 11008, added=True), Case(6144, 4096, normed=True), Case(14336, 4096, gated=True, normed=True),
    Case(4096, 14336, added=True), Case(5120, 13824, added=True), Case(15360, 5120, normed=True),
    Case(32000, 4096, normed=True, out_dtype="float32"), Case(5120, 2880, normed=True, added=True),
    Case(12288, 4096, normed=True, int8=True), Case(4096, 4096, added=True, int8=True),
    Case(11008, 4096, gated=True, normed=True, int8=True), Case(4096, 11008, added=True, int8=True),
    Case(4096, 14336, added=True, int8=True),
    Case(32000, 4096, normed=True, out_dtype="float32", int8=True),
)  # fmt: skip


@pytest.mark.parametrize(("case", "config"), SMALL, ids=str)
def test_matches_the_formula_without_races(case, config):
    arguments = case.inputs()
    out = case.run(*arguments, config, interpret=FIND_RACES)
    assert out.shape == (1, case.n)
    assert out.dtype == (case.out_dtype or case.dtype)
    assert error(out, case.expected(*arguments)) < case.tolerance


@pytest.mark.parametrize(("case", "config"), [each for each in SMALL if each[0].normed and not each[0].int8], ids=str)
def test_the_norm_has_the_bits_of_its_own_kernel(case, config):
    x, w, options = case.inputs()
    out = case.run(x, w, options, config, interpret=INTERPRET)
    rows = norm_kernel.norm_quant(x, options.pop("norm"), eps=EPS, interpret=INTERPRET)[0]
    assert same_bits(out, case._replace(normed=False).run(rows, w, options, config, interpret=INTERPRET))


def one_after_the_other(case, x, w, options, backend):
    """Returns what int8 products of one row do at once, by one operation after the other. Interpreted: sums of squares
    have an order, and roundings within the norm may be left out."""
    options = dict(options)
    if case.normed:
        interpreted = partial(norm_kernel.norm_quant, interpret=INTERPRET)
        normalize = interpreted if backend == "xla" else partial(norm_quant, backend=backend)
        rows = normalize(x, options.pop("norm"), eps=EPS, kind="int8")[0]
    else:
        rows = quantize_rows(x, "int8")
    scales = rows.scales, options.pop("w_scale")
    y = int8_matmul(rows.values, w, *scales, **options, out_dtype=case.out_dtype or case.dtype, backend=backend)
    return silu_mul_quant(y, backend=backend) if case.gated else y


@pytest.mark.parametrize(("case", "config"), [each for each in SMALL if each[0].int8], ids=str)
def test_int8_has_the_bits_of_one_operation_after_the_other(case, config):
    x, w, options = case.inputs()
    out = case.run(x, w, options, config, interpret=INTERPRET)
    assert same_bits(out, one_after_the_other(case, x, w, options, "xla"))


@pytest.mark.parametrize(("case", "config"), [SMALL[2], SMALL[5]], ids=("plain", "int8"))
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("_chunks", lambda real: lambda first, count: real(0, count)),
        ("_prepare", lambda real: lambda x, gain, eps, **scratch: real(x, gain, 1.0, **scratch)),
    ],
    ids=("the first chunks again and again", "another eps"),
)
def test_seeded_faults_are_caught(monkeypatch, case, config, name, change):
    arguments = case.inputs()
    monkeypatch.setattr(module, name, change(getattr(module, name)))
    monkeypatch.setattr(module, "gemv", gemv.__wrapped__)  # past the cache of the jit
    options = {"eps": EPS, "out_dtype": jnp.dtype(case.out_dtype or case.dtype)}
    options |= {"config": config, "interpret": INTERPRET}
    x, w, added = arguments
    assert not error(module.gemv(x, w, **added, **options), case.expected(*arguments)) < 0.05


@pytest.mark.parametrize("gated", [False, True])
def test_operations_take_the_norm_along_where_they_can(gated):
    """Takes one row's kernel, and norm_quant's before that for several; with xla's gradients."""
    case = Case(16, 256, gated=gated, normed=True)
    x, w, options = case.inputs()
    for rows in (x, jnp.concatenate([x] * 3)):
        if gated:
            kernel = partial(swiglu_kernel.swiglu, interpret=INTERPRET, eps=EPS)
            plain = partial(swiglu, backend="xla", eps=EPS)
        else:
            kernel = partial(mosaic_sm90.matmul, bias=None, residual=None, out_dtype="bfloat16", interpret=INTERPRET)
            kernel, plain = partial(kernel, eps=EPS), partial(matmul, backend="xla", eps=EPS)
        out, back = jax.vjp(lambda x, w, norm, kernel=kernel: kernel(x, w, norm=norm), rows, w, options["norm"])
        wanted, plain_back = jax.vjp(lambda x, w, norm, plain=plain: plain(x, w, norm=norm), rows, w, options["norm"])
        assert error(out[:1], case.expected(x, w, options)) < case.tolerance
        assert error(wanted[:1], case.expected(x, w, options)) < case.tolerance
        assert same_bits(back(jnp.ones_like(out)), plain_back(jnp.ones_like(wanted)))


@pytest.mark.parametrize("operation", [matmul, swiglu])
def test_rows_of_any_width_have_a_norm_before_it(operation):
    """Takes a width of which norm_quant has no kernel."""
    x, w, norm = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((4, 2864), (64, 2864), (2864,)))
    product = jax.jit(lambda x, w, norm: operation(x, w, norm=norm, eps=EPS, backend="mosaic"))
    text = product.trace(x, w, norm).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 1


@pytest.mark.parametrize("operation", [matmul, swiglu])
def test_a_norm_of_another_shape_or_dtype_is_refused(operation):
    x, w, _ = Case(16, 64).inputs()
    for norm in (jnp.ones(32, "bfloat16"), jnp.ones(64, "float32")):
        with pytest.raises(ValueError, match=r"norm is .*, expected bfloat16\[64\]"):
            operation(x, w, norm=norm, eps=EPS)


def test_configurations_and_what_fits_them():
    assert fits(PLAIN, 4096, 11008)
    assert fits(GATED, 11008, 4096)
    assert fits(PLAIN, 5120, 2880)
    assert not fits(PLAIN, 4096, 1000)
    assert not fits(PLAIN, 4096, 192)
    assert for_int8(4096, 2880) is None
    assert not fits(PLAIN, 4100, 4096)
    for wrong in ({"rows": 2}, {"rows": 6}, {"ahead": 0}):
        with pytest.raises(ValueError, match="expected a multiple of 4, and at least 1"):
            Config(**wrong)


@pytest.mark.parametrize("which", thinned(range(2), (1,)))
def test_every_size_lowers_for_cuda(which):
    for case in LARGE[which::2]:
        arguments = case.shapes()
        run = jax.jit(lambda *arguments, case=case: case.run(*arguments, case.config))
        text = run.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("stablehlo.custom_call @mosaic_gpu") == 1


@pytest.mark.gpu
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_gpu_matches_the_formula(case):
    x, w, options = case.inputs()
    if case.int8:
        run = partial(of_plain_rows, x, w, **options, gated=case.gated, eps=EPS, out_dtype=case.out_dtype)
        assert same_bits(run(), one_after_the_other(case, x, w, options, "mosaic"))
    elif case.gated:
        run = partial(swiglu, x, w, **options, eps=EPS, backend="mosaic")
    else:
        run = partial(matmul, x, w, **options, eps=EPS, out_dtype=case.out_dtype, backend="mosaic")
    out = run()
    assert same_bits(out, case.run(x, w, options, case.config))
    assert error(out, case.expected(x, w, options)) < case.tolerance
    assert same_bits(out, run())
