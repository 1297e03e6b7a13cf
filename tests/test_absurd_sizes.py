"""Sizes that no model has are refused in one line, from headers alone and before anything is made of them.

Before, most of these filled the machine's memory or took minutes.
"""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import jllm
from jllm.errors import CheckpointError, ConfigError, NoRoomError
from jllm.files import load_params as checkpoint
from jllm.files.hf_config import from_hf, to_hf
from jllm.files.save import save
from jllm.model.param_specs import init_params
from jllm.quant.quantize import quantize
from tests.tiny import tiny_model

LAYERS = "num_hidden_layers"
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
WINDOWED = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 8}
WINDOWED |= {"attention_bias": None, "mlp_bias": None}
MODEL = tiny_model(hidden_size=64, intermediate_size=128)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The model as it is, and quantized."""
    root = tmp_path_factory.mktemp("sizes")
    for scheme in (None, "w8a16", "nf4"):
        params = MODEL.params if scheme is None else quantize(MODEL.params, scheme)
        save(root / str(scheme), params, MODEL.config)
    return root


def edited(folder, tmp_path, **fields):
    """A directory with the same weights and another config."""
    target = tmp_path / "edited"
    target.mkdir(exist_ok=True)
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    raw = json.loads((folder / "config.json").read_text()) | fields
    (target / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))
    return target


@pytest.mark.parametrize("family", [{}, WINDOWED])
@pytest.mark.parametrize("layers", [3, 10**6, 10**9])
def test_more_layers_than_the_files_have(folders, tmp_path, monkeypatch, family, layers):
    monkeypatch.setattr(checkpoint, "param_specs", None)  # nothing is made of the number of layers
    folder = edited(folders / "None", tmp_path, **{LAYERS: layers}, **family)
    says = rf"config\.json: num_hidden_layers is {layers}, but the weights beside it have 2$"
    with pytest.raises(ConfigError, match=says):
        jllm.load(folder)


@pytest.mark.parametrize("scheme", ["None", "w8a16", "nf4"])
@pytest.mark.parametrize("name", SIZES)
def test_sizes_that_the_files_do_not_have(folders, tmp_path, scheme, name):
    """Refused for what the files hold, and not for the memory that such a model would need."""
    heads = {"num_attention_heads": 1 << 24} if name == "num_key_value_heads" else {}
    folder = edited(folders / scheme, tmp_path, **heads, **{name: 1 << 24})
    with pytest.raises(CheckpointError, match=r"has shape \[.*\], but the .*config says \[.*\d{8}"):
        jllm.load(folder)


@pytest.mark.parametrize("name", [*SIZES, LAYERS, "max_position_embeddings"])
@pytest.mark.parametrize("family", [{}, WINDOWED])
def test_a_config_alone(name, family):
    heads = {"num_attention_heads": 2 * 10**12} if name == "num_key_value_heads" else {}
    raw = {**to_hf(MODEL.config), **family, **heads, name: 2 * 10**12}
    with pytest.raises(ConfigError, match=r"2000000000000.* at most \d+"):
        from_hf(raw)


def test_windows_and_token_ids_fit_the_device():
    raw = {**to_hf(MODEL.config), **WINDOWED}
    with pytest.raises(ConfigError, match="sliding_window = 10000000000 is too large: at most 2147483647 are"):
        from_hf(raw | {"sliding_window": 10**10})
    with pytest.raises(ConfigError, match="eos_token_id = 10000000000 is not a token id"):
        from_hf(raw | {"eos_token_id": 10**10})


@pytest.mark.parametrize("name", ["vocab_size", "hidden_size", "num_layers", "context"])
def test_a_config_made_by_hand(name):
    with pytest.raises(ConfigError, match=f"{name} is 1000000000000, but must be at least 1 and at most"):
        replace(MODEL.config, **{name: 10**12})


def test_random_weights():
    with pytest.raises(NoRoomError, match=r"random weights in bfloat16 take \d+\.\d\d GiB, and the device has .* free"):
        init_params(replace(MODEL.config, hidden_size=1 << 24, vocab_size=1 << 24), jax.random.key(0), jnp.bfloat16)
