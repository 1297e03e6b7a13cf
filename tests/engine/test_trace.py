"""A recorded schedule says what ran, and is read back as it was written."""

import json
from typing import Any

import numpy as np
import pytest

from jllm.engine.engine import Engine
from jllm.engine.trace import read_trace
from jllm.errors import ConfigError, InputFileError, OutputError
from jllm.step.buckets import Bucket
from tests.tiny import greedy, tiny_model

OPTIONS: dict[str, Any] = {"max_slots": 2, "page_size": 8, "num_pages": 4, "prefix_cache": False}
OPTIONS["buckets"] = (Bucket(2, 0, 0), Bucket(2, 16, 2))


@pytest.fixture(scope="module")
def model():
    return tiny_model(num_layers=1)


def run(model, trace, **options):
    engine = Engine(model, **{**OPTIONS, **options}, trace=trace)
    for prompt in ([3] * 7, [4] * 7):
        engine.submit(prompt, greedy(18))
    engine.abort(engine.submit([5], greedy(3)))
    list(engine.run())
    return engine


def of_type(records: list, kind: str) -> list:
    return [record for record in read_trace(records) if record["type"] == kind]


def test_a_trace_holds_all_that_ran(model):
    records: list = []
    m = run(model, records).metrics()
    assert read_trace(json.loads(json.dumps(records))) == records
    steps = of_type(records, "step")
    assert m["preemptions"] == sum(len(step["preempted"]) for step in steps) == 1
    assert [step["step"] for step in steps] == list(range(m["steps"]))
    assert sum(step["decodes"] + sum(chunk[3] for chunk in step["chunks"]) for step in steps) == m["tokens"]
    assert sum(Bucket(*step["rung"]).size for step in steps) == m["rows"]
    assert max(step["pages"] for step in steps) == m["pages_peak"]
    times = [t for step in steps for t in (step["planned"], step["dispatched"])]
    assert times == sorted(times)
    assert all(step["dispatched"] < step["read"] for step in steps)
    requests = [(r["request"], r["known"], r["max_length"]) for r in of_type(records, "request")]
    assert requests == [(0, 7, 25), (1, 7, 25), (2, 1, 4)]
    ends = sorted((r["request"], r["output"], r["reason"]) for r in of_type(records, "end"))
    assert ends == [(0, 18, "length"), (1, 18, "length"), (2, 0, "abort")]
    (engine,) = of_type(records, "engine")
    assert (engine["limits"]["num_pages"], engine["kv_policy"]) == (4, "paged")


def test_every_token_of_kv_is_in_some_step(model):
    """Chunks and decodes of a request that was never preempted write its KV once, and decodes read what they say."""
    records: list = []
    run(model, records)
    steps = of_type(records, "step")
    chunks = [chunk for step in steps for chunk in step["chunks"] if chunk[0] == 0]
    assert chunks == [[0, 0, 0, 7, True]]
    (preempted,) = (step for step in steps if step["preempted"])
    again = [c for step in steps for c in step["chunks"] if c[0] == 1 and step["step"] >= preempted["step"]]
    assert [c[2] for c in again][0] == 0
    assert sum(c[3] for c in again) > 7
    alone = [step for step in steps if step["decodes"] == 1 and step["step"] < again[0][3]]
    assert all(step["keys"] >= 8 for step in alone)


def test_a_file_reads_as_the_list_does(model, tmp_path):
    numpy = {"num_pages": np.int64(4)}
    run(model, str(tmp_path / "trace.jsonl"), **numpy)  # not closed: what is done is in the file all the same
    run(model, records := [], **numpy)
    a, b = read_trace(tmp_path / "trace.jsonl"), read_trace(records)
    assert [step.get("chunks") for step in a] == [step.get("chunks") for step in b]
    assert a[0] == b[0]


def test_steps_in_flight_are_lost_when_the_engine_is_closed(model):
    engine = Engine(model, **OPTIONS, trace=(records := []))
    engine.submit([3] * 7, greedy(18))
    for _ in range(3):
        engine.step()
    engine.close()
    assert [step["read"] is None for step in of_type(records, "step")] == [False, False, True]
    assert not of_type(records, "end")


HEAD = {"type": "engine", "version": 1}


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (["{"], "line 1 is not of a trace"),
        ([], "an empty trace"),
        ([{"type": "end"}], "line 1 is not of a trace: the first record, and no other, must be of type engine"),
        ([HEAD, HEAD], "line 2 is not of a trace: the first record"),
        ([{**HEAD, "version": 9}], "line 1 is not of a trace: version 9, this reads 1"),
        ([HEAD, {"step": 0}], "line 2 is not of a trace: field 'type' is missing"),
        ([HEAD, {"type": "pause", "request": 3, "sample": 0}], "unknown type 'pause'"),
        ([HEAD, [1]], "line 2 is not of a trace"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_line(tmp_path, lines, says):
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    with pytest.raises(InputFileError, match=says):
        read_trace(path)


def test_files_that_cannot_be(model, tmp_path):
    with pytest.raises(InputFileError, match="No such file"):
        read_trace(tmp_path / "none.jsonl")
    with pytest.raises(OutputError, match="cannot be written: No such file"):
        Engine(model, **OPTIONS, trace=tmp_path / "none" / "t.jsonl")
    with pytest.raises(ConfigError, match="trace must be the path of a file or a list, not 5"):
        Engine(model, **OPTIONS, trace=5)
