"""Checks the weights of small heads that draft, and makes random ones."""

from typing import Any

import jax
import jax.numpy as jnp

from jllm.errors import DrafterError
from pallas_kernels.formats.numerics import compute_dtype


def named(tree: object) -> dict[str, Any]:
    """Returns the leaves of a pytree by their names in files and errors, such as "layer.mlp.down"."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def check_weights(found: object, wanted: object) -> None:
    """Raises DrafterError unless the leaves of two pytrees have the same names, shapes and dtypes. `wanted` has leaves
    of jax.ShapeDtypeStruct."""
    there, right = named(found), named(wanted)
    if odd := [name for name in [*right, *there] if name not in there or name not in right]:
        problem = "is missing in the drafter" if odd[0] in right else "does not belong to this drafter"
        raise DrafterError(f"weight {odd[0]} {problem}")
    for name, leaf in there.items():
        if leaf.shape != right[name].shape:
            shapes = f"{list(leaf.shape)}, and this model takes {list(right[name].shape)}"
            raise DrafterError(f"weight {name} of the drafter has shape {shapes}: it was made for another model")
        if leaf.dtype != right[name].dtype:
            raise DrafterError(f"weight {name} of the drafter is {leaf.dtype}, the model's are {right[name].dtype}")


def random_weights[Tree](shapes: Tree, key: jax.Array) -> Tree:
    """Returns random values for a pytree of jax.ShapeDtypeStruct: matrices normal(0, 0.02), vectors zero. They are
    drawn in float32 at least."""
    leaves, tree = jax.tree.flatten(shapes)

    def draw(key: jax.Array, leaf: Any) -> jax.Array:
        if len(leaf.shape) == 1:
            return jnp.zeros(leaf.shape, leaf.dtype)
        return (0.02 * jax.random.normal(key, leaf.shape, compute_dtype(leaf.dtype))).astype(leaf.dtype)

    return jax.tree.unflatten(tree, [draw(k, leaf) for k, leaf in zip(jax.random.split(key, len(leaves)), leaves)])
