"""The Hopper product for few rows with the norm of its rows inside: interpreted on the CPU with race detection, lowered
for CUDA, run on a GPU."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from pallas_kernels.backends import TARGET, UNTRIED
from pallas_kernels.bench.cases import normal
from pallas_kernels.gemm_sm90 import skinny
from pallas_kernels.gemm_sm90.skinny_config import Config, choose_config, takes_norm
from pallas_kernels.hopper import SHARED_MEMORY
from pallas_kernels.matmul import matmul, mosaic_sm90
from pallas_kernels.matmul import reference as matmul_reference
from pallas_kernels.norm_quant.reference import normalize
from pallas_kernels.smem_sm90 import shared_bytes
from pallas_kernels.swiglu import mosaic_sm90 as swiglu_kernel
from pallas_kernels.swiglu import reference as swiglu_reference
from pallas_kernels.swiglu import swiglu
from tests.kernels.helpers import TOLERANCE, error, same_bits
from tests.kernels.interpreter import FIND_RACES, INTERPRET
from tests.kernels_of import kernels_of

EPS = 1e-5
BF16 = jnp.dtype("bfloat16")


@dataclass(frozen=True)
class Case:
    """One call: x [m, k], w [n, k], or [2n, k] where the product is gated."""

    m: int
    n: int
    k: int
    config: Config
    gated: bool = False
    added: bool = False
    out_dtype: str = "bfloat16"

    def shapes(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        rows = self.n * (2 if self.gated else 1)
        return tuple(jax.ShapeDtypeStruct(shape, BF16) for shape in ((self.m, self.k), (rows, self.k), (self.k,)))

    def inputs(self) -> tuple[jax.Array, jax.Array, jax.Array, dict[str, jax.Array]]:
        """x, of which row t is smaller by 2^-(t mod 9), w, norm, and what is added."""
        rng = np.random.default_rng(self.m + self.n + self.k)
        x, w, norm = (normal(rng, each.shape, "float32") for each in self.shapes())
        sizes = np.exp2(-(np.arange(self.m) % 9)).astype(np.float32)[:, None]
        added = {}
        if self.added:
            added = {"bias": normal(rng, (self.n,), BF16), "residual": normal(rng, (self.m, self.n), self.out_dtype)}
        return (x * sizes).astype(BF16), (w * self.k**-0.5).astype(BF16), norm.astype(BF16), added

    def run(self, x: jax.Array, w: jax.Array, norm: jax.Array, added: dict[str, jax.Array], **how: Any) -> jax.Array:
        options = {"eps": EPS, "out_dtype": jnp.dtype(self.out_dtype), "config": self.config, "gated": self.gated}
        return how.pop("gemm", skinny.gemm)(x, w, norm=norm, **added, **options, **how)

    @property
    def tolerance(self) -> float:
        """x * norm is rounded, and the result."""
        return 2 * TOLERANCE["bfloat16"]


def formula(x: jax.Array, w: jax.Array, norm: jax.Array, added: dict[str, jax.Array]) -> np.ndarray:
    rows = normalize(x, EPS) * np.asarray(norm).astype(np.float64)
    return matmul_reference.matmul(rows, w, **added)


def expected(case: Case, *arguments: Any) -> np.ndarray:
    if not case.gated:
        return formula(*arguments)
    x, w, norm, _ = arguments
    return swiglu_reference.swiglu(normalize(x, EPS) * np.asarray(norm).astype(np.float64), w)


INTERPRETED = [
    Case(2, 32, 128, Config(64, 32)),
    Case(12, 80, 192, Config(64, 32, 256, stages=2, ctas=2), added=True, out_dtype="float32"),  # half a step past K
    Case(64, 48, 384, Config(64, 16, ctas=1), added=True),
    Case(9, 40, 256, Config(64, 32, stages=3, ctas=2), gated=True),
]


@pytest.mark.parametrize("case", INTERPRETED, ids=str)
def test_matches_the_formula_without_races(case):
    arguments = case.inputs()
    out = jax.block_until_ready(case.run(*arguments, interpret=FIND_RACES))
    assert out.dtype == case.out_dtype
    assert error(out, expected(case, *arguments)) < case.tolerance


def test_a_row_has_the_same_bits_in_any_company_and_with_any_tile():
    """Each result is one product, so that only the norm's sums could differ."""
    case = Case(16, 64, 256, Config(64, 32), out_dtype="float32")
    x, _, norm, added = case.inputs()
    w = jnp.asarray(np.eye(case.n, case.k, 70), BF16)

    def run(x: jax.Array, config: Config = case.config) -> jax.Array:
        return replace(case, config=config).run(x, w, norm, added, interpret=INTERPRET)

    out = run(x)
    assert np.count_nonzero(out) == out.size
    assert same_bits(run(x[:5]), out[:5])
    for config in (Config(64, 16, 256, stages=2), Config(64, 64, 512, ctas=1)):
        assert same_bits(run(x, config), out)


def test_registers_of_a_product_are_written_once_the_one_before_was_waited_for():
    """What the interpreter doesn't see: to it, registers are values."""

    def bodies(jaxpr: Any) -> Iterator[Any]:
        if any(each.primitive.name == "wgmma_ref" for each in jaxpr.eqns):
            yield jaxpr
        for each in jaxpr.eqns:
            for inner in jaxprs_in_params(each.params):
                yield from bodies(inner)

    case = INTERPRETED[0]
    (body,) = bodies(jax.make_jaxpr(lambda x, w, norm: case.run(x, w, norm, {}))(*case.shapes()).jaxpr)
    order = [each.primitive.name for each in body.eqns]
    product = order.index("wgmma_ref")
    operand = next(i for i, each in enumerate(body.eqns) if body.eqns[product].invars[1] in each.outvars)
    values = next(i for i, each in enumerate(body.eqns) if body.eqns[operand].invars[0] in each.outvars)
    assert order[values] == "optimization_barrier"
    assert any(each.primitive.name == "wgmma_wait" and each.params["n"] == 0 for each in body.eqns[:values])


def without_weight(real):
    return lambda x, norm, squares: (skinny.plgpu.load(x, layout=skinny.LAYOUT), real(x, norm, squares)[1])


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("weigh", lambda real: lambda x, norm, squares: real(x, norm, 0 * squares)),
        ("weigh", without_weight),
        ("Plan", lambda real: lambda *sizes: real(*sizes[:-1], 1.0)),
    ],
    ids=("the last step's squares alone", "no weight", "another eps"),
)
def test_seeded_faults_are_caught(monkeypatch, name, change):
    case = INTERPRETED[2]
    arguments = case.inputs()
    monkeypatch.setattr(skinny, name, change(getattr(skinny, name)))
    out = case.run(*arguments, gemm=skinny.gemm.__wrapped__, interpret=INTERPRET)  # past the cache of the jit
    assert not error(out, expected(case, *arguments)) < 0.05


@pytest.mark.parametrize("gated", [False, True])
def test_operations_take_the_norm_along_with_gradients_of_xla(gated):
    case = Case(3, 32, 128, Config(64, 32), gated)
    x, w, norm, added = case.inputs()
    options: dict[str, Any] = {"norm_inside": True, "interpret": INTERPRET, "eps": EPS}
    if gated:
        kernel, plain = partial(swiglu_kernel.swiglu, **options), partial(swiglu, backend="xla", eps=EPS)
    else:
        options |= {"bias": None, "residual": None, "out_dtype": BF16}
        kernel, plain = partial(mosaic_sm90.matmul, **options), partial(matmul, backend="xla", eps=EPS)
    assert kernels_of(jax.make_jaxpr(lambda *a: kernel(*a[:2], norm=a[2]))(x, w, norm).jaxpr).total() == 1
    out, back = jax.vjp(lambda x, w, norm: kernel(x, w, norm=norm), x, w, norm)
    plain_back = jax.vjp(lambda x, w, norm: plain(x, w, norm=norm), x, w, norm)[1]
    assert error(out, expected(case, x, w, norm, added)) < case.tolerance
    assert same_bits(back(jnp.ones_like(out)), plain_back(jnp.ones_like(out)))


@pytest.mark.parametrize(
    ("m", "dtype", "backend", "inside"),
    [
        (2, "bfloat16", UNTRIED, True),
        (64, "bfloat16", UNTRIED, True),
        (64, "bfloat16", "hopper", False),
        (64, "bfloat16", "deterministic", False),
        (65, "bfloat16", UNTRIED, False),
    ],
)
def test_who_takes_the_norm_along(monkeypatch, m, dtype, backend, inside):
    x, norm = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((m, 4096), (4096,)))
    for operation, rows, gated in ((matmul, 12288, ""), (swiglu, 22016, "_gated")):
        w = jax.ShapeDtypeStruct((rows, 4096), dtype)
        run = partial(operation, eps=EPS, backend=backend)
        monkeypatch.setenv(TARGET, "9.0")
        found = kernels_of(jax.make_jaxpr(lambda x, w, norm, run=run: run(x, w, norm=norm))(x, w, norm).jaxpr)
        assert found == ({f"gemm_skinny_norm{gated}": 1} if inside else {f"gemm_skinny{gated}": 1, "norm_quant": 1})


def test_what_keeps_a_norm_outside():
    """float16, in which x * norm may be no number; rows of several warpgroups; steps of K that no copy aligns with."""
    assert takes_norm(Config(64, 32), 64, 4096, "bfloat16")
    assert not takes_norm(Config(64, 32), 64, 4096, "float16")
    assert not takes_norm(Config(64, 32), 65, 4096, "bfloat16")
    assert not takes_norm(Config(128, 32), 64, 4096, "bfloat16")
    assert not takes_norm(Config(64, 32), 64, 4080, "bfloat16")
    with pytest.raises(AssertionError, match="an operation of its own"):
        replace(INTERPRETED[0], config=Config(128, 32)).run(*INTERPRETED[0].inputs(), interpret=INTERPRET)


# QKV, gate and up of LLaMA 7B, -3-8B and 13B, and a K of half a step.
LARGE = [
    Case(m, n, k, choose_config(m, (2 if gated else 1) * n, k, 2), gated)
    for n, k, gated in (
        (12288, 4096, False), (11008, 4096, True), (6144, 4096, False), (14336, 4096, True),
        (15360, 5120, False), (13824, 5120, True), (4096, 192, False),
    )
    for m in (2, 4, 16, 64)
]  # fmt: skip


def test_every_size_lowers_for_cuda_and_fits():
    for case in LARGE:
        sizes = case.m, case.n, case.k, BF16, BF16, {"norm": BF16}, case.config
        assert shared_bytes(skinny.Plan(*sizes, case.gated).scratch()) <= SHARED_MEMORY
    for case in LARGE[::3]:
        run = jax.jit(lambda x, w, norm, case=case: case.run(x, w, norm, {}))
        text = run.trace(*case.shapes()).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("stablehlo.custom_call @mosaic_gpu") == 1


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*INTERPRETED, *LARGE], ids=str)
def test_gpu_matches_the_formula(case):
    x, w, norm, added = case.inputs()
    out = case.run(x, w, norm, added)
    assert error(out, expected(case, x, w, norm, added)) < case.tolerance
    for _ in range(10):  # x goes through registers, which the products before have read by then
        assert same_bits(out, case.run(x, w, norm, added))
    few = max(case.m // 2, 1)
    some = {name: value[:few] if name == "residual" else value for name, value in added.items()}
    assert same_bits(case.run(x[:few], w, norm, some), out[:few])
