"""Reads checkpoints of NVIDIA's ModelOpt: quant_method "modelopt", with quant_algo

| | tensors of a linear layer [N, K] |
|---|---|
| NVFP4 | as in block_floats.py |
| FP8 | weight float8_e4m3fn [N, K], weight_scale [], input_scale [] of all inputs: both are factors |

Merged modules keep their own scales of weights; of their input scales the largest counts, as in vLLM. If the KV cache
was calibrated for FP8, k_proj has a k_scale and v_proj a v_scale. These are factors of at least 1: the cache holds K /
k_scale and V / v_scale in E4M3. kv_scales.py folds them into the weights on both sides of the cache, so the KV format
"fp8" holds the same values. The cache's format must still be named when the model runs. Definition: ModelOpt's
export/unified_export_hf.py and quant_utils.py, as vLLM's quantization/modelopt.py reads them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jllm.errors import CheckpointError
from jllm.files.importers import block_floats, compressed_tensors
from jllm.files.importers.fields import match_glob, read_choice, read_group, read_names, read_object, refuse
from jllm.files.importers.foreign import Wanted
from pallas_kernels.formats.quantized_weights import QuantizedWeight

_MARKS = {"NVFP4": "weight_scale_2", "FP8": "weight_scale"}
_FP8 = replace(compressed_tensors.PLAIN_FP8, static=True)


@dataclass(frozen=True)
class ModelOpt:
    """Is the layout that quantization_config describes. `ignore` (older: exclude_modules) has names with wildcards."""

    algorithm: str  # a key of _MARKS
    kv_scales: bool  # whether scales of K and V may be stored
    ignore: tuple[str, ...]

    @staticmethod
    def from_config(raw: Mapping[str, Any]) -> "ModelOpt":
        """Reads quantization_config, or the object "quantization" in hf_quant_config.json. Raises CheckpointError."""
        raw = {**raw, **read_object(raw, "quantization")}
        algorithm = read_choice(raw, "quant_algo", None, tuple(_MARKS))
        if algorithm == "NVFP4" and read_group(raw, "group_size", 16) != 16:
            raise refuse(raw, "group_size", "16")
        older = read_choice(raw, "kv_cache_quant_algo", None, (None, "FP8"))
        newer = read_object(raw, "kv_cache_scheme")
        if newer and (newer.get("num_bits"), newer.get("type"), newer.get("dynamic", False)) != (8, "float", False):
            raise refuse(raw, "kv_cache_scheme", "null, or num_bits 8, type float, and not dynamic")
        return ModelOpt(algorithm, bool(older or newer), read_names(raw, "ignore") + read_names(raw, "exclude_modules"))

    @property
    def mark(self) -> str:
        return _MARKS[self.algorithm]

    def exempt(self, module: str) -> bool:
        return any(match_glob(pattern, module) for pattern in self.ignore)

    def wanted(self, module: str, shape: tuple[int, int]) -> dict[str, Wanted]:
        if self.exempt(module):
            raise CheckpointError(f"tensor {module}.{self.mark} is stored, but quantization_config ignores {module}")
        if self.algorithm == "FP8":
            found = compressed_tensors.wanted(module, shape, _FP8)
        else:
            found = block_floats.wanted(module, shape, "nvfp4", True, block_floats.MODELOPT)
        return found

    def read(self, module: str, shape: tuple[int, int], tensors: Mapping[str, np.ndarray]) -> QuantizedWeight:
        if self.algorithm == "FP8":
            return compressed_tensors.read(module, shape, tensors, _FP8)
        return block_floats.read(module, tensors, "nvfp4", True, block_floats.MODELOPT)
