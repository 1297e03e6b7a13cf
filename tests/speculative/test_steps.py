"""Steps by hand, with the pure functions: between them the state is that of plain decoding, whatever was drafted."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jllm import PromptChunk, SamplingParams, init_state, ragged_batch, step
from jllm.speculative.draft_model import DraftModel
from jllm.speculative.tree import chain
from tests.engine.test_oracle import Job, alone
from tests.speculative.scripted import scripted
from tests.speculative.test_oracle import BUSHY
from tests.tiny import tiny_model

P, M = 4, 16
TREES = {"chain": chain(3), "tree": BUSHY}
PROMPTS = [(5, 6, 7), tuple(range(20, 31))]
PAGES = [[3 + 2 * i for i in range(M)], [2 * i for i in range(M)]]
ASKED = [{"temperature": 0.8, "seed": 7}, {"temperature": 0.0, "seed": 8}]


@pytest.fixture(scope="module", autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def model(wide):
    return tiny_model("float64", num_layers=1)


@pytest.fixture(scope="module")
def jobs():
    return [
        Job(prompt, SamplingParams(**asked, max_new_tokens=36, ignore_eos=True), 0, None)
        for prompt, asked in zip(PROMPTS, ASKED, strict=True)
    ]


@pytest.fixture(scope="module")
def wants(model, jobs):
    return list(alone(model, jobs))


def begin(model, drafter=None, **sampling):
    """The state after the prompts and the first tokens. `sampling` is the first sequence's own; K and V are NaN where
    nothing was written."""
    sizes = {"slots": 3, "num_pages": 40, "page_size": P, "max_pages": M, "dtype": "float64"}
    state = init_state(model.config, **sizes, drafter=drafter)
    state = replace(state, cache=jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), state.cache))
    asked = [ASKED[0] | sampling, ASKED[1]]
    chunks = [PromptChunk(i, PROMPTS[i], pages=PAGES[i], sampling=asked[i], room=M * P) for i in range(2)]
    state, outputs = step(model.params, state, ragged_batch(chunks), drafter, config=model.config)
    return state, [[token] for token in outputs.tokens.tolist()]


def go_on(model, state, made, drafter=None, rows: int = 1, most: int | None = None):
    """One step of both sequences, whose tokens are added to those made."""
    batch = ragged_batch(decodes=[0, 1], rows=rows)
    if most is not None:
        batch.decode_rows[:] = most
    state, outputs = step(model.params, state, batch, drafter, config=model.config)
    tokens = outputs.tokens.reshape(2, -1).tolist()
    for mine, new in zip(made, tokens, strict=True):
        mine += [token for token in new if token >= 0]
    return state, [sum(token >= 0 for token in new) for new in tokens]


def committed(state, slot: int) -> list[np.ndarray]:
    """K and V of a slot's tokens in each layer, and what the slot holds."""
    pages, length = state.slots.pages[slot], int(state.slots.length[slot])
    pools = [pool.values[pages] for layer in state.cache for pool in (layer.k, layer.v)]  # [M, K, P, D]
    held = [np.moveaxis(np.asarray(x), 1, 2).reshape(M * P, -1)[:length] for x in pools]
    slots = jax.tree.map(lambda x: np.asarray(x[slot]), state.slots)
    return [*held, *jax.tree.leaves(slots)]


@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("shape", TREES)
def test_between_steps_the_state_is_that_of_plain_decoding(model, jobs, wants, shape, right):
    tree = TREES[shape]
    drafter = scripted(tree, jobs, wants, right=right)
    state, made = begin(model, drafter)
    plain, each = begin(model)
    states = [{int(plain.slots.length[slot]): committed(plain, slot)} for slot in range(2)]
    while min(map(len, each)) < 20:
        plain, _ = go_on(model, plain, each)
        for slot, known in enumerate(states):
            known[int(plain.slots.length[slot])] = committed(plain, slot)
    steps = 0
    while max(map(len, made)) < 16:
        state, _ = go_on(model, state, made, drafter, tree.size)
        steps += 1
        for slot in range(2):
            for got, want in zip(committed(state, slot), states[slot][int(state.slots.length[slot])], strict=True):
                np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)
    for mine, want in zip(made, wants, strict=True):
        assert tuple(mine) == want.token_ids[: len(mine)]
    assert (steps == -(-15 // (tree.depth + 1))) == (right == 1)


@pytest.mark.parametrize("shape", ["tree", pytest.param("chain", marks=pytest.mark.exhaustive)])
def test_the_old_state_stays_usable_and_plain_steps_may_come_between(model, jobs, wants, shape):
    """Also those that are given no drafter."""
    tree = TREES[shape]
    drafter = DraftModel(model.params, model.config, tree)
    state, made = begin(model, drafter)
    for kind in "dpddndpnd":
        before = state
        for _ in range(2):
            tokens = [list(mine) for mine in made]
            if kind == "d":
                state, counts = go_on(model, before, tokens, drafter, tree.size)
            elif kind == "p":
                state, counts = go_on(model, before, tokens, drafter)
            else:
                state, counts = go_on(model, before, tokens, None, tree.size)
            assert min(counts) >= 1
            for mine, want in zip(tokens, wants, strict=True):
                assert tuple(mine) == want.token_ids[: len(mine)]
        made = tokens
    assert min(map(len, made)) > 9


@pytest.mark.parametrize("rows", [1, 4])
def test_drafts_are_forgotten_by_a_step_without_the_drafter(model, jobs, wants, rows):
    """The sequence has gone on: none of them is verified in another place, nor counted as refused there."""
    drafter = scripted(chain(3), jobs, wants, right=1.0)
    state, made = begin(model, drafter)
    assert state.drafts.count[:2].tolist() == [3, 3]
    state, _ = go_on(model, state, made, None, rows)
    assert not state.drafts.count.any()
    state, counts = go_on(model, state, made, drafter, 4)
    assert counts == [1, 1]


@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize("end", ["max_length", "stop_ids"])
@pytest.mark.parametrize("tokens", [2, 3, 5, 8])
def test_a_sequence_ends_inside_a_draft(model, jobs, wants, shape, end, tokens):
    """On the device, after its last token, where the other one goes on; then it draws and writes nothing."""
    tree = TREES[shape]
    drafter = scripted(tree, jobs, wants, right=1.0)
    if end == "max_length":
        sampling = {"max_length": len(PROMPTS[0]) + tokens}
    else:
        sampling = {"stop_ids": [wants[0].token_ids[tokens - 1]]}
        tokens = 1 + wants[0].token_ids.index(sampling["stop_ids"][0])
    state, made = begin(model, drafter, **sampling)
    while not state.slots.done[0]:
        state, counts = go_on(model, state, made, drafter, tree.size)
        assert counts[0] > 0
    assert tuple(made[0]) == wants[0].token_ids[:tokens]
    assert int(state.slots.length[0]) == len(PROMPTS[0]) + tokens - 1
    assert not state.slots.done[1]
    ended = committed(state, 0)
    state, counts = go_on(model, state, made, drafter, tree.size)
    assert counts == [0, 1 + tree.depth]
    assert all(np.array_equal(a, b) for a, b in zip(committed(state, 0), ended, strict=True))
    assert tuple(made[1]) == wants[1].token_ids[: len(made[1])]


@pytest.mark.parametrize("most", [1, 2, 3])
def test_a_segment_may_have_fewer_rows(model, jobs, wants, most):
    """As many as its pages have room for: nothing past these is drawn, or written."""
    drafter = scripted(chain(3), jobs, wants, right=1.0)
    state, made = begin(model, drafter)
    for _ in range(4):
        state, counts = go_on(model, state, made, drafter, 4, most)
        assert counts == [most, most]
    for slot, (mine, want) in enumerate(zip(made, wants, strict=True)):
        assert tuple(mine) == want.token_ids[: len(mine)]
        beyond = int(state.slots.length[slot])
        values = state.cache[0].k.values[state.slots.pages[slot]]
        assert np.isnan(np.moveaxis(np.asarray(values), 1, 2).reshape(M * P, -1)[beyond:]).all()


def test_segments_of_another_size_are_refused(model, jobs, wants):
    drafter = scripted(chain(3), jobs, wants)
    state, made = begin(model, drafter)
    with pytest.raises(ValueError, match="segments of 3 rows, and the drafter's tree has 4 nodes"):
        go_on(model, state, made, drafter, 3)
