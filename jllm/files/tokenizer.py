"""Converts text to token ids and back, by the files of a tokenizer (vocabulary.py).

Decoding is defined on bytes. Every token shows some bytes (special tokens none), and the text is their concatenation,
read as UTF-8. Broken sequences become U+FFFD as they come. So decoded text never changes with later tokens, and the
incremental decoder needs no more state than one unfinished character. On whole characters this equals the decoders of
the sentencepiece and tokenizers libraries. The clean-up that transformers may apply to decoded text
(clean_up_tokenization_spaces) is left out: it does not restore the original text.
"""

import codecs
import operator
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from jllm.errors import TokenizerError
from jllm.files.chat_template import find_chat_template, read_json, render_chat
from jllm.files.gguf.reader import is_gguf
from jllm.files.gguf.tokenizer import tokenizer_files
from jllm.files.messages import Message
from jllm.files.vocabulary import (
    DECODER,
    ROLE,
    AddedToken,
    Named,
    SentencePieceVocabulary,
    TokenizersVocabulary,
    Vocabulary,
)

ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
OTHERS = (
    "extra_special_tokens",
    "additional_special_tokens",
    "model_specific_special_tokens",
)  # each a list, or an object of further roles


class Pieces(dict[int, bytes]):
    """Holds the bytes that tokens show, and reads each from the vocabulary once."""

    def __init__(self, vocabulary: Vocabulary):
        super().__init__()
        self._vocabulary = vocabulary

    def __missing__(self, id: int) -> bytes:
        piece = self[id] = self._vocabulary.piece(id)
        return piece


class StreamDecoder:
    """Decodes a growing sequence of ids, and returns text as soon as its characters are complete. Each token takes
    constant work."""

    def __init__(self, vocabulary: Vocabulary, pieces: Pieces, prompt_ids: Sequence[int] = ()):
        self._pieces = pieces
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors=vocabulary.errors)
        self._leading = vocabulary.leading_spaces
        self._owed = ""
        tail, shown = [], b""
        for id in reversed(prompt_ids):
            tail.append(id)
            shown = self._pieces[operator.index(id)] + shown
            # An unfinished character has at most 3 bytes, and any non-space ends the start of a text.
            if len(shown) >= 3 and shown.strip(b" "):
                break
        for id in reversed(tail):
            self.push(id)
        # If the prompt ends within a character, decoding the prompt alone showed this of it. Don't show it again.
        self._owed = _mark_broken(self._utf8.getstate()[0].decode(errors=vocabulary.errors))

    def push(self, id: int) -> str:
        """Returns text that this token completes, maybe none. An id outside the vocabulary shows nothing: models often
        pad their embedding beyond it."""
        data = self._pieces[operator.index(id)]
        if self._leading and data:
            spaces = min(self._leading, len(data) - len(data.lstrip(b" ")))
            data = data[spaces:]
            self._leading = 0 if data else self._leading - spaces
        return self._text(data)

    def finish(self) -> str:
        """Returns the rest at the end: U+FFFD for an unfinished character, else nothing."""
        return self._text(b"", final=True)

    def _text(self, data: bytes, final: bool = False) -> str:
        text = _mark_broken(self._utf8.decode(data, final))
        if text and self._owed:
            text, self._owed = text.removeprefix(self._owed), ""
        return text


def _mark_broken(text: str) -> str:
    """Returns text with U+FFFD for each lone surrogate: the error handler makes one for each broken byte."""
    return text if text.isascii() else re.sub("[\udc80-\udcff]", "\ufffd", text)


@dataclass(frozen=True)
class Tokenizer:
    """Is a checkpoint's tokenizer, made by `load_tokenizer`."""

    vocabulary: Vocabulary
    bos_id: int | None
    eos_ids: tuple[int, ...]  # end tokens in the tokenizer's files; a model's config may have more
    prefix: tuple[int, ...]  # ids that add_bos adds, sometimes none
    special_tokens: Mapping[str, str]  # by role, for chat templates
    chat_template: str | None
    tool_template: str | None = None  # for chats with tools, if it differs
    folder: Path | None = field(default=None, compare=False)  # folder of its files, which saving a model copies
    files: Mapping[str, bytes] | None = field(default=None, compare=False)  # its files, if they lie in no folder

    @cached_property
    def pieces(self) -> Pieces:
        """Returns the bytes of tokens, which all decoders share."""
        return Pieces(self.vocabulary)

    @property
    def vocab_size(self) -> int:
        """Returns the number of ids: 1 + the largest. A model's embedding may have more rows."""
        return self.vocabulary.size

    def encode(self, text: str, add_bos: bool = True) -> list[int]:
        """Returns token ids of a text. Special tokens written out in it become their ids, as in transformers.

        add_bos adds the ids that the files ask for at the start of a text. add_bos_token in tokenizer_config.json
        decides, else tokenizer.json's post-processor, else a SentencePiece model's BOS. That may be nothing (Qwen), and
        is not repeated where the text already begins with it. Use add_bos=False for the text of `chat`. Raises
        TokenizerError for text that is not a str or holds lone surrogates.
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
        """Returns text of token ids, without special tokens. Raises TokenizerError for an id outside the vocabulary."""
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

    def special_id(self, text: str) -> int | None:
        """Returns the id of a text that is one special token, which no decoded text shows; None for any other text."""
        id = self.vocabulary.id(text)
        return None if id is None or self.vocabulary.piece(id) else id

    def stream_decoder(self, prompt_ids: Sequence[int] = ()) -> StreamDecoder:
        """Returns an incremental decoder. The results of its pushes and its finish concatenate to `decode` of the
        pushed ids.

        prompt_ids came before them. Their text is not returned, but decides about the start: a leading space is kept
        after other text. They may end within a character. Only the last few are read.
        """
        return StreamDecoder(self.vocabulary, self.pieces, prompt_ids)

    def chat(self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]] | None = None) -> str:
        """Returns a conversation's prompt text by the checkpoint's chat template; encode it with add_bos=False.

        `tools` are functions that the model may call, as in render_chat.
        """
        template = self.template(bool(tools))
        if template is None:
            raise TokenizerError(
                "this tokenizer has no chat template: looked for chat_template.jinja, chat_template.json"
                " and chat_template in tokenizer_config.json"
            )
        return render_chat(template, messages, self.special_tokens, tools)

    def template(self, tools: bool) -> str | None:
        """Returns the template of chats with tools, or without."""
        return (tools and self.tool_template) or self.chat_template


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """Returns the tokenizer of a Hugging Face checkpoint directory, or of a GGUF file.

    It reads tokenizer.json (which wins, as in transformers) or tokenizer.model (SentencePiece). It also reads
    tokenizer_config.json, special_tokens_map.json, added_tokens.json and chat_template.*. A special token without an id
    gets the next one, if the vocab_size of a config.json beside it has room. Raises TokenizerError if there is none or
    a file is broken.
    """
    directory = Path(directory)
    if is_gguf(directory):
        return _of_gguf(directory)
    config = read_json(directory / "tokenizer_config.json")
    named = _read_named(directory, config)
    fast, slow = directory / "tokenizer.json", directory / "tokenizer.model"
    vocabulary: Vocabulary
    if fast.is_file():
        vocabulary = TokenizersVocabulary(fast, named)
    elif slow.is_file():
        vocabulary = SentencePieceVocabulary(slow, named, config)
    else:
        raise TokenizerError(f"no tokenizer in {directory}: looked for tokenizer.json and tokenizer.model")
    roles = {role: token for role, token in {**vocabulary.named(), **named.roles}.items() if token is not None}
    bos_id, eos_id = (vocabulary.id(roles[role]) if role in roles else None for role in ("bos_token", "eos_token"))
    if config.get("add_bos_token") is None:
        prefix = vocabulary.prefix(bos_id)
    else:
        prefix = [bos_id] if config["add_bos_token"] and bos_id is not None else []
    return Tokenizer(
        vocabulary=vocabulary,
        bos_id=bos_id,
        eos_ids=() if eos_id is None else (eos_id,),
        prefix=tuple(prefix),
        special_tokens=roles,
        chat_template=find_chat_template(directory, config),
        tool_template=find_chat_template(directory, config, "tool_use"),
        folder=directory,
    )


def _of_gguf(path: Path) -> Tokenizer:
    files = tokenizer_files(path)
    with tempfile.TemporaryDirectory() as folder:
        for name, data in files.items():
            (Path(folder) / name).write_bytes(data)
        try:
            return replace(load_tokenizer(folder), folder=None, files=files)
        except TokenizerError as error:
            raise TokenizerError(f"{path}: {error}") from None


def _read_named(directory: Path, config: Mapping[str, Any]) -> Named:
    """Reads tokenizer_config.json (`config`), added_tokens.json and special_tokens_map.json.

    With an added_tokens_decoder the config's roles win, otherwise those of special_tokens_map.json. A token is special
    if any file marks it so. Raises TokenizerError for invalid tokens.
    """
    listed, decoder = read_json(directory / "special_tokens_map.json"), config.get("added_tokens_decoder")
    roles = _roles({**config, **listed} if decoder is None else {**listed, **config})
    special = [token for token in roles.values() if token is not None]
    special += [_token(token, name) for name in OTHERS for source in (config, listed) for token in _list(source, name)]
    with_ids = _with_ids(decoder, read_json(directory / "added_tokens.json"))
    rows = read_json(directory / "config.json").get("vocab_size")
    return Named(
        {name: None if token is None else token.content for name, token in roles.items()},
        _each_once([*with_ids, *(replace(token, special=True) for token in special)]),
        rows if type(rows) is int else None,
    )


def _roles(config: Mapping[str, Any]) -> dict[str, AddedToken | None]:
    """Reads special tokens by role: the usual roles, then the tokenizer's own ("image_token")."""
    found = {name: config[name] for name in ROLES if name in config}
    for name in OTHERS:
        found |= _own_roles(config[name]) if isinstance(config.get(name), dict) else {}
    found |= _own_roles(config)
    return {name: None if token is None else _token(token, name) for name, token in found.items()}


def _own_roles(config: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in config.items() if name.endswith("_token") and _may_be_token(value)}


def _may_be_token(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, dict) and "content" in value)


def _list(config: Mapping[str, object], name: str) -> Iterable[object]:
    value = config.get(name) or []
    if not isinstance(value, list | dict):
        raise TokenizerError(f"{name} must be a list of tokens, or an object of them, not {value!r}")
    return value.values() if isinstance(value, dict) else value


def _with_ids(decoder: Any, added: Mapping[str, Any]) -> list[AddedToken]:
    """Reads tokens by id: added_tokens_decoder ({id: token}), and at other ids added_tokens.json ({content: id})."""
    found: dict[int, AddedToken] = {}
    try:
        for id, value in (decoder or {}).items():
            found[int(id)] = replace(_token(value, "added_tokens_decoder"), id=int(id), source=DECODER)
        known = {token.content for token in found.values()}
        for content, id in added.items():
            if content not in known:
                found.setdefault(int(id), AddedToken(content, id=int(id)))
    except (AttributeError, TypeError, ValueError) as error:
        raise TokenizerError("added_tokens.json or added_tokens_decoder must map tokens to ids") from error
    return [token for _, token in sorted(found.items())]


def _token(value: Any, name: str) -> AddedToken:
    """Reads a token from its text, or from an object with its flags."""
    if isinstance(value, str):
        return AddedToken(value)
    if not _may_be_token(value) or not isinstance(value["content"], str):
        raise TokenizerError(f"{name} must be a token's text, or an object with its content, not {value!r}")
    flags = {name: bool(value.get(name)) for name in ("special", "lstrip", "rstrip", "single_word")}
    normalized = None if value.get("normalized") is None else bool(value["normalized"])
    return AddedToken(value["content"], **flags, normalized=normalized, source=ROLE)


def _each_once(tokens: Iterable[AddedToken]) -> tuple[AddedToken, ...]:
    found: dict[str, AddedToken] = {}
    for token in tokens:
        if token.content:
            found[token.content] = found[token.content].joined(token) if token.content in found else token
    return tuple(found.values())
