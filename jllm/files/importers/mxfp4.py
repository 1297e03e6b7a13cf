"""Reads gpt-oss's experts in MXFP4. All experts of a layer lie in one tensor.

`mlp.experts.gate_up_proj_blocks` is uint8 [X, 2F, E/32, 16]: codes of four bits, the even column in the low nibble. Its
rows are a gate and its up in turn. `gate_up_proj_scales` is uint8 [X, 2F, E/32], powers of two (E8M0). `down_proj` has
the same. Other weights are in 16 bits.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jllm.files.safetensors_io import StoredTensor
from jllm.files.stored import StoredWeight
from jllm.model.param_specs import LeafSpec
from jllm.quant.codes import block_weight, groups_of
from pallas_kernels.formats.quantized_weights import QuantizedWeight
from pallas_kernels.formats.weight_formats import parse_weight_format

_BLOCK = 32


def stored_weights(
    raw: Mapping[str, Any], specs: Mapping[str, LeafSpec], stored: Mapping[str, StoredTensor]
) -> dict[str, StoredWeight]:
    """Returns the weights whose blocks are stored, by name."""
    return {name: _stored_weight(name, spec) for name, spec in specs.items() if f"{name}_blocks" in stored}


def _stored_weight(name: str, spec: LeafSpec) -> StoredWeight:
    modules = len({part.rpartition(".experts.")[2].partition(".")[2] for part, _ in spec.parts})
    experts, (N, K) = len(spec.parts) // modules, spec.shape
    shape = (experts, N // experts, groups_of(name, K, _BLOCK))
    blocks, scales = f"{name}_blocks", f"{name}_scales"

    def build(found: Mapping[str, np.ndarray]) -> QuantizedWeight:
        nibbles = np.stack([found[blocks] & 15, found[blocks] >> 4], axis=-1)
        codes = _apart(nibbles.reshape(*shape[:2], K), modules)
        return block_weight(name, codes.view(np.int8), _apart(found[scales], modules), _FORMAT)

    return StoredWeight({blocks: ("U8", (*shape, _BLOCK // 2)), scales: ("U8", shape)}, build)


def _apart(rows: np.ndarray, modules: int) -> np.ndarray:
    """Returns rows [X outputs, ...] of [X, outputs, ...]: of each expert, each module's rows after the others'."""
    turns = rows.reshape(rows.shape[0], -1, modules, *rows.shape[2:])
    return np.ascontiguousarray(turns.swapaxes(1, 2)).reshape(-1, *rows.shape[2:])


_FORMAT = parse_weight_format("mxfp4-weight")
