"""Fits new weights to the programs of an engine, so that none is compiled anew.

JAX compiles a program again for an array of another dtype, sharding or layout, for a weak type, and for an array that
was put on a device by the caller where the one before was not (`committed`). Here each new leaf becomes like the leaf
in its place. Nothing is copied unless a leaf lies elsewhere, has another layout, or is numpy's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.array import ArrayImpl
from jax.experimental.layout import Format, Layout

from jllm.config import LlamaConfig
from jllm.errors import QuantizationError, WeightsError
from jllm.model.hooks import Hooks
from jllm.model.params import Params
from jllm.quant.quantize import encode_params, formats_by_weight, quantize, that_fit, weight_formats
from jllm.quant.schemes import Formats
from jllm.speculative.drafter import Drafter
from jllm.speculative.quantized_copy import QuantizedCopy
from pallas_kernels.formats.quantized_weights import QuantizedWeight

ARRAYS = jax.Array, np.ndarray, np.generic  # np.float32(1) too, as hooks may hold


class Leaf(NamedTuple):
    """Describes an array as programs take it."""

    aval: Any  # its shape and dtype, and whether its type is weak
    sharding: jax.sharding.Sharding
    committed: bool
    layout: Layout | None = None  # None: any
    own_layout: Any = None  # the same in the runtime's words, which are faster to compare

    @classmethod
    def of(cls, x: jax.Array | np.ndarray) -> "Leaf":
        array: Any = x if isinstance(x, jax.Array) else jnp.asarray(x)
        layout = array.format.layout
        return cls(array.aval, array.sharding, array.committed, layout, layout and array._pjrt_layout)

    def is_like(self, x: Any) -> bool:
        """Returns whether x is such an array already, as the weights of a training loop mostly are."""
        return (
            isinstance(x, ArrayImpl)
            and self.own_layout is not None
            and not x.is_deleted()
            and (x.aval, x.committed) == (self.aval, self.committed)
            and (x.sharding is self.sharding or x.sharding == self.sharding)  # comparing takes longest
            and x._pjrt_layout == self.own_layout  # type: ignore[attr-defined]
        )

    def take(self, name: str, x: Any, copy: bool) -> jax.Array:
        """Returns x as this array. Raises WeightsError, with its name, for another shape or dtype."""
        if not copy and self.is_like(x):
            return x
        self.check(name, x)
        if not isinstance(x, jax.Array):
            x = jax.device_put(np.array(x), self.sharding)
        elif copy:
            x = jax.device_put(x, self.sharding, may_alias=False)
        elif x.sharding != self.sharding:
            x = jax.device_put(x, self.sharding)
        if self.layout is not None and x.format.layout != self.layout:
            x = jax.device_put(x, Format(self.layout, self.sharding))
        if x.committed != self.committed or x.weak_type != self.aval.weak_type:
            x = ArrayImpl(self.aval, x.sharding, [one.data for one in x.addressable_shards], self.committed)
        return x

    def check(self, name: str, x: Any) -> None:
        """Raises WeightsError, with the name, where x has another shape or dtype, or is gone."""
        check_there(name, x, ", or copy=True before donating")
        if not isinstance(x, ARRAYS) or (x.shape, x.dtype) != (self.aval.shape, self.aval.dtype):
            raise WeightsError(f"{name} must be {self.aval.str_short()}, as the engine has it, not {_short(x)}")


def check_there(name: str, x: Any, otherwise: str = "") -> None:
    """Raises WeightsError, with the name, for an array that is gone or traced. `otherwise` is another way out."""
    if isinstance(x, jax.core.Tracer):
        raise WeightsError(f"{name} is traced: update() takes arrays, so call it outside of jit, grad and vmap")
    if isinstance(x, jax.Array) and x.is_deleted():
        raise WeightsError(f"{name} was donated or deleted: give weights that exist{otherwise}")


@dataclass(frozen=True)
class Fit:
    """Describes the weights that an engine's programs take."""

    tree: Any
    leaves: tuple[Leaf, ...]
    names: tuple[str, ...]

    @classmethod
    def to(cls, tree: Any) -> "Fit":
        """Returns the description of a pytree of arrays."""
        found = jax.tree_util.tree_flatten_with_path(tree)[0]
        return cls(jax.tree.structure(tree), tuple(Leaf.of(leaf) for _, leaf in found), _names(found))

    def take(self, given: Any, copy: bool = False) -> Any:
        """Returns a pytree as programs take it. Raises WeightsError for another one."""
        pairs = self._pairs(given)
        taken = [leaf.take(name, x, copy) for name, leaf, x in pairs]
        if isinstance(given, Params) and all(x is new for (_, _, x), new in zip(pairs, taken)):
            return given  # hooks may hold dicts, which their owner changes
        return jax.tree.unflatten(jax.tree.structure(given), taken)  # the given tree tells where its codes are from

    def check(self, given: Any) -> None:
        """Raises WeightsError for a pytree that `take` and `replace` refuse."""
        for name, leaf, x in self._pairs(given):
            leaf.check(name, x)

    def replace(self, old: Any, given: Any) -> Any:
        """Returns a pytree as programs take it, in the memory of `old`, which is donated one array after the other.
        Where an earlier call failed halfway, a part of `old` is gone."""

        def put(name: str, leaf: Leaf, x: Any, before: jax.Array) -> jax.Array:
            taken = leaf.take(name, x, False)
            return taken if before.is_deleted() else leaf.take(name, _moved(before, taken), False)

        rows = zip(self._pairs(given), jax.tree.leaves(old), strict=True)
        return jax.tree.unflatten(jax.tree.structure(given), [put(*each, before) for each, before in rows])

    def _pairs(self, given: Any) -> list[tuple[str, Leaf, Any]]:
        """Returns each leaf with its name and description. Raises WeightsError for another structure."""
        leaves, tree = jax.tree.flatten(given)
        if tree != self.tree:
            raise WeightsError(self._difference(given))
        return list(zip(self.names, self.leaves, leaves, strict=True))

    def _difference(self, given: Any) -> str:
        """Returns how the structure of a pytree differs."""
        theirs = _names(jax.tree_util.tree_flatten_with_path(given)[0])
        missing = [name for name in self.names if name not in theirs]
        added = [name for name in theirs if name not in self.names]
        if any(name.endswith(".values") for name in missing):
            return (
                f"{missing[0]} is missing: the engine's weights are quantized, so give quantize= or quantized weights"
            )
        if missing:
            return f"{missing[0]} is missing, which the engine's weights have"
        if added:
            return f"{added[0]} is there, which the engine's weights do not have"
        return "the weights have the names of the engine's, but other types or formats: make them as the engine's were"


@dataclass(frozen=True)
class Weights:
    """Holds new weights that fit an engine, before it takes them."""

    params: Params  # in 16 or 32 bits where formats are given
    drafter: Drafter | None
    hooks: Hooks | None = None  # None: the engine's
    formats: Mapping[str, Formats] | None = None  # by name, the formats in which the engine rounds them
    replaces: bool = False  # the params go where the engine's are, which nobody else holds
    copied: int = 0  # bytes of arrays that had to be copied
    seconds: float = 0.0  # that fitting took

    @property
    def gone(self) -> bool:
        """Returns whether one of the arrays was donated or deleted after the weights were fitted."""
        leaves = jax.tree.leaves((self.params, self.drafter, self.hooks))
        return any(leaf.is_deleted() for leaf in leaves if isinstance(leaf, jax.Array))

    def after(self, old: Params, drafter: Drafter | None, fit: Fit) -> tuple[Params, Drafter | None]:
        """Returns the params as the engine's programs take them, and the drafter after the update. New codes go where
        those of `old` are, and so do a quantized copy's and all params that replace the engine's."""
        params = given = fit.replace(old, self.params) if self.replaces else self.params
        if self.formats is not None:
            params = _round(old, given, self.formats)
        if self.drafter is None and isinstance(drafter, QuantizedCopy):
            return params, QuantizedCopy(_round(drafter.params, given, formats_of(drafter.params)), drafter.tree)
        return params, drafter if self.drafter is None else self.drafter


def copied_bytes(given: Any, taken: Any) -> int:
    """Returns the bytes of the arrays of a pytree that do not lie where the given ones do."""
    pairs = zip(jax.tree.leaves(given), jax.tree.leaves(taken), strict=True)
    return sum(new.nbytes for old, new in pairs if new is not old and _places(old) != _places(new))


def _places(x: Any) -> list[tuple[Any, int]] | None:
    if not isinstance(x, jax.Array):
        return None
    return [(one.device, one.data.unsafe_buffer_pointer()) for one in x.addressable_shards]


def check_remade(copy: QuantizedCopy, config: LlamaConfig) -> None:
    """Raises WeightsError for a copy that rounding other weights does not make again."""
    coded = [w for w in jax.tree.leaves(copy.params, is_leaf=_is_quantized) if _is_quantized(w)]
    if config.mesh is not None or any(w.input_scale is not None or w.columns is not None for w in coded):
        where = "is calibrated" if config.mesh is None else "is on a mesh"
        raise WeightsError(f"the quantized copy that drafts {where}, and is not made again here: give drafter=")


def formats_of(params: Params) -> dict[str, Formats]:
    """Returns the format of each quantized weight by name, as formats_by_weight does for a scheme."""
    return {name: (fmt,) for name, fmt in weight_formats(params).items()}


def fit_to_round(fit: Fit, params: Params, scheme: str, config: LlamaConfig) -> tuple[Fit, dict[str, Formats]]:
    """Returns the description of weights that a scheme rounds to the engine's, and the formats. Raises WeightsError for
    a scheme or for params that give others."""
    if config.mesh is not None:
        raise WeightsError("quantize is for one device: quantize weights on a mesh first, and give them without it")
    leaves, tree = jax.tree.flatten(params)
    if not all(isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves) or not isinstance(params, Params):
        raise WeightsError(f"quantize rounds Params of arrays, not {type(params).__name__}")
    abstract = jax.tree.unflatten(tree, [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves])
    try:
        made = quantize(abstract, scheme, config=config)
        formats = that_fit(formats_by_weight(abstract, scheme), config)
    except QuantizationError as error:
        raise WeightsError(f"quantize={scheme!r}: {error}") from None
    got = jax.tree.structure(made), [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(made)]
    if got != (fit.tree, [(leaf.aval.shape, leaf.aval.dtype) for leaf in fit.leaves]):
        raise WeightsError(f"quantize={scheme!r} does not give the engine's weights from these: give what made them")
    here = fit.leaves[0]
    taken = (Leaf(jax.typeof(leaf), here.sharding, here.committed) for leaf in jax.tree.leaves(abstract))
    return Fit(tree, tuple(taken), _names(jax.tree_util.tree_flatten_with_path(params)[0])), formats


def _round(old: Params, params: Params, formats: Mapping[str, Formats]) -> Params:
    coded = [leaf for leaf in jax.tree.leaves(old, is_leaf=_is_quantized) if _is_quantized(leaf)]
    codes = [x for x in jax.tree.leaves(coded) if not x.is_deleted()]
    return _rounded(codes, params, tuple(sorted(formats.items())))


@partial(jax.jit, static_argnums=2, donate_argnums=0, keep_unused=True)
def _rounded(codes: list[jax.Array], params: Params, formats: tuple[tuple[str, Formats], ...]) -> Params:
    """Returns rounded params in the memory of `codes`."""
    return encode_params(params, dict(formats))


@partial(jax.jit, donate_argnums=0, keep_unused=True)
def _moved(old: jax.Array, x: jax.Array) -> jax.Array:
    """Returns x in the memory of `old`."""
    return x


def _names(found: list[tuple[Any, Any]]) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr(path).lstrip(".") for path, _ in found)


def _is_quantized(leaf: Any) -> bool:
    return isinstance(leaf, QuantizedWeight)


def _short(x: Any) -> str:
    # jax.typeof calls NumPy's float64 what JAX would make of it.
    named = isinstance(x, ARRAYS)
    return f"{x.dtype}[{','.join(map(str, x.shape))}]" if named else type(x).__name__
