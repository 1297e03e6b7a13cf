"""Reads MXFP4, MXFP8 and NVFP4 as compressed-tensors and NVIDIA's ModelOpt store them, for a linear layer [N, K]:

| | compressed-tensors | ModelOpt |
|---|---|---|
| codes of four bits, the even column in the low nibble | weight_packed uint8 [N, K/2] | weight uint8 [N, K/2] |
| codes of eight bits | weight float8_e4m3fn [N, K] | |
| scales: uint8 (E8M0), of NVFP4 float8_e4m3fn | weight_scale [N, K/32], [N, K/16] | weight_scale [N, K/16] |
| float32 of NVFP4 | weight_global_scale [1], which divides | weight_scale_2 [], a factor |
| float32 of NVFP4's inputs | input_global_scale [1], which divides | input_scale [], a factor |

compressed-tensors names them in `format`: nvfp4-pack-quantized, mxfp4-pack-quantized, mxfp8-quantized. Definitions: its
compressors/nvfp4, mxfp4, mxfp8 and quantization/quant_scheme.py; ModelOpt's nn/modules and export, as vLLM's
quantization/modelopt.py reads them. Merged modules keep a float32 each.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jllm.files.importers.fields import read_choice, read_group, read_object, refuse
from jllm.files.importers.foreign import Wanted
from jllm.quant.codes import block_weight, groups_of, positive_scale
from pallas_kernels.formats.block_floats import KINDS
from pallas_kernels.formats.quantized_weights import QuantizedWeight
from pallas_kernels.formats.weight_formats import parse_weight_format

FORMATS = {"nvfp4-pack-quantized": "nvfp4", "mxfp4-pack-quantized": "mxfp4", "mxfp8-quantized": "mxfp8"}


@dataclass(frozen=True)
class Names:
    """Holds a project's names of the tensors of a module."""

    packed: str
    tensor: str  # the float32 of weights
    inputs: str  # the float32 of inputs
    divides: bool  # whether these two divide, rather than multiply


COMPRESSED = Names("weight_packed", "weight_global_scale", "input_global_scale", True)
MODELOPT = Names("weight", "weight_scale_2", "input_scale", False)


def read_activations(raw: Mapping[str, Any], kind: str) -> bool:
    """Reads weights and input_activations of one of config_groups, and returns whether inputs are rounded too. Raises
    CheckpointError for values that the kind does not have."""
    bits, strategy = (8 if kind == "mxfp8" else 4), ("tensor_group" if kind == "nvfp4" else "group")

    def check(args: Mapping[str, Any], dynamic: Any) -> None:
        read_choice(args, "num_bits", bits, (bits,))
        read_choice(args, "type", "float", ("float",))
        read_choice(args, "strategy", strategy, (strategy,))
        if read_group(args, "group_size", KINDS[kind].block) != KINDS[kind].block:
            raise refuse(args, "group_size", str(KINDS[kind].block))
        read_choice(args, "symmetric", True, (True,))
        read_choice(args, "dynamic", dynamic, (dynamic,))

    check(read_object(raw, "weights"), False)
    if raw.get("input_activations") is None:
        return False
    check(read_object(raw, "input_activations"), "local" if kind == "nvfp4" else True)
    return True


def wanted(module: str, shape: tuple[int, int], kind: str, activations: bool, names: Names) -> dict[str, Wanted]:
    N, K = shape
    packed = KINDS[kind].codes == "e2m1"
    scales = Wanted((N, groups_of(module, K, KINDS[kind].block)), ("F8_E4M3" if kind == "nvfp4" else "U8",))
    found = {"weight_scale": scales}
    found |= {names.packed: Wanted((N, K // 2), ("U8",))} if packed else {"weight": Wanted((N, K), ("F8_E4M3",))}
    if kind == "nvfp4":
        one = Wanted((1,), ("F32",), instead=Wanted((), ("F32",)))
        found[names.tensor] = one
        if activations:
            found[names.inputs] = one
    return found


def read(module: str, tensors: Mapping[str, np.ndarray], kind: str, activations: bool, names: Names) -> QuantizedWeight:
    def factor(suffix: str) -> np.ndarray | None:
        if suffix not in tensors:
            return None
        scale = positive_scale(f"{module}.{suffix}", tensors[suffix])
        return positive_scale(f"{module}.{suffix}", 1 / scale) if names.divides else scale

    codes = tensors[names.packed if KINDS[kind].codes == "e2m1" else "weight"]
    if KINDS[kind].codes == "e2m1":
        codes = np.stack([codes & np.uint8(15), codes >> np.uint8(4)], axis=-1).reshape(len(codes), -1).view(np.int8)
    fmt = parse_weight_format(kind if activations else f"{kind}-weight")
    return block_weight(
        module, codes, tensors["weight_scale"], fmt, tensor=factor(names.tensor), input_scale=factor(names.inputs)
    )
