"""Damaged, incomplete and foreign checkpoint directories: each is one line that names what is wrong."""

import json
import os
import shutil
import struct

import numpy as np
import pytest

from jllm.errors import CheckpointError
from jllm.files.load_params import load_params
from jllm.files.safetensors_io import read_header
from tests.checkpoint_cases import INDEX, WEIGHTS, make_config, rewrite, save_both_ways


@pytest.fixture
def saved(tmp_path):
    return tmp_path, save_both_ways(tmp_path)


def refuse(path, config, *words):
    with pytest.raises(CheckpointError) as error:
        load_params(path, config)
    text = str(error.value)
    assert "\n" not in text
    assert all(word in text for word in words), text


def test_missing_and_foreign_directories(tmp_path):
    config = make_config()
    refuse(tmp_path / "nowhere", config, "nowhere: no such directory")
    refuse(tmp_path, config, f"neither {WEIGHTS} nor {INDEX}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    refuse(tmp_path, config, "has pytorch_model.bin", "convert the weights to safetensors")
    refuse(tmp_path / "pytorch_model.bin", config, "is not a directory")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), ["1 of 21", "model.layers.1.mlp.up_proj.weight"]),
        (lambda t: t.pop("lm_head.weight"), ["missing", "lm_head.weight"]),
        (lambda t: t.update(extra=np.zeros(1)), ["no use for", "extra"]),
        (lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": np.zeros(24)}), ["no use for", "q_proj.bias"]),
        (
            lambda t: t.update({"model.layers.0.self_attn.k_proj.weight": np.zeros((24, 16), np.float32)}),
            ["model.layers.0.self_attn.k_proj.weight", "[24, 16]", "[12, 16]"],
        ),
        (
            lambda t: t.update({"model.layers.0.mlp.down_proj.weight": np.zeros((20, 16), np.float32)}),
            ["model.layers.0.mlp.down_proj.weight", "[20, 16]", "[16, 20]"],
        ),
        (
            lambda t: t.update({"model.norm.weight": np.zeros(16, np.int32)}),
            ["model.norm.weight", "I32", "F64, F32, F16, BF16"],
        ),
    ],
)
def test_tensors_that_do_not_fit(saved, change, words):
    path, config = saved
    rewrite(path / "one" / WEIGHTS, change)
    refuse(path / "one", config, f"{path / 'one'}: ", *words)


@pytest.mark.parametrize("keep", [0, 4, 8, 100, -1])
def test_truncated_file(saved, keep):
    path, config = saved
    for file in (path / "one" / WEIGHTS, sorted((path / "many").glob("*.safetensors"))[1]):
        data = file.read_bytes()
        file.write_bytes(data[:keep])
        refuse(file.parent, config, file.name, "truncated")


def test_truncated_while_reading(saved, monkeypatch):
    path, config = saved
    file = path / "one" / WEIGHTS
    header = read_header(file)
    os.truncate(file, file.stat().st_size - 1)
    monkeypatch.setattr("jllm.files.find.read_header", lambda path: header)
    refuse(path / "one", config, "truncated within tensor lm_head.weight")


def edited(path, edit):
    """The file with its header changed by `edit`."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    text = json.dumps(edit(header) or header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def shift(name, begin, end):
    def edit(header):
        offsets = header[name]["data_offsets"]
        header[name]["data_offsets"] = [offsets[0] + begin, offsets[1] + end]

    return edit


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (shift("model.norm.weight", -4, -4), ["model.norm.weight", "overlaps"]),
        (shift("model.norm.weight", 4, 4), ["model.norm.weight", "gap"]),
        (shift("model.norm.weight", 0, -4), ["model.norm.weight", "[16]", "60 bytes"]),
        (lambda header: header["model.norm.weight"].update(shape=[16, -1]), ["garbled"]),
        (lambda header: header["model.norm.weight"].update(shape=None), ["garbled"]),
        (lambda header: header["model.norm.weight"].pop("dtype") and None, ["garbled"]),
        (lambda header: [1], ["garbled"]),
        (lambda header: header.pop("lm_head.weight") and None, ["1536 bytes too long"]),
    ],
)
def test_garbled_header(saved, edit, words):
    path, config = saved
    edited(path / "one" / WEIGHTS, edit)
    refuse(path / "one", config, WEIGHTS, *words)


@pytest.mark.parametrize("header", [b"\xff{{{{{{{", b"[" * 100_000], ids=["not JSON", "deep"])
def test_not_json(saved, header):
    path, config = saved
    (path / "one" / WEIGHTS).write_bytes(struct.pack("<Q", len(header)) + header)
    refuse(path / "one", config, "garbled")


def test_two_checkpoints_in_one_directory(saved):
    path, config = saved
    shard = sorted((path / "many").glob("model-*.safetensors"))[0]
    shutil.copy(path / "one" / WEIGHTS, path / "many")
    refuse(path / "many", config, f"both {WEIGHTS} and {shard.name}")
    shutil.copy(shard, path / "one")
    refuse(path / "one", config, f"both {WEIGHTS} and {shard.name}")
    (path / "one" / shard.name).unlink()
    shutil.copy(path / "many" / INDEX, path / "one")
    refuse(path / "one", config, "shards missing")
    index = {"weight_map": dict.fromkeys(read_header(path / "one" / WEIGHTS), WEIGHTS)}
    (path / "one" / INDEX).write_text(json.dumps(index))
    load_params(path / "one", config)  # an index of the one file is no second checkpoint
    index["weight_map"].update(dict.fromkeys(index["weight_map"], "other.safetensors"))
    (path / "one" / WEIGHTS).rename(path / "one" / "other.safetensors")
    (path / "one" / INDEX).write_text(json.dumps(index))
    load_params(path / "one", config)
    shutil.copy(path / "one" / "other.safetensors", path / "one" / WEIGHTS)
    refuse(path / "one", config, f"both {WEIGHTS} and {INDEX}")


def test_shards_and_index_must_agree(saved):
    path, config = saved
    path = path / "many"
    first, second = sorted(file.name for file in path.glob("*.safetensors"))[:2]
    index = json.loads((path / INDEX).read_text())

    def with_index(**weight_map):
        (path / INDEX).write_text(json.dumps({"weight_map": index["weight_map"] | weight_map}))

    shutil.copy(path / first, path / "model-00099-of-00099.safetensors")
    refuse(path, config, "model-00099-of-00099.safetensors is not listed")
    (path / "model-00099-of-00099.safetensors").unlink()
    with_index(**{"model.embed_tokens.weight": second})
    refuse(path, config, first, "model.embed_tokens.weight", f"places it in {second}")
    with_index(ghost=first)
    refuse(path, config, first, "lacks tensor ghost")
    with_index(ghost="../elsewhere.safetensors")
    refuse(path, config, "../elsewhere.safetensors")
    for text in ("{}", "[" * 100_000):
        (path / INDEX).write_text(text)
        refuse(path, config, INDEX, "weight_map")
    with_index()
    (path / second).unlink()
    refuse(path, config, "shards missing", second)
    (path / INDEX).unlink()
    refuse(path, config, "no " + INDEX)
