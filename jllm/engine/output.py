"""Turns sampled tokens into text: incremental detokenization, stop strings, and which text may be shown already."""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Optional

if TYPE_CHECKING:
    from jllm.files.tokenizer import StreamDecoder


class OutputText:
    """Holds the output of one sequence as it grows.

    Text that may turn out to begin a stop string is held back. So are the tokens that produced it.
    """

    def __init__(self, decoder: Optional["StreamDecoder"] = None, stops: Seq[str] = ()):
        self.decoder, self._finished = decoder, False
        self.stops = tuple(stops)
        self._longest = max((len(s) - 1 for s in self.stops), default=0)  # most letters that may be held back
        self.text_can_be_late = decoder is not None and not self.stops  # its text decides only what is shown
        self.tokens: list[int] = []
        self.text = ""
        self.stopped = False  # a stop string was found; it is cut off, with all later tokens
        self._ends: list[int] = []  # per token, the length of the text once all of its bytes are decoded
        self._shown_text = 0
        self._shown_tokens = 0

    def push(self, token: int) -> None:
        """Appends one token; sets `stopped` if its text completes a stop string."""
        self.tokens.append(token)
        if self.decoder is not None:
            self._grow(self.decoder.push(token))

    def extend(self, tokens: Iterable[int]) -> None:
        """Appends tokens of which none completes a stop string."""
        if self.decoder is None:
            self.tokens += tokens
            return
        for token in tokens:
            self.push(token)

    def finish(self) -> None:
        """Flushes bytes that wait for the rest of a character. Further calls do nothing."""
        if self.decoder is not None and not self.stopped and not self._finished:
            self._finished = True
            self._grow(self.decoder.finish())
            self._ends.extend([len(self.text)] * (len(self.tokens) - len(self._ends)))

    def end(self, token: int) -> None:
        """Appends the token that ended the text. It is a token of the output, and no text shows it."""
        self.tokens.append(token)
        if self.decoder is not None:
            self._ends.append(len(self.text))

    def news(self, *, final: bool) -> tuple[str, tuple[int, ...]]:
        """Returns text and tokens that are certain by now and were not returned before."""
        if self.decoder is None:
            return "", self.pass_on()
        held = 0 if final or self.stopped or not self._longest else self._held_back()
        upto = len(self.text) - held
        upto = max(upto, self._shown_text)
        text = self.text[self._shown_text : upto]
        last = self._shown_tokens
        while last < len(self._ends) and self._ends[last] <= upto:
            last += 1
        tokens = tuple(self.tokens[self._shown_tokens : last])
        self._shown_text, self._shown_tokens = upto, last
        return text, tokens

    def pass_on(self) -> tuple[int, ...]:
        """Returns the tokens that were not returned before. Requires that there is no decoder."""
        tokens = tuple(self.tokens[self._shown_tokens :])
        self._shown_tokens += len(tokens)
        return tokens

    def relay(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """Appends tokens, and returns those that were not returned before. Requires that there is no decoder."""
        self.tokens += tokens
        if self._shown_tokens + len(tokens) < len(self.tokens):  # tokens that the output began with
            return self.pass_on()
        self._shown_tokens += len(tokens)
        return tokens

    def _grow(self, piece: str) -> None:
        if not piece:
            return
        old = len(self.text)
        self.text += piece
        self._ends.extend([len(self.text)] * (len(self.tokens) - len(self._ends)))
        cuts = [self.text.find(s, max(0, old - len(s) + 1)) for s in self.stops]
        cuts = [c for c in cuts if c >= 0]
        if cuts:
            self._cut(min(cuts))

    def _cut(self, at: int) -> None:
        self.stopped = True
        self.text = self.text[:at]
        keep = sum(end <= at for end in self._ends)
        if keep < len(self._ends) and (self._ends[keep - 1] if keep else 0) < at:
            # The stop begins within a token, or within a character's tokens: they stay, since they made text.
            inside = self._ends.count(self._ends[keep])
            self._ends[keep : keep + inside] = [at] * inside
            keep += inside
        del self.tokens[keep:], self._ends[keep:]

    def _held_back(self) -> int:
        """Returns the length of the longest suffix of the text that begins a stop string."""
        for n in range(min(self._longest, len(self.text)), 0, -1):
            if any(s.startswith(self.text[-n:]) for s in self.stops):
                return n
        return 0
