"""The least time that a step can take on a device: bytes at its bandwidth, operations at its peaks.

Each matrix counts with the larger of its bytes (its inputs and outputs among them) over the bandwidth and its
operations over the peak of its kind; each sequence's KV is read once; attention of prompts counts with its operations
where those take longer. All this is added up, as if nothing overlapped and nothing else cost anything.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import jax

from experiments.decode_step import HBM
from experiments.quant_steps import PEAKS
from jllm.config import LlamaConfig
from jllm.params import Params
from pallas_kernels.quantized_weights import QuantizedWeight

ATTENTION_PEAK = 652e12  # operations a second of causal attention: cuDNN's best on an H200 (1 x 16384, D = 128)


@dataclass(frozen=True)
class Matrix:
    """A product's weight [outputs, inputs]: its bytes with scales, and the operations a second of its kind."""

    nbytes: int
    outputs: int
    inputs: int
    input_bytes: int  # of one input
    peak: float

    def seconds(self, rows: int, bandwidth: float) -> float:
        moved = self.nbytes + rows * (self.inputs * self.input_bytes + 2 * self.outputs)  # outputs have 16 bits
        return max(moved / bandwidth, 2 * rows * self.inputs * self.outputs / self.peak)


@dataclass(frozen=True)
class Floor:
    """Of one model on one device."""

    linears: tuple[tuple[Matrix, int], ...]  # each different matrix of the layers, and how often it is there
    head: Matrix
    attention: int  # operations for one query on one key, all layers and heads
    bandwidth: float = HBM

    def seconds(self, tokens: int, rows: int, kv_bytes: float = 0.0, pairs: float = 0.0) -> float:
        """Of a step on `tokens` tokens, whose head runs on `rows` of them, and which reads so many bytes of the cache;
        `pairs` are the prompts' queries times the keys that each sees."""
        linears = sum(count * matrix.seconds(tokens, self.bandwidth) for matrix, count in self.linears)
        cache = max(kv_bytes / self.bandwidth, pairs * self.attention / ATTENTION_PEAK)
        return linears + self.head.seconds(rows, self.bandwidth) + cache


def make_floor(params: Params, config: LlamaConfig, bandwidth: float = HBM) -> Floor:
    """The floor of these weights; their shapes (jax.eval_shape) are enough."""
    layers = (matrix(w) for layer in params.layers for w in (layer.qkv, layer.o, layer.gate_up, layer.down))
    head = matrix(params.embed if params.head is None else params.head)
    attention = 4 * config.num_layers * config.num_heads * config.head_dim
    return Floor(tuple(Counter(layers).items()), head, attention, bandwidth)


def matrix(weight: Any) -> Matrix:
    activations = weight.format.activations if isinstance(weight, QuantizedWeight) else None
    return Matrix(tree_bytes(weight), *weight.shape, 1 if activations else 2, PEAKS[activations])


def tree_bytes(tree: Any) -> int:
    """Bytes of all arrays, or of their shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
