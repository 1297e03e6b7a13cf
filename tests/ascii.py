"""A tokenizer for tiny models, a token a character."""

from dataclasses import dataclass

from jllm.files.tokenizer import Tokenizer
from tests.tiny import CONFIG

EOS, FIRST = 2, 3


@dataclass(frozen=True)
class Ascii:
    """A token a character, from space on."""

    size: int = CONFIG.vocab_size
    leading_spaces: int = 0
    errors: str = "replace"

    def encode(self, text):
        return [FIRST + ord(c) - 32 for c in text if 32 <= ord(c) < 32 + self.size - FIRST]

    def id(self, token):
        return FIRST + ord(token) - 32 if len(token) == 1 and 32 <= ord(token) < 32 + self.size - FIRST else None

    def piece(self, id):
        return bytes([32 + id - FIRST]) if FIRST <= id < self.size else b""


TOKENIZER = Tokenizer(Ascii(), None, (EOS,), (), {}, None)
