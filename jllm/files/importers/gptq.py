"""Reads GPTQ checkpoints, as AutoGPTQ and GPTQModel write them.

A linear layer [N, K] of b bits (4 or 8) with groups of g inputs is stored as

| tensor | | |
|---|---|---|
| qweight | int32 [K b/32, N] | codes packed along K, lowest bits first |
| qzeros | int32 [K/g, N b/32] | zero points packed along N, lowest bits first |
| scales | float [K/g, N] | |
| g_idx | int32 [K] | the group of each input: with desc_act in any order, else k // g |

w[n, k] = (code - zero) * scale, both of group g_idx[k]. Under checkpoint_format "gptq" (version 1) qzeros hold the zero
points less one, subtracted from the packed word as a whole. Adding 0x11111111 (0x01010101) to the word restores version
2, even where a zero point of 0 has borrowed from its neighbour. Definition: GPTQModel, utils/model.py
(convert_gptq_v2_to_v1_format_module) and nn_modules/qlinear/__init__.py (pack_block, dequantize_weight).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jllm.errors import CheckpointError
from jllm.files.importers.fields import match_pattern, read_choice, read_flag, read_group, read_names, read_object
from jllm.files.importers.foreign import FLOATS, Wanted
from jllm.quant.codes import groups_of, input_order, int_weight, signed, unpack_words
from pallas_kernels.formats.quantized_weights import QuantizedWeight

_ONES = {4: 0x11111111, 8: 0x01010101}


@dataclass(frozen=True)
class GPTQ:
    """Is the layout that quantize_config.json, or quantization_config in config.json, describes."""

    bits: int
    group: int  # -1: one group of all inputs
    desc_act: bool
    sym: bool | None  # None: the config has no such field
    version: int  # the version of qzeros
    lm_head: bool
    modules: tuple[str, ...]  # suffixes of the names of quantized modules; (): all linear layers of the blocks
    rules: tuple[tuple[str, "GPTQ | None"], ...]  # pattern -> another layout of a module, None: 16 bits
    mark: str = "qweight"

    @staticmethod
    def from_config(raw: Mapping[str, Any]) -> "GPTQ":
        """Raises CheckpointError for unsupported fields, by name."""
        read_choice(raw, "is_marlin_format", False, (False,))
        read_choice(raw, "pack_dtype", "int32", ("int32",))
        key = "checkpoint_format" if "checkpoint_format" in raw else "format"
        blocks = raw.get("modules_in_block_to_quantize") or []  # names, or lists of names
        if isinstance(blocks, list):
            blocks = [name for names in blocks for name in (names if isinstance(names, list) else [names])]
        config = GPTQ(
            bits=read_choice(raw, "bits", None, (4, 8)),
            group=read_group(raw, "group_size", -1),
            desc_act=read_flag(raw, "desc_act", False),
            sym=read_choice(raw, "sym", None, (None, False, True)),
            version=2 if read_choice(raw, key, "gptq", ("gptq", "gptq_v2")) == "gptq_v2" else 1,
            lm_head=read_flag(raw, "lm_head", False),
            modules=read_names({**raw, "modules_in_block_to_quantize": blocks}, "modules_in_block_to_quantize"),
            rules=(),
        )
        dynamic = read_object(raw, "dynamic")
        return replace(config, rules=tuple((pattern, config._under(dynamic, pattern)) for pattern in dynamic))

    def _under(self, dynamic: Mapping[str, Any], pattern: str) -> "GPTQ | None":
        """Returns the layout under a rule: "-:pattern" leaves a module in 16 bits, other rules change some fields."""
        raw = read_object(dynamic, pattern)
        if pattern.startswith("-:"):
            return None
        return replace(
            self,
            bits=read_choice(raw, "bits", self.bits, (4, 8)),
            group=read_group(raw, "group_size", self.group),
            desc_act=read_flag(raw, "desc_act", self.desc_act),
            sym=read_choice(raw, "sym", self.sym, (None, False, True)),
        )

    def _of(self, module: str) -> "GPTQ | None":
        """Returns the layout of one module: the first rule that matches decides."""
        for pattern, rule in self.rules:
            if match_pattern(pattern.removeprefix("-:").removeprefix("+:"), module):
                return rule
        return self

    def exempt(self, module: str) -> bool:
        if module == "lm_head":
            return not self.lm_head
        listed = not self.modules or any(module.endswith(f".{name}") for name in self.modules)
        return not listed or self._of(module) is None

    def wanted(self, module: str, shape: tuple[int, int]) -> dict[str, Wanted]:
        N, K = shape
        own = self._of(module) or self
        groups, each = groups_of(module, K, own.group), 32 // own.bits
        if N % each or K % each:
            raise CheckpointError(f"{module}: words hold {each} values, which do not divide {N} x {K}")
        return {
            "qweight": Wanted((K // each, N), ("I32",)),
            "qzeros": Wanted((groups, N // each), ("I32",)),
            "scales": Wanted((groups, N), FLOATS),
            "g_idx": Wanted((K,), ("I32", "I64"), optional=not own.desc_act),
            "bias": Wanted((N,), FLOATS, optional=True),
        }

    def read(self, module: str, shape: tuple[int, int], tensors: Mapping[str, np.ndarray]) -> QuantizedWeight:
        own = self._of(module) or self
        if "bias" in tensors and tensors["bias"].any():  # AutoGPTQ stores zeros where a layer has none
            raise CheckpointError(f"tensor {module}.bias is not zero, but the model has no such bias")
        codes = unpack_words(tensors["qweight"].T, own.bits)
        words = tensors["qzeros"].view(np.uint32)
        zeros = unpack_words(words + np.uint32(_ONES[own.bits] if own.version == 1 else 0), own.bits)
        _check_zeros(module, zeros, own)
        order = None
        if "g_idx" in tensors:
            order = input_order(f"{module}.g_idx", tensors["g_idx"], shape[1] // tensors["scales"].shape[0])
        if order is not None and not own.desc_act:
            raise CheckpointError(
                f"tensor {module}.g_idx reorders the inputs, but desc_act = false implies their own order"
            )
        return int_weight(
            module,
            signed(codes if order is None else codes[:, order], own.bits),
            tensors["scales"].T,
            signed(zeros, own.bits).T,
            own.bits,
            columns=order,
        )


def _check_zeros(module: str, zeros: np.ndarray, config: GPTQ) -> None:
    """Raises CheckpointError for zero points of another version.

    With sym, every zero point must be the middle. If the config has no sym, they must not all lie one beside the
    middle.
    """
    middle, version = 1 << (config.bits - 1), f"gptq{'_v2' * (config.version - 1)}"
    first = zeros[zeros != middle][:1]
    other, beside = ("gptq_v2", 1) if config.version == 1 else ("gptq", -1)
    if not first.size or config.sym is False or (config.sym is None and not (zeros == middle + beside).all()):
        return
    found = f"tensor {module}.qzeros holds zero point {first[0]}"
    if config.sym is None:
        raise CheckpointError(
            f"{found} everywhere, by checkpoint_format {version}, and {middle} by {other}: set checkpoint_format to "
            f'"{other}", or sym to false'
        )
    hint = f"; is it {other}?" if first[0] == middle + beside else ""
    raise CheckpointError(f"{found}, but sym = true implies {middle} everywhere (in checkpoint_format {version}{hint})")
