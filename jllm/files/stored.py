"""Describes a quantized weight as it lies in a checkpoint."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from pallas_kernels.formats.quantized_weights import QuantizedWeight


@dataclass(frozen=True)
class StoredWeight:
    """Names the tensors of one quantized weight in a checkpoint, and the function that builds it.

    `tensors` maps names in files to a dtype, as safetensors spells it, and a shape. config.json implies both, and the
    files must agree. `build` makes the weight from these tensors, each an array of exactly that dtype and shape. It may
    raise CheckpointError for invalid values, which names the tensor.
    """

    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    build: Callable[[Mapping[str, np.ndarray]], QuantizedWeight]
