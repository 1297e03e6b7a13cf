"""Steps that other processes trace: the same programs, with the settings of who asks; and what happens where they
cannot."""

import os
import re
import subprocess
import sys
from collections import Counter
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.interpreters import mlir
from jaxlib.mlir import ir

from jllm.distributed import processes
from jllm.engine.engine import Engine
from jllm.errors import ConfigError
from jllm.files.hf_config import load_config
from jllm.model.cache import make_cache, parse_kv_cache
from jllm.model.hooks import Hooks
from jllm.model.param_specs import abstract_params
from jllm.programs import programs, tracing
from jllm.programs.packed_step import Layout, packed_step
from jllm.programs.tracing import Tracers, TracingFailed, named
from jllm.step.buckets import Bucket
from jllm.step.state import State, make_slots
from pallas_kernels.backends import TARGET
from tests.tiny import CONFIG, greedy, serve, tiny_model

BUCKETS = (Bucket(3, 0, 0), Bucket(3, 13, 3))
OPTIONS = {"max_slots": 3, "page_size": 8, "max_step_tokens": 16, "buckets": BUCKETS}
PROMPTS = [[5, 6, 7], list(range(30, 60)), [9]]


def job(config=CONFIG, dtype=jnp.float32):
    """packed_step's arguments, by shape, and static ones: one sequence decodes."""
    layout = Layout(Bucket(1, 0, 0), deltas=4)
    formats = parse_kv_cache(None, config, dtype)
    state = jax.eval_shape(lambda: State(make_cache(config, 64, 16, formats), make_slots(4, 8)))
    arguments = abstract_params(config, dtype), state, jax.ShapeDtypeStruct((layout.size,), np.int32)
    return arguments, {"config": config, "layout": layout}


@pytest.fixture(scope="module")
def tracers():
    made = Tracers(1)
    yield made
    made.close()


def test_kernels_that_others_lower_find_the_library_that_launches_them():
    """A process that lowers no kernel itself has not imported what names it."""
    asks = "import sys; from jllm.programs.tracing import Tracers; Tracers(1).close()"
    code = f"{asks}; assert 'jax.experimental.mosaic.gpu' in sys.modules"
    subprocess.run([sys.executable, "-c", code], env=os.environ | {TARGET: "9.0"}, check=True)


def served(engine: Engine) -> list[tuple[int, ...]]:
    ids = [engine.submit(prompt, greedy(8)) for prompt in PROMPTS]
    done = {event.id: event.completion for event in engine.run() if event.completion}
    return [done[i].token_ids for i in ids]


def test_an_engine_runs_what_others_traced(tmp_path):
    model = tiny_model(num_layers=1, intermediate_size=56)  # shapes that no other test has traced here
    engine, before = Engine(model, **OPTIONS, compile_processes=2, executables=tmp_path), packed_step._cache_size()
    engine.compile_ahead()
    found = served(engine)
    m = engine.metrics()
    assert (m["compile_elsewhere"], m["compile_programs"], m["compile_first_use"]) == (1, 3, 0), "one here"
    assert packed_step._cache_size() == before
    again = Engine(model, **OPTIONS, executables=tmp_path)  # their files are those of any start
    again.compile_ahead()
    assert again.metrics()["compile_loaded"] == 2
    wants = serve(model, PROMPTS, [greedy(8)] * 3, **OPTIONS)
    assert found == served(again) == [want.token_ids for want in wants]
    engine.close()
    again.close()


def kernels(lowered: jax.stages.Lowered) -> list[str]:
    """The modules of Mosaic's kernels, as text without the number in their names, in order."""
    found: list[str] = []

    def walk(operation):
        attributes = operation.attributes
        if operation.name == "stablehlo.custom_call" and attributes["call_target_name"].value == "mosaic_gpu_v2":
            content = ir.StringAttr(ir.DictAttr(attributes["mhlo.backend_config"])["module"]).value_bytes
            with mlir.make_ir_context() as context:
                context.allow_unregistered_dialects = True
                text = ir.Module.parse(content).operation.get_asm(enable_debug_info=False)
            found.append(re.sub(r'(dump_basename = "[a-z_]+)_\d+"', r'\1"', text))
        for region in operation.regions:
            for block in region.blocks:
                for inner in block.operations:
                    walk(inner.operation)

    walk(lowered.compiler_ir("stablehlo").operation)
    return sorted(found)


def test_kernels_for_a_hopper_gpu_are_those_that_are_lowered_here(monkeypatch):
    monkeypatch.setenv(TARGET, "9.0")
    config = replace(load_config(Path(__file__).parents[2] / "configs" / "llama-2-7b.json"), num_layers=1)
    arguments, static = job(config, jnp.bfloat16)
    own = packed_step.trace(*arguments, **static).lower(lowering_platforms=("cuda",))
    tracers = Tracers(1)
    try:
        exported = tracers.export(arguments, static)
    finally:
        tracers.close()
    there = jax.jit(named(exported)).trace(*arguments).lower(lowering_platforms=("cuda",))
    assert len(kernels(there)) > 8
    assert kernels(there) == kernels(own)


def operations(program: jax.stages.Compiled) -> tuple[Counter[str], str]:
    """Of the program that XLA made: how many there are of each kind, and which results take the place of arguments."""
    text = program.as_text()
    (alias,) = re.findall(r"input_output_alias=\{.*?\) \}", text)
    return Counter(re.findall(r" ([a-z][a-z-]+)\(", text)), alias


def test_xla_makes_the_same_of_them(tracers):
    arguments, static = job()
    there = operations(tracers.lower(arguments, static).compile())
    assert there == operations(packed_step.lower(*arguments, **static).compile())
    assert there[0]["dot"] > 4


def test_the_settings_of_a_thread_go_along(tracers):
    arguments, static = job()

    def wide() -> int:
        return tracers.lower(arguments, static).as_text().count("tensor<i64>")

    narrow = wide()
    with jax.enable_x64(True):
        assert wide() > narrow
    assert wide() == narrow


def test_what_tracing_raises_is_said(tracers):
    (params, state, buffer), static = job()
    with pytest.raises(TracingFailed, match="ValueError: unknown backend 'abacus'"):
        tracers.lower((params, state, buffer), static | {"backend": "abacus"})


def test_sources_edited_since_this_process_began_are_not_traced(tracers, monkeypatch):
    monkeypatch.setattr(tracing, "LOADED", 0.0)
    with pytest.raises(TracingFailed, match="was edited or removed"):
        tracers.lower(*job())


def test_what_a_process_prints_is_no_answer(tracers, capfd):
    tracers.lower(*job())
    (process,) = tracers._all
    assert os.readlink(f"/proc/{process.pid}/fd/1") == os.readlink(f"/proc/{process.pid}/fd/2")


def test_a_process_that_dies_is_replaced(tracers):
    first = tracers.lower(*job()).as_text()
    (process,) = tracers._all
    process.kill()
    process.wait()
    with pytest.raises(TracingFailed, match="the process that traced it ended"):
        tracers.lower(*job())
    assert tracers.lower(*job()).as_text() == first


def test_an_answer_that_cannot_be_read_ends_its_process(tracers, monkeypatch):
    def fails(file):
        raise AttributeError("a class that is not here")

    with monkeypatch.context() as patch:
        patch.setattr(tracing.pickle, "load", fails)
        with pytest.raises(TracingFailed, match="AttributeError"):
            tracers.lower(*job())
    assert not tracers._all, "the next job begins another"


def test_closing_ends_who_waits():
    tracers = Tracers(1)
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(tracers.lower, *job()) for _ in range(2)]
        while not tracers._all:
            pass
        (process,) = tracers._all
        tracers.close()
        for each in jobs:
            with pytest.raises(CancelledError):
                each.result(60)
    assert process.poll() is not None
    with pytest.raises(CancelledError):
        tracers.lower(*job())


def test_what_cannot_be_sent_is_traced_here():
    model = tiny_model(num_layers=1)
    hooks = Hooks(edit={"layers.0.output": lambda x, rows: 0.5 * x})
    engine = Engine(model, **OPTIONS, hooks=hooks, compile_processes=1)
    with pytest.warns(UserWarning, match="is traced in the engine's own process: .*lambda"):
        engine.compile_ahead()
    assert engine.metrics()["compile_elsewhere"] == 0
    assert served(engine) == [want.token_ids for want in serve(model, PROMPTS, [greedy(8)] * 3, **OPTIONS, hooks=hooks)]


@pytest.mark.parametrize("number", [-1, True, 1.5, "2", 65])
def test_numbers_of_processes_that_make_no_sense(number):
    with pytest.raises(ConfigError, match="compile_processes must be an integer from 0 to 64"):
        Engine(tiny_model(num_layers=1), **OPTIONS, compile_processes=number)


def test_an_engine_on_a_gpu_that_is_not_told_has_half_of_the_cores(monkeypatch):
    """Several engines of a host share them. A CPU and a mesh have none, and none goes beside JAX's own cache."""
    monkeypatch.setattr(tracing, "MOST_USUAL", 8)  # as it is but in tests
    gpu, cpu = (SimpleNamespace(platform=name) for name in ("gpu", "cpu"))
    for cores, engines, most in ((48, 1, 8), (12, 1, 6), (48, 4, 6), (1, 1, 0)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: range(cores), raising=False)
        assert tracing.usual_processes(engines) == most
        on = {"gpu": SimpleNamespace(config=CONFIG, home=gpu), "cpu": SimpleNamespace(config=CONFIG, home=cpu)}
        on["mesh"] = SimpleNamespace(config=SimpleNamespace(mesh="a mesh"), home=None)
        found = {name: programs._usual_processes(shapes, True) for name, shapes in on.items()}
        assert programs._usual_processes(on["gpu"], False) == 0
        assert found == {"gpu": tracing.usual_processes(), "cpu": 0, "mesh": 0}
        options = processes._starting({}, [["0"]] * engines, None, Path("steps"))
        assert options["compile_processes"] == most
        assert ("executables" in options) == (engines > 1)
        for shares, mesh in (([["0"]] * engines, 1), ([[]] * engines, None)):  # a mesh of one device is one
            assert "compile_processes" not in processes._starting({}, shares, mesh, Path("steps"))
    assert processes._starting({"compile_processes": 3, "executables": "own"}, [["0"]] * 2, None, Path("steps")) == {
        "compile_processes": 3, "executables": "own", "quiet": [], "folder": Path("steps"),
    }  # fmt: skip
    for shares, mesh in (([[]], None), ([["0"]], 1)):  # a CPU, and a mesh
        assert "compile_processes" not in processes._starting({}, shares, mesh, Path("steps"))
    monkeypatch.setattr(tracing, "jax_cache_is_on", lambda: True)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(48), raising=False)
    assert tracing.usual_processes() == 0
