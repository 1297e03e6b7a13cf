"""Makes a model of random weights work with guides: a vocabulary of words, and a guide that allows all of them."""

from dataclasses import dataclass

from jllm.files.tokenizer import Tokenizer
from jllm.guides.guide import Guide

ENDLESS = Guide.regex(r"[ a-z]+\.")  # no token has a full stop


@dataclass
class Words:
    """A Vocabulary whose token i is a space and i in letters."""

    size: int
    leading_spaces: int = 0
    errors: str = "replace"

    def encode(self, text: str) -> list[int]:
        return []  # prompts are token ids

    def piece(self, id: int) -> bytes:
        letters = bytearray()
        while True:
            id, letter = divmod(id, 26)
            letters.append(ord("a") + letter)
            if not id:
                return b" " + bytes(reversed(letters))

    def id(self, token: str) -> int | None:
        return None

    def named(self) -> dict[str, str]:
        return {}

    def prefix(self, bos_id: int | None) -> list[int]:
        return []


def words_tokenizer(vocab_size: int) -> Tokenizer:
    return Tokenizer(Words(vocab_size), None, (), (), {}, None)


def is_guided(i: int, share: float) -> bool:
    """Returns whether request number i is guided. Guided requests are a share, spread evenly."""
    return int((i + 1) * share) > int(i * share)
