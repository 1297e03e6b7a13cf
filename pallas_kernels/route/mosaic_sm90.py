"""Routes tokens to experts on Hopper in two launches, or in one for a single token.

The first launch has a block for each token. A thread has an expert and counts those with better scores, so that nothing
is sorted. All that follows is made of these ranks: lists of the chosen experts in both orders, and a mask of them.

The second launch has a block for each few tokens, and one for the schedule of the ragged products. Each block adds all
tokens' masks, so that none waits for another. A thread has an expert again. So it knows where the expert's rows begin,
and how many of them are earlier tokens'. Each block copies its tokens' rows to their places. If there is one token
alone, both blocks choose its experts, and no mask goes through memory. Many tokens are sorted by XLA.

If other routes than these are to count, a kernel of the first kind gives their shares. Equal routes so have equal bits.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.hopper import SMS
from pallas_kernels.hopper.row_pieces_sm90 import (
    COMPILER_PARAMS,
    FULL,
    VECTOR,
    every_warp,
    everyone,
    load_piece,
    pieces,
    tiled,
)
from pallas_kernels.route import xla
from pallas_kernels.route.config import MOST_TOKENS
from pallas_kernels.route.xla import Here, Sorted
from pallas_kernels.row_groups import Pairs, Schedule, most_pairs

CHUNK = 32  # experts that a thread compares its own with at once
TOKENS = 64  # whose masks are in flight
MATRIX = tiled(((FULL, 4), (32, 4), (1, 4)), (-6,), (-4,))  # [128, n]: a thread has a row
OWN, OTHERS = MATRIX.reduce(1), MATRIX.reduce(0)
LIST = tiled(((4, 32), (1, 32), (1, 1)), (-6,), (-3,))  # [places, experts]: a warp has a row
OF_PLACES, OF_EXPERTS = LIST.reduce(1), LIST.reduce(0)


@dataclass(frozen=True)
class Plan:
    """Holds static sizes."""

    tokens: int
    experts: int
    chosen: int
    normalize: bool
    block: int  # rows of a block of the schedule
    apart: bool = False  # blocks begin with an expert's rows

    @property
    def rows(self) -> int:
        return self.tokens * self.chosen

    @property
    def padded(self) -> int:
        """Counts experts with those that fill up the threads. They are after all others, and never chosen."""
        return pl.cdiv(self.experts, FULL) * FULL

    @property
    def places(self) -> int:
        """Counts the places of a list of chosen experts."""
        return pl.cdiv(self.chosen, 4) * 4

    @property
    def pairs(self) -> int:
        return pl.cdiv(most_pairs(self.rows, self.experts + 1, self.block), FULL) * FULL

    @property
    def scheduling(self) -> int:
        """Counts the blocks that make the schedule, of 128 pairs each."""
        return self.pairs // FULL

    @property
    def share(self) -> int:
        """Counts the tokens of each other block of the second launch."""
        return pl.cdiv(self.tokens, max(SMS - self.scheduling, 1))

    @property
    def moving(self) -> int:
        """Counts the blocks that move rows."""
        return pl.cdiv(self.tokens, self.share)

    @property
    def scratch(self) -> dict[str, Any]:
        """Returns shared memory and the barrier of a block. Where XLA moves rows, none has places for its tokens."""
        numbers, floats = plgpu.SMEM((self.padded,), jnp.int32), plgpu.SMEM((self.padded,), jnp.float32)
        placed = self.share if self.tokens <= MOST_TOKENS else 1
        of_places = (self.places,)
        return {
            "scores": floats, "wide": floats, "ranks": numbers, "slots": numbers, "sizes": numbers, "starts": numbers,
            "blocks": numbers, "firsts": numbers, "at": plgpu.SMEM((placed, self.padded), jnp.int32),
            "best": plgpu.SMEM(of_places, jnp.float32), "numbers": plgpu.SMEM(of_places, jnp.int32),
            "barrier": plgpu.Barrier(),
        }  # fmt: skip


class Shared(NamedTuple):
    """Holds a block's shared memory, by expert where nothing is said."""

    scores: Any
    wide: Any  # shares, of all experts
    ranks: Any  # by score
    slots: Any  # of the chosen ones, in the order of their numbers; -1: not chosen
    sizes: Any
    starts: Any  # the rows of all experts before
    blocks: Any
    firsts: Any  # the pairs of all experts before
    at: Any  # i32[tokens of the block, experts]: a row's place, if the expert is chosen
    best: Any  # f32[places], shares, the best first
    numbers: Any  # i32[places]
    barrier: Any

    def wait(self) -> None:
        everyone(self.barrier)


class Choice(NamedTuple):
    """Holds the experts of all tokens."""

    routes: Any  # i32[T, places], the best first
    numbers: Any  # i32[T, places], in the order of their numbers
    shares: Any  # f32[T, places], in that order
    mask: Any  # i32[T, padded]: 1 where an expert is chosen


class Arranged(NamedTuple):
    """Holds where rows go."""

    places: Any  # i32[T, places], in the order of experts' numbers
    experts: Any  # i32[rows], of the row at each place
    rows: Any  # [rows, E / 8, 8]
    group: Any  # those of Pairs, of which the first four may be longer
    row: Any
    first: Any
    last: Any
    starts: Any
    before: Any


Interpret = plgpu.InterpretGPUParams | None


def sort_tokens(
    scores: jax.Array, x: jax.Array, chosen: int, normalize: bool, here: Here,
    seen: Callable[[jax.Array], jax.Array], block: int, backend: str | None = None, interpret: Interpret = None,
    apart: bool = False,
) -> Sorted:  # fmt: skip
    """Routes tokens; see api.py. Gradients are xla's."""
    tokens, experts = scores.shape
    plan = Plan(tokens, experts, chosen, normalize, block, apart)
    if plan.tokens > MOST_TOKENS:
        routes, numbers, shares = choose(scores, plan, interpret)
        if (given := seen(routes)) is routes:
            return xla.sort_rows(x, numbers, shares, here)
    else:
        routes, made = route(scores, x, plan, interpret)
        if (given := seen(routes)) is routes:
            return made
    return xla.sort_rows(x, given, share(scores, given, plan, interpret), here)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def route(scores: jax.Array, x: jax.Array, plan: Plan, interpret: Interpret) -> tuple[jax.Array, Sorted]:
    """Returns routes, and what scores [T, X] make of rows x [T, E]."""
    cut = x.reshape(len(x), -1, VECTOR)
    choice, arranged = _of_choice(plan), _of_rows(plan, cut)
    run = partial(_run, plan, interpret)
    if plan.tokens == 1:
        made = run(_route_token, "route", (*choice, *arranged), 1 + plan.scheduling)(scores, cut)
        choice, arranged = Choice(*made[: len(choice)]), Arranged(*made[len(choice) :])
    else:
        choice = Choice(*run(_choose_token, "route", choice, plan.tokens)(scores))
        blocks = plan.moving + plan.scheduling
        made = run(_arrange_tokens, "route_rows", arranged, blocks)(choice.numbers, choice.mask, cut)
        arranged = Arranged(*made)
    routes, shares, places = (each[:, : plan.chosen] for each in (choice.routes, choice.shares, arranged.places))
    sizes, rows = arranged.starts[1:] - arranged.starts[:-1], arranged.rows.reshape(plan.rows, -1)
    schedule = Schedule(Pairs(*arranged[3:]), plan.block, plan.apart)
    return routes, Sorted(rows, arranged.experts, sizes, places, shares, schedule)


def _route_forward(scores, x, plan, interpret):
    routes, made = route(scores, x, plan, interpret)
    return (routes, made), (scores, x, routes)


def _route_backward(plan, interpret, saved, gradients):
    scores, x, routes = saved

    def formula(scores: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        shares = xla.shares_of(scores, routes, plan.normalize).astype(jnp.float32)
        made = xla.sort_rows(x, routes, shares, Here(plan.experts))
        return made.rows, made.shares

    return jax.vjp(formula, scores, x)[1]((gradients[1].rows, gradients[1].shares))


route.defvjp(_route_forward, _route_backward)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def choose(scores: jax.Array, plan: Plan, interpret: Interpret) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns routes of scores [T, X], then experts in the order of their numbers, and their shares."""
    choice = Choice(*_run(plan, interpret, _choose_token, "route", _of_choice(plan), plan.tokens)(scores))
    routes, numbers, shares = (each[:, : plan.chosen] for each in choice[:3])
    return routes, numbers, shares


def _choose_forward(scores, plan, interpret):
    made = choose(scores, plan, interpret)
    return made, (scores, made[1])


def _choose_backward(plan, interpret, saved, gradients):
    return _shares_gradient(plan, saved, gradients[2])


choose.defvjp(_choose_forward, _choose_backward)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def share(scores: jax.Array, routes: jax.Array, plan: Plan, interpret: Interpret) -> jax.Array:
    """Returns the shares f32[T, k] of routes i32[T, k], any of them. A number of no expert has none."""
    known = jnp.where(routes < plan.experts, routes, -1)  # what fills up the threads has NaN where scores have
    padded = jnp.pad(known, ((0, 0), (0, plan.places - plan.chosen)), constant_values=-1)
    of_places = jax.ShapeDtypeStruct(padded.shape, jnp.float32)
    return _run(plan, interpret, _share_token, "route_shares", (of_places,), plan.tokens)(scores, padded)[0][
        :, : plan.chosen
    ]


def _share_forward(scores, routes, plan, interpret):
    return share(scores, routes, plan, interpret), (scores, routes)


def _share_backward(plan, interpret, saved, gradient):
    return *_shares_gradient(plan, saved, gradient), None


share.defvjp(_share_forward, _share_backward)


def _shares_gradient(plan: Plan, saved: tuple[jax.Array, jax.Array], gradient: jax.Array) -> Any:
    scores, routes = saved

    def formula(scores: jax.Array) -> jax.Array:
        return xla.shares_of(scores, routes, plan.normalize).astype(jnp.float32)

    return jax.vjp(formula, scores)[1](gradient)


def _of_choice(plan: Plan) -> Choice:
    whole = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    of_places, of_experts = (plan.tokens, plan.places), (plan.tokens, plan.padded)
    return Choice(whole(of_places), whole(of_places), jax.ShapeDtypeStruct(of_places, jnp.float32), whole(of_experts))


def _of_rows(plan: Plan, x: jax.Array) -> Arranged:
    whole = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    rows, pairs = jax.ShapeDtypeStruct((plan.rows, *x.shape[1:]), x.dtype), [whole((plan.pairs,))] * 4
    return Arranged(
        whole((plan.tokens, plan.places)), whole((plan.rows,)), rows, *pairs, *[whole((plan.experts + 1,))] * 2
    )


def _run(
    plan: Plan, interpret: plgpu.InterpretGPUParams | None, body: Callable[..., None], name: str,
    out: tuple[Any, ...], blocks: int,
) -> Callable[..., Any]:  # fmt: skip
    def with_shared(*refs: Any, **scratch: Any) -> None:
        body(plan, Shared(**scratch), lax.axis_index("block"), *refs)

    return plgpu.kernel(
        with_shared,
        out_type=list(out),
        scratch_types=plan.scratch,
        grid=(blocks,),
        grid_names=("block",),
        interpret=interpret,
        compiler_params=COMPILER_PARAMS,
        kernel_name=name,
    )


def _route_token(plan: Plan, shared: Shared, block: Any, scores: Any, x: Any, *out: Any) -> None:
    """Does all for a single token: the first block moves its row, others make the schedule."""
    choice, arranged = Choice(*out[: len(Choice._fields)]), Arranged(*out[len(Choice._fields) :])
    row = _load_row(x.at[0])
    _rank(plan, shared, scores.at[0])
    for own in _owned(plan):
        shared.sizes[own] = _where(_load(shared.ranks, own, OWN) < plan.chosen)
    shared.wait()
    _begin(plan, shared, None)

    @pl.when(block == 0)
    def _() -> None:
        _list(plan, shared, choice, 0)
        _move(shared, [shared.numbers[j] for j in range(plan.chosen)], row, 0, 0, arranged)

    pl.when(block > 0)(lambda: _schedule(plan, shared, block - 1, arranged))


def _choose_token(plan: Plan, shared: Shared, token: Any, scores: Any, *out: Any) -> None:
    _rank(plan, shared, scores.at[token])
    _list(plan, shared, Choice(*out), token)


def _arrange_tokens(plan: Plan, shared: Shared, block: Any, numbers: Any, mask: Any, x: Any, *out: Any) -> None:
    """Moves rows of a block's tokens, or makes a part of the schedule. What comes from memory is loaded first."""
    arranged, first = Arranged(*out), block * plan.share
    tokens = [jnp.minimum(first + i, plan.tokens - 1) for i in range(plan.share)]
    experts = [[numbers[token, j] for j in range(plan.chosen)] for token in tokens]
    row = _load_row(x.at[tokens[0]])
    for own in _owned(plan):
        shared.sizes[own], shared.at[0, own] = _count(plan, mask, own, first)
        for i in range(1, plan.share):
            shared.at[i, own] = _load(mask.at[tokens[i - 1]], own, OWN)
    shared.wait()
    _begin(plan, shared, shared.at.at[0])
    for i in range(1, plan.share):
        for own in _owned(plan):
            shared.at[i, own] = _load(shared.at.at[i - 1], own, OWN) + _load(shared.at.at[i], own, OWN)
    shared.wait()
    for i, token in enumerate(tokens):

        def move(i: int = i, token: Any = token) -> None:
            _move(shared, experts[i], row if i == 0 else _load_row(x.at[token]), i, token, arranged)

        pl.when(first + i < plan.tokens)(move)
    pl.when(block >= plan.moving)(lambda: _schedule(plan, shared, block - plan.moving, arranged))


def _keep(plan: Plan, shared: Shared, scores: Any) -> None:
    """Leaves a token's scores in shared memory, float32. NaN becomes infinity, lest a token have too many experts. Its
    shares are NaN all the same."""
    for piece in pieces(plan.experts):
        at = pl.ds(piece.start, piece.size)
        score = _load(scores, at, every_warp(piece.size)).astype(jnp.float32)
        shared.scores[at] = jnp.where(score == score, score, jnp.inf)
    for piece in pieces(plan.padded - plan.experts):
        lowest = jnp.full((piece.size,), -jnp.inf, jnp.float32)
        shared.scores[pl.ds(plan.experts + piece.start, piece.size)] = plgpu.layout_cast(lowest, every_warp(piece.size))
    shared.wait()


def _rank(plan: Plan, shared: Shared, scores: Any) -> None:
    """Leaves a token's scores in shared memory, and the rank of each expert by its score."""
    _keep(plan, shared, scores)
    for own in _owned(plan):
        mine, number = _spread(_load(shared.scores, own, OWN)), _numbers(0) + own.start

        def compare(first: Any, rank: jax.Array, mine: jax.Array = mine, number: jax.Array = number) -> jax.Array:
            other = _others(shared.scores, first)
            ahead = (other > mine) | ((other == mine) & (_numbers(1) + first < number))
            return rank + jnp.sum(_where(ahead), axis=1)

        shared.ranks[own] = _over_experts(plan, compare, _zeros())
    shared.wait()


def _soften(plan: Plan, shared: Shared) -> None:
    """Leaves the shares of all experts in shared memory, from their scores there."""
    scores = [_load(shared.scores, at, every_warp(FULL)) for at in _owned(plan)]
    top = _join([jnp.max(each, axis=0) for each in scores], jnp.maximum)
    powers = [jnp.exp(each - top) for each in scores]
    total = _join([jnp.sum(each, axis=0) for each in powers], jnp.add)
    for at, power in zip(_owned(plan), powers, strict=True):
        shared.wide[at] = power / total


def _list(plan: Plan, shared: Shared, choice: Choice, token: Any) -> None:
    """Stores a token's choice, of scores and ranks in shared memory. Leaves the experts' numbers there, too."""
    _soften(plan, shared)
    for own in _owned(plan):
        rank, number = _load(shared.ranks, own, OWN), _numbers(0) + own.start

        def count(first: Any, slot: jax.Array, number: jax.Array = number) -> jax.Array:
            earlier = (_others(shared.ranks, first) < plan.chosen) & (_numbers(1) + first < number)
            return slot + jnp.sum(_where(earlier), axis=1)

        shared.slots[own] = jnp.where(rank < plan.chosen, _over_experts(plan, count, _zeros()), -1)
        choice.mask[token, own] = _where(rank < plan.chosen)
    shared.wait()
    lists: list[list[jax.Array]] = [[], [], [], []]
    for own in _owned(plan):
        place, number = _list_numbers(plan, 0), _list_numbers(plan, 1) + own.start
        rank, slot, wide = (
            _in_list(plan, _load(ref, own, OF_EXPERTS), 1) for ref in (shared.ranks, shared.slots, shared.wide)
        )
        best, numbered = rank == place, slot == place
        parts = (best, number), (numbered, number), (best, wide), (numbered, wide)
        for each, (here, what) in zip(lists, parts, strict=True):
            each.append(jnp.sum(jnp.where(here, what, jnp.zeros_like(what)), axis=1))
    routes, numbers, best_shares, shares = (_join(each, jnp.add) for each in lists)
    choice.routes[token], choice.numbers[token], shared.numbers[...] = routes, numbers, numbers
    choice.shares[token] = _normalized(plan, shared, best_shares, shares)


def _share_token(plan: Plan, shared: Shared, token: Any, scores: Any, routes: Any, out: Any) -> None:
    """Stores the shares of given routes."""
    _keep(plan, shared, scores.at[token])
    _soften(plan, shared)
    shared.wait()
    route, parts = _in_list(plan, plgpu.load(routes.at[token], layout=OF_PLACES, optimized=False), 0), []
    for own in _owned(plan):
        wide = _in_list(plan, _load(shared.wide, own, OF_EXPERTS), 1)
        parts.append(jnp.sum(jnp.where(route == _list_numbers(plan, 1) + own.start, wide, 0.0), axis=1))
    shares = _join(parts, jnp.add)
    out[token] = _normalized(plan, shared, shares, shares)


def _normalized(plan: Plan, shared: Shared, all_shares: jax.Array, shares: jax.Array) -> jax.Array:
    """Returns shares over the sum of all shares f32[places], one after the other, if they are normalized."""
    shared.best[...] = all_shares
    shared.wait()
    if not plan.normalize:
        return shares
    total = _join([shared.best[j] for j in range(plan.chosen)], jnp.add)
    return shares / jnp.where(total == 0.0, 1.0, total)


def _count(plan: Plan, mask: Any, own: Any, token: Any) -> tuple[jax.Array, jax.Array]:
    """Counts the rows of each of a thread's experts: of all tokens, and of those before one."""

    def add(start: Any, tokens: int, counts: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        whole, earlier = counts
        chosen = [_load(mask.at[start + i], own, OWN) for i in range(tokens)]
        for i, each in enumerate(chosen):
            whole, earlier = whole + each, earlier + jnp.where(start + i < token, each, 0)
        return whole, earlier

    full = plan.tokens // TOKENS
    counts = lax.fori_loop(0, full, lambda i, counts: add(i * TOKENS, TOKENS, counts), (_zeros(), _zeros()))
    return add(full * TOKENS, plan.tokens % TOKENS, counts)


def _begin(plan: Plan, shared: Shared, earlier: Any) -> None:
    """Leaves where each expert's rows begin in shared memory, and where those of the block's first token are: after
    the `earlier` ones."""
    for own in _owned(plan):
        starts = _sum_before(plan, shared.sizes, own)
        shared.starts[own] = starts
        shared.at[0, own] = starts if earlier is None else starts + _load(earlier, own, OWN)
    shared.wait()


def _load_row(row: Any) -> list[jax.Array]:
    """Loads a row [E / 8, 8] of x in pieces."""
    return [load_piece(row, piece.start, piece.size) for piece in pieces(row.shape[0])]


def _move(shared: Shared, numbers: list[Any], row: list[jax.Array], i: int, token: Any, arranged: Arranged) -> None:
    """Stores the row of a block's token i at its places."""
    places = [shared.at[i, number] for number in numbers]
    for j, (number, place) in enumerate(zip(numbers, places, strict=True)):
        arranged.places[token, j] = place
        arranged.experts[place] = number
        for piece, value in zip(pieces(arranged.rows.shape[1]), row, strict=True):
            arranged.rows[place, pl.ds(piece.start, piece.size)] = value


def _schedule(plan: Plan, shared: Shared, part: Any, arranged: Arranged) -> None:
    """Stores a part of the pairs of blocks of rows and experts, from the experts' rows in shared memory. The first part
    also stores where experts begin."""
    shift = plan.block.bit_length() - 1

    def block_of(row: jax.Array) -> jax.Array:
        return lax.shift_right_logical(row, jnp.int32(shift))

    def begin(start: jax.Array) -> jax.Array:
        return start if plan.apart else block_of(start) * plan.block

    for own in _owned(plan):
        start, size = _load(shared.starts, own, OWN), _load(shared.sizes, own, OWN)
        blocks = block_of(start - begin(start) + size - 1) + 1
        shared.blocks[own] = jnp.where(size > 0, blocks, 0)
    shared.wait()
    for own in _owned(plan):
        shared.firsts[own] = _sum_before(plan, shared.blocks, own)
    shared.wait()
    own = pl.ds(part * FULL, FULL)
    number = _numbers(0) + own.start

    def find(first: Any, found: Any) -> Any:
        pair, blocks, size = (_others(ref, first) for ref in (shared.firsts, shared.blocks, shared.sizes))
        past, begun = pair + blocks <= number, pair <= number
        added = _where(past), jnp.where(past, blocks, 0), jnp.where(past, size, 0), jnp.where(begun, size, 0)
        return tuple(each + jnp.sum(more, axis=1) for each, more in zip(found, added, strict=True))

    group, pairs, start, end = _over_experts(plan, find, (_zeros(),) * 4)
    mine = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, (FULL,), 0), OWN) + own.start
    row = begin(start) + (mine - pairs) * plan.block
    arranged.group[own], arranged.row[own] = group, row
    arranged.first[own], arranged.last[own] = jnp.maximum(start, row), jnp.minimum(end, row + plan.block)

    @pl.when(part == 0)
    def _() -> None:
        last = plan.experts - 1
        for source, sizes, target in (
            (shared.starts, shared.sizes, arranged.starts),
            (shared.firsts, shared.blocks, arranged.before),
        ):
            for piece in pieces(plan.experts):
                at = pl.ds(piece.start, piece.size)
                target[at] = _load(source, at, every_warp(piece.size))
            target[plan.experts] = source[last] + sizes[last]


def _owned(plan: Plan) -> list[Any]:
    """Lists the experts that threads have at once."""
    return [pl.ds(i, FULL) for i in range(0, plan.padded, FULL)]


def _over_experts[T](plan: Plan, step: Callable[[Any, T], T], start: T) -> T:
    """Folds step(first, carry) over CHUNK experts at a time."""
    return lax.fori_loop(0, pl.cdiv(plan.experts, CHUNK), lambda i, carry: step(i * CHUNK, carry), start)


def _sum_before(plan: Plan, ref: Any, own: Any) -> jax.Array:
    """Returns the sum of numbers i32[experts] before each of a thread's experts."""
    number = _numbers(0) + own.start

    def add(first: Any, total: jax.Array) -> jax.Array:
        return total + jnp.sum(jnp.where(_numbers(1) + first < number, _others(ref, first), 0), axis=1)

    return _over_experts(plan, add, _zeros())


def _load(ref: Any, at: Any, layout: Any) -> jax.Array:
    return plgpu.load(ref.at[at], layout=layout, optimized=False)


def _others(ref: Any, first: Any) -> jax.Array:
    """Returns what CHUNK experts have, in every row."""
    return _matrix(lax.broadcast_in_dim(_load(ref, pl.ds(first, CHUNK), OTHERS), (FULL, CHUNK), (1,)))


def _spread(x: jax.Array) -> jax.Array:
    return _matrix(lax.broadcast_in_dim(x, (FULL, CHUNK), (0,)))


def _numbers(axis: int) -> jax.Array:
    return _matrix(lax.broadcasted_iota(jnp.int32, (FULL, CHUNK), axis))


def _matrix(x: jax.Array) -> jax.Array:
    return plgpu.layout_cast(x, MATRIX)


def _in_list(plan: Plan, x: jax.Array, axis: int) -> jax.Array:
    """Returns a list's numbers, or experts', in both dimensions."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, (plan.places, FULL), (axis,)), LIST)


def _list_numbers(plan: Plan, axis: int) -> jax.Array:
    return plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, (plan.places, FULL), axis), LIST)


def _zeros() -> jax.Array:
    return plgpu.layout_cast(jnp.zeros(FULL, jnp.int32), OWN)


def _where(condition: jax.Array) -> jax.Array:
    return jnp.where(condition, 1, 0)


def _join(values: list[jax.Array], join: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
    return functools.reduce(join, values)
