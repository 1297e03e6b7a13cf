"""Steps as an engine makes them, by hand, and what a drafter with weights proposes after each."""

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jllm.model.paged import Chunks
from jllm.model.sampling import neutral_sampling, write_row
from jllm.speculative.draft_model import DraftModel
from jllm.speculative.drafter import Advance, Drafts
from jllm.speculative.eagle import Eagle, init_eagle
from jllm.speculative.medusa import init_medusa
from jllm.speculative.tree import Tree, chain
from tests.speculative.drafters_reference import (
    draft_logits,
    eagle_logits,
    hidden_states,
    medusa_logits,
    tree_of_drafts,
)
from tests.tiny import tiny_model

SLOTS, P, M, N = 3, 4, 8, 30  # slots, tokens a page, pages a sequence, pages
R, MOST_CHUNKS, CHUNK_ROWS = 2, 2, 6  # short segments, chunks, chunk rows of a step
NOWHERE = np.iinfo(np.int32).max
MANY = 1000  # of room
TREES = {"chain": chain(3), "levels": Tree((0, 0, 1, 1, 2, 3)), "paths": Tree((0, 1, 2, 0, 4, 1))}
REQUESTS = (  # a slot's parameters
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 7, "sample": 1},
    {"temperature": 1.3, "seed": 8, "top_k": 20, "top_p": 0.95, "min_p": 0.01},
)


def scaled(tree, factor: float):
    """The same drafter with larger weights, so that what it sees decides what it drafts."""
    return jax.tree.map(lambda x: x * factor if x.ndim > 1 else x, tree)


def make(kind: str, target, tree: Tree):
    """A drafter of random weights."""
    key, dtype = jax.random.key(1), jnp.dtype("float64")
    if kind == "eagle":
        return scaled(init_eagle(target.config, key, tree, dtype), 8.0)
    if kind in ("medusa", "own"):
        return scaled(init_medusa(target.config, key, tree, dtype, own=kind == "own"), 8.0)
    sizes = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8}
    if kind == "reduced":
        ids = np.random.default_rng(2).permutation(target.config.vocab_size)[:40]
        small = tiny_model("float64", seed=5, vocab_size=40, **sizes)
        return DraftModel(small.params, small.config, tree, jnp.asarray(ids, jnp.int32))
    small = tiny_model("float64", seed=5, **sizes)
    return DraftModel(small.params, small.config, tree)


@dataclass
class Sequence:
    """One slot's."""

    tokens: list[int]  # all that it will have
    prompt: int
    pages: list[int]
    computed: int = 0  # of the prompt
    known: int = 0  # tokens that were read or drawn


def propose(drafter, drafts, advance, params, config):
    return drafter.propose(drafts, advance, params, config=config, backend=None)


_propose = jax.jit(propose, static_argnames="config")


@dataclass
class Simulation:
    """Steps as an engine makes them, and what a drafter proposes after each. What nothing may read is NaN."""

    target: Any
    drafter: Any
    width: int  # W
    sequences: list[Sequence]
    fill: float = np.nan
    lean: bool = False  # a step without chunks has no rows for them
    drafts: Drafts = field(init=False)

    def __post_init__(self):
        config, dtype, tree = self.target.config, self.target.params.dtype, self.drafter.tree
        sizes = {"slots": SLOTS, "num_pages": N, "page_size": P, "max_tokens": M * P}
        cache, memory = self.drafter.init(config, dtype, **sizes)
        cache = jax.tree.map(lambda x: jnp.full_like(x, self.fill), cache)
        none = jnp.zeros((SLOTS, tree.size - 1), jnp.int32)
        self.drafts = Drafts(none, jnp.zeros(SLOTS, jnp.int32), cache, memory, tree)
        self.hidden = [hidden_states(self.target.params, config, s.tokens) for s in self.sequences]
        self.sampling = neutral_sampling(SLOTS)
        for slot in range(SLOTS):
            write_row(self.sampling, slot, REQUESTS[slot])

    def step(self, decodes: dict[int, int], chunks: dict[int, int], room: dict[int, int] | None = None):
        """Slots that decode with the tokens that each drew, and slots with the prompt tokens that they read. Yields for
        each slot that drew tokens its drafts, all of them, and how many of these count."""
        B, C = (0, 0) if self.lean and not chunks else (MOST_CHUNKS, CHUNK_ROWS)
        G, W, E = R + B, self.width, self.target.config.hidden_size
        a = SimpleNamespace(
            slot=np.full(G, NOWHERE, np.int32),
            start=np.full(G, 3, np.int32),
            tokens=np.full((G, W), -1, np.int32),
            count=np.zeros(G, np.int32),
            hidden=np.full((G, W, E), np.nan),
            pages=np.full((G, M), N - 1, np.int32),
            room=np.full(G, MANY, np.int32),
            chunk_slot=np.full(B, NOWHERE, np.int32),
            chunk_hidden=np.full((C, E), np.nan),
        )
        c = Chunks(np.zeros(C, np.int32), *(np.zeros(B, np.int32) for _ in "ab"), np.full((B, M), N - 1, np.int32))
        at = 0
        for b, (slot, n) in enumerate(chunks.items()):
            s = self.sequences[slot]
            span = slice(s.computed, s.computed + n)
            a.slot[R + b], a.chunk_slot[b], c.start[b], c.lengths[b] = slot, slot, s.computed, n
            c.tokens[at : at + n], a.chunk_hidden[at : at + n] = s.tokens[span], self.hidden[slot][span]
            c.pages[b, : len(s.pages)] = s.pages
            s.computed += n
            s.known = s.computed
            at += n
        last = {slot: 1 for slot in chunks if self.sequences[slot].computed == self.sequences[slot].prompt}
        rows = dict(zip(decodes, range(R))) | dict(zip(chunks, range(R, G)))
        for slot, n in (decodes | last).items():
            s, g = self.sequences[slot], rows[slot]
            a.slot[g], a.start[g], a.count[g] = slot, s.known, n
            a.tokens[g, :n] = s.tokens[s.known : s.known + n]
            a.hidden[g, :n] = self.hidden[slot][s.known - 1 : s.known + n - 1]
            a.pages[g, : len(s.pages)] = s.pages
            a.room[g] = (room or {}).get(slot, MANY)
            s.known += n
        sampling = jax.tree.map(lambda x: x[np.minimum(a.slot, SLOTS - 1)], self.sampling)
        advance = jax.tree.map(jnp.asarray, Advance(**vars(a), sampling=sampling, chunks=c))
        found = _propose(self.drafter, self.drafts, advance, self.target.params, self.target.config)
        self.drafts = replace(self.drafts, cache=found.cache, memory=found.memory)
        tokens, count = found.tokens, found.count
        assert set(np.asarray(count)[a.count == 0]) <= {0}, "nothing is drafted where nothing was drawn"
        for slot in decodes | last:
            yield slot, np.asarray(tokens)[rows[slot]].tolist(), int(count[rows[slot]])

    def expected(self, slot: int) -> list[int]:
        """What the formulas draft for a slot."""
        s, params, config = self.sequences[slot], self.target.params, self.target.config
        tokens, hidden = s.tokens[: s.known], self.hidden[slot][: s.known - 1]
        if isinstance(self.drafter, DraftModel):
            logits = draft_logits(self.drafter, config.vocab_size, tokens)
        elif isinstance(self.drafter, Eagle):
            logits = eagle_logits(self.drafter, params, config, tokens, hidden)
        else:
            logits = medusa_logits(self.drafter, params, config, hidden)
        row = jax.tree.map(lambda x: jnp.asarray(x[slot : slot + 1]), self.sampling)
        return tree_of_drafts(self.drafter.tree, logits, row, s.known - 1)

    def check(self, *step: Any) -> int:
        """Takes a step, holds what it drafts against the formulas, and counts the sequences that drafted."""
        slots = 0
        for slot, tokens, count in self.step(*step):
            assert count == len(tokens), "there is room for all"
            assert tokens == self.expected(slot)
            slots += 1
        return slots


def sequences(rng: np.random.Generator, vocabulary: int = 97, length: int = 24) -> list[Sequence]:
    pages = rng.permutation(N - 1)  # the last page has no owner
    texts = rng.integers(0, vocabulary, (SLOTS, length)).tolist()
    return [Sequence(t, int(rng.integers(3, 10)), pages[i * M : (i + 1) * M].tolist()) for i, t in enumerate(texts)]


def random_step(rng: np.random.Generator, simulation: Simulation) -> tuple[dict[int, int], dict[int, int]]:
    """A mix of prompt chunks, cut anywhere, and decodes that drew some tokens each."""
    decodes: dict[int, int] = {}
    chunks: dict[int, int] = {}
    for slot in rng.permutation(SLOTS).tolist():
        s, left = simulation.sequences[slot], CHUNK_ROWS - sum(chunks.values())
        if s.computed < s.prompt and left and len(chunks) < MOST_CHUNKS:
            chunks[slot] = int(rng.integers(1, min(left, s.prompt - s.computed) + 1))
        elif s.computed == s.prompt and s.known < len(s.tokens) - 1 and len(decodes) < R:
            decodes[slot] = int(rng.integers(1, min(simulation.width, len(s.tokens) - 1 - s.known) + 1))
    return decodes, chunks
