"""Runs functions of the caller inside a step.

    edit               changes any value that a tap names (jllm.model.taps) where the forward pass computes it
    logits_processor   changes logits before penalties, filters and the draw
    observe            keeps any data about each sequence's tokens in State.user

All are pure and traced: arrays in, arrays out. A hook that treats each row by itself keeps a sequence's tokens
independent of the rest of the batch. A hook with arrays of its own is a callable pytree, such as
jax.tree_util.Partial(function, array). Other arrays then need no new compilation, and gradients reach them
(backbone.packed_logits).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp

from jllm.errors import ConfigError, EvaluationError
from jllm.model.shapes import Array, Float, Int32, shaped
from jllm.model.taps import resolve_taps

Function = Callable[..., Any]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HookRows:
    """Holds the slot, index and token of each row of a value."""

    slot: jax.Array  # i32[rows], the sequence's batch slot; out of range for an unused row
    index: jax.Array  # i32[rows], the number of tokens before it in its sequence
    token: jax.Array  # i32[rows], the input token
    user: Any = None  # State.user: a pytree [S, ...], after the tokens of earlier steps


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Hooks:
    """Holds the functions that a step calls, and the initial user state of a sequence."""

    # Tap's name, in which * matches anything -> (value, HookRows) -> value of the same shape and dtype. A tap of the
    # same name returns the changed value.
    edit: Mapping[str, Function] = field(default_factory=dict)
    # (logits f[rows, V], HookRows) -> logits. Log-probabilities are those of the logits before it.
    logits_processor: Function | None = None
    # (user [S, ...], slot i32[n], index i32[n], token i32[n]) -> user. A step calls it with all tokens that it adds to
    # sequences, by slot (out of range: no token), in order of their indices. Prompt tokens come before the step's
    # forward pass and drawn ones after it. After preemption all of them come again.
    observe: Function | None = None
    user: Any = None  # a pytree [...]: the user state of one slot when its sequence begins

    def __post_init__(self):
        if isinstance(self.edit, Mapping):  # false while JAX rebuilds it from something else
            object.__setattr__(self, "edit", {name: _pytree(f) for name, f in self.edit.items()})
        for name in ("logits_processor", "observe"):
            object.__setattr__(self, name, _pytree(getattr(self, name)))

    def start(self, slots: int) -> Any:
        """Returns the initial State.user of S slots."""
        return jax.tree.map(lambda x: jnp.repeat(jnp.asarray(x)[None], slots, axis=0), self.user)

    @shaped
    def process(self, logits: Float[Array, "rows V"], rows: HookRows, *, drafts: bool) -> Float[Array, "rows V"]:
        """Returns logits after the processor. `drafts` is whether rows come after drafts, whose tokens are not drawn
        yet. Raises ConfigError for drafts with `observe`."""
        if drafts and self.observe is not None:
            raise ConfigError(
                "hooks.observe sees tokens once they are drawn, too late for drafts: take only one of the two"
            )
        if self.logits_processor is None:
            return logits
        return Edits({"logits_processor": self.logits_processor}, rows).apply("logits_processor", logits)

    @shaped
    def see(self, user: Any, slot: Int32[Array, " n"], index: Int32[Array, " n"], token: Int32[Array, " n"]) -> Any:
        """Returns State.user after these tokens; see `observe`. A sequence's first token resets its slot's state."""
        if self.observe is None:
            return user
        first = jnp.where(index == 0, slot, jnp.iinfo(jnp.int32).max)
        user = jax.tree.map(lambda x, new: x.at[first].set(jnp.asarray(new), mode="drop"), user, self.user)
        return self.observe(user, slot, index, token)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Edits:
    """Holds the edits of a forward pass by resolved name, and the rows of the values that they change."""

    functions: dict[str, Function]
    rows: HookRows

    def of_layer(self, layer: int) -> "Edits | None":
        """Returns the edits of one layer, without its prefix, or None if there are none."""
        prefix = f"layers.{layer}."
        found = {name.removeprefix(prefix): f for name, f in self.functions.items() if name.startswith(prefix)}
        return Edits(found, self.rows) if found else None

    def apply(self, name: str, value: Array) -> Array:
        """Returns the value after its edit. Raises EvaluationError for an edit that changes shape or dtype."""
        if name not in self.functions:
            return value
        changed = self.functions[name](value, self.rows)
        got, want = jax.typeof(changed), jax.typeof(value)
        if (got.shape, got.dtype) != (want.shape, want.dtype):
            raise EvaluationError(f"edit of {name}: it must keep shape and dtype, but turns {want} into {got}")
        return changed


def make_edits(edit: Mapping[str, Function], num_layers: int, rows: HookRows) -> Edits | None:
    """Returns the edits by each name that their patterns match, or None if there are none. Raises EvaluationError for
    unknown names, for two edits of one value, and for attention weights, which no kernel keeps."""
    found: dict[str, Function] = {}
    for pattern, f in edit.items():
        for name in resolve_taps([pattern], num_layers):
            if name in found:
                raise EvaluationError(f"edit of {name}: two patterns match it: {', '.join(_meant(edit, name))}")
            if name.endswith(".weights"):
                raise EvaluationError(f"edit of {name}: attention weights can be tapped, not changed; edit q, k or v")
            found[name] = _pytree(f)
    return Edits(found, rows) if found else None


def _meant(patterns: Iterable[str], name: str) -> list[str]:
    return [pattern for pattern in patterns if fnmatchcase(name, pattern)]


def _pytree(f: Any) -> Any:
    """Returns a function as a pytree without leaves. A callable pytree is returned as it is."""
    if f is None or not jax.tree_util.all_leaves([f]) or not callable(f):
        return f
    return jax.tree_util.Partial(f)
