"""Simulates steps that verify drafts, with imposed acceptance, and times them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.steps.timer import Pool, StepTimer
from jllm.config import LlamaConfig
from jllm.model.params import Params
from jllm.model.sampling import Sampling, sample
from jllm.programs.packed_step import Layout
from jllm.speculative.drafter import Advance, Drafter, Drafts, Proposal
from jllm.speculative.tree import Tree
from jllm.step.buckets import Bucket
from jllm.step.state import State, init_drafts

DRAWN, OTHER = 1, 0  # the token that every step draws, and one that none draws


def draw(
    logits: jax.Array, sampling: Sampling, index: jax.Array, *, backend: str | None
) -> tuple[jax.Array, jax.Array]:
    """Draws like sampling.sample, then replaces the result by the token DRAWN."""
    tokens, finite = sample(logits, sampling, index, backend=backend)
    return jnp.where(tokens < 0, tokens, DRAWN), finite


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Imposed:
    """A Drafter that takes no time. It accepts a node with a given probability, if its parent is accepted. A hash of
    the slot, the newest token's index and the node decides."""

    acceptance: jax.Array  # f32[Q - 1]
    tree: Tree = field(metadata={"static": True})

    def init(
        self, config: LlamaConfig, dtype: Any, *, slots: int, num_pages: int, page_size: int, max_tokens: int
    ) -> tuple[tuple[()], tuple[()]]:
        return (), ()

    def remember(self, memory: Any, slot: jax.Array, tokens: jax.Array, start: jax.Array, count: jax.Array) -> Any:
        return memory

    def propose(
        self,
        drafts: Drafts,
        advance: Advance,
        params: Params,
        *,
        config: LlamaConfig,
        backend: str | None,
        wanted: bool = True,
    ) -> Proposal:
        count = self.tree.size - 1
        newest, node = (advance.start + advance.count)[:, None], jnp.arange(count, dtype=jnp.uint32)[None, :]
        key = (newest.astype(jnp.uint32) * 1009 + advance.slot.astype(jnp.uint32)[:, None]) * 64 + node
        share = (_hash(key) >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)
        found = jnp.where(share < self.acceptance[None, :], DRAWN, OTHER).astype(jnp.int32)
        return Proposal(found, jnp.full(newest.shape[0], count, jnp.int32), (), ())


def _hash(x: jax.Array) -> jax.Array:
    for multiplier in (0x7FEB352D, 0x846CA68B):
        x = (x ^ (x >> 16)) * jnp.uint32(multiplier)
    return x ^ (x >> 15)


def imposed(tree: Tree, acceptance: float | Sequence[float]) -> Imposed:
    """Returns a drafter with the same acceptance for all nodes, or one for each."""
    return Imposed(jnp.broadcast_to(jnp.asarray(acceptance, jnp.float32), (tree.size - 1,)), tree)


class VerifyingTimer(StepTimer):
    """A StepTimer whose steps verify a tree of drafts for each slot. `drafter` may be replaced by another with the same
    tree."""

    def __init__(
        self, params: Params, config: LlamaConfig, pool: Pool, backend: str | None = None, *, drafter: Drafter
    ):
        super().__init__(params, config, pool, backend)
        self.drafter = drafter

    def _with_drafts(self, state: State) -> State:
        return replace(state, drafts=init_drafts(self.drafter, state, self.config, self.params.dtype))

    def renew(self) -> None:
        super().renew()
        assert self.state is not None
        self.state = self._with_drafts(self.state)

    def call(self, layout: Layout) -> tuple[tuple[Any, ...], dict[str, Any]]:
        state = jax.eval_shape(lambda: self._with_drafts(self.pool.state(self.config, self.params.dtype)))
        buffer = jax.ShapeDtypeStruct((layout.size,), np.int32)
        static = {"config": self.config, "layout": layout, "backend": self.backend, "draw": draw}
        return (self.params, state, buffer, self.drafter), static

    def run(self, step: Callable[..., Any], buffers: Sequence[jax.Array]) -> jax.Array:
        for buffer in buffers:
            self.state, outputs = step(self.params, self.state, buffer, self.drafter)
        return outputs.tokens


def verifying_step(batch: int, tree: Tree) -> tuple[Layout, np.ndarray]:
    """Returns layout and buffer of a step in which every slot verifies all of its drafts."""
    layout = Layout(Bucket(batch, 0, 0, tree.size), deltas=8)
    buffer, fields = layout.pack()
    fields.decode_slot[:], fields.decode_rows[:] = range(batch), tree.size
    return layout, buffer
