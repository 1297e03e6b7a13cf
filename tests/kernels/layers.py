"""Puts pages among those of other layers, and plants faults in how kernels find them."""

import inspect
import linecache
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.formats.kv_pages import KVPages, Pages
from tests.kernels.helpers import same_bits

LAYERS, OWN = 3, 1
OUT_OF_RANGE = (-1, 2**31 - 1)  # pages beside N that no layer has


def among(pages: KVPages) -> KVPages:
    """Returns pages of several layers that stand for one: the given ones are its, others hold NaN or its like."""

    def part(own: Pages) -> Pages:
        def spread(x: jax.Array) -> jax.Array:
            every = np.full((LAYERS, *x.shape), 0x7F if x.dtype.kind in "iu" else np.nan, x.dtype)
            every[OWN] = x
            return jnp.asarray(every.reshape(-1, *x.shape[1:]))

        return replace(jax.tree.map(spread, own), layers=LAYERS)

    return KVPages(part(pages.k), part(pages.v)).at_layer(OWN)


def check_update(update: Callable[..., tuple[jax.Array, KVPages]], arguments: tuple, expected: Any = None) -> None:
    """Checks that a write among other layers is that to pages alone, and touches no other layer. The last rows have
    pages out of range."""
    *arrays, pages, page, offset = arguments
    q, alone = expected or update(*arrays, pages, page, offset)
    none = jnp.asarray((pages.k.num_pages, *OUT_OF_RANGE), jnp.int32)
    found = update(*arrays, among(pages), page.at[-len(none) :].set(none), offset)
    assert same_bits(found, (q, among(alone)))


def check_attention(attend: Callable[..., jax.Array], arguments: tuple, expected: Any = None) -> None:
    """Checks that attention among other layers is that to pages alone. Entries 2 and 3 of the first page table, which
    all see, are out of range: the nearest pages are read."""
    q, pages, table, *rest = arguments
    last = pages.k.num_pages - 1
    if expected is None:
        expected = attend(q, pages, table.at[0, 2:4].set(jnp.asarray([last, 0])), *rest)
    assert same_bits(attend(q, among(pages), table.at[0, 2:4].set(jnp.asarray([last + 1, -1])), *rest), expected)


def plant(patch: pytest.MonkeyPatch, place: Any, name: str, old: str, new: str) -> None:
    """Changes the source of a function, a class or a method while the patch lasts."""
    function = inspect.getattr_static(place, name)
    plain = function.fget if isinstance(function, property) else getattr(function, "fn", function)
    source = textwrap.dedent(inspect.getsource(plain))
    assert old in source, f"{name} has no {old!r}"
    source, file = source.replace(old, new), f"<{name} with {new}>"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    scope = dict(vars(sys.modules[plain.__module__]))
    exec(compile(source, file, "exec"), scope)
    patch.setattr(place, name, scope[name])


def expected_of(check: Callable[..., None], run: Callable[..., Any], arguments: tuple) -> Any:
    """Returns the result to which a check compares that among other layers. With a fault it could not be made."""
    found: list[Any] = []

    def record(*given: Any) -> Any:
        found.append(run(*given))
        return found[-1]

    check(record, arguments)
    return found[0]


def caught(check: Callable[..., None], *arguments: Any) -> bool:
    """Returns whether a check fails. A kernel that reaches outside of its arrays raises any error."""
    try:
        check(*arguments)
    except Exception:  # AssertionError among them
        return True
    return False
