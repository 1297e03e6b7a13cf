"""Starts of an engine in processes of their own, at toy size: the second finds what the first compiled."""

import json

from experiments import start_up
from tests.experiments.test_decode_step import TOY


def test_a_run_at_toy_size(tmp_path):
    config = tmp_path / "toy.json"
    config.write_text(json.dumps(TOY))
    command = ["--config", str(config), "--slots", "1", "--pages", "9", "--dtype", "float32", "--repeats", "1"]
    assert start_up.main([*command, "--results", str(tmp_path)]) == 0
    (file,) = tmp_path.glob("start_up-*.json")
    document = json.loads(file.read_text())
    cold, warm = document["rows"]
    assert (cold["start"], cold["loaded"], warm["start"]) == ("cold", 0, "warm")
    assert warm["loaded"] == warm["sizes"] == cold["sizes"]
    assert 0 < cold["engine_s"] < cold["first_token_s"] < cold["start_s"]
    assert document["complete"]
    assert not document["bars"]


def test_the_slowest_start_is_judged():
    row = {"model": "llama-2-7b", "scheme": "bfloat16", "slots": 512, "device": "gpu: NVIDIA H100 80GB HBM3"}
    row |= {"processes": "usual", "first_token_s": 30.0}
    rows = [row | {"start": "cold", "start_s": 59.0}, *(row | {"start": "warm", "start_s": s} for s in (2.0, 16.0))]
    assert [(bar["value"], bar["met"]) for bar in start_up.bars(rows)] == [(30, True), (59, True), (16, False)]
    others = [row | {"start": kind, "start_s": s, "processes": 0} for kind, s in (("cold", 70.0), ("warm", 17.0))]
    assert [bar["value"] for bar in start_up.bars(rows + others)] == [30.0, 59.0, 17.0]
    assert not list(start_up.bars([row | {"slots": 64} for row in rows]))
    assert not list(start_up.bars([row | {"device": "cpu: cpu"}]))
