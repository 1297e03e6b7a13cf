"""Adapters in PEFT's directories: what PEFT wrote, and what it reads (tests/data/make_peft.py)."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

import jllm
from jllm.errors import CheckpointError
from jllm.files.safetensors_io import read_as_stored, read_header, write_file
from tests.parity import PARITY
from tests.tiny import full_logits

DATA = Path(__file__).parents[1] / "data" / "peft"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@pytest.fixture(scope="module")
def model():
    with jax.enable_x64(True):
        return jllm.load(PARITY / "llama3.2", dtype="float64")


@pytest.mark.parametrize("name", ["patterns", "dora"])
def test_logits_are_pefts(model, name):
    """Tests ranks and scales by pattern with use_rslora, and DoRA, which only merging can serve."""
    data = np.load(DATA / name / "expected.npz")
    with jax.enable_x64(True):
        got = full_logits(jllm.merge_adapter(model, DATA / name), data["prompt"], pad=32)
    assert np.abs(got - data["logits"]).max() < 1e-12 * np.abs(data["logits"]).max() * 100


def test_what_is_saved_has_pefts_names_and_the_same_values(model, tmp_path):
    adapter = jllm.load_adapter(DATA / "patterns", model.config)
    jllm.save_adapter(tmp_path, adapter, model.config, "llama3.2")
    theirs, ours = (read_header(folder / WEIGHTS) for folder in (DATA / "patterns", tmp_path))
    assert theirs.keys() == ours.keys()
    again = jllm.load_adapter(tmp_path, model.config)
    assert again.keys() == adapter.keys() == {"qkv", "gate_up", "down"}
    for name, each in adapter.items():
        assert (again[name].a == each.a).all()
        assert (again[name].b == each.b).all()
        np.testing.assert_allclose(again[name].scale, each.scale, rtol=1e-15)
    assert adapter["qkv"].scale[0][1] == 0, "k_proj has no adapter"


def test_modules_that_files_merge_are_merged_in_both_directions(tmp_path):
    """Phi's files have q, k and v as one tensor, so PEFT has one adapter for them."""
    with jax.enable_x64(True):
        phi, rng = jllm.load(PARITY / "phi4", dtype="float64"), np.random.default_rng(0)
        merged = phi.params.layers[1].attention.qkv
        a, b = rng.normal(size=(3, merged.shape[1])), rng.normal(size=(merged.shape[0], 3))
        name = "base_model.model.model.layers.1.self_attn.qkv_proj.lora_"
        write_file(tmp_path / WEIGHTS, {f"{name}A.weight": a, f"{name}B.weight": b})
        raw = {"peft_type": "LORA", "r": 8, "lora_alpha": 6, "rank_pattern": {"1.self_attn.qkv_proj": 3}}
        (tmp_path / CONFIG).write_text(json.dumps(raw))
        adapter = jllm.load_adapter(tmp_path, phi.config)
        got = jllm.merge_adapter(phi, adapter).params.layers[1].attention.qkv
        np.testing.assert_allclose(got, merged + 2 * b @ a, rtol=0, atol=1e-12)
        one = adapter["qkv"]
        apart = {"qkv": replace(one, a=one.a * np.arange(1.0, 10)[:, None])}  # q, k and v have an a of their own
        two = {"qkv": replace(apart["qkv"], scale=tuple((q, 0.0, v / 2) for q, _, v in one.scale))}  # k has none
        for each, rank in ((adapter, 3), (apart, 9), (two, 6)):
            jllm.save_adapter(tmp_path / "again", each, phi.config)
            header = read_header(tmp_path / "again" / WEIGHTS)
            assert {n: t.shape[n.endswith("B.weight")] for n, t in header.items()} == dict.fromkeys(
                (f"{name}A.weight", f"{name}B.weight"), rank
            )
            both = (jllm.merge_adapter(phi, x).params.layers[1].attention.qkv for x in (each, tmp_path / "again"))
            np.testing.assert_allclose(*both, rtol=0, atol=1e-12)


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(DATA / "patterns", tmp_path, dirs_exist_ok=True)
    return tmp_path


UNKNOWN = {
    "DoRA": ({"use_dora": True}, "use_dora scales whole weights: merge it by jllm.merge_adapter"),
    "modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save=.'lm_head'. is not supported"),
    "biases": ({"bias": "all"}, "bias='all' is not supported"),
    "another kind": ({"peft_type": "IA3"}, "peft_type is 'IA3', and LORA alone is supported"),
    "another base": ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4' is not supported"),
    "another rank": ({"r": 8}, "q_proj has rank 4, and r=8"),
    "no pattern": ({"rank_pattern": {"(": 4}}, "rank_pattern must be numbers by regular expression, not {'[(]': 4}"),
    "flags": ({"rank_pattern": {"(?i)O_PROJ": 4}}, "rank_pattern must be numbers by regular expression"),
    "a list": ({"alpha_pattern": [4]}, r"alpha_pattern must be numbers by regular expression, not \[4\]"),
    "DoRA untold": ({"use_dora": False}, "has a lora_magnitude_vector, and adapter_config.json no use_dora"),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_a_configuration_that_asks_for_more_is_refused_by_name(model, folder, case):
    changes, why = UNKNOWN[case]
    if "DoRA" in case:
        shutil.copytree(DATA / "dora", folder, dirs_exist_ok=True)
    raw = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(raw | changes))
    with pytest.raises(CheckpointError, match=why):
        jllm.load_adapter(folder, model.config)


def test_tensors_that_are_no_factors_of_the_model_are_refused_by_name(model, folder):
    stored = {name: read_as_stored(tensor) for name, tensor in read_header(folder / WEIGHTS).items()}
    first = next(iter(stored))
    layer = "base_model.model.model.layers"
    qkv = f"{layer}.0.self_attn.qkv_proj.lora_"
    for changed, why in (
        ({"base_model.model.model.embed_tokens.lora_embedding_A": stored[first]}, "is no low-rank factor of a layer"),
        ({f"{layer}.2.mlp.up_proj.lora_A.weight": stored[first]}, "the model has 2 layers"),
        (
            {f"{layer}.0.mlp.c_fc.lora_A.weight": stored[first]},
            "changes model.layers.0.mlp.c_fc, which this model lacks",
        ),
        ({f"{layer}.0.mlp.gate_proj.lora_A.weight": stored[first]}, "gate_proj lacks lora_B"),
        ({first: stored[first][:, :-1].copy()}, "and this model takes"),
        ({f"{qkv}B.weight": np.ones((129, 4))}, r"qkv_proj has lora_B \[129, 4\], and this model takes 128 rows"),
        ({f"{qkv}A.weight": np.ones((4, 64))}, "qkv_proj and its part self_attn.q_proj both have factors"),
    ):
        write_file(folder / WEIGHTS, stored | changed)
        with pytest.raises(CheckpointError, match=why):
            jllm.load_adapter(folder, model.config)
    write_file(folder / WEIGHTS, {f"{qkv}A.weight": np.ones((0, 64)), f"{qkv}B.weight": np.ones((128, 0))})
    (folder / CONFIG).write_text('{"peft_type": "LORA", "r": 0, "lora_alpha": 1}')
    with pytest.raises(CheckpointError, match="qkv_proj has rank 0, and r=0"):
        jllm.load_adapter(folder, model.config)
    (folder / CONFIG).write_text("{")
    with pytest.raises(CheckpointError, match="not readable as JSON"):
        jllm.load_adapter(folder, model.config)
    (folder / CONFIG).unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        jllm.load_adapter(folder, replace(model.config))
