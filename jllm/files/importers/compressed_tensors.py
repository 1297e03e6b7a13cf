"""Reads checkpoints of compressed-tensors (llm-compressor, vLLM), and of quant_method "fp8" (AutoFP8, DeepSeek, Qwen).

config_groups describe how their target modules are quantized; modules in `ignore` are not. A linear layer [N, K] is
stored by format as

| format | tensors |
|---|---|
| int-quantized, naive-quantized | weight int8 [N, K], weight_scale, weight_zero_point int8 |
| float-quantized, naive-quantized | weight float8_e4m3fn [N, K], weight_scale |
| pack-quantized | weight_packed int32 [N, K b/32], weight_shape int64 [2], weight_scale, weight_zero_point |

w = (code - zero) * scale. weight_scale has one value for the tensor [1], for each channel [N, 1], for each group [N,
K/g], or for each block of 128 x 128 [N/128, K/128], rounded up. Packed codes of b = 4 or 8 bits are stored plus
2^(b-1), lowest bits first. Zero points are stored alike, packed along N (by older releases: not packed); only
asymmetric weights have them. With actorder "group", weight_g_idx int32 [K] has the group of each input; only weights in
groups have it. Definition: compressed-tensors, compressors/naive_quantized and pack_quantized, utils/match.py.

config_groups also decide about inputs, which have the weights' kind of codes. Inputs are not quantized, or have a scale
for each token (with blocks: for each 128 inputs of a token), or (not dynamic) all have the stored input_scale [1].
Merged modules have the same inputs, and so the same scale. If theirs differ, the largest counts, as in vLLM. One scale
for the tokens of a step, zero points of inputs, and quantized KV caches are refused by name. block_floats.py has the
formats of small floats in blocks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jllm.errors import CheckpointError
from jllm.files.importers import block_floats
from jllm.files.importers.fields import match_pattern, read_choice, read_group, read_names, read_object, refuse
from jllm.files.importers.foreign import FLOATS, Wanted
from jllm.quant.codes import blocks_weight, groups_of, input_order, int_weight, row_weight, signed, unpack_words
from pallas_kernels.formats.quantized_weights import QuantizedWeight
from pallas_kernels.formats.weight_formats import BLOCK, WeightFormat

_FORMATS = ("int-quantized", "float-quantized", "naive-quantized", "pack-quantized")
_RANK = 3  # the rank of a target that does not match


@dataclass(frozen=True)
class Scheme:
    """Describes how the modules of one group are stored."""

    targets: tuple[str, ...]
    codes: str  # "int8", "fp8" or "int4"
    packed: bool
    group: int  # -1: one scale a channel, 0: one scale for the tensor
    symmetric: bool
    reordered: bool  # weight_g_idx has the group of each input
    activations: str | None
    static: bool  # input_scale is stored
    block_kind: str | None = None  # a kind of block_floats.py, which decides all fields but targets and activations
    in_blocks: bool = False  # a scale for each block of 128 x 128, and for each 128 inputs of a token
    scale: str = "weight_scale"  # the name of the scales


@dataclass(frozen=True)
class CompressedTensors:
    """Is the layout that quantization_config describes."""

    schemes: tuple[Scheme, ...]
    ignore: tuple[str, ...]
    mark: str = "weight_scale"

    @staticmethod
    def from_config(raw: Mapping[str, Any]) -> "CompressedTensors":
        """Raises CheckpointError for unsupported fields, by name."""
        if raw.get("kv_cache_scheme") is not None:
            raise refuse(raw, "kv_cache_scheme", "null (the KV cache's format is named when the model runs)")
        read_choice(read_object(raw, "sparsity_config"), "format", "dense", ("dense",))
        groups = read_object(raw, "config_groups")
        if not groups:
            raise refuse(raw, "config_groups", "an object of groups")
        schemes = tuple(_read_scheme(read_object(groups, name), raw.get("format")) for name in groups)
        return CompressedTensors(schemes, read_names(raw, "ignore"))

    def exempt(self, module: str) -> bool:
        return self._scheme(module) is None

    def _scheme(self, module: str) -> Scheme | None:
        """Returns the scheme of a module. A target with its name wins over a pattern, and a pattern over its class."""
        if any(_rank(pattern, module) < _RANK for pattern in self.ignore):
            return None
        ranks = [min(_rank(target, module) for target in scheme.targets) for scheme in self.schemes]
        return self.schemes[ranks.index(min(ranks))] if min(ranks) < _RANK else None

    def wanted(self, module: str, shape: tuple[int, int]) -> dict[str, Wanted]:
        scheme = self._scheme(module)
        if scheme is None:
            raise CheckpointError(f"tensor {module}.weight_scale is stored, but quantization_config ignores {module}")
        return wanted(module, shape, scheme)

    def read(self, module: str, shape: tuple[int, int], tensors: Mapping[str, np.ndarray]) -> QuantizedWeight:
        scheme = self._scheme(module)
        assert scheme is not None, "wanted() has refused it"
        return read(module, shape, tensors, scheme)


@dataclass(frozen=True)
class FP8:
    """Is the layout of quant_method "fp8", as AutoFP8 and vLLM have it: weight float8_e4m3fn [N, K] and one
    weight_scale.

    Inputs are quantized by a scale for each token. With activation_scheme "static" they have one input_scale.
    ignored_layers has modules' names, or parts of them. With weight_block_size, blocks of 128 x 128 have scales, named
    weight_scale_inv (DeepSeek, Qwen). They are factors all the same.
    """

    ignore: tuple[str, ...]
    scheme: Scheme

    @property
    def mark(self) -> str:
        return self.scheme.scale

    @staticmethod
    def from_config(raw: Mapping[str, Any]) -> "FP8":
        """Raises CheckpointError for unsupported fields, by name."""
        in_blocks = read_choice(raw, "weight_block_size", None, (None, [BLOCK, BLOCK])) is not None
        read_choice(raw, "scale_fmt", "float", ("float",))
        read_choice(raw, "expert_dtype", "fp8", ("fp8",))
        ways = ("dynamic",) if in_blocks else ("dynamic", "static")
        static = read_choice(raw, "activation_scheme", "dynamic", ways) == "static"
        read_choice(raw, "kv_cache_scheme", None, (None,))
        ignore = read_names(raw, "ignored_layers") + read_names(raw, "modules_to_not_convert")
        scheme = replace(PLAIN_FP8, in_blocks=True, scale="weight_scale_inv") if in_blocks else PLAIN_FP8
        return FP8(ignore, replace(scheme, static=static))

    def exempt(self, module: str) -> bool:
        return module == "lm_head" or any(name in module for name in self.ignore)

    def wanted(self, module: str, shape: tuple[int, int]) -> dict[str, Wanted]:
        return wanted(module, shape, self.scheme)

    def read(self, module: str, shape: tuple[int, int], tensors: Mapping[str, np.ndarray]) -> QuantizedWeight:
        return read(module, shape, tensors, self.scheme)


PLAIN_FP8 = Scheme((), "fp8", packed=False, group=0, symmetric=True, reordered=False, activations="fp8", static=False)


def _rank(target: str, module: str) -> int:
    """Ranks how closely a target matches: 0 for the module's name, 1 for a pattern, 2 for its class, 3 for no match."""
    if target.startswith("re:"):
        return 1 if match_pattern(target.removeprefix("re:"), module) else _RANK
    return 0 if target == module else 2 if target == "Linear" else _RANK


def _read_scheme(raw: Mapping[str, Any], default_format: Any) -> Scheme:
    """Reads one of config_groups."""
    known = (*_FORMATS, *block_floats.FORMATS)
    stored = read_choice({**raw, "format": raw.get("format") or default_format}, "format", None, known)
    packed = stored == "pack-quantized"
    if raw.get("output_activations") is not None:
        raise refuse(raw, "output_activations", "null")
    if not (targets := read_names(raw, "targets")):
        raise refuse(raw, "targets", "names, patterns (re:...) or Linear")
    if kind := block_floats.FORMATS.get(stored):
        activations = kind if block_floats.read_activations(raw, kind) else None
        return replace(PLAIN_FP8, targets=targets, activations=activations, static=False, block_kind=kind)
    weights = read_object(raw, "weights")
    kinds = {"int-quantized": ("int",), "float-quantized": ("float",), "pack-quantized": ("int",)}
    kind = read_choice(weights, "type", "int", kinds.get(stored, ("int", "float")))
    bits = read_choice(weights, "num_bits", 8, (4, 8) if packed else (8,))
    if kind == "float" and weights.get("strategy") == "block":
        _check_blocks(weights, read_object(raw, "input_activations"))
        return replace(PLAIN_FP8, targets=targets, in_blocks=True)
    group = _read_group(weights, ("tensor", "channel", "block" if kind == "float" else "group"))
    symmetric = read_choice(weights, "symmetric", True, (True,) if kind == "float" else (False, True))
    activations, static = None, False
    if raw.get("input_activations") is not None:
        if packed or group > 0 or not symmetric:
            raise refuse(raw, "input_activations", "null, where weights are packed, in groups or not symmetric")
        activations, static = _read_activations(read_object(raw, "input_activations"), kind)
    return Scheme(
        targets=targets,
        codes="fp8" if kind == "float" else f"int{bits}",
        packed=packed,
        group=group,
        symmetric=symmetric,
        reordered=group > 0 and weights.get("actorder") in ("group", "dynamic", True),
        activations=activations,
        static=static,
    )


def _check_blocks(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
    """Raises CheckpointError for other blocks than those of 128 x 128 with inputs in groups of 128."""
    read_choice(weights, "block_structure", None, ([BLOCK, BLOCK], f"{BLOCK}x{BLOCK}"))
    read_choice(inputs, "strategy", None, ("group",))
    read_choice(inputs, "group_size", None, (BLOCK,))
    read_choice(inputs, "dynamic", False, (True,))
    read_choice(inputs, "type", "int", ("float",))
    for numbers in (weights, inputs):
        read_choice(numbers, "num_bits", 8, (8,))
        read_choice(numbers, "symmetric", True, (True,))


def _read_group(weights: Mapping[str, Any], strategies: tuple[str, ...]) -> int:
    """Returns the group size that `strategy` implies. Older files have group_size alone."""
    size = weights.get("group_size")
    implied = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = read_choice({**weights, "strategy": weights.get("strategy") or implied}, "strategy", None, strategies)
    return read_group(weights, "group_size", None) if strategy == "group" else {"tensor": 0, "channel": -1}[strategy]


def _read_activations(raw: Mapping[str, Any], kind: str) -> tuple[str, bool]:
    """Returns the codes of inputs, which equal the weights' codes, and whether one scale for all inputs is stored.
    Otherwise each token gets its own scale in the step."""
    read_choice(raw, "type", "int", (kind,))
    read_choice(raw, "num_bits", 8, (8,))
    static = not read_choice(raw, "dynamic", False, (True, False))
    read_choice(raw, "strategy", "tensor" if static else None, ("tensor" if static else "token",))
    read_choice(raw, "symmetric", True, (True,))
    return "fp8" if kind == "float" else "int8", static


def wanted(module: str, shape: tuple[int, int], scheme: Scheme) -> dict[str, Wanted]:
    if scheme.block_kind is not None:
        return block_floats.wanted(module, shape, scheme.block_kind, bool(scheme.activations), block_floats.COMPRESSED)
    if scheme.in_blocks:
        grid = tuple(-(-size // BLOCK) for size in shape)
        return {"weight": Wanted(shape, ("F8_E4M3",)), scheme.scale: Wanted(grid, FLOATS)}
    N, K = shape
    each = 8 if scheme.codes == "int4" else 4  # values in a packed word
    groups = groups_of(module, K, scheme.group) if scheme.group > 0 else 1
    sizes = (1,) if scheme.group == 0 else (N, groups)
    found = {"weight_scale": Wanted(sizes, FLOATS, instead=Wanted((), FLOATS) if scheme.group == 0 else None)}
    plain_zeros = Wanted(sizes, ("I8",), optional=scheme.symmetric)
    if scheme.packed:
        found["weight_packed"] = Wanted((N, -(-K // each)), ("I32",))
        found["weight_shape"] = Wanted((2,), ("I64", "I32"))
        found["weight_zero_point"] = replace(
            plain_zeros, shape=(-(-N // each), groups), dtypes=("I32",), instead=plain_zeros
        )
    else:
        found["weight"] = Wanted((N, K), ("F8_E4M3" if scheme.codes == "fp8" else "I8",))
        found["weight_zero_point"] = plain_zeros
    if scheme.static:
        found["input_scale"] = Wanted((1,), FLOATS, instead=Wanted((), FLOATS))
        found["input_zero_point"] = Wanted((1,), ("I8", "F8_E4M3"), optional=True)
    if scheme.reordered:
        found["weight_g_idx"] = Wanted((K,), ("I32", "I64"))
    return found


def read(module: str, shape: tuple[int, int], tensors: Mapping[str, np.ndarray], scheme: Scheme) -> QuantizedWeight:
    if scheme.block_kind is not None:
        return block_floats.read(module, tensors, scheme.block_kind, bool(scheme.activations), block_floats.COMPRESSED)
    if scheme.in_blocks:
        return blocks_weight(module, tensors["weight"], tensors[scheme.scale])
    (N, K), bits = shape, 4 if scheme.codes == "int4" else 8
    scales = tensors["weight_scale"]
    scales = np.broadcast_to(scales.reshape(-1, 1), (N, 1)) if scales.size == 1 else scales
    zeros = tensors.get("weight_zero_point")
    if zeros is not None:
        if zeros.dtype == np.int32:
            zeros = signed(unpack_words(zeros.T, bits)[:, :N].T, bits)
        zeros = np.broadcast_to(zeros.reshape(-1, zeros.shape[-1]), scales.shape)
        if scheme.symmetric and zeros.any():
            raise CheckpointError(f"tensor {module}.weight_zero_point is not zero, but symmetric = true")
    if scheme.codes == "fp8" or scheme.activations:
        fmt = WeightFormat(scheme.codes, activations=scheme.activations)
        if "input_zero_point" in tensors and tensors["input_zero_point"].view(np.uint8).any():
            raise CheckpointError(f"tensor {module}.input_zero_point is not zero, but symmetric = true")
        return row_weight(module, tensors["weight"], scales[:, 0], fmt, input_scale=tensors.get("input_scale"))
    codes = _unpack(module, shape, tensors, bits) if scheme.packed else tensors["weight"]
    order = None
    if scheme.reordered:
        order = input_order(f"{module}.weight_g_idx", tensors["weight_g_idx"], K // scales.shape[1])
        codes = codes if order is None else codes[:, order]
    return int_weight(module, codes, scales, zeros, bits, columns=order)


def _unpack(module: str, shape: tuple[int, int], tensors: Mapping[str, np.ndarray], bits: int) -> np.ndarray:
    """Returns codes int8 [N, K] of weight_packed."""
    if tuple(tensors["weight_shape"]) != shape:
        found = [int(size) for size in tensors["weight_shape"]]
        raise CheckpointError(f"tensor {module}.weight_shape holds {found}, but config.json implies {list(shape)}")
    return signed(unpack_words(tensors["weight_packed"], bits)[:, : shape[1]], bits)
