"""Writes a GGUF file's tokenizer as the files of a Hugging Face directory, which tokenizer.py reads and saving copies.

A tokenizer of model "llama" becomes tokenizer.model, a SentencePiece model with byte fallback. One of model "gpt2"
becomes tokenizer.json, with the pre-tokenizer that tokenizer.ggml.pre names.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jllm.errors import TokenizerError
from jllm.files.gguf.reader import read_gguf

# Kinds of tokens (tokenizer.ggml.token_type); SentencePiece has the same numbers.
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_TEMPLATE = "tokenizer.chat_template"


def _words(digits: str) -> str:
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_PATTERNS = {"llama-bpe": _words(r"\p{N}{1,3}"), "qwen2": _words(r"\p{N}")}  # None: ByteLevel's own, GPT-2's
_SAME = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "default": "gpt-2", "smaug-bpe": "llama-bpe"}
PRE_TOKENIZERS = (*_PATTERNS, "smollm", "gpt-2")


def has_tokenizer(path: str | Path) -> bool:
    """Returns whether a GGUF file holds a tokenizer."""
    return read_gguf(path).metadata.get("tokenizer.ggml.model") not in (None, "no_vocab", "none")


def tokenizer_files(path: str | Path) -> dict[str, bytes]:
    """Returns the tokenizer's files by name. Raises TokenizerError, in one line, for an unsupported kind or metadata
    that contradicts itself."""
    metadata = read_gguf(path).metadata
    own = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    try:
        tokens, kinds = own["tokens"], own.get("token_type") or [1] * len(own["tokens"])
        if len(kinds) != len(tokens):
            raise TokenizerError(f"{path}: {len(tokens)} tokens, but {len(kinds)} of tokenizer.ggml.token_type")
        model = own.get("model")
        if model == "llama":
            found = {"tokenizer.model": _sentencepiece(tokens, own["scores"], kinds, own)}
        elif model == "gpt2":
            found = {"tokenizer.json": _byte_level(tokens, own["merges"], kinds, own.get("pre", "default"))}
        else:
            raise TokenizerError(f"{path}: tokenizer.ggml.model {model!r} is not supported; supported are llama, gpt2")
    except KeyError as error:
        raise TokenizerError(f"{path}: its metadata lacks tokenizer.ggml.{error.args[0]}") from None
    except ValueError as error:
        raise TokenizerError(f"{path}: {error}") from None
    return found | {"tokenizer_config.json": json.dumps(_config(path, tokens, kinds, own, metadata)).encode()}


def _config(
    path: str | Path,
    tokens: Sequence[str],
    kinds: Sequence[int],
    own: Mapping[str, Any],
    metadata: Mapping[str, Any],
) -> dict[str, Any]:
    ids = {role: own.get(f"{name}_token_id") for role, name in _ROLES.items()}
    if odd := [role for role, i in ids.items() if i is not None and not 0 <= i < len(tokens)]:
        raise TokenizerError(f"{path}: the id of {odd[0]} is {ids[odd[0]]}, but there are {len(tokens)} tokens")
    templates = {"default": metadata[_TEMPLATE]} if _TEMPLATE in metadata else {}
    for name in metadata.get("tokenizer.chat_templates", ()):
        templates.setdefault(name, metadata[f"{_TEMPLATE}.{name}"])
    added = {
        i: {"content": token, "special": kind == CONTROL, "normalized": False}
        for i, (token, kind) in enumerate(zip(tokens, kinds))
        if kind in (CONTROL, USER_DEFINED)
    }
    adds = own["model"] == "llama" or _SAME.get(own.get("pre", ""), own.get("pre")) == "llama-bpe"  # as in llama.cpp
    raw: dict[str, Any] = {"add_bos_token": own.get("add_bos_token", adds), "legacy": False}
    if own["model"] == "gpt2":  # a SentencePiece model names its own
        raw["added_tokens_decoder"] = added
    raw |= {role: tokens[i] for role, i in ids.items() if i is not None}
    raw["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()] or None
    return raw


def _byte_level(tokens: Sequence[str], merges: Sequence[str], kinds: Sequence[int], pre: str) -> bytes:
    """Returns tokenizer.json of a byte-level BPE."""
    pre = _SAME.get(pre, pre)
    if pre not in PRE_TOKENIZERS:
        raise ValueError(f"tokenizer.ggml.pre {pre!r} is not supported; supported are {', '.join(PRE_TOKENIZERS)}")
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    steps: list[dict[str, Any]] = [byte_level]
    if pre in _PATTERNS:
        split = {"type": "Split", "pattern": {"Regex": _PATTERNS[pre]}, "behavior": "Isolated", "invert": False}
        steps = [split, byte_level | {"use_regex": False}]
    elif pre == "smollm":
        steps = [{"type": "Digits", "individual_digits": True}, byte_level]
    added = [
        {
            "id": i,
            "content": token,
            "special": kind == CONTROL,
            "normalized": False,
            **dict.fromkeys(("single_word", "lstrip", "rstrip"), False),
        }
        for i, (token, kind) in enumerate(zip(tokens, kinds))
        if kind in (CONTROL, USER_DEFINED)
    ]
    model = {
        "type": "BPE",
        "vocab": {token: i for i, token in enumerate(tokens)},
        "merges": [merge.split(" ", 1) for merge in merges],
        "ignore_merges": pre == "llama-bpe",
        **dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")),
        **dict.fromkeys(("fuse_unk", "byte_fallback"), False),
    }
    raw = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": None,
        "decoder": byte_level,
        "model": model,
    }
    return json.dumps(raw).encode()


def _sentencepiece(
    tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int], own: Mapping[str, Any]
) -> bytes:
    """Returns a serialized SentencePiece ModelProto (sentencepiece_model.proto)."""
    if len(scores) != len(tokens):
        raise ValueError(f"{len(tokens)} tokens, but {len(scores)} of tokenizer.ggml.scores")
    pieces = [
        _message(1, _text(1, token) + b"\x15" + struct.pack("<f", score) + _number(3, kind))
        for token, score, kind in zip(tokens, scores, kinds)
    ]
    ids = {40: "unknown", 41: "bos", 42: "eos", 43: "padding"}
    trainer = _number(3, 2) + _number(4, len(tokens)) + _number(35, int(any(kind == 6 for kind in kinds)))  # BPE
    for field, name in ids.items():
        trainer += _number(field, own.get(f"{name}_token_id", -1))
    prefix, extra = own.get("add_space_prefix", True), own.get("remove_extra_whitespaces", False)
    normalizer = _text(1, "identity") + _number(3, int(prefix)) + _number(4, int(extra)) + _number(5, 1)
    return b"".join(pieces) + _message(2, trainer) + _message(3, normalizer)


def _varint(number: int) -> bytes:
    found, number = bytearray(), number % (1 << 64)
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _message(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(data)) + data


def _text(field: int, text: str) -> bytes:
    return _message(field, text.encode())
