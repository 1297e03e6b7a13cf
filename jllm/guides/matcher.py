"""Finds the tokens that guided samples may draw next, by llguidance (the extra `guided`).

A sample's matcher depends only on the tokens that the sample has so far. It takes them in when a mask is needed. So
preemption and forks need nothing else.
"""

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakValueDictionary

import numpy as np

from jllm.errors import RequestError, how_to_install
from jllm.guides.grammars import make_matcher
from jllm.guides.guide import Guide
from jllm.guides.guide_trials import Trials, Words
from jllm.model.sampling import words
from jllm.speculative.forced import coming_tokens
from jllm.speculative.tree import Tree

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

    from jllm.files.tokenizer import Tokenizer

KEPT = 64  # compiled guides, the most recent ones: clients often ask for the same one
LARGE = 8 << 20  # characters of all of them; the last one is kept whatever its size
SLOW = 2.0  # seconds after which the log reports a slow operation
LOG = logging.getLogger(__name__)
BEFORE = "\x02"  # texts are encoded behind it, so that no tokenizer adds a space before them


@dataclass
class Matcher:
    """Holds the position of one sample in its guide."""

    state: "LLMatcher"
    taken: int = 0  # tokens of the sample that it has seen

    def feed(self, tokens: Sequence[int]) -> bool:
        """Takes in the sample's new tokens, of all its `tokens` so far. Returns whether they fit the guide."""
        new, self.taken = list(tokens[self.taken :]), len(tokens)
        return bool(self.state.consume_tokens(new)) if new else not self.state.is_error()


class Guided(NamedTuple):
    """Holds a sample that is about to draw."""

    matcher: Matcher
    tokens: Sequence[int]  # so far
    drafts: Sequence[int] = ()  # verified by its step, in the order of their tree's nodes, without the root


class Guides:
    """Owns the guides of one model's engines. Any thread may use it."""

    _words: "LLTokenizer"  # set by prepare, as is the next
    _threads: "LLExecutor"

    def __init__(self, tokenizer: "Tokenizer | None", vocab_size: int, eos_ids: Sequence[int]):
        self._tokenizer, self._vocab_size, self._eos_ids = tokenizer, vocab_size, list(eos_ids)
        self._lock, self._reading = threading.Lock(), threading.Lock()
        self._trials: Trials | None = None
        self._compiled: OrderedDict[Guide, LLMatcher | str] = OrderedDict()  # or the error

    def prepare(self) -> None:
        """Prepares everything that the first guide needs, which takes seconds for a large vocabulary. Raises
        RequestError if guides are not possible."""
        with self._reading:
            if self._trials is not None:
                return
            started = time.perf_counter()
            words = self._read_words()
            trials = Trials(Words(words.tokens, self._eos_ids))
            self._words, self._threads = _tables(words, self._eos_ids)
            trials.begin()
            self._trials = trials
            if (seconds := time.perf_counter() - started) > SLOW:
                LOG.info("guides are ready after %.1f s: their tables of %d tokens are made", seconds, self._vocab_size)

    def has(self, guide: Guide) -> bool:
        """Returns whether a matcher, or its error, is ready."""
        with self._lock:
            return guide in self._compiled

    def matcher(self, guide: Guide, after: Sequence[int] = ()) -> Matcher:
        """Returns a matcher at the guide's beginning, or after the tokens `after` of a snapshot. Raises RequestError
        for a guide that is not valid, in general or with this model. Also raises it if the guide does not allow these
        tokens."""
        with self._lock:
            made = self._compiled.get(guide)
        if made is None:  # without the lock, so that a large schema does not block other guides
            made = self._compile(guide)
        with self._lock:
            made = self._keep(guide, made)
            if isinstance(made, str):
                raise RequestError(made)
            found = Matcher(made.deep_copy())
        if after and not found.state.consume_tokens(list(after)):
            raise RequestError(
                f"the guide ({guide.kind}) does not allow the text that the snapshot's guide has begun "
                "(to restart it: dataclasses.replace(snapshot, guided=None))"
            )
        return found

    def _keep(self, guide: Guide, made: "LLMatcher | str") -> "LLMatcher | str":
        """Keeps a guide as the most recently used, and evicts the least recently used ones. Returns the kept value."""
        made = self._compiled.setdefault(guide, made)
        self._compiled.move_to_end(guide)
        size = sum(len(each.text) for each in self._compiled)
        while len(self._compiled) > KEPT or (size > LARGE and len(self._compiled) > 1):
            size -= len(self._compiled.popitem(last=False)[0].text)
        return made

    def masks(self, samples: Sequence[Guided], tree: Tree) -> np.ndarray:
        """Returns the tokens that each sample may draw at each node of its drafts, as bits u32[n, Q, ceil(V / 32)].
        Token i is bit i % 32 of word i // 32. No token is allowed where the guide has no continuation, and at drafts
        that it does not allow. Runs in threads without the interpreter lock."""
        from llguidance.numpy import fill_next_token_bitmask_par as fill
        from llguidance.numpy import fill_next_token_bitmask_par_with_draft_tokens as fill_drafts

        paths: list[tuple[int, tuple[int, ...], LLMatcher]] = []
        short, long = [], []
        for i, (matcher, tokens, drafts) in enumerate(samples):
            if not matcher.feed(tokens):  # tokens drawn by a mask always fit
                continue
            for path in self._allowed_paths(matcher, drafts, tree):
                at, along = len(paths) * (tree.depth + 1), self._along(path, drafts)
                # drafts without a continuation leave an error behind, so they go to a copy
                state = matcher.state.deep_copy() if along else matcher.state
                if along:
                    long.append((state, at, along))
                else:
                    short.append((state, at))
                paths.append((i, path, state))
        rows = np.zeros((len(paths), tree.depth + 1, words(self._vocab_size)), np.int32)
        if long:
            fill_drafts(self._threads, long, rows.reshape(-1, rows.shape[2]))
        if short:
            fill(self._threads, short, rows.reshape(-1, rows.shape[2]))
        bits = np.zeros((len(samples), tree.size, rows.shape[2]), np.int32)
        for row, (i, path, state) in zip(rows, paths):
            if state.is_error():  # nothing can follow the last node, and llguidance fills its mask with end tokens
                path = path[:-1]
            bits[i, path] = row[: len(path)]
        return bits.view(np.uint32)

    def coming(self, samples: Sequence[Guided], tree: Tree, wanted: bool) -> np.ndarray:
        """Returns the tokens i32[n, F] that each sample probably draws from here on, padded with -1 (see forced.py).
        They are the first path of its drafts as far as its guide allows them, and then the forced tokens. There are
        none unless `wanted`. Call it after masks, which takes the samples' tokens in."""
        found = np.full((len(samples), coming_tokens(tree)), -1, np.int32)
        for row, (matcher, _, drafts) in zip(found, samples if wanted else ()):
            if matcher.state.is_error():
                continue
            state = matcher.state.deep_copy()
            likely = self._along([node for node in tree.first_path if node <= len(drafts)], drafts)
            likely = likely[: state.try_consume_tokens(likely)]
            if not state.is_stopped():
                likely = (likely + state.compute_ff_tokens())[: len(row)]
            row[: len(likely)] = likely
        return found

    def _along(self, path: Sequence[int], drafts: Sequence[int]) -> list[int]:
        """Returns the drafts on a path from the root, up to the first that is no token."""
        found = (drafts[node - 1] for node in path[1:])
        return list(takewhile(lambda token: 0 <= token < self._vocab_size, found))

    def _allowed_paths(self, matcher: Matcher, drafts: Sequence[int], tree: Tree) -> list[tuple[int, ...]]:
        """Returns the longest paths from the root over nodes that a guide allows."""
        paths = {tree.paths[leaf] for leaf in tree.leaves(1 + len(drafts))}
        paths = {path[: 1 + matcher.state.validate_tokens(self._along(path, drafts))] for path in paths}
        inner = {node for path in paths for node in path[:-1]}
        return [path for path in paths if path[-1] not in inner]

    def _compile(self, guide: Guide) -> "LLMatcher | str":
        self.prepare()
        assert self._trials is not None
        started = time.perf_counter()
        problem, lasting = self._trials.verdict(guide)
        if problem is not None and not lasting:
            raise RequestError(problem)
        made = make_matcher(self._words, guide) if problem is None else problem
        if (seconds := time.perf_counter() - started) > SLOW:
            LOG.info("a guide (%s, %d characters) took %.1f s to compile", guide.kind, len(guide.text), seconds)
        return made

    def _read_words(self) -> "_Words":
        if find_spec("llguidance") is None:
            raise RequestError(f"a guide needs llguidance: {how_to_install('guided')}")
        if self._tokenizer is None:
            raise RequestError("a guide needs a tokenizer, and this model has none")
        if not self._eos_ids:
            raise RequestError("a guide needs an end token, and this model has none")
        return _Words(self._tokenizer, self._vocab_size, self._eos_ids)


def _tables(words: "_Words", eos_ids: Sequence[int]) -> "tuple[LLTokenizer, LLExecutor]":
    """Returns llguidance's own tokenizer, and the threads that make masks."""
    from llguidance import LLExecutor, LLTokenizer, TokenizerWrapper

    tokenizer = LLTokenizer(TokenizerWrapper(words), n_vocab=len(words.tokens), eos_token=list(eos_ids))
    return tokenizer, LLExecutor(max(1, (os.cpu_count() or 1) // 2))


class _Words:
    """Is a model's tokenizer in the form that llguidance takes."""

    def __init__(self, tokenizer: "Tokenizer", vocab_size: int, eos_ids: Sequence[int]):
        self._encode = tokenizer.vocabulary.encode
        self._before = self._encode(BEFORE)
        self.eos_token_id, self.bos_token_id = eos_ids[0], tokenizer.bos_id
        self.tokens = [b"" if i in eos_ids else tokenizer.vocabulary.piece(i) for i in range(vocab_size)]
        self.special_token_ids: list[int] = []  # tokens without bytes are never allowed, except the end

    def __call__(self, text: str) -> list[int]:
        """Returns the tokens that a text has in the middle of another."""
        ids = self._encode(BEFORE + text)
        start = len(self._before)
        return ids[start:] if ids[:start] == self._before else self._encode(text)


def guides_of(tokenizer: "Tokenizer | None", vocab_size: int, eos_ids: Sequence[int]) -> Guides:
    """Returns the guides that all engines of one tokenizer share, as long as one engine lives. A guide is compiled once
    for all of them."""
    key = id(tokenizer), vocab_size, tuple(eos_ids)  # the guides keep the tokenizer, so that its id stays its own
    with _SHARING:
        return _SHARED.setdefault(key, Guides(tokenizer, vocab_size, eos_ids))


_SHARING = threading.Lock()
_SHARED: WeakValueDictionary[tuple[int, int, tuple[int, ...]], Guides] = WeakValueDictionary()
