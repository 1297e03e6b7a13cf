"""Compiled steps in files: a second start traces nothing and yields the same tokens; what is damaged is made anew."""

import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jllm.config import LlamaConfig
from jllm.engine.engine import Engine
from jllm.engine.options import EngineOptions
from jllm.engine.request import SamplingParams
from jllm.errors import ConfigError
from jllm.programs import compiler, executables
from jllm.programs.executables import DRAFTERS, Executables
from jllm.programs.packed_step import packed_step
from jllm.speculative import drafter
from jllm.speculative.draft_model import DraftModel
from jllm.speculative.eagle import init_eagle
from jllm.speculative.medusa import init_medusa
from jllm.speculative.ngram import NGram
from jllm.speculative.tree import chain
from jllm.step import forward as step_forward
from jllm.step.buckets import Bucket
from jllm.step.state import Variant
from tests.tiny import greedy, tiny_model

BUCKETS = (Bucket(2, 0, 0), Bucket(2, 6, 2))
OPTIONS = {"max_slots": 2, "page_size": 8, "max_step_tokens": 8, "buckets": BUCKETS}
PROMPTS = [[5, 6, 7], [9, 8]]
PENALTIES = SamplingParams(max_new_tokens=6, temperature=0, ignore_eos=True, presence_penalty=0.5)


@pytest.fixture(scope="module")
def model():
    return tiny_model(num_layers=1, hidden_size=40)


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    """With what a first start left there."""
    path = tmp_path_factory.mktemp("steps")
    engine = Engine(model, **OPTIONS, executables=path)
    engine.compile_ahead()
    assert engine.metrics()["compile_loaded"] == 0
    return path


def tokens(engine: Engine, sampling: SamplingParams = greedy(6)) -> list[tuple[int, ...]]:
    ids = [engine.submit(prompt, sampling) for prompt in PROMPTS]
    done = {e.id: e.completion.token_ids for e in engine.run() if e.completion}
    return [done[i] for i in ids]


@pytest.mark.parametrize("wait", [True, False])
def test_a_second_start_traces_nothing(model, folder, monkeypatch, wait):
    wants = tokens(Engine(model, **OPTIONS))
    packed_step.clear_cache()
    monkeypatch.setattr(step_forward, "tapped_backbone", None)  # tracing would call it
    engine = Engine(model, **OPTIONS, executables=folder)
    engine.compile_ahead(wait=wait)
    for job in list(engine._device.programs._jobs.values()):
        job.result(60)
    assert tokens(engine) == wants
    m = engine.metrics()
    assert (m["compile_loaded"], m["compile_cache_hits"], m["compiled_steps"]) == (2, 0, 2)
    engine.close()


def test_what_comes_without_warning_is_kept_and_found_as_well(model, tmp_path, monkeypatch):
    """A variant that was not compiled ahead."""
    engine = Engine(model, **OPTIONS, executables=tmp_path)
    wants = tokens(engine, PENALTIES)
    assert wants == tokens(Engine(model, **OPTIONS), PENALTIES)
    assert len(list(tmp_path.iterdir())) == len(engine._device.programs.used)
    packed_step.clear_cache()
    monkeypatch.setattr(step_forward, "tapped_backbone", None)
    assert tokens(Engine(model, **OPTIONS, executables=tmp_path), PENALTIES) == wants


def test_damaged_files_are_made_anew(model, folder, tmp_path):
    folder = shutil.copytree(folder, tmp_path / "copy")
    sizes = {path: path.stat().st_size for path in folder.iterdir()}
    first, second = sizes
    first.write_bytes(first.read_bytes()[: sizes[first] // 2])
    second.write_bytes(b"x" + second.read_bytes())
    engine = Engine(model, **OPTIONS, executables=folder)
    with pytest.warns(UserWarning, match="cannot be used .*; compiling again") as warned:
        engine.compile_ahead()
    assert len([w for w in warned if "cannot be used" in str(w.message)]) == len(sizes) == 2
    assert engine.metrics()["compile_loaded"] == 0
    assert {path for path in folder.iterdir() if path.stat().st_size > sizes[path] / 2} == set(sizes)
    assert len(tokens(engine)) == 2
    again = Engine(model, **OPTIONS, executables=folder)
    again.compile_ahead()
    assert again.metrics()["compile_loaded"] == 2


def test_a_folder_that_cannot_be_written_costs_nothing_but_the_files(model, tmp_path):
    (tmp_path / "file").write_text("")
    engine = Engine(model, **OPTIONS, executables=tmp_path / "file" / "steps")
    with pytest.warns(UserWarning, match="could not be kept"):
        wants = tokens(engine)
    assert wants == tokens(Engine(model, **OPTIONS))


def test_other_options_have_other_files(model, tmp_path):
    paths = set()
    for changes in ({}, {"page_size": 16}, {"num_pages": 7}, {"kv_cache": "int8-g8"}, {"backend": "xla"}):
        programs = Engine(model, **OPTIONS | {"executables": tmp_path} | changes)._device.programs
        for variant in (Variant(), Variant(logprobs=True)):
            paths |= {programs.path(bucket, variant) for bucket in BUCKETS}
    assert len(paths) == 5 * 2 * 2


def files(folder: Path) -> Executables:
    return Executables(folder, (jax.devices()[0],))


def test_what_was_not_used_for_long_goes(tmp_path):
    kept = files(tmp_path)
    program = jax.jit(lambda x: x + 1).lower(jnp.ones(3)).compile()
    used, forgotten, new = (tmp_path / f"{name}.pickle" for name in ("used", "forgotten", "new"))
    kept.save(used, program)
    forgotten.write_bytes(b"")
    long_ago = time.time() - 86400 * (executables.KEPT_DAYS + 1)
    part = tmp_path / "x.part"  # of a process that was killed
    part.write_bytes(b"")
    for path in (used, forgotten, part):
        os.utime(path, (long_ago, long_ago))
    assert kept.load(used)(jnp.ones(3)).tolist() == [2, 2, 2]
    kept.save(new, program)
    assert sorted(tmp_path.iterdir()) == [new, used]


def test_a_program_that_calls_back_is_not_kept(tmp_path):
    """So no engine waits for another that compiles it."""

    def back(x):
        return jax.pure_callback(lambda y: np.asarray(y) * 2, jax.ShapeDtypeStruct((3,), np.float32), x)

    program = jax.jit(back).lower(jnp.ones(3)).compile()
    with pytest.warns(UserWarning, match="could not be kept"):
        files(tmp_path).save(tmp_path / "a.pickle", program)
    assert not list(tmp_path.glob("*.pickle"))
    for path, both in ((tmp_path / "a.pickle", True), (tmp_path / "b.pickle", False)):
        with files(tmp_path).claim(path) as first, files(tmp_path).claim(path) as second:
            assert (first, second) == (True, both)


def test_the_option_is_a_path(tmp_path):
    assert EngineOptions(executables=str(tmp_path)).executables == str(tmp_path)
    with pytest.raises(ConfigError, match="executables must be the path of a folder, not 3"):
        EngineOptions(executables=3)


@pytest.mark.parametrize("ahead", [True, False])
def test_settings_of_the_thread_that_traces_count(model, tmp_path, ahead):
    """JAX's context managers are a thread's own, and programs are compiled in others."""
    for number, precision in enumerate(("highest", None, "highest")):
        engine = Engine(model, **OPTIONS, executables=tmp_path)
        with jax.default_matmul_precision(precision):
            if ahead:
                engine.compile_ahead()
                assert engine.metrics()["compile_loaded"] == 2 * (number == 2)
            else:
                tokens(engine)
        assert len(list(tmp_path.iterdir())) == 2 * min(number + 1, 2)


def test_a_file_whose_program_fails_costs_one_recovery(model, folder, tmp_path):
    """As those do that XLA has serialized a second time."""
    copy = shutil.copytree(folder, tmp_path / "copy")
    wants = tokens(Engine(model, **OPTIONS))
    engine = Engine(model, **OPTIONS, executables=copy)
    engine.compile_ahead()

    def broken(*arguments):
        raise jax.errors.JaxRuntimeError("NOT_FOUND: Function broadcast_multiply_fusion not found")

    programs = engine._device.programs._kept
    programs.update(dict.fromkeys(programs, broken))
    assert tokens(engine) == wants
    assert engine.metrics()["device_errors"] == 1
    again = Engine(model, **OPTIONS, executables=copy)
    again.compile_ahead()
    assert again.metrics()["compile_loaded"] == 2  # new files


@dataclass(frozen=True)
class OtherConfig(LlamaConfig):
    """A user's, whose methods no key knows."""


def test_engines_with_one_folder_share_out_what_is_to_be_compiled(model, tmp_path, monkeypatch):
    """A program that another engine compiles is left to it, while this one compiles the next. If that process ends
    without a file, another engine compiles it."""
    monkeypatch.setattr(compiler.os, "cpu_count", lambda: 2)
    seen: list[tuple[str, bool]] = []
    claim = Executables.claim

    @contextmanager
    def noted(own: Executables, path: Path):
        with claim(own, path) as mine:
            seen.append((path.stem, mine))
            yield mine

    monkeypatch.setattr(Executables, "claim", noted)
    engines = [Engine(model, **OPTIONS | {"num_pages": 9}, executables=tmp_path) for _ in range(2)]
    first, second = (engines[0]._device.programs.path(bucket, Variant()) for bucket in reversed(BUCKETS))
    with ThreadPoolExecutor(2) as threads, ExitStack() as other:
        assert other.enter_context(claim(files(tmp_path), first))
        done = [threads.submit(engine.compile_ahead) for engine in engines]
        while not second.exists():
            assert not [job.exception() for job in done if job.done()]
            time.sleep(0.01)
        assert not any(job.done() for job in done)
        assert not first.exists()
        other.close()  # as the system does where a process ends
        assert [job.result(60) for job in done] == [2, 2]
    compiled = [path for path, mine in seen if mine]
    assert sorted(path.stem for path in (first, second)) == sorted(set(compiled))
    assert sum(engine.metrics()["compile_loaded"] for engine in engines) == 2
    assert sorted(tmp_path.iterdir()) == sorted((first, second)), "no claim is left"
    assert tokens(engines[0]) == tokens(engines[1])


def test_what_has_no_key_is_compiled_and_never_kept(model, tmp_path):
    config = OtherConfig(**vars(model.config))
    with pytest.warns(UserWarning, match="is not kept in .*: a .*OtherConfig has no content that a key could hold"):
        assert tokens(Engine(replace(model, config=config), **OPTIONS, executables=tmp_path), greedy(1))
    assert not list(tmp_path.iterdir())


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class OwnDrafter(NGram):
    """A user's own class, which the key of a step knows nothing about."""


def test_steps_with_a_shipped_drafter_are_kept_and_found(model, tmp_path, monkeypatch):
    wants = tokens(Engine(model, **OPTIONS))
    options = OPTIONS | {"speculate": "ngram", "drafts": 2, "executables": tmp_path}
    Engine(model, **options).compile_ahead()
    packed_step.clear_cache()
    monkeypatch.setattr(step_forward, "tapped_backbone", None)  # tracing would call it
    engine = Engine(model, **options)
    engine.compile_ahead()
    assert tokens(engine) == wants
    assert engine.metrics()["compile_loaded"] == engine.metrics()["compiled_steps"] == 3


@pytest.mark.parametrize("kind", ["itself", "medusa", "eagle"])
def test_shipped_drafters_with_weights_have_a_key(model, tmp_path, kind):
    key = jax.random.key(0)
    if kind == "itself":
        drafter = DraftModel(model.params, model.config, chain(2))
    else:
        drafter = {"medusa": init_medusa, "eagle": init_eagle}[kind](model.config, key, chain(2), np.dtype("float32"))
    assert files(tmp_path).path(drafter, ()) is not None


def test_every_module_of_drafters_decides_about_programs(tmp_path):
    """One that DRAFTERS forgets has its steps compiled at each start."""
    folder = Path(drafter.__file__).parent
    modules = {f"jllm.speculative.{path.stem}" for path in folder.glob("*.py") if path.stem != "__init__"}
    assert modules <= files(tmp_path).sources.keys()
    assert {f"jllm.speculative.{name}" for name in DRAFTERS} <= modules


def test_steps_with_ones_own_drafter_are_compiled_each_time(model, tmp_path):
    options = OPTIONS | {"speculate": OwnDrafter(2), "executables": tmp_path}
    engine = Engine(model, **options)
    with pytest.warns(UserWarning, match="OwnDrafter is a container that a key cannot hold"):
        engine.compile_ahead()
    assert not list(tmp_path.iterdir())
    assert tokens(engine) == tokens(Engine(model, **OPTIONS))
