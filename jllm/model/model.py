"""Defines a model as a value: config, params and tokenizer."""

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax

from jllm.config import LlamaConfig
from jllm.model.params import Params, tree_bytes
from jllm.model.shards import share_params
from pallas_kernels.formats.quantized_weights import QuantizedWeight

if TYPE_CHECKING:
    from jllm.files.tokenizer import Tokenizer


@dataclass(frozen=True)
class Model:
    """Holds a model as `load` returns it: a plain value. Pass its params to jllm.step, or all of it to generate and
    Engine. Raises QuantizationError if the config's activation_parts would cut groups of its weights."""

    config: LlamaConfig
    params: Params
    tokenizer: "Tokenizer | None" = None

    def __post_init__(self) -> None:
        if self.config.activation_parts > 1:
            share_params(self.params, self.config)  # it checks the groups

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Returns the tokens that end an answer: the config's, then the tokenizer's."""
        return end_ids(self.config, self.tokenizer)

    def memory_footprint(self) -> dict[str, int]:
        """Returns the bytes of weights by kind, and their "total". "embedding", "head" and "linears" are matrices that
        are not quantized. "codes" and "scales" are those of quantized ones; scales include zero points and all else
        that decoding needs. The other kinds are "norms" and "biases"."""
        sizes: Counter[str] = Counter()
        leaves = jax.tree_util.tree_flatten_with_path(self.params, lambda leaf: isinstance(leaf, QuantizedWeight))[0]
        for path, leaf in leaves:
            if isinstance(leaf, QuantizedWeight):
                sizes["codes"] += tree_bytes(leaf.values)
                sizes["scales"] += tree_bytes(leaf) - tree_bytes(leaf.values)
            else:
                sizes[_kind(path[-1].name)] += tree_bytes(leaf)
        return {**sizes, "total": sum(sizes.values())}


def end_ids(config: LlamaConfig, tokenizer: Any) -> tuple[int, ...]:
    """Returns the end tokens that a model can draw: the config's, then the tokenizer's."""
    named = getattr(tokenizer, "eos_ids", ())  # a tokenizer of an experiment may lack them
    return tuple(id for id in dict.fromkeys([*config.eos_ids, *named]) if id < config.vocab_size)


def _kind(field: str) -> str:
    if field.endswith(("norm", "bias")):
        return "norms" if field.endswith("norm") else "biases"
    return {"embed": "embedding", "head": "head"}.get(field, "linears")
