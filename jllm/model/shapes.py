"""Defines the types of arrays in signatures, with dtype and shape: Float[Array, "T E"].

The README's table explains the letters. A name after a star stands for any number of axes. If the environment has
JLLM_CHECK_SHAPES, as in one test, each call of a `shaped` function is checked. Otherwise the types are plain arrays,
and nothing else is imported. Registered dataclasses have shapes in comments, since JAX also rebuilds them from objects
that are not arrays.
"""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jax import Array as Array

AnyArray = Any  # an array of NumPy on the host, and of JAX on a device
CHECKED = bool(os.environ.get("JLLM_CHECK_SHAPES"))

if TYPE_CHECKING or CHECKED:
    from jaxtyping import Bool, Float, Int32, UInt32, jaxtyped
else:

    class _Plain:
        def __class_getitem__(cls, item: tuple[type, str]) -> type:
            return item[0]

    Bool = Float = Int32 = UInt32 = _Plain


def shaped[F: Callable[..., Any]](function: F) -> F:
    """Returns the function, or one that also checks arguments and results against the signature."""
    if not CHECKED:
        return function
    from beartype import beartype

    return jaxtyped(typechecker=beartype)(function)
