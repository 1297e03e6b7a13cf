"""What the Triton kernels over pages share: tokens of K or V of one head, and a step of attention to them.

K and V are multiplied in float16, but bfloat16 by queries of bfloat16: that would round all else as much as results
are, and float16 holds what float16 scales are for (past 65504 it overflows). float8 is read with integers, since GPUs
before compute capability 8.9 convert nothing from it.
"""

import jax
import triton
import triton.language as tl

from pallas_kernels.kv_pages import Pages

LOG2_E = 1.4426950408889634
# What a row's largest logit is before it has seen a key: finite, so that a block without keys has no effect.
LOWEST = tl.constexpr(-1e30)


def arrays(pool: Pages) -> tuple[jax.Array, jax.Array]:
    """A pool's arrays as kernels take them: without scales the values stand in for these, and are not read as such."""
    return pool.values, pool.values if pool.scales is None else pool.scales


def upright(q: jax.Array, scale: float) -> tuple[jax.Array, float]:
    """q and a scale that is not negative, with the same logits."""
    return (q, scale) if scale >= 0 else (-q, -scale)


@triton.jit
def load_queries(at, in_use, values, D: tl.constexpr):
    """The queries [M, D] whose numbers begin at pointers `at` [M], in the dtype of products with `values`, and what
    their logits are to be multiplied by [M]: to fit float16, bfloat16 comes as fractions of a power of two."""
    x = tl.load(at[:, None] + tl.arange(0, D)[None, :], mask=in_use[:, None], other=0.0)
    dtype: tl.constexpr = product_dtype(values, x.dtype)
    factor = tl.full([x.shape[0]], 1.0, tl.float32)
    if dtype != x.dtype:
        x = x.to(tl.float32)
        largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7F800000, axis=1)  # as integers exponents have their order
        factor = tl.minimum(tl.maximum(largest, 0x10000000), 0x7F000000).to(tl.float32, bitcast=True)
        x = (x / factor[:, None]).to(dtype)
    return x, factor


@triton.constexpr_function
def product_dtype(values, queries):
    """The dtype in which what lies at a pointer is multiplied."""
    stored = values.type.element_ty if hasattr(values, "type") else values.dtype.element_ty
    return tl.bfloat16 if stored == queries == tl.bfloat16 else tl.float16


@triton.jit
def load_tokens(
    values, scales, page, slot, head, seen, dtype: tl.constexpr,
    HEADS: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    """[T, D] of a 16-bit dtype: token i is at slot[i] of page[i]; zero where it is not seen, and nothing read."""
    row = (page.to(tl.int64) * HEADS + head) * PAGE + slot
    stored: tl.constexpr = values.dtype.element_ty
    int4: tl.constexpr = GROUP > 0 and stored == tl.uint8
    WIDTH: tl.constexpr = D // 2 if int4 else D
    at = values + row[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    if GROUP == 0:
        if stored == tl.uint8:
            x = from_e4m3(tl.load(at, mask=seen[:, None], other=0)).to(dtype)
        else:
            x = tl.load(at, mask=seen[:, None], other=0.0).to(dtype)
    else:
        codes = tl.load(at, mask=seen[:, None], other=0).to(tl.uint8, bitcast=True)
        if int4:
            codes = tl.interleave(codes & 15, codes >> 4)
        middle: tl.constexpr = 8 if int4 else 128
        # The low bits of a float16 whose unit in the last place is 1: conversions are slow.
        x = ((codes.to(tl.uint16) ^ middle) | 0x6400).to(tl.float16, bitcast=True) - (
            1024.0 if ZEROS else 1024.0 + middle
        )
        GROUPS: tl.constexpr = D // GROUP
        numbers: tl.constexpr = 2 * GROUPS if ZEROS else GROUPS
        near = scales + row[:, None] * numbers + tl.arange(0, GROUPS)[None, :]
        scale = tl.load(near, mask=seen[:, None], other=0.0)[:, :, None]
        x = tl.reshape(x, (codes.shape[0], GROUPS, GROUP))
        if ZEROS:
            zero = tl.load(near + GROUPS, mask=seen[:, None], other=0.0).to(tl.float32)[:, :, None]
            x = x.to(tl.float32) * scale.to(tl.float32) + zero
        else:
            x = x * scale  # a float16 once rounded, as a product of 8 and 11 bits is one of float32
        x = tl.reshape(x, (codes.shape[0], D)).to(dtype)
    return x


@triton.jit
def from_e4m3(code):
    """float32 of float8_e4m3fn's bits: those of a float16 2^8 times smaller."""
    code = code.to(tl.uint16)
    size = code & 0x7F
    bits = tl.where(size == 0x7F, 0x7FFF, size << 7) | ((code & 0x80) << 8)
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def attend(queries, k, v, visible, peak, total, out, scale):
    """One step of an online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867) over keys k and values v [T, D]:
    queries [M, D], visible [M, T], peak, total and scale float32 [M], out float32 [M, D]. Logits, which are products
    times a scale that is not negative, are in base 2."""
    products = tl.where(visible, tl.dot(queries, tl.trans(k)), float("-inf"))
    new_peak = tl.maximum(peak, tl.max(products, axis=1) * scale)
    weights = tl.exp2(products * scale[:, None] - new_peak[:, None])
    decay = tl.exp2(peak - new_peak)
    out = tl.dot(weights.to(v.dtype), v, out * decay[:, None])
    total = total * decay + tl.sum(weights, axis=1)
    return new_peak, total, out
