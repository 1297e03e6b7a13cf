"""Lists which blocks of rows meet which weight, where rows are in groups with a weight each: for kernels of any GPU."""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Pairs(NamedTuple):
    """Lists the blocks of rows that each group's weight meets, where rows are in groups with a weight each. A block
    begins at a multiple of its size, so it may meet several groups. Blocks that are apart begin with a group's rows,
    and meet no other. What follows the last group is a group of its own, X. A kernel takes the arrays of what it
    reads."""

    group: Any  # i32[G]
    row: Any  # i32[G]: the block's first
    first: Any  # i32[G]: the group's first row in it
    last: Any  # i32[G]: the group's end in it
    starts: Any  # i32[X + 1]: of groups
    before: Any  # i32[X + 1]: the pairs of all groups before
    own: Any = None  # i32[X + 1]: the block of w that each group names; -1: none

    def arrays(self) -> tuple[jax.Array, ...]:
        """Returns what a kernel takes."""
        return tuple(each for each in self if each is not None)

    def number(self, m: int, block: int, apart: bool = False) -> jax.Array:
        """Returns the number of pairs, in a kernel."""
        groups = self.starts.shape[0] - 1
        start = self.starts[groups]
        if apart:
            return self.before[groups] + lax.div(m - start + (block - 1), jnp.int32(block))
        return self.before[groups] + jnp.where(start < m, (m - 1) // block - lax.div(start, jnp.int32(block)) + 1, 0)


@partial(jax.tree_util.register_dataclass, data_fields=["pairs"], meta_fields=["block", "apart"])
@dataclass(frozen=True)
class Schedule:
    """Holds pairs that were made before the product that needs them. Arrays of pairs may be longer than they need to
    be."""

    pairs: Pairs
    block: int
    apart: bool = False


def known_pairs(schedule: Schedule | None, block: int, apart: bool = False) -> Pairs | None:
    """Returns the pairs of a schedule, if it is there and has such blocks."""
    return None if schedule is None or (schedule.block, schedule.apart) != (block, apart) else schedule.pairs


def groups_of_rows(sizes: jax.Array, m: int) -> jax.Array:
    """Returns i32[M]: the group of each of M sorted rows; X after the last one."""
    number = jnp.arange(sizes.shape[0], dtype=jnp.int32)
    ends = jnp.sum(jnp.where(number[None, :] <= number[:, None], sizes[None, :], 0), axis=1, dtype=jnp.int32)
    return jnp.sum(ends[None, :] <= jnp.arange(m, dtype=jnp.int32)[:, None], axis=1, dtype=jnp.int32)


def pairs_of(sizes: jax.Array, m: int, block: int, own: jax.Array | None = None, apart: bool = False) -> Pairs:
    """Returns the pairs of M sorted rows in groups of sizes i32[X] and blocks of `block` rows. XLA makes two kernels of
    it, or four if there are several blocks: all is comparisons and sums, and a single number would be one more. `own`
    i32[X] are the blocks of w that groups name."""
    groups = sizes.shape[0]
    group = jnp.arange(groups + 1, dtype=jnp.int32)
    upto, before = group[None, :groups] <= group[:, None], group[None, :groups] < group[:, None]

    def total(chosen: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(chosen, x[None, :], 0), axis=1, dtype=jnp.int32)

    starts, ends = total(before, sizes), jnp.where(group == groups, m, total(upto, sizes))
    if apart:
        blocks, begin = (ends - starts + block - 1) // block, starts
    else:
        blocks, begin = jnp.where(ends > starts, (ends - 1) // block - starts // block + 1, 0), starts // block * block
    firsts = total(before, jnp.minimum(sizes, 1) if m <= block else blocks[:groups])
    number = jnp.arange(most_pairs(m, groups + 1, block), dtype=jnp.int32)[:, None]
    spread = partial(jnp.broadcast_to, shape=(len(number), groups + 1))
    row = spread(begin) + (number - spread(firsts)) * block
    mine = (number >= spread(firsts)) & (number < spread(firsts + blocks))
    columns = spread(group), row, jnp.maximum(spread(starts), row), jnp.minimum(spread(ends), row + block)
    group_of, first_row, first, last = (jnp.sum(jnp.where(mine, x, 0), axis=1, dtype=jnp.int32) for x in columns)
    named = None if own is None else jnp.append(own, jnp.int32(-1))
    return Pairs(group_of, first_row, first, last, starts, firsts, named)


def most_pairs(m: int, groups: int, block: int) -> int:
    """Bounds the pairs of M rows in some groups."""
    return min(m, -(-m // block) + groups - 1)
