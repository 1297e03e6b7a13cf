"""A conversation as a value, and the token ids that it is to a model."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from jllm.errors import RequestError, SnapshotError
from jllm.files.messages import check_messages

if TYPE_CHECKING:
    from jllm.files.tokenizer import Tokenizer

PLAIN_STOP = "\nUser:"  # ends an answer where the model has no chat template


@dataclass(frozen=True)
class Message:
    role: str  # "system", "user" or "assistant"
    content: str


@dataclass(frozen=True)
class Conversation:
    """What was said, and the token ids that the model has seen of it: the last prompt, and what it answered."""

    messages: tuple[Message, ...] = ()
    ids: tuple[int, ...] = ()

    @property
    def asked(self) -> tuple[str, ...]:
        """Returns the user's messages."""
        return tuple(message.content for message in self.messages if message.role == "user")

    def ask(self, text: str) -> "Conversation":
        return replace(self, messages=(*self.messages, Message("user", text)))

    def answer(self, text: str, ids: Sequence[int]) -> "Conversation":
        """Returns the answer to the last message. `ids` are all that the model has seen and drawn by then."""
        return Conversation((*self.messages, Message("assistant", text)), tuple(ids))

    def take_back(self) -> "Conversation":
        """Returns the conversation before the user's last message. RequestError where there is none."""
        if not self.asked:
            raise RequestError("there is no message to edit yet")
        last = max(i for i, message in enumerate(self.messages) if message.role == "user")
        return replace(self, messages=self.messages[:last])

    def to_json(self) -> str:
        return json.dumps([vars(message) for message in self.messages])


def from_json(text: str, ids: Sequence[int]) -> Conversation:
    """Returns the reverse of to_json. Raises SnapshotError for anything else."""
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
    """Returns the prompt for the next answer, by the model's chat template. What the model has seen of it keeps the ids
    that it had, even where the tokenizer would cut the same text otherwise, so that their K and V are found again."""
    if tokenizer.chat_template is None:
        ids = tokenizer.encode(as_text(conversation.messages))
    else:
        text = tokenizer.chat([vars(message) for message in conversation.messages])
        ids = tokenizer.encode(text, add_bos=False)
    return keep_seen(conversation.ids, ids, tokenizer)


def as_text(messages: Sequence[Message]) -> str:
    """Returns a conversation for a model without a template. An answer begins with the space that the model puts
    there."""
    parts = {"system": "{}\n\n", "user": "User: {}\n", "assistant": "Assistant:{}\n"}
    return "".join(parts[message.role].format(message.content) for message in messages) + "Assistant:"


def keep_seen(seen: Sequence[int], ids: Sequence[int], tokenizer: "Tokenizer") -> list[int]:
    """Returns `ids`, but the longest beginning of its text that `seen` has too, up to an end of a token in both, has
    the ids that it has there."""
    ours, theirs = ([_units(id, tokenizer) for id in some] for some in (seen, ids))
    pairs = zip((unit for token in ours for unit in token), (unit for token in theirs for unit in token))
    common = next((i for i, (a, b) in enumerate(pairs) if a != b), min(sum(map(len, ours)), sum(map(len, theirs))))
    ends, other_ends = ({end: i + 1 for i, end in enumerate(accumulate(map(len, some)))} for some in (ours, theirs))
    both = max((end for end in ends.keys() & other_ends.keys() if end <= common), default=0)
    return [*seen[: ends.get(both, 0)], *ids[other_ends.get(both, 0) :]]


def _units(id: int, tokenizer: "Tokenizer") -> Sequence[int]:
    """Returns what a token shows, byte by byte; one that shows nothing is a unit by itself."""
    return tokenizer.vocabulary.piece(id) or (-1 - id,)
