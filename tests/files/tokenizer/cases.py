"""Tokenizers of each kind, trained on a few lines."""

import json
from pathlib import Path

import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

TEXT = [
    "Once upon a time there was a little girl who lived in a small house near the forest.",
    "The wolf said: how big your eyes are! And the girl ran away, and ran, and ran.",
    "Größe, naïve café, cafe\u0301, e\u0301tude; Привет, мир; 你好世界 你好; こんにちは; 👋🏽 hello 👩‍👩‍👧 world 😀😀",
    "def f(x):\n    return x + 1\n\n\ttabs  and   spaces 1234567890",
] * 5
BROKEN = "\ufffd"


def write_json(path: Path, value) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def train_sentencepiece(directory: Path, **options) -> Path:
    options = {
        "model_type": "bpe",
        "vocab_size": 420,
        "byte_fallback": True,
        "character_coverage": 0.98,  # so that rare characters are written in bytes
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "control_symbols": ["[INST]"],
        "user_defined_symbols": ["<user>"],
        "minloglevel": 2,
    } | options
    with open(directory / "tokenizer.model", "wb") as file:
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(TEXT), model_writer=file, **options)
    return directory


def byte_level() -> tokenizers.Tokenizer:
    """As LLaMA 3 and Qwen: bytes all the way."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|begin|>", "<|end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_tokens(["<tool>", "naïve 你", "soft\xadhyphen"])  # the last are not in the byte alphabet
    return tokenizer


def byte_fallback() -> tokenizers.Tokenizer:
    """As LLaMA 2's tokenizer.json: BPE over characters, bytes for those that it lacks."""
    trained = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = ["<unk>", "<s>", "</s>"]
    options = {"vocab_size": 120, "limit_alphabet": 40, "special_tokens": special, "show_progress": False}
    trained.train_from_iterator(TEXT, trainers.BpeTrainer(**options))
    state = json.loads(trained.to_str())
    vocab = state["model"]["vocab"]
    vocab |= {f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)}
    merges = [tuple(pair) for pair in state["model"]["merges"]]
    model = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.add_special_tokens(special)
    tokenizer.normalizer = trained.normalizer
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


KINDS = ("sentencepiece", "byte_level", "byte_fallback")
