"""Checks swiglu on every backend: from the formula, interpreted with race detection, lowered for CUDA, run on a GPU."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.bench import layers as layers_bench
from pallas_kernels.hopper.gemm_sm90 import skinny
from pallas_kernels.hopper.gemm_sm90.skinny_config import Config, choose_config
from pallas_kernels.swiglu import bench, mosaic_sm90, reference, swiglu
from pallas_kernels.swiglu.cases import BENCH_CASES, CASES, Case
from pallas_kernels.swiglu.config import FASTER, check_faster, check_supported
from tests.kernels.helpers import TOLERANCE, error, same_bits
from tests.kernels.interpreter import FIND_RACES, INTERPRET

KERNEL = [case for case in CASES if case.dtype != "float32"]
MANY = [Case((m,), 11008, 4096, "bfloat16") for m in (300, 512)]  # rows, of which the kernel is the choice too


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_the_formula(case):
    x, w = case.inputs()
    out, expected = swiglu(x, w), reference.swiglu(x, w)
    assert out.shape == (*case.leading, case.width)
    assert out.dtype == case.dtype
    assert error(out, expected) < 2 * TOLERANCE[case.dtype]  # products are rounded too
    assert same_bits(out, swiglu(x, w))


def test_the_formula_takes_any_gate():
    x, w = np.eye(1), np.array([[-1e4], [2.0]])
    assert reference.swiglu(x, w) == pytest.approx(0.0)
    assert reference.swiglu(x, -w) == pytest.approx(-2e4)


@pytest.mark.parametrize(
    ("case", "config"),
    [(KERNEL[1], Config(64, 48, ctas=2)), (KERNEL[2], Config(128, 32, ctas=1))],
    ids=str,
)
def test_kernel_matches_the_formula_without_races(case, config):
    x, w = case.inputs()
    out = mosaic_sm90.swiglu(x, w, config, FIND_RACES)
    assert out.shape == (*case.leading, case.width)
    assert out.dtype == case.dtype
    assert error(out, reference.swiglu(x, w)) < TOLERANCE[case.dtype]


@pytest.mark.parametrize(
    ("target", "name", "change"),
    [
        (skinny, "silu_mul", lambda real: lambda gate, up: real(up, gate)),
        (skinny, "copy_operand", lambda real: lambda *a: real(*a[:5])),
    ],
    ids=("gate and up exchanged", "no up"),
)
def test_seeded_faults_are_caught(monkeypatch, target, name, change):
    case, config = Case((3,), 32, 256, "bfloat16"), Config(64, 32)
    x, w = case.inputs()
    if name == "copy_operand":  # a barrier that waits for up's copy would wait forever
        monkeypatch.setattr(skinny.plgpu, "Barrier", lambda num_arrivals=1, **more: barrier(min(num_arrivals, 2), more))
    monkeypatch.setattr(target, name, change(getattr(target, name)))
    gemm = skinny.gemm.__wrapped__  # past the cache of the jit
    how = {"config": config, "gated": True, "interpret": INTERPRET}
    assert not error(gemm(x, w, out_dtype=jnp.dtype("float32"), **how), reference.swiglu(x, w)) < 1e-2


def barrier(num_arrivals: int, more: dict, make=plgpu.Barrier):
    return make(num_arrivals=num_arrivals, **more)


def test_gradients_are_those_of_plain_jnp():
    x, w = Case((3,), 32, 64, "bfloat16").inputs()
    gradient = jnp.ones((3, 32), jnp.bfloat16)
    kernel = jax.vjp(lambda x, w: mosaic_sm90.swiglu(x, w, Config(64, 32), INTERPRET), x, w)[1]
    assert same_bits(kernel(gradient), jax.vjp(lambda x, w: swiglu(x, w, backend="xla"), x, w)[1](gradient))


def lowered(case: Case, config: Config | None = None) -> str:
    x, w = (jax.ShapeDtypeStruct(shape, case.dtype) for shape in ((*case.leading, case.k), (2 * case.width, case.k)))
    run = jax.jit(lambda x, w: mosaic_sm90.swiglu(x, w, config))
    return run.trace(x, w).lower(lowering_platforms=("cuda",)).as_text()


def test_every_configuration_lowers_for_cuda():
    sizes = {case: (case.leading[0], 2 * case.width, case.k, 2) for case in BENCH_CASES}
    chosen = {choose_config(*size): case for case, size in sizes.items() if case.width == BENCH_CASES[0].width}
    for case in (KERNEL[0], *chosen.values(), *MANY):
        assert lowered(case).count("stablehlo.custom_call @mosaic_gpu") == 1


def test_tiles_to_tune_with_fit_and_are_others():
    for case in BENCH_CASES:
        found = list(bench.candidates(case))
        assert len(set(found)) == len(found)
        for config in found:
            sizes = case.leading[0], case.width, case.k
            plan = skinny.Plan(*sizes, jnp.dtype("bfloat16"), jnp.dtype("bfloat16"), {}, config, gated=True)
            assert plan.stages() >= 2


def test_the_faster_backend_is_the_one_that_was_measured_or_should_be():
    def choice(m: int, f: int, k: int, dtype="bfloat16") -> str:
        try:
            check_faster(*(jax.ShapeDtypeStruct(shape, dtype) for shape in ((m, k), (2 * f, k))))
        except NotImplementedError:
            return "two"
        return "one"

    assert choice(8, 512, 256) == choice(257, 4096, 2048) == choice(1, 8192, 2064) == "two"
    assert choice(1, 8192, 2048) == choice(256, 8192, 2048) == choice(2, 8192, 2064) == "one"
    for (f, k), (low, high) in FASTER.items():
        around = {m: choice(m, f, k) for m in (low - 1, low, high, high + 1) if m}
        assert around == {m: "one" if low <= m <= high else "two" for m in around}
        assert choice(low, f, k, "float16") == "two"


def test_bad_arguments_say_what_is_wrong():
    x, w = Case((5,), 32, 64, "bfloat16").inputs()
    shapes = [jax.ShapeDtypeStruct(shape, x.dtype) for shape in ((513, 64), (5, 64), (48, 64), (64, 64))]
    for error_type, message, call in (
        (
            ValueError,
            r"x has shape \(5, 64\) and w \(64, 63\), expected \[..., K\] and \[2F",
            lambda: swiglu(x, w[:, 1:]),
        ),
        (ValueError, r"w \(63, 64\), expected", lambda: swiglu(x, w[1:])),
        (ValueError, "w has dtype float32, expected bfloat16 as x has", lambda: swiglu(x, w.astype(jnp.float32))),
        (ValueError, "unknown backend 'pallas'", lambda: swiglu(x, w, backend="pallas")),
        (NotImplementedError, "x has 513 rows; .* at most 512", lambda: check_supported(shapes[0], shapes[3])),
        (NotImplementedError, "supports F in multiples of 16", lambda: check_supported(shapes[1], shapes[2])),
        (NotImplementedError, "no float32 swiglu", lambda: check_supported(*CASES[-1].inputs())),
    ):
        with pytest.raises(error_type, match=message):
            call()


def test_benchmark_has_a_row_for_each_way_and_bars_against_two_kernels(monkeypatch, tmp_path):
    monkeypatch.setattr(layers_bench, "copy_bandwidth", lambda: 4e12)
    monkeypatch.setattr(bench, "BENCH_SHAPES", ((64, 128), (96, 128)))
    monkeypatch.setattr(layers_bench, "layers_for", lambda w: 2)
    times = lambda runs: [10.0 for run in runs if jax.block_until_ready(run())]  # noqa: E731
    monkeypatch.setattr(layers_bench, "device_us_of_each", times)
    assert bench.main(["--results", str(tmp_path), "--rows", "16", "--widths", "64"]) == 0
    (path,) = tmp_path.glob("*.json")
    found = {row.get("peer"): row for row in json.loads(path.read_text())["rows"]}
    assert found["default"]["us"] == found["xla"]["us"] == 5.0
    assert "error" in found["mosaic"]  # a CPU has no Hopper kernels
    shape = {"M": 1, "K": 8, "F": 8, "gb_s": 1000, "tflop_s": 1}
    rows = [{"peer": peer, **shape, "us": us} for peer, us in (("mosaic", 4.0), ("default", 5.0), ("xla", 4.5))]
    (bar,) = bench.bars(rows)
    assert (bar["value"], bar["bar"], bar["met"]) == (4.0, 4.5, True)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*KERNEL, *BENCH_CASES[:7], *MANY], ids=str)
def test_gpu_matches_the_formula(case):
    x, w = case.inputs()
    out = swiglu(x, w, backend="mosaic")
    assert error(out, reference.swiglu(x, w)) < 1.5 * TOLERANCE[case.dtype]  # 16 values in one of them
    assert same_bits(out, swiglu(x, w, backend="mosaic"))
