"""A model as a value: config, params and tokenizer."""

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax

from jllm.config import LlamaConfig
from jllm.model.params import Params
from jllm.model.shards import share_params
from jllm.model.tree_bytes import tree_bytes
from pallas_kernels.formats.quantized_weights import QuantizedWeight

if TYPE_CHECKING:
    from jllm.files.tokenizer import Tokenizer


@dataclass(frozen=True)
class Model:
    """What load returns. A plain value: pass params to jllm.step, or the whole to generate and Engine. Raises
    QuantizationError for weights whose groups the config's activation_parts would cut."""

    config: LlamaConfig
    params: Params
    tokenizer: "Tokenizer | None" = None

    def __post_init__(self) -> None:
        if self.config.activation_parts > 1:
            share_params(self.params, self.config)  # which checks them

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Returns the tokens that end an answer: those of the config, then those that the tokenizer names."""
        return end_ids(self.config, self.tokenizer)

    def memory_footprint(self) -> dict[str, int]:
        """Returns bytes of weights by kind, and their "total": matrices that are not quantized ("embedding", "head",
        "linears"), "codes" and "scales" of those that are (with zero points and all else that decoding takes), "norms",
        "biases"."""
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
    """Returns the end tokens that a model can draw: those of its config, then those of its tokenizer."""
    named = getattr(tokenizer, "eos_ids", ())  # an experiment's own may lack them
    return tuple(id for id in dict.fromkeys([*config.eos_ids, *named]) if id < config.vocab_size)


def _kind(field: str) -> str:
    if field.endswith(("norm", "bias")):
        return "norms" if field.endswith("norm") else "biases"
    return {"embed": "embedding", "head": "head"}.get(field, "linears")
