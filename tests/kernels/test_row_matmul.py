"""Products of rows, each with a matrix of its own."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.hopper.gemm_sm90.skinny_config import Config
from pallas_kernels.row_matmul import (
    low_rank,
    low_rank_gates,
    low_rank_sm90,
    mosaic_sm90,
    reference,
    row_matmul,
    spread_sm90,
    xla,
)
from pallas_kernels.row_matmul.bench import main, subject
from pallas_kernels.row_matmul.cases import BENCH_CASES, FEW_CASES, TARGETS, Case, cases
from pallas_kernels.row_matmul.config import FEWEST, Long, LowRank, Short, low_rank_config, short_config
from tests.kernels.helpers import TOLERANCE, error, thinned
from tests.kernels.interpreter import FIND_RACES

X, N, K = 4, 24, 64


def inputs(rows: int, parts=(N,), dtype="float32"):
    """Rows in any order over matrices of two layers, of which the first is poisoned, and the last group too."""
    rng = np.random.default_rng(rows)
    x, w = rng.normal(size=(rows, len(parts), K)), rng.normal(size=(2, X, sum(parts), K)) / K**0.5
    w[0], w[:, -1] = np.nan, np.nan
    group = rng.integers(-1, X - 1, rows)
    group[::7] = X  # no group either
    return jnp.asarray(x, dtype), jnp.asarray(w, dtype), jnp.asarray(group, jnp.int32)


@pytest.mark.parametrize("backend", [None, "deterministic"])
@pytest.mark.parametrize("rows", [1, 20, xla.FEW + 77])
def test_each_row_meets_its_own_matrix(rows, backend):
    parts = (10, 3, 11)
    x, w, group = inputs(rows, parts)
    got = row_matmul(x, w, jnp.int32(1), group, parts=parts, backend=backend)
    want = reference.row_matmul(x, w[1], group, parts)
    assert error(got, want) < TOLERANCE["float32"]
    rng = np.random.default_rng(0)
    scale, residual = (
        jnp.asarray(rng.uniform(1, 2, (2, X, 3)), "float32"),
        jnp.asarray(rng.normal(size=(rows, N)), "float32"),
    )
    got = row_matmul(x, w, jnp.int32(1), group, parts=parts, scale=scale, residual=residual, backend=backend)
    own = np.repeat(np.asarray(scale)[1, np.clip(group, 0, X - 1)], parts, axis=1)
    assert error(got, want * own + np.asarray(residual)) < TOLERANCE["float32"]


def test_bits_of_one_order_do_not_depend_on_the_company_or_on_places():
    x, w, group = inputs(70, dtype="bfloat16")
    one = jax.jit(lambda *args: row_matmul(*args, out_dtype="float32", backend="deterministic"))
    many, few = one(x[:, 0], w, jnp.int32(1), group), one(x[33:36, 0], w[1:, :3], jnp.int32(0), group[33:36] % 3)
    kept = np.flatnonzero(np.asarray(group[33:36]) == np.asarray(group[33:36] % 3))
    assert len(kept)
    assert (np.asarray(many)[33:36][kept] == np.asarray(few)[kept]).all()


def test_shapes_that_disagree_are_refused():
    x, w, group = inputs(3)
    with pytest.raises(ValueError, match="expected .M, P, K., .L, X, N, K., .. and .M."):
        row_matmul(x, w, jnp.int32(1), group, parts=(N, 1))


# The kernels for Hopper


def kernel_inputs(rows, parts, k, dtype, added):
    """Two layers of three matrices, of which the first layer and the last matrix are poisoned."""
    rng = np.random.default_rng(k)
    x, w = rng.normal(size=(rows, len(parts), k)), rng.normal(size=(2, 3, sum(parts), k)) / k**0.5
    w[0], w[:, -1] = np.nan, np.nan
    group = jnp.asarray(np.resize([0, 1, -1, 3, 1, 1, 1, 1, 0], rows), jnp.int32)  # the second four are alike
    scale = jnp.asarray(rng.uniform(1, 2, (2, 3, len(parts))), "float32") if added else None
    residual = jnp.asarray(rng.normal(size=(rows, sum(parts))), dtype) if added else None
    x = jnp.asarray(x, "float32" if added else dtype)
    return x, jnp.asarray(w, dtype), scale, jnp.int32(1), group, residual


def expected(x, w, scale, layer, group, residual, parts):
    want = reference.row_matmul(x, w[int(layer)], group, parts)
    if scale is None:
        return want
    own = np.repeat(np.asarray(scale)[int(layer), np.clip(group, 0, scale.shape[1] - 1)], parts, axis=1)
    return want * own + np.asarray(residual).astype(np.float64)


@pytest.mark.parametrize(
    ("parts", "k", "dtype", "config"),
    [
        ((16,), 1280, "bfloat16", Long(8, 3)),
        ((256, 128), 8, "bfloat16", Short(128)),
        ((128, 64, 64), 16, "float16", Short(64)),
        ((32, 16), 64, "bfloat16", Short(16)),
    ],
    ids=str,
)
def test_kernels_match_the_formula_without_races(parts, k, dtype, config):
    arguments = kernel_inputs(9, parts, k, dtype, isinstance(config, Short))
    got = mosaic_sm90.row_matmul(*arguments, parts, jnp.float32, None, config, FIND_RACES)
    assert error(got, expected(*arguments, parts)) < TOLERANCE["float32"] * 10


@pytest.mark.parametrize(
    ("rows", "parts", "k", "added", "config"),
    [
        (70, (48,), 64, False, Config(64, 64)),  # columns that the next matrix's rows are in
        (150, (64, 128), 16, True, Config(128, 64)),
        (130, (128, 64), 64, True, Config(64, 32)),
    ],
    ids=str,
)
def test_many_rows_match_the_formula_without_races(rows, parts, k, added, config):
    """Runs of one group: prompts, single rows, rows of no group, and a tail."""
    x, w, scale, layer, _, residual = kernel_inputs(rows, parts, k, "bfloat16", added)
    sizes, own = (33, 1, 1, 1, rows - 40, 4), (1, 0, -1, 3, 0, -1)
    group = jnp.asarray(np.repeat(own, sizes), jnp.int32)
    arguments = x.astype(w.dtype), w, scale, layer, group, residual
    got = mosaic_sm90.row_matmul(*arguments, parts, jnp.float32, 7, config, FIND_RACES)
    assert error(got, expected(*arguments, parts)) < TOLERANCE["float32"] * 10


@pytest.mark.parametrize(
    ("parts", "k", "gated", "added", "workers"),
    [
        ((128, 256), 16, False, False, 2),  # a CTA's tiles begin in the middle of a part
        ((128,), 64, False, True, 3),
        ((128, 128), 64, True, True, 1),
        ((64, 64), 32, True, True, 7),  # of which one CTA has no tile
    ],
)
def test_many_rows_of_small_k_match_the_formula_without_races(monkeypatch, parts, k, gated, added, workers):
    monkeypatch.setattr(spread_sm90, "SMS", workers)
    x, w, scale, layer, _, residual = kernel_inputs(272, parts, k, "bfloat16", added)
    sizes, own = (65, 1, 1, 100, 64, 30, 11), (1, 0, -1, 3, 0, 1, -1)
    arguments = x.astype(w.dtype), w, scale, layer, jnp.asarray(np.repeat(own, sizes), jnp.int32), residual
    got = mosaic_sm90.row_matmul(*arguments, parts, jnp.bfloat16, 9, None, FIND_RACES, gated=gated)
    want = expected(*arguments, parts)
    if gated:
        want = silu_mul(want)
    assert error(got, want) < TOLERANCE["bfloat16"]


def silu_mul(x):
    gate, up = np.split(x, 2, axis=1)
    return gate / (1 + np.exp(-gate)) * up


def test_no_rows_launch_nothing():
    none = (
        jnp.zeros((0, 1, 64)),
        jnp.zeros((1, 2, 16, 64), "bfloat16"),
        None,
        jnp.int32(0),
        jnp.zeros(0, "int32"),
        None,
    )
    assert mosaic_sm90.row_matmul(*none, (16,), jnp.float32).shape == (0, 16)


def test_every_size_lowers_for_cuda():
    """Takes every other pair of a target and a number of rows, so that each has two of the other."""
    cases = list(dict.fromkeys(replace(case, used=1) for case in BENCH_CASES))
    for case in (case for i, case in enumerate(cases) if (i // 8 + i // 2) % 2 == 0):
        text = (
            jax.jit(subject(case, "mosaic").run).trace(case.x, case.w()).lower(lowering_platforms=("cuda",)).as_text()
        )
        assert text.count("stablehlo.custom_call @mosaic_gpu") == 1


def test_hopper_runs_the_kernels_for_all_but_one_row_and_they_refuse_what_they_lack():
    x, w, scale, layer, group, residual = kernel_inputs(5, (64, 64), 16, "bfloat16", True)
    more = {"parts": (64, 64), "scale": scale}
    for rows, kernels in ((1, 0), (2, 1)):
        run = jax.jit(lambda *each: row_matmul(*each, **more, backend="hopper"))
        text = run.trace(x[:rows], w, layer, group[:rows]).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("stablehlo.custom_call @mosaic_gpu") == kernels
    with pytest.raises(NotImplementedError, match=r"parts are \(64, 24\); the mosaic kernel supports multiples of 64"):
        row_matmul(x, w[:, :, :88], layer, group, parts=(64, 24), backend="mosaic")
    with pytest.raises(NotImplementedError, match="supports K of .* and without scale, residual and parts"):
        row_matmul(
            jnp.zeros((5, 2, 256), "bfloat16"),
            jnp.zeros((1, 1, 128, 256), "bfloat16"),
            layer,
            group,
            **{"parts": (64, 64), "backend": "mosaic"},
        )
    with pytest.raises(NotImplementedError, match="of 300 rows supports K % 16 == 0 and parts in multiples of 32"):
        row_matmul(
            jnp.zeros((300, 2, 8)), w[..., :8], layer, jnp.zeros(300, jnp.int32), parts=(64, 64), backend="mosaic"
        )
    assert short_config((4096, 1024, 1024), 16) == Short(512)


# One kernel for the two products of an adapter


def low_rank_inputs(rows, parts, k, r, added, dtype="bfloat16"):
    """Two layers of three adapters, of which the first layer and the last adapter are poisoned."""
    rng = np.random.default_rng(r)
    x, a = rng.normal(size=(rows, k)), rng.normal(size=(2, 3, len(parts) * r, k)) / k**0.5
    b = rng.normal(size=(2, 3, sum(parts), r)) / r**0.5
    for w in (a, b):
        w[0], w[:, -1] = np.nan, np.nan
    group = jnp.asarray(np.resize([0, 1, -1, 3, 1, 1], rows), jnp.int32)
    scale = jnp.asarray(rng.uniform(1, 2, (2, 3, len(parts))), "float32") if added else None
    residual = jnp.asarray(rng.normal(size=(rows, sum(parts))), "float32") if added else None
    return *(jnp.asarray(each, dtype) for each in (x, a, b)), scale, jnp.int32(1), group, residual


def expected_low_rank(x, a, b, scale, layer, group, residual, parts):
    low = reference.row_matmul(np.asarray(x)[:, None], a[int(layer)], group, (a.shape[2],))
    low = low.reshape(len(x), len(parts), -1)
    return expected(low, b, scale, layer, group, residual, parts)


@pytest.mark.parametrize(
    ("parts", "r", "added", "config"),
    [
        ((128, 64), 16, True, LowRank(1, 2, 16, 64, 4, 2)),  # the last share of a has a turn less
        ((192,), 16, False, LowRank(2, 4, 16, 64, 4, 4)),  # shares of different sizes, and warpgroups without one
        ((48, 32), 64, True, LowRank(2, 2, 16, 16, 8, 2)),
        ((128,), 8, True, LowRank(1, 1, 8, 128, 1, 1)),
        ((192, 192), 16, "gated", LowRank(2, 2, 16, 64, 8, 4)),
    ],
    ids=str,
)
def test_one_kernel_matches_the_formula_without_races(parts, r, added, config):
    arguments = low_rank_inputs(6, parts, 1280, r, added)
    got = low_rank_sm90.low_rank(*arguments, parts, jnp.float32, config, FIND_RACES, gated=added == "gated")
    want = expected_low_rank(*arguments, parts)
    assert error(got, silu_mul(want) if added == "gated" else want) < TOLERANCE["float32"] * 10


@pytest.mark.parametrize("rows", [2, xla.FEW + 9])
def test_a_low_rank_product_is_two_products_in_xla(rows):
    arguments = low_rank_inputs(rows, (10, 22), 64, 4, True, "float32")
    x, a, b, scale, layer, group, residual = arguments
    got = low_rank(x, a, b, layer, group, parts=(10, 22), scale=scale, residual=residual)
    assert error(got, expected_low_rank(*arguments, (10, 22))) < TOLERANCE["float32"] * 10


def test_one_kernel_runs_few_rows_of_many_runs_alone():
    def kernels(rows, runs, rank=16):
        shapes = (rows, 4096), (1, 8, rank, 4096), (1, 8, 4096, rank)
        x, a, b = (jax.ShapeDtypeStruct(each, "bfloat16") for each in shapes)
        group = jax.ShapeDtypeStruct((rows,), jnp.int32)
        run = jax.jit(lambda x, a, b, group: low_rank(
            x, a, b, jnp.int32(0), group, parts=(4096,), runs=runs, backend="hopper"
        ))  # fmt: skip
        text = run.trace(x, a, b, group).lower(lowering_platforms=("cuda",)).as_text()
        return text.count("stablehlo.custom_call @mosaic_gpu")

    assert [kernels(64, None), kernels(64, 65), kernels(FEWEST, 8, 64)] == [1, 1, 1]
    assert [kernels(64, 9), kernels(FEWEST - 1, 8), kernels(8192, 8, 64)] == [2, 2, 2]


def test_many_rows_of_gate_and_up_take_silu_along():
    parts, more = (11008, 11008), {"dtype": jnp.bfloat16}
    b, scale = jax.ShapeDtypeStruct((1, 8, 22016, 64), **more), jax.ShapeDtypeStruct((1, 8, 2), jnp.float32)
    product = jax.ShapeDtypeStruct((8192, 22016), **more)
    how = {"parts": parts, "scale": scale}
    x, a = jax.ShapeDtypeStruct((8192, 4096), **more), jax.ShapeDtypeStruct((1, 8, 128, 4096), **more)
    assert low_rank_gates(x, a, b, **how, backend="hopper")
    assert not low_rank_gates(x, a, b, **how)  # on a CPU
    assert not low_rank_gates(x, a, b, **how, backend="deterministic")
    few = jax.ShapeDtypeStruct((64, 4096), **more)
    assert not low_rank_gates(few, a, b, **how, backend="hopper")  # of a rank whose sums are too many
    assert low_rank_gates(few, a, jax.ShapeDtypeStruct((1, 8, 22016, 16), **more), **how, backend="hopper")
    run = jax.jit(lambda x, a, b, scale, product: low_rank(
        x, a, b, jnp.int32(0), jnp.arange(8192, dtype=jnp.int32) // 1024,
        parts=parts, scale=scale, residual=product, runs=8, backend="hopper", gated=True,
    ))  # fmt: skip
    lowered = run.trace(x, a, b, scale, product).lower(lowering_platforms=("cuda",))
    assert lowered.out_info.shape == (8192, 11008)
    assert lowered.as_text().count("stablehlo.custom_call @mosaic_gpu") == 2


@pytest.mark.parametrize("every", thinned((False, True), (0,)))
@pytest.mark.parametrize("rank", [8, 16, 32, 64])
def test_every_size_of_one_kernel_lowers_for_cuda_and_leaves_room_for_two(rank, every):
    """Lowers one of four sizes for each rank, unless every one."""
    longer = ((5120,), 17408), ((8192,), 28672)  # rows that leave less to the rings
    sizes = [(target, rows) for target in (*TARGETS.values(), *longer) for rows in (8, 64, 256)]
    for number, ((parts, k), rows) in enumerate(sizes):
        config = low_rank_config(rows, parts, k, rank)
        ring = 2 * min(16, rank) * 256 * (config.a_stages + config.b_stages) + 2 * k
        assert ring < (112 if rows * len(parts) > 132 and k == 4096 else 223) * 1024
        if not every and (number - rank.bit_length()) % 4:
            continue
        x, a, b, *_ = (jax.ShapeDtypeStruct(s, "bfloat16") for s in (
            (rows, k), (1, 8, len(parts) * rank, k), (1, 8, sum(parts), rank),
        ))  # fmt: skip
        run = jax.jit(lambda x, a, b, parts=parts: low_rank_sm90.low_rank(
            x, a, b, None, jnp.int32(0), jnp.zeros(x.shape[0], jnp.int32), None, parts, jnp.bfloat16
        ))  # fmt: skip
        run.trace(x, a, b).lower(lowering_platforms=("cuda",))


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "rank"), [(8, 64), (64, 8), (64, 16), (64, 64), (256, 16)])
@pytest.mark.parametrize("target", TARGETS)
def test_gpu_matches_the_formula_of_low_rank_products(target, rows, rank):
    (parts, k), used, rng = TARGETS[target], 5, np.random.default_rng(0)
    group = jnp.asarray(np.where(np.arange(rows) % 9 == 8, -1, np.arange(rows) % used), jnp.int32)
    sizes = (rows, k), (2, used, len(parts) * rank, k), (2, used, sum(parts), rank), (rows, sum(parts))
    x, a, b, residual = (jnp.asarray(rng.normal(size=each), "bfloat16") for each in sizes)
    a, b, layer = a / k**0.5, b / rank**0.5, jnp.int32(1)
    scale = jnp.asarray(rng.uniform(1, 2, (2, used, len(parts))), "float32")
    run = jax.jit(lambda *each: low_rank_sm90.low_rank(*each, parts, jnp.bfloat16))
    out, again = (run(x, a, b, scale, layer, group, residual) for _ in range(2))
    want = expected_low_rank(x, a, b, scale, layer, group, residual, parts)
    assert error(out, want) < TOLERANCE["bfloat16"]
    assert (np.asarray(out) == np.asarray(again)).all()
    if target == "gate_up" and rank < 64:
        gated = low_rank_sm90.low_rank(x, a, b, scale, layer, group, residual, parts, jnp.bfloat16, gated=True)
        assert error(gated, silu_mul(want)) < TOLERANCE["bfloat16"]
    alone = run(x, a, b, scale, layer, jnp.full_like(group, -1).at[3].set(group[3]), residual)
    assert (np.asarray(alone)[3] == np.asarray(out)[3]).all()
    assert (np.asarray(alone)[4] == np.asarray(residual)[4]).all()


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rank", [16, 32, 64])
def test_gpu_matches_the_formula_of_many_rows_that_add_to_a_residual(rank, gated):
    parts, rows, rng = (1408, 1408), 1000, np.random.default_rng(0)
    own = jnp.asarray(np.sort(np.resize([0, 1, 1, 1, 2, 2, 4], rows))[::-1] % 4, jnp.int32)
    group = jnp.where(own == 2, -1, own)
    sizes = (rows, 1024), (2, 4, 2 * rank, 1024), (2, 4, sum(parts), rank), (rows, sum(parts))
    x, a, b, residual = (jnp.asarray(rng.normal(size=each), "bfloat16") for each in sizes)
    a, b, layer = a / 32, b / rank**0.5, jnp.int32(1)
    scale = jnp.asarray(rng.uniform(1, 2, (2, 4, 2)), "float32")
    run = jax.jit(lambda *each: low_rank(
        *each[:3], layer, each[3], parts=parts, scale=each[4], residual=each[5], runs=9, backend="mosaic", gated=gated
    ))  # fmt: skip
    out, again = (run(x, a, b, group, scale, residual) for _ in range(2))
    want = expected_low_rank(x, a, b, scale, layer, group, residual, parts)
    assert error(out, silu_mul(want) if gated else want) < 2 * TOLERANCE["bfloat16"]  # what lies between is rounded
    assert (np.asarray(out) == np.asarray(again)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*FEW_CASES, *cases(400, 64, 8, 8)], ids=str)
def test_gpu_matches_the_formula(case):
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=each.shape), each.dtype) for each in (case.x, case.w()))
    out, again = (subject(case, "mosaic").run(x, w / w.shape[3] ** 0.5) for _ in range(2))
    want = reference.row_matmul(x, (w / w.shape[3] ** 0.5)[0], case.group, case.parts)
    assert error(out, want) < TOLERANCE["bfloat16"]
    assert (np.asarray(out) == np.asarray(again)).all()


def test_the_benchmark_knows_its_bytes_and_bars(monkeypatch, tmp_path):
    case = Case("o", False, 64, 16, 64, 64)
    assert case.moved_bytes == 2 * 64 * 4096 * 16 + 2 * 64 * 16 + 2 * 64 * 4096
    monkeypatch.setattr("pallas_kernels.row_matmul.bench.table", lambda subjects: map(pretended, enumerate(subjects)))
    assert main(["--results", str(tmp_path), "--rows", "64", "--label", "few"]) == 0
    result = json.loads(next(tmp_path.glob("row_matmul-few-*.json")).read_text())
    names = {bar["name"] for bar in result["bars"]}
    assert {"o.b M=64 rank=16, 64 of 64 adapters bandwidth", "o.b M=64 rank=16, 1 of 64 adapters xla"} <= names


def pretended(numbered):
    number, subject = numbered
    return subject.labels | {"us": 5.0 + number, "gb_s": 3000, "tflop_s": 1}
