"""sample on Hopper: a block of four warpgroups to a row, so that what a row asks for is a branch of its own block, and
the host need not know it.

One pass from memory finds the largest logit, where it is, and whether all are finite: that is all for a greedy row.
Thresholds are found by bisection over the float's integer image, as in xla.py: over registers where the row fits, else
over L2 with three pivots a pass. The draw bisects too: sums of chunks, then within the chunk the last token up to
which the weights don't exceed what is left of the target. All sums are in an order that the row's length alone decides,
and so monotone in what they leave out.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.sample import block_sm90
from pallas_kernels.sample.block_sm90 import Area, Block, image, last, number
from pallas_kernels.sample.config import HOTTEST, THREADS, VECTOR, Config, check_supported, choose_config
from pallas_kernels.sample.row_sm90 import INFINITY, Held, Pieces, Row, Streamed, Weights, clean, full, zeros

LOG2_E = float(np.log2(np.e))
TINY = float(np.finfo(np.float32).tiny)
COMPILER_PARAMS = plgpu.CompilerParams(
    lowering_semantics=plgpu.LoweringSemantics.Lane,
    approx_math=True,  # exp2 and log are the special function unit's: good to 2^-22
    unsafe_no_auto_barriers=True,  # a barrier precedes what a thread reads of others' shared memory
)


@partial(jax.jit, static_argnames=("config", "interpret"))
def sample(
    logits: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    uniform: jax.Array,
    *,
    config: Config | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[jax.Array, jax.Array]:
    """logits f32[R, V], the rest [R] -> tokens i32[R], finite bool[R]; see api.py."""
    rows, vocabulary = logits.shape
    check_supported(str(logits.dtype), rows, vocabulary)
    config = choose_config(vocabulary) if config is None else config
    config.check(vocabulary)
    temperature, top_p, min_p, uniform = (x.astype(jnp.float32) for x in (temperature, top_p, min_p, uniform))
    temperature, min_p = jnp.minimum(temperature, HOTTEST), jnp.minimum(min_p, 1)
    found = plgpu.kernel(
        partial(_body, vocabulary=vocabulary, config=config),
        out_type=jax.ShapeDtypeStruct((rows,), jnp.int32),
        grid=(rows,),
        grid_names=("row",),
        num_threads=config.warpgroups,
        thread_name="warpgroup",
        scratch_types=scratch(vocabulary, config),
        interpret=interpret,
        compiler_params=COMPILER_PARAMS,
        kernel_name="sample",
    )(
        logits.reshape(rows, vocabulary // VECTOR, VECTOR),
        temperature,
        top_p,
        min_p,
        uniform,
        top_k,
    )
    return jnp.where(found < 0, ~found, found), found >= 0


def scratch(vocabulary: int, config: Config) -> list[Any]:
    """Shared memory: the block's, and the weights of a row that is held."""
    held = [plgpu.SMEM((_held(vocabulary, config) * config.warpgroups, THREADS, VECTOR), jnp.float32)]
    return block_sm90.scratch(config.warpgroups) + (held if _held(vocabulary, config) else [])


def _held(vocabulary: int, config: Config) -> int:
    """Pieces that a warpgroup holds; 0 where they are too many."""
    pieces = -(-vocabulary // config.chunk) * config.pieces
    return pieces if pieces <= config.held else 0


def _body(
    logits: Any,
    temperatures: Any,
    top_ps: Any,
    min_ps: Any,
    uniforms: Any,
    top_ks: Any,
    found: Any,
    scratch: Any,
    barrier: Any,
    *held: Any,
    vocabulary: int,
    config: Config,
) -> None:
    """found i32[R]: a row's token, or its complement where not all logits are finite."""
    r, warpgroup = lax.axis_index("row"), lax.axis_index("warpgroup")
    temperature, top_p, min_p, uniform = temperatures[r], top_ps[r], min_ps[r], uniforms[r]
    top_k = top_ks[r]
    block, row = Block(warpgroup, scratch, barrier), Row(logits.at[r], warpgroup, vocabulary, config)
    top, greedy, finite = _scan(block, row)

    def sampled() -> jax.Array:
        bounded = jnp.maximum(temperature, TINY)
        weights = Weights(jnp.where(top == -INFINITY, 0.0, top), LOG2_E / bounded)
        source = (row, weights, *held)
        limited = jnp.logical_and(top_k > 0, top_k < vocabulary)
        nucleus = top_p < 1.0
        lowest = lax.cond(
            jnp.logical_or(limited, nucleus),
            lambda: _threshold(block, source, top, jnp.where(limited, top_k, 0), top_p),
            lambda: jnp.float32(-INFINITY),
        )
        likely = jnp.where(min_p > 0.0, top + bounded * jnp.log(min_p), -INFINITY)
        return _draw(block, row, weights, jnp.maximum(lowest, likely), uniform)

    token = lax.cond(temperature > 0.0, sampled, lambda: greedy)

    @pl.when(warpgroup == 0)
    def _() -> None:
        found[r] = jnp.where(finite, token, ~token)


def _scan(block: Block, row: Row) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The largest clean logit, the lowest token that has it, and whether all logits are finite."""

    def step(chunk: Any, raw: Pieces, carry: tuple[Pieces, Pieces, jax.Array]) -> tuple[Pieces, Pieces, jax.Array]:
        best, at, odd = carry
        start = row.start(chunk).astype(jnp.float32)
        for x in raw:
            odd = jnp.where(jnp.abs(x) < INFINITY, odd, 1.0)
        values = [clean(x) for x in raw]
        at = [jnp.where(x > b, start, a) for x, b, a in zip(values, best, at)]
        return [jnp.maximum(b, x) for b, x in zip(best, values)], at, odd

    pieces = row.config.pieces
    nothing = [full(-INFINITY) for _ in range(pieces)], [zeros() for _ in range(pieces)], zeros()
    best, at, odd = row.fold(step, nothing)
    largest = best[0]
    for x in best[1:]:
        largest = jnp.maximum(largest, x)
    top, odd = block.extremes([largest, odd], [], Area.TOP)
    first = full(float(row.vocabulary))
    for x, start, offset in zip(best, at, row.offsets()):
        first = jnp.minimum(first, jnp.where(x == top, start + offset, float(row.vocabulary)))
    (token,) = block.extremes([], [first], Area.TOKEN)
    return top, token.astype(jnp.int32), odd == 0.0


def _threshold(block: Block, source: tuple[Any, ...], top: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """A number that as many logits reach as reach top-k's and top-p's thresholds; top_k 0 and top_p >= 1 are off."""
    sums = Streamed(*source) if len(source) == 2 else Held(*source)
    off, high = jnp.float32(-INFINITY), image(top) + 1

    def by_count() -> jax.Array:
        k = top_k.astype(jnp.float32)

        def probe(at: Any, area: Any) -> Any:
            counts = block.sums(sums.counts([number(i) for i in at]), area)
            return [count >= k for count in counts], [count == k for count in counts]

        return number(last(probe, image(off), high, sums.pivots))

    lowest = lax.cond(top_k > 0, by_count, lambda: off)

    def by_mass() -> jax.Array:
        sums.prepare()
        (mass,) = block.sums(sums.masses([lowest]), Area.MASS)
        target = jnp.maximum(top_p * mass, TINY)

        def probe(at: Any, area: Any) -> Any:
            return [found >= target for found in block.sums(sums.masses([number(i) for i in at]), area)], None

        return number(last(probe, image(lowest), high, sums.pivots))

    return lax.cond(top_p < 1.0, by_mass, lambda: lowest)


def _draw(block: Block, row: Row, weights: Weights, lowest: jax.Array, uniform: jax.Array) -> jax.Array:
    """The first token up to which the weights of logits from `lowest` on exceed `uniform` of their sum; 0 if none has
    any. Where rounding leaves none, the last chunk, then the last token in it, that has weight."""

    def kept(chunk: Any, raw: Pieces) -> Pieces:
        return [weights.kept(x, lowest) for x in row.own(chunk, raw)]

    def whole(chunk: Any, raw: Pieces, total: jax.Array) -> jax.Array:
        return _add([total, *kept(chunk, raw)])

    (total,) = block.sums([row.fold(whole, zeros())], Area.TOTAL)
    target = uniform * total

    def scan(chunk: Any, raw: Pieces, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        running, chosen, rest, weight = state
        area = Area.LOOP + ((row.chunks - chunk) & 1)  # the last is not the one that `last` begins with
        (mine,) = block.sums([_add(kept(chunk, raw))], area)
        takes = jnp.logical_and(running <= target, mine > 0.0)
        chosen, rest = jnp.where(takes, chunk, chosen), jnp.where(takes, target - running, rest)
        return running + mine, chosen, rest, jnp.where(takes, mine, weight)

    zero = jnp.float32(0)
    _, chosen, rest, weight = row.fold(scan, (zero, jnp.int32(0), zero, zero))
    inside, offsets = kept(chosen, row.raw(chosen)), row.offsets()

    def probe(at: Any, area: Any) -> Any:
        ends = [i.astype(jnp.float32) for i in at]
        below = [_add([jnp.where(o <= end, x, 0.0) for x, o in zip(inside, offsets)]) for end in ends]
        return [jnp.logical_and(b <= rest, b < weight) for b in block.sums(below, area)], None

    offset = last(probe, jnp.int32(-1), jnp.int32(row.config.chunk - 1), 3) + 1
    return row.start(chosen) + jnp.where(weight > 0.0, offset, 0)


def _add(pieces: Pieces) -> jax.Array:
    total = pieces[0]
    for x in pieces[1:]:
        total = total + x
    return total
