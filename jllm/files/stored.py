"""A quantized weight as it lies in a checkpoint."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from pallas_kernels.formats.quantized_weights import QuantizedWeight


@dataclass(frozen=True)
class StoredWeight:
    """The tensors that make up one of our weights, and how.

    `tensors`: name in the files -> dtype as safetensors spells it, and shape, as config.json implies them: what the
    files have must agree. `build` makes the weight of those tensors, each an array of just that dtype and shape; it
    may raise CheckpointError for values that make no sense, naming the tensor.
    """

    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    build: Callable[[Mapping[str, np.ndarray]], QuantizedWeight]
