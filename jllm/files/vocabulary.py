"""Reads tokenizer files, SentencePiece models and tokenizer.json, behind one small protocol."""

import json
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from jllm.errors import TokenizerError
from jllm.files.chat_template import one_line

SPACE = "▁"  # how SentencePiece writes a space
# Sources of flags, the strongest last: none, an object of a role, the vocabulary's file, added_tokens_decoder.
BARE, ROLE, VOCABULARY, DECODER = range(4)


class Vocabulary(Protocol):
    """Is the protocol of a tokenizer file; each file format has one class."""

    size: int  # ids are in [0, size)
    leading_spaces: int  # spaces that decoding drops from the start of a text
    errors: str  # codecs error handler for broken UTF-8

    def encode(self, text: str) -> list[int]:
        """Returns ids of a text without BOS. Special tokens written out in the text become their ids."""

    def piece(self, id: int) -> bytes:
        """Returns the bytes that a token shows; none for special tokens and unused ids."""

    def id(self, token: str) -> int | None:
        """Returns the id of a token by its exact name."""

    def named(self) -> dict[str, str]:
        """Returns special tokens by role ("bos_token", ...), as far as the file itself has them."""

    def prefix(self, bos_id: int | None) -> list[int]:
        """Returns ids put before a text where tokenizer_config.json does not decide."""


@dataclass(frozen=True)
class AddedToken:
    """Is a token that is found literally in text; lstrip and rstrip take the whitespace around it. A special one shows
    no text."""

    content: str
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool | None = None  # whether it is found in normalized text; None: unless it is special
    id: int | None = None  # its id in a file
    source: int = BARE  # the source of its flags

    def pattern(self) -> str:
        word = rf"(?<!\w){re.escape(self.content)}(?!\w)" if self.single_word else re.escape(self.content)
        return (r"\s*" if self.lstrip else "") + word + (r"\s*" if self.rstrip else "")

    def joined(self, other: "AddedToken") -> "AddedToken":
        """Merges the flags of one token from two files."""
        flags = max(self, other, key=lambda token: token.source)
        return replace(flags, special=self.special or other.special, id=other.id if self.id is None else self.id)


@dataclass(frozen=True)
class Named:
    """Holds the tokens that the files beside a vocabulary name."""

    roles: Mapping[str, str | None]  # by name; None where a role is switched off
    tokens: tuple[AddedToken, ...]  # each content once, in the order in which those without an id get one
    rows: int | None = None  # rows of the model's embedding; None without a model


def with_new_ids(tokens: Iterable[AddedToken], first_id: int, rows: int | None) -> list[AddedToken]:
    """Gives tokens ids from `first_id` on, as far as the model's embedding has rows. A warning names the others, which
    stay plain text."""
    tokens = list(tokens)
    room = len(tokens) if rows is None else max(0, rows - first_id)
    if left := [token.content for token in tokens[room:]]:
        warnings.warn(
            f"the tokenizer's files name {', '.join(left)} without an id, and the model's embedding of {rows} rows has "
            "no room for more tokens: plain text, not special",
            stacklevel=2,
        )
    return [replace(token, id=id) for id, token in enumerate(tokens[:room], first_id)]


class SentencePieceVocabulary:
    """Reads tokenizer.model, and splits added tokens off the text before SentencePiece sees it.

    SentencePiece puts a space before a text. Here only the first segment gets it. With `legacy` in
    tokenizer_config.json every segment between added tokens gets it.
    """

    errors = "surrogateescape"  # one U+FFFD a byte, as in sentencepiece

    def __init__(self, path: Path, named: Named, config: Mapping[str, object]):
        # Appended to a serialized model: normalizer_spec { add_dummy_prefix: false } (protobuf merges messages).
        bare = b"\x1a\x02\x18\x00"
        try:
            model = path.read_bytes() + (bare if config.get("add_prefix_space") is False else b"")
            self._sp = _sentencepiece(model)
            self._continue = self._sp if config.get("legacy") else _sentencepiece(model + bare)
        except (OSError, RuntimeError) as error:
            raise TokenizerError(f"cannot read {path} as a SentencePiece model: {one_line(error)}") from error
        sp, self._base = self._sp, self._sp.get_piece_size()
        control = [id for id in range(self._base) if sp.is_control(id) or sp.is_unknown(id)]
        self._added = {id: AddedToken(sp.id_to_piece(id), special=True) for id in control}
        new = []
        for token in named.tokens:
            id = self._piece_id(token.content) if token.id is None else token.id
            own = self._added.get(id, token) if id is not None else token
            if id is None:
                new.append(token)
            elif own.content == token.content:
                self._added[id] = own.joined(token)
            elif token.id is not None:  # it gives the id another name
                self._added[id] = token
        first_id = max([self._base - 1, *self._added]) + 1
        self._added |= {token.id: token for token in with_new_ids(new, first_id, named.rows) if token.id is not None}
        self._ids = {token.content: id for id, token in self._added.items()}
        # Longest first, so that no token hides a longer one that begins with it.
        ordered = sorted(self._added.items(), key=lambda item: -len(item[1].content))
        self._order = [id for id, _ in ordered]
        self._pattern = re.compile("|".join(f"({token.pattern()})" for _, token in ordered) or "(?!)")
        self.size = max([self._base - 1, *self._added]) + 1
        if sp.normalize("  x") == sp.normalize("x"):  # it removes extra spaces
            self.leading_spaces = sys.maxsize
        else:
            self.leading_spaces = int(sp.normalize("x").startswith(SPACE))

    def encode(self, text: str) -> list[int]:
        ids, position = [], 0
        for match in self._pattern.finditer(text):
            ids += self._segment(text[position : match.start()], position)
            ids.append(self._order[(match.lastindex or 0) - 1])
            position = match.end()
        return ids + self._segment(text[position:], position)

    def _segment(self, text: str, position: int) -> list[int]:
        return (self._continue if position else self._sp).encode(text) if text else []

    def piece(self, id: int) -> bytes:
        if id in self._added:
            return b"" if self._added[id].special else self._added[id].content.encode()
        if not 0 <= id < self._base:
            return b""
        piece = self._sp.id_to_piece(id)
        if piece.startswith("<0x") and self._sp.is_byte(id):
            return bytes([int(piece[3:5], 16)])
        return piece.replace(SPACE, " ").encode()

    def id(self, token: str) -> int | None:
        return self._ids.get(token, self._piece_id(token))

    def _piece_id(self, token: str) -> int | None:
        id = self._sp.piece_to_id(token)
        return id if self._sp.id_to_piece(id) == token else None

    def named(self) -> dict[str, str]:
        ids = {"bos_token": self._sp.bos_id(), "eos_token": self._sp.eos_id(), "unk_token": self._sp.unk_id()}
        return {role: self._sp.id_to_piece(id) for role, id in ids.items() if id >= 0}

    def prefix(self, bos_id: int | None) -> list[int]:
        return [] if bos_id is None else [bos_id]


def _sentencepiece(model: bytes):
    from sentencepiece import SentencePieceProcessor

    processor = SentencePieceProcessor()
    processor.load_from_serialized_proto(model)  # unlike the constructor, this refuses an empty model
    return processor


class TokenizersVocabulary:
    """Reads tokenizer.json by the tokenizers library. Its decoder must work token by token."""

    def __init__(self, path: Path, named: Named):
        import tokenizers

        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more specific
            raise TokenizerError(f"cannot read {path}: {one_line(error)}") from error
        self._tokenizer.no_truncation()  # the file may have a training run's setting
        self._tokenizer.no_padding()
        self._add(named)
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = frozenset(id for id, token in added.items() if token.special)
        self.size = max(self._tokenizer.get_vocab_size(with_added_tokens=True), *(id + 1 for id in added), 0)
        decoder = self._tokenizer.decoder
        self._bytes, self.leading_spaces, self.errors = _decoding(json.loads(decoder.__getstate__()) if decoder else {})

    def _add(self, named: Named) -> None:
        """Adds tokens that other files name. The library numbers new tokens, as in transformers. A warning names tokens
        whose id differs in a file."""
        import tokenizers

        own = {token.content: _as_ours(token) for token in self._tokenizer.get_added_tokens_decoder().values()}
        tokens = [own[token.content].joined(token) if token.content in own else token for token in named.tokens]
        known = [token for token in tokens if token.id is not None or self.id(token.content) is not None]
        fresh = [token for token in tokens if token.id is None and self.id(token.content) is None]
        known += with_new_ids(fresh, self._next_id() + sum(self.id(t.content) is None for t in known), named.rows)
        self._tokenizer.add_tokens([_as_theirs(token, tokenizers.AddedToken) for token in known])
        if odd := [token for token in known if token.id not in (None, self.id(token.content))]:
            said = ", ".join(f"{token.content} the id {token.id}, but it is {self.id(token.content)}" for token in odd)
            warnings.warn(f"files beside tokenizer.json give {said} as in transformers", stacklevel=2)

    def _next_id(self) -> int:
        added = self._tokenizer.get_added_tokens_decoder()
        return max([self._tokenizer.get_vocab_size(with_added_tokens=False), *(id + 1 for id in added)])

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def piece(self, id: int) -> bytes:
        token = self._tokenizer.id_to_token(id) if 0 <= id < self.size and id not in self._special else None
        return b"" if token is None else self._bytes(token)

    def id(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    def named(self) -> dict[str, str]:
        return {}

    def prefix(self, bos_id: int | None) -> list[int]:
        whole, bare = (self._tokenizer.encode("a", add_special_tokens=flag).ids for flag in (True, False))
        start = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), 0)
        return whole[:start]


def _as_ours(token: Any) -> AddedToken:
    flags = token.special, token.lstrip, token.rstrip, token.single_word, token.normalized
    return AddedToken(token.content, *flags, source=VOCABULARY)


def _as_theirs(token: AddedToken, kind: Callable[..., object]) -> object:
    flags = {name: getattr(token, name) for name in ("special", "lstrip", "rstrip", "single_word")}
    return kind(token.content, normalized=not token.special if token.normalized is None else token.normalized, **flags)


def _decoding(decoder: Mapping[str, Any]) -> tuple[Callable[[str], bytes], int, str]:
    """Returns how a decoder of tokenizer.json shows one token, how many leading spaces it drops, and its error
    handler."""
    replaced, leading, fused, fallback, byte_level = [], 0, False, False, False
    for step in decoder.get("decoders", [decoder]):
        match step:
            case {"type": "ByteLevel"} if not fused:
                byte_level = True
            case {"type": "Metaspace", "replacement": mark} if not fused:
                replaced.append((mark, " "))
                leading = int(step.get("prepend_scheme", "always") != "never")
            case {"type": "Replace", "pattern": {"String": pattern}, "content": content} if not fused:
                replaced.append((pattern, content))
            case {"type": "ByteFallback"} if not fused:
                fallback = True
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0} if fused:
                leading = start
            case _:
                raise TokenizerError(
                    f"tokenizer.json has decoder {step.get('type')}, which is not supported here: ByteLevel, Metaspace"
                    " or a Sequence of Replace, ByteFallback, Fuse and Strip (leading spaces) is"
                )
    to_latin1 = _byte_level_alphabet() if byte_level else {}
    return partial(_shown, replaced, fallback, to_latin1), leading, "surrogateescape" if fallback else "replace"


def _shown(replaced: list[tuple[str, str]], fallback: bool, to_latin1: dict[int, int], token: str) -> bytes:
    for pattern, content in replaced:
        token = token.replace(pattern, content)
    if fallback and (byte := re.fullmatch("<0x([0-9A-Fa-f]{2})>", token)):
        return bytes([int(byte[1], 16)])
    if to_latin1:
        try:
            return token.translate(to_latin1).encode("latin-1")
        except UnicodeEncodeError:  # an added token that is not written in the alphabet
            pass
    return token.encode()


def _byte_level_alphabet() -> dict[int, int]:
    """Returns a table for str.translate from GPT-2's printable characters for bytes back to the bytes.

    A printable Latin-1 byte is its own character; other bytes have the next free characters from U+0100. The table maps
    other Latin-1 characters out of Latin-1.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return dict.fromkeys(others, 0xFFFF) | {256 + i: byte for i, byte in enumerate(others)}
