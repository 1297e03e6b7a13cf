"""Checks that every operation refuses what no list allows: formats that a kernel would misread."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cache_update import cache_update
from pallas_kernels.cache_update import reference as update_reference
from pallas_kernels.cache_update.cases import Case as Update
from pallas_kernels.decode_attention import decode_attention, reference
from pallas_kernels.decode_attention.cases import Case as Decode
from pallas_kernels.formats.kv_formats import KVFormat
from pallas_kernels.formats.kv_pages import KVPages, Pages
from pallas_kernels.formats.quantized_weights import encode
from pallas_kernels.formats.weight_formats import WeightFormat, parse_weight_format
from pallas_kernels.prefill_attention import prefill_attention
from pallas_kernels.prefill_attention.cases import Case as Prefill
from pallas_kernels.weight_only_matmul import weight_only_matmul
from tests.kernels.helpers import TOLERANCE, error

SIZES = {"heads": (2, 1), "head_dim": 64, "page_size": 8, "k_format": "bf16", "v_format": "bf16", "dtype": "bfloat16"}
CALLS = {  # of each operation over pages: the operation, its arguments, and where the pages are among them
    "cache_update": (cache_update, Update(rows=3, dropped=0, num_pages=3, **SIZES), 5),
    "decode_attention": (partial(decode_attention, scale=0.1), Decode(lengths=(9, 3), **SIZES), 1),
    "prefill_attention": (partial(prefill_attention, scale=0.1), Prefill((9,), (12,), 0, **SIZES), 1),
}


def stored_as(pages: KVPages, fmt: KVFormat) -> KVPages:
    """Returns pages whose arrays fit a format, be it one that no backend reads."""

    def pool(old: Pages) -> Pages:
        scales = None
        if fmt.group is not None:
            scales = jnp.ones((*old.values.shape[:2], old.page_size * fmt.numbers(old.head_dim)), jnp.float16)
        return Pages(old.values.astype(fmt.storage_dtype), scales, fmt)

    return KVPages(pool(pages.k), pool(pages.v))


def call(name: str, fmt: KVFormat, backend: str):
    operation, case, at = CALLS[name]
    arguments = list(case.inputs())
    arguments[at] = stored_as(arguments[at], fmt)
    return jax.eval_shape(partial(operation, backend=backend), *arguments)


@pytest.mark.parametrize("name", CALLS)
def test_pages_in_unknown_formats(name):
    call(name, KVFormat("bfloat16"), "mosaic")
    unknown = ["uint8", "int16", "float8_e4m3", "float8_e4m3fnuz", "float8_e4m3b11fnuz", "float8_e5m2fnuz", "bool"]
    wrong = [
        KVFormat("int8"),
        KVFormat("int8", 12),
        KVFormat("int8", 128),
        KVFormat("bfloat16", 8),
        KVFormat("bfloat16", zero_point=True),
    ]
    for fmt in [*map(KVFormat, unknown), *wrong]:
        for backend in ("mosaic", "xla", "hopper"):
            with pytest.raises(
                NotImplementedError, match=r"k is stored as .*, which no backend reads; formats: bfloat16"
            ):
                call(name, fmt, backend)


@pytest.mark.parametrize("name", CALLS)
def test_pages_that_the_kernels_lack(name):
    with jax.enable_x64(True):
        for dtype in ("float8_e5m2", "float64", *(("float32",) if "attention" in name else ())):
            with pytest.raises(NotImplementedError, match=f"K stored as {dtype} is not supported by backend mosaic"):
                call(name, KVFormat(dtype), "mosaic")
            for backend in ("xla", "hopper"):  # which takes XLA for it
                call(name, KVFormat(dtype), backend)


@pytest.mark.parametrize("name", CALLS)
def test_pages_with_zero_points_and_rotated_ones(name, monkeypatch):
    monkeypatch.setattr(
        "pallas_kernels.triton.triton_call.importlib.util.find_spec", lambda _: None
    )  # its import needs a GPU
    for fmt in (KVFormat("int8", 8, hadamard=True), KVFormat("bfloat16", hadamard=True), KVFormat("int8", 64, True)):
        call(name, fmt, "mosaic")
        call(name, fmt, "hopper")
    unknown = KVFormat("float8_e5m2", hadamard=True)
    with pytest.raises(NotImplementedError, match="K stored as float8_e5m2-h is not supported by backend mosaic"):
        call(name, unknown, "mosaic")
    call(name, unknown, "hopper")


def test_e5m2_is_read_as_such():
    """Reads by XLA, unless a kernel is named: what reads a byte as e4m3 would be wrong by half."""
    case = Decode(lengths=(9, 3), **SIZES)
    q, pages, *rest = case.inputs()
    pages = stored_as(pages, KVFormat("float8_e5m2"))
    expected = reference.decode_attention(q, pages, *rest, case.scale, None)
    assert (
        error(decode_attention(q, pages, *rest, scale=case.scale, backend="hopper"), expected) < TOLERANCE["bfloat16"]
    )
    misread = replace(
        pages.k, values=jax.lax.bitcast_convert_type(pages.k.values, jnp.uint8), format=KVFormat("float8_e4m3fn")
    )
    other = reference.decode_attention(q, KVPages(misread, misread), *rest, case.scale, None)
    assert error(other, expected) > 0.5


def test_e5m2_is_written_as_such():
    case = Update(rows=12, dropped=2, num_pages=3, **SIZES)
    *arguments, pages, page, offset = case.inputs()
    pages = stored_as(pages, KVFormat("float8_e5m2"))
    for got, want in zip(
        cache_update(*arguments, pages, page, offset),
        update_reference.cache_update(*arguments, pages, page, offset),
        strict=True,
    ):
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            a, b = (np.asarray(x).astype(a.dtype).astype(np.float64) for x in (a, b))
            assert np.mean(a != b) < 0.01  # where a sum's last bit decides how it rounds


def test_angles_are_floats_of_one_dtype():
    q, k, v, cos, sin, *rest = Update(rows=3, dropped=0, num_pages=3, **SIZES).inputs()
    with pytest.raises(ValueError, match="cos has dtype int32, expected one of"):
        cache_update(q, k, v, cos.astype(jnp.int32), sin, *rest)
    with pytest.raises(ValueError, match="sin has dtype bfloat16, expected float32 as cos has"):
        cache_update(q, k, v, cos, sin.astype(jnp.bfloat16), *rest)


def test_weights_in_other_formats():
    x, weight = jnp.ones((2, 256), jnp.bfloat16), jnp.ones((32, 256), jnp.float32)
    fp8, int8, int4 = (encode(weight, parse_weight_format(name)) for name in ("fp8-weight", "w8a16", "w4a16-g32"))
    for w, message in (
        (replace(fp8, values=fp8.values.astype(jnp.float8_e5m2)), r"w.values is float8_e5m2.*, expected float8_e4m3fn"),
        (replace(int8, values=int8.values.astype(jnp.uint8)), r"w.values is uint8\[32, 256\], expected int8"),
        (replace(int8, scales=int8.scales.astype(jnp.float16)), r"w.scales is float16\[32\], expected float32"),
        (replace(int4, scales=int4.scales.astype(jnp.bfloat16)), r"w.scales is bfloat16\[8, 32\], expected float16"),
        (replace(int4, scales=int4.scales[:4]), r"w.scales is float16\[4, 32\], expected float16\[8, 32\]"),
        (replace(int4, zeros=jnp.zeros((8, 32), jnp.int8)), r"w.zeros is int8\[8, 32\], expected none"),
        (replace(int4, format=replace(int4.format, zero_point=True)), r"w.zeros is none, expected int8\[8, 32\]"),
    ):  # fmt: skip
        for backend in ("xla", "mosaic"):
            with pytest.raises(ValueError, match=message):
                weight_only_matmul(x, w, backend=backend)
    learned = replace(int4, scales=int4.scales.astype(jnp.float32))
    with pytest.raises(NotImplementedError, match="scales in float32 is not supported by backend mosaic"):
        weight_only_matmul(x, learned, backend="mosaic")
    assert (weight_only_matmul(x, learned, backend="hopper") == weight_only_matmul(x, int4, backend="xla")).all()
    for fmt, message in (
        (WeightFormat("int4"), "int4 in groups of a row is not supported by backend mosaic, which does 32, 64, 128"),
        (WeightFormat("fp8", 32), "fp8 in groups of 32 is not supported by backend mosaic, which does a row"),
        (WeightFormat("nf4", 64, zero_point=True), "a zero point for nf4 is not supported"),
    ):
        like = parse_weight_format("w4a16-g64-zp") if fmt.zero_point else fmt
        w = replace(encode(weight, like), format=fmt)
        with pytest.raises(NotImplementedError, match=message):
            weight_only_matmul(x, w, backend="mosaic")
        assert weight_only_matmul(x, w, backend="hopper").shape == (2, 32)
    with pytest.raises(
        NotImplementedError, match="no backend reads codes 'int2'; codes: int8, fp8, e5m2, int4, nf4, fp4, iq4nl, e2m1"
    ):
        weight_only_matmul(x, replace(int8, format=WeightFormat("int2")))
