"""Tests what adapters add to steps, at toy size: which steps are timed, and their bars."""

import json

import pytest

from experiments import adapter_steps
from tests.experiments.test_decode_step import TOY


def test_a_run_at_toy_size(tmp_path):
    config = tmp_path / "toy.json"
    config.write_text(json.dumps(TOY | {"num_hidden_layers": 1}))
    sizes = {"--batch": 3, "--context": 40, "--prompt": 16, "--rank": 2, "--prompt-rank": 4, "--steps": 2}
    options = [text for name, value in sizes.items() for text in (name, str(value))]
    options += ["--config", str(config), "--bandwidth", "1e6", "--repeats", "1", "--results", str(tmp_path)]
    assert adapter_steps.main([*options, "--backend", "default", "--dtype", "bfloat16"]) == 0
    (file,) = tmp_path.glob("adapter_steps-*.json")
    document = json.loads(file.read_text())
    found = {(row["step"], row["adapters"]): row for row in document["rows"]}
    assert set(found) == {(step, use) for step in ("decode", "prefill") for use in adapter_steps.USES}
    inputs, outputs, parts = (64, 64, 64, 96), (128, 64, 192, 64), (3, 1, 2, 1)
    one = sum(2 * 2 * (p * i + o) + 4 * p for i, o, p in zip(inputs, outputs, parts))
    row, base = found["decode", "each"], found["decode", "no places"]
    assert row["bytes"] * 3 * one / 1e6 * 1e3 == pytest.approx(row["ms"] - base["ms"], abs=0.02)
    assert base["added"] == 0
    assert [bar["bar"] for bar in document["bars"]] == [0.04, 1.5, 0.08]
