"""Defines perplexity protocols as data: the windows of a text, and their scored tokens."""

import math
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING

from jllm.config import LlamaConfig
from jllm.errors import EvaluationError, TokenizerError

if TYPE_CHECKING:
    from jllm.files.tokenizer import Tokenizer

CHOICES = {"last": ("drop", "short", "full"), "bos": ("tokenizer", "always", "never"), "unit": ("token", "word")}


@dataclass(frozen=True)
class Protocol:
    """Defines the windows of a text, their scored tokens, and the divisor of the loss. Raises EvaluationError.

    A window has `lead` + `context` tokens, and begins `stride` after the previous one. Each token is scored once, in
    the first window that has a token before it. With lead 0, a window without overlap does not score its first token.
    With lead 1, its first token is only context, and every token is scored.
    """

    name: str
    context: int | None = None  # None: the model's context
    stride: int | None = None  # None: context, so windows do not overlap
    lead: int = 0
    last: str = "drop"  # a partial last window: "drop" it, keep it "short", or begin it earlier ("full")
    bos: str = "tokenizer"  # "always": BOS, else EOS; "tokenizer": as its files define
    joined: bool = True  # join texts with an empty line; False: each alone
    unit: str = "token"  # divisor of the loss: scored tokens, or words between white space

    def __post_init__(self) -> None:
        for field, choices in CHOICES.items():
            if getattr(self, field) not in choices:
                raise self._error(f"{field} must be {' or '.join(choices)}, not {getattr(self, field)!r}")
        if self.context is not None and self.context < 2:
            raise self._error(f"context must be at least 2 tokens, not {self.context}")
        if self.stride is not None and not 0 < self.stride <= (self.context or math.inf):
            raise self._error(f"stride must be in 1 .. context = {self.context}, not {self.stride}")
        if self.lead not in (0, 1):
            raise self._error(f"lead must be 0 or 1, not {self.lead}")
        if self.unit == "word" and (self.joined or self.last == "drop"):
            raise self._error("words can be counted only of texts that are scored one by one and whole")

    def _error(self, problem: str) -> EvaluationError:
        return EvaluationError(f"protocol {self.name}: {problem}")

    def resolve(self, config: LlamaConfig) -> "Protocol":
        """Returns the protocol with context and stride filled in. Raises EvaluationError if the model's context is too
        short."""
        context = config.context if self.context is None else self.context
        if context > config.context:
            raise self._error(f"windows of {context} tokens, but the model's context is {config.context}")
        stride = context if self.stride is None else self.stride
        return replace(self, context=context, stride=stride)


# Sources of the protocols:
# - wikitext2-2048: GPTQ (arXiv 2210.17323) and later papers. The test set is joined; one BOS is added if the tokenizer
#   adds one; only full windows count. wikitext2-4096 has LLaMA-2's context, and windows-512 is for small models.
# - strided-512: "Perplexity of fixed-length models" in transformers' documentation. The mean is over tokens.
# - document, document-word: lm-eval's loglikelihood_rolling. Each text follows BOS, and no token is lost. document-word
#   is its word_perplexity.
PROTOCOLS = {
    protocol.name: protocol
    for protocol in (
        Protocol("wikitext2-2048", context=2048),
        Protocol("wikitext2-4096", context=4096),
        Protocol("windows-512", context=512),
        Protocol("strided-512", stride=512, last="short"),
        Protocol("document", lead=1, last="full", bos="always", joined=False),
        Protocol("document-word", lead=1, last="full", bos="always", joined=False, unit="word"),
    )
}


def find_protocol(protocol: str | Protocol) -> Protocol:
    """Returns a preset by name, or the given protocol. Raises EvaluationError for an unknown name, with similar
    ones."""
    if isinstance(protocol, Protocol):
        return protocol
    if protocol not in PROTOCOLS:
        close = get_close_matches(str(protocol), PROTOCOLS, 4, 0.5)
        hint = f"near ones: {', '.join(close)}" if close else f"known are {', '.join(PROTOCOLS)}"
        raise EvaluationError(f"unknown protocol {protocol!r}; {hint}")
    return PROTOCOLS[protocol]


def encode(tokenizer: "Tokenizer | None", text: str, protocol: Protocol) -> list[int]:
    """Returns the token ids of a text, with the protocol's first token. Raises EvaluationError without a tokenizer, or
    if the protocol needs BOS or EOS and there is neither."""
    if tokenizer is None:
        raise EvaluationError("a text needs a tokenizer, and this model has none: give token ids")
    try:
        ids = tokenizer.encode(text, add_bos=protocol.bos == "tokenizer")
    except TokenizerError as error:
        raise EvaluationError(str(error)) from None
    if protocol.bos != "always":
        return ids
    first = tokenizer.bos_id if tokenizer.bos_id is not None else next(iter(tokenizer.eos_ids), None)
    if first is None:
        raise EvaluationError(f"protocol {protocol.name} begins with BOS or EOS, and the tokenizer has neither")
    return [first, *ids]


@dataclass(frozen=True)
class Window:
    """Is a window of tokens start .. stop of a text, from position 0. Tokens from `scored` on are scored."""

    text: int
    start: int
    scored: int
    stop: int

    @property
    def inputs(self) -> int:
        """Returns the number of tokens that the model reads: all except the last."""
        return self.stop - self.start - 1


def windows_of(length: int, protocol: Protocol, text: int = 0) -> list[Window]:
    """Returns the windows of a text of `length` tokens. They are none if no token can be scored. The protocol must be
    resolved."""
    assert protocol.context is not None
    assert protocol.stride is not None
    size = protocol.context + protocol.lead
    windows = []
    start, scored = 0, 1
    while scored < length:
        stop = min(start + size, length)
        if stop - start < size:
            if protocol.last == "drop":
                break
            if protocol.last == "full":
                start = max(0, stop - size)
        if max(scored, start + 1) < stop:
            windows.append(Window(text, start, max(scored, start + 1), stop))
        start, scored = start + protocol.stride, stop
    return windows
