"""Checks the Mosaic GPU kernel: interpreted on the CPU with race detection, lowered for CUDA, and run on a GPU."""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cache_update import cache_update, cache_update_fused, mosaic_sm90, reference, xla
from pallas_kernels.cache_update.api import FUSED
from pallas_kernels.cache_update.cases import BENCH_CASES, CASES, Case
from pallas_kernels.cache_update.config import TUNED, Config, choose_config
from pallas_kernels.formats.kv_formats import parse_format
from pallas_kernels.formats.kv_pages import KVPages, allocate
from pallas_kernels.rms_norm import HeadNorms
from tests.kernels.helpers import TOLERANCE, error, poison, same_bits, thinned
from tests.kernels.interpreter import FIND_RACES, INTERPRET
from tests.kernels.test_cache_update import storage_tolerance, written_rows

SUPPORTED = [case for case in CASES if case.dtype != "float32"]


def small(**changes) -> Case:
    """Returns three rows, one of them dropped: a handful of blocks for the interpreter."""
    return dataclasses.replace(SUPPORTED[0], rows=3, dropped=1, num_pages=3, **changes)


def shapes(case: Case, layers: int = 1) -> tuple:
    """Returns the types of case.inputs(), without the inputs."""
    formats = (parse_format(name, case.head_dim) for name in (case.k_format, case.v_format))
    num_kv_heads, dim = case.heads[1], case.head_dim
    pages = jax.eval_shape(lambda: allocate(case.num_pages, num_kv_heads, case.page_size, dim, *formats, layers=layers))
    q, k = (jax.ShapeDtypeStruct((case.rows, heads, dim), case.dtype) for heads in case.heads)
    wave, row = jax.ShapeDtypeStruct((case.rows, dim // 2), "float32"), jax.ShapeDtypeStruct((case.rows,), "int32")
    return q, k, k, wave, wave, pages, row, row


def interpreted(*arguments, **options):
    """Runs the kernel under the GPU interpreter; a race fails."""
    options["interpret"] = FIND_RACES
    return jax.block_until_ready(mosaic_sm90.cache_update(*arguments, **options))


def poisoned(case: Case) -> tuple:
    """Returns the case's inputs with NaN wherever the pages can hold one."""
    *rest, pages, page, offset = case.inputs()
    return *rest, poison(pages, np.zeros((case.num_pages, case.page_size), bool)), page, offset


INTERPRETED = [
    (small(k_format="bf16", v_format="f16", heads=(4, 2), head_dim=64), Config()),
    (small(k_format="f32", v_format="fp8", heads=(6, 3), head_dim=128, dtype="float16"), Config(heads=2, tokens=2)),
    (small(k_format="fp8", v_format="bf16", heads=(2, 1), head_dim=256), Config(heads=1)),
    (small(k_format="int8-g8", v_format="int4-g32", heads=(4, 4), head_dim=128, page_size=64), Config(vector=4)),
    (small(k_format="int4-g8", v_format="int8-g64", heads=(2, 1), head_dim=64, page_size=128), Config(tokens=4)),
    (small(k_format="int8-g16", v_format="int4-g64", heads=(3, 1), head_dim=64), Config()),
    (small(k_format="int4-g128", v_format="int8-g32", heads=(2, 2), head_dim=128, dtype="float16"), Config()),
    (small(k_format="int8-g256", v_format="int4-g16", heads=(1, 1), head_dim=256, page_size=16), Config()),
    (small(k_format="int4-g64-zp", v_format="int8-g8-zp", heads=(4, 2), head_dim=64), Config()),
    (small(k_format="int8-g32-zp", v_format="int4-g128-zp", heads=(2, 2), head_dim=128, page_size=16), Config()),
]
ROTATED = [
    (small(k_format="int4-g32-h", v_format="bf16-h", heads=(4, 2), head_dim=64), Config()),
    (small(k_format="int8-g64-zp-h", v_format="int4-g8-h", heads=(3, 3), head_dim=128), Config(heads=2, tokens=2)),
    (small(k_format="fp8-h", v_format="int4-g256-zp-h", heads=(2, 1), head_dim=256, dtype="float16"), Config(heads=1)),
    (small(k_format="f32-h", v_format="int4-g128", heads=(4, 4), head_dim=128), Config(vector=4)),
]


@pytest.mark.parametrize(("case", "config"), INTERPRETED, ids=str)
def test_stores_the_bits_that_xla_stores_and_touches_nothing_else(case, config):
    """Expects equal codes, as the arithmetic is the same to the last operation. The xla backend in turn leaves every
    other slot alone (test_cache_update)."""
    arguments = poisoned(case)
    q, pages = interpreted(*arguments, config=config)
    same_q, same = xla.cache_update(*arguments)
    assert same_bits((q, pages.v), (same_q, same.v))
    # A rotated value that is stored whole shows whether its product was contracted with its sum; others round it away.
    assert case.k_format == "f32" or same_bits(pages.k, same.k)
    expected_q, expected = reference.cache_update(*arguments)
    assert error(q, expected_q) < TOLERANCE[case.dtype]
    page, offset = arguments[-2:]
    for name, rows, expected_rows in zip(
        (case.k_format, case.v_format), written_rows(pages, page, offset), written_rows(expected, page, offset)
    ):
        assert error(rows, expected_rows) < storage_tolerance(name, case.dtype)


@pytest.mark.parametrize(("case", "config"), ROTATED, ids=str)
def test_what_is_rotated_is_near_what_xla_stores_and_the_rest_is_its_bits(case, config):
    """Sums of a rotation have another order: a code is another one only where a quotient is nearly between two."""
    arguments = poisoned(case)
    q, pages = interpreted(*arguments, config=config)
    same_q, same = xla.cache_update(*arguments)
    assert same_bits(q, same_q)
    page, offset = arguments[-2:]
    _, expected = reference.cache_update(*arguments)
    for ours, theirs, name, rows, wanted in zip(
        (pages.k, pages.v), (same.k, same.v), (case.k_format, case.v_format),
        written_rows(pages, page, offset), written_rows(expected, page, offset),
    ):  # fmt: skip
        assert error(rows, wanted) < storage_tolerance(name.removesuffix("-h"), case.dtype)
        if not ours.format.hadamard:
            assert same_bits(ours, theirs)
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            differ = np.asarray(a).view(np.uint8) != np.asarray(b).view(np.uint8)
            assert ours.format.dtype == "float32" or differ.mean() < 1e-3


def test_reads_one_fused_array_twice_over_with_the_same_bits():
    case, config = INTERPRETED[3]
    q, k, v, *rest = poisoned(case)
    num_heads, num_kv_heads = case.heads
    qkv = jnp.concatenate([q, k, v], axis=1)
    options = {"first": (0, num_heads, num_heads + num_kv_heads), "num_heads": num_heads, "config": config}
    outs = [interpreted(qkv, qkv, qkv, *rest, **options) for _ in range(2)]
    assert same_bits(outs[0], xla.cache_update(q, k, v, *rest))
    assert same_bits(*outs)


NORMED = [(*each, offset) for each in (*(INTERPRETED[i] for i in (0, 2, 3)), ROTATED[1]) for offset in (0.0, 1.0)]


@pytest.mark.parametrize(("case", "config", "offset"), thinned(NORMED, (0, 2, 5, 7)), ids=str)
def test_norms_of_heads_have_the_bits_of_a_pass_of_their_own(case, config, offset):
    qkv, rest, norms = normed(case, offset)
    out = FUSED["mosaic"].run(qkv, case.heads[0], norms, *rest, config=config, interpret=FIND_RACES)
    assert same_bits(out, cache_update_fused(qkv.reshape(len(qkv), -1), *rest, norms=norms, backend="xla"))


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_gains_of_another_dtype_are_rounded_as_in_a_pass_of_their_own(offset):
    qkv, rest, norms = normed(INTERPRETED[2][0], offset)
    wide = norms._replace(q=norms.q.astype(jnp.float32) + 1e-3, k=norms.k.astype(jnp.float32) - 1e-3)
    out = FUSED["mosaic"].run(qkv, INTERPRETED[2][0].heads[0], wide, *rest, interpret=INTERPRET)
    assert same_bits(out, cache_update_fused(qkv.reshape(len(qkv), -1), *rest, norms=wide, backend="xla"))


@pytest.mark.parametrize("fault", ["sums of one half", "gains exchanged", "no eps"])
def test_seeded_faults_of_norms_are_caught(monkeypatch, fault):
    qkv, rest, norms = normed(INTERPRETED[3][0])
    expected = cache_update_fused(qkv.reshape(len(qkv), -1), *rest, norms=norms, backend="xla")

    def wrong(halves, gains, *, eps, real=mosaic_sm90._norm, **how):
        if fault == "sums of one half":
            return real([halves[0], halves[0]], gains, eps=eps, **how)[:1] + real(halves, gains, eps=eps, **how)[1:]
        return real(halves, gains[::-1] if fault == "gains exchanged" else gains, eps=eps * (fault != "no eps"), **how)

    monkeypatch.setattr(mosaic_sm90, "_norm", wrong)
    monkeypatch.setattr(mosaic_sm90, "cache_update", mosaic_sm90.cache_update.__wrapped__)  # past the cache of the jit
    out = FUSED["mosaic"].run(qkv, INTERPRETED[3][0].heads[0], norms, *rest, interpret=INTERPRET)
    assert not same_bits(out, expected)


def normed(case: Case, offset: float = 0.0) -> tuple:
    """Returns qkv [T, H + 2K, D], whose rows are small, what else an update takes, and norms."""
    q, k, v, *rest = poisoned(case)
    rng = np.random.default_rng(7)
    gains = (jnp.asarray(rng.uniform(0.5, 2, case.head_dim), q.dtype) for _ in range(2))
    return jnp.concatenate([q, k, v], axis=1) * jnp.asarray(0.01, q.dtype), rest, HeadNorms(*gains, 1e-5, offset)


def test_no_rows():
    case = small(k_format="bf16", v_format="fp8", heads=(2, 1), head_dim=64)
    q, k, v, cos, sin, pages, page, offset = (x if isinstance(x, KVPages) else x[:0] for x in case.inputs())
    out, new = mosaic_sm90.cache_update(q, k, v, cos, sin, pages, page, offset)
    assert out.shape == (0, 2, 64)
    assert same_bits(new, pages)


@pytest.mark.parametrize(
    ("page", "offset"), [([-1, 3, -(2**31)], [0, 1, 2]), ([0, 1, 2], [-1, 8, 2**31 - 1])], ids=("page", "offset")
)
def test_drops_what_is_out_of_range_on_either_side(page, offset):
    *rest, pages, _, _ = poisoned(small(k_format="int8-g8", v_format="bf16", heads=(1, 1), head_dim=64))
    _, new = interpreted(*rest, pages, jnp.asarray(page, jnp.int32), jnp.asarray(offset, jnp.int32))
    assert same_bits(new, pages)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("_rotate", lambda real: lambda halves, angle, layout: real(halves[::-1], angle, layout)),
        ("_scale", lambda real: lambda peak, largest: real(peak * 1.01, largest)),
        ("_load", lambda real: lambda source, layout: real(source, layout)[::-1]),
    ],
)
def test_seeded_faults_are_caught(monkeypatch, name, change):
    arguments = poisoned(small(k_format="int8-g8", v_format="int4-g32", heads=(2, 1), head_dim=64))
    monkeypatch.setattr(mosaic_sm90, name, change(getattr(mosaic_sm90, name)))
    options = {"interpret": INTERPRET}
    out = mosaic_sm90.cache_update.__wrapped__(*arguments, **options)  # past the cache of the jit
    assert not same_bits(out, xla.cache_update(*arguments))


def lower(function, *arguments) -> str:
    return function.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def custom_calls(text: str) -> list[str]:
    return [line for line in text.splitlines() if "stablehlo.custom_call @mosaic_gpu" in line]


@pytest.mark.parametrize("which", thinned((0, 1), (0,)))
def test_every_kind_of_case_lowers_for_cuda(which):
    """Leaves rows out: they are the grid's size alone."""
    odd = [
        dataclasses.replace(SUPPORTED[0], heads=heads, head_dim=dim) for heads in ((28, 4), (5, 1)) for dim in (64, 256)
    ]
    bench = {(dataclasses.replace(case, rows=0), choose_config(case.rows, case.heads[1])): case for case in BENCH_CASES}
    assert {config for _, config in list(bench)[::5]} == {config for *_, config in TUNED}
    some = [*SUPPORTED[::4], *list(bench.values())[::5], *odd]
    chosen = [(case, choose_config(case.rows, case.heads[1])) for case in some]
    for case, config in (*chosen, *INTERPRETED, *ROTATED)[which::2]:
        assert len(custom_calls(lower(jax.jit(partial(mosaic_sm90.cache_update, config=config)), *shapes(case)))) == 1


@pytest.mark.parametrize("which", thinned(range(4), (0,)))
def test_norms_of_heads_lower_for_cuda(which):
    """Sums go over other lanes in each layout of registers."""

    def run(config, q, k, v, *rest):
        gains = (jnp.ones(q.shape[-1], q.dtype),) * 2
        return mosaic_sm90.cache_update(q, k, v, *rest, gains=gains, eps=1e-5, gain_offset=which % 2, config=config)

    for case, config in (*INTERPRETED, *ROTATED)[which::4]:
        assert len(custom_calls(lower(jax.jit(partial(run, config)), *shapes(case)))) == 1


LAYERS = 32


def layers(qkv, cos, sin, cache, page, offset, backend="mosaic"):
    """Calls an inner jit once a layer: Q feeds the next layer's Q, so that nothing runs ahead."""

    @jax.jit
    def layer(qkv, cos, sin, pages, page, offset):
        q, pages = cache_update_fused(qkv, cos, sin, pages, page, offset, backend=backend)
        return jax.lax.dynamic_update_slice_in_dim(qkv, q.reshape(len(q), -1), 0, axis=1), pages

    for i in range(LAYERS):
        qkv, cache = layer(qkv, cos, sin, cache.at_layer(i), page, offset)
    return qkv, cache.at_layer(None)


def layer_shapes(case: Case) -> tuple:
    *_, wave, _, pages, row, _ = shapes(case, LAYERS)
    qkv = jax.ShapeDtypeStruct((case.rows, (case.heads[0] + 2 * case.heads[1]) * case.head_dim), case.dtype)
    return qkv, wave, wave, pages, row, row


def test_pages_of_all_layers_alias_and_the_fused_array_is_not_sliced():
    """Checks what the CPU can see. Each array is an output of the call that aliases its operand, and of the step. qkv
    goes into the call whole, three times. 32 layers share one lowering: each is an operand."""
    case = dataclasses.replace(BENCH_CASES[0], rows=8, k_format="int8-g8", v_format="fp8")
    text = lower(jax.jit(layers, donate_argnums=3), *layer_shapes(case))
    (call,) = custom_calls(text)
    assert len(re.findall(r"output_operand_alias<", call)) == 3  # K's values and scales, V's values
    assert len(re.findall(r"tensor<8x96x2x\d+x\d+x\d+xbf16>", call)) == 3
    assert len(re.findall(r"tf.aliasing_output|jax.buffer_donor", text)) == 3
    assert "stablehlo.slice" not in text
    (barrier,) = re.findall(r"stablehlo.optimization_barrier ([^:]*) :", text)
    assert len(barrier.split(",")) == 3 + 2, "equal pools stay apart; so do K's layer and V's"


def test_configurations_are_checked():
    assert choose_config(1, 32) == TUNED[-1][-1]
    assert choose_config(2048, 32) == TUNED[0][-1]
    assert choose_config(8192, 8) == TUNED[1][-1]
    for options, message in (
        ({"heads": 12}, "heads is 12, expected a power of two from 1 to 64"),
        ({"tokens": 16}, "tokens is 16, expected a power of two from 1 to 8"),
        ({"vector": 1}, "vector is 1, expected a power of two from 2 to 8"),
    ):
        with pytest.raises(ValueError, match=message):
            Config(**options)


def test_the_fused_entry_does_what_three_arrays_do_and_checks_its_shape():
    case = CASES[1]
    q, k, v, *rest = case.inputs()
    qkv = jnp.concatenate([q, k, v], axis=1).reshape(case.rows, -1)
    assert same_bits(cache_update_fused(qkv, *rest), cache_update(q, k, v, *rest))
    with pytest.raises(ValueError, match=r"qkv has shape \(12, 1000\), expected \[T, \(H \+ 2K\) D\] with K=2, D=128"):
        cache_update_fused(qkv[:, :1000], *rest)
    pages = allocate(2, 1, 8, 32, *[parse_format("bf16", 32)] * 2)
    arguments = qkv[:, :128].astype("bfloat16"), *(x[:, :16] for x in rest[:2]), pages, *rest[3:]
    with pytest.raises(NotImplementedError, match="head dim 32 is not supported by backend mosaic, which does 64, 128"):
        cache_update_fused(*arguments, backend="mosaic")


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*SUPPORTED, *(case for case, _ in (*INTERPRETED[-2:], *ROTATED))], ids=str)
def test_gpu_matches_the_definition(case):
    """Compares with float64. Nothing else changes, and the same bits come again, and from one fused array."""
    arguments = poisoned(case)
    q, pages = cache_update(*arguments, backend="mosaic")
    expected_q, expected = reference.cache_update(*arguments)
    page, offset = arguments[-2:]
    assert error(q, expected_q) < TOLERANCE[case.dtype]
    kept = np.asarray(page) < case.num_pages
    hidden = np.ones((case.num_pages, case.page_size), bool)
    hidden[np.asarray(page)[kept], np.asarray(offset)[kept]] = False
    hidden = np.broadcast_to(hidden[:, None, :], pages.k.values.shape[:3])
    for before, after in zip(jax.tree.leaves(arguments[5]), jax.tree.leaves(pages)):
        before, after = (np.asarray(pool).reshape(*hidden.shape, -1) for pool in (before, after))
        assert before[hidden].tobytes() == after[hidden].tobytes()
    for name, rows, expected_rows in zip(
        (case.k_format, case.v_format), written_rows(pages, page, offset), written_rows(expected, page, offset)
    ):
        assert error(rows, expected_rows) < storage_tolerance(name.removesuffix("-h"), case.dtype)
    assert same_bits(cache_update(*arguments, backend="mosaic"), (q, pages))
    qkv = jnp.concatenate(arguments[:3], axis=1).reshape(case.rows, -1)
    assert same_bits(cache_update_fused(qkv, *arguments[3:], backend="mosaic"), (q, pages))
    qkv, rest, norms = normed(case)
    flat = qkv.reshape(case.rows, -1)
    (q, pages), (same_q, same) = (
        cache_update_fused(flat, *rest, norms=norms, backend=backend) for backend in ("mosaic", "xla")
    )
    assert error(q, same_q) < TOLERANCE[case.dtype]
    for name, ours, theirs in zip(
        (case.k_format, case.v_format), *(written_rows(each, page, offset) for each in (pages, same))
    ):
        stored = 2 * storage_tolerance(name.removesuffix("-h"), case.dtype)
        assert error(ours, theirs) < max(stored, TOLERANCE[case.dtype]), "a norm may be rounded to the other side first"


@pytest.mark.gpu
def test_gpu_step_holds_no_copy_of_a_pool():
    """Reads the compiled HLO of 32 layers: all pages are donated into the result, and no instruction makes another."""
    case = dataclasses.replace(BENCH_CASES[0], rows=8, k_format="int8-g8", v_format="fp8")
    compiled = jax.jit(layers, donate_argnums=3).lower(*layer_shapes(case)).compile()
    pool = case.num_pages * case.heads[1] * case.page_size * case.head_dim
    assert compiled.memory_analysis().temp_size_in_bytes < pool
    copies = [line for line in compiled.as_text().splitlines() if re.search(r"= \S+ (copy|copy-start|fusion)\(", line)]
    assert not [line for line in copies if f"{LAYERS * 4096},32,16" in line]
