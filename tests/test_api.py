"""generate() and stream() compile before they begin, say so, and keep what they compiled."""

import os
from functools import partial
from typing import Unpack, get_type_hints

import jax
import pytest

import jllm
from jllm import SamplingParams, api
from jllm.engine.engine import Engine
from jllm.engine.one_run import options_for_run
from jllm.engine.options import EngineKeywords, EngineOptions
from jllm.errors import ConfigError, RequestError
from jllm.programs import compiler as compiling
from jllm.programs import executables
from jllm.step import forward as step_forward
from jllm.step.buckets import Bucket
from tests.tiny import greedy, tiny_model


@pytest.fixture(scope="module")
def model():
    return tiny_model(num_layers=1)


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("jllm.programs.folder.sys.platform", "linux")
    return tmp_path / "jllm" / "steps"


@pytest.fixture
def bars(monkeypatch):
    """Of how many programs progress was shown."""
    shown, tqdm = [], compiling.tqdm

    def bar(total, **more):
        shown.append(total)
        return tqdm(total=total, **more)

    monkeypatch.setattr(compiling, "tqdm", bar)
    return shown


def test_steps_are_compiled_ahead_with_progress_and_kept(model, cache, bars, monkeypatch):
    def told(count: int) -> list[tuple[int, ...]]:
        return [done.token_ids for done in jllm.generate(model, [[5, 6, 7]] * count, greedy(3))]

    one, two = told(1), told(2)
    assert two == one * 2
    assert len(list(cache.iterdir())) == 4  # a prefill and a decode for each number of slots
    assert len(bars) == 4  # the first of each, then the rest
    assert all(bars)
    jax.clear_caches()
    executables._read.cache_clear()  # as in another process
    monkeypatch.setattr(step_forward, "tapped_backbone", None)  # tracing would call it
    assert (told(1), told(2)) == (one, two)


def test_steps_are_kept_where_it_is_said(model, cache, tmp_path):
    jllm.generate(model, [5, 6, 7], greedy(3), executables=tmp_path / "here")
    jllm.generate(model, [5, 6, 7], greedy(3), executables=None)
    assert len(list((tmp_path / "here").iterdir())) == 2
    assert not cache.exists()


def test_nothing_is_kept_where_jax_does_or_files_cannot_be(cache, monkeypatch):
    assert api._compile_cache() == cache
    with monkeypatch.context() as patch:
        patch.setattr(api, "jax_cache_is_on", lambda: True)
        assert api._compile_cache() is None
    os.rmdir(cache)
    cache.write_text("")
    with pytest.warns(UserWarning, match="compile cache .* cannot be made: .*; compiling without it"):
        assert api._compile_cache() is None


def test_mistakes_are_found_before_anything_is_compiled(model, bars):
    for prompts in ([[5, 6], []], [[5, 6], [-1]], [[5, 6], [7] * 500]):
        with pytest.raises(RequestError):
            jllm.stream(model, prompts, greedy(3))
    for options in ({"max_slots": "two"}, {"max_slots": True}, {"max_step_tokens": 0}, {"slots": 3}):
        with pytest.raises(ConfigError):
            jllm.stream(model, [[5, 6]], greedy(3), **options)
    assert not bars
    assert jllm.generate(model, [], greedy(3)) == []


def test_sizes_of_a_run():
    run = partial(options_for_run, given={"num_pages": None})
    one, four = SamplingParams(), SamplingParams(n=4)
    assert run([(3, one)]) == {"max_slots": 1, "max_step_tokens": 65, "buckets": (Bucket(1, 0, 0), Bucket(1, 64, 1))}
    assert run([(65, one)])["buckets"] == (Bucket(1, 0, 0), Bucket(1, 256, 1))
    assert run([(3, four), (3, one)])["buckets"] == (Bucket(8, 0, 0), Bucket(8, 64, 8))
    assert run([(3, four)] * 5)["buckets"] == (Bucket(16, 0, 0), Bucket(16, 64, 16), Bucket(16, 256, 16))
    assert run([]) == run([(3, one)])
    given = {"max_slots": 2, "max_step_tokens": 3, "kv_cache": "int8-g8"}
    assert options_for_run([(3, one)] * 3, given) == given | {"buckets": (Bucket(2, 0, 0), Bucket(2, 1, 1))}
    buckets = (Bucket(3, 9, 2),)
    assert options_for_run([(3, one)] * 9, {"buckets": buckets}) == {"buckets": buckets, "max_slots": 3}
    assert options_for_run([(3, one)] * 9, {"num_pages": 5})["max_slots"] == 5


def test_an_editor_knows_the_options_wherever_they_are_taken():
    fields, keywords = get_type_hints(EngineOptions), get_type_hints(EngineKeywords)
    assert keywords == {name: kind | None for name, kind in fields.items()}
    for takes in (Engine.__init__, api.generate, api.stream):
        assert takes.__annotations__["options"] == Unpack[EngineKeywords]
