"""Checks the experiment on equal bits with a small model on a CPU, where they are equal, and a fault that it sees."""

import json

import jax
import jax.numpy as jnp

from experiments import rollout_bits
from jllm.engine.engine import Engine
from tests.tiny import tiny_model


def test_all_bits_are_equal_and_those_of_other_weights_are_not(monkeypatch, tmp_path, capsys):
    model = tiny_model("bfloat16", num_layers=1)
    monkeypatch.setattr(rollout_bits, "random_params", lambda config, dtype: model.params)
    monkeypatch.setattr(rollout_bits, "model_config", lambda path, layers: model.config)
    monkeypatch.setattr(rollout_bits, "SHARED", 8)
    asked = ["--tokens", "48", "--new-tokens", "12", "--slots", "3", "--kv", "model", "--results", str(tmp_path)]
    assert rollout_bits.main([*asked, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert row["tokens"] == 48
    assert row["preemptions"]
    assert row["prefix_hits"]
    assert (row["equal"], row["gap"]) == (1.0, 0.0)

    def other(self, *args, real=Engine.run, **options):
        self.update(jax.tree.map(lambda x: x * jnp.asarray(1.01, x.dtype), model.params))
        return real(self, *args, **options)

    monkeypatch.setattr(Engine, "run", other)
    (faulty,) = rollout_bits.rows(rollout_bits.parse_args(asked))
    assert faulty["equal"] < 0.1
