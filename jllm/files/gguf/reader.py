"""Reads a GGUF file's metadata and the places of its tensors.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The package gguf reads it too, but reads
each token as an array of its own, which is slow for a large vocabulary.

Tensors have the names of Hugging Face files, and shapes [out, in]. Q and K of architecture llama are stored with the
two halves of each head's rows interleaved. Reading them undoes that (weights.py). Experts' matrices lie in one tensor,
and are here as one of each expert.
"""

import glob
import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jllm.errors import CheckpointError
from jllm.files.gguf.blocks import TYPES
from jllm.files.safetensors_io import StoredTensor, check_fetched
from jllm.model.params import EMBED, HEAD, layer_prefix

MAGIC, VERSIONS, ALIGNMENT = b"GGUF", (2, 3), 32
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # by type
_STRING, _ARRAY = 8, 9
_KINDS = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K",
    13: "Q5_K", 14: "Q6_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S",
    22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16",
    34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip
_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_TOP = {"token_embd": EMBED, "output": HEAD, "output_norm": "model.norm"}
_MODULES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate_inp": "mlp.gate", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_EXPERTS = {f"ffn_{x}_exps": f"mlp.experts.{{}}.{x}_proj" for x in ("gate", "up", "down")}
ROPE_FACTORS = "rope_freqs.weight"  # divisors of rotary frequencies: part of the config


@dataclass(frozen=True)
class GGUFTensor(StoredTensor):
    """A tensor whose dtype is a type of blocks.TYPES. `heads` is the number of heads whose rows are interleaved."""

    heads: int | None = None


@dataclass(frozen=True)
class GGUFFile:
    """Holds the metadata of a file, and its tensors by Hugging Face's names."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]


def is_gguf(path: str | Path) -> bool:
    """Returns whether a path names a GGUF file."""
    return Path(path).suffix == ".gguf" and Path(path).is_file()


def read_gguf(path: str | Path) -> GGUFFile:
    """Reads a GGUF file, or all files of a split one, given the first. Raises CheckpointError, in one line, for a file
    that is damaged or of another format, a missing part, or a tensor of an unsupported type."""
    path = Path(path)
    match = _SPLIT.fullmatch(path.name)
    files = [path] if match is None else sorted(path.parent.glob(f"{glob.escape(match[1])}-?????-of-{match[3]}.gguf"))
    stats = [file.stat() for file in files]
    return _read(path, tuple((stat.st_ino, stat.st_mtime_ns, stat.st_size) for stat in stats))


@lru_cache(maxsize=2)  # loading asks for the config, the weights and the tokenizer, and parsing a vocabulary takes long
def _read(path: Path, _files: tuple[tuple[int, int, int], ...]) -> GGUFFile:
    metadata, tensors = _read_one(path)
    for part in _other_parts(path, metadata):
        more = _read_one(part)[1]
        if twice := sorted(tensors.keys() & more.keys()):
            raise CheckpointError(f"{part}: holds tensor {twice[0]}, which another part holds too")
        tensors |= more
    wanted = metadata.get("split.tensors.count", len(tensors))
    if len(tensors) != wanted:
        raise CheckpointError(f"{path}: {len(tensors)} tensors in all parts, but its metadata says {wanted}")
    arch = metadata.get("general.architecture")
    heads = metadata.get(f"{arch}.attention.head_count")
    interleaved = {"attn_q": heads, "attn_k": metadata.get(f"{arch}.attention.head_count_kv", heads)}
    found: dict[str, GGUFTensor] = {}
    for name, tensor in tensors.items():
        own, module = _our_name(name)
        turned = interleaved.get(module) if arch == "llama" else None
        if turned is not None and (type(turned) is not int or turned < 1 or tensor.shape[0] % (2 * turned)):
            raise CheckpointError(f"{tensor.path}: {turned} heads do not divide the {tensor.shape[0]} rows of {name}")
        for each in _of_experts(own, tensor) if module in _EXPERTS and len(tensor.shape) == 3 else [(own, tensor)]:
            own, tensor = each
            found[own] = GGUFTensor(own, tensor.path, tensor.dtype, tensor.shape, tensor.offset, tensor.nbytes, turned)
    return GGUFFile(metadata, found)


def _our_name(name: str) -> tuple[str, str]:
    """Returns a tensor's name in Hugging Face's files, or its own if that is unknown, and llama.cpp's module."""
    module, _, suffix = name.rpartition(".")
    if module in _TOP:
        return f"{_TOP[module]}.{suffix}", module
    match, known = _LAYER.fullmatch(name), _MODULES | _EXPERTS
    if match is None or match[2] not in known:
        return name, module
    return f"{layer_prefix(int(match[1]))}{known[match[2]]}.{match[3]}", match[2]


def _of_experts(name: str, tensor: StoredTensor) -> list[tuple[str, StoredTensor]]:
    """Returns the matrix of each expert in a tensor [experts, out, in]. Their name has {} for the number."""
    count, nbytes = tensor.shape[0], tensor.nbytes // tensor.shape[0]
    return [
        (name.format(i), replace(tensor, shape=tensor.shape[1:], offset=tensor.offset + i * nbytes, nbytes=nbytes))
        for i in range(count)
    ]


def _other_parts(path: Path, metadata: Mapping[str, Any]) -> list[Path]:
    count = metadata.get("split.count", 1)
    if count == 1:
        return []
    match = _SPLIT.fullmatch(path.name)
    if match is None or int(match[3]) != count:
        raise CheckpointError(f"{path}: is one of {count} parts, so its name must end in -00001-of-{count:05}.gguf")
    if metadata.get("split.no") != 0 or int(match[2]) != 1:
        first = path.with_name(f"{match[1]}-00001-of-{match[3]}.gguf")
        raise CheckpointError(f"{path}: is not the first of its {count} parts: give {first.name}")
    parts = [path.with_name(f"{match[1]}-{i:05}-of-{match[3]}.gguf") for i in range(2, count + 1)]
    if missing := [part for part in parts if not part.is_file()]:
        raise CheckpointError(f"{path}: {len(missing)} of {count} parts missing, the first is {missing[0].name}")
    return parts


def _read_one(path: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    try:
        check_fetched(path)
        size = path.stat().st_size
        with path.open("rb") as file:
            return _parsed(path, file, size)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except EOFError:
        raise CheckpointError(f"{path}: truncated: its {size} bytes end within the header") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: damaged GGUF header: {error}") from None


def _parsed(path: Path, file: BinaryIO, size: int) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    magic = file.read(4)
    if magic != MAGIC:
        raise CheckpointError(f"{path}: not a GGUF file: it begins with {magic!r}, not {MAGIC!r}")
    version = _number(file, "I")
    if version % (1 << 16) == 0:
        raise CheckpointError(f"{path}: is a big-endian GGUF file; supported are little-endian ones")
    if version not in VERSIONS:
        raise CheckpointError(f"{path}: is of GGUF version {version}; supported are {', '.join(map(str, VERSIONS))}")
    count, pairs = _number(file, "Q"), _number(file, "Q")
    metadata: dict[str, Any] = {}
    for _ in range(pairs):
        key = _text(file, size)
        metadata[key] = _value(file, size, _number(file, "I"))
    entries = [_entry(file, size) for _ in range(count)]
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if type(alignment) is not int or alignment < 1:
        raise ValueError(f"general.alignment is {alignment!r}")
    start = -(-file.tell() // alignment) * alignment
    tensors: dict[str, StoredTensor] = {}
    for name, shape, number, offset in entries:
        kind = _KINDS.get(number, f"number {number}")
        if kind not in TYPES:
            raise CheckpointError(f"{path}: tensor {name} is of type {kind}; supported are {', '.join(TYPES)}")
        values, octets, _ = TYPES[kind]
        if name in tensors or not math.prod(shape) or not shape or shape[-1] % values:
            problem = "is there twice" if name in tensors else f"of type {kind} cannot have shape {list(shape)}"
            raise ValueError(f"tensor {name} {problem}")
        nbytes = math.prod(shape) // values * octets
        if start + offset + nbytes > size:
            raise CheckpointError(
                f"{path}: truncated: {size} bytes, but tensor {name} ends at {start + offset + nbytes}"
            )
        tensors[name] = StoredTensor(name, path, kind, shape, start + offset, nbytes)
    return metadata, tensors


def _entry(file: BinaryIO, size: int) -> tuple[str, tuple[int, ...], int, int]:
    """Reads a tensor's name, shape, type and offset."""
    name, dims = _text(file, size), _number(file, "I")
    sizes = struct.unpack(f"<{dims}Q", _take(file, size, 8 * dims))
    return name, sizes[::-1], _number(file, "I"), _number(file, "Q")


def _value(file: BinaryIO, size: int, kind: int) -> Any:
    if kind in _NUMBERS:
        return _number(file, _NUMBERS[kind])
    if kind == _STRING:
        return _text(file, size)
    if kind != _ARRAY:
        raise ValueError(f"type {kind} of a value is not known")
    inner, count = _number(file, "I"), _number(file, "Q")
    if inner in _NUMBERS:
        dtype = np.dtype(_NUMBERS[inner]).newbyteorder("<")
        return np.frombuffer(_take(file, size, count * dtype.itemsize), dtype).tolist()
    return [_value(file, size, inner) for _ in range(count)]


def _text(file: BinaryIO, size: int) -> str:
    return _take(file, size, _number(file, "Q")).decode()


def _number(file: BinaryIO, form: str) -> Any:
    data = file.read(struct.calcsize(f"<{form}"))
    try:
        return struct.unpack(f"<{form}", data)[0]
    except struct.error:
        raise EOFError from None


def _take(file: BinaryIO, size: int, count: int) -> bytes:
    """Reads bytes. Raises EOFError for more than the file of `size` has, before any room is made for them."""
    data = file.read(count) if count <= size else b""
    if len(data) < count:
        raise EOFError
    return data
