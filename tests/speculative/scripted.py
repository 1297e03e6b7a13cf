"""A drafter for tests: it knows the answers, and drafts them or anything else as it is told."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jllm.speculative.drafter import Advance, Drafts, Proposal
from jllm.speculative.tree import Tree

LONGEST = 80  # tokens of a sequence
MOST = 8  # sequences


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Scripted:
    """Drafts a sequence's own next tokens at a share of a tree's nodes, and noise at the others: tokens of a hash, some
    of them from `likely`, some not in the vocabulary. If `ragged`, the number of drafts varies as well."""

    seeds: Any  # u32[MOST], of requests: what tells sequences apart
    tokens: Any  # i32[MOST, LONGEST], their prompts and outputs
    right: Any  # f32, the share of right drafts
    ragged: Any  # bool
    likely: Any  # i32[4]
    tree: Tree = field(metadata={"static": True})

    def init(self, config, dtype, *, slots, num_pages, page_size, max_tokens):
        return (), ()

    def remember(self, memory, slot, tokens, start, count):
        return memory

    def propose(self, drafts: Drafts, advance: Advance, params, *, config, backend, wanted=True):
        newest = advance.start + advance.count - 1
        row = jnp.argmax(self.seeds[None, :] == advance.sampling.seed[:, None], axis=1)
        index = newest[:, None] + jnp.asarray([self.tree.depths[1:]], jnp.int32)
        answer = self.tokens[row[:, None], jnp.clip(index, 0, LONGEST - 1)]
        node = jnp.arange(1, self.tree.size, dtype=jnp.uint32)[None, :]
        noise = _hash(newest[:, None].astype(jnp.uint32) * jnp.uint32(64) + node + advance.sampling.seed[:, None])
        other = jnp.where(noise % 3 == 0, self.likely[(noise >> 8) % 4], (noise >> 16).astype(jnp.int32) % 120 - 10)
        found = jnp.where((noise >> 4) % 1000 < (1000 * self.right).astype(jnp.uint32), answer, other)
        size = self.tree.size
        count = jnp.where(self.ragged, (_hash(noise[:, 0] + 1) % size).astype(jnp.int32), size - 1)
        return Proposal(found, count, (), ())


def _hash(x: jax.Array) -> jax.Array:
    for multiplier in (0x7FEB352D, 0x846CA68B):
        x = (x ^ (x >> 16)) * jnp.uint32(multiplier)
    return x ^ (x >> 15)


def scripted(tree: Tree, jobs, wants, right: float = 0.7, ragged: bool = False, likely=(2, 5, 17, 20)) -> Scripted:
    """For jobs and what each gets alone."""
    tokens, seeds = np.zeros((MOST, LONGEST), np.int32), np.zeros(MOST, np.uint32)
    for i, (job, want) in enumerate(zip(jobs, wants, strict=True)):
        known = [*job.prompt, *want.token_ids][:LONGEST]
        tokens[i, : len(known)], seeds[i] = known, want.seed
    return Scripted(seeds, tokens, np.float32(right), np.bool_(ragged), np.asarray(likely, np.int32), tree)
