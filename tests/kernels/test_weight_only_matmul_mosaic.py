"""Checks the Mosaic GPU kernel: interpreted on the CPU with race detection, lowered for CUDA, and run on a GPU."""

from dataclasses import replace
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.formats.quantized_weights import QuantizedWeight, decode, encode
from pallas_kernels.formats.weight_codes import pack4
from pallas_kernels.formats.weight_formats import parse_weight_format
from pallas_kernels.hopper.hopper import SHARED_MEMORY
from pallas_kernels.hopper.smem_sm90 import shared_bytes
from pallas_kernels.weight_only_matmul import mosaic_sm90, operand_sm90, reference, weight_only_matmul, xla
from pallas_kernels.weight_only_matmul.cases import BENCH_CASES, CASES, Case
from pallas_kernels.weight_only_matmul.config import AnyConfig, Config, candidates, check_supported, choose_config
from pallas_kernels.weight_only_matmul.plan_sm90 import Plan
from tests.kernels.helpers import error, missed, same_bits
from tests.kernels.inlined.now import inlined_now
from tests.kernels.interpreter import FIND_RACES, INTERPRET

# Of a row's norm. Scales and scaled codes are each rounded to x's dtype, half an ulp, and so is the result: some 2e-3
# in bfloat16 and an eighth of that in float16.
TOLERANCE = {"bfloat16": 4e-3, "float16": 6e-4}
SUPPORTED = [case for case in CASES if case.dtype != "float32" and not case.format.startswith(("fp4", "iq4nl"))]
SMALL = Config(fold=4, warpgroups=1, ctas=2)
INTERPRETED = [
    (Case((1,), 96, 1024, "w4a16-g128", residual=True), replace(SMALL, warpgroups=2)),
    (
        Case((9,), 160, 512, "w4a16-g32-zp"),
        Config(tokens=16, warpgroups=1, row_tiles=2, stages=2, ctas=1),
    ),
    (Case((3,), 64, 512, "nf4", "float16"), replace(SMALL, fold=2)),
    (Case((12,), 96, 512, "nf4-dq", bias=True), Config(tokens=8, split=2, width=64, stages=2, ctas=3)),
    (Case((2,), 64, 512, "w8a16-g64-zp", "float16"), replace(SMALL, fold=2, stages=2)),
    (Case((5,), 96, 512, "uint8-zp", out_dtype="float32"), replace(SMALL, warpgroups=3)),
    (Case((17,), 128, 384, "fp8-weight", "float16"), Config(tokens=32, split=2, warpgroups=1, width=64, ctas=2)),
    (Case((1,), 24, 1024, "fp8-weight"), SMALL),
    (Case((20,), 208, 512, "w4a16-g128-zp"), Config(tokens=32, split=2, warpgroups=3, stages=2, ctas=2)),
]


def supported_config(case: Case) -> AnyConfig:
    rows = int(np.prod(case.leading))
    return choose_config(rows, case.n, case.k, parse_weight_format(case.format))


def interpreted(x, w, bias, residual, case: Case, config: Config):
    """Runs the kernel under the GPU interpreter; a race fails."""
    out_dtype = jnp.dtype(case.out_dtype or case.dtype)
    return jax.block_until_ready(
        mosaic_sm90.weight_only_matmul(x, w, bias, residual, out_dtype, config=config, interpret=FIND_RACES)
    )


def row_error(out, expected) -> float:
    return error(*(np.asarray(y).astype(np.float64).reshape(-1, 1, np.shape(y)[-1]) for y in (out, expected)))


def check_interpreted(case: Case, config: Config) -> None:
    inputs = case.inputs()
    out = interpreted(*inputs, case, config)
    assert out.dtype == (case.out_dtype or case.dtype)
    assert row_error(out, reference.weight_only_matmul(*inputs)) < TOLERANCE[case.dtype]


def check_company(case: Case, config: Config) -> None:
    """Checks that bits are the same whatever rows of x come along, and as often as they are asked for."""
    x, w, *_ = case.inputs()
    whole = interpreted(x, w, None, None, case, config)
    assert same_bits(interpreted(x, w, None, None, case, config), whole)
    assert same_bits(interpreted(x[3:5], w, None, None, case, config), whole[3:5])


@pytest.mark.parametrize(("case", "config"), INTERPRETED, ids=str)
def test_interpreted(case, config):
    check_interpreted(case, config)


def test_same_bits_again_and_in_other_company():
    check_company(*INTERPRETED[1])


OPERANDS = [
    ("w4a16-g32", "bfloat16", Config(fold=4)),
    ("w4a16-g32-zp", "float16", Config(tokens=16, fold=2, warpgroups=3)),
    ("w4a16-g128-zp", "bfloat16", Config(tokens=64, row_tiles=2, width=64)),
    ("nf4", "bfloat16", Config(fold=4, warpgroups=1)),
    ("nf4", "float16", Config(tokens=8, row_tiles=2)),
    ("w8a16", "bfloat16", Config(fold=4)),
    ("w8a16-g32-zp", "bfloat16", Config(fold=2, warpgroups=3)),
    ("w8a16-g64", "float16", Config(fold=2, width=64)),
    ("w8a16-g128-zp", "float16", Config(fold=4)),
    ("uint8-zp", "bfloat16", Config(fold=4)),
    ("uint8-zp", "float16", Config(tokens=16, row_tiles=2)),
    ("fp8-weight", "bfloat16", Config(fold=2, warpgroups=3)),
    ("fp8-weight", "float16", Config(tokens=8)),
    ("mxfp4-weight", "bfloat16", Config(tokens=8)),
    ("mxfp4-weight", "float16", Config(tokens=64, row_tiles=2, width=64)),
]


def wrong_values(monkeypatch, name: str, dtype: str, config: Config) -> int:
    """Counts the values that a stage's codes become for wgmma and that are not the format's. Scales are powers of two,
    so that nothing is rounded."""
    rng = np.random.default_rng(0)
    fmt, fold, rows = parse_weight_format(name), config.fold, config.rows
    k = 2880 if fmt.codes == "e2m1" else 4096  # of gpt-oss
    plan = Plan(8, rows, k, jnp.dtype(dtype), jnp.dtype(dtype), fmt, config)
    columns, kept = plan.step * fold, 64 // fold
    if fmt.packed:
        values = np.asarray(pack4(jnp.asarray(rng.integers(0, 16, (rows, columns)))))
    elif fmt.codes == "int8":
        values = rng.integers(-128, 128, (rows, columns)).astype(np.int8)
    else:
        values = rng.uniform(-400, 400, (rows, columns)).astype(jnp.float8_e4m3fn)
    shape = (rows,) if fmt.group is None else (columns // fmt.group, rows)
    scales = np.exp2(rng.integers(-3, 4, shape)).astype(np.float16 if fmt.group else np.float32)
    if fmt.scale_codes == "e8m0":
        scales = (127 + np.log2(scales)).astype(np.uint8)
    zeros = rng.integers(-8, 8, shape).astype(np.int8) if fmt.zero_point else None
    refs = {"w": np.array(values)}
    for key, vector in (("scales", scales), ("zeros", zeros)):
        if vector is not None:
            refs[key] = np.zeros((*shape[:-1], plan.vector_rows(key)), vector.dtype)
            refs[key][..., :rows] = vector
    if fmt.codes == "nf4":
        refs["table"] = np.array(operand_sm90.pair_table(jnp.dtype(dtype)))
    if fmt.group is None:
        scales = np.ones_like(scales)  # the kernel multiplies sums by them
    w = QuantizedWeight(*(None if x is None else jnp.asarray(x) for x in (values, scales, zeros)), None, None,
                        (rows, columns), fmt)  # fmt: skip
    expected = reference.decoded(w).astype(dtype)
    wrong = 0
    for warpgroup, j, r in np.ndindex(config.warpgroups, plan.step // 64, config.row_tiles):
        with inlined_now(monkeypatch, operand_sm90, warpgroup=warpgroup):
            found = operand_sm90.operand(plan.tile, refs, j, r, config.row_tiles)
        first = (warpgroup * config.row_tiles + r) * kept
        for part in range(fold):  # of K
            begin = part * plan.step + 64 * j
            wanted = expected[first : first + kept, begin : begin + 64]
            wrong += np.sum(found[part * kept : (part + 1) * kept] != wanted)
    return int(wrong)


@pytest.mark.parametrize(("name", "dtype", "config"), OPERANDS, ids=str)
def test_every_code_becomes_its_value(monkeypatch, name, dtype, config):
    assert wrong_values(monkeypatch, name, dtype, config) == 0


@pytest.mark.parametrize(
    ("method", "fault"),
    [
        ("int4_pairs", lambda real: lambda self, word: real(self, word)[::-1]),
        ("vector_index", lambda real: lambda self, name, group: real(self, name, group ^ 1)),
        ("words", lambda real: lambda self, lower, block: real(self, lower, block ^ 1)),
        ("words", lambda real: lambda self, lower, block: real(self, 1 - lower, block)),
    ],
)
def test_seeded_faults_of_the_conversion_are_caught(monkeypatch, method, fault):
    monkeypatch.setattr(operand_sm90.Converter, method, fault(getattr(operand_sm90.Converter, method)))
    assert wrong_values(monkeypatch, *OPERANDS[0]) > 1000


def test_padded_rows_are_not_seen():
    case, config = Case((2,), 33, 128, "w8a16"), SMALL
    x, w, _, _ = case.inputs()
    poisoned = replace(w, scales=w.scales.at[33:].set(jnp.nan))
    assert same_bits(interpreted(x, poisoned, None, None, case, config), interpreted(x, w, None, None, case, config))


def test_seeded_faults_are_caught():
    case, config = INTERPRETED[1]
    x, w, *_ = case.inputs()
    scales = np.array(w.scales)
    faults = {
        "two groups' scales swapped": replace(w, scales=jnp.asarray(scales[[1, 0, *range(2, len(scales))]])),
        "a group dropped": replace(w, scales=jnp.asarray(scales).at[2].set(0)),
        "zeros off by one": replace(w, zeros=w.zeros + jnp.int8(1)),
    }
    expected = reference.weight_only_matmul(*case.inputs())
    out = {name: row_error(interpreted(x, bad, None, None, case, config), expected) for name, bad in faults.items()}
    assert not missed(out, TOLERANCE["bfloat16"])


def test_gradients_are_those_of_xla():
    x, w, _, _ = Case((2,), 64, 256, "fp8-weight").inputs()
    g = jnp.ones((2, 64), jnp.bfloat16)

    def gradient(function):
        return jax.vjp(lambda x: function(x, w, None, None, x.dtype), x)[1](g)[0]

    run = partial(mosaic_sm90.weight_only_matmul, config=SMALL, interpret=INTERPRET)
    assert same_bits(gradient(run), gradient(xla.weight_only_matmul))


def shapes(case: Case):
    """Returns the types of case.inputs(), without the inputs."""
    w = jax.eval_shape(lambda: encode(jnp.zeros((case.n, case.k)), parse_weight_format(case.format)))
    return jax.ShapeDtypeStruct((int(np.prod(case.leading)), case.k), case.dtype), w


def lower(function, *arguments) -> str:
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def test_every_kind_of_case_lowers_for_cuda():
    """Tries each format, and each configuration with one of them."""
    seen = set()
    large = [case for case in BENCH_CASES if case.format == "w4a16-g128"]
    for case in (*SUPPORTED, *large):
        x, w = shapes(case)
        key = case.format, case.dtype, supported_config(case)
        if key not in seen:
            seen.add(key)
            text = lower(lambda x, w: mosaic_sm90.weight_only_matmul(x, w, None, None, x.dtype), x, w)
            assert "mosaic_gpu" in text, case


def test_every_choice_fits_shared_memory():
    for name in ("w4a16-g32", "w4a16-g128-zp", "nf4", "w8a16", "w8a16-g32-zp", "w8a16-g128", "uint8-zp", "fp8-weight"):
        fmt = parse_weight_format(name)
        names = "x", "w", "scales", *(["zeros"] if fmt.zero_point else []), *(["table"] if fmt.codes == "nf4" else [])
        for m, (n, k) in product((1, 8, 16, 33, 64, 100, 256, 512, 4096), ((32, 256), (4096, 11008), (22016, 4096))):
            tiled = [config for config in candidates(m, n, k, fmt) if isinstance(config, Config)]
            for config, out_dtype in product(tiled, ("bfloat16", "float32")):
                plan = Plan(m, n, k, jnp.dtype("bfloat16"), jnp.dtype(out_dtype), fmt, config)
                assert shared_bytes(plan.scratch(names)) <= SHARED_MEMORY


def test_narrow_results_are_cut_at_their_edges():
    """Expects no copy as wide as its array, which would be one run of bytes. Past the last column lies the next row,
    and past the last row another part of K."""
    x, w = shapes(Case((33,), 64, 512, "w4a16-g128"))
    text = lower(lambda x, w: mosaic_sm90.weight_only_matmul(x, w, None, None, x.dtype), x, w)
    assert "mosaic_gpu" in text
    assert "cp.async.bulk.global.shared::cta.bulk_group" not in text


def test_layers_share_one_kernel():
    x, w = shapes(Case((4,), 1024, 1024, "w4a16-g128"))

    def layers(x, ws):
        for w in ws:
            x = weight_only_matmul(x, w, backend="mosaic")
        return x

    text = lower(layers, x, [w] * 32)
    assert sum("custom_call @mosaic_gpu" in line for line in text.splitlines()) == 1


def test_configurations_are_checked():
    for options, message in (
        ({"tokens": 12}, "tokens is 12, expected a multiple of 8"),
        ({"tokens": 128, "fold": 4}, "up to 256 / fold=4"),
        ({"fold": 3}, "fold is 3, expected 1, or 2 or 4"),
        ({"fold": 2, "row_tiles": 2}, "with row_tiles=1"),
        ({"width": 32}, "width is 32, expected 64 or 128"),
        ({"warpgroups": 4}, "warpgroups is 4, expected 1, 2 or 3"),
        ({"stages": 1}, "stages is 1, expected 2 to 32"),
        ({"warpgroups": 3, "row_tiles": 2}, "a tile of 384 rows"),
        ({"split": 0}, "split is 0, expected at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            Config(**options)
    x, w = shapes(Case((256,), 128, 512, "w4a16-g128"))
    with pytest.raises(NotImplementedError, match="needs more shared memory"):
        jax.eval_shape(partial(mosaic_sm90.product, out_dtype=x.dtype, config=Config(tokens=256)), x, w)
    x, w = shapes(Case((1,), 128, 512, "w8a16-g128"))
    with pytest.raises(NotImplementedError, match="cuts groups of 128: stages hold 64 columns of a part"):
        jax.eval_shape(partial(mosaic_sm90.product, out_dtype=x.dtype, config=replace(SMALL, width=64)), x, w)
    check_supported("bfloat16", 1, 32, 256, w.format)


def every_code(name: str) -> QuantizedWeight:
    """Returns a weight [32, 256] whose columns hold every code in turn, each row begun at another."""
    fmt = parse_weight_format(name)
    codes = (np.arange(256)[None, :] + 37 * np.arange(32)[:, None]) % 256
    if fmt.packed:
        values = pack4(jnp.asarray(codes % 16))
    elif fmt.codes == "int8":
        values = jnp.asarray((codes - 128).astype(np.int8))
    else:
        values = jnp.asarray(np.where(codes & 0x7F == 0x7F, 0, codes).astype(np.uint8).view(jnp.float8_e4m3fn))
    ones = jnp.ones((32,), jnp.float32) if fmt.group is None else jnp.ones((256 // fmt.group, 32), jnp.float16)
    zeros = jnp.full(ones.shape, -3, jnp.int8) if fmt.zero_point else None
    return QuantizedWeight(values, ones, zeros, None, None, (32, 256), fmt)


FORMATS = ("w4a16-g32", "w4a16-g128", "w4a16-g64-zp", "nf4", "w8a16", "w8a16-g128-zp", "uint8-zp", "fp8-weight")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", FORMATS)
def test_gpu_every_code_in_every_place(name, dtype):
    """Picks one column at a time by x: the product is the decoded weight itself, rounded to x's dtype."""
    w = every_code(name)
    x = jnp.eye(256, dtype=dtype)
    expected = np.asarray(decode(w, dtype)).astype(np.float64).T
    for config in (
        Config(tokens=64),
        Config(fold=4),
        Config(tokens=16, fold=2, warpgroups=3),
        Config(tokens=16, width=64, row_tiles=2, split=2),
    ):
        out = mosaic_sm90.weight_only_matmul(x, w, None, None, jnp.dtype("float32"), config=config)
        assert (np.asarray(out).astype(np.float64) == expected).all()


@pytest.mark.gpu
@pytest.mark.parametrize("case", SUPPORTED, ids=str)
def test_gpu_matches_the_definition(case):
    x, w, bias, residual = case.inputs()

    def run():
        return weight_only_matmul(x, w, bias=bias, residual=residual, out_dtype=case.out_dtype, backend="mosaic")

    out = run()
    assert row_error(out, reference.weight_only_matmul(x, w, bias, residual)) < TOLERANCE[case.dtype]
    assert same_bits(run(), out)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "n"), [*((m, 4096) for m in (1, 16, 64, 128, 256)), (128, 12288), (200, 12288)])
@pytest.mark.parametrize("name", ["w4a16-g128", "nf4", "w8a16"])
def test_gpu_at_the_size_of_a_layer(name, rows, n):
    """Has many stages and tiles a CTA: a stage overwritten too early shows here."""
    x, w, _, _ = Case((rows,), n, 4096 if n == 4096 else 1024, name).inputs()
    out = weight_only_matmul(x, w, backend="mosaic")
    assert row_error(out, reference.weight_only_matmul(x, w, None, None)) < TOLERANCE["bfloat16"]
    assert all(same_bits(weight_only_matmul(x, w, backend="mosaic"), out) for _ in range(5))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["w4a16-g128", "w4a16-g128-zp", "nf4", "w8a16"])
def test_gpu_every_candidate_of_32_rows_is_right(name):
    """Tries candidates, too, that do not run, but are timed."""
    x, w, _, _ = Case((32,), 12288, 1024, name).inputs()
    expected = reference.weight_only_matmul(x, w, None, None)
    for config in candidates(32, 12288, 1024, parse_weight_format(name)):
        out = mosaic_sm90.weight_only_matmul(x, w, None, None, x.dtype, config=config)
        assert row_error(out, expected) < TOLERANCE["bfloat16"], config
