"""Checks matmuls under backend "deterministic": a row's bits are those it has alone, for any number of rows."""

import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import one_order
from pallas_kernels.backends import TARGET
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.formats import kv_pages
from pallas_kernels.formats.kv_formats import KVFormat
from pallas_kernels.formats.quantized_rows import QuantizedRows, quantize_rows
from pallas_kernels.formats.quantized_weights import encode
from pallas_kernels.formats.weight_formats import parse_weight_format
from pallas_kernels.fp8_matmul import fp8_matmul
from pallas_kernels.int8_matmul import int8_matmul
from pallas_kernels.matmul import matmul
from pallas_kernels.norm_quant import norm_quant
from pallas_kernels.one_order import ROWS, in_tiles
from pallas_kernels.prefill_attention import plan, prefill_attention
from pallas_kernels.prefill_attention.config import PART
from pallas_kernels.swiglu import swiglu
from pallas_kernels.weight_only_matmul import weight_only_matmul
from tests.kernels.helpers import thinned

KINDS = ("matmul", "head", "swiglu", "int8", "fp8", "w8a16", "w4a16-g128", "w4a16-g128-zp", "nf4", "fp8-weight")
M = (1, 7, 17, 300)
LARGE = (1, 8, 9, 17, 64, 129, 513, 4096)
FEW = (1, 17, 513)  # each is a kernel to compile, which takes a busy host ten seconds


def draw(seed: int, *shape: int, dtype: str = "bfloat16") -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def product(kind: str, n: int, k: int, dtype: str):
    """Returns a function of x [M, K] and a residual [M, N]."""
    w = draw(1, n, k, dtype=dtype)
    bias = draw(2, n, dtype="float32")
    if kind == "matmul":
        return lambda x, r: matmul(x, w, bias=bias, residual=r, out_dtype=r.dtype, backend="deterministic")
    if kind == "head":
        return lambda x, r: matmul(x, w, out_dtype="float32", backend="deterministic")
    if kind == "swiglu":
        return lambda x, r: swiglu(x, w, norm=jnp.ones(k, x.dtype), eps=1e-5, backend="deterministic")
    if kind.startswith("norm"):
        how = {"eps": 1e-5, "kind": "int8" if kind == "norm int8" else None, "backend": "deterministic"}

        def normed(x: jax.Array, r: jax.Array) -> jax.Array:
            rows, summed = norm_quant(x, bias[:k].astype(x.dtype), residual=r, **how)
            return rows.values if isinstance(rows, QuantizedRows) else rows + summed

        return normed
    if kind in ("int8", "fp8"):
        coded, scaled = quantize_rows(w, kind), int8_matmul if kind == "int8" else fp8_matmul

        def of_codes(x: jax.Array, r: jax.Array) -> jax.Array:
            rows = quantize_rows(x, kind)
            more = {"bias": bias, "residual": r, "out_dtype": r.dtype, "backend": "deterministic"}
            return scaled(rows.values, coded.values, rows.scales, coded.scales, **more)

        return of_codes
    coded_weight = encode(w, parse_weight_format(kind))
    return lambda x, r: weight_only_matmul(x, coded_weight, bias=bias, residual=r, backend="deterministic")


def check(kind: str, n: int, k: int, dtype: str, sizes: tuple[int, ...]) -> None:
    of = jax.jit(product(kind, n, k, dtype))
    x, r = draw(3, max(sizes), k, dtype=dtype), draw(4, max(sizes), n, dtype=dtype)
    whole = np.asarray(of(x, r))
    assert np.isfinite(whole.astype(np.float32)).all()
    assert whole.any()
    for m in sizes:
        for first in {0, max(sizes) - m}:
            part = np.asarray(of(x[first : first + m], r[first : first + m]))
            assert part.tobytes() == whole[first : first + m].tobytes(), (m, first)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["matmul", "head", "swiglu", "int8", "fp8", "w8a16", "w4a16-g32", "nf4"])
def test_rows_do_not_depend_on_how_many_there_are(kind, dtype):
    check(kind, 96, 192, dtype, M)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["norm", "norm int8"])
def test_norms_of_rows_do_not_depend_on_how_many_there_are(kind, dtype):
    check(kind, 192, 192, dtype, M)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("n", "k", "sizes"), [(4096, 4096, LARGE), (22016, 4096, FEW), (4096, 11008, FEW), (512, 768, LARGE)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_do_not_depend_on_how_many_there_are_on_a_device(kind, n, k, sizes):
    check(kind, n, k, "bfloat16", sizes)


@pytest.mark.parametrize("kind", KINDS)
def test_every_product_lowers_for_hopper(kind, monkeypatch):
    for name, module in list(sys.modules.items()):
        if name.startswith("pallas_kernels."):
            for asked, answer in (("on_hopper", True), ("capability", "9.0"), ("_ask_ptxas_once", None)):
                if hasattr(module, asked):
                    monkeypatch.setattr(module, asked, lambda answer=answer: answer)
    n, k = 640, 896  # of no other test: JAX keeps what was traced here
    of = jax.jit(product(kind, n, k, "bfloat16"))
    for m in (1, 17, 513):
        shapes = [jax.ShapeDtypeStruct((m, width), "bfloat16") for width in (k, n)]
        assert "mosaic_gpu" in of.trace(*shapes).lower(lowering_platforms=("cuda",)).as_text(), m


def test_prompts_add_up_parts_on_hopper(monkeypatch):
    monkeypatch.setenv(TARGET, "9.0")
    pages = jax.eval_shape(lambda: kv_pages.allocate(8, 2, 16, 64, *[KVFormat("bfloat16")] * 2))
    lengths = jnp.asarray([0, 3], jnp.int32), jnp.asarray([3], jnp.int32)
    for backend, part in ((None, None), ("mosaic", None), ("deterministic", PART)):
        q = jax.ShapeDtypeStruct((3, 4, 64), "bfloat16")
        assert plan(q, pages, *lengths, scale=1.0, backend=backend).config.part == part


@pytest.mark.parametrize(("heads", "dim"), thinned([((8, 4), 16), ((4, 4), 16), ((4, 2), 32), ((4, 1), 32)], (1, 3)))
def test_a_decoded_row_has_the_bits_of_a_prompts_row(heads, dim):
    """Behind the first block of keys too, as XLA compiles it for users: other tests optimize less, which hides how a
    product and a sum of two blocks are rounded together."""
    length, page = 200, 8
    (q, k, v), at = (
        (draw(i, length, n, dim, dtype="float32") for i, n in enumerate((*heads, heads[1]))),
        jnp.arange(length, dtype=jnp.int32),
    )
    pages = kv_pages.allocate(length // page, heads[1], page, dim, *[KVFormat("float32")] * 2)
    pages = kv_pages.KVPages(
        *(kv_pages.write(part, x, at // page, at % page) for part, x in ((pages.k, k), (pages.v, v)))
    )
    table, how = jnp.arange(length // page, dtype=jnp.int32)[None], {"scale": 0.25, "backend": "deterministic"}
    usual = {"xla_backend_optimization_level": 3, "xla_backend_extra_options": ""}
    each = jax.jit(partial(decode_attention, **how), compiler_options=usual)
    whole = jax.jit(partial(prefill_attention, **how), compiler_options=usual)
    decoded = each(q, pages, jnp.tile(table, (length, 1)), at + 1)
    prompt = whole(q, pages, table, jnp.asarray([0, length], jnp.int32), jnp.asarray([length], jnp.int32))
    assert np.asarray(decoded).tobytes() == np.asarray(prompt).tobytes()


def test_a_product_sees_tiles_of_one_shape():
    seen = []

    def of(x: jax.Array, r: jax.Array | None) -> jax.Array:
        seen.append((x.shape, None if r is None else r.shape))
        return x[:, :2] if r is None else x[:, :2] + r

    for m in M:
        x = jnp.arange(m * 5.0).reshape(m, 5)
        np.testing.assert_array_equal(in_tiles(of, x, None), x[:, :2])
        np.testing.assert_array_equal(in_tiles(of, x, x[:, :2]), 2 * x[:, :2])
    assert set(seen) == {((ROWS, 5), None), ((ROWS, 5), (ROWS, 2))}


def test_other_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(one_order, "capability", lambda: "8.0")
    monkeypatch.setattr(one_order, "on_hopper", lambda: False)
    x = draw(0, 4, 64)
    with pytest.raises(NotImplementedError, match="deterministic is for Hopper GPUs and CPUs"):
        matmul(x, x, backend="deterministic")


@pytest.mark.parametrize("rows", [1, one_order.ROWS, one_order.ROWS + 1])
def test_tiles_are_a_loop_that_xla_does_not_unroll(rows):
    """Unrolled, what a tile computes is shared with its surroundings, and its sums get another order."""
    x = jnp.ones((rows, 8), jnp.float32)
    text = jax.jit(partial(one_order.in_tiles, lambda x: x @ x.T)).lower(x).compile().as_text()
    assert " while(" in text
