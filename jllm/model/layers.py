"""Puts the vectors of all layers, such as norms, biases and scales of rows, into one array a kind, for steps.

The host pays for each array that a call passes, however small. A step slices the stacks where a layer begins, at a
place that is known when it is compiled. XLA gives a kernel the address of such a slice, and copies nothing, if the
slice begins at a multiple of ALIGNMENT bytes. Other vectors stay as they are, and so do all matrices and the scales of
groups.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from jllm.config import LlamaConfig
from jllm.model.params import LayerParams, Layers, Params

ALIGNMENT = 128


def stack_layers(params: Params, config: LlamaConfig) -> Params:
    """Returns the same weights with Layers. Abstract leaves give abstract stacks."""
    dimensions = 1 if config.mesh is None else 2  # of a vector: on a mesh each rank has its own

    def is_stacked(leaf: Any) -> bool:
        return leaf.ndim == dimensions and leaf.shape[-1] * leaf.dtype.itemsize % ALIGNMENT == 0

    own = tuple(jax.tree.map(lambda leaf: None if is_stacked(leaf) else leaf, layer) for layer in params.layers)
    alike: dict[Any, list[LayerParams]] = {}
    places = []
    for layer in params.layers:
        vectors = jax.tree.map(lambda leaf: leaf if is_stacked(leaf) else None, layer)
        leaves, tree = jax.tree.flatten(vectors)
        kind = (tree, *((leaf.shape, leaf.dtype) for leaf in leaves))
        of_kind = alike.setdefault(kind, [])
        places.append((list(alike).index(kind), len(of_kind)))
        of_kind.append(vectors)
    return replace(params, layers=Layers(own, tuple(map(_stacked, alike.values())), tuple(places)))


def _stacked(layers: list[LayerParams]) -> LayerParams:
    first = jax.tree.leaves(layers[0])
    if not first:
        return layers[0]
    sharding = getattr(first[0], "sharding", None)  # numpy's arrays have none
    run = _stack(sharding if isinstance(sharding, jax.sharding.NamedSharding) else None)
    if not isinstance(first[0], jax.ShapeDtypeStruct):
        return run(*layers)
    shapes = jax.eval_shape(run, *layers)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes)


@cache  # so that an update compiles nothing
def _stack(sharding: jax.sharding.Sharding | None) -> Any:
    """Returns a function that stacks the vectors of layers, in the layout of each vector."""
    return jax.jit(lambda *layers: jax.tree.map(lambda *x: jnp.stack(x, -2), *layers), out_shardings=sharding)
