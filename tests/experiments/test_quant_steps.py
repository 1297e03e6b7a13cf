"""The experiment on whole steps: what it says of its rows, and one run at toy size."""

import argparse
import json
from dataclasses import replace

import pytest

from experiments.quant_steps import Case, Stage, bars, main, parse_stage
from experiments.steps.devices import device_sheet
from experiments.steps.floors import Work, make_floor
from jllm.files.hf_config import to_hf
from jllm.model.param_specs import abstract_params
from jllm.model.params import linears
from jllm.quant.quantize import quantize
from tests.tiny import CONFIG

H200 = device_sheet("h200-sxm").ceilings


def test_bars_are_those_of_the_batch():
    row = {"scheme": "w8a8", "kv": "int8-g8", "decode_ms": 3.0, "floor_fraction": 0.7}
    found = [next(bars([row | {"batch": batch}])) for batch in (64, 128, 512)]
    assert [(bar["bar"], bar["met"]) for bar in found] == [(0.7, True), (0.75, False), (0.75, False)]
    assert not list(bars([row | {"batch": 128, "kv": "bf16"}]))
    plain = [next(bars([row | {"scheme": "bf16", "kv": "bf16", "batch": batch}])) for batch in (1, 64, 128, 512)]
    assert [bar["bar"] for bar in plain] == [0.88, 0.86, 0.82, 0.85]
    (four,) = bars([row | {"scheme": "w4a16-g128", "kv": "bf16", "batch": 1, "decode_ms": 1.8}])
    assert (four["value"], four["bar"], four["met"]) == (1.8, 1.75, False)
    prefill = {"scheme": "bf16", "kv": "bf16", "prefill_ms": 9.0, "floor_fraction": 0.77, "batch": 128}
    assert [bar["bar"] for bar in bars([prefill | {"T": 1024}, prefill | {"T": 1023}])] == [0.78]


def test_floors_of_products_follow_what_their_inputs_are_quantized_to():
    config = replace(CONFIG, hidden_size=64, intermediate_size=64)
    shapes = abstract_params(config, "bfloat16")
    many, fast = 10**6, 1e20  # bound by operations, in the layers alone
    work = Work(many, 0, 0, 0)
    sizes = [w.size for w in linears(shapes).values()]
    seconds = {
        scheme: make_floor(quantize(shapes, scheme), config, replace(H200, bandwidth=fast)).of(work, 0.0)
        for scheme in ("bf16", "w8a8-all", "w4a16-g32")
    }
    assert seconds["bf16"] == pytest.approx(2 * many * sum(sizes) / H200.peaks[None], rel=1e-6)
    assert seconds["w4a16-g32"] == seconds["bf16"]  # multiplied in 16 bits
    assert seconds["w8a8-all"] == pytest.approx(seconds["bf16"] * H200.peaks[None] / H200.peaks["int8"], rel=1e-6)


def test_the_work_of_a_step_by_hand():
    assert Case("bf16", "decode", 3, "bf16").work(136, 8) == Work(3, 0, 3, 408)
    assert Case("bf16", "prefill", 3, "bf16").work(136, 8) == Work(0, 24, 3, 0, 24, 3 * 36)


def test_stages():
    assert parse_stage("decode:int8-g8:1,16") == Stage("decode", "int8-g8", (1, 16))
    named = parse_stage("decode:int8-g8:1,16:nf4,bf16")
    assert named == Stage("decode", "int8-g8", (1, 16), ("nf4", "bf16"))
    expected = [Case(scheme, "decode", batch, "int8-g8") for scheme in ("bf16", "nf4") for batch in (1, 16)]
    assert named.cases(["w8a8-all"]) == expected  # bf16 first: others are held against it
    assert parse_stage("decode:int8-g8:16").cases(["nf4"]) == expected[-1:]
    for wrong in (
        "decode", "decode:bf16", "draft:bf16:1", "decode:bf16:1,x", "decode::1", "decode:bf16:1:", "decode:bf16:1:a,,b",
        "decode:bf16:1:a:b",
    ):  # fmt: skip
        with pytest.raises(argparse.ArgumentTypeError):
            parse_stage(wrong)


def test_a_run_at_toy_size(tmp_path, capsys):
    config = replace(CONFIG, num_layers=1, dtype="bfloat16")
    (tmp_path / "config.json").write_text(json.dumps(to_hf(config)))
    flags = ["--config", str(tmp_path / "config.json"), "--results", str(tmp_path), "--json"]
    flags += ["--schemes", "fp8", "--stages", "prefill:bf16:2:w8a8-all"]  # a stage's own schemes are what it runs
    assert main([*flags, "--steps", "2", "--repeats", "1"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["complete"]
    (row,) = document["rows"]
    assert (row["scheme"], row["T"], "over_bf16" in row, document["bars"]) == ("w8a8-all", 16, False, [])
    shapes = quantize(abstract_params(config, "bfloat16"), "w8a8-all")
    token_bytes = config.num_kv_heads * config.head_dim * 2 * 2  # K and V of 16 bits
    floor = make_floor(shapes, config, H200).of(Work(0, 16, 2, 0, 16, 2 * 8 * 9 / 2), token_bytes)
    assert row["floor_ms"] == pytest.approx(1e3 * floor, rel=1e-3)
