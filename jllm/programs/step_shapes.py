"""Describes the arguments of an engine's steps by shape, as its compiled programs need them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import jax
import numpy as np

from jllm.config import MAX_LOGIT_BIAS, LlamaConfig
from jllm.model.cache import COPIES, cache_bytes, jit_copy_pages
from jllm.model.hooks import Hooks
from jllm.model.params import Params
from jllm.parallel.ranks import HEADS, REPLICATED, STACKED, placed_shapes
from jllm.programs.compiler import Recipe
from jllm.programs.packed_step import FORWARD, WHOLE_STEP, Layout, packed_step
from jllm.programs.sizes import EngineSizes
from jllm.speculative.drafter import Drafter
from jllm.speculative.tree import Tree, chain
from jllm.step import between_steps
from jllm.step.between_steps import MASKS, PUT, put_arrays, put_masks
from jllm.step.buckets import Bucket
from jllm.step.state import SPREAD, State, Variant


@dataclass(frozen=True, eq=False)
class StepShapes:
    """Describes the arguments of all programs of an engine.

    Weights, drafter and hooks are the arrays that steps take. The other arguments are known by shape, adapters too.
    `home` is the device of the weights, if it is a single one. `chosen` means that the caller placed them there, not
    JAX; programs are then compiled for that device.
    """

    config: LlamaConfig
    sizes: EngineSizes
    params: Params
    state: State | None  # by shape, for plain steps; None on a device that runs no steps
    drafter: Drafter | None = None
    hooks: Hooks | None = None
    backend: str | None = None
    draw: Callable[..., Any] | None = None  # how steps draw tokens; None: the default
    always_drafts: bool = False  # the caller chose the number of drafts
    home: jax.Device | None = None
    chosen: bool = False
    adapters: Any = None  # Params.adapters

    def layout(self, bucket: Bucket, variant: Variant) -> Layout:
        """Returns the layout of a step. A step wants drafts if it verifies some. If few sequences decode, steps that
        begin sequences want them too."""
        limits = self.sizes.limits
        wanted = bucket.rows > 1 or (bucket.tokens > 0 and bucket.decodes <= limits.most_short)
        bias = MAX_LOGIT_BIAS if variant.penalties else 0
        tapped = min(limits.tap_rows or 0, bucket.size) if variant.taps else 0
        return Layout(bucket, limits.max_deltas, bias, wanted, tapped, self.adapters is not None)

    def tree(self, bucket: Bucket | None = None) -> Tree:
        """Returns the tree of each sequence's drafts in a step of this size (default: the largest)."""
        if self.drafter is None or (bucket is not None and bucket.rows == 1):
            return chain(0)
        return self.drafter.tree

    def drafter_in(self, bucket: Bucket) -> Drafter | None:
        """Returns the drafter for a step of this size, or None if the step needs none.

        With the automatic choice, plain steps compute no K and V for a drafter. That would cost time even where drafts
        never pay. The missing K and V only lower acceptance.
        """
        drafts = None if self.state is None else self.state.drafts
        rests = not self.always_drafts and drafts is not None and bool(drafts.cache)
        return None if rests and bucket.rows == 1 and not bucket.tokens else self.drafter

    def as_asked(self, state: State, variant: Variant) -> State:
        """Returns the state as steps of a variant take it."""
        return between_steps.as_asked(state, variant, self.config, self.tree(), self.home)

    def arguments(self, bucket: Bucket, variant: Variant, part: str) -> tuple[Any, ...]:
        """Returns a program's arguments, by shape where only the shape matters."""
        state = self._placed(self._state_of(variant), SPREAD)
        buffer = jax.ShapeDtypeStruct((self.layout(bucket, variant).size,), np.int32)
        adapters = self._placed(self.adapters, STACKED) if variant.adapters else None
        first = replace(self.params, adapters=adapters), state, buffer
        if part == FORWARD:
            return *first, None, self.hooks
        if part == WHOLE_STEP:
            return *first, self.drafter_in(bucket), self.hooks
        _, logits = packed_step.eval_shape(*first, None, self.hooks, **self.static(bucket, variant, FORWARD))
        return *first, self.drafter_in(bucket), self.hooks, self._placed(logits, REPLICATED)

    def static(self, bucket: Bucket, variant: Variant, part: str) -> dict[str, Any]:
        """Returns a program's static arguments."""
        layout = self.layout(bucket, variant)
        static = {"config": self.config, "layout": layout, "variant": variant, "backend": self.backend}
        drawing = {} if self.draw is None else {"draw": self.draw}
        return static | drawing if part == WHOLE_STEP else static | drawing | {"part": part}

    def copying(self) -> Recipe:
        """Returns the recipe of the function that copies pages."""
        assert self.state is not None
        pages = jax.ShapeDtypeStruct((COPIES, 2), np.int32)
        pools = between_steps.pools(self.state)
        pools = self._placed(pools, (HEADS, REPLICATED)[: len(pools)])
        return Recipe(partial(jit_copy_pages.lower, pools, pages), name="copies of pages")

    def masking(self, variant: Variant) -> list[Recipe]:
        """Returns the recipes of the functions that put masks into the state between the halves of a variant's
        steps."""
        guidance = self._state_of(variant).guidance
        if guidance is None:
            return []
        guidance, found = self._placed(guidance, REPLICATED), []
        for size, nodes in product(MASKS, {1, self.tree().size}):
            where, *new = (
                jax.ShapeDtypeStruct((size, *shape), dtype)
                for shape, dtype in (
                    ((), np.int32),
                    ((nodes, guidance.allowed.shape[2]), np.uint32),
                    (guidance.coming.shape[1:], np.int32),
                )
            )
            found.append(Recipe(partial(put_masks.lower, guidance, where, *new), name=f"{size} masks"))
        return found

    def putting(self) -> list[Recipe]:
        """Returns the recipes of the functions that put the inputs of requests into the state."""
        if self.state is None or self.state.inputs is None:
            return []
        inputs = self._placed(self.state.inputs, REPLICATED)

        def recipe(count: int) -> Recipe:
            new = jax.tree.map(lambda x: jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype), inputs)
            where = jax.ShapeDtypeStruct((count,), np.int32)
            return Recipe(partial(put_arrays.lower, inputs, where, new), name=f"inputs of {count}")

        return [recipe(1), recipe(PUT)]

    @property
    def pool_bytes(self) -> int:
        """Returns the bytes of one device's KV pages."""
        assert self.state is not None
        return cache_bytes(self.state.cache) // (1 if self.config.mesh is None else self.config.mesh.size)

    def _state_of(self, variant: Variant) -> State:
        return jax.eval_shape(lambda state: self.as_asked(state, variant), self.state)

    def _placed[T](self, shapes: T, spec: object) -> T:
        """Returns shapes with the placement that steps expect; `spec` is as in placed_shapes."""
        if not self.chosen:
            return placed_shapes(shapes, self.config, spec)
        on = jax.sharding.SingleDeviceSharding(self.home)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on), shapes)
