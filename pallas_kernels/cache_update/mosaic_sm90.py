"""Runs cache_update on Hopper: one pass over Q, K and V, from one fused array or three, into the pages in place.

Memory bounds it, so there is no staging. A warpgroup loads the two halves of a few heads straight into registers, norms
them if asked, rotates, encodes, and stores. A half of D/2 values is laid out as [groups, threads, vector]. A
quantization group is spread over neighbouring lanes (or lies in one), and its largest magnitude costs a few shuffles.
So do norms and the rotation by a Hadamard matrix: whole heads are in a few lanes.

Arithmetic is what XLA compiles from the xla backend. Divisions by a constant and by a group's scale become products
with the reciprocal. A product may be contracted with the sum that takes it. Sums of norms and of a rotation have
another order.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu.fragmented_array import TiledLayout
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.cache_update.config import Config, check_supported, choose_config
from pallas_kernels.formats.kv_formats import FP8, LARGEST_CODE, KVFormat
from pallas_kernels.formats.kv_pages import KVPages, Pages, apart
from pallas_kernels.hopper.hadamard_sm90 import turn

WARPS, LANES = 4, 32


@dataclass(frozen=True)
class _Part:
    """Describes Q, K or V: the heads `first`, `first + 1`, .. of its source array, and what becomes of them."""

    name: str
    first: int
    heads: int
    format: KVFormat  # as stored
    groups: int  # of one half
    threads: int  # per group
    vector: int

    @property
    def half(self) -> tuple[int, int, int]:
        return self.groups, self.threads, self.vector

    @property
    def dtype(self) -> str:
        return self.format.dtype

    @property
    def joint(self) -> bool:
        """Tells whether one group covers both halves."""
        return self.format.group is not None and self.format.group > math.prod(self.half)

    def lanes(self, heads: int) -> tuple[int, int, int, int]:
        """Counts the lanes of a warp that differ in the head, the group, the thread, and in nothing."""
        t = min(LANES, self.threads)
        g = min(LANES // t, self.groups)
        h = min(LANES // (t * g), heads)
        return h, g, t, LANES // (h * g * t)


@dataclass(frozen=True)
class _Span:
    """Describes equal blocks of one part: units `unit` .. `unit + blocks` of a token take `heads` heads each, from
    `head` on."""

    part: _Part
    unit: int
    blocks: int
    head: int
    heads: int


@partial(jax.jit, static_argnames=("first", "num_heads", "eps", "gain_offset", "config", "interpret"))
def cache_update(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    pages: KVPages,
    page: jax.Array,
    offset: jax.Array,
    *,
    first: tuple[int, int, int] = (0, 0, 0),
    num_heads: int | None = None,
    gains: tuple[jax.Array, jax.Array] | None = None,
    eps: float = 0.0,
    gain_offset: float = 0.0,
    config: Config | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[jax.Array, KVPages]:
    """Returns q [T, H, D] rotated, and the pages with k, v [T, K, D]; see api.py. Takes cos, sin [T, D/2] and page,
    offset i32[T]. q, k and v may be one array [T, H + 2K, D] that is passed three times. `first` is the first head of
    each in its array, `num_heads` is H (default: all heads of q). `gains` [D] of q's and k's norms, with `eps` and what
    is added to them: see api.cache_update_fused. Donated pages are updated in place."""
    rows, _, head_dim = q.shape
    check_supported(str(q.dtype), head_dim, pages)
    num_heads = q.shape[1] if num_heads is None else num_heads
    if rows == 0:  # no launch without blocks
        return jnp.zeros((0, num_heads, head_dim), q.dtype), pages
    num_kv_heads = pages.k.values.shape[1]
    config = choose_config(rows, num_kv_heads) if config is None else config
    parts = (
        _part("q", first[0], num_heads, KVFormat(str(q.dtype)), head_dim, config),
        _part("k", first[1], num_kv_heads, pages.k.format, head_dim, config),
        _part("v", first[2], num_kv_heads, pages.v.format, head_dim, config),
    )
    sources = [x.reshape(*x.shape[:2], 2, *part.half) for x, part in zip((q, k, v), parts)]
    waves = [wave.astype(jnp.float32).reshape(rows, *part.half) for part in parts[:2] for wave in (cos, sin)]
    scaled = [] if gains is None else [gain.reshape(2, *part.half) for gain, part in zip(gains, parts)]
    norm = None if gains is None else partial(_norm, dtype=q.dtype, eps=eps, offset=gain_offset)
    own = apart(pages)
    pools = [jax.new_ref(pool) for pages, part in zip((own.k, own.v), parts[1:]) for pool in _split(pages, part)]
    spans = tuple(_spans(parts, config))
    units, slots = spans[-1].unit + spans[-1].blocks, (pages.k.num_pages, pages.k.page_size)
    out = plgpu.kernel(
        partial(_body, spans=spans, rows=rows, slots=slots, tokens=config.tokens, norm=norm),
        out_type=jax.ShapeDtypeStruct((rows, num_heads, 2, *parts[0].half), q.dtype),
        grid=(-(-rows // config.tokens) * units,),
        grid_names=("block",),
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=True,  # nothing is both read and written
        ),
        kernel_name="cache_update",
    )(*sources, *waves, *scaled, page, offset, pages.k.layer_operand, *pools)
    stored = iter([jax.freeze(pool) for pool in pools])
    new = KVPages(*(_join(old, stored) for old in (pages.k, pages.v)))
    return out.reshape(rows, num_heads, head_dim), new


def _part(name: str, first: int, heads: int, fmt: KVFormat, head_dim: int, config: Config) -> _Part:
    """Makes vectors as long as they can be while a block of this part still occupies a warpgroup, but never one value.
    Truncating a single int32 to int8 is miscompiled (seen on an H200, JAX 0.11.2)."""
    half = head_dim // 2
    width = min(fmt.group or half, half)
    block = min(config.heads, 1 << (heads.bit_length() - 1))
    vector = max(block * half // (WARPS * LANES), half // LANES, 2)
    vector = 2 if fmt.dtype == "int4" else min(vector, config.vector)  # int4: a byte's two values meet in one thread
    return _Part(name, first, heads, fmt, half // width, width // vector, vector)


def _spans(parts: Sequence[_Part], config: Config) -> Iterator[_Span]:
    """Cuts heads into blocks of powers of two: 28 are 16 + 8 + 4."""
    unit = 0
    for part in parts:
        head, heads = 0, config.heads
        while head < part.heads:
            if blocks := (part.heads - head) // heads:
                yield _Span(part, unit, blocks, head, heads)
                head, unit = head + blocks * heads, unit + blocks
            heads //= 2


def _split(pages: Pages, part: _Part) -> Iterator[jax.Array]:
    """Splits the last axis of a pool's arrays as the kernel's registers are."""
    leading = pages.values.shape[:3]
    packed = part.half[:2] if part.dtype == "int4" else part.half
    yield pages.values.reshape(*leading, 2, *packed)
    if pages.scales is not None:
        kinds = 2 if part.format.zero_point else 1  # scales, and zeros after them
        yield pages.scales.reshape(*leading, kinds, 1 if part.joint else 2, part.groups)


def _join(pages: Pages, stored: Iterator[jax.Array]) -> Pages:
    values = next(stored).reshape(pages.values.shape)
    scales = None if pages.scales is None else next(stored).reshape(pages.scales.shape)
    return replace(pages, values=values, scales=scales)


def _layout(heads: int, part: _Part) -> Any:
    """Lays out registers [heads, groups, threads, vector]: lanes fill the last axes first; warps take different
    heads."""
    h, g, t, same = part.lanes(heads)
    w = min(WARPS, heads // h)
    tiling = plgpu.Tiling(((w * h, g, t, part.vector), (h, g, t, part.vector), (1, 1, 1, part.vector)))
    every = (-12, plgpu.Replicated(WARPS // w)), (-8, -7, -6, plgpu.Replicated(same))
    warps, lanes = (tuple(dim for dim in dims if dim != plgpu.Replicated(1)) for dims in every)
    layout = TiledLayout(tiling, warps, lanes, -1, _check_canonical=False).canonicalize()
    return plgpu.Layout.TILED(layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim)


def _body(
    *refs: Any, spans: Sequence[_Span], rows: int, slots: tuple[int, int], tokens: int, norm: Callable[..., Any] | None
) -> None:
    q, k, v, q_cos, q_sin, k_cos, k_sin, *more = refs
    gains = {} if norm is None else dict(zip("qk", more))
    page_ref, offset_ref, layer_ref, *pools, out = more[len(gains) :]
    k_pools = 1 + any(span.part.name == "k" and span.part.format.group for span in spans)
    sources = {"q": q, "k": k, "v": v}
    waves = {"q": (q_cos, q_sin), "k": (k_cos, k_sin), "v": ()}
    targets = {"q": [out], "k": pools[:k_pools], "v": pools[k_pools:]}
    block, units = jax.lax.axis_index("block"), jnp.int32(spans[-1].unit + spans[-1].blocks)
    token, unit = jax.lax.div(block, units) * tokens, jax.lax.rem(block, units)
    first_row = layer_ref[0] * slots[0]  # of the pools

    def run(span: _Span) -> None:
        name, layout = span.part.name, _layout(span.heads, span.part)
        head = span.head + (unit - span.unit) * span.heads
        loaded, gain = [], None
        if name in gains:
            gain = [plgpu.load(gains[name].at[half], layout=layout.reduce(0), optimized=False) for half in range(2)]
        for i in range(tokens):
            row = jnp.minimum(token + i, rows - 1)  # a block may reach past the last row, where it stores nothing
            halves = _load(sources[name].at[row, pl.ds(span.part.first + head, span.heads)], layout)
            angle = [plgpu.load(w.at[row], layout=layout.reduce(0), optimized=False) for w in waves[name]]
            loaded.append((halves, angle, page_ref[row], offset_ref[row]))
        for i, (halves, angle, page, offset) in enumerate(loaded):
            row, heads = token + i, pl.ds(head, span.heads)
            keep = row < rows
            if name != "q":
                keep &= (page >= 0) & (page < slots[0]) & (offset >= 0) & (offset < slots[1])
            at = (row, heads) if name == "q" else (first_row + page, heads, offset)
            if norm is not None and gain is not None:
                halves = norm(halves, gain, layout=layout)
            values = _rotate(halves, angle, layout) if angle else halves
            if span.part.format.hadamard:
                values = _turn(values, span.part, span.heads, layout)
            pl.when(keep)(partial(_store, targets[name], at, values, span.part, layout))

    for span in spans:
        pl.when((unit >= span.unit) & (unit < span.unit + span.blocks))(partial(run, span))


def _load(source: Any, layout: Any) -> list[jax.Array]:
    """Loads both halves of some heads [heads, groups, threads, vector], as float32."""
    halves = [plgpu.load(source.at[:, half], layout=layout, optimized=False) for half in range(2)]
    return [half.astype(jnp.float32) for half in halves]


def _norm(
    halves: Sequence[jax.Array], gains: Sequence[jax.Array], *, dtype: Any, eps: float, offset: float, layout: Any
) -> list[jax.Array]:
    """Norms heads as rms_norm does, with the sums of squares in another order. It rounds where that does."""
    sums = [jnp.sum(jnp.sum(jnp.sum(x * x, axis=3), axis=2), axis=1) for x in halves]
    mean = (sums[0] + sums[1]) * float(np.float32(0.5 / math.prod(halves[0].shape[1:])))
    scale = jax.lax.rsqrt(mean + float(np.float32(eps)))
    spread = plgpu.layout_cast(jax.lax.broadcast_in_dim(scale, halves[0].shape, (0,)), layout)
    found = []
    for x, gain in zip(halves, gains):
        gain = gain if offset else gain.astype(dtype)
        y, gain = x * spread, _over_heads(gain.astype(jnp.float32), x, layout)
        y = y * (gain + offset) if offset else y.astype(dtype).astype(jnp.float32) * gain
        found.append(y.astype(dtype).astype(jnp.float32))
    return found


def _over_heads(x: jax.Array, like: jax.Array, layout: Any) -> jax.Array:
    return plgpu.layout_cast(jax.lax.broadcast_in_dim(x, like.shape, (1, 2, 3)), layout)


def _rotate(halves: Sequence[jax.Array], waves: Sequence[jax.Array], layout: Any) -> list[jax.Array]:
    x, y = halves
    cos, sin = (_over_heads(w, x, layout) for w in waves)
    return [x * cos - y * sin, y * cos + x * sin]


def _turn(halves: Sequence[jax.Array], part: _Part, heads: int, layout: Any) -> list[jax.Array]:
    """Multiplies both halves of heads by hadamard(D): sums and differences of the halves, each turned."""
    _, g, t, same = part.lanes(heads)
    turned = partial(turn, layout=layout, size=math.prod(part.half), lanes=g * t, apart=same)
    x, y = (float(np.float32(0.5**0.5)) * turned(half) for half in halves)
    return [x + y, x - y]


def _store(stores: Sequence[Any], at: tuple[Any, ...], halves: Sequence[jax.Array], part: _Part, layout: Any) -> None:
    """Encodes both halves as kv_formats.encode does, and stores them."""
    if part.format.group is None:
        for i, x in enumerate(halves):
            stores[0][*at, i] = _convert(x, part.dtype)
        return
    values, numbers = stores
    largest = LARGEST_CODE[part.dtype]

    def of_groups(reduce: Any, join: Any, halves: Sequence[jax.Array]) -> list[jax.Array]:
        found = [reduce(reduce(x, axis=3), axis=2) for x in halves]
        return [join(*found)] if part.joint else found

    def store(kind: int, numbers_of: list[jax.Array]) -> None:
        for i, x in enumerate(numbers_of):
            if x.size == 1:  # one element is stored as a scalar only
                x = jnp.max(jnp.max(x, axis=1), axis=0).reshape(x.shape)
            numbers[*at, kind, i] = x

    def spread(numbers_of: list[jax.Array], i: int) -> jax.Array:
        x = numbers_of[i % len(numbers_of)]
        return plgpu.layout_cast(jax.lax.broadcast_in_dim(x, halves[i].shape, (0, 1)), layout)

    lowest = -largest
    if part.format.zero_point:
        lowest, largest = 0, 2 * largest + 1
        zeros = [_zero(least) for least in of_groups(jnp.min, jnp.minimum, halves)]
        store(1, zeros)
        zeros = [x.astype(jnp.float32) for x in zeros]
        halves = [x - spread(zeros, i) for i, x in enumerate(halves)]
        peaks = of_groups(jnp.max, jnp.maximum, halves)
    else:
        peaks = of_groups(jnp.max, jnp.maximum, [jnp.abs(x) for x in halves])
    scales = [_scale(peak, largest) for peak in peaks]
    store(0, scales)
    inverses = [1.0 / x.astype(jnp.float32) for x in scales]
    for i, x in enumerate(halves):
        values[*at, i] = _codes(x * spread(inverses, i), lowest, largest, part.dtype, layout)


def _convert(x: jax.Array, dtype: str) -> jax.Array:
    if dtype == FP8:
        largest = float(jnp.finfo(jnp.float8_e4m3fn).max)
        x = jnp.minimum(jnp.maximum(x, -largest), largest)
        return jax.lax.bitcast_convert_type(x.astype(jnp.float8_e4m3fn), jnp.uint8)
    return x.astype(dtype)


def _scale(peak: jax.Array, largest: int) -> jax.Array:
    f16 = jnp.finfo(jnp.float16)
    scale = peak * float(np.float32(1 / largest))
    return jnp.minimum(jnp.maximum(scale, float(f16.smallest_normal)), float(f16.max)).astype(jnp.float16)


def _zero(least: jax.Array) -> jax.Array:
    f16 = jnp.finfo(jnp.float16)
    least = jnp.where(jnp.abs(least) < float(f16.smallest_normal), 0.0, least)
    return jnp.minimum(jnp.maximum(least, float(f16.min)), float(f16.max)).astype(jnp.float16)


def _codes(x: jax.Array, lowest: int, largest: int, dtype: str, layout: Any) -> jax.Array:
    """Returns values over their scale, clipped and to nearest even: int8, or uint8 of two nibbles with the last axis
    gone. Codes from 0 on are stored less half of their number. The sum with 1.5 * 2^23 has no bits left for a fraction.
    So adding rounds, and its low bits are the integer. It takes a fraction of the time of a rounding instruction and a
    conversion."""
    x = jnp.minimum(jnp.maximum(x, float(lowest)), float(largest))
    codes = jax.lax.bitcast_convert_type(x + 1.5 * 2.0**23, jnp.int32)
    if lowest == 0:
        codes = codes - (largest + 1) // 2
    if dtype == "int8":
        return codes.astype(jnp.int8)
    nibbles = codes & 15
    position = plgpu.broadcasted_iota(jnp.int32, x.shape, 3, layout=layout)
    return jnp.sum(jnp.where(position == 0, nibbles, nibbles * 16), axis=3, dtype=jnp.int32).astype(jnp.uint8)
