"""Checks the arrays that a request brings (hooks.InputShapes), and names them by their content."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jllm.errors import RequestError
from jllm.model.hooks import InputShapes


@dataclass(frozen=True, eq=False)
class Inputs:
    """Holds a request's own arrays by name. Two that are equal have the same key."""

    arrays: Mapping[str, np.ndarray]
    key: bytes


def read_inputs(given: Any, shapes: InputShapes | None) -> Inputs | None:
    """Returns the arrays that a request brings, as its engine's hooks declare them. They come as a pytree of that
    structure, or as a mapping of the leaves' names. Raises RequestError for others."""
    if given is None or isinstance(given, Inputs):
        return given
    if shapes is None:
        raise RequestError("inputs have no meaning here: the engine's hooks declare none (Hooks.inputs)")
    named, (leaves, tree) = shapes.named, jax.tree.flatten(given)
    want: Any = jax.tree.structure(shapes.tree)
    if want == tree:
        given = dict(zip(named, leaves))
    if not isinstance(given, Mapping) or given.keys() != named.keys():
        got = f"{', '.join(map(str, given)) or 'none'}" if isinstance(given, Mapping) else type(given).__name__
        raise RequestError(f"inputs must be {', '.join(named)}, as the engine's hooks declare them, not {got}")
    arrays = {name: _read(name, given[name], shape) for name, shape in named.items()}
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays.values():
        digest.update(array.tobytes())
    return Inputs(arrays, digest.digest())


def _read(name: str, given: Any, shape: jax.ShapeDtypeStruct) -> np.ndarray:
    """Returns an array of this shape and dtype. A number of another size is taken where the dtype can hold it."""
    try:
        found = np.asarray(given)
        fits = found.shape == shape.shape and np.can_cast(found.dtype, shape.dtype, "same_kind")
    except (TypeError, ValueError):
        raise RequestError(f"inputs: {name} must be an array, not {type(given).__name__}") from None
    with np.errstate(over="ignore"):
        made = found.astype(shape.dtype) if fits else found
    seen = (lambda x: x) if np.issubdtype(made.dtype, np.integer) else np.isfinite
    if not fits or not np.array_equal(seen(made), seen(found)):
        want, got = (f"{np.dtype(x.dtype).name}{list(x.shape)}" for x in (shape, found))
        raise RequestError(f"inputs: {name} must be {want}, not {got}{' of larger numbers' if fits else ''}")
    return made


def with_zeros(inputs: Inputs | None, shapes: InputShapes) -> Any:
    """Returns the pytree of a request's arrays, on the host. They are zeros if it brings none."""
    named = shapes.named
    if inputs is None:
        arrays = [np.zeros(shape.shape, shape.dtype) for shape in named.values()]
    else:
        arrays = [inputs.arrays[name] for name in named]
    return jax.tree.unflatten(jax.tree.structure(shapes.tree), arrays)
