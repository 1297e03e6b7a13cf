"""What is compiled for steps with drafters: pools are changed in place, never copied; drafts at rest cost nothing."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jllm.engine.drafters import copy_of
from jllm.programs.packed_step import Layout, packed_step
from jllm.speculative import quantized_copy
from jllm.speculative.draft_model import DraftModel
from jllm.speculative.ngram import NGram
from jllm.speculative.tree import Tree, chain
from jllm.step.buckets import Bucket
from jllm.step.merge import eager_step
from jllm.step.state import init_state
from tests.tiny import tiny_model

PAGES = 37


def copies(compiled: jax.stages.Compiled) -> list[str]:
    """Returns the instructions that write as much as a pool has, of one layer or of two."""
    sizes = f"{PAGES}|{2 * PAGES}"
    return re.findall(rf"= \S*\[(?:{sizes}),\S* (?:copy|transpose|concatenate)\(", compiled.as_text())


PAIRS = [("ngram", "f32"), ("ngram", "int8-g8"), ("tree", "f32"), ("copy", "int8-g8")]
OTHERS = [("draft", "f32"), ("draft", "int8-g8"), ("tree", "int8-g8"), ("copy", "f32")]


@pytest.mark.parametrize(
    ("name", "kv_cache"), [*PAIRS, *(pytest.param(*pair, marks=pytest.mark.exhaustive) for pair in OTHERS)]
)
def test_no_pool_is_copied(name, kv_cache):
    model, draft = tiny_model(), tiny_model(seed=3, num_layers=1, hidden_size=16)
    tree = Tree((0, 0, 1, 1)) if name == "tree" else chain(3)
    drafter = NGram(3) if name == "ngram" else DraftModel(draft.params, draft.config, tree)
    if name == "copy":
        drafter = copy_of(model, "w8a16", tree)
    sizes = {"slots": 4, "num_pages": PAGES, "page_size": 8, "dtype": "float32", "kv_cache": kv_cache}
    state = init_state(model.config, **sizes, drafter=drafter)
    layout = Layout(Bucket(4, 0, 0, tree.size), 8)
    buffer = jax.ShapeDtypeStruct((layout.size,), np.int32)
    arguments, static = (model.params, state, buffer, drafter), {"config": model.config, "layout": layout}
    donated = packed_step.lower(*arguments, **static).compile()
    assert not copies(donated)
    if name != "ngram":  # how a copy looks depends on the pool's format alone
        return

    def kept(params, state, buffer, drafter):
        return eager_step(params, state, layout.unpack(buffer), drafter, config=model.config)

    assert copies(jax.jit(kept).lower(*arguments).compile()), "a copy would be seen"


def test_a_copy_at_rest_computes_nothing(monkeypatch):
    """It has no K and V of its own to keep up with the target's, as a draft model has."""
    model = tiny_model()
    drafter = copy_of(model, "w8a16", chain(3))
    state = init_state(model.config, slots=4, num_pages=PAGES, page_size=8, dtype="float32", drafter=drafter)
    layout = Layout(Bucket(4, 0, 0), 8)
    batch = layout.unpack(jnp.zeros(layout.size, jnp.int32))

    def trace(wanted: bool) -> None:
        jax.eval_shape(partial(eager_step, config=model.config, wanted=wanted), model.params, state, batch, drafter)

    trace(True)
    monkeypatch.setattr(quantized_copy, "backbone", None)
    trace(False)
    with pytest.raises(TypeError, match="NoneType"):
        trace(True)
