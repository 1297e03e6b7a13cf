"""Runs sample on Ampere, Ada and Hopper, in three kernels.

What a row asks for is a branch of its own programs, and the host need not know it. The first kernel gives each part of
a row its largest logit. The second has a program for each row with filters, which finds the threshold. It bisects over
the float's integer image, as xla.py does, over L1 or L2 with three pivots a pass. The third draws a token of each part
among the logits that reach it. How a row is cut depends on its length alone.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels.sample.config import HOTTEST, TRITON, TritonConfig, check_triton
from pallas_kernels.sample.noise import KEYS, ROUNDS
from pallas_kernels.triton import triton_call
from pallas_kernels.triton.triton_call import Launch

INFINITY = tl.constexpr(float("inf"))
LARGEST, TINY = tl.constexpr(3.4028234663852886e38), tl.constexpr(1.1754943508222875e-38)  # of float32
MOST = tl.constexpr(HOTTEST)


@jax.jit
def sample(
    logits: jax.Array, temperature: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array, keys: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns tokens i32[R], finite bool[R]; see api.py. Takes logits [R, V], keys u32[R, 4], the rest [R]."""
    check_triton(str(logits.dtype), *logits.shape)
    temperature, top_p, min_p = (x.astype(jnp.float32) for x in (temperature, top_p, min_p))
    largest, cut, draw = launches(logits)
    tops, firsts, finite = triton_call.call(largest, logits)
    (lowest,) = triton_call.call(cut, logits, tops, temperature, top_k, top_p, min_p)
    scores, tokens = triton_call.call(draw, logits, tops, firsts, lowest, temperature, keys)
    best = jnp.max(scores, axis=1, keepdims=True)
    found = jnp.min(jnp.where(scores == best, tokens, logits.shape[1]), axis=1)
    return found, jnp.all(finite > 0, axis=1)


def launches(logits: jax.Array | jax.ShapeDtypeStruct, config: TritonConfig = TRITON) -> tuple[Launch, Launch, Launch]:
    """Returns the three launches; of logits [R, V] shape and dtype are enough. The first takes logits. It gives each
    part's largest f32[R, parts], the token that has it and whether all are finite, i32[R, parts]. The second takes
    logits, the largest, temperature, top_k, top_p and min_p and gives thresholds f32[R]. The third takes logits, the
    first's largest and tokens, thresholds, temperature and keys. It gives scores and tokens [R, parts]."""
    R, V = logits.shape
    parts = triton.cdiv(V, config.part)
    of_parts = [jax.ShapeDtypeStruct((R, parts), dtype) for dtype in (jnp.float32, jnp.int32, jnp.int32)]
    shared = {"V": V, "PARTS": parts, "PART": config.part}
    all_parts = {"V": V, "PARTS": parts, "PADDED": triton.next_power_of_2(parts)}
    return (
        Launch(_largest, tuple(of_parts), (R, parts), shared, num_warps=config.warps),
        Launch(
            _cut,
            (jax.ShapeDtypeStruct((R,), jnp.float32),),
            (R,),
            all_parts | {"BLOCK": config.block},
            num_warps=config.row_warps,
        ),
        Launch(
            _draw,
            tuple(of_parts[:2]),
            (R, parts),
            shared | {"PADDED": all_parts["PADDED"], "KEYS": KEYS, "ROUNDS": ROUNDS},
            num_warps=config.warps,
        ),
    )


@triton.jit
def _largest(logits, tops, tokens, finite, V: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = part * PART + tl.arange(0, PART)
    raw = tl.load(logits + row * V + token, mask=token < V, other=-INFINITY).to(tl.float32)
    x = _clean(raw)
    top = tl.max(x, axis=0)
    at = row * PARTS + part
    tl.store(tops + at, top)
    tl.store(tokens + at, tl.min(tl.where((x == top) & (token < V), token, V), axis=0))
    odd = (token < V) & ~(tl.abs(raw) < INFINITY)
    tl.store(finite + at, 1 - tl.max(odd.to(tl.int32), axis=0))


@triton.jit
def _cut(
    logits, tops, temperature, top_k, top_p, min_p, lowest,
    V: tl.constexpr, PARTS: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    asked, k, p, ratio = (
        tl.load(temperature + row), tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row),
    )  # fmt: skip
    found = -INFINITY
    if asked > 0:
        top = _top(tops, row, PARTS, PADDED)
        shift = tl.where(top == -INFINITY, 0.0, top)
        bounded = tl.minimum(tl.maximum(asked, TINY), MOST)
        off, high = _image(tl.full([], -INFINITY, tl.float32)), _image(top) + 1
        low = off
        if (k > 0) & (k < V):
            low = _last(logits + row * V, low, high, k.to(tl.float32), shift, bounded, V, BLOCK, False)
        if p < 1:
            bound = _number(low)
            mass, _, _ = _sums(logits + row * V, bound, bound, bound, shift, bounded, V, BLOCK, True)
            low = _last(logits + row * V, low, high, tl.maximum(p * mass, TINY), shift, bounded, V, BLOCK, True)
        found = _number(low)
        if ratio > 0:
            found = tl.maximum(found, top + bounded * tl.log(tl.minimum(ratio, 1.0)))
    tl.store(lowest + row, found)


@triton.jit
def _draw(
    logits, tops, firsts, lowest, temperature, keys, scores, tokens,
    V: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr, PADDED: tl.constexpr, KEYS: tl.constexpr,
    ROUNDS: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = row * PARTS + part
    asked = tl.load(temperature + row)
    best, drawn = tl.load(tops + at), tl.load(firsts + at)
    if asked > 0:
        bound = tl.load(lowest + row)
        kept_any = best >= bound
        largest = best
        best = -INFINITY
        if kept_any & (largest > -INFINITY):  # else there is nothing to be drawn here
            top = _top(tops, row, PARTS, PADDED)
            token = part * PART + tl.arange(0, PART)
            x = _clean(tl.load(logits + row * V + token, mask=token < V, other=-INFINITY).to(tl.float32))
            noise = _gumbel(keys + row * KEYS, part * (PART // 4), PART, ROUNDS)
            score = (x - top) / tl.minimum(tl.maximum(asked, TINY), MOST) + noise
            score = tl.where((x >= bound) & (x > -INFINITY), score, -INFINITY)
            best = tl.max(score, axis=0)
            drawn = tl.min(tl.where(score == best, token, V), axis=0)
    tl.store(scores + at, best)
    tl.store(tokens + at, drawn)


@triton.jit
def _clean(x):
    """Returns NaN as -inf, and +inf as the largest number."""
    return tl.where(x == x, tl.minimum(x, LARGEST), -INFINITY)


@triton.jit
def _top(tops, row, PARTS: tl.constexpr, PADDED: tl.constexpr):
    part = tl.arange(0, PADDED)
    return tl.max(tl.load(tops + row * PARTS + part, mask=part < PARTS, other=-INFINITY), axis=0)


@triton.jit
def _image(x):
    """Maps to uint32 in the order of floats: the sign bit of positive numbers is set, all bits of others are
    flipped."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _number(image):
    return tl.where(image >= 0x80000000, image ^ 0x80000000, image ^ 0xFFFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def _sums(row, a, b, c, shift, bounded, V: tl.constexpr, BLOCK: tl.constexpr, MASS: tl.constexpr):
    """Counts the logits of a row that reach a, b and c. With MASS it sums their weights, in units of the largest's
    probability."""
    of_a, of_b, of_c = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for first in range(0, V, BLOCK):
        token = first + tl.arange(0, BLOCK)
        x = _clean(tl.load(row + token, mask=token < V, other=-INFINITY).to(tl.float32))
        weight = tl.exp((x - shift) / bounded) if MASS else tl.where(token < V, 1.0, 0.0)
        of_a += tl.where(x >= a, weight, 0.0)
        of_b += tl.where(x >= b, weight, 0.0)
        of_c += tl.where(x >= c, weight, 0.0)
    return tl.sum(of_a, axis=0), tl.sum(of_b, axis=0), tl.sum(of_c, axis=0)


@triton.jit
def _last(row, low, high, target, shift, bounded, V: tl.constexpr, BLOCK: tl.constexpr, MASS: tl.constexpr):
    """Returns the last image from low on, before high, whose number's sum reaches the target; of counts, any that has
    it."""
    while low + 1 < high:
        quarter = (high - low + 3) // 4
        a = low + quarter
        b = tl.minimum(a + quarter, high - 1)
        c = tl.minimum(b + quarter, high - 1)
        of_a, of_b, of_c = _sums(row, _number(a), _number(b), _number(c), shift, bounded, V, BLOCK, MASS)
        next_low = tl.where(of_c >= target, c, tl.where(of_b >= target, b, tl.where(of_a >= target, a, low)))
        high = tl.where(of_a < target, a, tl.where(of_b < target, b, tl.where(of_c < target, c, high)))
        low = next_low
        if not MASS:
            reached = tl.where(of_c >= target, of_c, tl.where(of_b >= target, of_b, of_a))
            high = tl.where(reached == target, low + 1, high)
    return low


@triton.jit
def _gumbel(keys, first, SIZE: tl.constexpr, ROUNDS: tl.constexpr):
    """Returns the noise float32 [SIZE] of the tokens of successive counters, as noise.py defines it."""
    seed, sample = tl.load(keys), tl.load(keys + 1)
    counter = (first + tl.arange(0, SIZE // 4)).to(tl.uint32)
    zero = counter * 0
    index, purpose = tl.load(keys + 2) + zero, tl.load(keys + 3) + zero
    a, b, c, d = tl.philox_impl(counter, index, purpose, zero, seed + zero, sample + zero, ROUNDS)
    random = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (SIZE,))
    upper = random >= 0x80000000
    smaller = tl.where(upper, random ^ 0xFFFFFFFF, random).to(tl.float32) * 2.0**-32 + 2.0**-33
    series = 1 + smaller * (0.5 + smaller * (1 / 3 + smaller * (0.25 + smaller * (0.2 + smaller * (1 / 6)))))
    lower = tl.where(smaller < 0.0625, smaller * series, -tl.log(1 - smaller))  # -log1p(-smaller)
    return -tl.log(tl.where(upper, -tl.log(smaller), lower))
