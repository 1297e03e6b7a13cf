"""Lays out the rows that the head runs on, and reads them as sequences after the forward pass.

R short segments of Q rows come first, then the last row of each of B chunks. A segment's rows are a tree of drafts with
the newest token at its root. W = 1 + the tree's depth is the most tokens that a segment may draw. In plain decoding Q
and W are 1.
"""

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np

from jllm.model.paged import Chunks, Paged, ShortSegments, chunk_of_row, paged_batch
from jllm.speculative.accept import accept, drafts_before
from jllm.speculative.drafter import Drafts
from jllm.speculative.tree import Tree, chain
from jllm.step.batch import RaggedBatch
from jllm.step.state import Slots


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HeadRows:
    """Holds the R Q + B rows that the head runs on, and their R + B sequences."""

    slot: jax.Array  # i32[R + B], clipped into range
    target_slot: jax.Array  # i32[R + B], out of range where no token is drawn
    valid: jax.Array  # bool[R + B], whether tokens are drawn
    written: jax.Array  # bool[R + B], whether the slot's length changes
    start: jax.Array  # i32[R + B], the token index of the first token drawn: its sequence's length before
    tokens: jax.Array  # i32[R, Q], the inputs of the short segments
    used: jax.Array  # i32[R], the number of valid ones
    tree: Tree = field(metadata={"static": True})  # of the Q rows

    @property
    def most(self) -> int:
        """Returns W, the most tokens that a short segment may draw."""
        return self.tree.depth + 1

    def of_slots[T](self, values: T) -> T:
        """Returns values of slots [S, ...] as a row for each sequence [R + B, ...]."""
        return jax.tree.map(lambda x: x[self.slot], values)

    def spread[T](self, values: T) -> T:
        """Returns values of sequences [R + B, ...] for each of the head's rows [R Q + B, ...]."""
        if self.tree.size == 1:
            return values
        R, B = self.used.shape[0], self.slot.shape[0] - self.used.shape[0]
        of = np.concatenate([np.repeat(np.arange(R), self.tree.size), R + np.arange(B)])
        return jax.tree.map(lambda x: x[of], values)

    @property
    def index(self) -> jax.Array:
        """Returns i32[R Q + B], the token index of the token that each row draws."""
        if self.tree.size == 1:
            return self.start
        R, B = self.used.shape[0], self.slot.shape[0] - self.used.shape[0]
        depths = np.concatenate([np.tile(np.asarray(self.tree.depths, np.int32), R), np.zeros(B, np.int32)])
        return self.spread(self.start) + depths

    def of_nodes(self, values: jax.Array) -> jax.Array:
        """Returns values of sequences' nodes [R + B, nodes, ...] by the head's rows [R Q + B, ...]."""
        (R, Q), rest = self.tokens.shape, values.shape[2:]
        return jnp.concatenate([values[:R, :Q].reshape(R * Q, *rest), values[R:, 0]])

    def accept(self, drawn: jax.Array, possible: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        """Returns the nodes i32[R, W] that each segment reaches, and the token count i32[R + B] of each sequence.
        `drawn` i32[R Q + B] are the drawn tokens. A draft is not accepted where its row is not `possible` bool[R Q +
        B]. There no token is allowed after it."""
        R, Q = self.tokens.shape
        drafted = self.tokens
        if possible is not None:
            drafted = jnp.where(possible[: R * Q].reshape(R, Q), drafted, -1)
        nodes, count = accept(self.tree, drafted, drawn[: R * Q].reshape(R, Q), self.used)
        return nodes, jnp.concatenate([count, self.valid[R:].astype(jnp.int32)])

    def drafts_before(self) -> jax.Array | None:
        """Returns the drafts before each of the head's rows, i32[R Q + B, D], padded with -1. It is None if Q is 1."""
        if self.tree.size == 1:
            return None
        drafts = drafts_before(self.tree, self.tokens)
        drafts = drafts.reshape(-1, drafts.shape[2])
        return jnp.pad(drafts, ((0, self.slot.shape[0] - self.used.shape[0]), (0, 0)), constant_values=-1)

    def by_sequence(self, values: jax.Array, nodes: jax.Array) -> jax.Array:
        """Returns values of the head's rows [R Q + B, ...] by sequence [R + B, W, ...]. Segments have their nodes
        i32[R, W]. Chunks have one value, in the first column."""
        if self.tree.size == 1:
            return values[:, None]
        R, Q = self.tokens.shape
        B = self.slot.shape[0] - R
        short = Q * jnp.arange(R, dtype=jnp.int32)[:, None] + nodes
        chunks = R * Q + jnp.arange(B, dtype=jnp.int32)[:, None]
        return values[jnp.concatenate([short, jnp.broadcast_to(chunks, (B, self.most))])]

    def flat(self, values: jax.Array) -> jax.Array:
        """Returns values by sequence [R + B, W, ...] in the layout of Outputs, [R W + B, ...]."""
        R = self.used.shape[0]
        return jnp.concatenate([values[:R].reshape(-1, *values.shape[2:]), values[R:, 0]])

    def unflat(self, values: jax.Array, pad: int) -> jax.Array:
        """Returns values [R W + B] by sequence: the inverse of flat. Chunks have `pad` past their first column."""
        R, W = self.used.shape[0], self.most
        chunks = jnp.pad(values[R * W :, None], ((0, 0), (0, W - 1)), constant_values=pad)
        return jnp.concatenate([values[: R * W].reshape(R, W), chunks])


def lay_out(
    slots: Slots, drafts: Drafts | None, batch: RaggedBatch, num_pages: int, page_size: int, tails: bool = False
) -> tuple[Paged, HeadRows]:
    """Returns a step's rows as the model reads them, and the rows that the head runs on. The first are tokens,
    positions, and the places of K and V. `tails` is whether the cache has tails, one for each slot."""
    S, Q = slots.token.shape[0], batch.width
    in_use = batch.decode_slot < S
    decode_slot = jnp.where(in_use, batch.decode_slot, 0)
    live = in_use & ~slots.done[decode_slot]
    committed = jnp.where(live, slots.length[decode_slot], 0)
    tree, ancestors = chain(0), None
    tokens, used = slots.token[decode_slot][:, None], live.astype(jnp.int32)
    if Q > 1:
        assert drafts is not None, "segments of several rows need State.drafts"
        tree = drafts.tree
        if tree.size != Q:
            raise ValueError(f"the batch has segments of {Q} rows, and the drafter's tree has {tree.size} nodes")
        tokens = jnp.concatenate([tokens, drafts.tokens[decode_slot]], axis=1)
        last = slots.sampling.max_length[decode_slot] - 1  # a sequence's last token never gets K and V
        most = jnp.minimum(batch.decode_rows, last - committed)
        used = jnp.where(live, jnp.minimum(most, 1 + drafts.count[decode_slot]), 0)
        if not tree.is_chain:
            masks = tree.ancestors()
            ancestors = jnp.broadcast_to(masks[None], (tokens.shape[0], *masks.shape))
    chunk_slot = jnp.where(batch.chunk_slot < S, batch.chunk_slot, 0)
    paged = paged_batch(
        ShortSegments(tokens, committed, used, slots.pages[decode_slot], ancestors),
        Chunks(batch.tokens, batch.chunk_start, batch.chunk_len, slots.pages[chunk_slot]),
        num_pages=num_pages,
        page_size=page_size,
        slots=(decode_slot, chunk_slot) if tails else None,
    )
    if slots.sampling.adapter is not None:
        own = jnp.repeat(jnp.where(live, slots.sampling.adapter[decode_slot], -1), Q)
        chunk = chunk_of_row(paged.chunk_cu[1:], batch.tokens.shape[0])
        of_chunk = jnp.take(slots.sampling.adapter[chunk_slot], chunk, mode="fill", fill_value=-1)
        paged = replace(paged, adapter=jnp.concatenate([own, of_chunk]))
    valid = jnp.concatenate([live, batch.chunk_final == 1])
    slot = jnp.concatenate([decode_slot, chunk_slot])
    rows = HeadRows(
        slot=slot,
        target_slot=jnp.where(valid, slot, S),
        valid=valid,
        written=jnp.concatenate([live, batch.chunk_len > 0]),
        start=jnp.concatenate([committed + 1, batch.chunk_start + batch.chunk_len]),
        tokens=tokens,
        used=used,
        tree=tree,
    )
    return paged, rows
