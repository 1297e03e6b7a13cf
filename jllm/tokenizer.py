"""Text to token ids and back: SentencePiece models and tokenizer.json behind one small protocol.

Decoding is defined on bytes: every token shows some bytes (special tokens none), the text is their concatenation read
as UTF-8, and broken sequences become U+FFFD as they come. So text once decoded never changes with what follows, and the
incremental decoder needs no more state than one unfinished character. On whole characters this equals the decoders of
the sentencepiece and tokenizers libraries. The clean-up that transformers may apply to decoded text
(clean_up_tokenization_spaces) is left out: it does not give the text back.
"""

import codecs
import json
import operator
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from jllm.chat_template import Message, find_chat_template, one_line, read_json, render_chat
from jllm.errors import TokenizerError

SPACE = "▁"  # how SentencePiece writes a space
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Vocabulary(Protocol):
    """What a tokenizer file must answer; one class a file format below."""

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


class StreamDecoder:
    """Text of a growing sequence of ids, given out as soon as its characters are whole. Constant work a token."""

    def __init__(self, vocabulary: Vocabulary, prompt_ids: Sequence[int] = ()):
        self._piece = vocabulary.piece
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors=vocabulary.errors)
        self._leading = vocabulary.leading_spaces
        self._owed = ""
        tail, shown = [], b""
        for id in reversed(prompt_ids):
            tail.append(id)
            shown = self._piece(operator.index(id)) + shown
            # An unfinished character has at most 3 bytes, and any non-space ends the start of a text.
            if len(shown) >= 3 and shown.strip(b" "):
                break
        for id in reversed(tail):
            self.push(id)
        # What decoding the prompt alone shows of a character that it leaves unfinished: not to be shown again.
        self._owed = _mark_broken(self._utf8.getstate()[0].decode(errors=vocabulary.errors))

    def push(self, id: int) -> str:
        """Text that this token completes, maybe none. An id outside the vocabulary shows nothing: models often pad
        their embedding beyond it."""
        data = self._piece(operator.index(id))
        if self._leading and data:
            spaces = min(self._leading, len(data) - len(data.lstrip(b" ")))
            data = data[spaces:]
            self._leading = 0 if data else self._leading - spaces
        return self._text(data)

    def finish(self) -> str:
        """What is left at the end: U+FFFD for an unfinished character, else nothing."""
        return self._text(b"", final=True)

    def _text(self, data: bytes, final: bool = False) -> str:
        text = _mark_broken(self._utf8.decode(data, final))
        if text and self._owed:
            text, self._owed = text.removeprefix(self._owed), ""
        return text


def _mark_broken(text: str) -> str:
    """U+FFFD for lone surrogates, which only the error handler makes: one for each broken byte."""
    return text if text.isascii() else re.sub("[\udc80-\udcff]", "\ufffd", text)


@dataclass(frozen=True)
class Tokenizer:
    """A checkpoint's tokenizer; made by `load_tokenizer`."""

    vocabulary: Vocabulary
    bos_id: int | None
    eos_ids: tuple[int, ...]  # end tokens that the tokenizer's files name; a model's config may know more
    prefix: tuple[int, ...]  # what add_bos adds, often nothing
    special_tokens: Mapping[str, str]  # by role, for chat templates
    chat_template: str | None

    @property
    def vocab_size(self) -> int:
        """Number of ids, 1 + the largest; a model's embedding may have more rows."""
        return self.vocabulary.size

    def encode(self, text: str, add_bos: bool = True) -> list[int]:
        """Token ids of a text. Special tokens written out in it become their ids, as in transformers.

        add_bos adds what the files ask for at the start of a text: as add_bos_token in tokenizer_config.json
        says, else what tokenizer.json's post-processor adds, else a SentencePiece model's BOS. That may be nothing
        (Qwen), and is not repeated where the text already begins with it. Use add_bos=False for the text of `chat`.
        Raises TokenizerError for what is not a str or holds lone surrogates.
        """
        if not isinstance(text, str):
            raise TokenizerError(f"text must be a string, not {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TokenizerError(f"text is not valid Unicode: lone surrogate at character {error.start}") from error
        ids = self.vocabulary.encode(text)
        repeated = tuple(ids[: len(self.prefix)]) == self.prefix
        return [*self.prefix, *ids] if add_bos and not repeated else ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids, special tokens skipped. Raises TokenizerError for an id outside the vocabulary."""
        decoder, parts = self.stream_decoder(), []
        for id in ids:
            try:
                in_range = 0 <= operator.index(id) < self.vocab_size
            except TypeError:
                raise TokenizerError(f"token ids must be integers, not {type(id).__name__}") from None
            if not in_range:
                raise TokenizerError(f"token id {id} is out of range: the vocabulary has {self.vocab_size} ids")
            parts.append(decoder.push(id))
        return "".join(parts) + decoder.finish()

    def stream_decoder(self, prompt_ids: Sequence[int] = ()) -> StreamDecoder:
        """An incremental decoder whose pushes and finish concatenate to `decode` of the ids pushed.

        prompt_ids came before them: their text is not given out, but decides what is at a start (a leading space
        is kept after other text) and may end in the first bytes of a character. Only the last few are looked at.
        """
        return StreamDecoder(self.vocabulary, prompt_ids)

    def chat(self, messages: Sequence[Message]) -> str:
        """Prompt text of a conversation by the checkpoint's chat template; encode it with add_bos=False."""
        if self.chat_template is None:
            raise TokenizerError(
                "this tokenizer has no chat template: looked for chat_template.jinja, chat_template.json"
                " and chat_template in tokenizer_config.json"
            )
        return render_chat(self.chat_template, messages, self.special_tokens)


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """The tokenizer of a Hugging Face checkpoint directory: tokenizer.json (which wins, as in transformers) or
    tokenizer.model (SentencePiece), with what tokenizer_config.json, special_tokens_map.json, added_tokens.json
    and chat_template.* say. Raises TokenizerError where there is none or a file is broken."""
    directory = Path(directory)
    config = read_json(directory / "tokenizer_config.json")
    roles, special = _special_tokens(read_json(directory / "special_tokens_map.json") | config)
    fast, slow = directory / "tokenizer.json", directory / "tokenizer.model"
    vocabulary: Vocabulary
    if fast.is_file():
        vocabulary = TokenizersVocabulary(fast, special)
    elif slow.is_file():
        added = _added_tokens(read_json(directory / "added_tokens.json"), config, special)
        vocabulary = SentencePieceVocabulary(slow, added, special, config)
    else:
        raise TokenizerError(f"no tokenizer in {directory}: looked for tokenizer.json and tokenizer.model")
    named = {role: token for role, token in (vocabulary.named() | roles).items() if token is not None}
    bos_id, eos_id = (vocabulary.id(named[role]) if role in named else None for role in ("bos_token", "eos_token"))
    if config.get("add_bos_token") is None:
        prefix = vocabulary.prefix(bos_id)
    else:
        prefix = [bos_id] if config["add_bos_token"] and bos_id is not None else []
    return Tokenizer(
        vocabulary=vocabulary,
        bos_id=bos_id,
        eos_ids=() if eos_id is None else (eos_id,),
        prefix=tuple(prefix),
        special_tokens=named,
        chat_template=find_chat_template(directory, config),
    )


def _special_tokens(config: Mapping[str, Any]) -> tuple[dict[str, str | None], set[str]]:
    """Special tokens by role (None where a role is switched off), and all of them with those that have no role."""

    def name(token: Any) -> str | None:
        return token.get("content") if isinstance(token, dict) else token

    roles = {role: name(config[role]) for role in SPECIAL_NAMES if role in config}
    others = [config.get(key) or () for key in ("additional_special_tokens", "extra_special_tokens")]
    extra = [token for group in others for token in (group.values() if isinstance(group, dict) else group)]
    return roles, {token for token in map(name, [*roles.values(), *extra]) if token}


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


def _added_tokens(file: Mapping[str, Any], config: Mapping[str, Any], special: set[str]) -> dict[int, AddedToken]:
    """Added tokens by id, from added_tokens.json ({content: id}) and tokenizer_config.json's added_tokens_decoder."""
    flags = ("lstrip", "rstrip", "single_word")
    try:
        added = {int(id): AddedToken(token, special=token in special) for token, id in file.items()}
        for id, token in (config.get("added_tokens_decoder") or {}).items():
            is_special = bool(token.get("special")) or token["content"] in special
            added[int(id)] = AddedToken(token["content"], is_special, *(bool(token.get(flag)) for flag in flags))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TokenizerError("added_tokens.json or added_tokens_decoder must map tokens to ids") from error
    return {id: token for id, token in added.items() if token.content}


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
