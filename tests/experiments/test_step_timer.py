"""The one timer of whole steps: what a step is given, what it leaves, and what it says where it goes wrong."""

import json
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.steps import timer
from experiments.steps.timer import (
    Pool,
    StepTimer,
    chunk_of,
    compile_ahead,
    layout_of,
    pool_for,
    random_params,
    step_of,
)
from jllm.errors import QuantizationError
from jllm.programs.compiler import Recipe
from jllm.quant.quantize import quantize, weight_formats
from tests.tiny import tiny_model

RULES = [
    ["layers.0.mlp.down_proj", "w8a16"], ["layers.2.mlp.down_proj", "bf16"], ["mlp.down_proj", "w4a16-g128|w4a16-g32"],
    ["layers.1.self_attn.o_proj", "w8a16"], ["lm_head", "w8a16"],
]  # fmt: skip


@pytest.fixture
def by_layer(tmp_path):
    """A file whose rules go by the layer's number."""

    def write(*more: list[str]) -> str:
        file = tmp_path / "by_layer.json"
        file.write_text(json.dumps({"rules": [*more, *RULES]}))
        return str(file)

    return write


@pytest.mark.parametrize("tied", [False, True])
def test_rules_by_layer_decide_random_weights_as_they_do_loaded_ones(by_layer, tied):
    model = tiny_model(num_layers=12, intermediate_size=64, tie_embeddings=tied)
    made = random_params(model.config, "float32", by_layer())
    found = weight_formats(made)
    assert found == weight_formats(quantize(model.params, by_layer()))
    assert {name: fmt.name for name, fmt in found.items()} == {
        "model.layers.0.mlp.down_proj": "w8a16", "model.layers.1.self_attn.o_proj": "w8a16", "lm_head": "w8a16",
        **{f"model.layers.{i}.mlp.down_proj": "w4a16-g32" for i in range(12) if i not in (0, 2)},
    }  # fmt: skip
    assert jax.tree.map(jnp.shape, made) == jax.tree.map(jnp.shape, quantize(model.params, by_layer()))


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        (["layers.12.mlp.down_proj", "w8a16"], "'layers.12.mlp.down_proj' matches no weight"),
        (["layers.11.mlp.down_proj", "w4a16-g128"], "layers.11.mlp.down_proj: w4a16-g128 cannot hold shape"),
    ],
)
def test_a_scheme_that_does_not_fit_the_model_is_refused_before_weights_are_made(by_layer, rule, says, monkeypatch):
    config = tiny_model(num_layers=12, intermediate_size=64).config
    monkeypatch.setattr(timer, "init_params", None)
    with pytest.raises(QuantizationError, match=says):
        random_params(config, "float32", by_layer(rule))


def timer_of(pool: Pool) -> StepTimer:
    model = tiny_model()
    return StepTimer(model.params, model.config, pool)


def test_whole_prompts_are_chunks_that_sample():
    layout, buffer = step_of("prefill", 3, 5)
    assert layout == layout_of(tokens=15, prompts=3)
    batch = layout.unpack(buffer)
    assert (batch.chunk_len.tolist(), batch.chunk_final.tolist()) == ([5] * 3, [1] * 3)
    first, last = chunk_of(0, 0, 3, 5), chunk_of(0, 3, 2, 5)
    assert [first.final, last.final] == [False, True]
    assert [*first.tokens, *last.tokens] == list(range(5))


def test_fewer_slots_than_the_pool_has_are_placed_in_pages_of_their_own():
    timer = timer_of(Pool(4, 3, 16, None, pages=6))
    timer.renew()
    timer.place(20, slots=3, pages_each=2)
    slots = timer.state.slots
    np.testing.assert_array_equal(slots.pages[:3, :2], [[0, 1], [2, 3], [4, 5]])
    assert slots.done.tolist() == [False, False, False, True]
    assert slots.length.tolist()[:3] == [20] * 3


@pytest.mark.parametrize("kv_cache", [None, "kivi2-g8-r16"])
def test_a_timed_step_leaves_the_slots_and_says_how_many_tokens_it_made(kv_cache):
    timer, (layout, buffer) = timer_of(pool_for(2, 30, 16, kv_cache)), step_of("decode", 2)
    step = compile_ahead({layout: timer.recipe(layout)}, 1)[layout].result()
    timer.renew()
    timer.place(9)
    assert timer.one(step, buffer, 2, 3, 1) > 0
    assert timer.state.slots.length.tolist() == [9, 9]
    with pytest.raises(RuntimeError, match="made 2 tokens instead of 3"):
        timer.one(step, buffer, 3, 3, 1)


def test_steps_for_a_gpu_are_traced_in_other_processes(monkeypatch):
    """On a CPU it stands in for that: the timer itself traces nothing."""
    made, (layout, buffer) = timer_of(pool_for(2, 30, 16, None)), step_of("decode", 2)
    monkeypatch.setattr(timer, "is_host", lambda: False)
    monkeypatch.setattr(timer, "usual_processes", lambda: 2)
    monkeypatch.setattr(made, "lower", lambda layout: pytest.fail("traced in the timer's own process"))
    step = compile_ahead({layout: made.recipe(layout)}, 1)[layout].result()
    made.renew()
    made.place(9)
    assert made.one(step, buffer, 2, 3, 1) > 0


def test_an_interrupt_ends_the_threads_that_compile(monkeypatch):
    def interrupted(jobs):
        raise KeyboardInterrupt

    monkeypatch.setattr(timer, "wait", interrupted)
    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        compile_ahead({i: Recipe(jax.jit(lambda x: x).trace(i).lower) for i in range(3)}, 2)
    assert set(threading.enumerate()) <= before


def test_a_step_that_cannot_be_traced_fails_alone():
    def broken():
        raise NotImplementedError("no such shape")

    timer, layout = timer_of(pool_for(1, 30, 16, None)), layout_of(1)
    jobs = compile_ahead({"broken": Recipe(broken), "good": timer.recipe(layout)}, 2)
    assert jobs["good"].result() is not None
    with pytest.raises(NotImplementedError, match="no such shape"):
        jobs["broken"].result()
