"""Rows of a step: short segments of several rows compute what one row after the other does, for chains and trees."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jllm.analysis.activations import tap
from jllm.errors import EvaluationError
from jllm.model.backbone import backbone, head
from jllm.model.cache import make_cache, parse_kv_cache
from jllm.model.paged import Chunks, ShortSegments, no_chunks, no_segments, paged_batch
from tests.tiny import CONFIG, full_logits, tiny_model

TOKENS = np.random.default_rng(5).integers(2, 97, 37).tolist()


@pytest.fixture(scope="module")
def model():
    with jax.enable_x64(True):
        return tiny_model("float64", windows=(None, 12)[: CONFIG.num_layers])


@pytest.mark.parametrize("segment", [2, 3, 7])
@pytest.mark.parametrize("kv_cache", ["f64", "int8-g8"])
def test_segments_are_one_row_after_the_other(model, segment, kv_cache):
    with jax.enable_x64(True):
        options = {"prompt": 11, "kv_cache": kv_cache, "page_size": 8}
        one = tap(model, TOKENS, ["logits", "layers.*.k"], **options)
        several = tap(model, TOKENS, ["logits", "layers.*.k"], segment=segment, **options)
        for name, want in one.items():
            np.testing.assert_allclose(several[name], want, rtol=1e-9, atol=1e-11)
    with pytest.raises(EvaluationError, match="segment must be in 1 .. 64, not 0"):
        tap(model, TOKENS, ["logits"], segment=0)


def test_each_branch_of_a_tree_is_a_sequence_of_its_own(model):
    """Two sequences: a tree after 13 tokens, and one with fewer rows after 2. Branches share positions, not places."""
    drafts = np.asarray([[40, 41, 42, 43, 44], [50, 51, 0, 0, 0]], np.int32)
    parents = [[-1, 0, 0, 2, -1], [-1, -1]]
    masks = np.zeros((2, 5, 1), np.uint32)
    for r, tree in enumerate(parents):
        for i, parent in enumerate(tree):
            masks[r, i] = (1 << i) | (int(masks[r, parent, 0]) if parent >= 0 else 0)
    prompts = [TOKENS[:13], TOKENS[20:22]]
    pages = jnp.asarray([[4, 1, 3], [0, 2, 5]], jnp.int32)
    places = {"num_pages": 6, "page_size": 8}
    with jax.enable_x64(True):
        cache = make_cache(model.config, 6, 8, parse_kv_cache("f64", model.config, jnp.float64))
        starts = jnp.asarray([len(prompt) for prompt in prompts], jnp.int32)
        flat = jnp.asarray([token for prompt in prompts for token in prompt], jnp.int32)
        chunks = Chunks(flat, jnp.zeros(2, jnp.int32), starts, pages)
        _, cache = backbone(model.params, model.config, paged_batch(no_segments(3), chunks, **places), cache)
        rows = jnp.asarray([len(tree) for tree in parents], jnp.int32)
        short = ShortSegments(jnp.asarray(drafts), starts, rows, pages, jnp.asarray(masks))
        batch = paged_batch(short, no_chunks(3), **places)
        assert batch.positions.reshape(2, 5).tolist() == [[13, 14, 14, 15, 13], [2, 2, 0, 0, 0]]
        hidden, _ = backbone(model.params, model.config, batch, cache)
        logits = np.asarray(head(model.params, model.config, hidden)).reshape(2, 5, -1)
        for r, tree in enumerate(parents):
            for i in range(len(tree)):
                path = [int(drafts[r, j]) for j in range(i + 1) if int(masks[r, i, 0]) >> j & 1]
                want = full_logits(model, [*prompts[r], *path])[-1]
                np.testing.assert_allclose(logits[r, i], want, rtol=1e-9, atol=1e-11)


def test_a_row_that_is_not_in_use_writes_nothing(model):
    short = ShortSegments(
        jnp.zeros((2, 3), jnp.int32), jnp.asarray([5, 0]), jnp.asarray([2, 0]), jnp.asarray([[1], [0]], jnp.int32)
    )
    batch = paged_batch(short, no_chunks(1), num_pages=4, page_size=8)
    assert batch.page.tolist() == [1, 1, 4, 4, 4, 4]
    assert batch.offset.tolist()[:2] == [5, 6]
    assert batch.decode_lengths.tolist() == [7, 0]
    assert batch.short_rows == 6
