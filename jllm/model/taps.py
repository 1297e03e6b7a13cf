"""Names the values inside a forward pass. Taps return them, and hooks (hooks.py) change them.

A name is one of TOP, or `layers.I.` and one of LAYER or EXPERTS. `*` matches anything, as in `layers.*.attention`,
except the values of NAMED. These must be named: attention weights are large, and only experts have a router. If the
reader of a value has quantized activations, the value is that before the rounding. Rows are those of the step: R Q rows
of short segments, then C prompt tokens. The head's values have the rows that the head runs on.

A layer with a tap or an edit inside its blocks runs one operation at a time (Tap.open). In 16 bits it may round
differently from the fused operations of a step without taps. Those of SEEN round as without taps.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from jllm.errors import EvaluationError
from jllm.parallel.values import gathered, own_part
from pallas_kernels.formats.numerics import compute_dtype

if TYPE_CHECKING:
    from jax import Array

    from jllm.config import LlamaConfig
    from jllm.model.hooks import Edits, Function

LAYER = {  # in order of computation
    "input": "[T, E] the residual stream before the layer",
    "attn_norm": "[T, E] the input of the query, key and value projections",
    "qkv": "[T, (H + 2K) D] the output of the query, key and value projections",
    "q": "[T, H, D] queries, rotated",
    "k": "[T, K, D] keys, rotated, before they are stored",
    "v": "[T, K, D] values, before they are stored",
    "weights": "[T, H, keys] attention weights, float32 at least; 0 for keys that a query does not see",
    "attention": "[T, H D] the input of the output projection",
    "middle": "[T, E] the residual stream between attention and MLP",
    "mlp_norm": "[T, E] the input of the gate and up projections",
    "gate_up": "[T, 2F] the output of the gate and up projections",
    "silu_mul": "[T, F] SiLU(gate) * up, or GELU: the input of the down projection",
    "output": "[T, E] the residual stream after the layer",
}
TOP = {
    "embedding": "[T, E]",
    "norm": "[rows, E] the input of the head",
    "logits": "[rows, V]",
}
LINEAR = {  # linear layers that take addends (hooks.py), by the fields of their params -> the tap that each reads
    "qkv": "attn_norm",
    "o": "attention",
    "gate_up": "mlp_norm",
    "down": "silu_mul",
}
ROWS_OF_HEAD = ("norm", "logits")  # the names of TOP that have the rows of the head
SEAMS = ("input", "middle", "output")  # the names of LAYER outside a layer's two blocks
EXPERTS = {  # of a Mixture of Experts, after mlp_norm; such a layer has neither gate_up nor silu_mul
    "router": "[T, X] the experts' scores, before softmax",
    "routes": "[T, k] i32, the numbers of the experts that compute each token; -1: none",
}
NAMED = ("weights", *EXPERTS)
SEEN = (*SEAMS, *EXPERTS)  # that no operation hides
NEAR = 4  # names that an error suggests


@dataclass(frozen=True)
class Tap:
    """Collects the named values of one layer and changes those with edits, while the layer is traced.

    `q = tap("q", q)` stands where a layer has a value of that name.
    """

    names: tuple[str, ...]  # without the layer's prefix
    edits: "Edits | None" = None  # by names without the prefix
    config: "LlamaConfig | None" = None  # that of a device's share of a model on a mesh
    backend: str | None = None
    found: "dict[str, Array]" = field(default_factory=dict)
    edited: set[str] = field(default_factory=set)

    @property
    def open(self) -> bool:
        """Returns whether a value inside a block is tapped, edited or added to, which a fused operation could hide."""
        return any(name not in SEEN for name in (*self.names, *self._edits)) or bool(self._addends)

    @property
    def _edits(self) -> "dict[str, Function]":
        return {} if self.edits is None else self.edits.functions

    @property
    def _addends(self) -> "dict[str, Function]":
        return {} if self.edits is None else self.edits.addends

    def wants(self, name: str) -> bool:
        return name in self.names

    def __call__(self, name: str, value: "Array") -> "Array":
        """Returns the value after its edit, and keeps it if it is tapped."""
        if self.edits is not None and name in self._edits:
            whole = self.edits.apply(name, self._whole(name, value), self.backend)
            value = whole if self.config is None else own_part(name, whole, self.config)
            self.edited.add(name)
        if self.wants(name):
            self.found[name] = self._whole(name, value)
        return value

    def add(self, name: str, inputs: "Array", outputs: "Array") -> "Array":
        """Returns a linear layer's outputs, plus what the hooks add for these inputs."""
        if self.edits is None or name not in self._addends:
            return outputs
        self.edited.add(f"{name} +")
        whole = self._whole(name, outputs).shape
        delta = self.edits.added(name, self._whole(LINEAR[name], inputs), whole, self.backend)
        delta = delta if self.config is None else own_part(name, delta, self.config)
        wide = compute_dtype(outputs.dtype)
        return (outputs.astype(wide) + delta.astype(wide)).astype(outputs.dtype)

    def check_edits(self) -> None:
        """Raises EvaluationError for an edit of a value, or an addend to a linear layer, that this kind of layer does
        not have."""
        for name in self._edits:
            if name not in self.edited:
                raise EvaluationError(f"edit of layers.*.{name}: one of the layers has no such value")
        for name in self._addends:
            if f"{name} +" not in self.edited:
                raise EvaluationError(f"addend of layers.*.{name}: one of the layers has no such linear layer")

    def _whole(self, name: str, value: "Array") -> "Array":
        return value if self.config is None else gathered(name, value, self.config)


def tap_names(num_layers: int) -> list[str]:
    """Returns every name, layer by layer."""
    layers = [f"layers.{i}.{name}" for i in range(num_layers) for name in (*LAYER, *EXPERTS)]
    return ["embedding", *layers, "norm", "logits"]


def resolve_taps(patterns: Sequence[str], num_layers: int) -> tuple[str, ...]:
    """Returns the names that patterns match, layer by layer. Raises EvaluationError for a pattern without a
    match, with similar names."""
    if isinstance(patterns, str):
        raise EvaluationError(f"taps are a list of names, not the string {patterns!r}")
    known = tap_names(num_layers)
    for pattern in patterns:
        if not any(_means(pattern, name) for name in known):
            raise EvaluationError(_unknown(pattern, num_layers, known))
    return tuple(name for name in known if any(_means(pattern, name) for pattern in patterns))


def resolve_linear(patterns: Sequence[str], num_layers: int) -> tuple[str, ...]:
    """Returns the names of linear layers that patterns match, layer by layer. Raises EvaluationError for a pattern
    without a match."""
    known = [f"layers.{i}.{name}" for i in range(num_layers) for name in LINEAR]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in known):
            what = f"the model has layers 0 .. {num_layers - 1}, each with {', '.join(LINEAR)}"
            raise EvaluationError(f"unknown linear layer {pattern!r}; {what}")
    return tuple(name for name in known if any(fnmatchcase(name, pattern) for pattern in patterns))


def tap_numbers(name: str, config: "LlamaConfig") -> int:
    """Returns how many numbers a row of a named value has. Raises EvaluationError for attention weights, which have one
    for each key."""
    value, axes = name.rpartition(".")[2], config.axes
    if value == "weights":
        raise EvaluationError(
            f"tap {name}: attention weights are too large to keep; jllm.analysis.activations has them"
        )
    heads, pairs = axes["heads"] * config.head_dim, axes["kv_heads"] * config.head_dim
    chosen = 0 if config.experts is None else config.experts.chosen
    sizes = {"qkv": heads + 2 * pairs, "q": heads, "k": pairs, "v": pairs, "attention": heads}
    sizes |= {"gate_up": 2 * config.intermediate_size, "silu_mul": config.intermediate_size, "routes": chosen}
    sizes |= {"logits": config.vocab_size, "router": 0 if config.experts is None else config.experts.count}
    return sizes.get(value, config.hidden_size)


def _means(pattern: str, name: str) -> bool:
    value = name.rpartition(".")[2]
    return fnmatchcase(name, pattern) and (value not in NAMED or pattern.endswith(value))


def of_layer(names: Sequence[str], layer: int) -> tuple[str, ...]:
    """Returns the names of one layer, without its prefix."""
    prefix = f"layers.{layer}."
    return tuple(name.removeprefix(prefix) for name in names if name.startswith(prefix))


def _unknown(pattern: str, num_layers: int, known: list[str]) -> str:
    parts = pattern.split(".")
    if len(parts) == 3 and parts[0] == "layers" and parts[1].isdecimal() and int(parts[1]) >= num_layers:
        return f"tap {pattern!r}: the model has layers 0 .. {num_layers - 1}"
    of_layers = [*LAYER, *EXPERTS]
    close = get_close_matches(pattern, [*known, *of_layers], NEAR, 0.5)
    names = dict.fromkeys(f"layers.*.{name}" if name in of_layers else name for name in close)
    every = f"names: {', '.join(TOP)}, layers.I. and {', '.join(of_layers)}"
    hint = f"near ones: {', '.join(names)}" if names else every
    return f"unknown tap {pattern!r}; {hint}"
