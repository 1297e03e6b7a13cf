"""Products of groups of rows, each with a weight of its own."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import row_groups
from pallas_kernels.backends import DETERMINISTIC, TARGET
from pallas_kernels.formats.quantized_rows import QuantizedRows, dequantize_rows, quantize_rows
from pallas_kernels.formats.quantized_weights import QuantizedWeight, decode, encode
from pallas_kernels.formats.weight_formats import parse_weight_format
from pallas_kernels.hopper.gemm_sm90 import gemv_config
from pallas_kernels.hopper.gemm_sm90.skinny_config import Config
from pallas_kernels.ragged_matmul import mosaic_sm90, ragged_matmul, reference, xla
from pallas_kernels.ragged_matmul.config import CodesConfig, RowConfig, block_rows, choose_codes_config
from pallas_kernels.route import Here
from pallas_kernels.route import mosaic_sm90 as route_sm90
from tests.kernels.helpers import TOLERANCE, error, same_bits, thinned
from tests.kernels.interpreter import FIND_RACES, INTERPRET
from tests.kernels.ragged_cases import CODES, arguments, operands, sizes_of
from tests.kernels_of import kernels_of

pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st

X, N, K, M = 4, 24, 64, 70
run = jax.jit(ragged_matmul, static_argnames=("gated", "out_dtype", "backend"))


def inputs(dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=(M, K)), dtype), jnp.asarray(rng.normal(size=(X, N, K)) / K**0.5, dtype)


@given(st.lists(st.integers(0, 40), min_size=X, max_size=X).filter(lambda sizes: sum(sizes) <= M))
@settings(max_examples=40)
def test_any_sizes_give_the_formula_and_read_nothing_else(sizes):
    x, w = inputs()
    used = np.asarray(sizes) > 0
    x = x.at[sum(sizes) :].set(jnp.nan)
    poisoned = jnp.where(jnp.asarray(used)[:, None, None], w, jnp.nan)
    got = run(x, poisoned.reshape(X * N, K), sizes_of(*sizes))
    assert error(got, np.nan_to_num(reference.ragged_matmul(np.nan_to_num(x), w, sizes))) < TOLERANCE["float32"]


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_other_dtypes_are_summed_wide_and_rounded_once(dtype):
    with jax.enable_x64(dtype == "float64"):
        x, w = inputs(dtype)
        sizes = sizes_of(3, 0, 33, 20)
        got = run(x, w.reshape(X * N, K), sizes)
        assert got.dtype == x.dtype
        assert error(got, reference.ragged_matmul(x, w, sizes)) < TOLERANCE[dtype]


def test_bits_of_a_row_do_not_depend_on_its_company():
    x, w = inputs("bfloat16")
    flat, rows = w.reshape(X * N, K), []
    for sizes in (sizes_of(40, 10, 10, 10), sizes_of(17, 1, 0, 0), sizes_of(5, 0, 0, 60)):
        rows.append(np.asarray(run(x, flat, sizes, out_dtype="float32"))[:5])
    assert (rows[0] == rows[1]).all()
    assert (rows[0] == rows[2]).all()


@pytest.mark.parametrize("name", ["w8a16", "w4a16-g32", "nf4-dq", "mxfp4-weight"])
def test_weights_of_any_format_are_multiplied_as_they_are_decoded(name):
    x, w = inputs()
    codes = encode(w.reshape(X * N, K), parse_weight_format(name))
    sizes = sizes_of(3, 0, 33, 20)
    want = reference.ragged_matmul(x, np.asarray(decode(codes)).reshape(w.shape), sizes)
    assert error(run(x, codes, sizes), want) < 2e-6


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_rows_of_codes(kind):
    x, w = inputs()
    codes = encode(w.reshape(X * N, K), parse_weight_format({"int8": "w8a8", "fp8": "fp8"}[kind]))
    rows, sizes = quantize_rows(x, kind), sizes_of(3, 0, 33, 20)
    stood_for = np.asarray(rows.values, np.float64) * np.asarray(rows.scales, np.float64)[:, None]
    want = reference.ragged_matmul(stood_for, np.asarray(decode(codes)).reshape(w.shape), sizes)
    assert error(run(rows, codes, sizes, out_dtype="float32"), want) < 2e-6
    with pytest.raises(ValueError, match="give out_dtype"):
        ragged_matmul(rows, codes, sizes)


def test_rows_of_codes_in_blocks():
    """Experts of a block and a half, and columns of as many."""
    x, (n, k) = inputs()[0], (192, 200)
    w = jnp.asarray(np.random.default_rng(2).normal(size=(X * n, k)), jnp.float32)
    codes, wide = encode(w, parse_weight_format("fp8-b128")), jnp.pad(jnp.tile(x, 4)[:, :k], ((0, 0), (0, 56)))
    rows, sizes = quantize_rows(wide, "fp8", group=128), sizes_of(3, 0, 33, 20)
    want = reference.ragged_matmul(dequantize_rows(rows)[:, :k], np.asarray(decode(codes)).reshape(X, n, k), sizes)
    rows = QuantizedRows(rows.values[:, :k], rows.scales)
    assert error(run(rows, codes, sizes, out_dtype="float32"), want) < 2e-6


def test_gradients_are_products_too():
    x, w = inputs()
    sizes, g = sizes_of(3, 0, 33, 20), jnp.asarray(np.random.default_rng(1).normal(size=(M, N)), jnp.float32)
    dx, dw, _ = jax.vjp(partial(run), x, w.reshape(X * N, K), sizes)[1](g)
    assert error(dx, reference.ragged_matmul(g, np.swapaxes(w, 1, 2), sizes)) < TOLERANCE["float32"]
    starts = np.cumsum([0, *np.asarray(sizes)])
    wide = [np.asarray(each, np.float64) for each in (g, x)]
    want = np.stack([wide[0][a:b].T @ wide[1][a:b] for a, b in zip(starts[:-1], starts[1:], strict=True)])
    assert error(dw.reshape(X, -1), want.reshape(X, -1)) < TOLERANCE["float32"]


FAULTS = {
    "a group's rows begin one late": lambda tiles: tiles._replace(rows=jnp.minimum(tiles.rows + 1, M)),
    "two groups are swapped": lambda tiles: tiles._replace(group=tiles.group ^ 1),
    "a tile is dropped": lambda tiles: tiles._replace(rows=tiles.rows.at[0].set(M)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_caught(monkeypatch, fault):
    x, w = inputs()
    sizes, cut = sizes_of(3, 5, 33, 20), xla.cut
    monkeypatch.setattr(xla, "cut", lambda *args: FAULTS[fault](cut(*args)))
    got = xla.ragged_matmul.__wrapped__(x, w.reshape(X * N, K), sizes, False, "float32")
    assert error(got, reference.ragged_matmul(x, w, sizes)) > 0.01


REFUSED = {
    "w8a16": "codes int8 is not supported by backend mosaic, which does int4, nf4, e2m1",
    "nf4-dq": "scales in int8 is not supported by backend mosaic, which does float16",
    "w4a16-g16": "int4 in groups of 16 is not supported by backend mosaic, which does 32, 64, 128",
    "mxfp4-h-weight": "in order, and not rotated",
    "w4a16-g32": r"weights are \[24, 64\]; the mosaic kernel supports N % 32 == 0 and K % 64 == 0",
}


def test_what_does_not_fit_is_refused():
    x, w = inputs()
    with pytest.raises(ValueError, match=r"expected \[M, K\], \[X N, K\] and \[X\]"):
        ragged_matmul(x, w.reshape(X * N, K)[:-1], sizes_of(1, 2, 3, 4))
    with pytest.raises(ValueError, match=r"sizes \(0,\), expected"):
        ragged_matmul(x, w.reshape(X * N, K), sizes_of())
    with pytest.raises(ValueError, match="sizes has dtype int8"):
        ragged_matmul(x, w.reshape(X * N, K), sizes_of(1, 2, 3, 4).astype(jnp.int8))
    for name, refusal in REFUSED.items():
        codes = encode(w.reshape(X * N, K), parse_weight_format(name))
        with pytest.raises(NotImplementedError, match=refusal):
            ragged_matmul(x.astype("bfloat16"), codes, sizes_of(1, 2, 3, 4), backend="mosaic")
    with pytest.raises(NotImplementedError, match=r"weights are \[24, 64\]; the mosaic kernel supports N % 64"):
        ragged_matmul(
            x.astype("bfloat16"), w.reshape(X * N, K).astype("bfloat16"), sizes_of(1, 2, 3, 4), backend="mosaic"
        )


KERNEL = [  # kind, sizes, M, N, K, gated, and how it is cut
    ("bfloat16", (3, 0, 5, 1), 12, 192, 128, False, Config(64, 128, ctas=2)),  # a slab goes past the end of N
    ("bfloat16", (3, 0, 60, 20), 90, 96, 160, True, Config(128, 128, ctas=3)),
    ("int8", (3, 0, 70), 80, 64, 128, True, Config(64, 128, ctas=2)),
    ("fp8", (0, 130, 2), 140, 64, 128, False, Config(128, 64, ctas=2)),
    ("w4a16-g128", (3, 0, 60, 20), 90, 96, 384, True, CodesConfig(64, 1, 2, 2, width=64, ctas=3)),
    ("w4a16-g32-zp", (0, 5, 1), 7, 160, 320, False, CodesConfig(8, 1, 1, ctas=2)),
    ("nf4", (3, 0, 14), 18, 64, 192, False, CodesConfig(16, 1, 2, stages=3, ctas=2)),
    ("mxfp4-weight", (1, 0, 9), 12, 96, 192, True, CodesConfig(8, 1, 1, 2, ctas=2)),
    # By warp: groups begin anywhere, ends of N and K are within a tile and a stage, and a ring goes round.
    ("w4a16-g128", (3, 0, 1, 9, 2), 18, 96, 384, False, CodesConfig(8, 1, 1, 4, ctas=2, by_warp=True)),
    ("w4a16-g128", (3, 0, 1, 9, 2), 18, 96, 640, True, CodesConfig(8, 2, 2, 4, stages=2, ctas=2, by_warp=True)),
    ("w4a16-g32-zp", (0, 21, 1), 22, 160, 320, True, CodesConfig(16, 2, 3, 2, ctas=2, by_warp=True)),
    ("w4a16-g64", (4, 2), 7, 64, 192, False, CodesConfig(8, 1, 3, 2, stages=3, ctas=1, by_warp=True)),
    ("nf4", (1, 0, 9), 10, 64, 192, True, CodesConfig(8, 1, 1, 2, ctas=2, by_warp=True)),
    ("mxfp4-weight", (1, 0, 19), 22, 96, 352, False, CodesConfig(16, 2, 1, 1, ctas=2, by_warp=True)),
    ("mxfp4-weight", (1, 0, 9), 12, 96, 192, True, CodesConfig(8, 1, 1, 2, ctas=2, by_warp=True)),
    # A row at a time, of columns that fill steps of warps and lanes, or do not
    ("bfloat16", (1, 0, 2, 0), 4, 16, 544, True, gemv_config.Config(4)),
    ("bfloat16", (0, 1, 2), 3, 16, 1832, False, gemv_config.Config(8, 3)),
    ("int8", (1, 0, 2), 4, 16, 512, True, gemv_config.Config(4, 8)),
    ("w4a16-g128", (1, 0, 2, 0), 4, 16, 2048, True, RowConfig(16, 2)),
    ("w4a16-g32-zp", (0, 2, 1), 4, 16, 1088, True, RowConfig(16, 4)),
    ("nf4", (1, 0, 2), 4, 32, 1088, False, RowConfig(32, 1)),
    ("mxfp4-weight", (2, 0, 1, 0), 4, 16, 2880, False, RowConfig(16, 1)),
    ("mxfp4-weight", (1, 0, 1), 3, 16, 768, True, RowConfig(16, 1)),
]


KEPT = 0, 2, 3, 4, 5, 6, 7, 9, 10, 12, 13, 16, 17, 19, 20, 22  # each kind, by each way, gated and not


@pytest.mark.parametrize(("kind", "sizes", "m", "n", "k", "gated", "config"), thinned(KERNEL, KEPT), ids=str)
def test_the_kernel_is_the_formula_without_races(kind, sizes, m, n, k, gated, config):
    given, expected = arguments(kind, sizes, m, n, k, gated)
    for got, most in (
        (mosaic_sm90.ragged_matmul(*given, config=config, interpret=FIND_RACES), tolerance(kind)),
        (xla.ragged_matmul(*given), TOLERANCE["bfloat16"]),
    ):
        assert error(got, expected) < most
        assert not np.asarray(got, np.float32)[sum(sizes) :].any()


@pytest.mark.parametrize("power", [70, -70])
def test_scales_by_warp_may_be_very_large_or_small(power):
    """Checks products of usual size. Those below 2^-64 or so become zero."""
    kind, sizes, m, n, k, gated, config = KERNEL[13]
    (x, w, *rest), expected = arguments(kind, sizes, m, n, k, gated)
    x = x * 2.0 ** (-power // 2)
    w = replace(w, scales=jnp.where(w.scales < 255, w.scales + power, w.scales).astype("uint8"))
    got = mosaic_sm90.ragged_matmul(x, w, *rest, config=config, interpret=INTERPRET)
    assert error(got, expected * 2.0 ** (power // 2)) < tolerance(kind)


def tolerance(kind: str) -> float:
    """Returns what the kernel may be off. It rounds float16 scales to bfloat16, and then their products with codes."""
    return TOLERANCE["bfloat16"] * (3 if kind.startswith(("w4a16", "nf4")) else 1)


OTHERS = [  # tiles of other sizes, and stages of other widths
    (KERNEL[4][-1], CodesConfig(8, 1, 1, 2, ctas=2)),
    (CodesConfig(16, 1, 2, 2, ctas=3, by_warp=True), CodesConfig(8, 1, 1, 4, stages=2, ctas=2, by_warp=True)),
]


@pytest.mark.parametrize(("config", "other"), OTHERS, ids=("wgmma", "by warp"))
def test_bits_of_the_kernel_do_not_depend_on_a_rows_company(config, other):
    kind, _, m, n, k, gated, _ = KERNEL[4]
    (x, w, *rest), _ = arguments(kind, (5, 0, 60, 20), m, n, k, gated)
    sizes, run = rest.pop(0), partial(mosaic_sm90.ragged_matmul, interpret=INTERPRET)
    whole = run(x, w, sizes, *rest, config=config)
    alone = run(x[3:5], w, sizes_of(2, 0, 0, 0), *rest, config=other)
    assert same_bits(alone, whole[3:5])


@pytest.mark.parametrize("m", [24, 256, 2048, 32768])
def test_products_by_warp_are_never_in_one_order(m):
    """Few rows are by warp else. A layer's second product has the blocks of its first."""
    weight = jax.ShapeDtypeStruct((32 * 5760, 2880), "float32")
    shapes = jax.eval_shape(partial(encode, fmt=parse_weight_format("mxfp4-weight")), weight)
    chosen = [choose_codes_config(m, 32, 5760, 2880, False, one_order=one_order) for one_order in (False, True)]
    assert [config.by_warp for config in chosen] == [m <= 256, False]
    for config, one_order in zip(chosen, (False, True)):
        block = block_rows(m, shapes, 32, False, backend=DETERMINISTIC if one_order else None)
        assert block == (config.tokens, config.by_warp)
        following = choose_codes_config(m, 32, 2880, 2880, False, block, one_order)
        assert (following.tokens, following.by_warp) == block


@pytest.mark.parametrize(("block", "apart"), [(8, False), (64, False), (8, True)])
def test_pairs_are_blocks_of_groups(block, apart):
    rng, m, pairs_of = np.random.default_rng(0), 60, jax.jit(row_groups.pairs_of, static_argnums=(1, 2, 4))
    for _ in range(20):
        chosen = rng.integers(0, rng.integers(1, 6), rng.integers(0, m + 1))
        sizes, wanted, start = np.bincount(chosen, minlength=5), [], 0
        for group, size in enumerate([*sizes, m - len(chosen)]):
            rows = range(start if apart else start // block * block, start + size, block) if size else ()
            wanted += [(group, row, max(start, row), min(start + size, row + block)) for row in rows]
            start += size
        pairs = pairs_of(sizes_of(*sizes), m, block, None, apart)
        assert pairs.number(m, block, apart) == len(wanted)
        assert [tuple(each) for each in np.stack(pairs[:4], axis=1)[: len(wanted)]] == wanted


@pytest.mark.parametrize(
    ("block", "kind", "used", "config"),
    [
        ((64, False), "bfloat16", True, None),
        ((8, True), "w4a16-g128", True, None),
        ((8, False), "bfloat16", False, None),
        ((1, False), "w4a16-g128", True, RowConfig(16, 1)),
    ],
)
def test_a_schedule_made_before_is_used_where_its_blocks_fit(monkeypatch, block, kind, used, config):
    """It has the bits of one that the product makes."""
    monkeypatch.setattr(route_sm90, "SMS", 4)
    rng = np.random.default_rng(0)
    scores, rows = (jnp.asarray(rng.normal(size=(9, n)), "bfloat16") for n in (12, 128))
    route = partial(route_sm90.sort_tokens, scores, rows, 3, True, Here(12), lambda routes: routes)
    made = route(block[0], None, INTERPRET, block[1])
    (_, w, *_), _ = arguments(kind, made.sizes.tolist(), 27, 16 if config else 64, 128, False)
    run = partial(mosaic_sm90.ragged_matmul, made.rows, w, made.sizes, False, jnp.dtype("bfloat16"), config, INTERPRET)
    want, calls = run(), []

    def pairs_of(*rest, **how):
        calls.append(rest)
        return row_groups.pairs_of(*rest, **how)

    for module in (mosaic_sm90.skinny, mosaic_sm90.tiles_sm90):
        monkeypatch.setattr(module, "pairs_of", pairs_of)
    monkeypatch.setattr(mosaic_sm90, "groups_of_rows", lambda *rest: calls.append(rest))
    assert same_bits(run(made.schedule), want)
    assert (not calls) == used


OUT, NEIGHBOUR = "a block's rows all go out", "a group's weight is its neighbour's"


@pytest.mark.parametrize(
    ("number", "fault"), [(0, OUT), (0, NEIGHBOUR), (7, OUT), (7, NEIGHBOUR), (8, NEIGHBOUR), (9, NEIGHBOUR)]
)
def test_faults_of_the_kernel_are_caught(monkeypatch, fault, number):
    kind, _, m, n, k, gated, config = KERNEL[number]
    given, expected = arguments(kind, (3, 1, 5, 1), m, n, k, gated)
    real = row_groups.pairs_of

    def pairs_of(*sizes, **how):
        pairs = real(*sizes, **how)
        if fault == OUT:
            return pairs._replace(first=pairs.row)
        return pairs._replace(group=pairs.group.at[0].set(1))

    for module in (mosaic_sm90.skinny, mosaic_sm90.tiles_sm90):
        monkeypatch.setattr(module, "pairs_of", pairs_of)
    x, w, sizes, gated, dtype = given
    if isinstance(w, QuantizedWeight):
        out = mosaic_sm90.tiles_sm90.product(x, w, dtype, config, INTERPRET, sizes=sizes, gated=gated)[0]
    else:
        gemm = mosaic_sm90.skinny.gemm.__wrapped__
        out = gemm(x, w, sizes=sizes, out_dtype=dtype, config=config, interpret=INTERPRET)
    assert error(out, expected) > 0.01


@pytest.mark.parametrize("number", [15, 18])
def test_a_row_with_another_groups_weight_is_caught(monkeypatch, number):
    kind, sizes, m, n, k, gated, config = KERNEL[number]
    given, expected = arguments(kind, sizes[::-1], m, n, k, gated)
    real = row_groups.groups_of_rows
    monkeypatch.setattr(mosaic_sm90, "groups_of_rows", lambda *rest: real(*rest).at[0].set(3))
    monkeypatch.setattr(mosaic_sm90, "_by_codes", mosaic_sm90._by_codes.__wrapped__)
    assert not error(mosaic_sm90.ragged_matmul(*given, config=config, interpret=INTERPRET), expected) < 0.01


def test_few_rows_read_their_weights_alone_unless_there_is_to_be_one_order(monkeypatch):
    """Counts of one token of Qwen3-30B-A3B, of as many as there are experts, and of gpt-oss-20b."""
    monkeypatch.setenv(TARGET, "9.0")
    for kind, m, X, n, k, rows in (
        ("bfloat16", 8, 128, 768, 2048, "gemv_gated_ragged"),
        ("int8", 8, 128, 768, 2048, "gemv_int8_gated_ragged"),
        ("w4a16-g128", 8, 128, 768, 2048, "weight_only_row_gated_ragged"),
        ("mxfp4-weight", 4, 32, 2880, 2880, "weight_only_row_gated_ragged"),
        ("fp8", 8, 128, 768, 2048, None),
        ("bfloat16", 128, 128, 768, 2048, None),
        ("w4a16-g128", 128, 128, 768, 2048, None),
    ):
        x, w = jax.eval_shape(partial(operands, kind, m, 2 * X * n, k))
        sizes = jax.ShapeDtypeStruct((X,), "int32")
        few = {"gemv_gated_ragged", "gemv_int8_gated_ragged", "weight_only_row_gated_ragged"}
        for backend in (None, "mosaic", "deterministic"):
            multiply = partial(ragged_matmul, gated=True, out_dtype="bfloat16", backend=backend)
            wanted = {rows} if rows and backend != "deterministic" else set()
            assert few & kernels_of(jax.make_jaxpr(multiply)(x, w, sizes).jaxpr).keys() == wanted
            assert (block_rows(m, w, X, True, backend=backend)[0] == 1) == bool(wanted)
    mixtral = jax.ShapeDtypeStruct((8 * 2 * 14336, 4096), "bfloat16")
    assert [block_rows(2, mixtral, 8, True, chosen)[0] == 1 for chosen in (1, 2)] == [False, True]  # one is read twice


SHAPES = [  # of Qwen3-30B-A3B and gpt-oss-20b, too
    ("int8", 8, 128, 768, 2048),
    ("bfloat16", 4096, 128, 2048, 768),
    ("bfloat16", 3, 4, 64, 32),
    ("w4a16-g128", 8, 128, 768, 2048),
    ("nf4", 4096, 128, 2048, 768),
    ("mxfp4-weight", 128, 32, 2880, 2880),
    ("mxfp4-weight", 2048, 32, 2880, 2880),
    ("nf4", 256, 128, 768, 2048),
    ("mxfp4-weight", 4, 32, 2880, 2880),
    ("bfloat16", 4, 32, 2880, 2880),
]


def test_shapes_of_models_lower_for_cuda():
    for kind, m, X, n, k in SHAPES:
        x, w = jax.eval_shape(partial(operands, kind, m, 2 * X * n, k))
        sizes = jax.ShapeDtypeStruct((X,), "int32")
        for one_order in (False, True) if m <= 8 else (False,):
            how = {"gated": True, "out_dtype": jnp.dtype("bfloat16"), "one_order": one_order}
            run = jax.jit(partial(mosaic_sm90.ragged_matmul, **how))
            assert "mosaic_gpu" in run.trace(x, w, sizes=sizes).lower(lowering_platforms=("cuda",)).as_text()


def routed(m: int, groups: int, seed: int = 0) -> tuple[int, ...]:
    """Returns the sizes of groups that rows choose at random."""
    return tuple(np.bincount(np.random.default_rng(seed).integers(0, groups, m), minlength=groups).tolist())


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["mosaic", "triton"])
@pytest.mark.parametrize("kind", ["bfloat16", "int8", "fp8", "w4a16-g128", "w4a16-g32-zp", "nf4", "mxfp4-weight"])
def test_gpu_kernel_is_the_formula(kind, backend):
    by_codes = kind not in ("bfloat16", *CODES)
    n = 480 if by_codes else 512  # no multiple of a slab
    shapes = [
        (8, 16, 768, 2048),
        (6, 32, 2880, 2880),
        (300, 12, n, 768),
        (2500, 16, 192, 256),
        (33, 4, 2880, 2880),
        (70, 4, 64, 64),
    ]
    group = parse_weight_format(kind).group if by_codes else 1
    for m, X, n, k in (shape for shape in shapes if shape[3] % group == 0):
        sizes = routed(m - 2, X)
        for gated in (False, True):
            (x, w, counts, *_), expected = arguments(kind, sizes, m, n, k, gated)
            multiply = partial(ragged_matmul, gated=gated, out_dtype="bfloat16", backend=backend)
            got = multiply(x, w, counts)
            assert error(got, expected) < 2 * tolerance(kind)
            assert not np.asarray(got, np.float32)[m - 2 :].any()
            first = sizes_of(*sizes[:1], *([0] * (X - 1)))
            rows = jax.tree.map(partial(jax.lax.slice_in_dim, start_index=0, limit_index=max(sizes[0], 1)), x)
            if backend == "mosaic":  # whose kernels depend on M
                multiply = partial(multiply, backend=DETERMINISTIC)
                got = multiply(x, w, counts)
                assert error(got, expected) < 2 * tolerance(kind)
            assert same_bits(multiply(rows, w, first)[: sizes[0]], got[: sizes[0]])


@pytest.mark.gpu
def test_gpu_every_column_by_warp_is_the_decoded_one():
    """E2M1 has subnormal bits there: x picks one column at a time."""
    rng, fmt = np.random.default_rng(0), parse_weight_format("mxfp4-weight")
    w = encode(jnp.asarray(rng.normal(size=(2 * 96, 256)), "bfloat16"), fmt)
    columns = np.asarray(decode(w)).reshape(2, 96, 256)
    want = np.concatenate([columns[0, :, :128].T, columns[1, :, 128:].T])
    for config in (CodesConfig(8, 1, 3, 4, by_warp=True), CodesConfig(16, 2, 2, 2, by_warp=True)):
        x = jnp.eye(256, dtype="bfloat16")
        got = mosaic_sm90.ragged_matmul(x, w, sizes_of(128, 128), False, jnp.dtype("float32"), config=config)
        assert (np.asarray(got) == want).all()
