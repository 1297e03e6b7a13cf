"""Reads and writes jllm's own layout of quantized checkpoints.

A quantized weight is stored as one tensor for each array of QuantizedWeight, by the weight's name (params.py) and the
array's: `model.layers.0.self_attn.qkv_proj.values`, `.scales`, and if it has them `.zeros`, `.scale_steps`, `.columns`
and `.input_scale`. pallas_kernels/formats/weight_formats.py has the layouts. Other tensors keep their Hugging Face
names. config.json has

    "quantization_config": {"quant_method": "jllm", "version": 1, "name": "w8a8", "rules": [["o_proj", "bf16"], ...]}

with the rules of schemes.py. Safetensors has no 4-bit integers, so two codes a byte are stored as U8.
"""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jllm.errors import CheckpointError, QuantizationError
from jllm.files.safetensors_io import NAMES, StoredTensor
from jllm.files.stored import StoredWeight
from jllm.model.param_specs import LeafSpec
from jllm.quant.codes import is_finite, positive_scale
from jllm.quant.quantize import abstract_weight
from jllm.quant.schemes import Modules, Scheme, choose_format, scheme_of
from pallas_kernels.formats.quantized_weights import Origin, QuantizedWeight
from pallas_kernels.formats.weight_formats import WeightFormat

VERSION = 1
METHOD = "jllm"


def quantization_config(formats: Mapping[str, WeightFormat], modules: Modules) -> dict[str, object]:
    """Makes config.json's description of weights in these formats; `modules` are the model's
    (params.matrix_modules)."""
    scheme = scheme_of(formats, modules)
    rules = [list(rule) for rule in scheme.rules]
    return {"quant_method": METHOD, "version": VERSION, "name": scheme.name, "rules": rules}


def arrays(name: str, w: QuantizedWeight) -> dict[str, jax.Array]:
    """Returns the stored tensors of a weight by their names in files."""
    found = {field.name: getattr(w, field.name) for field in fields(w) if not field.metadata.get("static")}
    return {f"{name}.{field}": array for field, array in found.items() if array is not None}


def stored_weights(
    raw: Mapping[str, object], specs: Mapping[str, LeafSpec], stored: Mapping[str, StoredTensor]
) -> dict[str, StoredWeight]:
    """Returns the quantized weights of a checkpoint in this layout; it is an importer (see importers/)."""
    if raw.get("version") != VERSION:
        raise CheckpointError(f"quantization_config: version {raw.get('version')!r} is not known; known is {VERSION}")
    modules = {name: spec.modules for name, spec in specs.items()}
    given = {key: raw[key] for key in ("name", "rules") if key in raw}
    try:
        wanted = Scheme.from_dict(given, source="quantization_config").formats(modules)
        formats = {name: choose_format(name, specs[name].shape, found) for name, found in wanted.items() if found}
    except QuantizationError as error:
        raise CheckpointError(str(error)) from None
    return {name: _stored_weight(name, specs[name], fmt, stored) for name, fmt in formats.items()}


def _stored_weight(name: str, spec: LeafSpec, fmt: WeightFormat, stored: Mapping[str, StoredTensor]) -> StoredWeight:
    N, K = spec.shape
    reordered = fmt.row_codes is None and not fmt.rotated and f"{name}.columns" in stored
    of_inputs = fmt.activations is not None and not fmt.per_tensor and fmt.row_group is None
    fixed = of_inputs and f"{name}.input_scale" in stored
    wanted = arrays(name, _abstract_weight((N, K), fmt, reordered=reordered, fixed=fixed))

    def build(found: Mapping[str, np.ndarray]) -> QuantizedWeight:
        columns = found.get(f"{name}.columns")
        if columns is not None and not np.array_equal(np.sort(columns), np.arange(K)):
            raise CheckpointError(f"tensor {name}.columns is not a permutation of {K} columns")
        for full, array in found.items():
            if not is_finite(array):
                raise CheckpointError(f"tensor {full} holds NaN or infinity")
        if fixed:
            positive_scale(f"{name}.input_scale", found[f"{name}.input_scale"])
        leaves: dict[str, Any] = dict.fromkeys(field.name for field in fields(QuantizedWeight))
        leaves |= {full.rpartition(".")[2]: array for full, array in found.items()}
        return QuantizedWeight(**leaves | {"shape": (N, K), "format": fmt, "origin": Origin()})

    return StoredWeight({full: (NAMES[np.dtype(a.dtype)], a.shape) for full, a in wanted.items()}, build)


def _abstract_weight(shape: tuple[int, int], fmt: WeightFormat, *, reordered: bool, fixed: bool) -> QuantizedWeight:
    """Returns a QuantizedWeight of jax.ShapeDtypeStruct. `fixed`: it has one scale of all inputs."""
    w = abstract_weight(jax.ShapeDtypeStruct(shape, jnp.float32), fmt)
    columns: Any = jax.ShapeDtypeStruct(shape[1:], jnp.int32)
    scale: Any = jax.ShapeDtypeStruct((1,), jnp.float32)
    return replace(w, columns=columns if reordered else None, input_scale=scale if fixed else None)
