"""A recorded schedule says what ran, and is read back as it was written."""

import json
from typing import Any

import numpy as np
import pytest

from jllm.batch import Bucket
from jllm.engine.engine import Engine
from jllm.engine.trace import read_trace
from jllm.errors import ConfigError, InputFileError, OutputError
from tests.tiny import greedy, tiny_model

OPTIONS: dict[str, Any] = {"max_slots": 2, "page_size": 8, "num_pages": 4, "prefix_cache": False}
OPTIONS["buckets"] = (Bucket(2, 0, 0), Bucket(2, 16, 2))


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def run(model, trace, **options):
    engine = Engine(model, **{**OPTIONS, **options}, trace=trace)
    for prompt in ([3] * 7, [4] * 7):
        engine.submit(prompt, greedy(18))
    engine.abort(engine.submit([5], greedy(3)))
    list(engine.run())
    return engine


def test_a_trace_holds_all_that_ran(model):
    records: list = []
    m = run(model, records).metrics()
    trace = read_trace(json.loads(json.dumps(records)))
    assert m["preemptions"] == sum(len(step.preempted) for step in trace.steps) == 1
    assert [step.step for step in trace.steps] == list(range(m["steps"]))
    assert sum(step.decodes + step.tokens for step in trace.steps) == m["tokens"]
    assert sum(step.bucket.size for step in trace.steps) == m["rows"]
    assert max(step.pages for step in trace.steps) == m["pages_peak"]
    times = [t for step in trace.steps for t in (step.planned, step.dispatched)]
    assert times == sorted(times)
    assert all(step.dispatched < step.read for step in trace.steps)
    assert [(r.known, r.max_length, r.output, r.reason) for r in trace.requests] == [
        (7, 25, 18, "length"),
        (7, 25, 18, "length"),
        (1, 4, 0, "abort"),
    ]
    assert (trace.limits.num_pages, trace.engine["kv_policy"]) == (4, "paged")


def test_every_token_of_kv_is_in_some_step(model):
    """Chunks and decodes of a request that was never preempted write its KV once, and decodes read what they say."""
    records: list = []
    run(model, records)
    trace = read_trace(records)
    chunks = [chunk for step in trace.steps for chunk in step.chunks if chunk[0] == 0]
    assert chunks == [(0, 0, 0, 7, True)]
    (preempted,) = (step for step in trace.steps if step.preempted)
    again = [c for step in trace.steps for c in step.chunks if c[0] == 1 and step.step >= preempted.step]
    assert [c[2] for c in again][0] == 0
    assert sum(c[3] for c in again) > 7
    alone = [step for step in trace.steps if step.decodes == 1 and step.step < again[0][3]]
    assert all(step.keys >= 8 for step in alone)


def test_a_file_reads_as_the_list_does(model, tmp_path):
    numpy = {"num_pages": np.int64(4)}
    run(model, str(tmp_path / "trace.jsonl"), **numpy)  # not closed: what is done is in the file all the same
    run(model, records := [], **numpy)
    a, b = read_trace(tmp_path / "trace.jsonl"), read_trace(records)
    assert [step.chunks for step in a.steps] == [step.chunks for step in b.steps]
    assert (a.engine, a.limits) == (b.engine, b.limits)


def test_steps_in_flight_are_lost_when_the_engine_is_closed(model):
    engine = Engine(model, **OPTIONS, trace=(records := []))
    engine.submit([3] * 7, greedy(18))
    for _ in range(3):
        engine.step()
    engine.close()
    trace = read_trace(records)
    assert [step.read is None for step in trace.steps] == [False, False, True]
    assert trace.requests[0].reason is None


SIZES = ("max_slots", "max_step_tokens", "max_prompt_tokens", "max_chunks", "page_size", "num_pages", "max_deltas")
HEAD = {"type": "engine", "version": 1, "limits": dict.fromkeys(SIZES, 1)}


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (["{"], "line 1 is not of a trace"),
        ([], "an empty trace"),
        ([{"type": "end"}], "line 1 is not of a trace: the first record, and no other, must be of type engine"),
        ([HEAD, HEAD], "line 2 is not of a trace: the first record"),
        ([{**HEAD, "version": 9}], "line 1 is not of a trace: version 9, this reads 1"),
        ([HEAD, {"type": "step", "step": 0}], "line 2 is not of a trace: field 'chunks' is missing"),
        ([HEAD, {"type": "end", "request": 3, "sample": 0}], "request 3 sample 0 ends and never came"),
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
    with pytest.raises(OutputError, match="can't be written: No such file"):
        Engine(model, **OPTIONS, trace=tmp_path / "none" / "t.jsonl")
    with pytest.raises(ConfigError, match="trace must be the path of a file or a list, not 5"):
        Engine(model, **OPTIONS, trace=5)
