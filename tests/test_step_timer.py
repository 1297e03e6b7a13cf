"""The one timer of whole steps: what a step is given, what it leaves, and what it says where it goes wrong."""

from functools import partial

import numpy as np
import pytest

from experiments.steps.timer import (
    Pool,
    StepTimer,
    compile_ahead,
    decode_layout,
    pack,
    pool_for,
    prefill_layout,
    step_buffer,
    step_layout,
)
from tests.tiny import tiny_model


def timer_of(pool: Pool) -> StepTimer:
    model = tiny_model()
    return StepTimer(model.params, model.config, pool)


def test_whole_prompts_are_chunks_that_sample():
    layout = step_layout("prefill", 3, 5)
    assert layout == prefill_layout(3, 5)
    np.testing.assert_array_equal(step_buffer("prefill", 3, 5), pack(layout, [(0, 0, 5), (1, 0, 5), (2, 0, 5)], 5))
    np.testing.assert_array_equal(step_buffer("decode", 3, 5), pack(decode_layout(3)))


def test_fewer_slots_than_the_pool_has_are_placed_in_pages_of_their_own():
    timer = timer_of(Pool(4, 3, 16, None, pages=6))
    timer.renew()
    timer.place(20, slots=3, pages_each=2)
    slots = timer.state.slots
    np.testing.assert_array_equal(slots.pages[:3, :2], [[0, 1], [2, 3], [4, 5]])
    assert slots.done.tolist() == [False, False, False, True]
    assert slots.length.tolist()[:3] == [20] * 3


def test_a_timed_step_leaves_the_slots_and_says_how_many_tokens_it_made():
    timer, layout = timer_of(pool_for(2, 30, 16, None)), decode_layout(2)
    step = compile_ahead({layout: partial(timer.lower, layout)}, 1)[layout].result()
    timer.renew()
    timer.place(9)
    assert timer.one(step, pack(layout), 2, 3, 1) > 0
    assert timer.state.slots.length.tolist() == [9, 9]
    with pytest.raises(RuntimeError, match="made 2 tokens instead of 3"):
        timer.one(step, pack(layout), 3, 3, 1)


def test_a_step_that_cannot_be_traced_fails_alone():
    def broken():
        raise NotImplementedError("no such shape")

    timer, layout = timer_of(pool_for(1, 30, 16, None)), decode_layout(1)
    jobs = compile_ahead({"broken": broken, "good": partial(timer.lower, layout)}, 2)
    assert jobs["good"].result() is not None
    with pytest.raises(NotImplementedError, match="no such shape"):
        jobs["broken"].result()
