"""Drafters with weights propose what their formulas say, step by step, whatever the steps were like."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jllm.errors import ConfigError, DrafterError
from jllm.files.hf_config import load_config
from jllm.model.paged import Chunks
from jllm.model.param_specs import abstract_params
from jllm.model.sampling import neutral_sampling, sample
from jllm.speculative import draft_model, eagle, levels, medusa
from jllm.speculative.draft_model import DraftModel
from jllm.speculative.drafter import Advance, Drafts
from jllm.speculative.tree import Tree, chain
from pallas_kernels.formats.segments import as_numbers
from tests.kernels_of import kernels_of
from tests.speculative import simulation as simulated
from tests.speculative.drafters_reference import hidden_states, logits_of
from tests.speculative.simulation import SLOTS, TREES, M, N, P, Simulation, make, propose, random_step, sequences
from tests.tiny import tiny_model

pytest.importorskip("hypothesis")
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True, scope="module")
def wide():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def target(wide):
    return tiny_model("float64", rope_theta=100.0)


def run(simulation: Simulation, seed: int, steps: int = 9) -> None:
    rng = np.random.default_rng(seed)
    found = sum(simulation.check(*random_step(rng, simulation)) for _ in range(steps))
    assert found >= steps // 2


@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize("kind", ["draft", "eagle", "medusa"])
def test_drafts_are_those_of_the_formula(target, kind, shape):
    tree = TREES[shape]
    run(Simulation(target, make(kind, target, tree), tree.depth + 1, sequences(np.random.default_rng(0))), 1)


@pytest.mark.parametrize("kind", ["draft", "eagle"])
def test_slots_that_had_other_sequences(target, kind):
    """What is remembered of these is no part of what begins there."""
    drafter = make(kind, target, chain(3))
    simulation = Simulation(target, drafter, 4, sequences(np.random.default_rng(2)))
    memory = jax.tree.map(lambda x: jnp.full_like(x, 3), simulation.drafts.memory)
    simulation.drafts = replace(simulation.drafts, memory=memory)
    run(simulation, 2)


@pytest.mark.parametrize("kind", ["own", "reduced"])
def test_drafts_of_a_head_and_a_vocabulary_of_their_own(target, kind):
    drafter = make(kind, target, TREES["levels"])
    run(Simulation(target, drafter, 4, sequences(np.random.default_rng(3))), 4)


@pytest.mark.parametrize("kind", ["draft", "eagle"])
def test_steps_that_advance_by_one_token_each(target, kind):
    texts = sequences(np.random.default_rng(5))
    run(Simulation(target, make(kind, target, chain(2)), 1, texts, lean=True), 6, steps=12)


def test_a_draft_model_that_is_the_target_drafts_what_it_says(target):
    params, config = target.params, target.config
    texts = sequences(np.random.default_rng(7))
    simulation = Simulation(target, DraftModel(params, config, chain(3)), 4, texts)
    for slot, s in enumerate(texts):
        del s.tokens[s.prompt :]
        row = jax.tree.map(lambda x, slot=slot: jnp.asarray(x[slot : slot + 1]), simulation.sampling)
        while len(s.tokens) < 20:
            logits = logits_of(params, config, hidden_states(params, config, s.tokens)[-1:])
            s.tokens.append(int(sample(jnp.asarray(logits), row, jnp.asarray([len(s.tokens)], jnp.int32))[0][0]))
        simulation.hidden[slot] = hidden_states(params, config, s.tokens)
    rng, seen = np.random.default_rng(8), 0
    for _ in range(7):
        for slot, tokens, count in simulation.step(*random_step(rng, simulation)):
            s, n = texts[slot], min(3, 20 - texts[slot].known)
            assert (tokens[:n], count) == (s.tokens[s.known : s.known + n], 3)
            seen += n
    assert seen > 12


# Where pages end


def written(simulation: Simulation, slot: int) -> int:
    """One more than the last place of a slot's sequence that holds anything, K and V of each layer alike."""
    found = set()
    for leaf in jax.tree.leaves([*simulation.drafts.cache]):
        places = np.asarray(leaf)[simulation.sequences[slot].pages].swapaxes(1, 2).reshape(M * P, -1)
        found.add(int(np.flatnonzero(~np.isnan(places).all(1)).max(initial=-1)) + 1)
    assert len(found) == 1
    return found.pop()


def run_with_room(target, kind: str, shape: str) -> None:
    drafter = make(kind, target, TREES[shape])
    rng = np.random.default_rng(9)
    simulation = Simulation(target, drafter, drafter.tree.depth + 1, sequences(rng))
    most, fewer = [0] * SLOTS, 0
    for step in range(9):
        decodes, chunks = random_step(rng, simulation)
        room = {}
        for slot, n in (decodes | chunks).items():
            s = simulation.sequences[slot]
            inputs = s.known + n - int(slot in decodes)  # all but the newest token have a place
            room[slot] = max(most[slot], inputs + (0 if step in (3, 8) else int(rng.integers(0, 5))))
        for slot, tokens, count in simulation.step(decodes, chunks, room):
            newest = simulation.sequences[slot].known - 1
            fits = [newest + parent < room[slot] for parent in drafter.tree.parents]
            assert count == (fits + [False]).index(False)
            assert tokens[:count] == simulation.expected(slot)[:count]
            fewer += count < len(tokens)
        for slot in room:
            most[slot] = room[slot]
            assert written(simulation, slot) <= room[slot]
        for leaf in jax.tree.leaves([*simulation.drafts.cache]):
            assert np.isnan(np.asarray(leaf)[N - 1]).all(), "a page that no slot has"
    assert fewer


@pytest.mark.parametrize(("kind", "shape"), [("draft", "chain"), ("draft", "paths"), ("eagle", "levels")])
def test_nothing_is_written_past_the_room_and_fewer_drafts_count(target, kind, shape):
    run_with_room(target, kind, shape)


@pytest.mark.parametrize("kind", ["draft", "eagle"])
def test_a_newest_token_without_a_place_has_no_drafts_yet(target, kind):
    simulation = Simulation(target, make(kind, target, chain(3)), 4, sequences(np.random.default_rng(10)))
    s = simulation.sequences[0]
    s.prompt = 5
    ((_, _, count),) = simulation.step({}, {0: 5}, {0: 5})
    assert (count, written(simulation, 0)) == (0, 5)
    ((_, _, count),) = simulation.step({0: 3}, {}, {0: 8})
    assert (count, written(simulation, 0)) == (0, 8)
    assert simulation.check({0: 1}, {}) == 1, "and is caught up with in the next step"


# Prefixes that no step computed


@pytest.mark.parametrize("kind", ["draft", "eagle", "medusa"])
def test_a_prefix_without_k_and_v_costs_acceptance_alone(target, kind):
    drafter = make(kind, target, TREES["levels"])
    simulation = Simulation(target, drafter, 4, sequences(np.random.default_rng(11)), fill=0.0)
    s = simulation.sequences[1]
    s.prompt, s.computed, s.known = 9, 5, 5
    drafts = 0
    for step in (({}, {1: 3}), ({}, {1: 1}), ({1: 2}, {}), ({1: 4}, {})):
        for _, tokens, count in simulation.step(*step):
            assert count == len(tokens)
            assert all(0 <= token < 97 for token in tokens)
            drafts += count
    assert drafts == 3 * 6
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((simulation.drafts.cache, simulation.drafts.memory)))


@pytest.mark.parametrize("kind", ["draft", "eagle"])
def test_a_prefix_in_shared_pages_is_read(target, kind):
    texts = sequences(np.random.default_rng(12))
    texts[2].tokens[:P], texts[2].pages[0] = texts[0].tokens[:P], texts[0].pages[0]
    texts[0].prompt, texts[2].prompt = 6, 9
    drafter = make(kind, target, chain(3))
    simulation = Simulation(target, drafter, 4, texts)
    assert simulation.check({}, {0: 6}) == 1
    texts[2].computed = texts[2].known = P
    memory = simulation.drafts.memory
    if kind == "eagle":
        memory = replace(memory, hidden=memory.hidden.at[2].set(1.0))
        simulation.hidden[2] = np.array(simulation.hidden[2])
        simulation.hidden[2][P - 1] = 0  # is not known
    told = jnp.asarray(texts[2].tokens[:8], jnp.int32)
    memory = drafter.remember(memory, jnp.int32(2), told, jnp.int32(0), jnp.int32(P))
    simulation.drafts = replace(simulation.drafts, memory=memory)
    assert simulation.check({0: 2}, {2: 5}) == 2
    assert simulation.check({0: 1, 2: 4}, {}) == 2


# Faults that these tests are to find


def of_another_index(found, logits, sampling, position, *args, **options):
    return found(logits, sampling, position + 1, *args, **options)


def of_all_before(found, tree, end):
    masks = found(tree, end)
    return np.array([[(2 << row) - 1] for row in range(len(masks))], masks.dtype)


def of_the_first_token_alone(found, short, chunks, **sizes):
    if chunks.lengths.shape[0]:
        short = replace(short, used=jnp.minimum(short.used, 1))
    return found(short, chunks, **sizes)


def of_the_first_row(found, values, count):
    return values[:, 0]


def of_this_step_alone(found, memory, advance):
    return found(jnp.zeros_like(memory), advance)


def that_stays(found, memory, advance):
    return memory


def of_a_place_too_much(found, tree, advance, *args, **options):
    return found(tree, replace(advance, room=advance.room + 1), *args, **options)


FAULTS = [
    ("draft", "chain", levels, "best_tokens", of_another_index),
    ("medusa", "chain", medusa, "best_tokens", of_another_index),
    ("draft", "levels", levels, "_ancestors", of_all_before),
    ("eagle", "paths", levels, "_ancestors", of_all_before),
    ("draft", "chain", levels, "paged_batch", of_the_first_token_alone),
    ("eagle", "chain", levels, "last_valid", of_the_first_row),
    ("medusa", "levels", medusa, "last_valid", of_the_first_row),
    ("eagle", "chain", eagle, "_before_chunks", of_this_step_alone),
    ("eagle", "chain", eagle, "_newest_states", that_stays),
    ("eagle", "levels", eagle, "newest_tokens", that_stays),
    ("draft", "chain", draft_model, "newest_tokens", that_stays),
]


def traced_anew(monkeypatch) -> None:
    monkeypatch.setattr(simulated, "_propose", jax.jit(lambda *args: propose(*args), static_argnums=4))


@pytest.mark.parametrize(("kind", "shape", "module", "name", "fault"), FAULTS)
def test_faults_are_found(target, monkeypatch, kind, shape, module, name, fault):
    right = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args, **options: fault(right, *args, **options))
    traced_anew(monkeypatch)
    tree = TREES[shape]
    with pytest.raises(AssertionError):
        run(Simulation(target, make(kind, target, tree), tree.depth + 1, sequences(np.random.default_rng(0))), 1)


def test_a_fault_in_room_is_found(target, monkeypatch):
    right = levels.draft_levels
    monkeypatch.setattr(draft_model, "draft_levels", lambda *args, **o: of_a_place_too_much(right, *args, **o))
    traced_anew(monkeypatch)
    with pytest.raises(AssertionError):
        run_with_room(target, "draft", "chain")


# Dtypes, kernels and bad input


def abstract_propose(drafter, config, dtype, *, slots: int, chunks: bool, backend: str | None):
    """The trace of propose from shapes alone, for a step in which `slots` decode."""
    G, W, M, E = slots + int(chunks), drafter.tree.depth + 1, 64, config.hidden_size
    B, C = (1, 128) if chunks else (0, 0)

    def ints(*shape: int):
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    def floats(*shape: int):
        return jax.ShapeDtypeStruct(shape, dtype)

    advance = Advance(
        slot=ints(G),
        start=ints(G),
        tokens=ints(G, W),
        count=ints(G),
        hidden=floats(G, W, E),
        pages=ints(G, M),
        room=ints(G),
        sampling=jax.eval_shape(lambda: jax.tree.map(jnp.asarray, neutral_sampling(G))),
        chunk_slot=ints(B),
        chunks=Chunks(ints(C), ints(B), ints(B), ints(B, M)),
        chunk_hidden=floats(C, E),
    )
    sizes = {"slots": slots, "num_pages": 256, "page_size": 16, "max_tokens": 16 * M}
    cache, memory = jax.eval_shape(lambda: drafter.init(config, dtype, **sizes))
    drafts = Drafts(ints(slots, drafter.tree.size - 1), ints(slots), cache, memory, drafter.tree)
    propose = jax.jit(lambda *args: drafter.propose(*args, config=config, backend=backend))
    traced = propose.trace(drafts, advance, abstract_params(config, dtype))
    found, k = traced.out_info, drafter.tree.size - 1
    assert (found.tokens.shape, found.count.shape) == ((G, k), (G,))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), (cache, memory)) == jax.tree.map(
        lambda x: (x.shape, x.dtype), (found.cache, found.memory)
    )
    return traced.jaxpr.jaxpr


@pytest.mark.parametrize(("kind", "shape"), list(zip(["draft", "eagle", "medusa"], TREES, strict=True)))
def test_a_target_of_16_bits(target, kind, shape):
    drafter, config = make(kind, target, TREES[shape]), replace(target.config, dtype="bfloat16")
    if kind != "draft":
        drafter = jax.tree.map(lambda x: x.astype(jnp.bfloat16), drafter)
    abstract_propose(drafter, config, jnp.bfloat16, slots=3, chunks=True, backend=None)


@pytest.mark.parametrize("shape", ["chain", "levels"])
def test_passes_on_hopper_run_the_kernels_of_a_step(shape):
    """A pass of two layers for the step, and one for each of three levels but the last."""
    with jax.enable_x64(False):
        config = replace(load_config(ROOT / "configs" / "llama-2-7b.json"), num_layers=2)
        drafter = DraftModel(abstract_params(config, jnp.bfloat16), config, TREES[shape])
        found = kernels_of(abstract_propose(drafter, config, jnp.bfloat16, slots=4, chunks=True, backend="hopper"))
    assert (found["cache_update"], found["prefill_attention"]) == (6, 2)
    assert found["decode_attention"] >= (4 if shape == "chain" else 0), "drafts of a chain are single rows"


trees = st.integers(1, 40).flatmap(lambda n: st.tuples(*(st.integers(0, i) for i in range(n)))).map(Tree)


@given(trees)
def test_masks_of_a_trees_drafts_are_those_of_the_tree_without_its_root(tree):
    whole = as_numbers(tree.ancestors())
    for end in range(2, tree.size + 1):
        assert as_numbers(levels._ancestors(tree, end)) == [mask >> 1 for mask in whole[1:end]]


@pytest.mark.parametrize("kind", ["draft", "eagle", "medusa"])
def test_weights_that_do_not_fit_are_refused(target, kind):
    sizes = {"slots": 1, "num_pages": 2, "page_size": 4, "max_tokens": 8}
    drafter, config = make(kind, target, chain(2)), target.config
    problem = "vocabulary of 97 tokens, its target one of 96" if kind == "draft" else "it was made for another model"
    other = replace(config, vocab_size=96) if kind == "draft" else replace(config, hidden_size=64)
    with pytest.raises(DrafterError, match=problem):
        drafter.init(other, jnp.float64, **sizes)
    if kind != "draft":
        with pytest.raises(ConfigError, match="of the drafter is float64, the model's are bfloat16"):
            drafter.init(config, jnp.bfloat16, **sizes)


def test_a_medusa_tree_deeper_than_its_heads_is_refused(target):
    drafter = replace(make("medusa", target, chain(2)), tree=chain(3))
    with pytest.raises(DrafterError, match="2 Medusa heads draft 2 tokens ahead, but the tree has depth 3"):
        drafter.init(target.config, jnp.float64, slots=1, num_pages=2, page_size=4, max_tokens=8)


@pytest.mark.parametrize("ids", [[1, 1], [0, 97], [-1, 3], [1], [1, 2, 3]])
def test_target_ids_that_do_not_fit_are_refused(target, ids):
    small = tiny_model("float64", vocab_size=2)
    drafter = DraftModel(small.params, small.config, chain(2), jnp.asarray(ids, jnp.int32))
    with pytest.raises(DrafterError, match="target_ids"):
        drafter.init(target.config, jnp.float64, slots=1, num_pages=2, page_size=4, max_tokens=8)
