"""Reads checkpoints of bitsandbytes, as transformers writes them: NF4 and FP4, doubly quantized or not, and LLM.int8.

| load_in_4bit | | |
|---|---|---|
| weight | uint8 [N K/2, 1] | codes of the flattened weight, the even one in the high nibble |
| weight.absmax | float32 [blocks], or uint8 | scales of blocks of the flattened weight |
| weight.quant_map | float32 [16] | the values of the codes |
| weight.nested_absmax, weight.nested_quant_map | float32 [blocks / nested blocksize], [256] | where absmax is uint8 |
| weight.quant_state.bitsandbytes__nf4 | uint8 | JSON: shape, blocksize, quant_type, nested_blocksize, nested_offset |

w = quant_map[code] * absmax. If absmax is uint8, it stands for nested_quant_map[absmax] * nested_absmax +
nested_offset. Nested scales are decoded here. A block that crosses rows is split at their ends, and its scale repeated.
The state of FP4's weights is named bitsandbytes__fp4.

| load_in_8bit | | |
|---|---|---|
| weight, SCB, weight_format | int8 [N, K], float32 [N], uint8 (0: row by row) | w = weight * SCB / 127 |

LLM.int8 quantizes inputs too, except outliers. Outliers are values of at least llm_int8_threshold (6.0); a threshold of
0 means none. jllm chooses outliers for each token, and bitsandbytes chooses columns of a whole batch. For one token the
two agree. Definition: bitsandbytes, functional.py (QuantState, dequantize_blockwise), backends/default/ops.py
(dequantize_4bit, int8_vectorwise_quant), nn/modules.py (Linear8bitLt).
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jllm.errors import CheckpointError
from jllm.files.importers.fields import match_pattern, read_choice, read_flag, read_names, refuse
from jllm.files.importers.foreign import Wanted
from jllm.files.safetensors_io import STORED
from jllm.quant.codes import group_weight, row_weight
from pallas_kernels.formats.quantized_weights import QuantizedWeight
from pallas_kernels.formats.weight_formats import TABLES, THRESHOLD, WeightFormat

_STATE = "weight.quant_state.bitsandbytes__"
_STORAGE = {"uint8": "U8", "float16": "F16", "bfloat16": "BF16", "float32": "F32"}  # dtypes that hold the bytes


@dataclass(frozen=True)
class FourBitLayout:
    """Is the layout of a quantization_config with load_in_4bit."""

    codes: str  # a key of quantized_weights.TABLES
    double_quant: bool
    storage: str
    skip: tuple[str, ...]

    @property
    def mark(self) -> str:
        return _STATE + self.codes

    def exempt(self, module: str) -> bool:
        return _is_skipped(self.skip, module)

    def wanted(self, module: str, shape: tuple[int, int]) -> dict[str, Wanted]:
        octets = shape[0] * shape[1] // 2
        wanted = {
            "weight": Wanted((octets // STORED[self.storage].itemsize, 1), (self.storage,)),
            "weight.absmax": Wanted((None,), ("U8",) if self.double_quant else ("F32",)),
            "weight.quant_map": Wanted((16,), ("F32",)),
            self.mark: Wanted((None,), ("U8",)),
        }
        if self.double_quant:
            wanted["weight.nested_absmax"] = Wanted((None,), ("F32",))
            wanted["weight.nested_quant_map"] = Wanted((256,), ("F32",))
        return wanted

    def read(self, module: str, shape: tuple[int, int], tensors: Mapping[str, np.ndarray]) -> QuantizedWeight:
        state = _read_state(f"{module}.{self.mark}", tensors[self.mark], shape, self.codes)
        if not np.array_equal(tensors["weight.quant_map"], np.asarray(TABLES[self.codes], np.float32)):
            raise CheckpointError(f"tensor {module}.weight.quant_map does not hold the values of {self.codes.upper()}")
        block, (N, K) = state["blocksize"], shape
        absmax = self._absmax(module, tensors, state)
        _check_length(f"{module}.weight.absmax", absmax, N * K, block)
        group = math.gcd(K, block)  # values of one block that lie in one row
        scales = absmax[np.arange(N * K // group) * group // block].reshape(N, K // group)
        octets = tensors["weight"].view(np.uint8).reshape(-1)
        codes = np.stack([octets >> np.uint8(4), octets & np.uint8(15)], axis=-1).reshape(N, K)
        return group_weight(module, codes, scales, WeightFormat(self.codes, group))

    def _absmax(self, module: str, tensors: Mapping[str, np.ndarray], state: Mapping[str, Any]) -> np.ndarray:
        absmax = tensors["weight.absmax"]
        if not self.double_quant:
            return absmax
        block, nested = state["nested_blocksize"], tensors["weight.nested_absmax"]
        _check_length(f"{module}.weight.nested_absmax", nested, len(absmax), block)
        steps = np.repeat(nested, block)[: len(absmax)]
        return tensors["weight.nested_quant_map"][absmax] * steps + np.float32(state["nested_offset"])


@dataclass(frozen=True)
class Int8Layout:
    """Is the layout of a quantization_config with load_in_8bit."""

    skip: tuple[str, ...]
    outliers: float | None  # the threshold of outliers
    mark: str = "SCB"

    def exempt(self, module: str) -> bool:
        return _is_skipped(self.skip, module)

    def wanted(self, module: str, shape: tuple[int, int]) -> dict[str, Wanted]:
        return {
            "weight": Wanted(shape, ("I8",)),
            "SCB": Wanted((shape[0],), ("F32",)),
            "weight_format": Wanted((), ("U8",), optional=True),
        }

    def read(self, module: str, shape: tuple[int, int], tensors: Mapping[str, np.ndarray]) -> QuantizedWeight:
        if "weight_format" in tensors and tensors["weight_format"] != 0:
            found = int(tensors["weight_format"])
            raise CheckpointError(
                f"tensor {module}.weight_format is {found}, which is not supported; supported: 0 (row)"
            )
        fmt = WeightFormat("int8", activations="int8", outliers=self.outliers)
        return row_weight(module, tensors["weight"], tensors["SCB"] / np.float32(127), fmt)


def from_config(raw: Mapping[str, Any]) -> FourBitLayout | Int8Layout:
    """Raises CheckpointError for unsupported fields, by name."""
    raw = {"load_in_4bit": raw.get("_load_in_4bit", False), "load_in_8bit": raw.get("_load_in_8bit", False)} | dict(raw)
    four, eight = read_flag(raw, "load_in_4bit", False), read_flag(raw, "load_in_8bit", False)
    if four == eight:
        raise refuse(raw, "load_in_4bit", "one of load_in_4bit and load_in_8bit")
    skip = read_names(raw, "llm_int8_skip_modules")
    if eight:
        threshold = raw.get("llm_int8_threshold", THRESHOLD)
        if type(threshold) not in (int, float) or not 0 <= threshold < math.inf:
            raise refuse(raw, "llm_int8_threshold", "a number, 0 or more")
        return Int8Layout(skip, float(threshold) or None)
    codes = read_choice(raw, "bnb_4bit_quant_type", "fp4", ("nf4", "fp4"))
    storage = _STORAGE[read_choice(raw, "bnb_4bit_quant_storage", "uint8", tuple(_STORAGE))]
    return FourBitLayout(codes, read_flag(raw, "bnb_4bit_use_double_quant", False), storage, skip)


def _check_length(name: str, scales: np.ndarray, values: int, block: int) -> None:
    """Raises CheckpointError unless there is a scale for every block of that many values."""
    if len(scales) != -(-values // block):
        implied = f"{values} values in blocks of {block} imply {-(-values // block)}"
        raise CheckpointError(f"tensor {name} has {len(scales)} scales, but {implied}")


def _is_skipped(skip: tuple[str, ...], module: str) -> bool:
    """Decides as transformers does (quantizers_utils.should_convert_module)."""
    return module == "lm_head" or any(match_pattern(name, module) or module.endswith(name) for name in skip)


def _read_state(name: str, octets: np.ndarray, shape: tuple[int, int], codes: str) -> dict[str, Any]:
    """Returns the JSON object in a tensor of bytes. Raises CheckpointError unless it describes a weight of this shape
    in these codes."""
    try:
        state = json.loads(octets.tobytes())
        found, sizes = state["quant_type"], [state["blocksize"], state.get("nested_blocksize", 1)]
        float(state.get("nested_offset", 0))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"tensor {name} is not a JSON object with quant_type, blocksize and shape") from None
    if any(type(size) is not int or size < 1 for size in sizes):
        raise CheckpointError(f"tensor {name} has blocksize {sizes[0]!r} and nested_blocksize {sizes[1]!r}")
    if found != codes or state.get("shape") != list(shape):
        raise CheckpointError(
            f"tensor {name} describes {found} of shape {state.get('shape')}; "
            f"the config implies {codes} of {list(shape)}"
        )
    return state
