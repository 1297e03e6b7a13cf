"""Checkpoint directories: what is read is what was stored, what is written is read back, and damage is named."""

import codecs
import dataclasses
import io
import json
import os
import re
import resource
import signal
import subprocess
import sys
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import jllm
from jllm.config import RopeScaling
from jllm.errors import CheckpointError, ConfigError, OutputError, TokenizerError
from jllm.files import fingerprint
from jllm.files.chat_template import find_chat_template, read_json
from jllm.files.find import SMALL, find_model
from jllm.files.hf_config import load_config
from jllm.files.load_params import load_params
from jllm.files.safetensors_io import encode_header, read_header
from jllm.files.save import save
from jllm.model.param_specs import abstract_params, init_params
from jllm.quant.schemes import find_scheme
from tests.checkpoint_cases import INDEX, WEIGHTS, assert_same_bits, make_config, random_params, rewrite, save_both_ways
from tests.load_memory import measured

PARITY = Path(__file__).parents[1] / "data" / "parity"

VARIANTS = {
    "llama": make_config(rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 16)),
    "tied": make_config(tie_embeddings=True, eos_ids=()),
    "bias": make_config(qkv_bias=True, o_bias=True, mlp_bias=True),
    "mistral": make_config(architecture="MistralForCausalLM", windows=(8, 8)),
    "qwen2": make_config(architecture="Qwen2ForCausalLM", qkv_bias=True, windows=(None, 8), bos_id=None),
    "qwen3": make_config(architecture="Qwen3ForCausalLM", qk_norm=True),
}


@pytest.fixture
def saved(tmp_path):
    return tmp_path, save_both_ways(tmp_path)


@pytest.mark.parametrize("name", sorted(VARIANTS))
@pytest.mark.parametrize("max_shard_bytes", [10**9, 4000, 1])
def test_round_trip_is_exact(tmp_path, name, max_shard_bytes):
    config, params = VARIANTS[name], random_params(VARIANTS[name])
    save(tmp_path / "a" / "b", params, config, max_shard_bytes=max_shard_bytes)
    assert load_config(tmp_path / "a" / "b") == config
    assert_same_bits(load_params(tmp_path / "a" / "b", config), params)
    assert not list(tmp_path.rglob("*.partial"))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_round_trip_in_every_dtype(tmp_path, dtype):
    with jax.enable_x64(dtype == "float64"):
        params = random_params(make_config(), dtype)
        save(tmp_path, params, make_config())  # the config follows the params
        config = load_config(tmp_path)
        assert config == make_config(dtype=dtype)
        assert_same_bits(load_params(tmp_path, config), params)


@pytest.mark.parametrize("directory", sorted(PARITY.iterdir()), ids=lambda path: path.name)
def test_files_of_transformers_come_back_byte_for_byte(tmp_path, directory):
    config = load_config(directory)
    save(tmp_path, load_params(directory, config), config)
    theirs: dict[str, np.ndarray] = {}
    for file in directory.glob("*.safetensors"):
        theirs |= safetensors.numpy.load_file(file)
    ours = safetensors.numpy.load_file(tmp_path / WEIGHTS)
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)
    assert load_config(tmp_path) == config


def test_fused_leaves_stack_the_stored_tensors(saved):
    path, config = saved
    stored = safetensors.numpy.load_file(path / "one" / WEIGHTS)
    layer = load_params(path / "many", config).layers[1]
    for leaf, names in [
        (layer.attention.qkv, ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
        (layer.mlp.gate_up, ["mlp.gate_proj", "mlp.up_proj"]),
        (layer.mlp.down, ["mlp.down_proj"]),
        (layer.attention.norm, ["input_layernorm"]),
        (layer.mlp.norm, ["post_attention_layernorm"]),
    ]:
        np.testing.assert_array_equal(leaf, np.concatenate([stored[f"model.layers.1.{name}.weight"] for name in names]))


def test_shards_keep_to_their_size_and_the_index_to_the_shards(saved):
    path, config = saved
    index = json.loads((path / "many" / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    assert files == sorted(file.name for file in (path / "many").glob("*.safetensors"))
    stored: dict[str, np.ndarray] = {}
    for file in files:
        tensors = safetensors.numpy.load_file(path / "many" / file)
        assert all(index["weight_map"][name] == file for name in tensors)
        assert sum(t.nbytes for t in tensors.values()) <= 4000
        stored |= tensors
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in stored.values())
    assert stored.keys() == index["weight_map"].keys()


@pytest.mark.parametrize("stored", ["F64", "F32", "F16", "BF16"])
@pytest.mark.parametrize("wanted", ["float32", "float16", "bfloat16"])
def test_conversion(tmp_path, monkeypatch, stored, wanted):
    monkeypatch.setattr("jllm.files.safetensors_io._PIECE", 64)  # so that tensors take many pieces
    config = make_config()
    dtype = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}[stored]
    params = jax.tree.map(lambda leaf: np.asarray(leaf).astype(dtype), random_params(config))
    save(tmp_path, jax.tree.map(np.asarray, random_params(config)), config)
    tensors = safetensors.numpy.load_file(tmp_path / WEIGHTS)
    safetensors.numpy.save_file({name: t.astype(dtype) for name, t in tensors.items()}, tmp_path / WEIGHTS)
    expected = jax.tree.map(lambda leaf: jnp.asarray(leaf.astype(wanted)), params)
    assert_same_bits(load_params(tmp_path, config, wanted), expected)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_values_beyond_the_range_of_float16_are_not_turned_into_infinity(saved, dtype):
    path, config = saved

    def huge(tensors):
        tensors["model.norm.weight"] = np.full(16, 1e6, dtype)

    rewrite(path / "one" / WEIGHTS, huge)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has values beyond the range of float16"):
        load_params(path / "one", config, "float16")
    assert float(load_params(path / "one", config).norm[0]) == pytest.approx(1e6, rel=1e-2)


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_bar_shows_on_a_terminal_alone(saved, monkeypatch, terminal):
    path, config = saved
    screen = io.StringIO()
    screen.isatty = lambda: terminal  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr("jllm.files.load_params.LONG", 1000)
    load_params(path / "one", config)
    assert ("loading: " in screen.getvalue()) == terminal


def test_float64_needs_x64(saved):
    path, config = saved
    with pytest.raises(ConfigError, match="jax_enable_x64"):
        load_params(path / "one", config, "float64")
    with pytest.raises(ConfigError, match="int8"):
        load_params(path / "one", config, "int8")


def test_init_params():
    config = make_config(hidden_size=64, intermediate_size=96, num_layers=8, qkv_bias=True, o_bias=True, qk_norm=True)
    params = init_params(config, jax.random.key(0), "float32")
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), params)
    assert shapes == jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), abstract_params(config, "float32"))
    params = jax.tree.map(np.asarray, params)
    for layer in params.layers:
        attention, mlp = layer.attention, layer.mlp
        assert all(np.all(leaf == 1) for leaf in (attention.norm, mlp.norm, attention.q_norm, attention.k_norm))
        assert np.all(attention.qkv_bias == 0)
        for leaf, std in [(attention.qkv, 0.02), (mlp.gate_up, 0.02), (attention.o, 0.005), (mlp.down, 0.005)]:
            assert np.std(leaf) == pytest.approx(std, rel=0.1)
            assert abs(np.mean(leaf)) < std / 10
    matrices = [leaf for leaf in jax.tree.leaves(params) if leaf.ndim == 2]
    starts = {tuple(np.round(leaf / np.std(leaf), 2).ravel()[:4].tolist()) for leaf in matrices}
    assert len(starts) == len(matrices)  # no two leaves share their draws
    assert_same_bits(params, init_params(config, jax.random.key(0), "float32"))
    for other in (make_config(dtype="bfloat16"), make_config(tie_embeddings=True)):
        assert jax.eval_shape(lambda key, c=other: init_params(c, key), jax.random.key(0)) == abstract_params(other)


def test_json_with_a_byte_order_mark_is_read(saved):
    """As editors of Windows write it."""
    folder = saved[0] / "many"
    (folder / "chat_template.jinja").write_text("{{ 'x' }}")
    (folder / "scheme.toml").write_text('rules = [["*", "w8a16"]]')
    plain = load_config(folder), load_params(folder, load_config(folder)), find_chat_template(folder, {})
    for file in [*folder.glob("*.json"), folder / "chat_template.jinja", folder / "scheme.toml"]:
        file.write_bytes(codecs.BOM_UTF8 + file.read_bytes())
    config = load_config(folder)
    assert (config, find_chat_template(folder, {})) == (plain[0], plain[2])
    assert_same_bits(load_params(folder, config), plain[1])
    assert read_json(folder / "config.json")["model_type"] == "llama"
    assert find_scheme(folder / "scheme.toml").name == "scheme"


def renamed(directory, rename):
    """The checkpoint, every tensor under another name, in its files and their index."""
    for file in directory.glob("*.safetensors"):
        tensors = safetensors.numpy.load_file(file)
        safetensors.numpy.save_file({rename(name): tensor for name, tensor in tensors.items()}, file)
    index = directory / INDEX
    if index.exists():
        weight_map = json.loads(index.read_text())["weight_map"]
        index.write_text(json.dumps({"weight_map": {rename(name): file for name, file in weight_map.items()}}))


RENAMED = {
    "bare": lambda name: name.removeprefix("model."),
    "module": lambda name: f"module.{name}",
    "part": lambda name: f"language_model.{name}",
    "newer part": lambda name: name.replace("model.", "model.language_model."),
    "part, bare": lambda name: f"language_model.{name.removeprefix('model.')}",
    "compiled": lambda name: f"_orig_mod.{name}",
    "compiled within": lambda name: name.replace("model.", "model._orig_mod."),
    "compiled layers": lambda name: re.sub(r"(layers\.\d+)", r"\1._orig_mod", name),
    "all": lambda name: f"module._orig_mod.language_model.{name.replace('layers.1', 'layers.1._orig_mod.module')}",
    "all, bare": lambda name: f"_orig_mod.module.{name.removeprefix('model.')}",
    "any part": lambda name: f"text.decoder.{name.removeprefix('model.')}",
}


@pytest.mark.parametrize("name", RENAMED)
def test_names_that_others_wrap_are_found(saved, name):
    path, config = saved
    plain = load_params(path / "one", config)
    for directory in (path / "one", path / "many"):
        renamed(directory, RENAMED[name])
        assert_same_bits(load_params(directory, config), plain)
    assert fingerprint.of_files(path / "one") == fingerprint.of_files(path / "many")


def test_two_tensors_of_one_name_are_refused(saved):
    path, config = saved
    rewrite(path / "one" / WEIGHTS, lambda t: t.update({"module.model.norm.weight": t["model.norm.weight"] + 1}))
    with pytest.raises(CheckpointError, match=r"one: tensors .*model\.norm\.weight and .* both stand for model\.norm"):
        load_params(path / "one", config)


def test_a_tied_head_may_be_rounded_or_padded(tmp_path):
    config = make_config(tie_embeddings=True)
    params = random_params(config)
    save(tmp_path, params, config)
    embed = np.asarray(params.embed)
    more = np.ones((8, 16), np.float32)
    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16, np.float64):
        for rows in (embed, np.concatenate([embed, more])):
            rewrite(tmp_path / WEIGHTS, partial(dict.update, **{"lm_head.weight": rows.astype(dtype)}))
            assert_same_bits(load_params(tmp_path, config), params)
    rewrite(tmp_path / WEIGHTS, lambda t: t.update({"model.embed_tokens.weight": embed.astype(ml_dtypes.bfloat16)}))
    rewrite(tmp_path / WEIGHTS, lambda t: t.update({"lm_head.weight": embed}))
    load_params(tmp_path, config)  # the embedding is the one that was rounded


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize(
    ("rows", "cut"), [(24, ""), (32, ", and cut the tensor from [32, 16] to [24, 16]"), (20, None)]
)
def test_what_is_said_of_another_tied_head_is_right(tmp_path, rows, cut, dtype):
    config = make_config(tie_embeddings=True)
    save(tmp_path, random_params(config), config)
    head = np.random.default_rng(1).standard_normal((rows, 16)).astype(dtype)
    rewrite(tmp_path / WEIGHTS, lambda t: t.update({"lm_head.weight": head}))
    with pytest.raises(CheckpointError, match=r"is not the embedding, though config\.json ties them: remove") as error:
        load_params(tmp_path, config)
    if cut is not None:  # the other way out, as it says
        assert str(error.value).endswith(f"or set tie_word_embeddings to false{cut}")
        rewrite(tmp_path / WEIGHTS, lambda t: t.update({"lm_head.weight": t["lm_head.weight"][:24]}))
        found = load_params(tmp_path, make_config(tie_embeddings=False)).head
        np.testing.assert_array_equal(found, head[:24].astype(np.float32))
    rewrite(tmp_path / WEIGHTS, lambda t: t.pop("lm_head.weight"))
    load_params(tmp_path, config)


def test_known_superfluous_tensors_are_ignored(tmp_path):
    config = make_config(tie_embeddings=True)
    params = random_params(config)
    save(tmp_path, params, config)

    def add(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(3, np.float32)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]

    rewrite(tmp_path / WEIGHTS, add)
    assert_same_bits(load_params(tmp_path, config), params)


def test_a_model_is_saved_with_its_tokenizer(tmp_path):
    model = jllm.load(quantize="w8a16")
    save(tmp_path / "bare", model.params, model.config)
    save(tmp_path / "whole", model.params, model.config, tokenizer=model.tokenizer)
    assert jllm.load(tmp_path / "bare").tokenizer is None
    again = jllm.load(tmp_path / "whole")
    assert again.tokenizer.encode("Once upon a time") == model.tokenizer.encode("Once upon a time")
    save(tmp_path / "whole", again.params, again.config, tokenizer=again.tokenizer)  # over its own files
    assert jllm.load(tmp_path / "whole").tokenizer.decode(again.tokenizer.encode("king")) == "king"
    gone = dataclasses.replace(model.tokenizer, folder=tmp_path / "none")
    with pytest.raises(TokenizerError, match="the tokenizer's files are not in .*none"):
        save(tmp_path / "other", model.params, model.config, tokenizer=gone)
    assert not (tmp_path / "other").exists()


def test_saving_replaces_the_checkpoint_that_was_there(tmp_path):
    config = make_config()
    few, many = random_params(config), jax.tree.map(lambda leaf: leaf + 1, random_params(config))
    (tmp_path / "tokenizer.json").write_text("{}")
    for params, size in [(many, 4000), (few, 10**9), (many, 4000), (few, 8000)]:
        save(tmp_path, params, config, max_shard_bytes=size)
        assert_same_bits(load_params(tmp_path, config), params)
    assert (tmp_path / "tokenizer.json").exists()


def test_what_cannot_be_saved(tmp_path):
    config = make_config()
    params = random_params(config)
    cases = [
        (
            dataclasses.replace(params, norm=params.norm[:5]),
            r"params\.norm has shape \[5\], but the config says \[16\]",
        ),
        (dataclasses.replace(params, head=None), r"params\.head is not in the params"),
        (dataclasses.replace(params, norm=params.norm.astype("bfloat16")), "bfloat16, float32"),
        (jax.tree.map(lambda leaf: leaf.astype("int8"), params), "int8"),
    ]
    for bad, words in cases:
        with pytest.raises(CheckpointError, match=words):
            save(tmp_path / "out", bad, config)
    odd = make_config(qk_norm=True)
    with pytest.raises(ConfigError, match="qk_norm=True"):
        save(tmp_path / "out", random_params(odd), odd)
    assert not (tmp_path / "out").exists()


@pytest.fixture
def full_disk():
    """No file may grow past the limit that the test sets: writes fail as on a full disk."""
    old, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, old[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, old)
    signal.signal(signal.SIGXFSZ, handler)


def test_full_disk_leaves_what_was_there(saved, full_disk):
    path, config = saved
    params = load_params(path / "one", config)
    before = {file: file.read_bytes() for file in (path / "one").iterdir()}
    full_disk(3000)
    for target in ("one", "new"):
        with pytest.raises(OutputError) as error:
            save(path / target, params, config)
        assert str(error.value).startswith(f"{path / target / WEIGHTS}: cannot be written: ")
    assert {file: file.read_bytes() for file in (path / "one").iterdir()} == before
    assert not (path / "new").exists()


def test_a_shard_is_removed_only_when_all_new_files_are_there(saved, monkeypatch):
    """And an error between the renamings does not claim that nothing changed."""
    path, config = saved
    params = load_params(path / "one", config)
    before = {file.name for file in (path / "many").iterdir()}
    replaced = []

    def replace(source, target):
        replaced.append(target.name)
        if len(replaced) == 3:
            raise OSError(5, "Input/output error")
        target.write_bytes(source.read_bytes())

    monkeypatch.setattr("jllm.files.find.os.replace", replace)
    with pytest.raises(OutputError, match="Input/output error; files of two checkpoints may be mixed"):
        save(path / "many", params, config)
    assert {file.name for file in (path / "many").iterdir()} == before | {WEIGHTS}
    with pytest.raises(CheckpointError, match=f"both {WEIGHTS} and model-00001"):
        load_params(path / "many", config)


def test_directory_that_cannot_be_made(saved):
    path, config = saved
    with pytest.raises(OutputError, match="config.json/x: cannot be written: Not a directory"):
        save(path / "one" / "config.json" / "x", random_params(config), config)


def test_headers_are_what_the_library_reads(tmp_path):
    file = tmp_path / "x.safetensors"
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    header = encode_header([("a", values.dtype, values.shape), ("é", values.dtype, values.shape)])
    file.write_bytes(header + values.tobytes() * 2)
    assert len(header) % 8 == 0
    loaded = safetensors.numpy.load_file(file)
    assert np.array_equal(loaded["a"], values)
    assert np.array_equal(loaded["é"], values)
    assert read_header(file)["é"].offset == len(header) + values.nbytes


def test_find_model(tmp_path, monkeypatch):
    import huggingface_hub
    from huggingface_hub import errors

    assert find_model(tmp_path) == tmp_path
    (tmp_path / "file").write_text("")
    for name, words in [
        (tmp_path / "file", "is not a directory"),
        (tmp_path / "nothing", "no such directory"),
        ("", "the model's name is empty"),
        ("./org/model", "no such directory$"),
        ("~/model that is not here", "no such directory$"),
    ]:
        with pytest.raises(CheckpointError, match=words):
            find_model(name)

    def hub(name, *, allow_patterns, ignore_patterns, etag_timeout):
        assert name == "org/model-1.5B"
        for file in ("model-00001-of-00002.safetensors", "gptq_model-4bit-128g.safetensors", "quantize_config.json"):
            assert any(fnmatch(file, pattern) for pattern in allow_patterns)
        assert not any(fnmatch("consolidated.safetensors", pattern) for pattern in allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    assert find_model("org/model-1.5B") == tmp_path

    def offline(*args, **kwargs):
        raise errors.LocalEntryNotFoundError("Got: ConnectError\nand much more") from OSError("Name not known")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(CheckpointError) as error:
        find_model("org/model")
    assert str(error.value) == (
        "org/model: no such directory; as a Hub id it is not in the local cache, "
        "and the Hugging Face Hub cannot be reached (Name not known)"
    )


def test_folders_around_a_model_name_it(tmp_path):
    folder = tmp_path / "hub" / "models--org--name"
    for commit in ("aaaa", "bbbb"):
        (folder / "snapshots" / commit).mkdir(parents=True)
        (folder / "snapshots" / commit / "config.json").write_text("{}")
    inner = folder / "snapshots" / "bbbb"
    for path in (folder, folder / "snapshots", tmp_path / "hub"):  # without refs, any of them
        with pytest.raises(CheckpointError, match=rf"{path}: has no config\.json: did you mean the model in .*/aaaa\?"):
            find_model(path)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("bbbb")
    with pytest.raises(CheckpointError, match=rf"name: is a folder of the Hub's cache: the model is in {inner}$"):
        find_model(folder)
    assert find_model(inner) == inner


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1234\n"


@pytest.mark.parametrize("name", [WEIGHTS, "tokenizer.json", "tokenizer.model", *SMALL])
def test_git_lfs_pointers_are_named(saved, name):
    folder = saved[0] / "one"
    (folder / name).write_bytes(POINTER)
    with pytest.raises(CheckpointError, match=rf"{folder / name}: is a git-LFS pointer, .*`git lfs pull`"):
        jllm.load(folder)


def test_a_git_lfs_pointer_that_nobody_reads_is_no_error(saved):
    folder = saved[0] / "one"
    for name in ("consolidated.safetensors", "image.png"):
        (folder / name).write_bytes(POINTER)
    jllm.load(folder)


def test_hub_failure_is_one_line():
    """The real client, with nothing listening where the Hub should be."""
    code = "from jllm.files.find import find_model\n"
    code += "try: find_model('org/model')\nexcept Exception as e: print(repr(e))"
    env = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": "/nonexistent", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)
    assert done.stdout.startswith("CheckpointError('org/model: no such directory; as a Hub id it is not in the local")
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_loading_holds_one_leaf_besides_the_params(dtype):
    figures = measured(dtype)
    assert figures["params_mib"] > 190
    assert figures["overhead_mib"] < figures["largest_leaf_mib"] + 64, figures


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_the_memory_bound_catches_a_second_copy():
    figures = measured("bfloat16", "naive")
    assert figures["overhead_mib"] > figures["largest_leaf_mib"] + 64, figures
