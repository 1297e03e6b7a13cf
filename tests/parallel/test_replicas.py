"""Replicas in processes: the tokens are those of one engine, whatever ends a process, and no process outlives them."""

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from enum import IntEnum
from pathlib import Path
from types import ModuleType

import jax
import numpy as np
import pytest

from jllm.cli.main import main
from jllm.distributed import child, crossing, processes
from jllm.distributed.replicas import Replicas
from jllm.engine.engine import Engine
from jllm.engine.request import SamplingParams
from jllm.errors import ConfigError, EngineClosed, EngineNotReady, RemoteError, RequestError, WeightsError
from jllm.files.save import save
from jllm.guides.guide import Guide
from jllm.kv_policies.reserve import Reserve
from jllm.model.hooks import Hooks
from jllm.serve.async_engine import AsyncEngine
from jllm.speculative.draft_model import DraftModel
from jllm.speculative.ngram import NGram
from jllm.speculative.tree import chain
from jllm.step.buckets import Bucket
from pallas_kernels.bench import gpus
from pallas_kernels.formats.kv_formats import parse_format
from tests.ascii import TOKENIZER
from tests.cli.cases import BANS
from tests.tiny import tiny_model

ROOT = Path(__file__).parents[2]
SIZES = {"max_slots": 3, "page_size": 8, "num_pages": 60, "max_step_tokens": 16, "buckets": (Bucket(3, 13, 3),)}
GREEDY = SamplingParams(max_new_tokens=12, temperature=0.0, ignore_eos=True)
JOBS = [
    ((5, 6, 7, 8), replace(GREEDY, seed=1)),
    ((3, 1, 4, 1, 5), replace(GREEDY, temperature=1.0, seed=3, logprobs=2)),
    (tuple(range(3, 40)), replace(GREEDY, temperature=0.9, top_p=0.8, seed=4, n=2)),
    ("once upon", replace(GREEDY, temperature=1.1, seed=5, stop=("zzz",))),
]


class Slow(Engine):
    """One that can be met while it runs."""

    def step(self):
        time.sleep(0.03)
        return super().step()


class Hanging(Engine):
    """One that never starts."""

    def __init__(self, *args, **options):
        print(os.getpid(), flush=True)
        time.sleep(1000)


class Dying(Engine):
    """One whose process is killed as it starts."""

    def __init__(self, *args, **options):
        os.kill(os.getpid(), signal.SIGKILL)


def make_model():
    return tiny_model(tokenizer=TOKENIZER, num_layers=1)


def make_another_model():
    """One for each process."""
    return tiny_model(num_layers=1, seed=os.getpid())


def make_an_end():
    sys.exit("no weights here")


def make_none():
    return {}["a model"]


def make_model_and_leave_a_process():
    os.system("sleep 60 >/dev/null 2>&1 &")
    return make_model()


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.fixture(scope="module")
def alone(model):
    """Returns what one engine answers to jobs, by job and sample."""
    engine = Engine(model, **SIZES)
    engine.compile_ahead([params for _, params in JOBS])

    def answer(jobs):
        names = [engine.submit(*job) for job in jobs]
        return finish(engine, names)[0]

    return answer


def finish(engine, names=(), before=()):
    """The completions by (job, sample), of which each token and letter came once, in `before` or from now on."""
    streamed, texts, ends = {}, {}, {}
    for event in itertools.chain(before, engine.run()):
        key = names.index(event.id) if event.id in names else event.id, event.sample
        streamed[key] = streamed.get(key, ()) + event.token_ids
        texts[key] = texts.get(key, "") + event.text
        if event.completion is not None:
            assert key not in ends
            ends[key] = event.completion
    return ends, streamed, texts


def same(found, wanted):
    assert found.keys() == wanted.keys()
    for key, end in found.items():
        ours, theirs = (replace(one, timings=None, logprobs=None) for one in (end, wanted[key]))
        assert ours == theirs
        for a, b in zip(end.logprobs or (), wanted[key].logprobs or (), strict=True):
            assert (a.token_id, a.logprob) == (b.token_id, pytest.approx(b.logprob, rel=1e-5))


def processes_of(engine):
    return [replica._process for replica in engine._all]


def test_engines_in_processes_serve_as_one_does(model, alone, monkeypatch, tmp_path):
    wanted = alone(JOBS)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with closing(Replicas(model, 2, make=Slow, kv_policy=Reserve(), **SIZES)) as engine:
        assert (engine.slots, engine.vocab_size, engine.sizes.limits.max_slots, engine.most_tokens) == (6, 97, 3, 128)
        assert engine.compile_ahead([params for _, params in JOBS]) == 1
        names = [engine.submit(*job) for job in JOBS]
        ends, streamed, texts = finish(engine, names)
        same(ends, wanted)
        assert all(streamed[key] == end.token_ids and texts[key] == end.text for key, end in ends.items())
        found = engine.metrics()
        assert (found["requests"], found["requests_finished"], found["compile_first_use"]) == (4, 4, 0)
        assert (found["replicas"], found["replicas_failed"]) == (2, 0)
        assert (found["compiled_steps"], found["compile_loaded"]) == (2, 1), "one engine compiles a step for all"
        (folder,) = tmp_path.iterdir()
        assert [path.suffix for path in folder.iterdir()] == [".pickle"]
        assert min(replica.engine.measured().counts.requests for replica in engine._all) > 0
        engine.reset_metrics()
        assert engine.metrics()["requests"] == 0
        engine.reset_prefix_cache()

        long = replace(GREEDY, max_new_tokens=90)
        name, other = engine.submit((5, 6, 7), long), engine.submit((8, 9), long)
        while not any(event.id == name and event.token_ids for event in engine.step()):
            pass
        engine.abort(other)
        late = engine.submit((8, 9), GREEDY, deadline=0.0, priority=-1)
        sample, taken = engine.fork(name), engine.snapshot(name)
        again = engine.resume(taken, replace(GREEDY, max_new_tokens=93 - len(taken.tokens)))
        guided = engine.submit((5, 6, 7), SamplingParams(temperature=0.0, guide=Guide.choice(["yes", "no"])))
        assert engine.fork(guided) == 1
        with pytest.raises(RequestError, match=f"request {guided} has no running sample 9"):
            engine.fork(guided, 9)
        ends, *_ = finish(engine)
        tokens = alone([((5, 6, 7), long)])[0, 0].token_ids
        assert ends[name, 0].token_ids == ends[name, sample].token_ids == tokens
        assert (*(int(token) for token in taken.tokens[3:]), *ends[again, 0].token_ids) == tokens
        assert [ends[key, 0].finish_reason for key in (other, late, guided)] == ["abort", "deadline", "stop"]
        assert ends[guided, 0].text in ("yes", "no")
        assert [replica.load.tokens for replica in engine._all] == [0, 0]
        for wrong in (lambda: engine.abort(name), lambda: engine.fork(other), lambda: engine.snapshot(99)):
            with pytest.raises(RequestError, match="is not running"):
                wrong()
        with pytest.raises(RequestError, match="penalties"):
            engine.resume(taken, replace(GREEDY, repetition_penalty=1.2))
        with pytest.raises(RequestError, match="vocabulary"):
            engine.submit((97,), GREEDY)
        assert not engine.has_work

        class Local(str):
            pass

        loads = ModuleType("of_this_process")
        loads.Word = type("Word", (str,), {"__module__": loads.__name__})
        monkeypatch.setitem(sys.modules, loads.__name__, loads)
        with pytest.raises(RequestError, match="an argument of submit cannot go to the process of an engine: .*Local"):
            engine.submit((5, 6), replace(GREEDY, stop=(Local("zzz"),)))
        assert not engine.has_work
        token = IntEnum("Token", {"A": 5}).A  # a class that no process knows
        unknown = replace(GREEDY, stop=(loads.Word("zzz"),))
        good, bad = engine.submit((token, 6, 7), GREEDY), engine.submit((5,), unknown)
        with pytest.warns(RuntimeWarning, match=rf"request {bad} ends: .* cannot be loaded in the process"):
            ends, *_ = finish(engine)
        assert ends[good, 0].token_ids == tokens[:12]
        assert ends[bad, 0].finish_reason == "error"
        assert [replica.load.tokens for replica in engine._all] == [0, 0]

        new = tiny_model(tokenizer=TOKENIZER, num_layers=1, seed=7)
        fresh = Engine(new, **SIZES)
        with pytest.raises(ConfigError, match="running must be one of"):
            engine.update(new.params, running="typo")
        with pytest.raises(WeightsError, match="made different weights"):
            engine.update(make_another_model)
        with pytest.raises(RemoteError, match="SystemExit in the process of an engine: no weights here"):
            engine.update(make_an_end)
        name = engine.submit((5, 6, 7), replace(GREEDY, max_new_tokens=30))
        while not any(event.token_ids for event in engine.step()):
            pass
        with pytest.raises(WeightsError, match=r"norm must be float32\[32\]"):
            engine.update(replace(new.params, norm=new.params.norm[:3]))
        assert engine.update(new.params) == engine.version == 1
        told = engine.metrics()  # each process copies the weights from the file
        assert (told["updates"], told["update_bytes"]) == (2, 2 * sum(x.nbytes for x in jax.tree.leaves(new.params)))
        (end,) = finish(engine)[0].values()
        old = end.versions.count(0)
        assert 0 < old < 30
        assert end.versions == (0,) * old + (1,) * (30 - old)
        fresh.submit((5, 6, 7, *end.token_ids[:old]), replace(GREEDY, max_new_tokens=30 - old))
        assert finish(fresh)[0][0, 0].token_ids == end.token_ids[old:]
        engine.sleep()
        engine.submit((8, 9), GREEDY)
        with pytest.raises(EngineNotReady, match="the engine sleeps"):
            engine.step()
        assert engine.update(new.params) == 2  # while it sleeps, in the memory of the old weights
        assert engine.update("tests.parallel.test_replicas:make_model") == 3  # each process loads it
        engine.wake()
        finish(engine)

        async def over_a_loop():
            host = AsyncEngine(engine)
            streams = [await host.submit(*job) for job in JOBS]
            ends = [[event.completion async for event in stream if event.completion] for stream in streams]
            await host.close()
            return {(i, j): end for i, some in enumerate(ends) for j, end in enumerate(some)}

        found = asyncio.run(over_a_loop())
        assert sorted(end.token_ids for end in found.values()) == sorted(end.token_ids for end in wanted.values())
        assert [process.returncode for process in processes_of(engine)] == [0, 0]
        assert not list(tmp_path.iterdir())
        with pytest.raises(EngineClosed, match="it was closed"):
            engine.submit((5,))
        engine.close()


def test_a_killed_process_loses_nothing(model, alone):
    """Two requests decode, the second with one token to go. One has its prompt under way or waits for a slot, and two
    are not yet read. The fork ends, the snapshot is refused, and each other token comes once. The last request has
    arrays of its own, and asks for values."""
    long, short = replace(GREEDY, max_new_tokens=90), replace(GREEDY, max_new_tokens=10)
    jobs = [((5, 6, 7), long), ((8, 9), short), (tuple(range(3, 60)), GREEDY), ((40,), GREEDY), ((41, 42), GREEDY)]
    options: dict = SIZES | {"hooks": BANS, "taps": ("layers.0.output",), "tap_rows": 4}
    banned = alone(jobs)[4, 0].token_ids[0]
    own = {"inputs": {"token": banned + 1}, "taps": ("layers.0.output",), "tokens": "all"}
    with closing(Replicas(model, 2, make=Slow, **options)) as engine:
        first, other = engine._all
        other.load.tokens += 1 << 20  # all go to the first
        names = [engine.submit(*job) for job in jobs[:2]]
        before = []
        while sum(len(event.token_ids) for event in before if event.id == names[1]) < 9:
            before += engine.step()
        fork = engine.fork(names[0])
        names += [engine.submit(*jobs[2])]
        os.kill(first._process.pid, signal.SIGSTOP)
        names += [engine.submit(*jobs[3]), engine.submit(*jobs[4], **own)]
        other.load.tokens -= 1 << 20
        with ThreadPoolExecutor(1) as thread:
            taken = thread.submit(engine.snapshot, names[0])
            time.sleep(0.2)
            first._ask("go_on", bytes(1 << 22), answered=False)  # more than the line holds, and nobody waits
            os.kill(first._process.pid, signal.SIGKILL)
            with pytest.raises(RequestError, match="begins it again on another"):
                taken.result(120)
        with pytest.warns(RuntimeWarning, match=r"was killed by signal 9\): each of its [45] requests begins again"):
            before += engine.step()
        while sum(event.id == names[0] and bool(event.token_ids) for event in before) < 12:
            before += engine.step()
        assert engine.fork(names[0]) == 2, "a number of its own"
        ends, streamed, _ = finish(engine, before=before)
        assert ends.pop((names[0], fork)).finish_reason == "error"
        assert ends.pop((names[0], 2)).token_ids == ends[names[0], 0].token_ids
        assert streamed[names[0], 2]
        wanted, one = alone(jobs[:4]), Engine(model, **options)
        one.submit(*jobs[4], **own)
        wanted[4, 0] = finish(one)[0][0, 0]
        assert banned not in wanted[4, 0].token_ids
        values = (end.taps["layers.0.output"] for end in (ends[names[4], 0], wanted[4, 0]))
        np.testing.assert_allclose(*values, rtol=1e-4, atol=1e-5)
        for job, name in enumerate(names):
            assert streamed[name, 0] == wanted[job, 0].token_ids == ends[name, 0].token_ids
        assert engine.metrics()["replicas_failed"] == 1
        assert first._process.returncode == -signal.SIGKILL, "no zombie"

        for given, why in (
            ({"inputs": {"tokens": 3}}, "inputs must be token"),
            ({"taps": ("norm",)}, "keeps none of norm"),
        ):
            with pytest.raises(RequestError, match=why):
                engine.submit(*jobs[4], **given)
        assert engine.update(hooks=BANS) == engine.version == 1
        assert (engine.has_work, engine.step()) == (False, [])

        async def idle():
            host = AsyncEngine(engine)
            os.kill(other._process.pid, signal.SIGKILL)
            while host.refused is None:
                await asyncio.sleep(0.05)
            await host.close()
            return host.refused

        assert "RemoteError: the process of engine 1 (CPU) was killed by signal 9" in asyncio.run(idle())
        engine.close()


def test_a_function_makes_the_model_of_a_mesh_and_no_process_outlasts_a_close(alone, monkeypatch, tmp_path):
    """Even one that does not read, and whose own process lives on."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    monkeypatch.setattr(processes, "PATIENCE", 1.0)
    new = tiny_model(tokenizer=TOKENIZER, num_layers=1, seed=7)
    save(tmp_path / "new", new.params, new.config)
    engine = Replicas(make_model_and_leave_a_process, 1, mesh=2, **SIZES)
    with closing(engine):
        for version, given in enumerate((None, new.params, str(tmp_path / "new"), make_model)):
            if given is not None:
                assert engine.update(given) == version
            engine.submit(*JOBS[0])
            (end,) = finish(engine)[0].values()
            if version in (0, 3):
                assert end.token_ids == alone(JOBS[:1])[0, 0].token_ids
        os.kill(processes_of(engine)[0].pid, signal.SIGSTOP)
    assert processes_of(engine)[0].returncode == -signal.SIGKILL


def test_a_close_that_is_interrupted_kills_all():
    class Held(processes.EngineProcess):
        killed = False
        last_events = ()

        def __init__(self):
            pass

        def begin_to_close(self, reason):
            pass

        def close(self, reason):
            raise KeyboardInterrupt

        def kill(self):
            self.killed = True

        def named(self, events):
            return events

    engine = Replicas.__new__(Replicas)
    engine._begin_empty()
    engine._all = [Held(), Held()]
    with pytest.raises(KeyboardInterrupt):
        engine.close()
    assert [each.killed for each in engine._all] == [True, True]


@pytest.mark.parametrize(
    ("options", "error", "why"),
    [
        ({"make": Dying}, RemoteError, r"the process of engine 0 \(CPU\) was killed by signal 9"),
        ({"max_slots": 0}, ConfigError, "max_slots must be an integer >= 1, not 0"),
        ({"model": make_none}, RemoteError, "an engine's process cannot start: KeyError: 'a model'"),
        ({"model": make_another_model, "devices": 2}, WeightsError, "processes have made different weights"),
    ],
)
def test_a_process_that_cannot_start_ends_all_with_its_reason(model, options, error, why):
    with pytest.raises(error, match=why) as told:
        Replicas(**SIZES | {"model": model, "devices": 1} | options)
    assert "\n" not in str(told.value)
    if options.get("model") is make_none:
        assert "in make_none" in told.value.__notes__[0]


def test_what_cannot_cross_is_refused_by_name(model, monkeypatch):
    class Local(NGram):
        pass

    for options, why in (
        ({"speculate": Local()}, "speculate cannot go to the process of an engine: .*Local"),
        ({"hooks": Hooks(observe=lambda *_: None)}, "hooks cannot go to the process of an engine: .*lambda"),
        ({"trace": []}, "a trace records one engine"),
        ({"devices": 0}, "replicas need at least one engine, not 0"),
        ({"devices": jax.devices()}, "replicas need a number of engines"),
        ({"threads": True, "mesh": 2}, "engines in threads take a Model"),
    ):
        with pytest.raises(ConfigError, match=why):
            Replicas(model, **SIZES | options)
    monkeypatch.setattr(crossing, "is_host", lambda device: False)
    with pytest.raises(ConfigError, match="the model cannot go .*: it lies on cpu:0, .*: pass its directory"):
        Replicas(model, **SIZES)
    with pytest.raises(ConfigError, match="or a function, not int"):
        Replicas(5)
    with pytest.raises(ConfigError, match="nowhere:make is neither a directory nor"):
        processes._made_by("nowhere:make")
    with pytest.raises(ConfigError, match="a function that returns a Model, not str"):
        child._model_of(lambda: "none", None)


def test_arrays_cross_by_a_file_without_a_name(model, monkeypatch, tmp_path):
    last = np.zeros((0, 4), np.int8)  # an array without a byte, where the file ends
    values = {
        "a": [np.ones((3, 2), jax.numpy.bfloat16), np.arange(5)],
        "b": {"x": jax.numpy.zeros(()), "y": "text"},
        "c": last,
    }
    for shared, left in ((Path("/dev/shm"), crossing.ROOM), (Path("/dev/shm"), 1 << 60), (tmp_path / "missing", 0)):
        monkeypatch.setattr(crossing, "SHARED", shared)
        monkeypatch.setattr(crossing, "ROOM", left)
        packed = crossing.Packed(values)
        with packed.file:
            place = os.readlink(f"/proc/self/fd/{packed.file.fileno()}")
            assert place.startswith("/dev/shm/") == (left == 1 << 28), "where that is too small, on a disk"
            assert os.fstat(packed.file.fileno()).st_nlink == 0
            found = crossing.unpacked(packed.pickles, packed.file.fileno())
        jax.tree.map(np.testing.assert_array_equal, found, values)
        assert sum(map(len, packed.pickles.values())) < 1000
        assert not found["a"][0].flags.writeable
    drafter = DraftModel(model.params, model.config, chain(2))
    packed = crossing.Packed({"speculate": drafter, "kv_cache": parse_format("int8-g8", 16)})
    with packed.file:
        found = crossing.unpacked(packed.pickles, packed.file.fileno())
    assert found["kv_cache"] == parse_format("int8-g8", 16)
    engine = Engine(model, **SIZES | found | {"buckets": None})
    jax.tree.map(np.testing.assert_array_equal, engine._device._drafter, drafter)
    engine.close()
    with open(os.devnull, "rb") as empty, pytest.raises(ConfigError, match="b cannot be loaded in the process of an"):
        crossing.unpacked({"b": b"no pickle"}, empty.fileno())


def test_gpus_are_counted_and_named_without_jax(monkeypatch):
    told = {"index": [["0"], ["1"], ["2"]], "name": [["NVIDIA H200"]] * 3}
    monkeypatch.setattr(gpus, "sees_gpu", lambda: True)
    monkeypatch.setattr(gpus, "ask_gpus", told.get)
    before = jax.config.jax_platforms
    gpus.leave_gpus()
    assert gpus.device_kind() == "NVIDIA H200"
    jax.config.update("jax_platforms", before)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert processes.share_gpus(None, None) == [["0"], ["1"], ["2"]]
    assert processes.share_gpus(None, 2) == [["0", "1"]]
    with pytest.raises(ConfigError, match="2 replicas need 4 devices, and there are 3: give 1 to 1"):
        processes.share_gpus(2, 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 1")
    assert processes.share_gpus(2, None) == [["3"], ["1"]]
    monkeypatch.setattr(gpus, "sees_gpu", lambda: False)
    assert (processes.share_gpus(None, None), processes.share_gpus(2, 4)) == ([[]], [[], []])


PARENT = """
    import jllm
    from tests.parallel.test_replicas import Hanging

    jllm.Replicas("tests.tiny:tiny_model", 1, make=Hanging)
"""


def test_processes_end_with_the_one_that_started_them(tmp_path):
    """Even one that takes no calls yet. The folder of steps goes with the last one."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", textwrap.dedent(PARENT)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as parent:
        place = Path(f"/proc/{int(parent.stdout.readline())}/cmdline")
        assert b"jllm.distributed.child" in place.read_bytes()
        assert [path.name.startswith("jllm-steps-") for path in tmp_path.iterdir()] == [True]
        parent.kill()
    until = time.monotonic() + 60
    while place.exists() and place.read_bytes():  # a process that nobody waits for has an empty one
        assert time.monotonic() < until
        time.sleep(0.05)
    assert not list(tmp_path.iterdir())


def test_the_command_gives_its_prompts_to_a_process(tmp_path, capsys, monkeypatch):
    """It leaves the GPUs before it asks for the device's name."""
    order = []
    monkeypatch.setattr(gpus, "leave_gpus", lambda: order.append("left"))
    monkeypatch.setattr(gpus, "device_kind", lambda: order.append("named") or "cpu")
    small = tiny_model(num_layers=1)
    save(tmp_path / "tiny", small.params, small.config)
    run = ["--model", str(tmp_path / "tiny"), "--prompt-ids", "5 6 7", "--prompt-ids", "8 9", "--max-new-tokens", "2"]
    run += ["--temperature", "0", "--json", "--no-compile-cache"]

    def told(*more: str) -> dict[int, list[int]]:
        assert main([*run, *more]) == 0
        return {line["index"]: line["token_ids"] for line in map(json.loads, capsys.readouterr().out.splitlines())}

    assert told("--replicas", "1") == told()
    assert order[:2] == ["left", "named"]
    assert main([*run, "--replicas", "0"]) == 2
    assert capsys.readouterr().err == "error: replicas need at least one engine, not 0\n"
