"""Reads AWQ checkpoints, as AutoAWQ and GPTQModel write them: 4-bit codes, versions "gemm" and "gemv".

A linear layer [N, K] with groups of g inputs, G = K/g of them, is stored as

| tensor | gemm | gemv |
|---|---|---|
| qweight | int32 [K, N/8], packed along N | int32 [N, K/8], packed along K |
| qzeros | int32 [G, N/8], packed along N | int32 [N, W], packed along groups |
| scales | float [G, N] | float [N, 8 W] |

w[n, k] = (code - zero) * scale, both of group k // g. A word holds 8 values, lowest bits first. In gemm these are
columns 0, 2, 4, 6, 1, 3, 5, 7; in gemv they are in order. W is G/8 rounded up, then up to a multiple of 2 at g = 64 and
of 4 at g = 32. Values beyond G are padding. Definition: AutoAWQ, awq/modules/linear/gemm.py and gemv.py (from_linear).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jllm.errors import CheckpointError
from jllm.files.importers.fields import read_choice, read_flag, read_group, read_names, refuse
from jllm.files.importers.foreign import FLOATS, Wanted
from jllm.quant.codes import groups_of, int_weight, signed, unpack_words
from pallas_kernels.formats.quantized_weights import QuantizedWeight

_PLACE = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # the place of column i in a word of gemm
# Other projects' names of the same fields.
_KEYS = {"w_bit": "bits", "q_group_size": "group_size", "checkpoint_format": "version", "format": "version"}


@dataclass(frozen=True)
class AWQ:
    """Is the layout that quantization_config in config.json, or quant_config.json, describes."""

    group: int  # -1: one group of all inputs
    zero_point: bool
    version: str
    plain: tuple[str, ...]  # parts of the names of modules stored in 16 bits
    mark: str = "qweight"

    @staticmethod
    def from_config(raw: Mapping[str, Any]) -> "AWQ":
        """Raises CheckpointError for unsupported fields, by name."""
        raw = {_KEYS.get(key, key): value for key, value in raw.items()}
        raw["version"] = str(raw.get("version") or "gemm").lower()
        read_choice(raw, "bits", 4, (4,))
        config = AWQ(
            group=read_group(raw, "group_size", 128),
            zero_point=read_flag(raw, "zero_point", True),
            version=read_choice(raw, "version", "gemm", ("gemm", "gemv")),
            plain=read_names(raw, "modules_to_not_convert"),
        )
        if config.version == "gemv" and config.group not in (-1, 32, 64) and config.group % 128:
            raise refuse(raw, "group_size", "-1, 32, 64 or a multiple of 128 with version gemv")
        return config

    def exempt(self, module: str) -> bool:
        return module == "lm_head" or any(name in module for name in self.plain)

    def wanted(self, module: str, shape: tuple[int, int]) -> dict[str, Wanted]:
        N, K = shape
        groups = groups_of(module, K, self.group)
        if self.version == "gemv":
            if K % 8:
                raise CheckpointError(f"{module}: words hold 8 values, which do not divide {K} columns")
            words = _words(groups, K if self.group == -1 else self.group)
            return {
                "qweight": Wanted((N, K // 8), ("I32",)),
                "qzeros": Wanted((N, words), ("I32",)),
                "scales": Wanted((N, 8 * words), FLOATS),
            }
        if N % 8:
            raise CheckpointError(f"{module}: words hold 8 values, which do not divide {N} rows")
        return {
            "qweight": Wanted((K, N // 8), ("I32",)),
            "qzeros": Wanted((groups, N // 8), ("I32",)),
            "scales": Wanted((groups, N), FLOATS),
        }

    def read(self, module: str, shape: tuple[int, int], tensors: Mapping[str, np.ndarray]) -> QuantizedWeight:
        codes, zeros = unpack_words(tensors["qweight"], 4), unpack_words(tensors["qzeros"], 4)
        scales = tensors["scales"]
        if self.version == "gemm":
            codes, zeros, scales = _straighten(codes).T, _straighten(zeros).T, scales.T
        else:
            groups = groups_of(module, shape[1], self.group)
            zeros, scales = zeros[:, :groups], scales[:, :groups]
        if not self.zero_point and (zeros != 8).any():
            found = int(zeros[zeros != 8][0])
            raise CheckpointError(f"tensor {module}.qzeros holds zero point {found}, but zero_point = false implies 8")
        return int_weight(module, signed(np.ascontiguousarray(codes), 4), scales, signed(zeros, 4), 4)


def _straighten(codes: np.ndarray) -> np.ndarray:
    """Undoes the order within words: [rows, N] -> [rows, N]."""
    return codes.reshape(codes.shape[0], -1, 8)[:, :, _PLACE].reshape(codes.shape)


def _words(groups: int, group: int) -> int:
    """Returns how many words a row of zero points has in version gemv."""
    multiple = {32: 4, 64: 2}.get(group, 1)
    return math.ceil(groups / (8 * multiple)) * multiple
