"""What the Triton kernels over pages share: tokens of K or V of one head, and a step of attention to them.

K and V are multiplied in float16, but bfloat16 by queries of bfloat16: that would round all else as much as results
are, and float16 holds what float16 scales are for (past 65504 it overflows). GPUs before compute capability 8.9, which
convert nothing from float8, read it with integers.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels.backends import WITHOUT_FLOAT8, capability
from pallas_kernels.kv_pages import Pages

LOG2_E = 1.4426950408889634
# What a row's largest logit is before it has seen a key: finite, so that a block without keys has no effect.
LOWEST = tl.constexpr(-1e30)


def arrays(pool: Pages) -> tuple[jax.Array, jax.Array]:
    """A pool's arrays as kernels take them: without scales the values stand in for these, and are not read as such."""
    return pool.values, pool.values if pool.scales is None else pool.scales


def reads_float8() -> bool:
    """Whether the device that computes converts from float8."""
    return capability() not in ("", *WITHOUT_FLOAT8)


def upright(q: jax.Array, scale: float) -> tuple[jax.Array, float]:
    """q and a scale that is positive, as keys that are not seen have a logit of -inf, with the same logits."""
    if scale == 0:
        return q * jnp.zeros((), q.dtype), 1.0
    return (q, scale) if scale > 0 else (-q, -scale)


@triton.jit
def load_queries(at, in_use, values, D: tl.constexpr, GROUP: tl.constexpr):
    """The queries [M, D] whose numbers begin at pointers `at` [M], in the dtype of products with `values` and in their
    order of columns, and what their logits are to be multiplied by [M]: to fit float16, bfloat16 comes as fractions of
    a power of two."""
    column = columns(D, codes_of_a_word(values, GROUP))
    x = tl.load(at[:, None] + column[None, :], mask=in_use[:, None], other=0.0)
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
    values, scales, page, slot, head, seen, dtype: tl.constexpr, HEADS: tl.constexpr, PAGE: tl.constexpr,
    D: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, FLOAT8: tl.constexpr,
):  # fmt: skip
    """[T, D] of a 16-bit dtype, in the order of `columns`: token i is at slot[i] of page[i]; zero where it is not seen,
    and nothing read. FLOAT8: the device converts from float8."""
    row = (page.to(tl.int64) * HEADS + head) * PAGE + slot
    stored: tl.constexpr = values.dtype.element_ty
    if GROUP == 0:
        at = values + row[:, None] * D + tl.arange(0, D)[None, :]
        if stored == tl.uint8:
            code = tl.load(at, mask=seen[:, None], other=0)
            if FLOAT8:
                x = code.to(tl.float8e4nv, bitcast=True).to(dtype)
            else:
                x = from_e4m3(code).to(dtype)
        else:
            x = tl.load(at, mask=seen[:, None], other=0.0).to(dtype)
    else:
        x = _codes(values, row, seen, D, ZEROS)
        GROUPS: tl.constexpr = D // GROUP
        numbers: tl.constexpr = 2 * GROUPS if ZEROS else GROUPS
        near = scales + row[:, None] * numbers + tl.arange(0, GROUPS)[None, :]
        scale = tl.load(near, mask=seen[:, None], other=0.0)[:, :, None]
        x = tl.reshape(x, (row.shape[0], GROUPS, GROUP))
        if ZEROS:
            zero = tl.load(near + GROUPS, mask=seen[:, None], other=0.0).to(tl.float32)[:, :, None]
            x = x.to(tl.float32) * scale.to(tl.float32) + zero
        else:
            x = x * scale  # a float16 once rounded, as a product of 8 and 11 bits is one of float32
        x = tl.reshape(x, (row.shape[0], D)).to(dtype)
    return x


@triton.constexpr_function
def codes_of_a_word(values, GROUP):
    """How many codes 32 bits hold that are read at once; 1 for numbers that are read one by one."""
    stored = values.type.element_ty if hasattr(values, "type") else values.dtype.element_ty
    return 1 if GROUP == 0 else 8 if stored == tl.uint8 else 4


@triton.jit
def columns(D: tl.constexpr, CODES: tl.constexpr):
    """The columns of a head in the order of load_tokens: of CODES ones that share a word, the first of its lower half,
    the first of its upper half, the second of its lower half, and so on."""
    i = tl.arange(0, D)
    return i if CODES == 1 else i // CODES * CODES + i % CODES // 2 + i % 2 * (CODES // 2)


@triton.jit
def _codes(values, row, seen, D: tl.constexpr, ZEROS: tl.constexpr):
    """float16 [T, D] of the codes of 8 or 4 bits in rows [T], in the order of `columns`."""
    int4: tl.constexpr = values.dtype.element_ty == tl.uint8
    WORDS: tl.constexpr = D // 8 if int4 else D // 4
    at = values.to(tl.pointer_type(tl.int32), bitcast=True) + row[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    word = tl.load(at, mask=seen[:, None], other=0)
    if int4:
        even = tl.join(_pair(word, 0, 4, ZEROS), _pair(word, 2, 4, ZEROS))
        odd = tl.join(_pair(word, 1, 4, ZEROS), _pair(word, 3, 4, ZEROS))
        x = tl.permute(tl.join(even, odd), (0, 1, 3, 4, 2))  # [T, W, number's upper bit, lower bit, half]
    else:
        x = tl.permute(tl.join(_pair(word, 0, 8, ZEROS), _pair(word, 1, 8, ZEROS)), (0, 1, 3, 2))
    return tl.reshape(x, (row.shape[0], D))


@triton.jit
def _pair(word, i: tl.constexpr, BITS: tl.constexpr, ZEROS: tl.constexpr):
    """float16 [T, W, 2] of code i of the lower and of the upper half of each word [T, W], as the low bits of a number
    whose unit in the last place is 1: conversions are slow."""
    middle: tl.constexpr = 1 << (BITS - 1)
    mask: tl.constexpr = (2 * middle - 1) * 0x10001
    both = ((word >> (BITS * i)) & mask) ^ (0x64006400 | (middle * 0x10001))
    offset: tl.constexpr = 1024.0 if ZEROS else 1024.0 + middle
    low, high = both.to(tl.int16).to(tl.float16, bitcast=True), (both >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return tl.join(low, high) - offset


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
    times a scale that is positive, are in base 2."""
    products = tl.where(visible, tl.dot(queries, tl.trans(k)), float("-inf"))
    new_peak = tl.maximum(peak, tl.max(products, axis=1) * scale)
    weights = tl.exp2(products * scale[:, None] - new_peak[:, None])
    decay = tl.exp2(peak - new_peak)
    out = tl.dot(weights.to(v.dtype), v, out * decay[:, None])
    total = total * decay + tl.sum(weights, axis=1)
    return new_peak, total, out
