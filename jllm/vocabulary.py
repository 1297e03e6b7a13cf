"""What the files of tokenizers hold: SentencePiece models and tokenizer.json, behind one small protocol."""

import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from jllm.chat_template import one_line
from jllm.errors import TokenizerError

SPACE = "▁"  # how SentencePiece writes a space


class Vocabulary(Protocol):
    """What a tokenizer file must answer; one class a file format."""

    size: int  # ids are in [0, size)
    leading_spaces: int  # how many spaces decoding drops from the start of a text
    errors: str  # codecs error handler for broken UTF-8

    def encode(self, text: str) -> list[int]:
        """Ids of a text without BOS; special tokens written out in the text become their ids."""

    def piece(self, id: int) -> bytes:
        """Bytes that a token shows; none for special tokens and for ids that stand for nothing."""

    def id(self, token: str) -> int | None:
        """Id of a token by its exact name."""

    def named(self) -> dict[str, str]:
        """Special tokens by role ("bos_token", ...), as far as the file itself tells."""

    def prefix(self, bos_id: int | None) -> list[int]:
        """Ids put before a text where tokenizer_config.json does not say."""


@dataclass(frozen=True)
class AddedToken:
    """A token beside a SentencePiece model, found in text as it is; lstrip and rstrip take the whitespace around it."""

    content: str
    special: bool = True
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False

    def pattern(self) -> str:
        word = rf"(?<!\w){re.escape(self.content)}(?!\w)" if self.single_word else re.escape(self.content)
        return (r"\s*" if self.lstrip else "") + word + (r"\s*" if self.rstrip else "")


class SentencePieceVocabulary:
    """tokenizer.model, plus added tokens that are split off the text before SentencePiece sees it.

    The space that SentencePiece puts before a text is put before its first segment only, or before every segment
    between added tokens where tokenizer_config.json says legacy.
    """

    errors = "surrogateescape"  # one U+FFFD a byte, as sentencepiece

    def __init__(self, path: Path, added: Mapping[int, AddedToken], special: set[str], config: Mapping[str, Any]):
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
        named = [id for token in special if (id := sp.piece_to_id(token)) not in control]
        self._added = {id: AddedToken(sp.id_to_piece(id)) for id in [*control, *named]} | dict(added)
        self._ids = {token.content: id for id, token in self._added.items()}
        # Longest first, so that no token hides one that it begins.
        ordered = sorted(self._added.items(), key=lambda item: -len(item[1].content))
        self._order = [id for id, _ in ordered]
        self._pattern = re.compile("|".join(f"({token.pattern()})" for _, token in ordered) or "(?!)")
        self.size = max([self._base - 1, *self._added]) + 1
        if sp.normalize("  x") == sp.normalize("x"):  # extra spaces are removed
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
        id = self._sp.piece_to_id(token)
        return self._ids.get(token, id if self._sp.id_to_piece(id) == token else None)

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
    """tokenizer.json, read by the tokenizers library; its decoder must be one that works token by token."""

    def __init__(self, path: Path, special: set[str]):
        import tokenizers

        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more specific
            raise TokenizerError(f"cannot read {path}: {one_line(error)}") from error
        self._tokenizer.no_truncation()  # settings of a training run
        self._tokenizer.no_padding()
        self._tokenizer.add_special_tokens([token for token in sorted(special) if self.id(token) is not None])
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = frozenset(id for id, token in added.items() if token.special)
        self.size = max(self._tokenizer.get_vocab_size(with_added_tokens=True), *(id + 1 for id in added), 0)
        decoder = self._tokenizer.decoder
        self._bytes, self.leading_spaces, self.errors = _decoding(json.loads(decoder.__getstate__()) if decoder else {})

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


def _decoding(decoder: Mapping[str, Any]) -> tuple[Callable[[str], bytes], int, str]:
    """How a decoder of tokenizer.json shows one token, how many leading spaces it drops, and its error handler."""
    replace, leading, fused, fallback, byte_level = [], 0, False, False, False
    for step in decoder.get("decoders", [decoder]):
        match step:
            case {"type": "ByteLevel"} if not fused:
                byte_level = True
            case {"type": "Metaspace", "replacement": mark} if not fused:
                replace.append((mark, " "))
                leading = int(step.get("prepend_scheme", "always") != "never")
            case {"type": "Replace", "pattern": {"String": pattern}, "content": content} if not fused:
                replace.append((pattern, content))
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
    to_latin1 = _byte_level_alphabet()

    def show(token: str) -> bytes:
        for pattern, content in replace:
            token = token.replace(pattern, content)
        if fallback and (byte := re.fullmatch("<0x([0-9A-Fa-f]{2})>", token)):
            return bytes([int(byte[1], 16)])
        if byte_level:
            try:
                return token.translate(to_latin1).encode("latin-1")
            except UnicodeEncodeError:  # an added token that is not written in the alphabet
                pass
        return token.encode()

    return show, leading, "surrogateescape" if fallback else "replace"


def _byte_level_alphabet() -> dict[int, int]:
    """Back from GPT-2's printable stand-ins for bytes (the byte itself where Latin-1 prints it, else the next free
    character from U+0100) to the bytes, as a table for str.translate that takes other Latin-1 out of it."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return dict.fromkeys(others, 0xFFFF) | {256 + i: byte for i, byte in enumerate(others)}
