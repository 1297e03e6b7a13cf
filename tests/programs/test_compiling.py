"""Programs compiled ahead: the most needed first, in threads, counted; and requests that come meanwhile."""

import io
import sys
import threading
import time
from concurrent.futures import CancelledError
from contextlib import nullcontext
from functools import partial

import jax
import numpy as np
import pytest

from jllm.engine.device import Device
from jllm.engine.engine import Engine
from jllm.errors import ConfigError, EngineClosed, NoRoomError
from jllm.programs import compiler as compiling
from jllm.programs.compiler import Compiled, Compiler, Recipe, most_needed_first
from jllm.step.buckets import Bucket, make_buckets
from jllm.step.state import Variant
from tests.tiny import greedy, serve, tiny_model

BUCKETS = (Bucket(1, 0, 0), Bucket(2, 6, 2), Bucket(3, 0, 0), Bucket(3, 13, 3))
OPTIONS = {"max_slots": 3, "page_size": 8, "max_step_tokens": 16, "buckets": BUCKETS}
PROMPTS = [[5, 6, 7], list(range(30, 60)), [9]]


@pytest.fixture(scope="module")
def model():
    return tiny_model(num_layers=1)


class Held:
    """Holds back programs that threads compile: `through` of them go through at once, the rest once it is opened. Notes
    their order; raises an error, if it is given one, instead of compiling what it held back."""

    def __init__(self, monkeypatch, through: int, error: Exception | None = None):
        self.order, self.opened, self.error = [], threading.Event(), error
        self.through = threading.Semaphore(through)
        behind = Compiler._behind

        def held(compiler, recipe, settings):
            layout = recipe.lower.keywords.get("layout")
            self.order.append("copies" if layout is None else layout.bucket)
            if not self.through.acquire(blocking=False):
                assert self.opened.wait(60)
                if self.error is not None:
                    raise self.error
            return behind(compiler, recipe, settings)

        monkeypatch.setattr(Compiler, "_behind", held)
        monkeypatch.setattr(compiling.os, "cpu_count", lambda: 1)


@pytest.mark.parametrize(("slots", "tokens"), [(4, 256), (16, 256), (512, 2048), (1, 8)])
def test_the_first_bucket_holds_every_step(slots, tokens):
    buckets = make_buckets(slots, tokens)
    first, *rest = most_needed_first(buckets)
    assert sorted([first, *rest]) == sorted(buckets)
    assert all(first.decodes >= r.decodes and first.tokens >= r.tokens and first.chunks >= r.chunks for r in rest)
    assert [r.decodes for r in rest] == sorted((r.decodes for r in rest), reverse=True)


def test_a_request_is_served_while_others_compile(model, monkeypatch):
    wants = serve(model, PROMPTS, [greedy(12)] * 3, **OPTIONS)
    held = Held(monkeypatch, through=2)
    engine = Engine(model, **OPTIONS)
    assert engine.compile_ahead(wait=False) == 4
    assert held.order[:2] == ["copies", Bucket(3, 13, 3)]
    ids = [engine.submit(p, greedy(12)) for p in PROMPTS]
    done = {e.id: e.completion for e in engine.run() if e.completion}
    assert [done[i].token_ids for i in ids] == [w.token_ids for w in wants]
    m = engine.metrics()
    assert (m["compiled_steps"], m["compile_programs"], m["compile_first_use"]) == (1, 2, 0)
    assert m["rows"] == 16 * m["steps"]
    held.opened.set()
    wait_for(engine)
    again = [engine.submit(p, greedy(12)) for p in PROMPTS]
    done = {e.id: e.completion for e in engine.run() if e.completion}
    assert [done[i].token_ids for i in again] == [w.token_ids for w in wants]
    m = engine.metrics()
    assert held.order[2:] == [Bucket(3, 0, 0), Bucket(2, 6, 2), Bucket(1, 0, 0)]
    assert m["compiled_steps"] > 1
    assert (m["compile_programs"], m["compile_first_use"]) == (5, 0)
    assert m["compile_seconds"] > 0
    engine.close()


def test_an_engine_with_adapters_begins_with_the_size_that_holds_every_step(model, monkeypatch):
    """Steps without adapters are other programs, and nothing waits for these."""
    held = Held(monkeypatch, through=2, error=ValueError("is not compiled in this test"))
    engine = Engine(model, **OPTIONS | {"buckets": BUCKETS[-2:]}, max_adapters=1)
    assert engine.compile_ahead(wait=False) == 2
    assert engine._device.programs.serves(Variant(adapters=True))
    assert held.order[:2] == ["copies", BUCKETS[-1]]
    held.opened.set()
    wait_for(engine)
    assert held.order[2:] == [BUCKETS[-1], BUCKETS[-2], BUCKETS[-2]]
    with pytest.raises(ValueError, match="is not compiled in this test"):
        engine.compile_ahead()
    engine.close()


def wait_for(engine: Engine) -> None:
    for job in list(engine._device.programs._jobs.values()):
        job.exception(60)


def test_a_bucket_that_failed_in_its_thread_is_compiled_again_when_needed(model, monkeypatch):
    held = Held(monkeypatch, through=2, error=jax.errors.JaxRuntimeError("INTERNAL: the compiler fell over"))
    engine = Engine(model, **OPTIONS)
    engine.compile_ahead(wait=False)
    held.opened.set()
    wait_for(engine)
    engine.submit(PROMPTS[0], greedy(6))
    assert [len(e.completion.token_ids) for e in engine.run() if e.completion] == [6]
    assert Bucket(1, 0, 0) in {bucket for bucket, *_ in engine._device.programs.used}


@pytest.mark.parametrize("through", [0, 1, 3])
def test_an_exception_in_a_thread_reaches_who_waits_and_joins(model, monkeypatch, through):
    held = Held(monkeypatch, through=through, error=ValueError("the compiler fell over"))
    held.opened.set()
    engine = Engine(model, **OPTIONS)
    with pytest.raises(ValueError, match="the compiler fell over"):
        engine.compile_ahead()
    assert not [t for t in threading.enumerate() if t.name.startswith("compile")]
    assert engine._device.programs._jobs == {}
    engine.submit(PROMPTS[0], greedy(3))  # and the engine is none the worse
    assert [len(e.completion.token_ids) for e in engine.run() if e.completion] == [3]


def test_what_finds_no_memory_beside_others_is_compiled_alone(model, monkeypatch):
    busy, most, alone, whole = [0], [0], [], jax.stages.Lowered.compile
    lock = threading.Lock()

    def compile_one(lowered, *options):
        with lock:
            busy[0] += 1
            most[0] = max(most[0], busy[0])
        time.sleep(0.2)
        with lock:
            others, busy[0] = busy[0] > 1, busy[0] - 1
        if others:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 517.00MiB")
        alone.append(whole(lowered, *options))
        return alone[-1]

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_one)
    monkeypatch.setattr(compiling.os, "cpu_count", lambda: 4)
    engine = Engine(model, **OPTIONS, executables=None)
    monkeypatch.setattr(Compiler, "_lower", lambda self, recipe: recipe.lower())  # all at once
    assert engine.compile_ahead() == len(BUCKETS)
    assert most[0] > 1
    assert len(alone) >= len(BUCKETS)
    engine.close()


def test_a_closed_compiler_compiles_nothing_alone(monkeypatch):
    tried, compiler = [], Compiler(Compiled())
    lowered = jax.jit(lambda x: x).lower(1)

    def compile_nothing(lowered):
        tried.append(lowered)
        compiler.close()
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 266.00MiB")

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_nothing)
    with pytest.raises(CancelledError):
        compiler.now(Recipe(lambda: lowered))
    assert tried == [lowered]


def test_a_step_that_finds_no_memory_to_compile_in_says_what_to_take_less_of(model, monkeypatch):
    def compile_nothing(lowered, *options):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 266.00MiB")

    engine = Engine(model, **OPTIONS)
    with monkeypatch.context() as patch:
        patch.setattr(jax.stages.Lowered, "compile", compile_nothing)
        with pytest.raises(NoRoomError, match="no memory left to compile a step of .*: take fewer pages"):
            engine.compile_ahead()
    engine.submit(PROMPTS[0], greedy(3))
    assert [len(e.completion.token_ids) for e in engine.run() if e.completion] == [3]


def test_close_joins_and_begins_no_more(model, monkeypatch):
    held = Held(monkeypatch, through=2)
    engine = Engine(model, **OPTIONS)
    engine.compile_ahead(wait=False)
    closing = threading.Thread(target=engine.close)
    closing.start()
    held.opened.set()
    closing.join(60)
    assert not closing.is_alive()
    assert not [t for t in threading.enumerate() if t.name.startswith("compile")]
    assert len(held.order) <= 4  # the one that had begun, and no other
    with pytest.raises(EngineClosed):
        engine.compile_ahead()


@pytest.fixture
def jax_cache(tmp_path):
    """JAX's own, which keeps everything."""
    settings = {
        "jax_compilation_cache_dir": str(tmp_path / "jax"), "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }  # fmt: skip
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    jax.experimental.compilation_cache.compilation_cache.reset_cache()


def test_hits_of_the_persistent_cache_are_counted(jax_cache, tmp_path):
    """And what it has had cannot be serialized again: nothing goes to files."""
    model = tiny_model(num_layers=1, hidden_size=24)
    seen = []
    for _ in range(2):
        jax.clear_caches()
        jax.block_until_ready(jax.jit(lambda x: x * 3 + 1)(np.arange(7)))  # not the engine's
        with pytest.warns(UserWarning, match="no compiled step is kept in .*: JAX's own compilation cache is on"):
            engine = Engine(model, **OPTIONS | {"buckets": BUCKETS[2:]}, executables=tmp_path / "steps")
        engine.compile_ahead()
        seen.append((engine.metrics()["compile_programs"], engine.metrics()["compile_cache_hits"]))
        assert not list((tmp_path / "steps").iterdir())
        engine.submit(PROMPTS[0], greedy(3))
        assert [len(e.completion.token_ids) for e in engine.run() if e.completion] == [3]
    assert seen == [(3, 0), (3, 3)]


def test_hits_elsewhere_are_not_counted():
    compiled, hit = Compiled(), partial(jax.monitoring.record_event, compiling.CACHE_HIT)
    compiler, lower = Compiler(compiled), jax.jit(lambda x: x + 1).lower

    def lowered(hits: int) -> jax.stages.Lowered:
        elsewhere = threading.Thread(target=hit)
        elsewhere.start()
        elsewhere.join()
        for _ in range(hits):
            hit()
        return lower(1.0)

    for hits in (0, 1):
        compiler.now(Recipe(partial(lowered, hits)))
        hit()
        assert compiled.cache_hits == hits
    assert (compiled.programs, compiled.first_use) == (2, 2)


def test_a_step_that_takes_more_than_is_left_is_refused(model):
    """Before it has run; what it takes is known once it is compiled."""
    free = [1 << 30]
    options = OPTIONS | {"buckets": BUCKETS[-1:]}
    engine = Engine(model, device=partial(Device, memory=lambda: free[0]), num_pages=1000, **options)
    free[0] = 1000
    says = r"a step of 3 decodes and 13 prompt tokens needs .* 1000 KV pages; what would fit: num_pages=\d+$"
    with pytest.raises(NoRoomError, match=says):
        engine.compile_ahead()
    engine = Engine(model, num_pages=3, **options)
    engine._device._memory = lambda: 0
    with pytest.raises(NoRoomError, match="fewer pages are not enough: lower max_slots or max_step_tokens"):
        engine.compile_ahead()


def test_a_compiler_closes_more_than_once_and_takes_no_more(monkeypatch):
    monkeypatch.setattr(compiling.os, "cpu_count", lambda: 2)
    compiler, recipe = Compiler(Compiled()), Recipe(lambda: jax.jit(lambda x: x + 1).lower(1.0))
    compiler.wait([compiler.add(recipe)])
    waits = compiler.add(recipe._replace(claim=lambda: nullcontext(False)))  # for an engine that compiles it
    compiler.wait([compiler.add(recipe)])
    assert not waits.done()
    compiler.close()
    compiler.close()
    assert isinstance(waits.exception(), CancelledError)
    with pytest.raises(RuntimeError, match="shutdown"):
        compiler.add(recipe)


class Screen(io.StringIO):
    """Standard error, as a terminal or not."""

    def __init__(self, terminal: bool):
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal

    def shows(self, text: str) -> bool:
        """Whether the text comes within a minute."""
        end = time.monotonic() + 60
        while text not in self.getvalue() and time.monotonic() < end:
            time.sleep(0.01)
        return text in self.getvalue()


SHOWN = {  # a terminal, progress=, whether it is shown
    "terminal": (True, None, True),
    "pipe": (False, None, False),
    "asked": (False, True, True),
    "unwanted": (True, False, False),
}


@pytest.mark.parametrize(("terminal", "progress", "shown"), SHOWN.values(), ids=SHOWN)
def test_progress_is_shown_from_the_first_moment(monkeypatch, terminal, progress, shown):
    """What is being compiled, and how far, while the first program is made; in a pipe only if asked."""
    screen, seen = Screen(terminal), []
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(compiling, "LOG_PAUSE", 0.01)
    lower = jax.jit(lambda x: x + 1).lower

    def traced() -> jax.stages.Lowered:
        if shown:
            seen.append(screen.shows("compiling: 0 of 2 programs") and screen.shows("3 decodes + 13 prompt tokens"))
        return lower(1.0)

    compiler = Compiler(Compiled(), progress)
    jobs = [compiler.add(Recipe(traced, name="3 decodes + 13 prompt tokens")), compiler.add(Recipe(lambda: lower(2)))]
    compiler.wait(jobs[:1], jobs)
    compiler.wait(jobs)
    assert seen == [True] * shown
    assert bool(screen.getvalue()) == shown
    compiler.now(Recipe(lambda: lower(1.0), name="1 decode"))
    assert ("compiling a step of 1 decode\n" in screen.getvalue()) == shown
    compiler.close()


def test_an_engine_names_its_steps(model, monkeypatch):
    screen = Screen(False)
    monkeypatch.setattr(sys, "stderr", screen)
    engine = Engine(model, **OPTIONS, progress=True)
    engine.compile_ahead()
    assert "compiling: 5 of 5 programs" in screen.getvalue()
    assert {job.name for job in map(engine._device.programs._recipe, keys(engine))} == {
        "1 decode", "2 decodes + 6 prompt tokens", "3 decodes", "3 decodes + 13 prompt tokens",
    }  # fmt: skip
    with pytest.raises(ConfigError, match="progress must be True, False or None, not 1"):
        Engine(model, **OPTIONS, progress=1)


def keys(engine: Engine) -> list:
    return engine._device.programs._keys(Variant())


def test_one_that_waits_too_long_for_another_engine_compiles_by_itself(monkeypatch):
    monkeypatch.setattr(compiling, "LONGEST", 0.0)
    compiler = Compiler(Compiled())
    recipe = Recipe(lambda: jax.jit(lambda x: x + 1).lower(1.0), claim=lambda: nullcontext(False))
    assert compiler.now(recipe)(1.0) == 2.0
    compiler.close()


def test_what_is_traced_in_a_thread_has_the_settings_of_who_asked():
    compiler, seen = Compiler(Compiled()), []

    def lower() -> jax.stages.Lowered:
        seen.append((jax.config.jax_enable_x64, jax.config.jax_default_matmul_precision))
        return jax.jit(lambda x: x + 1).lower(np.float64(1.0))

    with jax.enable_x64(True), jax.default_matmul_precision("float32"):
        made = compiler.add(Recipe(lower))
    assert made.result().in_avals[0][0].dtype == np.float64
    compiler.add(Recipe(lower)).result()
    compiler.close()
    assert seen == [(True, "float32"), (False, None)]


@pytest.mark.parametrize(
    "buckets", [(Bucket(4, 0, 0), Bucket(3, 13, 3)), (Bucket(3, 13, 3), Bucket(1, 13, 4), Bucket(3, 13, 4))]
)
def test_the_first_bucket_of_any_buckets_holds_every_step(buckets):
    assert most_needed_first(buckets)[0] == buckets[-1]
