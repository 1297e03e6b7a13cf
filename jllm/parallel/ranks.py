"""Runs functions of a model on a mesh: each device calls the function with its share.

A weight is a stack of the ranks' shares, [ranks, ...] along the mesh (model/shards.py). KV pages [N, K, ...] are
sharded along their heads. All else is replicated, also the values that ranks compute from replicated arrays.
"""

from collections.abc import Callable, Mapping
from functools import wraps
from inspect import signature
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jllm.config import LlamaConfig
from jllm.parallel.mesh import AXIS, rank_config

STACKED, HEADS, REPLICATED = P(AXIS), P(None, AXIS), P()


def on_mesh[F: Callable[..., Any]](inputs: Mapping[str, object], outputs: object) -> Callable[[F], F]:
    """Returns a decorator for a function with the argument `config`. If the config has a mesh, each rank calls the
    function with its own share and config.

    `inputs` maps each argument that holds arrays to its layout on the mesh. A layout is STACKED, HEADS or REPLICATED, a
    tree of these, or a function from the argument to one. `outputs` is the layout of the result. Other arguments go to
    all ranks alike.
    """

    def decorate(function: F) -> F:
        parameters = signature(function)

        @wraps(function)
        def run(*args: object, **kwargs: object) -> object:
            given = parameters.bind(*args, **kwargs).arguments
            config = given.pop("config", None)
            if config is None or config.mesh is None:
                return function(*args, **kwargs)
            names = [name for name in given if name in inputs]
            arrays = [given.pop(name) for name in names]
            specs = [spec(x) if callable(spec) else spec for spec, x in zip((inputs[name] for name in names), arrays)]

            def own(*shares: object) -> object:
                return function(**dict(zip(names, shares)), **given, config=rank_config(config))

            return _per_rank(own, config.mesh, tuple(specs), outputs)(*arrays)

        return run  # type: ignore[return-value]

    return decorate


def _per_rank(run: Callable, mesh: Mesh, inputs: tuple, outputs: object) -> Callable:
    """Returns a function of whole arrays in which each rank calls `run` with its share."""

    def everywhere(*arguments: object) -> object:
        leaves, tree = jax.tree.flatten(arguments)
        specs = jax.tree.leaves(jax.tree.broadcast(inputs, arguments))
        some = [i for i, leaf in enumerate(leaves) if leaf.size]  # XLA crashes on empty ones (JAX 0.11.2)

        def one(*given: jax.Array) -> object:
            found = dict(zip(some, given))
            every = [found[i] if i in found else jnp.zeros(x.shape, x.dtype) for i, x in enumerate(leaves)]
            own = [x.reshape(x.shape[1:]) if spec == STACKED else x for x, spec in zip(every, specs)]
            return run(*jax.tree.unflatten(tree, own))

        options: dict[str, Any] = {"in_specs": tuple(specs[i] for i in some), "out_specs": outputs}
        # Unchecked, since nothing marks the values that ranks compute alike.
        spread = jax.shard_map(one, mesh=mesh, **options, check_vma=False)
        return spread(*(leaves[i] for i in some))

    return jax.jit(everywhere)  # shard_map would otherwise compile each operation by itself


def place[T](tree: T, config: LlamaConfig, spec: object) -> T:
    """Returns the tree of arrays, placed as steps on the config's mesh need it. Without a mesh it is unchanged. `spec`
    is a layout as on_mesh has it."""
    return tree if config.mesh is None else jax.device_put(tree, _shardings(tree, config.mesh, spec))


def placed_shapes[T](shapes: T, config: LlamaConfig, spec: object) -> T:
    """Returns the shapes of the arrays that `place` returns."""
    if config.mesh is None:
        return shapes
    where = _shardings(shapes, config.mesh, spec)
    return jax.tree.map(lambda x, on: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on), shapes, where)


def _shardings[T](tree: T, mesh: Mesh, spec: object) -> T:
    return jax.tree.map(lambda one: NamedSharding(mesh, one), jax.tree.broadcast(spec, tree))
