"""Runs functions of the caller inside a step.

    edit               changes any value that a tap names (jllm.model.taps) where the forward pass computes it
    add                adds a function of a linear layer's inputs to its outputs
    logits_processor   changes logits before penalties, filters and the draw
    observe            keeps any data about each sequence's tokens in State.user

All are pure and traced: arrays in, arrays out. A hook that treats each row by itself keeps a sequence's tokens
independent of the rest of the batch. A hook with arrays of its own is a callable pytree, such as
jax.tree_util.Partial(function, array). Other arrays then need no new compilation, and gradients reach them
(backbone.packed_logits). Arrays of a request's own are `inputs`, which hooks read by slot (HookRows.inputs).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jllm.errors import ConfigError, EvaluationError
from jllm.model.shapes import Array, Float, Int32, shaped
from jllm.model.taps import resolve_linear, resolve_taps
from pallas_kernels.one_order import fenced

Function = Callable[..., Any]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HookRows:
    """Holds the slot, index and token of each row of a value, and the arrays of all slots."""

    slot: jax.Array  # i32[rows], the sequence's batch slot; out of range for an unused row
    index: jax.Array  # i32[rows], the number of tokens before it in its sequence
    token: jax.Array  # i32[rows], the input token
    user: Any = None  # State.user: a pytree [S, ...], after the tokens of earlier steps
    inputs: Any = None  # State.inputs: a pytree [S, ...] of the requests' own arrays, which stay as they are
    layer: jax.Array | np.int32 | None = None  # i32[], the number of the value's layer; None outside of layers

    def own[T](self, values: T) -> T:
        """Returns values of slots [S, ...], such as `inputs`, for each row [rows, ...]."""
        return jax.tree.map(lambda x: x.at[self.slot].get(mode="clip"), values)


@dataclass(frozen=True, eq=False)
class InputShapes:
    """Describes the arrays that each request may bring: a pytree of shapes and dtypes. It can be static under jit."""

    tree: Any

    def __post_init__(self):
        for leaf in jax.tree.leaves(self.tree):
            if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
                raise ConfigError(f"hooks.inputs must be a pytree of jax.ShapeDtypeStruct, and one leaf is {leaf!r}")
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), self.tree)
        object.__setattr__(self, "tree", shapes)

    @property
    def named(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the leaves by name: the keys on the way to each, with dots between them. A sole leaf is "inputs"."""
        found = jax.tree_util.tree_flatten_with_path(self.tree)[0]
        return {jax.tree_util.keystr(path, simple=True, separator=".") or "inputs": leaf for path, leaf in found}

    def zeros(self, slots: int) -> Any:
        """Returns the initial State.inputs of S slots."""
        return jax.tree.map(lambda leaf: jnp.zeros((slots, *leaf.shape), leaf.dtype), self.tree)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, InputShapes) and jax.tree.flatten(self.tree) == jax.tree.flatten(other.tree)

    def __hash__(self) -> int:
        leaves, tree = jax.tree.flatten(self.tree)
        return hash((tree, *leaves))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Hooks:
    """Holds the functions that a step calls, and the initial user state of a sequence."""

    # Tap's name, in which * matches anything -> (value, HookRows) -> value of the same shape and dtype. A tap of the
    # same name returns the changed value.
    edit: Mapping[str, Function] = field(default_factory=dict)
    # A linear layer's name, such as layers.*.qkv (taps.LINEAR) -> (its inputs [T, inputs], HookRows) -> [T, outputs],
    # which is added to its outputs. Inputs are those before a rounding of activations.
    add: Mapping[str, Function] = field(default_factory=dict)
    # (logits f[rows, V], HookRows) -> logits. Log-probabilities are those of the logits before it.
    logits_processor: Function | None = None
    # (user [S, ...], slot i32[n], index i32[n], token i32[n]) -> user. A step calls it with all tokens that it adds to
    # sequences, by slot (out of range: no token), in order of their indices. Prompt tokens come before the step's
    # forward pass and drawn ones after it. After preemption all of them come again. Hooks with `inputs` give it
    # State.inputs as a fifth argument.
    observe: Function | None = None
    user: Any = None  # a pytree [...]: the user state of one slot when its sequence begins
    # A pytree of jax.ShapeDtypeStruct: the arrays that a request may bring. One that brings none has zeros.
    inputs: Any = field(default=None, metadata={"static": True})

    def __post_init__(self):
        for name in ("edit", "add"):
            if isinstance(given := getattr(self, name), Mapping):  # false while JAX rebuilds it from something else
                object.__setattr__(self, name, {pattern: _pytree(f) for pattern, f in given.items()})
        if not isinstance(self.inputs, InputShapes | None):
            object.__setattr__(self, "inputs", InputShapes(self.inputs))
        for name in ("logits_processor", "observe"):
            object.__setattr__(self, name, _pytree(getattr(self, name)))

    def start(self, slots: int) -> Any:
        """Returns the initial State.user of S slots."""
        return jax.tree.map(lambda x: jnp.repeat(jnp.asarray(x)[None], slots, axis=0), self.user)

    def no_inputs(self, slots: int) -> Any:
        """Returns the initial State.inputs of S slots."""
        return None if self.inputs is None else self.inputs.zeros(slots)

    @shaped
    def process(
        self, logits: Float[Array, "rows V"], rows: HookRows, *, drafts: bool, backend: str | None = None
    ) -> Float[Array, "rows V"]:
        """Returns logits after the processor. `drafts` is whether rows come after drafts, whose tokens are not drawn
        yet. Raises ConfigError for drafts with `observe`."""
        if drafts and self.observe is not None:
            raise ConfigError(
                "hooks.observe sees tokens once they are drawn, too late for drafts: take only one of the two"
            )
        if self.logits_processor is None:
            return logits
        return Edits({"logits_processor": self.logits_processor}, rows).apply("logits_processor", logits, backend)

    @shaped
    def see(
        self,
        user: Any,
        slot: Int32[Array, " n"],
        index: Int32[Array, " n"],
        token: Int32[Array, " n"],
        inputs: Any = None,
    ) -> Any:
        """Returns State.user after these tokens; see `observe`. A sequence's first token resets its slot's state."""
        if self.observe is None:
            return user
        first = jnp.where(index == 0, slot, jnp.iinfo(jnp.int32).max)
        user = jax.tree.map(lambda x, new: x.at[first].set(jnp.asarray(new), mode="drop"), user, self.user)
        own = () if self.inputs is None else (inputs,)
        return self.observe(user, slot, index, token, *own)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Edits:
    """Holds the edits and addends of a forward pass by resolved name, and the rows of the values that they change."""

    functions: dict[str, Function]
    rows: HookRows
    addends: dict[str, Function] = field(default_factory=dict)  # by the name of a linear layer

    def of_layer(self, layer: int) -> "Edits | None":
        """Returns those of one layer, without its prefix, or None if there are none."""
        prefix = f"layers.{layer}."
        found, added = (
            {name.removeprefix(prefix): f for name, f in some.items() if name.startswith(prefix)}
            for some in (self.functions, self.addends)
        )
        return Edits(found, replace(self.rows, layer=np.int32(layer)), added) if found or added else None

    def apply(self, name: str, value: Array, backend: str | None = None) -> Array:
        """Returns the value after its edit. Raises EvaluationError for an edit that changes shape or dtype."""
        if name not in self.functions:
            return value
        changed = self._run(self.functions[name], value, backend)
        got, want = jax.typeof(changed), jax.typeof(value)
        if (got.shape, got.dtype) != (want.shape, want.dtype):
            raise EvaluationError(f"edit of {name}: it must keep shape and dtype, but turns {want} into {got}")
        return changed

    def added(self, name: str, inputs: Array, shape: tuple[int, ...], backend: str | None = None) -> Array:
        """Returns what a linear layer's outputs of this shape get beside. Raises EvaluationError for another shape."""
        delta = self._run(self.addends[name], inputs, backend)
        if delta.shape != shape:
            got, want = list(delta.shape), list(shape)
            raise EvaluationError(f"addend of {name}: its shape must be that of the layer's outputs, {want}, not {got}")
        return delta

    def _run(self, f: Function, value: Array, backend: str | None) -> Array:
        """Returns f(value, rows). A deterministic backend runs it on tiles of rows on a CPU."""

        def run(value: Array, slot: Array, index: Array, token: Array) -> Array:
            return f(value, replace(self.rows, slot=slot, index=index, token=token))

        return fenced(backend, run, value, self.rows.slot, self.rows.index, self.rows.token)


def make_edits(
    edit: Mapping[str, Function], num_layers: int, rows: HookRows, add: Mapping[str, Function] = MappingProxyType({})
) -> Edits | None:
    """Returns the edits and addends by each name that their patterns match, or None if there are none. Raises
    EvaluationError for unknown names, for two of one value, and for attention weights, which no kernel keeps."""
    found, added = _by_name("edit", edit, num_layers, resolve_taps), _by_name("addend", add, num_layers, resolve_linear)
    if weights := next((name for name in found if name.endswith(".weights")), None):
        raise EvaluationError(f"edit of {weights}: attention weights can be tapped, not changed; edit q, k or v")
    return Edits(found, rows, added) if found or added else None


def _by_name(
    what: str, given: Mapping[str, Function], num_layers: int, resolve: Callable[..., Iterable[str]]
) -> dict[str, Function]:
    found: dict[str, Function] = {}
    for pattern, f in given.items():
        for name in resolve([pattern], num_layers):
            if name in found:
                raise EvaluationError(f"{what} of {name}: two patterns match it: {', '.join(_meant(given, name))}")
            found[name] = _pytree(f)
    return found


def _meant(patterns: Iterable[str], name: str) -> list[str]:
    return [pattern for pattern in patterns if fnmatchcase(name, pattern)]


def _pytree(f: Any) -> Any:
    """Returns a function as a pytree without leaves. A callable pytree is returned as it is."""
    if f is None or not jax.tree_util.all_leaves([f]) or not callable(f):
        return f
    return jax.tree_util.Partial(f)
