"""Imports quantized checkpoints: one importer for each `quant_method` of quantization_config.

An importer reads that object and the headers of the files. For each of our (merged) weights it returns which stored
tensors form it. load_params.py checks them against the files, reads one weight at a time, and calls the weight's
`build`. A weight that the importer leaves out is an ordinary one, in 16 or 32 bits.
"""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from jllm.errors import CheckpointError
from jllm.files import quantized as files
from jllm.files.importers import bitsandbytes, foreign, mxfp4
from jllm.files.importers.awq import AWQ
from jllm.files.importers.compressed_tensors import FP8, CompressedTensors
from jllm.files.importers.fields import UNDERSTOOD, unknown_fields
from jllm.files.importers.gptq import GPTQ
from jllm.files.importers.modelopt import ModelOpt
from jllm.files.safetensors_io import StoredTensor
from jllm.files.stored import StoredWeight
from jllm.model.param_specs import LeafSpec

# (quantization_config, every matrix by name, the stored tensors by name) -> the quantized weights by name.
# Matrices are as in param_specs.weight_specs, with a tied model's lm_head. Tensors are without norms and biases.
# Raises CheckpointError for an unsupported config, in one line that names the field or the tensor. load_params.py
# puts the directory before it.
Importer = Callable[
    [Mapping[str, Any], Mapping[str, LeafSpec], Mapping[str, StoredTensor]],
    dict[str, StoredWeight],
]


def _foreign(read_config: Callable[[Mapping[str, Any]], foreign.Layout]) -> Importer:
    return lambda raw, specs, stored: foreign.stored_weights(read_config(raw), specs, stored)


IMPORTERS: dict[str, Importer] = {
    files.METHOD: files.stored_weights,
    "gptq": _foreign(GPTQ.from_config),
    "awq": _foreign(AWQ.from_config),
    "compressed-tensors": _foreign(CompressedTensors.from_config),
    "fp8": _foreign(FP8.from_config),
    "modelopt": _foreign(ModelOpt.from_config),
    "bitsandbytes": _foreign(bitsandbytes.from_config),
    "mxfp4": mxfp4.stored_weights,
}


def has_kv_scales(raw: Mapping[str, Any]) -> bool:
    """Returns whether scales of K and V may be stored (kv_scales.py). Raises CheckpointError as stored_weights does."""
    return raw.get("quant_method") == "modelopt" and ModelOpt.from_config(raw).kv_scales


def stored_weights(
    raw: Mapping[str, Any], specs: Mapping[str, LeafSpec], stored: Mapping[str, StoredTensor]
) -> dict[str, StoredWeight]:
    """Returns the weights that a checkpoint with this quantization_config stores quantized, by name. Raises
    CheckpointError for an unknown method."""
    method = raw.get("quant_method")
    if not isinstance(method, str) or method not in IMPORTERS:
        known = ", ".join(IMPORTERS)
        raise CheckpointError(f"quantization_config: quant_method {method!r} is not supported; supported are {known}")
    return IMPORTERS[method](raw, specs, stored)


def warn_of_unknown(raw: Mapping[str, Any], source: str) -> None:
    """Warns of unknown fields in a quantization_config of a known method."""
    if unknown := unknown_fields(raw, UNDERSTOOD[raw["quant_method"]]):
        text = f"{source}: quantization_config: unknown fields are ignored: {', '.join(sorted(unknown))}"
        warnings.warn(text, stacklevel=5)
