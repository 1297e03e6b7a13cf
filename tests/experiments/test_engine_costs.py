"""experiments.engine_costs on a tiny model."""

import json

import pytest

from experiments import engine_costs

SHAPE = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip


def test_what_an_engine_promises_is_measured_and_has_its_bar(tmp_path, capsys):
    (tmp_path / "tiny.json").write_text(json.dumps(SHAPE))
    sizes = ("--batch", "2", "--steered", "2", "--steps", "2", "--repeats", "1", "--threads", "2")
    costs = ["update", "adapters", "steering"]
    where = "--config", str(tmp_path / "tiny.json"), "--results", str(tmp_path)
    assert engine_costs.main([*where, "--costs", *costs, *sizes]) == 0
    (path,) = tmp_path.glob("engine_costs-*.json")
    document = json.loads(path.read_text())
    rows = document["rows"]
    assert list(dict.fromkeys(row["cost"] for row in rows)) == costs
    assert [row["update_bytes"] for row in rows if "update_bytes" in row] == [0]
    assert [row["compiled"] for row in rows if "compiled" in row] == [0]
    assert all(row["ms"] > 0 for row in rows if "ms" in row)
    named = {bar["name"].rpartition(" ")[2] for bar in document["bars"]}
    assert named >= {"update_ms", "wake_ms", "quantize_ms", "adapter_ms", "added"}
    with pytest.raises(SystemExit):
        engine_costs.main([*where, "--costs", "nothing"])
    assert "invalid choice: 'nothing'" in capsys.readouterr().err
