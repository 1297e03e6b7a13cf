"""Functions of a model on a mesh: each device runs the same function of one device, on its share.

Weights are stacks of the ranks' shares, [ranks, ...] along the mesh (shares.py). KV pages [N, K, ...] are spread along
their heads. All else is alike on all ranks, as are the numbers that they compute from it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jllm.config import LlamaConfig
from jllm.parallel.mesh import AXIS, rank_config

STACKED, HEADS, WHOLE = P(AXIS), P(None, AXIS), P()


def per_rank(function: Callable, config: LlamaConfig, inputs: tuple, outputs: Any) -> Callable:
    """function(params, *arguments, config=...), which every rank calls with its own params and config. inputs: what
    holds of each argument after params (STACKED, HEADS, WHOLE, or a tree of these), outputs: of the result."""
    run = partial(function, config=rank_config(config))

    def everywhere(*arguments: Any) -> Any:
        leaves, tree = jax.tree.flatten(arguments)
        specs = jax.tree.leaves(jax.tree.broadcast((STACKED, *inputs), arguments))
        some = [i for i, leaf in enumerate(leaves) if leaf.size]  # XLA crashes on empty ones (JAX 0.11.2)

        def one(*given: Any) -> Any:
            found = dict(zip(some, given))
            every = [found[i] if i in found else jnp.zeros(x.shape, x.dtype) for i, x in enumerate(leaves)]
            own = [x.reshape(x.shape[1:]) if spec == STACKED else x for x, spec in zip(every, specs)]
            return run(*jax.tree.unflatten(tree, own))

        options: dict[str, Any] = {"in_specs": tuple(specs[i] for i in some), "out_specs": outputs}
        # Unchecked, since values that ranks compute alike are not marked as such.
        spread = jax.shard_map(one, mesh=config.mesh, **options, check_vma=False)
        return spread(*(leaves[i] for i in some))

    return jax.jit(everywhere)  # shard_map would otherwise compile each operation by itself


def place(tree: Any, config: LlamaConfig, spec: Any) -> Any:
    """A tree of arrays where steps on the config's mesh want it (spec: as inputs of per_rank); without a mesh as it
    is."""
    return tree if config.mesh is None else jax.device_put(tree, _shardings(tree, config.mesh, spec))


def placed_shapes(shapes: Any, config: LlamaConfig, spec: Any) -> Any:
    """The shapes of what `place` gives."""
    if config.mesh is None:
        return shapes
    where = _shardings(shapes, config.mesh, spec)
    return jax.tree.map(lambda x, on: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on), shapes, where)


def _shardings(tree: Any, mesh: Mesh, spec: Any) -> Any:
    return jax.tree.map(lambda one: NamedSharding(mesh, one), jax.tree.broadcast(spec, tree))
