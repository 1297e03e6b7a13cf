"""Runs sample on Hopper, in two kernels.

What a row asks for is a branch of its own blocks, and the host need not know it. The first kernel cuts a row into
parts, a block of one warpgroup to each. A row's length alone says how it is cut. Of a row without filters it gives each
part's best score, that is logit / temperature + Gumbel noise, in one pass from memory. Of others it gives the largest
logit, which is all for a greedy row. Both tell where it is, and whether all logits are finite.

The second takes the best of a row's parts. For a row with filters its block of four warpgroups then finds the
threshold. It bisects over the float's integer image, as in xla.py, over registers where the row fits. It draws among
the logits that reach the threshold, with noise for these alone. Of a longer row, the first kernel keeps what may matter
(cut_sm90.py), and the second searches this. Where that proves nothing, it reads the row from L2 in each pass, with
three pivots.

Scores are logarithms to base 2.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.sample import block_sm90, cut_sm90
from pallas_kernels.sample.block_sm90 import Area, Block
from pallas_kernels.sample.config import PIECE, THREADS, VECTOR, Config, check_supported, choose_config, padded
from pallas_kernels.sample.noise_sm90 import log2_exponentials
from pallas_kernels.sample.row_sm90 import INFINITY, Pieces, Row, Weights, clean, full, zeros
from pallas_kernels.sample.thresholds_sm90 import Asked, proven_threshold, threshold

LARGE = 512.0  # scores beyond are drawn anew from what logits are below their largest, lest float32 lose the noise
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
    keys: jax.Array,
    *,
    config: Config | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns tokens i32[R] and finite bool[R]; see api.py. Takes logits f32[R, V], keys u32[R, 4], the rest [R]."""
    rows, size = logits.shape
    check_supported(str(logits.dtype), rows, size)
    vocabulary = padded(size)
    if vocabulary > size:
        logits = jnp.pad(logits, ((0, 0), (0, vocabulary - size)), constant_values=-jnp.inf)
    config = choose_config(vocabulary) if config is None else config
    config.check(vocabulary)
    temperature, top_p, min_p = (x.astype(jnp.float32) for x in (temperature, top_p, min_p))
    arguments = logits.reshape(rows, vocabulary // VECTOR, VECTOR), temperature, top_k, top_p, min_p, keys
    run = partial(_kernel, vocabulary=vocabulary, size=size, interpret=interpret)
    small = replace(config, warpgroups=1)
    grid = rows, small.parts(vocabulary)[0]
    of_parts = [jax.ShapeDtypeStruct(grid, dtype) for dtype in (jnp.float32, jnp.float32, jnp.int32)]
    if config.cuts(vocabulary):
        of_parts += [jax.ShapeDtypeStruct(grid, jnp.float32)] * 2
        of_parts += [jax.ShapeDtypeStruct((*grid, config.kept, THREADS, VECTOR), jnp.float32)]
    drawn = run(_draw_part, of_parts, grid, block_sm90.scratch(1), arguments, small)
    of_rows = [jax.ShapeDtypeStruct((rows,), jnp.int32)] * 2
    found, finite = run(_draw_row, of_rows, (rows,), scratch(vocabulary, config), (*arguments, *drawn), config)
    return found, finite > 0


def _kernel(
    body: Callable[..., None],
    out: Any,
    grid: tuple[int, ...],
    scratch: list[Any],
    arguments: tuple[jax.Array, ...],
    config: Config,
    *,
    vocabulary: int,
    size: int,
    interpret: plgpu.InterpretGPUParams | None,
) -> Any:
    return plgpu.kernel(
        partial(body, vocabulary=vocabulary, size=size, config=config),
        out_type=out,
        grid=grid,
        grid_names=("row", "part")[: len(grid)],
        num_threads=config.warpgroups,
        thread_name="warpgroup",
        scratch_types=scratch,
        interpret=interpret,
        compiler_params=COMPILER_PARAMS,
        kernel_name="sample" + body.__name__.removeprefix("_draw"),
    )(*arguments)


def scratch(vocabulary: int, config: Config) -> list[Any]:
    """Returns the shared memory of a row's block: for reductions, and the weights of a row that is held."""
    held = [plgpu.SMEM((_held(vocabulary, config) * config.warpgroups, THREADS, VECTOR), jnp.float32)]
    return block_sm90.scratch(config.warpgroups) + (held if _held(vocabulary, config) else [])


def _held(vocabulary: int, config: Config) -> int:
    """Counts the pieces that a warpgroup holds, of the row or of what its parts keep; 0 where they are too many."""
    if config.cuts(vocabulary):
        return replace(config, warpgroups=1).parts(vocabulary)[0] * config.kept // config.warpgroups
    pieces = -(-vocabulary // config.chunk) * config.pieces
    return pieces if pieces <= config.held else 0


def _draw_part(
    logits: Any, temperature: Any, top_k: Any, top_p: Any, min_p: Any, keys: Any,
    scores: Any, shifts: Any, tokens: Any, *rest: Any,
    vocabulary: int, size: int, config: Config,
) -> None:  # fmt: skip
    """Stores a part's best score f32[R, parts], to which its shift / temperature is to be added, and the token that has
    it. The token is its complement where not all logits are finite. Greedy and filtered rows have the largest logit. Of
    a row that is cut and has top-k or top-p there is more, which is not written for other rows. It is the part's mass
    in units of its largest logit's and the largest logit dropped, both f32[R, parts], and those kept, f32[R, parts,
    kept, 128, 4]."""
    *of_cut, scratch, barrier = rest
    r, part, warpgroup = lax.axis_index("row"), lax.axis_index("part"), lax.axis_index("warpgroup")
    asked = Asked(r, size, temperature, top_k, top_p, min_p, keys)
    block, row = Block(warpgroup, scratch, barrier), Row(logits.at[r], warpgroup, vocabulary, size, config)
    chunks = config.parts(vocabulary)[1]
    best = partial(_best, block, row, part * chunks, chunks)
    zero = jnp.float32(0)

    def largest() -> tuple[jax.Array, ...]:
        top, token = best(lambda x, ids: clean(x))
        return top, zero, token

    def drawn() -> tuple[jax.Array, ...]:
        score, token = best(lambda x, ids: x * asked.scale - log2_exponentials(asked.keys, ids))
        return lax.cond(jnp.abs(score) < LARGE, lambda: (score, zero, token), below_largest)

    def below_largest() -> tuple[jax.Array, ...]:
        top, _ = best(lambda x, ids: clean(x))
        weights = Weights(top, asked.scale)
        score, token = best(lambda x, ids: weights.scaled(clean(x)) - log2_exponentials(asked.keys, ids))
        return score, top, token

    plain = jnp.logical_and(asked.sampled, jnp.logical_not(asked.filtered))
    score, shift, token = lax.cond(plain, drawn, largest)
    scores[r, part], shifts[r, part], tokens[r, part] = score, shift, token

    def cut() -> None:
        masses, drops, kept = of_cut
        pieces, dropped = cut_sm90.keep(row, part * chunks, chunks, kept.shape[2])
        for i, piece in enumerate(pieces):
            kept[r, part, i] = piece
        weights = Weights(jnp.where(score == -INFINITY, 0.0, score), asked.scale)
        (drops[r, part],) = block.extremes([dropped], [], Area.PROOF)
        (masses[r, part],) = block.sums([cut_sm90.mass(row, part * chunks, chunks, weights.of)], Area.MASS)

    if of_cut:
        pl.when(jnp.logical_and(asked.sampled, asked.cut))(cut)


def _draw_row(
    logits: Any, temperature: Any, top_k: Any, top_p: Any, min_p: Any, keys: Any, scores: Any, shifts: Any, tokens: Any,
    *rest: Any,
    vocabulary: int, size: int, config: Config,
) -> None:  # fmt: skip
    """Stores a row's token in found i32[R], and in is_finite i32[R] 1 where all its logits are finite, else 0."""
    cuts = config.cuts(vocabulary)
    of_cut, (found, is_finite, scratch, barrier, *held) = rest[: 3 * cuts], rest[3 * cuts :]
    r, warpgroup = lax.axis_index("row"), lax.axis_index("warpgroup")
    asked = Asked(r, size, temperature, top_k, top_p, min_p, keys)
    of_parts = [[x[r, part] for part in range(x.shape[1])] for x in (scores, shifts, tokens)]
    top, token, finite = _best_part(asked, *of_parts)

    def filtered() -> jax.Array:
        block, row = Block(warpgroup, scratch, barrier), Row(logits.at[r], warpgroup, vocabulary, size, config)
        weights = Weights(jnp.where(top == -INFINITY, 0.0, top), asked.scale)

        def searched() -> jax.Array:
            if not cuts:
                return threshold(block, (row, weights, *held), top, asked)
            masses, drops, kept = of_cut
            tops = [scores[r, part] for part in range(masses.shape[1])]
            mass = sum((masses[r, part] * weights.of(x) for part, x in enumerate(tops)), jnp.float32(0))
            largest = drops[r, 0]
            for part in range(1, drops.shape[1]):
                largest = jnp.maximum(largest, drops[r, part])
            sums = cut_sm90.Kept(kept.at[r], warpgroup, config.warpgroups, weights, *held)
            lowest, proven = proven_threshold(block, sums, mass, largest, top, asked)
            return lax.cond(proven, lambda: lowest, lambda: threshold(block, (row, weights), top, asked))

        lowest = lax.cond(asked.cut, searched, lambda: jnp.float32(-INFINITY))
        likely = jnp.where(asked.min_p > 0.0, top + asked.bounded * jnp.log(asked.min_p), -INFINITY)
        lowest = jnp.maximum(lowest, likely)

        def score(x: jax.Array, ids: jax.Array) -> jax.Array:
            x = clean(x)
            kept = jnp.where(x > -INFINITY, x >= lowest, False)
            return jnp.where(kept, weights.scaled(x) - log2_exponentials(asked.keys, ids, kept), -INFINITY)

        _, drawn = _best(block, row, jnp.int32(0), row.chunks, score)
        return jnp.where(drawn < 0, ~drawn, drawn)

    token = lax.cond(asked.filtered, filtered, lambda: token)

    @pl.when(warpgroup == 0)
    def _() -> None:
        found[r], is_finite[r] = token, jnp.where(finite, 1, 0)


def _best_part(
    asked: Asked, scores: list[jax.Array], shifts: list[jax.Array], tokens: list[jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the largest of the parts' scores, the token that has it, the lowest at ties, and whether all are
    finite."""
    shift = shifts[0]
    for x in shifts[1:]:
        shift = jnp.maximum(shift, x)
    shift = jnp.where(shift == -INFINITY, 0.0, shift)
    best, token, finite = jnp.float32(-INFINITY), jnp.int32(0), tokens[0] >= 0
    for score, own, at in zip(scores, shifts, tokens):
        score = jnp.where(own == shift, score, (own - shift) * asked.scale + score)
        token = jnp.where(score > best, jnp.where(at < 0, ~at, at), token)
        best = jnp.where(score > best, score, best)
        finite = jnp.logical_and(finite, at >= 0)
    return best, token, finite


def _best(
    block: Block, row: Row, first: Any, chunks: int, score: Callable[[jax.Array, jax.Array], jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Returns the largest score(raw logits, ids i32) f32[128, 4] of a row's chunks from `first` on, and the lowest such
    token. NaN never counts. The token is its complement where not all logits are finite. Logits may be read twice."""
    offset = row.offset()

    def step(chunk: Any, raw: Pieces, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        best, at, odd = carry
        for i, x in enumerate(raw):
            start = row.start(chunk) + i * PIECE
            found = score(x, offset + start)
            better = found > best
            best, at = jnp.where(better, found, best), jnp.where(better, start.astype(jnp.float32), at)
            odd = odd + row.given(x, offset + start) * 0.0  # NaN from the first that is not finite
        return best, at, odd

    nothing = full(-INFINITY), row.start(first).astype(jnp.float32) + zeros(), zeros()
    best, at, odd = row.fold(step, nothing, first, chunks)
    top, odd = block.extremes([best, jnp.where(odd == 0.0, 0.0, 1.0)], [], Area.TOP)
    tokens = jnp.where(best == top, at + offset.astype(jnp.float32), float(row.vocabulary))
    (lowest,) = block.extremes([], [tokens], Area.TOKEN)
    token = lowest.astype(jnp.int32)
    return top, jnp.where(odd == 0.0, token, ~token)
