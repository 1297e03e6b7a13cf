"""Which tokens guided samples may draw next, by llguidance (the extra `guided`).

A sample's matcher is a function of the tokens that it has so far, and takes them in when a mask is asked for: what is
preempted, forked or resumed needs nothing else.
"""

import json
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from jllm.engine.guide import Guide
from jllm.errors import RequestError

if TYPE_CHECKING:
    from jllm.tokenizer import Tokenizer

KEPT = 64  # compiled guides, those that came last: clients often ask for the same one
BEFORE = "\x02"  # a text is encoded behind it, so that no tokenizer puts a space before what a guide wants
SPACES = r"[ \n]{0,20}"  # between the parts of JSON: enough to indent, and no place to stay in for ever


@dataclass
class Matcher:
    """Where one sample stands in its guide."""

    state: Any  # llguidance.LLMatcher
    taken: int = 0  # tokens of the sample that it has seen

    def take(self, tokens: Sequence[int]) -> bool:
        """Takes in the sample's tokens up to now, of which it knows the first ones; whether they fit the guide."""
        new, self.taken = list(tokens[self.taken :]), len(tokens)
        return bool(self.state.consume_tokens(new)) if new else not self.state.is_error()


class Guides:
    """The guides of one engine. Any thread may use it."""

    def __init__(self, tokenizer: "Tokenizer | None", vocab_size: int, eos_ids: Sequence[int]):
        self._tokenizer, self._vocab_size, self._eos_ids = tokenizer, vocab_size, list(eos_ids)
        self._lock = threading.Lock()
        self._words: Any = None  # llguidance.LLTokenizer
        self._threads: Any = None
        self._compiled: OrderedDict[Guide, Any] = OrderedDict()

    def matcher(self, guide: Guide) -> Matcher:
        """At the guide's beginning. Raises RequestError for a guide that is not valid, or not with this model."""
        with self._lock:
            if guide not in self._compiled:
                self._compiled[guide] = self._compile(guide)
                while len(self._compiled) > KEPT:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(guide)
            return Matcher(self._compiled[guide].deep_copy())

    def masks(self, samples: Sequence[tuple[Matcher, Sequence[int]]]) -> tuple[np.ndarray, list[bool]]:
        """For samples with their tokens so far: the tokens that each may draw, as bits u32[n, ceil(V / 32)], token i
        being bit i % 32 of word i // 32, and whether there is one. Computed in threads without the interpreter lock."""
        from llguidance.numpy import fill_next_token_bitmask_par

        fits = [matcher.take(tokens) for matcher, tokens in samples]  # what was drawn by a mask always does
        bits = np.zeros((len(samples), words(self._vocab_size)), np.int32)
        some = [(matcher.state, i) for i, (matcher, _) in enumerate(samples) if fits[i]]
        if some:
            fill_next_token_bitmask_par(self._threads, some, bits)
        possible = [bool(some.any()) and not matcher.state.is_error() for some, (matcher, _) in zip(bits, samples)]
        return bits.view(np.uint32), possible

    def _compile(self, guide: Guide) -> Any:
        try:
            from llguidance import LLExecutor, LLMatcher
        except ImportError:
            raise RequestError("a guide needs llguidance: pip install 'jllm[guided]'") from None
        if self._words is None:
            self._words = self._read_words()
            self._threads = LLExecutor(max(1, (os.cpu_count() or 1) // 2))
        made = LLMatcher(self._words, _grammar(guide), log_level=0)
        if made.is_error():
            raise RequestError(f"the guide ({guide.kind}) is not valid: {_one_line(made.get_error())}")
        return made

    def _read_words(self) -> Any:
        from llguidance import LLTokenizer, TokenizerWrapper

        if self._tokenizer is None:
            raise RequestError("a guide needs a tokenizer, and this model has none")
        if not self._eos_ids:
            raise RequestError("a guide needs an end token, and this model has none")
        words = _Words(self._tokenizer, self._vocab_size, self._eos_ids)
        return LLTokenizer(TokenizerWrapper(words), n_vocab=self._vocab_size, eos_token=self._eos_ids)


class _Words:
    """A tokenizer as llguidance wants it."""

    def __init__(self, tokenizer: "Tokenizer", vocab_size: int, eos_ids: Sequence[int]):
        self._encode = tokenizer.vocabulary.encode
        self._before = self._encode(BEFORE)
        self.eos_token_id, self.bos_token_id = eos_ids[0], tokenizer.bos_id
        self.tokens = [b"" if i in eos_ids else tokenizer.vocabulary.piece(i) for i in range(vocab_size)]
        self.special_token_ids: list[int] = []  # what shows no bytes is never allowed, but for the end

    def __call__(self, text: str) -> list[int]:
        """As the tokens that it has in the middle of a text."""
        ids = self._encode(BEFORE + text)
        start = len(self._before)
        return ids[start:] if ids[:start] == self._before else self._encode(text)


def words(vocab_size: int) -> int:
    """Of 32 bits that a mask of a vocabulary has."""
    return -(-vocab_size // 32)


def _grammar(guide: Guide) -> str:
    from llguidance import LLMatcher

    if guide.kind == "json":
        return LLMatcher.grammar_from_json_schema(guide.text, defaults={"whitespace_pattern": SPACES})
    if guide.kind == "regex":
        return LLMatcher.grammar_from_regex(guide.text)
    if guide.kind == "grammar":
        return LLMatcher.grammar_from_lark(guide.text)
    texts = [json.dumps(text, ensure_ascii=False) for text in json.loads(guide.text)]
    return LLMatcher.grammar_from_lark(f"start: {' | '.join(texts)}")


def _one_line(text: str) -> str:
    return " ".join(text.partition("\n")[0].split())
