"""Checks Triton kernels over pages: interpreted against the references, compiled for four GPUs, and run on one."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.backends import choose
from pallas_kernels.cache_update import cache_update_fused
from pallas_kernels.cache_update import cases as update_cases
from pallas_kernels.decode_attention import api as decode_api
from pallas_kernels.decode_attention import cases as decode_cases
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.decode_attention import reference as decode_reference
from pallas_kernels.formats.kv_formats import parse_format
from pallas_kernels.formats.kv_pages import KVPages, allocate
from pallas_kernels.prefill_attention import cases as prefill_cases
from pallas_kernels.prefill_attention import make_work, plan, prefill_attention
from pallas_kernels.prefill_attention import reference as prefill_reference
from pallas_kernels.prefill_attention.config import triton_config
from pallas_kernels.triton import pages_triton
from tests.kernels.helpers import TOLERANCE, error, same_bits
from tests.kernels.triton_tools import CAPABILITIES, SHARED_MEMORY, cases_of, compile_for, run_ptx

pytest.importorskip("triton")  # of extras and development, for Linux alone
pytest.importorskip("hypothesis")  # which triton_cases.py takes trees from

from tests.kernels.triton_cases import (  # noqa: E402
    DECODE,
    PREFILLS,
    SMALL_DECODE,
    UPDATES,
    decode_arguments,
    prefill_arguments,
    update_arguments,
    updated,
)

LAYER = jax.ShapeDtypeStruct((1,), jnp.int32)
STORED = ("bfloat16", "float16", "float8_e4m3fn", "int8", "int4")


def test_every_code_is_decoded():
    """Runs the PTX of both ways to read float8, and of integers with and without zeros."""
    from pallas_kernels.triton import codes_triton

    words = np.arange(65536, dtype=np.uint16)
    bytes_of = np.stack([words & 255, words >> 8]).astype(np.uint8)
    nibbles = np.stack([words >> 4 * i & 15 for i in range(4)]).astype(np.int16)
    floats = bytes_of.view(jnp.float8_e4m3fn).astype(np.float16)
    for ptx, expected in (
        (codes_triton.E4M3, floats),
        (codes_triton.E4M3_BY_INTEGERS, floats),
        (codes_triton.INT8, bytes_of.view(np.int8)),
        (codes_triton.INT8_FROM_ZERO, bytes_of.view(np.int8) + np.int16(128)),
        (codes_triton.INT4, (nibbles ^ 8) - 8),
        (codes_triton.INT4_FROM_ZERO, nibbles ^ 8),
    ):
        np.testing.assert_array_equal(np.stack(run_ptx(ptx.value, words, len(expected))), expected)


def check_compiled(launch, inputs, capability: int) -> None:
    """Checks that the kernel is within the shared memory and the registers of a block, and nothing spilled."""
    made = compile_for(launch, [each.dtype for each in inputs], capability)
    assert f".target sm_{capability}" in made.ptx
    assert made.shared <= SHARED_MEMORY[capability], launch
    assert made.spilled == 0, launch
    assert made.registers * 32 * launch.num_warps <= 65536, launch


def shapes_of(D: int, kv: str, heads: tuple[int, int]) -> KVPages:
    fmt = parse_format(kv, D)
    return jax.eval_shape(lambda: allocate(64, heads[1], 16, D, fmt, fmt))


COMPILED_DECODE = [  # head dim, heads, rows, window, trees, softcap, with which sinks come
    (128, "bf16", (32, 8), 1, None, False, None),
    (128, "int8-g8", (32, 32), 1, None, False, None),
    (128, "int4-g128-zp", (32, 8), 1, None, False, None),
    (128, "int8-g128", (24, 1), 1, None, False, None),
    (128, "fp8", (32, 8), 8, 4096, True, 50.0),
    (128, "bf16", (64, 1), 1, None, False, None),
    (256, "f16", (16, 1), 4, 4096, False, 50.0),
    (256, "int8-g64-zp", (8, 4), 1, None, False, None),
]


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_decode_attention_compiles(capability, tmp_path, monkeypatch):
    from pallas_kernels.decode_attention import triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(pages_triton, "reads_float8", lambda: capability >= 89)
    for D, kv, heads, Q, window, trees, cap in cases_of(capability, COMPILED_DECODE):
        q, pages = jax.ShapeDtypeStruct((4 * Q, heads[0], D), jnp.bfloat16), shapes_of(D, kv, heads)
        table, lengths = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((4, 64), (4,)))
        pools = *pages_triton.arrays(pages.k), *pages_triton.arrays(pages.v), LAYER
        masks = jax.ShapeDtypeStruct((4, Q, 1), jnp.uint32) if trees else lengths
        split, merge = triton.launches(q, pages, table, lengths, 0.1, window, trees, softcap=cap, sinks=cap is not None)
        check_compiled(split, (q, *pools, table, lengths, lengths, masks, lengths), capability)
        check_compiled(merge, (*split.out, lengths, lengths, q), capability)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_cache_update_compiles(capability, tmp_path, monkeypatch):
    from pallas_kernels.cache_update import triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    cases = (128, "bf16", (32, 8)), (128, "int4-g32", (32, 8)), (64, "fp8", (3, 1)), (256, "int8-g8-zp", (8, 4))
    for D, kv, (H, K) in cases_of(capability, cases):
        pages, angles = shapes_of(D, kv, (H, K)), jax.ShapeDtypeStruct((8, D // 2), jnp.float32)
        qkv, page = jax.ShapeDtypeStruct((8, H + 2 * K, D), jnp.bfloat16), jax.ShapeDtypeStruct((8,), jnp.int32)
        pools = [page if x is None else x for part in (pages.k, pages.v) for x in (part.values, part.scales)]
        made = triton.launch(qkv, qkv, qkv, pages, (0, H, H + K), H)
        check_compiled(made, (qkv, qkv, qkv, angles, angles, page, page, LAYER, *pools), capability)


COMPILED_PREFILL = [  # head dim, format, window, chunks (4 of 512 rows, or 64 of 32), softcap, with which sinks come
    (64, "bf16", None, 4, None),
    (64, "bf16", None, 64, 50.0),
    (128, "bf16", None, 4, None),
    (128, "int8-g8", 4096, 4, None),
    (128, "fp8", None, 4, None),
    (128, "int8-g8", 4096, 64, None),
    (128, "int4-g32", None, 4, None),
    (128, "int8-g8-zp", None, 4, None),
    (256, "f16", None, 4, 50.0),
    (256, "int8-g8-zp", None, 4, None),
    (256, "int8-g8-zp", None, 64, None),
    (256, "int4-g32", None, 4, None),
]


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_prefill_attention_compiles(capability, tmp_path, monkeypatch):
    from pallas_kernels.prefill_attention import triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(pages_triton, "reads_float8", lambda: capability >= 89)
    for D, kv, window, chunks, cap in cases_of(capability, COMPILED_PREFILL):
        table, cu, lens = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((chunks, 64), (chunks + 1,), (chunks,)))
        q, pages = jax.ShapeDtypeStruct((2048, 8, D), jnp.bfloat16), shapes_of(D, kv, (8, 4))
        config = triton_config(q, pages, chunks, hopper=capability == 90)
        work = jax.eval_shape(partial(make_work, q, pages, window=window, config=config), cu, lens)
        pools = *pages_triton.arrays(pages.k), *pages_triton.arrays(pages.v), LAYER
        made = triton.launch(q, pages, table, work, 0.1, cap, cap is not None)
        check_compiled(made, (q, *pools, table, work.tiles, work.count, q), capability)


def test_hopper_runs_it_unasked_where_mosaic_has_no_room():
    q, pages, *_ = SMALL_DECODE.inputs()
    many = jax.ShapeDtypeStruct((4, 20, 128), "float16")  # 10 query heads a KV head
    wide = jax.eval_shape(lambda: allocate(4, 2, 16, 128, *[parse_format("bf16", 128)] * 2))
    zeros = jax.eval_shape(lambda: allocate(4, 2, 16, 64, *[parse_format("int8-g8-zp", 64)] * 2))
    for kind, queries, stored, expected in (
        ("hopper", q, pages, "mosaic"), ("hopper", q, zeros, "mosaic"), ("hopper", many, wide, "triton"),
        ("ampere", q, zeros, "triton"),
    ):  # fmt: skip
        assert choose(decode_api.BACKENDS, kind, queries, stored, 1) is decode_api.BACKENDS[expected]


def test_what_is_refused():
    q, pages, table, lengths = SMALL_DECODE.inputs()
    rotated = jax.eval_shape(lambda: allocate(4, 2, 16, 64, *[parse_format("int8-g8-h", 64)] * 2))
    run = partial(decode_attention, scale=0.1, backend="triton")
    with pytest.raises(NotImplementedError, match="dtype float32 is not supported by backend triton, which does bf"):
        run(q.astype("float32"), pages, table, lengths)
    with pytest.raises(NotImplementedError, match="K stored as int8-h is not supported by backend triton"):
        jax.eval_shape(run, q, rotated, table, lengths)
    q, pages, *rest = PREFILLS[0].inputs()
    work = make_work(q, pages, *rest[1:])
    with pytest.raises(ValueError, match="work was made for backend mosaic, not triton"):
        prefill_attention(q, pages, *rest, scale=0.1, work=work, backend="triton")


ON_GPU = [case for case in decode_cases.CASES if case.dtype != "float32" and case.k_format != "f32"]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "rows", "tree"), [*DECODE, *((case, None, False) for case in ON_GPU)], ids=str
)  # fmt: skip
def test_gpu_decode_attention_matches_the_formula(case, rows, tree):
    (q, pages, table, lengths), segments = decode_arguments(case, rows, tree)
    run = partial(decode_attention, scale=case.scale, window=case.window, backend="triton")
    parts = () if segments is None else (segments.rows, segments.ancestors)
    expected = decode_reference.decode_attention(q, pages, table, lengths, case.scale, case.window, *parts)
    out = run(q, pages, table, lengths, segments=segments)
    assert error(out, expected) < TOLERANCE[case.dtype]
    assert same_bits(out, run(q, pages, table, lengths, segments=segments))
    last = None if segments is None else jax.tree.map(lambda x: x[-1:], segments)
    alone = run(q[-case.width :], pages, table[-1:], lengths[-1:], segments=last)
    assert same_bits(out[-case.width :], alone)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*UPDATES, *(x for x in update_cases.CASES if x.dtype != "float32")], ids=str)
def test_gpu_cache_update_matches_the_definition(case):
    arguments = update_arguments(case)
    q, k, v, cos, sin, pages, page, offset = arguments
    rotated, new = updated(case, arguments)
    fused = jnp.concatenate([x.reshape(case.rows, -1) for x in (q, k, v)], axis=1)
    run = partial(cache_update_fused, backend="triton")
    assert same_bits((rotated, new), run(fused, cos, sin, pages, page, offset))
    step = jax.jit(run, donate_argnums=3).lower(fused, cos, sin, pages, page, offset).compile()
    sizes = sum(leaf.nbytes for leaf in jax.tree.leaves(pages))
    assert step.memory_analysis().alias_size_in_bytes == sizes  # no copy of a pool


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        case
        for case in (*PREFILLS, *prefill_cases.CASES, *prefill_cases.MOSAIC_CASES)
        if case.dtype != "float32" and case.k_format != "f32"
    ],
    ids=str,
)
def test_gpu_prefill_attention_matches_the_formula(case):
    q, pages, *rest = arguments = prefill_arguments(case)
    expected = prefill_reference.prefill_attention(*arguments, case.scale, case.window)
    run = partial(prefill_attention, *arguments, scale=case.scale, window=case.window, backend="triton")
    out = run()
    rounded = 1.5 if {case.k_format, case.v_format} - {"bf16", "f16"} else 1  # float16 numbers of codes and scales
    assert error(out, expected) < rounded * TOLERANCE[case.dtype]
    work = plan(q, pages, *rest[1:], scale=case.scale, window=case.window, backend="triton")
    assert same_bits(out, run(work=work))
