"""The experiment on generated texts, and its claim of serving: log-probabilities are those of the forward pass."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest

from experiments import continuations
from experiments.accuracy.support import check_all_run
from experiments.arguments import by_name
from experiments.campaign import SERVED
from experiments.continuations import agreed, gaps
from experiments.continuations import continuations as continued
from jllm.errors import ConfigError
from jllm.quant.quantize import quantize
from pallas_kernels.backends import TARGET
from tests.tiny import tiny_model

pytest.importorskip("optax")
from experiments.train_small import SIZES as TRAINED  # noqa: E402

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 2}
PROMPTS = [[3, 14, 15, 92, 65], [35, 89, 79, 32, 38]]


@pytest.fixture(scope="module")
def model64():
    with jax.enable_x64(True):
        return tiny_model("float64", **SIZES)


# Of each kind of activations; llm-int8 with a threshold that some values of so small a model reach.
@pytest.mark.parametrize("scheme", ["w8a8-all", "llm-int8-t1", "w4a16-g32-zp", "nvfp4"])
def test_served_log_probabilities_are_those_of_the_forward_pass(model64, scheme):
    """In float64, where no activation lies so near the middle of two codes that the order of a sum decides."""
    with jax.enable_x64(True):
        model = replace(model64, params=quantize(model64.params, scheme))
        found = continued(model, PROMPTS, 8, "model")
        apart = gaps(model, PROMPTS, found)
        assert apart.shape == (16,)
        assert apart.max() < 1e-6
        assert gaps(model64, PROMPTS, found).max() > 1e-4  # of other weights


def test_agreement_ends_at_the_first_token_that_differs():
    assert agreed([1, 2, 3], [1, 2, 3]) == 3
    assert agreed([1, 9, 3], [1, 2, 3]) == 1
    assert agreed([9, 2, 3], [1, 2, 3]) == 0


def test_a_run_compares_texts_and_passes(tmp_path, monkeypatch):
    model = tiny_model(**SIZES)
    monkeypatch.setattr(continuations.jllm, "load", lambda *args, **options: model)
    monkeypatch.setattr(continuations, "run_of", lambda args: {})
    monkeypatch.setattr(continuations, "beginnings", lambda model, args: PROMPTS)
    options = ["--results", str(tmp_path), "--new-tokens", "8", "--schemes", "w8a16", "w4a16-g32", "--kv", "int8-g8"]
    assert continuations.main([*options, "--backend", "mosaic"]) == 2  # no Hopper GPU
    assert continuations.main([*options, "--backend", "xla"]) == 0
    (file,) = tmp_path.glob("*.json")
    document = json.loads(file.read_text())
    plain, eight, four, kv = document["rows"]
    assert (plain["agreed"], plain["same_8"], plain["forced_kl"], plain["forced_top1"]) == (8, 1, 0, 1)
    assert 0 < eight["forced_kl"] < four["forced_kl"] / 10
    assert four["agreed"] <= eight["agreed"] <= 8
    assert kv["kv"] == "int8-g8"
    assert "gap" not in kv
    assert [(bar["bar"], bar["met"]) for bar in document["bars"]] == [(1e-4, True)] * 3
    assert np.max([row["gap"] for row in document["rows"][:3]]) > 0


def test_hoppers_kernels_take_all_that_the_campaign_asks_of_them(monkeypatch):
    """Of a layer as wide as the subject's; a sweep with one pair that its backend refuses does not begin."""
    monkeypatch.setenv(TARGET, "9.0")
    args = continuations.parse_args(SERVED.split()[1:])
    assert args.model == "subject"
    schemes = by_name(["bf16", *args.schemes])
    pairs = [*((name, "model") for name in schemes), *(("bf16", kv) for kv in args.kv)]
    sizes = TRAINED["subject"].options
    shape = {"hidden_size": sizes["width"], "num_heads": sizes["heads"], "head_dim": 64, "num_layers": 1}
    check_all_run(tiny_model("bfloat16", intermediate_size=sizes["ffn"], **shape), pairs, (), "mosaic", schemes)
    with pytest.raises(ConfigError, match="K=704"):  # the bundled model's
        check_all_run(tiny_model("bfloat16", intermediate_size=704, **shape), pairs, (), "mosaic", schemes)


def test_too_few_documents_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(continuations, "run_of", lambda args: {})
    (tmp_path / "t.jsonl").write_text('{"text": "One day"}\n')
    options = ["--text", str(tmp_path / "t.jsonl"), "--results", str(tmp_path), "--schemes", "w8a16"]
    assert continuations.main(options) == 2
    assert "fewer than two documents have 32 tokens" in capsys.readouterr().err


@pytest.mark.parametrize(("scheme", "wide", "half"), [("w8a16", 16, 8), ("w8a8-all", 8, 8), ("nvfp4", 4, 4)])
def test_bits_of_activations_decide_the_bound(scheme, wide, half):
    for dtype, bits in (("float32", wide), ("bfloat16", half)):
        model = tiny_model(dtype, **SIZES)
        assert continuations.activation_bits(replace(model, params=quantize(model.params, scheme))) == bits
