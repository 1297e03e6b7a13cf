"""Reads and writes tensors that hold all experts of a layer. In the table of weights each expert has its modules,
[outputs, inputs].

gpt-oss's `mlp.experts.gate_up_proj` is [X, E, 2F], with each gate before its up, and `mlp.experts.down_proj` is [X, F,
E]. Their biases, `gate_up_proj_bias` and `down_proj_bias`, lack the middle dimension. Files of other families may have
what transformers 5 has in memory: [X, 2F, E], with all gates of an expert before its ups, and [X, E, F].
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jllm.files.safetensors_io import DTYPES, StoredTensor, cast_into, read_bytes
from jllm.model.param_specs import LeafSpec

_NAME = re.compile(r"(.*\.mlp\.experts\.)(gate_up|down)_proj(_bias)?")


@dataclass(frozen=True)
class ExpertTensor(StoredTensor):
    """Names the part of `whole` that is one expert's module: of its outputs, every `step`-th from `first` on."""

    whole: StoredTensor
    expert: int
    first: int
    step: int


def cut_experts(stored: Mapping[str, StoredTensor], turned: bool) -> dict[str, StoredTensor]:
    """Returns the tensors by the names of the table, each expert's modules apart. `turned`: they are as gpt-oss's.
    A tensor that has no whole modules, or whose modules are there already, keeps its name."""
    found: dict[str, StoredTensor] = {}
    for name, whole in stored.items():
        match = _NAME.fullmatch(name)
        if match is None or whole.dtype not in DTYPES or len(whole.shape) != (2 if match[3] else 3):
            found[name] = whole
            continue
        modules = ("gate_proj", "up_proj") if match[2] == "gate_up" else ("down_proj",)
        outputs, *inputs = reversed(whole.shape[1:]) if turned else whole.shape[1:]
        own = [
            [f"{match[1]}{expert}.{module}.{'bias' if match[3] else 'weight'}" for module in modules]
            for expert in range(whole.shape[0])
        ]
        if outputs % len(modules) or any(name in stored for names in own for name in names):
            found[name] = whole
            continue
        shape = (outputs // len(modules), *inputs)
        size = math.prod(shape) * DTYPES[whole.dtype].itemsize
        for expert, names in enumerate(own):
            for i, part_name in enumerate(names):
                begin = whole.offset + (0 if turned else (expert * len(modules) + i) * size)
                part = StoredTensor(whole.name, whole.path, whole.dtype, shape, begin, size)
                found[part_name] = (
                    ExpertTensor(**vars(part), whole=whole, expert=expert, first=i, step=len(modules))
                    if turned
                    else part
                )
    return found


def read_expert(tensor: ExpertTensor, out: np.ndarray, progress: Callable[[int], object]) -> None:
    """Reads a module into the array `out` of its shape, and converts it to its dtype. Raises CheckpointError as
    safetensors_io.read_tensor does."""
    size = tensor.whole.nbytes // tensor.whole.shape[0]
    octets = read_bytes(tensor.whole, tensor.expert * size, size)
    values = np.frombuffer(octets, DTYPES[tensor.dtype]).reshape(tensor.whole.shape[1:])
    cast_into(out, values[..., tensor.first :: tensor.step].T, tensor)
    progress(tensor.nbytes)


def merged_name(spec: LeafSpec) -> str:
    """Returns the name of the tensor that has a leaf's experts."""
    before, _, own = spec.parts[0][0].partition(".mlp.experts.0.")
    module = own.replace("gate_proj", "gate_up_proj").removesuffix(".weight").replace(".bias", "_bias")
    return f"{before}.mlp.experts.{module}"


def merge_experts(spec: LeafSpec, leaf: jax.Array) -> jax.Array:
    """Returns the values of the tensor of a leaf that holds all experts: the inverse of cut_experts."""
    outputs, modules = (
        spec.parts[0][1],
        len({name.rpartition(".experts.")[2].partition(".")[2] for name, _ in spec.parts}),
    )
    turned = jnp.moveaxis(leaf.reshape(-1, modules, outputs, *spec.shape[1:]), (1, 2), (-1, -2))
    return turned.reshape(*turned.shape[:-2], modules * outputs)
