"""Runs cache_update on Ampere, Ada and Hopper: a program has a few heads of a row, of Q, of K or of V."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels.cache_update.config import TRITON_VALUES
from pallas_kernels.formats.kv_pages import KVPages, Pages, apart
from pallas_kernels.triton import rows_triton, triton_call
from pallas_kernels.triton.triton_call import Launch

SMALLEST, LARGEST = tl.constexpr(2.0**-14), tl.constexpr(65504.0)  # normal float16


@partial(jax.jit, static_argnames=("first", "num_heads"))
def cache_update(
    q: jax.Array, k: jax.Array, v: jax.Array, cos: jax.Array, sin: jax.Array,
    pages: KVPages, page: jax.Array, offset: jax.Array,
    *, first: tuple[int, int, int] = (0, 0, 0), num_heads: int | None = None,
) -> tuple[jax.Array, KVPages]:  # fmt: skip
    """Runs as api.py has it. Q's `num_heads` heads, and those of K and V, begin at head first[i] of q, k, v [T, _,
    D]."""
    num_heads = num_heads or q.shape[1]
    if not q.shape[0]:  # of which no kernel can be launched
        return jnp.zeros((0, num_heads, q.shape[2]), q.dtype), pages
    made, pages = launch(q, k, v, pages, first, num_heads), apart(pages)
    pools = [
        pool for part in (pages.k, pages.v) for pool in (part.values, page if part.scales is None else part.scales)
    ]
    rotated, *new = triton_call.call(made, q, k, v, cos, sin, page, offset, pages.k.layer_operand, *pools)

    def stored(part: Pages, values: jax.Array, scales: jax.Array) -> Pages:
        return replace(part, values=values, scales=None if part.scales is None else scales)

    return rotated, KVPages(stored(pages.k, *new[:2]), stored(pages.v, *new[2:]))


def launch(
    q: jax.Array | jax.ShapeDtypeStruct,
    k: jax.Array | jax.ShapeDtypeStruct,
    v: jax.Array | jax.ShapeDtypeStruct,
    pages: KVPages,
    first: tuple[int, int, int],
    num_heads: int,
) -> Launch:
    """Returns the launch for arrays or their shapes and dtypes. Arguments are q, k, v, cos, sin, page, offset, layer,
    then values and scales of K's and V's pool. The outputs take the pools' place. Where there are no scales anything
    stands for them."""
    (rows, _, D), (K, page) = q.shape, pages.k.values.shape[1:3]
    out, aliases = [jax.ShapeDtypeStruct((rows, num_heads, D), q.dtype)], {}
    for i, pool in enumerate(x for part in (pages.k, pages.v) for x in (part.values, part.scales)):
        if pool is None:  # an output has a pointer, if only to one number that is not written
            out.append(jax.ShapeDtypeStruct((1,), jnp.float16))
        else:
            out.append(jax.ShapeDtypeStruct(pool.shape, pool.dtype))
            aliases[8 + i] = 1 + i
    heads = TRITON_VALUES // D
    constants = {
        "D": D, "H": num_heads, "K": K, "N": pages.k.num_pages, "PAGE": page, "BLOCK": heads,
        "Q_BLOCKS": triton.cdiv(num_heads, heads), "K_BLOCKS": triton.cdiv(K, heads),
        "Q_FIRST": first[0], "K_FIRST": first[1], "V_FIRST": first[2],
        "Q_ROW": q.shape[1], "K_ROW": k.shape[1], "V_ROW": v.shape[1],
        "K_GROUP": pages.k.format.group or 0, "K_ZEROS": pages.k.format.zero_point,
        "V_GROUP": pages.v.format.group or 0, "V_ZEROS": pages.v.format.zero_point,
    }  # fmt: skip
    blocks = constants["Q_BLOCKS"] + 2 * constants["K_BLOCKS"]
    return Launch(_update, tuple(out), (rows, blocks), constants, aliases=aliases)


@triton.jit
def _update(
    q, k, v, cos, sin, page, offset, layer, k_before, k_scales_before, v_before, v_scales_before,
    rotated, k_values, k_scales, v_values, v_scales,
    D: tl.constexpr, H: tl.constexpr, K: tl.constexpr, N: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    Q_BLOCKS: tl.constexpr, K_BLOCKS: tl.constexpr, Q_FIRST: tl.constexpr, K_FIRST: tl.constexpr,
    V_FIRST: tl.constexpr, Q_ROW: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr,
    K_GROUP: tl.constexpr, K_ZEROS: tl.constexpr, V_GROUP: tl.constexpr, V_ZEROS: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, D)
    if block < Q_BLOCKS:
        head = block * BLOCK + tl.arange(0, BLOCK)
        x = _rotated(q + (row * Q_ROW + Q_FIRST + head) * D, cos, sin, row, head < H, D)
        at = rotated + (row * H + head)[:, None] * D + column[None, :]
        tl.store(at, x.to(rotated.dtype.element_ty), mask=(head < H)[:, None])
    else:
        to = tl.load(page + row)
        if (to >= 0) & (to < N):
            head = (block - Q_BLOCKS) % K_BLOCKS * BLOCK + tl.arange(0, BLOCK)
            to += tl.load(layer) * N
            slot = (to.to(tl.int64) * K + head) * PAGE + tl.load(offset + row)
            if block < Q_BLOCKS + K_BLOCKS:
                x = _rotated(k + (row * K_ROW + K_FIRST + head) * D, cos, sin, row, head < K, D)
                _store(x, k_values, k_scales, slot, head < K, D, BLOCK, K_GROUP, K_ZEROS)
            else:
                at = v + (row * V_ROW + V_FIRST + head)[:, None] * D + column[None, :]
                x = tl.load(at, mask=(head < K)[:, None], other=0.0).to(tl.float32)
                _store(x, v_values, v_scales, slot, head < K, D, BLOCK, V_GROUP, V_ZEROS)


@triton.jit
def _rotated(heads, cos, sin, row, inside, D: tl.constexpr):
    """Returns the heads [BLOCK, D] that begin at pointers, turned by the row's angles, in float32."""
    column = tl.arange(0, D)
    angle = row * (D // 2) + column % (D // 2)
    c, s = tl.load(cos + angle).to(tl.float32), tl.load(sin + angle).to(tl.float32)
    x = tl.load(heads[:, None] + column[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
    other = (column + D // 2) % D
    partner = tl.load(heads[:, None] + other[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
    return x * c[None, :] + partner * tl.where(column < D // 2, -s, s)[None, :]


@triton.jit
def _store(
    x, values, scales, slot, inside, D: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr
):
    """Stores x float32 [BLOCK, D] as kv_formats.encode does, where a head is inside, at slots [BLOCK] of pages."""
    stored: tl.constexpr = values.dtype.element_ty
    if GROUP > 0:
        codes = _codes(x, scales, slot, inside, D, BLOCK, GROUP, ZEROS, stored == tl.uint8)
        if stored == tl.uint8:
            low, high = tl.split(tl.reshape(codes, (BLOCK, D // 2, 2)))
            at = values + slot[:, None] * (D // 2) + tl.arange(0, D // 2)[None, :]
            tl.store(at, ((high << 4) | (low & 15)).to(stored), mask=inside[:, None])
        else:
            tl.store(values + slot[:, None] * D + tl.arange(0, D)[None, :], codes.to(stored), mask=inside[:, None])
    else:
        if stored == tl.uint8:
            clipped = tl.minimum(tl.maximum(x, -448.0), 448.0)
            x = tl.where(x == x, rows_triton.to_e4m3(clipped), 0x7F)
        tl.store(values + slot[:, None] * D + tl.arange(0, D)[None, :], x.to(stored), mask=inside[:, None])


@triton.jit
def _codes(
    x, scales, slot, inside, D: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr,
    INT4: tl.constexpr,
):  # fmt: skip
    """Returns the codes int32 [BLOCK, D] of x in groups, whose scales (and zeros) it stores."""
    GROUPS: tl.constexpr = D // GROUP
    largest: tl.constexpr = 7 if INT4 else 127
    x = tl.reshape(x, (BLOCK, GROUPS, GROUP))
    bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=2)  # magnitudes' order; NaN is above all
    near = scales + slot[:, None] * (2 * GROUPS if ZEROS else GROUPS) + tl.arange(0, GROUPS)[None, :]
    if ZEROS:
        least = tl.min(x, axis=2)
        least = tl.where(tl.abs(least) < SMALLEST, 0.0, tl.minimum(tl.maximum(least, -LARGEST), LARGEST))
        zero = least.to(tl.float16)
        tl.store(near + GROUPS, zero, mask=inside[:, None])
        x -= zero.to(tl.float32)[:, :, None]
        scale = tl.div_rn(tl.max(x, axis=2), 2.0 * largest + 1.0)
    else:
        scale = tl.div_rn(bits.to(tl.float32, bitcast=True), 1.0 * largest)
    scale = tl.minimum(tl.maximum(scale, SMALLEST), LARGEST)
    scale = tl.where(bits > 0x7F800000, float("nan"), scale).to(tl.float16)
    tl.store(near, scale, mask=inside[:, None])
    steps = tl.div_rn(x, tl.broadcast_to(scale.to(tl.float32)[:, :, None], (BLOCK, GROUPS, GROUP)))
    if ZEROS:
        codes = rows_triton.nearest(tl.minimum(tl.maximum(steps, 0.0), 2.0 * largest + 1.0)) - (largest + 1)
    else:
        codes = rows_triton.nearest(tl.minimum(tl.maximum(steps, -1.0 * largest), 1.0 * largest))
    return tl.reshape(codes, (BLOCK, D))
