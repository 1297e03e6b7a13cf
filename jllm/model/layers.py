"""Puts the vectors of all layers, such as norms, biases and scales of rows, into one array a kind, for steps.

The host pays for each array that a call passes, however small. A step slices the stacks where a layer begins, at a
place that is known when it is compiled. XLA gives a kernel the address of such a slice, and copies nothing, if the
slice begins at a multiple of ALIGNMENT bytes. Other vectors stay as they are, and so do all matrices and the scales of
groups.
"""

from dataclasses import replace
from functools import cache
from itertools import count
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jllm.config import LlamaConfig
from jllm.model.params import Layers, Params

ALIGNMENT = 256


def stack_layers(params: Params, config: LlamaConfig) -> Params:
    """Returns the same weights with Layers. Abstract leaves give abstract stacks."""
    leaves, tree = jax.tree.flatten(params)
    dimensions = 1 if config.mesh is None else 2  # of a vector: on a mesh each rank has its own
    plan = _plan(tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves), dimensions)
    leaves += _stacked([[leaves[i] for i in row] for row in plan.rows])
    return jax.tree.unflatten(plan.tree, [leaves[i] for i in plan.order])


class Plan(NamedTuple):
    """Says what is stacked, by the places of leaves in flat params."""

    rows: tuple[tuple[int, ...], ...]  # of each stack
    order: tuple[int, ...]  # of the new params: places of old leaves, and of stacks, which come after these
    tree: Any  # structure of the new params


@cache  # so that an update does not think anew
def _plan(tree: Any, shapes: tuple[Any, ...], dimensions: int) -> Plan:
    """Returns the plan for params of this structure, with leaves of these shapes and dtypes."""
    numbers = jax.tree.unflatten(tree, range(len(shapes)))
    kinds: dict[Any, list[list[int]]] = {}
    own, places = [], []
    for layer in numbers.layers:
        leaves, structure = jax.tree.flatten(layer)
        vectors = tuple(
            n
            for n, (shape, dtype) in enumerate(shapes[i] for i in leaves)
            if len(shape) == dimensions and shape[-1] * dtype.itemsize % ALIGNMENT == 0
        )
        kind = (structure, vectors, tuple(shapes[leaves[n]] for n in vectors))
        of_kind = kinds.setdefault(kind, [])
        places.append((list(kinds).index(kind), len(of_kind)))
        of_kind.append(leaves)
        own.append(jax.tree.unflatten(structure, [None if n in vectors else i for n, i in enumerate(leaves)]))
    rows: list[tuple[int, ...]] = []
    stacks = []
    for (structure, vectors, _), layers in kinds.items():
        made = dict(zip(vectors, count(len(shapes) + len(rows))))
        rows += [tuple(leaves[n] for leaves in layers) for n in vectors]
        stacks.append(jax.tree.unflatten(structure, [made.get(n) for n in range(structure.num_leaves)]))
    order, new = jax.tree.flatten(replace(numbers, layers=Layers(tuple(own), tuple(stacks), tuple(places))))
    return Plan(tuple(rows), tuple(order), new)


def _stacked(rows: list[list[Any]]) -> list[Any]:
    """Returns an array for each list of vectors."""
    if not rows:
        return []
    first = rows[0][0]
    sharding = getattr(first, "sharding", None)  # numpy's arrays have none
    run = _stack(sharding if isinstance(sharding, jax.sharding.NamedSharding) else None)
    if not isinstance(first, jax.ShapeDtypeStruct):
        return run(rows)
    shapes = jax.eval_shape(run, rows)
    return [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in shapes]


@cache  # so that an update compiles nothing
def _stack(sharding: jax.sharding.Sharding | None) -> Any:
    """Returns a function that stacks the vectors of layers, in the layout of each vector."""

    def stack(rows: list[list[jax.Array]]) -> list[jax.Array]:
        return [jnp.stack(vectors, -2) for vectors in rows]

    return jax.jit(stack, out_shardings=sharding)
