"""Builds weights from other projects' quantized checkpoints, for all importers.

A layout defines which tensors it stores for a module (a linear layer, "model.layers.0.mlp.up_proj"), and reads them.
Here the modules that form one of our weights are merged. Nothing is quantized again, so merged modules must be stored
alike.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from jllm.errors import CheckpointError
from jllm.files.safetensors_io import StoredTensor
from jllm.files.stored import StoredWeight
from jllm.model.param_specs import LeafSpec
from jllm.model.params import EMBED, HEAD
from jllm.quant.codes import merge
from pallas_kernels.formats.quantized_weights import QuantizedWeight

FLOATS = ("F16", "BF16", "F32")  # dtypes as safetensors spells them


@dataclass(frozen=True)
class Wanted:
    """Is a tensor that a config implies: sizes (None: any), and the dtypes that it may have."""

    shape: tuple[int | None, ...]
    dtypes: tuple[str, ...]
    optional: bool = False
    instead: "Wanted | None" = None  # another way to store it


class Layout(Protocol):
    """Is one project's way to store a quantized linear layer, as its config describes it."""

    @property
    def mark(self) -> str:
        """Returns the suffix, after "{module}.", of the name of a tensor that only quantized modules have, and all of
        them."""

    def exempt(self, module: str) -> bool:
        """Returns whether the config allows this module to be stored in 16 bits."""

    def wanted(self, module: str, shape: tuple[int, int]) -> dict[str, Wanted]:
        """Returns the tensors of a weight [N, K], by the part of their name after "{module}."."""

    def read(self, module: str, shape: tuple[int, int], tensors: Mapping[str, np.ndarray]) -> QuantizedWeight:
        """Returns the weight, from tensors that are as wanted."""


def stored_weights(
    layout: Layout, specs: Mapping[str, LeafSpec], stored: Mapping[str, StoredTensor]
) -> dict[str, StoredWeight]:
    """Returns the quantized weights in this layout, by the name of our weight.

    Raises CheckpointError for a module in 16 bits that the config does not except. Raises it for a weight of which only
    some modules are quantized.
    """
    found: dict[str, StoredWeight] = {}
    for name, spec in specs.items():
        if name == EMBED or (name == HEAD and f"{HEAD}.weight" not in stored and f"{HEAD}.{layout.mark}" not in stored):
            continue  # embeddings are never quantized in these layouts; a tied head is not stored
        if spec.entry.modules[0][1] == "experts" and f"{name}.{layout.mark}" not in stored:
            continue  # a router, which is no linear layer to transformers, so that no list of exceptions names it
        parts = {tensor.removesuffix(".weight"): rows for tensor, rows in spec.parts}
        plain = [module for module in parts if not _is_quantized(layout, module, stored)]
        if plain and len(plain) < len(parts):
            other = next(module for module in parts if module not in plain)
            raise CheckpointError(
                f"{name} is one weight, but {plain[0]} is stored in 16 bits and {other} quantized; "
                "modules that are merged must be stored alike"
            )
        if not plain:
            found[name] = _stored_weight(layout, name, parts, spec.shape[1], stored)
    return found


def _is_quantized(layout: Layout, module: str, stored: Mapping[str, StoredTensor]) -> bool:
    if f"{module}.{layout.mark}" in stored:
        return True
    if layout.exempt(module):
        return False
    raise CheckpointError(
        f"tensor {module}.{layout.mark} is missing: quantization_config makes no exception for {module}"
    )


def _stored_weight(
    layout: Layout, name: str, parts: Mapping[str, int], columns: int, stored: Mapping[str, StoredTensor]
) -> StoredWeight:
    """Returns one of our weights, of one or more modules (name -> rows)."""
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    suffixes: dict[str, list[str]] = {}
    for module, rows in parts.items():
        wanted = layout.wanted(module, (rows, columns))
        suffixes[module] = [s for s, want in wanted.items() if not want.optional or f"{module}.{s}" in stored]
        for suffix in suffixes[module]:
            tensors[f"{module}.{suffix}"] = _resolve(wanted[suffix], stored.get(f"{module}.{suffix}"))

    def build(arrays: Mapping[str, np.ndarray]) -> QuantizedWeight:
        weights = [
            layout.read(module, (rows, columns), {s: arrays[f"{module}.{s}"] for s in suffixes[module]})
            for module, rows in parts.items()
        ]
        _check_alike(name, list(parts), weights)
        return merge(weights)

    return StoredWeight(tensors, build)


def _resolve(want: Wanted, found: StoredTensor | None) -> tuple[str, tuple[int, ...]]:
    """Returns the dtype and shape that a file must have, out of the allowed ones."""
    for way in (want, want.instead):
        if way is not None and found is not None and found.dtype in way.dtypes and len(found.shape) == len(way.shape):
            sizes = tuple(size if own is None else own for size, own in zip(found.shape, way.shape, strict=True))
            return found.dtype, sizes
    return want.dtypes[0], tuple(size or 0 for size in want.shape)


def _check_alike(name: str, modules: Sequence[str], parts: Sequence[QuantizedWeight]) -> None:
    """Raises CheckpointError if the modules' weights cannot be stacked: their formats or orders of columns differ.

    GPTQ orders columns by the inputs' second moments, which modules of the same inputs share. So their orders are equal
    unless they were quantized separately.
    """
    first = parts[0]
    in_order: Any = np.arange(first.shape[1])
    for module, part in zip(modules, parts, strict=True):
        if (part.input_scale is None) != (first.input_scale is None):
            raise CheckpointError(
                f"{name} is one weight, but of {modules[0]} and {module} only one has an input_scale; "
                "modules that are merged must be stored alike"
            )
        if replace(part.format, zero_point=False) != replace(first.format, zero_point=False):
            raise CheckpointError(
                f"{name} is one weight, but {modules[0]} is stored as {first.format.name} and {module} as "
                f"{part.format.name}; modules that are merged must be stored alike"
            )
        one, other = (in_order if w.columns is None else w.columns for w in (first, part))
        if not np.array_equal(one, other):
            raise CheckpointError(
                f"{name} is one weight, but the g_idx of {modules[0]} and {module} put its inputs into different orders"
            )
