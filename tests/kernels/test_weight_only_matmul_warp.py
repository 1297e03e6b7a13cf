"""Checks products by single warps from the ring. They are interpreted on the CPU with race detection, lowered for CUDA,
and run on a GPU."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.formats.quantized_weights import decode
from pallas_kernels.formats.weight_formats import parse_weight_format
from pallas_kernels.weight_only_matmul import mosaic_sm90, reference, warp_sm90
from pallas_kernels.weight_only_matmul.cases import Case
from pallas_kernels.weight_only_matmul.config import ONE_ROW, Config, candidates, choose_config
from tests.kernels.helpers import same_bits, thinned
from tests.kernels.interpreter import FIND_RACES, INTERPRET
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

WARP = Config(fold=2, warpgroups=1, stages=3, ctas=2, by_warp=True)
FORMATS = ("w4a16-g32", "w4a16-g128", "w4a16-g64-zp", "nf4")

# All groups; columns and rows that end within a stage and a tile; a ring that goes round, and tiles that follow.
INTERPRETED = [
    (Case((1,), 64, 1024, "w4a16-g128", residual=True), WARP),
    (Case((13,), 160, 1280, "w4a16-g128-zp"), replace(WARP, tokens=16, row_tiles=2, warpgroups=2)),
    (Case((8,), 96, 2304, "w4a16-g64", "float16"), replace(WARP, stages=2, warpgroups=3)),
    (Case((16,), 96, 768, "w4a16-g32-zp", out_dtype="float32"), replace(WARP, tokens=16, row_tiles=3, split=3)),
    (Case((7,), 64, 512, "w4a16-g32", "float16", bias=True), replace(WARP, fold=1)),
    (Case((3,), 64, 768, "w4a16-g128", "float16"), replace(WARP, fold=1, warpgroups=2)),
    (Case((32,), 64, 512, "w4a16-g64-zp"), replace(WARP, tokens=32, fold=1, row_tiles=2)),
    (Case((5,), 64, 768, "nf4", out_dtype="float32"), replace(WARP, row_tiles=4)),
    (Case((20,), 32, 512, "nf4-g128", "float16"), replace(WARP, tokens=24, fold=1)),
    (Case((2,), 32, 256, "w4a16-g128"), replace(WARP, warpgroups=2, row_tiles=3)),
]


@pytest.mark.parametrize(("case", "config"), INTERPRETED, ids=str)
def test_interpreted(case, config):
    check_interpreted(case, config)


@pytest.mark.parametrize("name", ["w4a16-g128", "w4a16-g32-zp", "nf4"])
def test_same_bits_again_and_in_other_company(name):
    check_company(Case((8,), 64, 1280, name), WARP)


def test_how_tiles_are_cut_does_not_change_bits():
    case = Case((8,), 96, 1280, "w4a16-g64-zp")
    x, w, *_ = case.inputs()
    first, *others = (
        interpreted(x, w, None, None, case, replace(WARP, **options))
        for options in ({}, {"tokens": 16, "row_tiles": 2}, {"warpgroups": 3, "stages": 2}, {"tokens": 32, "ctas": 3})
    )
    assert all(same_bits(first, other) for other in others)


@pytest.mark.parametrize("name", thinned(["w4a16-g128", "w4a16-g32-zp", "nf4"], (0, 1)))
def test_a_row_has_the_same_bits_from_two_rows_on(name):
    """Tries up to 16 rows, or 32 with groups of 128: by what is chosen for each number of rows."""
    case = Case((32 if name.endswith("g128") else 16,), 64, 1280, name)
    x, w, *_ = case.inputs()
    whole, *parts = (
        interpreted(x[:m], w, None, None, case, choose_config(m, 64, 1280, w.format)) for m in (len(x), 2, 9, 16)
    )
    assert all(same_bits(part, whole[: len(part)]) for part in parts)


def test_padded_rows_are_not_seen():
    case = Case((2,), 33, 256, "w4a16-g128-zp")
    x, w, *_ = case.inputs()
    poisoned = replace(w, scales=w.scales.at[:, 33:].set(jnp.nan))
    assert same_bits(interpreted(x, poisoned, None, None, case, WARP), interpreted(x, w, None, None, case, WARP))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_offsets_are_taken_off_as_they_were_added(dtype):
    """Takes x of one sign, which has large sums, of which little is left."""
    case = Case((4,), 32, 1024, "w4a16-g128-zp", dtype, out_dtype="float32")
    x, w, *_ = case.inputs()
    x = jnp.abs(x) + 4
    expected = reference.weight_only_matmul(x, w, None, None)
    assert row_error(interpreted(x, w, None, None, case, WARP), expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("name", FORMATS)
def test_lowers_for_cuda(name):
    wide = replace(WARP, warpgroups=2, row_tiles=3, ctas=132)
    some = (3, wide), (16, replace(wide, tokens=16, split=2)), (32, replace(wide, tokens=32, fold=1))
    for (m, config), dtype in zip(some, ("bfloat16", "float16", "bfloat16")):
        x, w = shapes(Case((m,), 4096, 4096, name, dtype))
        run = partial(mosaic_sm90.weight_only_matmul, bias=None, residual=None, out_dtype=x.dtype, config=config)
        text = lower(lambda x, w, run=run: run(x, w), x, w)
        assert text.count("stablehlo.custom_call @mosaic_gpu") == 1


def broken(case: Case = INTERPRETED[1][0], config: Config = INTERPRETED[1][1], interpret=INTERPRET) -> float:
    """Returns the error of a kernel in which something was replaced."""
    x, w, *_ = case.inputs()
    product = mosaic_sm90.product.__wrapped__  # past the cache of the jit
    out = product(x, w, out_dtype=x.dtype, config=config, interpret=interpret)[0]
    return row_error(out, reference.weight_only_matmul(x, w, None, None))


@pytest.mark.parametrize(
    ("method", "fault"),
    [
        ("packed_pairs", lambda real: lambda self, words: real(self, words)[::-1]),
        ("load_x", lambda real: lambda self, n, column: real(self, n, column ^ 32)),
        ("load_x", lambda real: lambda self, n, column: real(self, n ^ 1, column)),
        ("load_codes", lambda real: lambda self, r, column: real(self, r ^ 1, column)),
        ("load_codes", lambda real: lambda self, r, column: [(c, words[::-1]) for c, words in real(self, r, column)]),
        ("places", lambda real: lambda self, block, row, unit, other: real(self, block, row, unit, 0)),
        ("sum_x", lambda real: lambda self, x: real(self, x[1:])),
        ("vector", lambda real: lambda self, name, r, lower, group: real(self, name, r, 1 - lower, group)),
        ("vector", lambda real: lambda self, name, r, lower, group: real(self, name, r ^ (name == "zeros"), lower, 0)),
    ],
    ids=(
        "pairs", "columns of x", "rows of x", "row tiles", "rows of codes", "swizzle", "a sum of x", "scales' rows",
        "zeros' rows",
    ),
)  # fmt: skip
def test_seeded_faults_are_caught(monkeypatch, method, fault):
    monkeypatch.setattr(warp_sm90.Warp, method, fault(getattr(warp_sm90.Warp, method)))
    assert not broken() < 0.05


def test_sums_at_the_wrong_place_are_caught(monkeypatch):
    real = warp_sm90.store_sums
    monkeypatch.setattr(warp_sm90, "store_sums", lambda *arguments: real(*arguments[:-1], arguments[-1][::-1]))
    assert not broken() < 0.05


def test_to_wait_for_a_stage_after_it_was_read_is_a_race(monkeypatch):
    hasty = SimpleNamespace(**{name: getattr(plgpu, name) for name in dir(plgpu) if not name.startswith("_")})
    awaited = []

    def arrive(barrier):
        plgpu.barrier_wait(awaited.pop())
        plgpu.barrier_arrive(barrier)

    hasty.barrier_wait, hasty.barrier_arrive = awaited.append, arrive
    monkeypatch.setattr(warp_sm90, "plgpu", hasty)
    with pytest.raises(jax.errors.JaxRuntimeError, match="a race in"):
        broken(interpret=FIND_RACES)


def test_what_is_refused():
    for options in ({"fold": 4}, {"tokens": 40}, {"width": 64}):
        with pytest.raises(ValueError, match="expected 1 or 2, 8 to 32 and 128 by warp"):
            replace(WARP, **options)
    for case in (Case((9,), 64, 512, "w4a16-g128"), Case((2,), 64, 512, "w8a16")):
        x, w = shapes(case)
        with pytest.raises(NotImplementedError, match="at most 8 rows of x, multiples of 16 rows of the weight and 4"):
            jax.eval_shape(partial(mosaic_sm90.product, out_dtype=x.dtype, config=WARP), x, w)


@pytest.mark.parametrize(
    ("m", "n", "k", "name", "first"),
    [
        (2, 4096, 11008, "w4a16-g128", True),
        (16, 12288, 4096, "w4a16-g32-zp", True),
        (17, 12288, 4096, "w4a16-g32-zp", False),
        (16, 4096, 11008, "nf4-g128", True),
        (17, 4096, 4096, "nf4-g128", False),
        (32, 4096, 4096, "w4a16-g128", True),
        (32, 4096, 11008, "w4a16-g128", False),
        (32, 22016, 8192, "w4a16-g128-zp", True),
        (33, 12288, 4096, "w4a16-g128", False),
        (2, 24, 256, "w4a16-g128", False),
        (8, 4096, 4096, "w8a16-g128", False),
    ],
)
def test_where_it_runs(m, n, k, name, first):
    assert getattr(choose_config(m, n, k, parse_weight_format(name)), "by_warp", False) == first


def test_one_row_has_a_kernel_of_its_own():
    for name in ("w4a16-g128", "w8a16", "nf4", "fp8-weight"):
        assert candidates(1, 4096, 4096, parse_weight_format(name)) == (ONE_ROW,)


CONFIGS = tuple(replace(WARP, warpgroups=2, row_tiles=row_tiles, stages=8, ctas=132) for row_tiles in (1, 3))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", FORMATS)
def test_gpu_every_code_in_every_place(name, dtype):
    """Picks one column at a time by x: the product is the decoded weight itself, rounded to float32's sums."""
    w = every_code(name)
    x = jnp.eye(256, dtype=dtype)
    expected = np.asarray(decode(w, dtype)).astype(np.float64).T
    for config in CONFIGS:
        for first in range(0, 256, 16):
            some, wider = x[first : first + 16], replace(config, tokens=16)
            out = mosaic_sm90.weight_only_matmul(some, w, None, None, jnp.dtype("float32"), config=wider)
            assert (np.asarray(out).astype(np.float64) == expected[first : first + 16]).all()


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [(12288, 4096), (4096, 11008)])
@pytest.mark.parametrize("name", FORMATS)
def test_gpu_at_the_size_of_a_layer(name, n, k):
    x, w, *_ = Case((16,), n, k, name).inputs()
    expected = reference.weight_only_matmul(x, w, None, None)
    for config in CONFIGS:
        run = partial(mosaic_sm90.weight_only_matmul, w=w, bias=None, residual=None, out_dtype=x.dtype)
        out = run(x, config=replace(config, tokens=16))
        assert row_error(out, expected) < TOLERANCE["bfloat16"]
        assert same_bits(run(x, config=replace(config, tokens=16)), out)
        assert same_bits(run(x[3:8], config=config), out[3:8])


@pytest.mark.gpu
@pytest.mark.parametrize("n", [12288, 4096])
def test_gpu_more_rows_than_16(n):
    x, w, *_ = Case((29,), n, 4096, "w4a16-g128").inputs()
    expected = reference.weight_only_matmul(x, w, None, None)
    run = partial(mosaic_sm90.weight_only_matmul, w=w, bias=None, residual=None, out_dtype=x.dtype)
    out = run(x)
    assert row_error(out, expected) < TOLERANCE["bfloat16"]
    assert same_bits(run(x[3:20]), out[3:20])
    assert same_bits(run(x[3:6]), out[3:6])
