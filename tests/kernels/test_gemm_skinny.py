"""Checks the Hopper matmul for few rows: interpreted on the CPU with race detection, lowered for CUDA, run on a GPU."""

import dataclasses
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.hopper.gemm_sm90 import skinny
from pallas_kernels.hopper.gemm_sm90.skinny_config import TUNED, Config, choose_config
from pallas_kernels.hopper.hopper import SHARED_MEMORY
from pallas_kernels.hopper.smem_sm90 import shared_bytes
from tests.kernels.helpers import TOLERANCE, error, same_bits
from tests.kernels.interpreter import FIND_RACES, INTERPRET

EXTRA = ("x_scale", "w_scale", "bias", "residual")


@dataclass(frozen=True)
class Case:
    """Describes one call; `extra` are the optional arguments that it has."""

    m: int
    n: int
    k: int
    dtype: str
    out_dtype: str
    config: Config
    extra: tuple[str, ...] = ()
    bias_dtype: str = "float32"

    def shapes(self) -> tuple[tuple, dict]:
        shape = jax.ShapeDtypeStruct
        extra = {
            "x_scale": shape((self.m,), "float32"),
            "w_scale": shape((self.n,), "float32"),
            "bias": shape((self.n,), self.bias_dtype),
            "residual": shape((self.m, self.n), self.out_dtype),
        }
        arguments = shape((self.m, self.k), self.dtype), shape((self.n, self.k), self.dtype)
        return arguments, {name: extra[name] for name in self.extra}

    def inputs(self, seed: int = 0) -> tuple[tuple, dict]:
        rng = np.random.default_rng(seed)
        arguments, extra = self.shapes()

        def draw(like: jax.ShapeDtypeStruct) -> jax.Array:
            if like.dtype == jnp.int8:
                return jnp.asarray(rng.integers(-127, 127, like.shape, np.int8, endpoint=True))
            return jnp.asarray(rng.standard_normal(like.shape).astype(like.dtype))

        x, w = map(draw, arguments)
        options = {name: draw(like) for name, like in extra.items()}
        size = 5000 if self.dtype == "int8" else 1  # of a product, so that what is added to it counts
        for name in ("x_scale", "w_scale"):
            if name in options:
                sign = np.where(rng.random(options[name].shape) < 0.5, -1, 1)
                scale = sign * rng.uniform(0.5, 1.5, sign.shape) / (self.k**0.5 * size if name == "w_scale" else 1)
                options[name] = jnp.asarray(scale.astype(np.float32))
        return (x, w), options

    def run(self, arguments: tuple, options: dict, **how) -> jax.Array:
        return skinny.gemm(*arguments, **options, out_dtype=jnp.dtype(self.out_dtype), config=self.config, **how)


def formula(arguments, options) -> np.ndarray:
    x, w, options = jax.tree.map(lambda a: np.asarray(a).astype(np.float64), (*arguments, options))
    y = x @ w.T
    y = y * options.get("x_scale", np.ones(len(x)))[:, None] * options.get("w_scale", np.ones(len(w)))[None]
    return y + options.get("bias", 0) + options.get("residual", 0)


def tolerance(case: Case) -> float:
    """Allows for eight-bit floats, which accumulate with some 14 bits on the tensor cores; the interpreter has
    float32."""
    return TOLERANCE[case.out_dtype] if case.dtype != "float8_e4m3fn" else max(TOLERANCE[case.out_dtype], 1e-3)


INTERPRETED = [
    Case(1, 32, 96, "int8", "float32", Config(64, 32), ("w_scale",)),
    Case(3, 64, 256, "int8", "bfloat16", Config(64, 32, ctas=2), EXTRA),
    Case(12, 80, 384, "bfloat16", "float32", Config(64, 32, 256, stages=2, ctas=2), EXTRA, "bfloat16"),
    Case(70, 96, 160, "float16", "float16", Config(128, 48, ctas=1), ("residual",)),
    Case(136, 48, 128, "float8_e4m3fn", "bfloat16", Config(256, 32, ctas=1), ("x_scale", "bias")),
    Case(72, 32, 128, "bfloat16", "bfloat16", Config(64, 16, ctas=3), EXTRA),
]


@pytest.mark.parametrize("case", INTERPRETED, ids=str)
def test_matches_the_formula_without_races(case):
    arguments, options = case.inputs()
    out = jax.block_until_ready(case.run(arguments, options, interpret=FIND_RACES))
    assert out.dtype == case.out_dtype
    assert error(out, formula(arguments, options)) < tolerance(case)


def test_a_row_has_the_same_bits_in_any_company():
    case = Case(16, 32, 256, "bfloat16", "float32", Config(64, 32), ("x_scale", "residual"))
    (x, w), options = case.inputs()
    interpret = INTERPRET
    out = case.run((x, w), options, interpret=interpret)
    some = {name: value[:5] for name, value in options.items()}
    assert same_bits(dataclasses.replace(case, m=5).run((x[:5], w), some, interpret=interpret), out[:5])


@pytest.mark.parametrize(
    ("target", "name", "change"),
    [
        (skinny, "finish", lambda real: lambda *a: real(*a[:3], a[3]._replace(column=32 - a[3].column), a[4])),
        (skinny.Plan, "steps", lambda real: property(lambda plan: real.fget(plan) - 1)),
        (skinny.Plan, "copied", lambda real: property(lambda plan: real.fget(plan) - 8)),
    ],
    ids=("tiles exchanged", "a step less", "rows not copied"),
)
def test_seeded_faults_are_caught(monkeypatch, target, name, change):
    case = Case(64, 64, 256, "bfloat16", "float32", Config(64, 32, ctas=2), ("x_scale", "w_scale"))
    arguments, options = case.inputs()
    monkeypatch.setattr(target, name, change(getattr(target, name)))
    gemm = skinny.gemm.__wrapped__  # past the cache of the jit
    how = {"config": case.config, "interpret": INTERPRET}
    out = gemm(*arguments, **options, out_dtype=jnp.dtype("float32"), **how)
    assert error(out, formula(arguments, options)) > 1e-2


def lowered(case: Case) -> str:
    arguments, options = case.shapes()
    run = partial(skinny.gemm, out_dtype=jnp.dtype(case.out_dtype), config=case.config)
    return jax.jit(run).trace(*arguments, **options).lower(lowering_platforms=("cuda",)).as_text()


LARGER = [
    Case(24, 256, 1024, "int8", "bfloat16", Config(64, 48, 256), EXTRA),
    Case(128, 256, 1088, "bfloat16", "bfloat16", Config(64, 64, 256), ("residual",)),
    Case(9, 96, 4128, "int8", "float32", Config(64, 16, 256), EXTRA),  # 129 steps of 32 bytes, 32 in flight
    Case(200, 512, 512, "float16", "float32", Config(128, 128), ("bias",)),
    Case(256, 352, 1024, "bfloat16", "bfloat16", Config(256, 176), ("residual",)),
    Case(250, 384, 1024, "bfloat16", "bfloat16", Config(128, 192), ("bias", "residual"), "bfloat16"),
    Case(64, 4096, 1088, "float8_e4m3fn", "bfloat16", Config(64, 16), ("x_scale", "w_scale")),
]
TUNED_CASES = [
    Case(m, n, k, "int8" if itemsize == 1 else "bfloat16", "bfloat16", config, EXTRA if itemsize == 1 else EXTRA[3:])
    for (n, k, itemsize), rows in TUNED.items()
    for _, m, config in rows
]


def test_every_kind_of_tile_lowers_for_cuda():
    """Leaves out tuned ones, which test_matmul_mosaic.py and test_scaled_matmul_mosaic.py have."""
    for case in LARGER:
        assert lowered(case).count("stablehlo.custom_call @mosaic_gpu") == 1


def test_the_chosen_configurations_fit():
    """Tries any M, and shapes that were never timed."""
    kernels = set()
    for m in (1, 16, 64, 100, 128, 256):
        for n, k, dtype, out in (
            (12288, 4096, "int8", "bfloat16"), (128256, 4096, "bfloat16", "float32"), (96, 256, "bfloat16", "float32"),
            (28672, 4096, "bfloat16", "bfloat16"), (4096, 14336, "int8", "bfloat16"),
            (6144, 4096, "float16", "float16"), (1024, 11008, "bfloat16", "float32"), (5120, 5120, "int8", "float32"),
        ):  # fmt: skip
            config = choose_config(m, n, k, jnp.dtype(dtype).itemsize, jnp.dtype(out).itemsize)
            extra = {"residual": jnp.dtype(out)}
            if dtype == "int8":
                extra |= dict.fromkeys(("x_scale", "w_scale", "bias"), jnp.dtype("float32"))
            plan = skinny.Plan(m, n, k, jnp.dtype(dtype), jnp.dtype(out), extra, config)
            assert plan.stages() >= min(3, max(plan.steps, 2))
            assert shared_bytes(plan.scratch()) <= SHARED_MEMORY
            kernels.add((plan.config, dtype, out))
    assert len(kernels) > 20


def test_the_estimate_balances_tiles_among_sms():
    """Expects one wave where w is what counts, square tiles where an SM's intake does, full waves of products."""
    assert [choose_config(m, 4096, 11008, 2).columns for m in (1, 64)] == [32, 32]
    assert choose_config(1, 22016, 4096, 1).columns == 176  # 126 tiles
    config = choose_config(256, 4096, 4096, 2)
    assert config.rows * config.columns == 128 * 64  # 128 tiles
    config = choose_config(256, 12288, 4096, 2)
    assert (config.rows, config.columns) == (128, 192)  # 128 tiles


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": 32, "columns": 32}, "rows is 32, expected 64, 128 or 256"),
        ({"rows": 64, "columns": 24}, "columns is 24, expected a multiple of 16 up to 256"),
        ({"rows": 64, "columns": 288}, "columns is 288"),
        ({"rows": 256, "columns": 208}, "256 x 208 sums are more than registers hold"),
        ({"rows": 64, "columns": 32, "step": 64}, "step is 64 bytes, expected a multiple of 128"),
        ({"rows": 64, "columns": 32, "stages": 1}, "stages=1"),
        ({"rows": 64, "columns": 32, "stages": 33}, "stages=33 .* expected 2 to 32"),
    ],
)
def test_bad_configurations_say_what_is_wrong(options, message):
    with pytest.raises(ValueError, match=message):
        Config(**options)


def test_what_does_not_fit_says_so():
    x, w = jnp.zeros((8, 4096), jnp.bfloat16), jnp.zeros((512, 4096), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="step=1024.* needs more shared memory for bfloat16 and float32"):
        skinny.gemm(x, w, out_dtype=jnp.dtype("float32"), config=Config(64, 256, 1024))
    assert skinny.gemm(x[:0], w, out_dtype=jnp.dtype("float32"), config=Config(64, 32)).shape == (0, 512)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*INTERPRETED, *LARGER, *TUNED_CASES], ids=str)
def test_gpu_matches_the_formula(case):
    arguments, options = case.inputs()
    out = case.run(arguments, options)
    assert error(out, formula(arguments, options)) < tolerance(case)
    assert same_bits(out, case.run(arguments, options))
    few = max(case.m // 2, 1)
    some = {name: value[:few] if name in ("x_scale", "residual") else value for name, value in options.items()}
    assert same_bits(case.run((arguments[0][:few], arguments[1]), some), out[:few])


@pytest.mark.gpu
def test_gpu_integer_sums_are_exact():
    """Compares before scaling: in float32 the sums of products of 8 bits over K = 512 are exact."""
    case = Case(40, 512, 512, "int8", "float32", Config(64, 48))
    arguments, options = case.inputs()
    assert np.array_equal(np.asarray(case.run(arguments, options)), formula(arguments, options))
