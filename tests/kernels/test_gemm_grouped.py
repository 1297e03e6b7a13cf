"""Hopper's products that take scales of groups of columns, and that make them: interpreted on the CPU with race
detection, lowered for CUDA, run on a GPU."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from pallas_kernels.gemm_sm90 import gated_codes, grouped, skinny
from pallas_kernels.gemm_sm90.skinny_config import Config
from pallas_kernels.hopper import SHARED_MEMORY
from pallas_kernels.int8_matmul import int8_matmul
from pallas_kernels.quantized_rows import QuantizedRows, dequantize_rows, quantize_rows
from pallas_kernels.reference_rows import quantize_rows as rows_by_definition
from pallas_kernels.scaled_matmul import reference
from pallas_kernels.scaled_matmul.config import gated_config, grouped_config
from pallas_kernels.silu_mul_quant import mosaic_sm90 as silu_kernel
from pallas_kernels.silu_mul_quant import reference as silu_reference
from pallas_kernels.silu_mul_quant import silu_mul_quant
from pallas_kernels.smem_sm90 import shared_bytes
from tests.kernels.helpers import TOLERANCE, error, same_bits
from tests.kernels.interpreter import FIND_RACES, INTERPRET

BFLOAT16 = jnp.dtype("bfloat16")


def codes(rng: np.random.Generator, *shape: int) -> jax.Array:
    return jnp.asarray(rng.integers(-127, 128, shape, np.int8))


def scales(rng: np.random.Generator, *shape: int, size: float = 1.0) -> jax.Array:
    return jnp.asarray(rng.uniform(0.5, 1.5, shape).astype(np.float32) / np.float32(size))


@dataclass(frozen=True)
class Product:
    """One call of grouped.gemm."""

    m: int
    n: int
    k: int
    group: int
    config: Config
    out_dtype: str = "float32"
    added: bool = True  # bias and residual

    def inputs(self) -> tuple[tuple[jax.Array, jax.Array], dict[str, jax.Array]]:
        rng = np.random.default_rng(self.k)
        x, w = codes(rng, self.m, self.k), codes(rng, self.n, self.k)
        options = {
            "x_scale": scales(rng, self.m, self.k // self.group),
            "w_scale": scales(rng, self.n, size=5000 * self.k**0.5),
        }
        if self.added:
            options["bias"] = jnp.asarray(rng.standard_normal(self.n).astype(np.float32))
            options["residual"] = jnp.asarray(rng.standard_normal((self.m, self.n)).astype(jnp.dtype(self.out_dtype)))
        return (x, w), options

    def run(self, arguments, options, **how) -> jax.Array:
        return grouped.gemm(*arguments, **options, out_dtype=jnp.dtype(self.out_dtype), config=self.config, **how)

    def formula(self, arguments, options) -> np.ndarray:
        named = {"bias": None, "residual": None} | options
        return reference.scaled_matmul(*arguments, **named)


@dataclass(frozen=True)
class Gated:
    """One call of gated_codes.gemm."""

    m: int
    n: int  # columns of the result
    k: int
    group: int
    ctas: int = 132
    dtype: str = "bfloat16"

    @property
    def config(self) -> Config:
        return replace(gated_config(self.group), ctas=self.ctas)

    def inputs(self) -> tuple[jax.Array, ...]:
        rng = np.random.default_rng(self.n)
        x, w = codes(rng, self.m, self.k), codes(rng, 2 * self.n, self.k)
        return x, w, scales(rng, self.m), scales(rng, 2 * self.n, size=2500 * self.k**0.5)

    def run(self, x, w, x_scale, w_scale, gemm=gated_codes.gemm, **how) -> QuantizedRows:
        options = {"group": self.group, "dtype": jnp.dtype(self.dtype), "config": self.config}
        return QuantizedRows(*gemm(x, w, x_scale=x_scale, w_scale=w_scale, **options, **how))

    def by_definition(self, *arguments: jax.Array) -> QuantizedRows:
        """In float64, rounded where the operation says so."""
        y = reference.scaled_matmul(*arguments, None, None).astype(jnp.dtype(self.dtype))
        return rows_by_definition(silu_reference.silu_mul(y).astype(jnp.dtype(self.dtype)), "int8", self.group)


def far(found: QuantizedRows, expected: QuantizedRows) -> float:
    """The larger one of what numbers are off by, in the mean square, and of what scales are. A code that rounds
    elsewhere, of some in ten thousand, is off by a step."""
    numbers, exact = (np.asarray(dequantize_rows(rows)).astype(np.float64) for rows in (found, expected))
    of_scales = error(found.scales, np.asarray(expected.scales).astype(np.float64))
    return max(float(np.linalg.norm(numbers - exact) / np.linalg.norm(exact)), of_scales)


PRODUCTS = [
    Product(1, 32, 128, 128, Config(64, 32)),
    Product(5, 96, 256, 128, Config(64, 32, 256, ctas=2), "bfloat16"),
    Product(12, 48, 192, 64, Config(64, 16, stages=2, ctas=2), added=False),
    Product(72, 48, 384, 128, Config(128, 48, ctas=1), "float16"),
    Product(136, 32, 96, 32, Config(64, 32)),
]
GATED = [Gated(1, 128, 96, 128), Gated(5, 64, 256, 32, ctas=1), Gated(72, 128, 128, 64, dtype="float16")]


@pytest.mark.parametrize("case", PRODUCTS, ids=str)
def test_products_match_the_formula_without_races(case):
    arguments, options = case.inputs()
    out = jax.block_until_ready(case.run(arguments, options, interpret=FIND_RACES))
    assert out.dtype == case.out_dtype
    assert error(out, case.formula(arguments, options)) < TOLERANCE[case.out_dtype]


@pytest.mark.parametrize("case", GATED, ids=str)
def test_codes_match_the_formula_without_races(case):
    arguments = case.inputs()
    rows, expected = case.run(*arguments, interpret=FIND_RACES), case.by_definition(*arguments)
    assert rows.scales.shape == (case.m, case.n // case.group)
    assert far(rows, expected) < 3e-3
    off = np.asarray(rows.values).astype(int) - np.asarray(expected.values)
    assert np.abs(off).max() <= 1
    assert np.count_nonzero(off) <= 0.001 * off.size


def test_codes_have_the_bits_of_one_operation_after_the_other():
    """As the kernels of the product and of SiLU make them: which kernel the number of rows chooses does not show."""
    case = Gated(5, 128, 256, 64)
    x, w, x_scale, w_scale = case.inputs()
    y = skinny.gemm(
        x, w, x_scale=x_scale, w_scale=w_scale, out_dtype=BFLOAT16, config=Config(64, 64), interpret=INTERPRET
    )
    expected = quantize_rows(silu_kernel.silu_mul_quant(y, interpret=INTERPRET), "int8", group=64)
    rows = case.run(x, w, x_scale, w_scale, interpret=INTERPRET)
    assert same_bits(rows.values, expected.values)
    assert same_bits(rows.scales, expected.scales)


@pytest.mark.parametrize("other", [Config(64, 16), Config(128, 32), Config(64, 32, 256)], ids=str)
def test_a_row_has_the_same_bits_in_any_company_and_tile(other):
    case = Product(20, 32, 256, 128, Config(64, 32))
    (x, w), options = case.inputs()
    out = case.run((x, w), options, interpret=INTERPRET)
    some = options | {name: options[name][:5] for name in ("x_scale", "residual")}
    assert same_bits(replace(case, m=5, config=other).run((x[:5], w), some, interpret=INTERPRET), out[:5])


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("steps", lambda real: property(lambda plan: real.fget(plan) - 1)),
        ("copied", lambda real: property(lambda plan: real.fget(plan) - 8)),
        ("in_step", lambda real: property(lambda plan: real.fget(plan) // 2)),
    ],
    ids=("a step less", "rows not copied", "every other group"),
)
def test_seeded_faults_of_products_are_caught(monkeypatch, name, change):
    case = Product(64, 32, 512, 128, Config(64, 32, 256))
    arguments, options = case.inputs()
    monkeypatch.setattr(grouped.Plan, name, change(getattr(grouped.Plan, name)))
    how = {"config": case.config, "interpret": INTERPRET}
    out = grouped.gemm.__wrapped__(*arguments, **options, out_dtype=jnp.dtype("float32"), **how)
    assert error(out, case.formula(arguments, options)) > 1e-2


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("scale_of", lambda real: lambda peak, kind: real(peak, kind) * 1.01),
        ("silu_mul", lambda real: lambda gate, up: real(up, gate)),
        ("codes", lambda real: lambda x, inverse, kind: real(x, inverse, kind) + jnp.int8(1)),
        (
            "copy_scales",
            lambda real: lambda plan, refs: real(plan, refs._replace(w_scale=refs.w_scale.at[pl.ds(1, 127)])),
        ),
    ],
    ids=("larger scales", "halves exchanged", "codes off by one", "scales of the next column"),
)
def test_seeded_faults_of_codes_are_caught(monkeypatch, name, change):
    case = Gated(8, 64, 128, 64)
    arguments = case.inputs()
    monkeypatch.setattr(gated_codes, name, change(getattr(gated_codes, name)))
    rows = case.run(*arguments, gemm=gated_codes.gemm.__wrapped__, interpret=INTERPRET)
    assert far(rows, case.by_definition(*arguments)) > 9e-3


LARGER = [
    Product(m, n, k, group, grouped_config(m, n, k), "bfloat16")
    for m, n, k, group in (
        (2, 4096, 4096, 128), (64, 4096, 11008, 128), (200, 4096, 4096, 128), (33, 2048, 8192, 64), (600, 256, 704, 64),
        (16, 8192, 28672, 128), (40, 1056, 1056, 32),
    )
]  # fmt: skip
LARGER_GATED = [
    Gated(2, 11008, 4096, 128), Gated(64, 11008, 4096, 128), Gated(33, 704, 256, 64), Gated(64, 1056, 4096, 32),
    Gated(16, 28672, 8192, 128, dtype="float16"),
]  # fmt: skip


def shapes(tree):
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tree)


@pytest.mark.parametrize("case", [*LARGER, *LARGER_GATED], ids=str)
def test_every_kind_of_tile_lowers_for_cuda_and_fits(case):
    arguments = jax.eval_shape(case.inputs)
    lowered = jax.jit(case.run).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert lowered.count("stablehlo.custom_call @mosaic_gpu") == 1
    int8, extra = jnp.dtype("int8"), {"w_scale": jnp.dtype("float32"), "bias": jnp.dtype("float32")}
    if isinstance(case, Product):
        sizes = case.m, case.n, case.k, int8, BFLOAT16, extra | {"residual": BFLOAT16}, case.config
        plan = grouped.Plan(*sizes, group=case.group)
    else:
        plan = gated_codes.Plan(case.m, case.n, case.k, int8, int8, {}, case.config, gated=True)
    assert plan.stages() >= min(4, plan.steps)
    assert shared_bytes(plan.scratch()) <= SHARED_MEMORY


@pytest.mark.parametrize(("k", "stages"), [(128, 2), (256, 2), (1024, 4), (4096, 8)])
def test_scales_take_stages_only_where_memory_is_short(k, stages):
    sizes = 64, 4096, k, jnp.dtype("int8"), BFLOAT16, {}, Config(64, 32, 256)
    assert grouped.Plan(*sizes, group=128).stages() == stages


@pytest.mark.parametrize("case", [*GATED, *LARGER_GATED], ids=str)
def test_scales_of_rows_that_do_not_exist_have_a_place(case):
    """64 scales of a group are copied out as one run of bytes: the interpreter cuts it where the group's row ends, a
    GPU writes on, over scales of the next group."""
    arguments = jax.eval_shape(case.inputs)
    lowered = jax.jit(case.run).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    (call,) = (line for line in lowered.splitlines() if "stablehlo.custom_call @mosaic_gpu" in line)
    assert call.endswith(f"tensor<{case.n // case.group}x{-(-case.m // 64) * 64}xf32>)")


def test_rows_that_no_warpgroup_would_have_are_refused():
    with pytest.raises(AssertionError, match="a warpgroup has 64 rows"):
        jax.eval_shape(lambda: replace(PRODUCTS[0], config=Config(256, 32)).run(*PRODUCTS[0].inputs()))


def test_no_rows():
    (x, w), options = Product(1, 32, 128, 128, Config(64, 32), added=False).inputs()
    out = grouped.gemm(
        x[:0], w, **options | {"x_scale": options["x_scale"][:0]}, out_dtype=BFLOAT16, config=Config(64, 32)
    )
    assert out.shape == (0, 32)
    x, w, x_scale, w_scale = Gated(1, 128, 96, 128).inputs()
    rows = Gated(0, 128, 96, 128).run(x[:0], w, x_scale[:0], w_scale)
    assert (rows.values.shape, rows.scales.shape) == ((0, 128), (0, 1))


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*PRODUCTS, *LARGER], ids=str)
def test_gpu_products_match_the_formula(case):
    arguments, options = case.inputs()
    out = case.run(arguments, options)
    assert error(out, case.formula(arguments, options)) < TOLERANCE[case.out_dtype]
    assert same_bits(out, case.run(arguments, options))
    few = max(case.m // 2, 1)
    some = {name: value[:few] if name in ("x_scale", "residual") else value for name, value in options.items()}
    for config in (case.config, Config(64, 32), Config(128, 64)):
        assert same_bits(replace(case, config=config).run((arguments[0][:few], arguments[1]), some), out[:few])


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*GATED, *LARGER_GATED], ids=str)
def test_gpu_codes_have_the_bits_of_one_operation_after_the_other(case):
    x, w, x_scale, w_scale = arguments = case.inputs()
    rows, again = case.run(*arguments), case.run(*arguments)
    assert far(rows, case.by_definition(*arguments)) < 3e-3
    assert same_bits(rows.values, again.values)
    assert same_bits(rows.scales, again.scales)
    if case.n % 128 == 0:  # of other widths silu_mul_quant has no kernel
        y = int8_matmul(x, w, x_scale, w_scale, out_dtype=case.dtype, backend="mosaic")
        expected = quantize_rows(silu_mul_quant(y, backend="mosaic"), "int8", group=case.group)
        assert same_bits(rows.values, expected.values)
        assert same_bits(rows.scales, expected.scales)
