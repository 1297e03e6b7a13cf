"""Drafts by lookup against the same in plain Python, over tokens that come in any portions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jllm.errors import ConfigError
from jllm.model.paged import Chunks
from jllm.model.sampling import neutral_sampling
from jllm.speculative.drafter import Advance, Drafts, Proposal
from jllm.speculative.ngram import NGram

pytest.importorskip("hypothesis")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

SLOTS, PAGE, LONGEST = 3, 8, 20


def looked_up(tokens: list[int], drafter: NGram, context: int) -> list[int]:
    """What followed the most recent of the longest matches."""
    best, end = 0, None
    for p in range(len(tokens) - 2, max(-1, len(tokens) - 1 - context), -1):
        n = 0
        while n < drafter.longest and p - n >= max(0, len(tokens) - context) and tokens[p - n] == tokens[-1 - n]:
            n += 1
        if n > best and n >= drafter.shortest:
            best, end = n, p
    if end is None:
        return []
    found = tokens[end + 1 :]
    return [found[i % len(found)] for i in range(drafter.drafts)]


def advance(pieces: dict[int, tuple[int, list[int], bool]], width: int) -> Advance:
    """Slots that each got some tokens from an index on: as a segment, or as a chunk and one more token. Chunks share
    rows whose number is always the same, as in a step's bucket, so that operations are compiled once."""
    short = [(slot, *rest[:2]) for slot, rest in pieces.items() if not rest[2]]
    chunks = [(slot, *rest[:2]) for slot, rest in pieces.items() if rest[2]]
    G, C = len(pieces), LONGEST if chunks else 0
    rows = [t for _, _, tokens in chunks for t in tokens[:-1]]
    rows += [77] * (C - len(rows))
    drawn = np.full((G, width), -1, np.int32)
    for g, (_, _, tokens) in enumerate(short):
        drawn[g, : len(tokens)] = tokens
    for g, (_, _, tokens) in enumerate(chunks, len(short)):
        drawn[g, 0] = tokens[-1]
    starts = [start for _, start, _ in short] + [start + len(tokens) - 1 for _, start, tokens in chunks]
    ints = lambda values: jnp.asarray(values, jnp.int32).reshape(len(values))  # noqa: E731
    return Advance(
        slot=ints([slot for slot, _, _ in (*short, *chunks)]),
        start=ints(starts),
        tokens=jnp.asarray(drawn),
        count=ints([len(tokens) for _, _, tokens in short] + [1] * len(chunks)),
        hidden=jnp.zeros((G, width, 1)),
        pages=jnp.zeros((G, 1), jnp.int32),
        room=jnp.full(G, 1 << 20, jnp.int32),
        sampling=neutral_sampling(G),
        chunk_slot=ints([slot for slot, _, _ in chunks]),
        chunks=Chunks(
            ints(rows),
            ints([start for _, start, _ in chunks]),
            ints([len(tokens) - 1 for _, _, tokens in chunks]),
            jnp.zeros((len(chunks), 1), jnp.int32),
        ),
        chunk_hidden=jnp.zeros((C, 1)),
    )


@jax.jit
def propose(drafter: NGram, drafts: Drafts, step: Advance) -> Proposal:
    return drafter.propose(drafts, step, None, config=None, backend=None)


portions = st.lists(
    st.tuples(st.integers(0, SLOTS - 1), st.lists(st.integers(0, 2), min_size=1, max_size=LONGEST), st.booleans()),
    min_size=1,
    max_size=12,
)


@settings(max_examples=30)
@given(portions, st.sampled_from([((4, 3, 1), 8), ((4, 3, 1), 64), ((2, 8, 2), 16), ((5, 2, 2), 64)]))
def test_drafts_are_what_followed_before(portions, sizes_and_context):
    sizes, context = sizes_and_context
    drafter = NGram(*sizes, context=context)
    cache, memory = drafter.init(None, None, slots=SLOTS, num_pages=9, page_size=PAGE, max_tokens=64)
    assert memory.shape == (SLOTS, min(context, 64))
    drafts = Drafts(jnp.zeros((SLOTS, sizes[0]), jnp.int32), jnp.zeros(SLOTS, jnp.int32), cache, memory, drafter.tree)
    known: dict[int, list[int]] = {slot: [] for slot in range(SLOTS)}
    for slot, tokens, is_chunk in portions:
        before = known[slot]
        is_chunk = is_chunk and len(tokens) > 1
        tokens = tokens if is_chunk else tokens[:4]
        step = advance({slot: (len(before), tokens, is_chunk)}, 4)
        got = propose(drafter, drafts, step)
        found, count, memory = got.tokens, got.count, got.memory
        drafts = Drafts(drafts.tokens, drafts.count, (), memory, drafts.tree)
        before += tokens
        want = looked_up(before, drafter, memory.shape[1])
        assert found[0, : count[0]].tolist() == want


def test_tokens_that_no_step_computes_are_remembered():
    drafter = NGram(3, shortest=1)
    _, memory = drafter.init(None, None, slots=2, num_pages=9, page_size=PAGE, max_tokens=64)
    memory = drafter.remember(memory, jnp.int32(1), jnp.asarray([5, 6, 7, 8, 99]), jnp.int32(0), jnp.int32(4))
    drafts = Drafts(jnp.zeros((2, 3), jnp.int32), jnp.zeros(2, jnp.int32), (), memory, drafter.tree)
    got = propose(drafter, drafts, advance({1: (4, [6], False)}, 1))
    found, count = got.tokens, got.count
    assert (found[0].tolist(), int(count[0])) == ([7, 8, 6], 3)


def test_a_sequence_that_has_ended_gets_no_drafts():
    drafter = NGram(3, shortest=1)
    _, memory = drafter.init(None, None, slots=2, num_pages=9, page_size=PAGE, max_tokens=64)
    memory = drafter.remember(memory, jnp.int32(0), jnp.asarray([5, 5, 5]), jnp.int32(0), jnp.int32(3))
    drafts = Drafts(jnp.zeros((2, 3), jnp.int32), jnp.zeros(2, jnp.int32), (), memory, drafter.tree)
    step = advance({0: (3, [5], False)}, 1)
    ended = type(step)(**{**vars(step), "count": jnp.zeros(1, jnp.int32)})
    assert propose(drafter, drafts, ended).count.tolist() == [0]


@pytest.mark.parametrize("sizes", [(0, 3), (4, 3)])
def test_lengths_of_matches(sizes):
    with pytest.raises(ConfigError, match="shortest <= longest"):
        NGram(4, shortest=sizes[0], longest=sizes[1])


@pytest.mark.parametrize("sizes", [{"drafts": 0}, {"drafts": -1}, {"context": 0}])
def test_no_drafts_or_no_context(sizes):
    with pytest.raises(ConfigError, match="expected at least 1 of each"):
        NGram(**sizes)
