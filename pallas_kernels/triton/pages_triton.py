"""Reads tokens of K or V of one head, and attends to them in steps: what the Triton kernels over pages share.

K and V are multiplied in float16, except bfloat16 by queries of bfloat16. bfloat16 would round all else as much as
results are. float16 holds what float16 scales are for; past 65504 it overflows. GPUs before compute capability 8.9,
which convert nothing from float8, read it with integers.

How far loads run ahead of matmuls is up to `stages`. Triton shares these between the load of the page table and those
of K and V, which wait for it. With 2 to 4 none of K or V runs ahead; 5 are the least for two steps.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels.backends import WITHOUT_FLOAT8, capability
from pallas_kernels.formats.kv_pages import Pages
from pallas_kernels.triton.codes_triton import decoded

LOG2_E = 1.4426950408889634
LOG2_OF_E = tl.constexpr(LOG2_E)  # for kernels
# What a row's largest logit is before it has seen a key: finite, so that a block without keys has no effect.
LOWEST = tl.constexpr(-1e30)


def arrays(pool: Pages) -> tuple[jax.Array, jax.Array]:
    """Returns a pool's arrays as kernels take them. Without scales the values stand in for these, and are not read as
    such."""
    return pool.values, pool.values if pool.scales is None else pool.scales


def reads_float8() -> bool:
    return capability() not in ("", *WITHOUT_FLOAT8)


def upright(q: jax.Array, scale: float) -> tuple[jax.Array, float]:
    """Returns q and a positive scale with the same logits. Unseen keys have a logit of -inf, so the scale must be
    positive."""
    if scale == 0:
        return q * jnp.zeros((), q.dtype), 1.0
    return (q, scale) if scale > 0 else (-q, -scale)


@triton.jit
def rows_of(page, layer, N: tl.constexpr):
    """Returns the pools' rows of pages of the layer at a pointer. A page outside of [0, N) becomes the nearest."""
    return tl.minimum(tl.maximum(page, 0), N - 1) + tl.load(layer) * N


@triton.constexpr_function
def _stored(values):
    """Returns the dtype of what lies at a pointer."""
    return (values.type if hasattr(values, "type") else values.dtype).element_ty


@triton.constexpr_function
def planes(values, GROUP):
    """Counts the columns next to one another that share 16 bits of what lies at a pointer."""
    stored = _stored(values)
    return 1 if stored.primitive_bitwidth == 16 else 4 if GROUP > 0 and stored == tl.uint8 else 2


@triton.jit
def load_queries(at, in_use, values, D: tl.constexpr, GROUP: tl.constexpr):
    """Loads the queries [M, D] whose numbers begin at pointers `at` [M], and what their logits are to be multiplied by
    [M]. They have the dtype of products with `values`, and its planes. To fit float16, bfloat16 comes as fractions of a
    power of two."""
    PLANES: tl.constexpr = planes(values, GROUP)
    x = tl.load(at[:, None] + tl.arange(0, D)[None, :], mask=in_use[:, None], other=0.0)
    dtype: tl.constexpr = product_dtype(values, x.dtype)
    factor = tl.full([x.shape[0]], 1.0, tl.float32)
    if dtype != x.dtype:
        largest = tl.max(x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7F800000, axis=1)  # exponents have their order
        factor = tl.minimum(tl.maximum(largest, 0x10000000), 0x7F000000).to(tl.float32, bitcast=True)
    queries = tl.tuple(())
    for i in tl.static_range(PLANES):
        column = tl.arange(0, D // PLANES) * PLANES + i
        plane = tl.load(at[:, None] + column[None, :], mask=in_use[:, None], other=0.0)
        if dtype != x.dtype:
            plane = (plane.to(tl.float32) / factor[:, None]).to(dtype)
        queries = queries + (plane,)
    return queries, factor


@triton.constexpr_function
def product_dtype(values, queries):
    """Returns the dtype in which what lies at a pointer is multiplied."""
    return tl.bfloat16 if _stored(values) == queries == tl.bfloat16 else tl.float16


@triton.jit
def load_tokens(
    values, scales, page, slot, head, seen, dtype: tl.constexpr, HEADS: tl.constexpr, PAGE: tl.constexpr,
    D: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, FLOAT8: tl.constexpr,
):  # fmt: skip
    """Loads [T, D] of a 16-bit dtype in planes: token i is at slot[i] of row page[i] of the pools. A token that is
    not seen is zero, and nothing is read. FLOAT8: the device converts from float8."""
    PLANES: tl.constexpr = planes(values, GROUP)
    WIDTH: tl.constexpr = D // PLANES
    row = (page.to(tl.int64) * HEADS + head) * PAGE + slot
    near = row[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    if PLANES == 1:
        found = (tl.load(values + near, mask=seen[:, None], other=0.0).to(dtype),)
    else:
        codes = tl.load(values.to(tl.pointer_type(tl.int16), bitcast=True) + near, mask=seen[:, None], other=0)
        found = decoded(codes, PLANES, GROUP > 0, ZEROS, FLOAT8)
    if GROUP > 0:
        scale = _numbers(scales, row, slot, seen, 0, D // GROUP, ZEROS, WIDTH)
        if ZEROS:
            zero = _numbers(scales, row, slot, seen, D // GROUP, D // GROUP, ZEROS, WIDTH)
        numbers = tl.tuple(())
        for i in tl.static_range(PLANES):  # rounded once, to float16: a product of 8 and 11 bits is exact before that
            numbers = numbers + (tl.fma(found[i], scale, zero) if ZEROS else found[i] * scale,)
        found = numbers
    return found


@triton.jit
def _numbers(
    scales, row, slot, seen, first: tl.constexpr, GROUPS: tl.constexpr, ZEROS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Loads float16 [T, WIDTH], or [T, 1], of the numbers of groups in rows [T], which begin with number `first`."""
    T: tl.constexpr = row.shape[0]
    STORED: tl.constexpr = 2 * GROUPS if ZEROS else GROUPS
    at = row * STORED + first
    if GROUPS == 1:  # 32 bits, as Triton copies nothing smaller ahead; pages have an even number of tokens
        word = tl.load(scales.to(tl.pointer_type(tl.int32), bitcast=True) + at // 2, mask=seen, other=0)
        x = (word >> (slot * STORED + first) % 2 * 16).to(tl.int16).to(tl.float16, bitcast=True)[:, None]
    else:
        x = tl.load(scales + at[:, None] + tl.arange(0, GROUPS)[None, :], mask=seen[:, None], other=0.0)
        x = tl.reshape(tl.broadcast_to(x[:, :, None], (T, GROUPS, WIDTH // GROUPS)), (T, WIDTH))
    return x


@triton.jit
def zeros(values, GROUP: tl.constexpr, M: tl.constexpr, D: tl.constexpr):
    """Returns zeros float32 [M, D] in the planes of `values`."""
    PLANES: tl.constexpr = planes(values, GROUP)
    found = tl.tuple(())
    for _ in tl.static_range(PLANES):
        found = found + (tl.zeros([M, D // PLANES], tl.float32),)
    return found


@triton.jit
def store(at, x, divisor, in_use):
    """Stores planes x [M, D], divided by `divisor` [M], as numbers from pointers `at` [M] on."""
    for i in tl.static_range(len(x)):
        column = tl.arange(0, x[i].shape[1]) * len(x) + i
        number = (x[i] / divisor[:, None]).to(at.dtype.element_ty)
        tl.store(at[:, None] + column[None, :], number, mask=in_use[:, None])


@triton.jit
def attend(queries, k, v, visible, peak, total, out, scale, SOFTCAP: tl.constexpr):
    """Runs one step of an online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867) over keys k and values v [T,
    D]. Takes queries [M, D], visible [M, T], peak, total and scale float32 [M], out float32 [M, D]. Queries have the
    planes of keys, and out those of values. Logits, which are products times a positive scale, are in base 2. They are
    capped by SOFTCAP, in base 2, unless it is 0."""
    products = tl.dot(queries[0], tl.trans(k[0]))
    for i in tl.static_range(1, len(k)):
        products = tl.dot(queries[i], tl.trans(k[i]), products)
    if SOFTCAP > 0:
        turns = tl.exp2(products * (scale * (2.0 * LOG2_OF_E / SOFTCAP))[:, None])
        products = SOFTCAP - 2.0 * SOFTCAP / (turns + 1.0)  # tanh, also where turns overflow
        scale = tl.zeros_like(scale) + 1.0
    products = tl.where(visible, products, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(products, axis=1) * scale)
    weights = tl.exp2(products * scale[:, None] - new_peak[:, None])
    decay = tl.exp2(peak - new_peak)
    total = total * decay + tl.sum(weights, axis=1)
    weights = weights.to(v[0].dtype)
    sums = tl.tuple(())
    for i in tl.static_range(len(v)):
        sums = sums + (tl.dot(weights, v[i], out[i] * decay[:, None]),)
    return new_peak, total, sums
