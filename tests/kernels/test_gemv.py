"""The Hopper product of one row: interpreted, lowered for CUDA, and run where there is a GPU."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.bench.cases import normal
from pallas_kernels.gemm_sm90 import gemv as module
from pallas_kernels.gemm_sm90.gemv import gemv
from pallas_kernels.gemm_sm90.gemv_config import GATED, PLAIN, Config, fits
from pallas_kernels.matmul import matmul, mosaic_sm90, reference
from pallas_kernels.norm_quant import mosaic_sm90 as norm_kernel
from pallas_kernels.norm_quant import reference as norm_reference
from pallas_kernels.swiglu import mosaic_sm90 as swiglu_kernel
from pallas_kernels.swiglu import reference as swiglu_reference
from pallas_kernels.swiglu import swiglu
from tests.kernels.helpers import TOLERANCE, same_bits
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

    def inputs(self):
        """x, w, and the options of both the kernel and `expected`."""
        rng = np.random.default_rng(self.n + self.k)
        halves = 2 if self.gated else 1
        x, w = normal(rng, (1, self.k), self.dtype), normal(rng, (halves * self.n, self.k), "float32")
        options = {"norm": normal(rng, (self.k,), self.dtype)} if self.normed else {}
        if self.added:
            options["bias"] = normal(rng, (self.n,), self.dtype)
            options["residual"] = normal(rng, (1, self.n), self.out_dtype or self.dtype)
        return x, (w * self.k**-0.5).astype(self.dtype), options

    def run(self, x, w, options, config, **more):
        out_dtype = jnp.dtype(self.out_dtype or self.dtype)
        return gemv(x, w, **options, eps=EPS, out_dtype=out_dtype, config=config, gated=self.gated, **more)

    def expected(self, x, w, options):
        options = dict(options)
        if self.normed:
            x = norm_reference.norm_quant(x, options.pop("norm"), eps=EPS)[0]
        return swiglu_reference.swiglu(x, w) if self.gated else reference.matmul(x, w, **options)


SMALL = (
    (Case(8, 512), Config(8, 4)),
    (Case(16, 1792, added=True), Config(8, 3)),
    (Case(8, 1280, normed=True, added=True, out_dtype="float32"), Config(4, 2)),
    (Case(4, 2304, "float16", gated=True, normed=True), Config(4, 4)),
    (Case(8, 256, gated=True), Config(8, 4)),
)
# QKV, output, gate and up, and down of LLaMA-7B, -3-8B and -13B, and heads.
LARGE = (
    Case(12288, 4096, normed=True), Case(4096, 4096, added=True), Case(11008, 4096, gated=True, normed=True),
    Case(4096, 11008, added=True), Case(6144, 4096, normed=True), Case(14336, 4096, gated=True, normed=True),
    Case(4096, 14336, added=True), Case(5120, 13824, added=True), Case(15360, 5120, normed=True),
    Case(32000, 4096, normed=True, out_dtype="float32"),
)  # fmt: skip


@pytest.mark.parametrize(("case", "config"), SMALL, ids=str)
def test_matches_the_formula_without_races(case, config):
    arguments = case.inputs()
    out = case.run(*arguments, config, interpret=FIND_RACES)
    assert out.shape == (1, case.n)
    assert out.dtype == (case.out_dtype or case.dtype)
    assert error(out, case.expected(*arguments)) < 2 * TOLERANCE[case.dtype]


@pytest.mark.parametrize(("case", "config"), [each for each in SMALL if each[0].normed], ids=str)
def test_the_norm_has_the_bits_of_its_own_kernel(case, config):
    x, w, options = case.inputs()
    out = case.run(x, w, options, config, interpret=INTERPRET)
    rows = norm_kernel.norm_quant(x, options.pop("norm"), eps=EPS, interpret=INTERPRET)[0]
    assert same_bits(out, case._replace(normed=False).run(rows, w, options, config, interpret=INTERPRET))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("_chunks", lambda real: lambda first, count: real(0, count)),
        ("_norm", lambda real: lambda x, gain, eps, **scratch: real(x, gain, 1.0, **scratch)),
    ],
    ids=("the first chunks again and again", "another eps"),
)
def test_seeded_faults_are_caught(monkeypatch, name, change):
    case, config = SMALL[2]
    arguments = case.inputs()
    monkeypatch.setattr(module, name, change(getattr(module, name)))
    monkeypatch.setattr(module, "gemv", gemv.__wrapped__)  # past the cache of the jit
    options = {"eps": EPS, "out_dtype": jnp.dtype("float32"), "config": config, "interpret": INTERPRET}
    x, w, added = arguments
    assert not error(module.gemv(x, w, **added, **options), case.expected(*arguments)) < 0.05


@pytest.mark.parametrize("gated", [False, True])
def test_operations_take_the_norm_along_where_they_can(gated):
    """By one row's kernel, and by norm_quant's before that for several; with xla's gradients."""
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
        assert error(out[:1], case.expected(x, w, options)) < 2 * TOLERANCE["bfloat16"]
        assert error(wanted[:1], case.expected(x, w, options)) < 2 * TOLERANCE["bfloat16"]
        assert same_bits(back(jnp.ones_like(out)), plain_back(jnp.ones_like(wanted)))


@pytest.mark.parametrize("operation", [matmul, swiglu])
def test_a_norm_of_another_shape_or_dtype_is_refused(operation):
    x, w, _ = Case(16, 64).inputs()
    for norm in (jnp.ones(32, "bfloat16"), jnp.ones(64, "float32")):
        with pytest.raises(ValueError, match=r"norm is .*, expected bfloat16\[64\]"):
            operation(x, w, norm=norm, eps=EPS)


def test_configurations_and_what_fits_them():
    assert fits(PLAIN, 4096, 11008)
    assert fits(GATED, 11008, 4096)
    assert not fits(PLAIN, 4096, 1000)
    assert not fits(PLAIN, 4100, 4096)
    for wrong in ({"rows": 2}, {"rows": 6}, {"ahead": 0}):
        with pytest.raises(ValueError, match="expected a multiple of 4, and at least 1"):
            Config(**wrong)


def test_every_size_lowers_for_cuda():
    for case in LARGE:
        config = GATED if case.gated else PLAIN
        arguments = jax.eval_shape(case.inputs)
        run = jax.jit(lambda *arguments, case=case, config=config: case.run(*arguments, config))
        text = run.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("stablehlo.custom_call @mosaic_gpu") == 1


@pytest.mark.gpu
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_gpu_matches_the_formula(case):
    x, w, options = case.inputs()
    if case.gated:
        run = partial(swiglu, x, w, **options, eps=EPS, backend="mosaic")
    else:
        run = partial(matmul, x, w, **options, eps=EPS, out_dtype=case.out_dtype, backend="mosaic")
    out = run()
    assert same_bits(out, case.run(x, w, options, GATED if case.gated else PLAIN))
    assert error(out, case.expected(x, w, options)) < 2 * TOLERANCE[case.dtype]
    assert same_bits(out, run())
