"""Holds a conversation as a value, with the token ids that the model has seen."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from jllm.errors import RequestError, SnapshotError
from jllm.files.messages import check_messages

if TYPE_CHECKING:
    from jllm.files.tokenizer import Tokenizer

PLAIN_STOP = "\nUser:"  # ends an answer of a model without a chat template


@dataclass(frozen=True)
class Message:
    role: str  # "system", "user" or "assistant"
    content: str


@dataclass(frozen=True)
class Conversation:
    """Holds a conversation's messages, and the token ids that the model has seen: the last prompt and its answer."""

    messages: tuple[Message, ...] = ()
    ids: tuple[int, ...] = ()

    @property
    def asked(self) -> tuple[str, ...]:
        """Returns the user's messages."""
        return tuple(message.content for message in self.messages if message.role == "user")

    def ask(self, text: str) -> "Conversation":
        return replace(self, messages=(*self.messages, Message("user", text)))

    def answer(self, text: str, ids: Sequence[int]) -> "Conversation":
        """Returns the conversation with the answer to the last message. `ids` are all tokens that the model has seen
        and drawn."""
        return Conversation((*self.messages, Message("assistant", text)), tuple(ids))

    def take_back(self) -> "Conversation":
        """Returns the conversation before the user's last message. Raises RequestError if there is none."""
        if not self.asked:
            raise RequestError("there is no message to edit yet")
        last = max(i for i, message in enumerate(self.messages) if message.role == "user")
        return replace(self, messages=self.messages[:last])

    def to_json(self) -> str:
        return json.dumps([vars(message) for message in self.messages])


def from_json(text: str, ids: Sequence[int]) -> Conversation:
    """Returns the conversation that to_json wrote. Raises SnapshotError for anything else."""
    try:
        raw = json.loads(text)
        messages = tuple(Message(**entry) for entry in (check_messages(raw) if raw else ()))
        good = {message.role for message in messages} <= {"system", "user", "assistant"}
    except (ValueError, TypeError, RecursionError):
        good = False
    if not good:
        raise SnapshotError("its conversation is garbled")
    return Conversation(messages, tuple(ids))


def prompt_ids(conversation: Conversation, tokenizer: "Tokenizer") -> list[int]:
    """Returns the prompt for the next answer, by the model's chat template. Text that the model has seen keeps its
    token ids, even if the tokenizer would now split it differently. So the prefix cache finds its K and V."""
    if tokenizer.chat_template is None:
        ids = tokenizer.encode(as_text(conversation.messages))
    else:
        text = tokenizer.chat([vars(message) for message in conversation.messages])
        ids = tokenizer.encode(text, add_bos=False)
    return keep_seen(conversation.ids, ids, tokenizer)


def as_text(messages: Sequence[Message]) -> str:
    """Returns a conversation as text, for a model without a template. The model begins each answer with a space."""
    parts = {"system": "{}\n\n", "user": "User: {}\n", "assistant": "Assistant:{}\n"}
    return "".join(parts[message.role].format(message.content) for message in messages) + "Assistant:"


def keep_seen(seen: Sequence[int], ids: Sequence[int], tokenizer: "Tokenizer") -> list[int]:
    """Returns `ids` with the longest prefix of text that `seen` shares replaced by the ids in `seen`. The prefix ends
    at an end of a token in both."""
    ours, theirs = ([_units(id, tokenizer) for id in some] for some in (seen, ids))
    pairs = zip((unit for token in ours for unit in token), (unit for token in theirs for unit in token))
    common = next((i for i, (a, b) in enumerate(pairs) if a != b), min(sum(map(len, ours)), sum(map(len, theirs))))
    ends, other_ends = ({end: i + 1 for i, end in enumerate(accumulate(map(len, some)))} for some in (ours, theirs))
    both = max((end for end in ends.keys() & other_ends.keys() if end <= common), default=0)
    return [*seen[: ends.get(both, 0)], *ids[other_ends.get(both, 0) :]]


def _units(id: int, tokenizer: "Tokenizer") -> Sequence[int]:
    """Returns the bytes of a token's text. A token without text is one unit by itself."""
    return tokenizer.vocabulary.piece(id) or (-1 - id,)
