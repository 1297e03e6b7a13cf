"""Text to token ids and back, by what the files of a tokenizer say (vocabulary.py).

Decoding is defined on bytes: every token shows some bytes (special tokens none), the text is their concatenation read
as UTF-8, and broken sequences become U+FFFD as they come. So text once decoded never changes with what follows, and the
incremental decoder needs no more state than one unfinished character. On whole characters this equals the decoders of
the sentencepiece and tokenizers libraries. The clean-up that transformers may apply to decoded text
(clean_up_tokenization_spaces) is left out: it does not give the text back.
"""

import codecs
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jllm.chat_template import Message, find_chat_template, read_json, render_chat
from jllm.errors import TokenizerError
from jllm.vocabulary import AddedToken, SentencePieceVocabulary, TokenizersVocabulary, Vocabulary

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


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
    folder: Path | None = field(default=None, compare=False)  # of its files, which saving a model copies

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
        folder=directory,
    )


def _special_tokens(config: Mapping[str, Any]) -> tuple[dict[str, str | None], set[str]]:
    """Special tokens by role (None where a role is switched off), and all of them with those that have no role."""

    def name(token: Any) -> str | None:
        return token.get("content") if isinstance(token, dict) else token

    roles = {role: name(config[role]) for role in SPECIAL_NAMES if role in config}
    others = [config.get(key) or () for key in ("additional_special_tokens", "extra_special_tokens")]
    extra = [token for group in others for token in (group.values() if isinstance(group, dict) else group)]
    return roles, {token for token in map(name, [*roles.values(), *extra]) if token}


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
