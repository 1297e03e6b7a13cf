"""Puts the vectors of all layers, such as norms, biases and scales of rows, into one array a kind, for steps.

The host pays for each array that a call passes, however small. A step slices the stacks where a layer begins, at a
place that is known when it is compiled. XLA gives a kernel the address of such a slice, and copies nothing, if the
slice begins at a multiple of ALIGNMENT bytes. Other vectors stay as they are, and so do all matrices and the scales of
groups.
"""

from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jllm.config import LlamaConfig
from jllm.model.params import Layers, Params

ALIGNMENT = 128


def stack_layers(params: Params, config: LlamaConfig) -> Params:
    """Returns the same weights with Layers. Abstract leaves give abstract stacks."""
    dimensions = 1 if config.mesh is None else 2  # of a vector: on a mesh each rank has its own
    leaves, trees = zip(*map(jax.tree.flatten, params.layers))
    plan = _plan(trees, tuple(tuple((leaf.shape, leaf.dtype) for leaf in layer) for layer in leaves), dimensions)
    own = [
        jax.tree.unflatten(tree, [None if n in stacked else leaf for n, leaf in enumerate(layer)])
        for tree, layer, stacked in zip(trees, leaves, (plan.vectors[kind] for kind, _ in plan.places))
    ]
    rows = [[[leaves[i][n] for i in layers] for n in vectors] for layers, vectors in zip(plan.layers, plan.vectors)]
    stacks = []
    for layers, vectors, made in zip(plan.layers, plan.vectors, _stacked(rows)):
        places = dict(zip(vectors, made))
        stacks.append(jax.tree.unflatten(trees[layers[0]], [places.get(n) for n in range(len(leaves[layers[0]]))]))
    return replace(params, layers=Layers(tuple(own), tuple(stacks), plan.places))


class Plan(NamedTuple):
    """Says what is stacked, by kind of layer."""

    layers: tuple[tuple[int, ...], ...]  # of each kind
    vectors: tuple[tuple[int, ...], ...]  # of each kind: which leaves of a layer are stacked
    places: tuple[tuple[int, int], ...]  # of each layer: its kind, its row there


@cache  # so that an update does not think anew
def _plan(trees: tuple[Any, ...], shapes: tuple[Any, ...], dimensions: int) -> Plan:
    """Returns the plan for layers of these structures, with leaves of these shapes and dtypes."""
    kinds: dict[Any, list[int]] = {}
    places = []
    for i, (tree, leaves) in enumerate(zip(trees, shapes)):
        vectors = tuple(
            n
            for n, (shape, dtype) in enumerate(leaves)
            if len(shape) == dimensions and shape[-1] * dtype.itemsize % ALIGNMENT == 0
        )
        kind = (tree, vectors, tuple(leaves[n] for n in vectors))
        of_kind = kinds.setdefault(kind, [])
        places.append((list(kinds).index(kind), len(of_kind)))
        of_kind.append(i)
    return Plan(tuple(map(tuple, kinds.values())), tuple(vectors for _, vectors, _ in kinds), tuple(places))


def _stacked(rows: list[list[list[Any]]]) -> list[list[Any]]:
    """Returns an array for each list of vectors."""
    first = next((vectors[0] for kind in rows for vectors in kind), None)
    sharding = getattr(first, "sharding", None)  # numpy's arrays have none
    run = _stack(sharding if isinstance(sharding, jax.sharding.NamedSharding) else None)
    if not isinstance(first, jax.ShapeDtypeStruct):
        return run(rows)
    shapes = jax.eval_shape(run, rows)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes)


@cache  # so that an update compiles nothing
def _stack(sharding: jax.sharding.Sharding | None) -> Any:
    """Returns a function that stacks the vectors of layers, in the layout of each vector."""

    def stack(rows: list[list[list[jax.Array]]]) -> list[list[jax.Array]]:
        return [[jnp.stack(vectors, -2) for vectors in kind] for kind in rows]

    return jax.jit(stack, out_shardings=sharding)
