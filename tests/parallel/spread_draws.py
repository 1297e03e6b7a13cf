"""Draws over a vocabulary that devices have in parts: tokens of one device, and what is exchanged for them."""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jllm.engine.engine import Engine
from jllm.engine.gate import variant_for
from jllm.engine.request import SamplingParams
from jllm.model.sampling import Draws, Sampling, neutral_sampling, sample
from jllm.parallel.mesh import make_mesh, rank_config, spread
from jllm.step import draws
from jllm.step.batch import PromptChunk, ragged_batch
from jllm.step.merge import eager_step
from jllm.step.state import Variant, init_state
from tests.parallel.meshes import model_of, on_mesh
from tests.tiny import greedy, one_size

jax.config.update("jax_enable_x64", True)
NAN, INF = float("nan"), float("inf")


def rows_of(vocabulary: int, dtype: str) -> tuple[jax.Array, Sampling]:
    """Logits, of which some rows have ties of the largest, at either end and all over, or bans, NaN and infinity; and
    how they are drawn: every third greedily, and every other with filters."""
    rng, R = np.random.default_rng(vocabulary), 23
    x = rng.normal(size=(R, vocabulary)) * 3
    x[1, [0, -1]] = x[2, [vocabulary // 2, -1]] = 99
    x[3:6], x[6, 0], x[7, -1], x[8, vocabulary // 3] = 0, NAN, INF, NAN
    x[9:11], x[11, : vocabulary // 2], x[12, -1] = -INF, -INF, -INF
    temperature = np.resize([0.0, 1.0, 0.5, 0.0, 1e-35, 1e31], R).astype(np.float32)
    odd = np.arange(R) % 2 == 1
    filters = {"top_k": np.where(odd, 3, 0), "top_p": np.where(odd, 0.9, 1), "min_p": np.where(odd, 0.02, 0)}
    sampling = neutral_sampling(R)
    filters = {name: value.astype(getattr(sampling, name).dtype) for name, value in filters.items()}
    return jnp.asarray(x, dtype), replace(
        sampling, temperature=temperature, seed=np.arange(R, dtype=np.uint32), **filters
    )


@pytest.mark.parametrize(
    ("devices", "vocabulary", "dtype"),
    [(2, 97, "float32"), (4, 1001, "float64"), (8, 97, "float64"), (8, 5, "float32")],
)
def test_tokens_are_those_of_whole_rows(devices, vocabulary, dtype):
    logits, sampling = rows_of(vocabulary, dtype)
    index = jnp.arange(len(logits), dtype=jnp.int32)
    wanted = sample(logits, sampling, index, backend="xla")
    config = rank_config(spread(model_of(vocab_size=vocabulary).config, make_mesh(devices)))
    padded = jnp.pad(logits, ((0, 0), (0, -vocabulary % devices)), constant_values=INF)
    specs = {"in_specs": (P(None, "model"), P(), P()), "out_specs": P()}
    filtered = sampling.top_k > 0
    for how, rows in zip(Draws, (sampling.temperature == 0, ~filtered, filtered | True), strict=True):
        run = jax.jit(jax.shard_map(draws.draw_apart(config, how), mesh=make_mesh(devices), **specs, check_vma=False))
        for found, one in zip(run(padded, sampling, index), wanted, strict=True):
            np.testing.assert_array_equal(found[rows], one[rows])


def exchanged(how: Draws) -> dict[str, int]:
    """Bytes that collectives of a step on two devices give each of them, by dtype of JAX, without those of layers."""
    two = on_mesh(model_of(num_layers=1, vocab_size=1001), 2)
    state = init_state(two.config, slots=3, num_pages=6, page_size=8)
    batch = ragged_batch([PromptChunk(0, [5, 6, 7], pages=[2, 0])], decodes=[1, 2])
    made = jax.jit(partial(eager_step, config=two.config, variant=Variant(draws=how))).lower(two.params, state, batch)
    found: dict[str, int] = {}
    for result in re.findall(
        r"= (.*?) (?:all-gather|all-to-all|collective-permute)(?:-start)?\(", made.compile().as_text()
    ):
        for kind, shape in re.findall(r"(\w+)\[([\d,]*)\]", result):
            size = (
                int(re.sub("[a-z]+", "", kind)) // 8 * int(np.prod([int(n) for n in shape.split(",") if n], initial=1))
            )
            found[kind] = found.get(kind, 0) + size
    return found


def test_bytes_that_are_exchanged(monkeypatch):
    """Three rows: of each, from each device, 8 bytes of a value and 4 of an id; with noise twice; else all logits, or
    those of two rows and the tokens of four."""
    once = 3 * 2 * 12
    assert exchanged(Draws.GREEDY) == {"s32": once}
    assert exchanged(Draws.NOISE) == {"s32": 2 * once}
    assert exchanged(Draws.FILTERED) == {"f64": 3 * 1002 * 8}
    monkeypatch.setattr(draws, "LEAST", 0)
    assert exchanged(Draws.FILTERED) == {"f64": 2 * 1002 * 8, "s32": 4 * 4}


def test_steps_that_take_whole_rows_are_one_program_however_they_draw():
    first = greedy(6)
    assert variant_for([first], by_draws=True) != variant_for([first])
    for asks in ({"presence_penalty": 1.0}, {"logprobs": 0}):
        assert variant_for([first, replace(first, **asks)], by_draws=True) == variant_for([replace(first, **asks)])
    engine = Engine(on_mesh(model_of(), 2), **one_size(3))
    engine.compile_ahead([first], wait=False)
    assert {variant.draws for _, variant, _ in engine._device.programs._made} == {Draws.GREEDY}
    engine.close()


def test_only_what_was_compiled_ahead_draws_in_parts():
    """Greedy requests do; with one that filters among them all steps have programs for it, and wait for these."""
    model, asked = model_of(), [greedy(6), greedy(6), SamplingParams(top_p=0.9, min_p=0.02, seed=4, max_new_tokens=6)]
    prompts = [[5, 6, 7], [9], [40, 41]]
    found = []
    for one in (model, on_mesh(model, 2)):
        engine = Engine(one, **one_size(3))
        engine.compile_ahead(asked[:2])
        ids = [engine.submit(*each) for each in zip(prompts, asked)]
        done = {event.id: event.completion.token_ids for event in engine.run() if event.completion}
        found.append([done[i] for i in ids])
        used = {variant.draws for _, variant, _ in engine._device.programs.used}
        engine.close()
    assert found[0] == found[1]
    assert used == {Draws.GREEDY, Draws.FILTERED}
    engine = Engine(on_mesh(model, 2), **one_size(3))
    ids = [engine.submit(*each) for each in zip(prompts, [replace(p, ignore_eos=True) for p in asked])]
    list(engine.run())
    assert {variant.draws for _, variant, _ in engine._device.programs.used} == {Draws.FILTERED}
