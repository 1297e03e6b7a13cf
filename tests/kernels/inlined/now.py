"""Calls functions that inline code with arrays, without a kernel around them."""

import contextlib
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from tests.kernels.inlined.function import WARPGROUP, Array, Function, Reference
from tests.kernels.inlined.memory import Run, view


@contextlib.contextmanager
def inlined_now(monkeypatch: pytest.MonkeyPatch, *modules: Any, warpgroup: int = 1) -> Iterator[None]:
    """Runs what these modules inline at once, by the threads of a warpgroup; what they load is an array already."""
    stand_in = SimpleNamespace(**{name: getattr(plgpu, name) for name in dir(plgpu) if not name.startswith("_")})
    stand_in.inline_mgpu, stand_in.load = partial(_inline, warpgroup), lambda x, **_: x
    with monkeypatch.context() as patch:
        for module in modules:
            patch.setattr(module, "plgpu", stand_in)
        yield


def _inline(warpgroup: int, *, arg_types: Any = (), return_type: Any = None) -> Any:
    types, tree = jax.tree.flatten(tuple(arg_types))
    results, result_tree = jax.tree.flatten(return_type)

    def decorate(f: Any) -> Any:
        def run(*arguments: Any) -> Any:
            arrays = [np.asarray(x) for x in jax.tree.leaves(arguments)]
            references = [isinstance(kind, plgpu.RefType) for kind in types]
            kinds = [
                Reference(x.shape, x.dtype, kind.transforms) if in_memory else Array(x.shape, x.dtype, kind.to_mgpu())
                for x, kind, in_memory in zip(arrays, types, references, strict=True)
            ]
            function = Function(f, kinds, tree, [Array(x.shape, x.dtype, x.layout.to_mgpu()) for x in results])
            threads = np.arange(WARPGROUP * warpgroup, WARPGROUP * (warpgroup + 1), dtype=np.uint32)
            operands = [
                view(x, transforms=kind.transforms) if in_memory else x
                for x, kind, in_memory in zip(arrays, types, references)
            ]
            return jax.tree.unflatten(result_tree, function(Run(threads), operands))

        return run

    return decorate
