"""Pages are copied in place, all formats whole, and only where a plan asks for it."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jllm.engine.engine import Engine
from jllm.kv_policies.extent import Extent
from jllm.model.cache import COPIES, cache_bytes, copy_pages, jit_copy_pages, make_cache, parse_kv_cache
from jllm.step.buckets import Bucket
from tests.tiny import CONFIG, greedy, tiny_model

NOWHERE = np.iinfo(np.int32).max
FORMATS = ["f32", "bf16", "fp8", "int8-g8", "k=int4-g16,v=f16", "k=int4-g8-zp-h,v=int8-g8"]


def filled(kv_cache: str, pages: int = 12):
    """A cache of random bits."""
    cache = make_cache(CONFIG, pages, 8, parse_kv_cache(kv_cache, CONFIG, jnp.float32))
    rng = np.random.default_rng(0)

    def fill(leaf):
        bits = rng.integers(0, 100, (leaf.size * leaf.dtype.itemsize,), np.uint8)
        return jnp.asarray(bits.view(leaf.dtype).reshape(leaf.shape))

    return jax.tree.map(fill, cache)


def pairs(*some: tuple[int, int]) -> np.ndarray:
    pages = np.full((COPIES, 2), NOWHERE, np.int32)
    pages[: len(some)] = some
    return pages


def bits(cache) -> list[np.ndarray]:
    return [np.asarray(leaf).view(np.uint8) for leaf in jax.tree.leaves(cache)]


@pytest.mark.parametrize("kv_cache", FORMATS)
def test_pages_are_copied_bit_for_bit_and_others_stay(kv_cache):
    cache = filled(kv_cache)
    before = bits(cache)
    copied = jax.jit(copy_pages)((cache,), pairs((3, 7), (3, 0), (11, 2), (5, 12), (5, -1)))
    for old, new in zip(before, bits(copied), strict=True):
        expected = old.copy().reshape(len(cache), -1, *old.shape[1:])
        expected[:, [7, 0, 2]] = expected[:, [3, 3, 11]]
        np.testing.assert_array_equal(new, expected.reshape(old.shape))


def test_all_are_read_before_any_is_written():
    """Not that the scheduler asks for it."""
    cache = filled("f32")
    before = bits(cache)[0]
    after = bits(jax.jit(copy_pages)((cache,), pairs((1, 2), (2, 1))))[0]
    np.testing.assert_array_equal(after[[1, 2]], before[[2, 1]])


@pytest.mark.parametrize("kv_cache", FORMATS)
def test_the_pool_is_neither_copied_nor_converted(kv_cache):
    cache = jax.eval_shape(lambda: filled_shapes(kv_cache))
    compiled = jit_copy_pages.lower((cache,), jax.ShapeDtypeStruct((COPIES, 2), np.int32)).compile()
    memory = compiled.memory_analysis()
    rows = cache_bytes(cache) * COPIES // 400
    assert memory.alias_size_in_bytes >= cache_bytes(cache)
    assert memory.temp_size_in_bytes < 4 * rows
    assert not re.search(rf"\[{len(cache) * 400},\S* copy\(", compiled.as_text())


def filled_shapes(kv_cache: str):
    return make_cache(CONFIG, 400, 8, parse_kv_cache(kv_cache, CONFIG, jnp.float32))


OPTIONS = {"max_slots": 3, "page_size": 8, "max_step_tokens": 16, "num_pages": 24, "buckets": (Bucket(3, 16, 3),)}


class Short:
    """Always expects two tokens more."""

    def predict(self, prompt, params, quantile, produced=0):
        return produced + 2

    def observe(self, prompt, params, output, ended):
        pass

    def alive(self, outputs):
        pass


def test_moved_extents_change_no_token_and_steps_without_copies_dispatch_none(monkeypatch):
    from jllm.step import between_steps

    model, calls = tiny_model(num_layers=1), []
    prompts = [[5, 6, 7], list(range(30, 50)), [9]]

    def tokens(**options):
        engine = Engine(model, **OPTIONS, **options)
        ids = [engine.submit(p, greedy(40)) for p in prompts]
        done = {e.id: e.completion.token_ids for e in engine.run() if e.completion}
        return [done[i] for i in ids], engine.metrics()

    def counted(cache, pages):
        calls.append(int((pages[:, 1] != NOWHERE).sum()))
        return jit_copy_pages(cache, pages)

    monkeypatch.setattr(between_steps, "jit_copy_pages", counted)
    want, _ = tokens()
    assert calls == []
    got, m = tokens(kv_policy=Extent(Short(), overflow="move"))
    assert got == want
    assert sum(calls) == m["copied_pages"] > 4
    assert len(calls) < m["steps"] / 2
    assert m["moves"] > 1
    got, m = tokens(kv_policy=Extent(Short()))
    assert (got, m["copied_pages"]) == (want, 0)
    assert m["outgrown"] > 4


def test_a_move_that_forgets_the_copy_changes_tokens(monkeypatch):
    """The fault that the test above is there for."""
    from jllm.step import between_steps

    model = tiny_model(num_layers=1)

    def tokens(**options):
        engine = Engine(model, **OPTIONS, **options)
        ids = [engine.submit(p, greedy(40)) for p in ([5, 6, 7], list(range(30, 50)), [9])]
        done = {e.id: e.completion.token_ids for e in engine.run() if e.completion}
        return [done[i] for i in ids]

    want = tokens()
    monkeypatch.setattr(between_steps, "jit_copy_pages", lambda cache, pages: cache)
    assert tokens(kv_policy=Extent(Short(), overflow="move")) != want
