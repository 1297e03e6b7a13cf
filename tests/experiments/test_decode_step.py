"""The time of whole decode steps, at toy size: what is counted for the floor, and what is written."""

import json

import pytest

from experiments import decode_step

TOY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 96,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 128,
    "rms_norm_eps": 1e-5, "rope_theta": 1e4, "max_position_embeddings": 512, "hidden_act": "silu",
    "tie_word_embeddings": False,
}  # fmt: skip


def measured(model, tmp_path):
    """Returns the result file of a run with one sequence and with three."""
    config = tmp_path / "toy.json"
    config.write_text(json.dumps(model))
    options = ["--config", str(config), "--context", "40", "--steps", "5", "--repeats", "2", "--bandwidth", "1e6"]
    assert decode_step.main([*options, "--batch", "1", "3", "--dtype", "bfloat16", "--results", str(tmp_path)]) == 0
    (file,) = tmp_path.glob("decode_step-*.json")
    return json.loads(file.read_text())


def test_a_run_at_toy_size(tmp_path):
    document = measured(TOY, tmp_path)
    weights = 2 * (64 * (64 + 2 * 2 * 16) + 64 * 64 + 3 * 64 * 96) + 128 * 64  # of products
    for row, batch in zip(document["rows"], (1, 3), strict=True):
        kv = batch * (40 + 3) * 2 * 2 * 2 * 16  # five steps read 41 to 45 tokens
        assert row["floor_ms"] == pytest.approx((weights + kv) * 2 / 1e6 * 1e3, rel=1e-5)
        assert row["floor_fraction"] == pytest.approx(row["floor_ms"] / row["decode_ms"], rel=1e-2)  # of rounded times
    assert [bar["bar"] for bar in document["bars"]] == [0.88, 0.88]


MIXTURE = TOY | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2,
    "norm_topk_prob": False, "num_key_value_heads": 4, "head_dim": 16, "moe_intermediate_size": 96,
    "mlp_only_layers": [0],
}  # fmt: skip


def test_the_floor_of_a_mixture_reads_the_experts_that_tokens_chose(tmp_path):
    one, three = measured(MIXTURE, tmp_path)["rows"]
    assert one["experts"] == 2
    assert 2 <= three["experts"] <= 6
    expert, rest = 3 * 64 * 96, 2 * 4 * 64 * 64 + 8 * 64 + 128 * 64
    for row, batch in ((one, 1), (three, 3)):
        numbers = rest + (1 + row["experts"]) * expert + batch * (40 + 3) * 2 * 2 * 4 * 16
        assert row["floor_ms"] == pytest.approx(numbers * 2 / 1e6 * 1e3, rel=2e-2)  # experts are rounded
