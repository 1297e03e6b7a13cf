"""Files of drafters: what is saved comes back, and what does not fit is refused in one line."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jllm.errors import CheckpointError, ConfigError, DrafterError
from jllm.files.drafters import load_drafter, save_heads
from jllm.files.safetensors_io import write_file
from jllm.files.save import save
from jllm.quant.quantize import quantize
from jllm.quant.schemes import find_scheme
from jllm.speculative.draft_model import DraftModel
from jllm.speculative.eagle import init_eagle
from jllm.speculative.medusa import init_medusa
from jllm.speculative.tree import Tree, chain
from tests.tiny import tiny_model

TREE = Tree((0, 0, 1, 1, 2))
MODEL = tiny_model()
KEY = jax.random.key(0)


def heads(kind: str, model=MODEL, tree=TREE):
    make = {"medusa": init_medusa, "own": lambda *a: init_medusa(*a, own=True), "eagle": init_eagle}[kind]
    return make(model.config, KEY, tree, model.params.dtype)


@pytest.mark.parametrize("kind", ["medusa", "own", "eagle"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_heads_come_back_as_they_were(tmp_path, kind, dtype):
    drafter = heads(kind)
    save_heads(tmp_path / "heads.safetensors", drafter, MODEL.params, dtype=dtype)
    loaded = load_drafter("medusa" if kind == "own" else kind, tmp_path / "heads.safetensors", MODEL)
    assert loaded.tree == TREE
    rounded = jax.tree.map(lambda x: x.astype(dtype).astype(x.dtype), drafter)
    jax.tree.map(np.testing.assert_array_equal, rounded, loaded)
    assert jax.tree.structure(loaded) == jax.tree.structure(drafter)
    loaded.init(MODEL.config, MODEL.params.dtype, slots=2, num_pages=4, page_size=4, max_tokens=16)


def test_a_tree_that_is_given_takes_the_files_place(tmp_path):
    save_heads(tmp_path / "heads", heads("medusa"), MODEL.params)
    assert load_drafter("medusa", tmp_path / "heads", MODEL, chain(2)).tree == chain(2)


def test_heads_serve_a_quantized_copy_and_another_dtype_of_their_model(tmp_path):
    model = tiny_model("bfloat16")
    save_heads(tmp_path / "heads", heads("eagle", model), model.params)
    wider = replace(model, params=jax.tree.map(lambda x: x.astype(jnp.float32), model.params))
    assert load_drafter("eagle", tmp_path / "heads", wider).head.fc.dtype == jnp.float32
    small = replace(model, params=quantize(model.params, find_scheme("w8a16")))
    assert load_drafter("eagle", tmp_path / "heads", small).head.fc.dtype == jnp.bfloat16
    tiniest = model.params.embed.at[0, 0].set(2.0**-30)  # zero in float16
    save_heads(tmp_path / "heads", heads("eagle", model), replace(model.params, embed=tiniest))
    narrow = replace(model, params=jax.tree.map(lambda x: x.astype(jnp.float16), replace(model.params, embed=tiniest)))
    assert load_drafter("eagle", tmp_path / "heads", narrow).head.fc.dtype == jnp.float16


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
@pytest.mark.parametrize("quantized", [False, True])
def test_heads_of_another_model_are_refused(tmp_path, kind, quantized):
    save_heads(tmp_path / "heads", heads(kind), MODEL.params)
    other = tiny_model(seed=1)
    if quantized:
        other = replace(other, params=quantize(other.params, find_scheme("w8a16")))
    with pytest.raises(DrafterError, match="was made for a model whose .* have the fingerprint [0-9a-f]+, and this"):
        load_drafter(kind, tmp_path / "heads", other)


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_heads_of_other_shapes_are_refused(tmp_path, kind):
    save_heads(tmp_path / "heads", heads(kind), MODEL.params)
    with pytest.raises(DrafterError, match=r"has shape \[.*\], and this model takes \[.*\]: it was made for another"):
        load_drafter(kind, tmp_path / "heads", tiny_model(hidden_size=64))


def test_what_is_no_file_of_heads_is_refused(tmp_path):
    path = tmp_path / "heads"
    with pytest.raises(DrafterError, match="cannot be read: No such file"):
        load_drafter("eagle", path, MODEL)
    path.write_bytes(b"no safetensors")
    with pytest.raises(DrafterError, match="not a safetensors file"):
        load_drafter("eagle", path, MODEL)
    save_heads(path, heads("medusa"), MODEL.params)
    with pytest.raises(DrafterError, match="not a file of kind jllm-eagle: its kind is 'jllm-medusa'"):
        load_drafter("eagle", path, MODEL)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DrafterError, match="truncated"):
        load_drafter("medusa", path, MODEL)
    with pytest.raises(ConfigError, match="drafters are loaded as draft, medusa, eagle, not 'gru'"):
        load_drafter("gru", path, MODEL)


@pytest.mark.parametrize("tree", ["[0, 5]", "[0.5]", "7", "{", '["0"]', json.dumps([0] * 64)])
def test_a_garbled_tree_is_refused(tmp_path, tree):
    write_file(tmp_path / "heads", {}, {"kind": "jllm-eagle", "tree": tree})
    with pytest.raises(DrafterError, match="its metadata have no tree"):
        load_drafter("eagle", tmp_path / "heads", MODEL)


def test_missing_and_superfluous_tensors_are_refused(tmp_path):
    metadata = {"kind": "jllm-medusa", "tree": "[0]"}
    full = {"0.linear": (32, 32), "0.bias": (32,), "more": (1,)}
    arrays = {name: np.zeros(shape, np.float32) for name, shape in full.items()}
    write_file(tmp_path / "heads", arrays, metadata)
    with pytest.raises(DrafterError, match="has no place for tensor"):
        load_drafter("medusa", tmp_path / "heads", MODEL)
    write_file(tmp_path / "heads", {name: x for name, x in arrays.items() if name == "0.linear"}, metadata)
    with pytest.raises(DrafterError, match="lacks tensor"):
        load_drafter("medusa", tmp_path / "heads", MODEL)


def test_a_draft_model_comes_from_a_directory(tmp_path):
    small = tiny_model(seed=3, num_layers=1)
    save(tmp_path, small.params, small.config)
    loaded = load_drafter("draft", tmp_path, MODEL)
    assert isinstance(loaded, DraftModel)
    assert loaded.tree == chain(4)
    assert loaded.config.num_layers == 1
    assert load_drafter("draft", tmp_path, MODEL, TREE).tree == TREE
    jax.tree.map(np.testing.assert_array_equal, loaded.params, small.params)
    with pytest.raises(DrafterError, match="has a vocabulary of 97 tokens, its target one of 101"):
        load_drafter("draft", tmp_path, tiny_model(vocab_size=101))
    with pytest.raises(CheckpointError, match="no such directory"):
        load_drafter("draft", tmp_path / "none", MODEL)
