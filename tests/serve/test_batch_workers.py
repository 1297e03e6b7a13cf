"""`jllm batch --workers`: rows, shards, what a worker makes of them, and a Ray cluster of which a worker is killed."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path
from types import SimpleNamespace

import pytest

from jllm.engine.engine import Engine
from jllm.engine.request import SamplingParams
from jllm.errors import CheckpointError, ConfigError, InputFileError, OutputError, RemoteError
from jllm.serve.batch import main, parse_args
from jllm.serve.batch_ray import mapped
from jllm.serve.batch_rows import SHARDS, Shard, read_done, read_rows, shards_of, with_ids
from jllm.serve.batch_worker import ShardsOfTable, Worker, identify
from tests.serve.test_batch import RIGHT, WRONG
from tests.tiny import serve

ROWS = [{"id": f"r{i}", "prompt": f"the wolf {i}", "max_new_tokens": 4 + i % 3, "ignore_eos": True} for i in range(7)]
ROWS[2] = {**ROWS[2], "prompt": [5, 6, 7], "n": 2, "seed": 9}
FLAGS = ("--no-compile-cache", "--max-slots", "4", "--page-size", "8", "--num-pages", "16", "--max-step-tokens", "64")


def write(path: Path, rows) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


@pytest.fixture
def job(checkpoint, tmp_path):
    """The arguments of a job over these rows, its rows with their ids, and what makes a worker of it."""
    (tmp_path / "out").mkdir()

    def make(rows, *flags, model=checkpoint):
        given = ["--model", model, "--served-name", "small", "--input", write(tmp_path / "in.jsonl", rows)]
        args = parse_args(
            [str(each) for each in (*given, "--output", tmp_path / "out", *FLAGS, "--workers", "local", *flags)]
        )
        run = identify(args)
        return args, with_ids(read_rows(args.input, {}), run, {}), lambda: Worker(args, run, tmp_path / "out")

    return make


def results(folder: Path) -> list[dict]:
    return [json.loads(line) for path in sorted(folder.glob(SHARDS)) for line in path.read_text().splitlines()]


def test_a_worker_makes_what_an_engine_alone_would(job, model, tmp_path):
    _, rows, worker = job(ROWS)
    shards = shards_of(rows, 3)
    assert [len(shard.rows) for shard in shards] == [3, 3, 1]
    one = worker()
    assert [one.do(shard) for shard in shards] == [0, 0, 0]
    found = {(each["id"], each.get("sample", 0)): each for each in results(tmp_path / "out")}
    assert len(found) == len(ROWS) + 1
    for row, given in zip(rows, ROWS):
        sampling = SamplingParams(
            **{**{"seed": row.seed}, **{k: v for k, v in given.items() if k not in ("id", "prompt")}}
        )
        for sample, text in enumerate(
            [each.text for each in serve(model, [given["prompt"]], [sampling])] if sampling.n == 1 else ()
        ):
            assert found[given["id"], sample]["text"] == text
        assert found[given["id"], 0]["row"] == row.id
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert sorted(before) == sorted(shard.name for shard in shards), "whole files alone"
    worker().do(shards[1])  # once more, as after a worker was lost
    again = (tmp_path / "out" / shards[1].name).read_bytes()
    texts = lambda data: [json.loads(line)["token_ids"] for line in data.splitlines()]  # noqa: E731
    assert texts(again) == texts(before[shards[1].name])
    assert read_done(tmp_path / "out", rows) == {row.id for row in rows}


def test_rows_that_do_not_say_how_long_get_what_the_pool_has_room_for(job, tmp_path):
    rows = [{"prompt": [5] * 25, "ignore_eos": True}, {"prompt": [5] * 25, "max_new_tokens": 16}]
    _, rows, worker = job(rows, "--num-pages", "4")
    assert worker().do(Shard(tuple(rows))) == 1
    right, wrong = results(tmp_path / "out")
    assert (len(right["token_ids"]), right["finish_reason"]) == (33 - 25, "length")
    assert "the page pool has 4" in wrong["error"]


def test_rows_that_are_wrong_stop_no_other(job, tmp_path):
    wrong = [{"id": "long", "prompt": [5] * 10_000}, {"id": "odd", "prompt": "a", "stop_token_ids": [10**6]}]
    _, rows, worker = job([*ROWS[:2], *wrong])
    (shard,) = shards_of(rows, 9)
    assert worker().do(shard) == 2
    errors = {each["id"]: each["error"] for each in results(tmp_path / "out") if "error" in each}
    assert errors.keys() == {"long", "odd"}
    assert "is too long" in errors["long"]
    assert "stop_token_ids" in errors["odd"]


def test_sizes_suit_the_first_shard_that_has_something_to_run(job):
    _, rows, worker = job([{"id": "long", "prompt": [5] * 10_000}, *ROWS[:2]])
    one, (first, second) = worker(), (Shard(tuple(rows[:1])), Shard(tuple(rows[1:])))
    assert one.do(first) == 1
    assert one._engine is None
    assert one.do(second) == 0
    assert one._engine.sizes.limits.max_slots == 4


def test_a_worker_that_has_another_model_under_the_path_is_refused(job, tmp_path):
    args, _, _ = job(ROWS)
    run = identify(args)
    with pytest.raises(CheckpointError, match="has another weights here than where the job was started"):
        Worker(args, {**run, "weights": "of another file"}, tmp_path / "out")
    args, _, _ = job(ROWS, "--adapter", f"loud={tmp_path}")
    run = identify(args)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="has another adapters here"):
        Worker(args, run, tmp_path / "out")


def test_requests_of_a_lower_priority_go_first(job, monkeypatch):
    _, rows, worker = job([{**RIGHT[0], "body": {**RIGHT[0]["body"], "priority": 3}}])
    one, asked = worker(), []
    monkeypatch.setattr("jllm.engine.engine.Engine.submit", noting(Engine.submit, asked))
    assert one.do(Shard(tuple(rows))) == 0
    assert asked
    assert {more["priority"] for more in asked} == {3}


def noting(method, asked):
    return lambda self, *given, **more: asked.append(more) or method(self, *given, **more)


def test_openai_s_requests_are_answered_as_without_workers(job, tmp_path):
    _, rows, worker = job([*RIGHT, *(each for _, each in WRONG.values())])
    (shard,) = shards_of(rows, 99)
    assert worker().do(shard) == len(WRONG)
    answers = {each["custom_id"]: each for each in results(tmp_path / "out")}
    assert {name: answers[name]["response"]["status_code"] for name in WRONG} == {
        k: code for k, (code, _) in WRONG.items()
    }
    assert len(answers["many"]["response"]["body"]["choices"]) == 4
    assert {each["id"] for each in answers.values()} == {row.id for row in rows}
    assert read_done(tmp_path / "out", rows) == {row.id for row in rows}


def test_rows_of_parquet_are_those_of_lines(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    rows = [{"id": "a", "prompt": "x", "seed": 3}, {"id": "b", "prompt": "y"}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    lines, table = read_rows(write(tmp_path / "rows.jsonl", rows), {}), read_rows(tmp_path / "rows.parquet", {})
    assert [(one.given, one.sampling) for one in lines] == [(one.given, one.sampling) for one in table]
    (tmp_path / "no.parquet").write_text("no table")
    for path, says in ((tmp_path / "no.parquet", "cannot read"), (tmp_path / "none.parquet", "cannot read")):
        with pytest.raises(InputFileError, match=says):
            read_rows(path, {})
    parquet.write_table(pyarrow.Table.from_pylist([{"prompt": "x", "tmperature": 1}]), tmp_path / "odd.parquet")
    with pytest.raises(InputFileError, match=r"row 1: unknown key 'tmperature'"):
        read_rows(tmp_path / "odd.parquet", {})
    with pytest.raises(InputFileError, match='line 2: id "a" occurs more than once'):
        read_rows(write(tmp_path / "twice.jsonl", [rows[0], {**rows[0], "prompt": "z"}]), {})


def test_ids_say_what_a_row_asks_for(job):
    ids = lambda *given: [row.id for row in job(*given)[1]]  # noqa: E731
    first = ids(ROWS)
    assert len(set(first)) == len(ROWS)
    assert ids([ROWS[6], *ROWS[:6]]) == [first[6], *first[:6]], "wherever rows with ids stand"
    nameless = [{"prompt": "a"}, {"prompt": "a"}]
    assert len(set(ids(nameless))) == 2
    other = ids([{**ROWS[0], "temperature": 0.5}, *ROWS[1:]])
    assert other[0] != first[0]
    assert other[1:] == first[1:]
    assert set(ids(ROWS, "--quantize", "w8a16")).isdisjoint(first)


def test_what_a_folder_has_is_checked(job, tmp_path):
    _, rows, worker = job(ROWS)
    out, shards = tmp_path / "out", shards_of(rows, 4)
    worker().do(shards[0])
    path = out / shards[0].name
    assert read_done(out, rows) == {row.id for row in rows[:4]}
    (out / "part-x.0.partial").write_text("{")  # of a worker that was lost
    assert read_done(out, rows) == {row.id for row in rows[:4]}
    with pytest.raises(OutputError, match="has results of another run .*choose another --output"):
        read_done(out, rows[1:])
    (out / "part-y.jsonl").write_text(path.read_text().splitlines()[0] + "\n")
    with pytest.raises(OutputError, match="have results of the same row: remove one of them"):
        read_done(out, rows)
    (out / "part-y.jsonl").write_text('{"row": "row')
    with pytest.raises(OutputError, match="part-y.jsonl is damaged .*remove it"):
        read_done(out, rows)


def test_a_worker_without_the_model_or_room_says_so_in_a_line(job, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    import pickle

    args, rows, _ = job(ROWS[:2])
    table = pyarrow.Table.from_pylist([{"shard": pickle.dumps(Shard(tuple(rows)))}])
    args.model = str(tmp_path / "nowhere")
    (found,) = ShardsOfTable(args, {}, tmp_path / "out")(table).to_pylist()
    assert found["rows"] == 2
    assert found["error"].startswith(f"worker {os.getpid()} on ")
    assert "nowhere" in found["error"]
    assert "\n" not in found["error"]
    args, rows, worker = job(ROWS[:2])
    (tmp_path / "out").rmdir()
    with pytest.raises(OutputError, match="cannot write .*No such file"):
        worker().do(Shard(tuple(rows)))


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--actors", "2"], "--actors needs --workers ADDRESS"),
        (["--shard-rows", "2"], "--shard-rows needs --workers ADDRESS"),
        (["--workers", "local", "--actors", "0"], "--actors must be at least 1, not 0"),
        (["--workers", "local", "--replicas", "2"], "--workers has an engine in each worker: leave --replicas out"),
    ],
)
def test_wrong_flags(capsys, flags, says):
    with pytest.raises(SystemExit) as end:
        main(["--input", "a", "--output", "b", *flags])
    assert (end.value.code, capsys.readouterr().err) == (2, f"error: {says} (see --help)\n")


def test_without_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setattr("jllm.serve.batch_rows.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=re.escape("a .parquet file needs pyarrow: uv pip install -e '.[ray]'")):
        read_rows(tmp_path / "rows.parquet", {})


def test_the_command_by_the_name_of_the_module():
    done = subprocess.run([sys.executable, "-m", "jllm.batch"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: give --input FILE and --output FILE (see --help)\n"


def test_without_ray(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("jllm.serve.batch_ray.find_spec", lambda name: None)
    command = ["--input", write(tmp_path / "in.jsonl", ROWS), "--output", tmp_path / "out", "--workers", "local"]
    assert main([str(each) for each in command]) == 2
    err = capsys.readouterr().err
    assert err == "error: --workers needs Ray: uv pip install -e '.[ray]' in the folder of jllm's sources\n"


# Clusters


def test_an_item_that_kills_its_workers_ends_the_job():
    """Ray by itself does it again for ever: here is what it is asked for, and what it says then."""
    lost, asked = type("RayActorError", (Exception,), {}), {}

    def iter_rows():
        raise lost("page\nafter page")
        yield

    def map_batches(kind, **how):
        asked.update(how)
        return SimpleNamespace(iter_rows=iter_rows)

    context = SimpleNamespace(get_current=SimpleNamespace)
    data = SimpleNamespace(
        from_items=lambda items, **how: SimpleNamespace(map_batches=map_batches), DataContext=context
    )
    util = SimpleNamespace(client=SimpleNamespace(ray=SimpleNamespace(is_connected=lambda: False)))
    ray = SimpleNamespace(data=data, util=util, exceptions=SimpleNamespace(RayActorError=lost, RayError=Exception))
    with pytest.raises(RemoteError, match="^a worker was lost 5 times over one item: it may be what ends them$"):
        list(mapped(ray, [{"x": 1}], object, (), 1, 0))
    assert asked["max_task_retries"] == 4


def processes(mark: str, name: str) -> list[int]:
    """Those of a cluster, which have a mark of ours in their environment, and a name."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and name in (entry / "cmdline").read_text():
                found += [int(entry.name)] if mark in (entry / "environ").read_text() else []
        except OSError:  # it has just gone
            continue
    return found


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc to find workers")
def test_a_worker_that_is_killed_loses_no_row_and_none_is_there_twice(checkpoint, tmp_path):
    pytest.importorskip("ray", reason="needs the extra ray")
    out, mark = tmp_path / "out", f"JLLM_TEST={uuid.uuid4()}"
    rows = [{"id": i, "prompt": f"the wolf {i}", "max_new_tokens": 24, "ignore_eos": True} for i in range(32)]
    command = [
        sys.executable,
        "-m",
        "jllm.serve.batch",
        "--model",
        checkpoint,
        "--input",
        write(tmp_path / "in.jsonl", rows),
    ]
    command += ["--output", out, "--workers", "local", "--actors", 1, "--shard-rows", 2, "--max-slots", 2]
    command += ["--page-size", 8, "--num-pages", 16, "--max-step-tokens", 16, "--compile-cache", tmp_path / "steps"]
    env = {**os.environ, **dict([mark.split("=")]), "JAX_PLATFORMS": "cpu"}
    command = [str(each) for each in command]
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as process:
        try:
            while not list(out.glob(SHARDS)):
                assert process.poll() is None, process.stderr.read()
                time.sleep(0.05)
            workers = processes(mark, "ray::MapWorker")
            assert workers
            os.kill(workers[0], signal.SIGKILL)
            before = set(out.glob(SHARDS))
            errors = process.communicate()[1]
        except BaseException:
            process.kill()
            raise
    assert process.returncode == 0, errors
    assert "32 rows done" in errors
    assert len(before) < 16, "it was killed before the end"
    assert sorted(each["id"] for each in results(out)) == list(range(32))
    assert not list(out.glob("*.partial"))
    assert len(list((tmp_path / "steps").iterdir())) >= 1, "workers share compiled steps"
    for _ in range(600):  # the cluster of a busy machine ends a little later
        if not processes(mark, "ray::"):
            break
        time.sleep(0.1)
    assert processes(mark, "ray::") == []


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc to find workers")
def test_a_cluster_is_reached_through_rays_client(checkpoint, tmp_path):
    """Over which Ray Data does not work by itself."""
    pytest.importorskip("ray", reason="needs the extra ray")
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    env["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"  # as the command has it
    env["GRPC_ENABLE_FORK_SUPPORT"] = "0"  # else a fork of the head, which has threads, may end in gRPC
    mark = f"JLLM_TEST={uuid.uuid4()}"
    ray, port = [sys.executable, "-m", "ray.scripts.scripts"], str(free_port())
    start = ["start", "--head", "--block", "--port=0", f"--ray-client-server-port={port}", "--num-cpus=1"]
    start += ["--include-dashboard=false", "--dashboard-agent-listen-port=0"]
    with open(tmp_path / "head.log", "w") as log:
        head = subprocess.Popen(
            [*ray, *start], env={**env, **dict([mark.split("=")])}, stdout=log, stderr=subprocess.STDOUT
        )
    rows = [{"id": i, "prompt": f"the wolf {i}", "max_new_tokens": 4} for i in range(3)]
    command = [sys.executable, "-m", "jllm.serve.batch", "--model", checkpoint]
    command += ["--input", write(tmp_path / "in.jsonl", rows), "--output", tmp_path / "out", "--shard-rows", 2]
    command += ["--workers", f"ray://127.0.0.1:{port}", "--actors", 1, "--max-slots", 2, "--num-pages", 16]
    command += ["--page-size", 8, "--max-step-tokens", 16]
    try:
        for _ in range(1200):
            assert head.poll() is None, (tmp_path / "head.log").read_text()
            with socket.socket() as found:
                if found.connect_ex(("127.0.0.1", int(port))) == 0:
                    break
            time.sleep(0.1)
        done = subprocess.run([str(each) for each in command], env=env, capture_output=True, text=True)
    finally:
        for each in processes(mark, ""):  # asked to end, they wait half a minute for clients
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        head.wait()
    assert done.returncode == 0, done.stderr
    assert "3 rows done" in done.stderr
    assert sorted(each["id"] for each in results(tmp_path / "out")) == [0, 1, 2]
