"""Routes tokens in plain jnp."""

import functools
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.formats.numerics import compute_dtype
from pallas_kernels.one_order import fenced
from pallas_kernels.row_groups import Schedule

COMPARED = 2048  # rows: more are sorted


class Here(NamedTuple):
    """Says which experts there are here: so many of all, from number `first` on. None: from 0 on."""

    experts: int
    first: jax.Array | None = None


class Sorted(NamedTuple):
    """Holds rows sorted by expert, and where each token's are."""

    rows: jax.Array  # [T k, E]
    experts: jax.Array  # i32[T k]: of each row; of those that no expert here computes, the number of all
    sizes: jax.Array  # i32[experts]: how many rows each has
    places: jax.Array  # i32[T, k]: of a token's rows, in the order of their experts' numbers
    shares: jax.Array  # [T, k], in that order
    schedule: Schedule | None = None


def sort_tokens(
    scores: jax.Array, x: jax.Array, chosen: int, normalize: bool, here: Here,
    seen: Callable[[jax.Array], jax.Array], block: int, backend: str | None, apart: bool = False,
) -> Sorted:  # fmt: skip
    """Routes tokens; see api.py. No schedule is made."""
    routes = seen(fenced(backend, partial(choose_experts, chosen=chosen), scores))
    shares = fenced(backend, partial(shares_of, normalize=normalize), scores, routes)
    return sort_rows(x, routes, shares, here)


def choose_experts(scores: jax.Array, chosen: int) -> jax.Array:
    """Returns the numbers of each token's experts, the best first. Of equal ones the lowest number comes first."""
    wide = scores.astype(compute_dtype(scores.dtype))
    wide = jnp.where(wide == 0, 0, wide)  # -0 is 0
    return jax.lax.top_k(wide, chosen)[1].astype(jnp.int32)


def shares_of(scores: jax.Array, routes: jax.Array, normalize: bool) -> jax.Array:
    """Returns the share of each chosen expert, in float32 at least. The shares of a token add up to 1 if they are
    normalized. A route that is no expert's number has none."""
    wide = jax.nn.softmax(scores.astype(compute_dtype(scores.dtype)), axis=1)
    there = (routes >= 0) & (routes < scores.shape[1])
    shares = jnp.where(there, jnp.take_along_axis(wide, routes, axis=1, mode="clip"), 0)
    if not normalize:
        return shares
    sums = total(shares)[:, None]
    return shares / jnp.where(sums == 0, 1, sums)


def sort_rows(x: jax.Array, routes: jax.Array, shares: jax.Array, here: Here) -> Sorted:
    """Returns rows of x [T, E] sorted by expert, by routes i32[T, k] and their shares [T, k]. Rows that no expert here
    computes come last."""
    experts, first = here
    flat = routes.reshape(-1)
    if first is not None:
        flat = flat - first
    flat = jnp.where((flat >= 0) & (flat < experts), flat, experts)
    place, order = places(flat)
    sizes = jnp.sum(flat[None, :] == jnp.arange(experts, dtype=jnp.int32)[:, None], axis=1, dtype=jnp.int32)
    rows = jnp.take(x, order // routes.shape[1], axis=0)
    place, shares = by_number(routes, place.reshape(routes.shape), shares)
    return Sorted(rows, flat[order], sizes, place, shares)


def by_number(routes: jax.Array, *values: jax.Array) -> list[jax.Array]:
    """Returns values [T, k] of each token's experts in the order of their numbers. Equal ones keep their order."""
    columns, number = range(routes.shape[1]), jax.lax.broadcasted_iota(jnp.int32, routes.shape, 1)
    others = [routes[:, i, None] for i in columns]
    first = [jnp.where(number > i, other <= routes, other < routes) for i, other in enumerate(others)]
    rank = total(jnp.stack(first, axis=1).astype(jnp.int32))
    return [total(jnp.stack([jnp.where(rank == i, x, 0) for i in columns], axis=2)) for x in values]


def total(x: jax.Array) -> jax.Array:
    """Returns the sums of x [T, k, ...] over k, one after the other: XLA joins that with what is around it, and a
    reduction is a kernel."""
    return functools.reduce(jnp.add, [x[:, i] for i in range(x.shape[1])])


def places(experts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns where each row goes if rows are sorted by expert i32[rows], and which row comes to each place. Rows of
    one expert keep their order. Few rows are compared with each other: XLA makes two kernels of that, and many more of
    a sort."""
    R = experts.shape[0]
    number = jnp.arange(R, dtype=jnp.int32)
    if R > COMPARED:
        order = jnp.argsort(experts, stable=True).astype(jnp.int32)
        return jnp.zeros(R, jnp.int32).at[order].set(number, unique_indices=True), order
    first = (experts[None, :] < experts[:, None]) | (
        (experts[None, :] == experts[:, None]) & (number[None, :] < number[:, None])
    )
    place = jnp.sum(first, axis=1, dtype=jnp.int32)
    order = jnp.sum(jnp.where(place[:, None] == number[None, :], number[:, None], 0), axis=0, dtype=jnp.int32)
    return place, order
