"""How long an output will be: what admission may count on.

A predictor is any object with Predictor's three methods; the policies Predicted and Extent take one. Longest says
max_new_tokens, and Quantile what has ended so far. Oracle knows, for tests and experiments. One that looks at the
prompt is the caller's object: experiments/training has such a one.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import Protocol, runtime_checkable

import numpy as np

from jllm.engine.request import SamplingParams

Tokens = tuple[int, ...]


@runtime_checkable
class Predictor(Protocol):
    """Asked by the scheduler, between two steps: it should answer in microseconds, or remember its answers."""

    def predict(self, prompt: Tokens, params: SamplingParams, quantile: float, produced: int = 0) -> int:
        """Returns a number of output tokens, the last one included, that this request exceeds with probability 1 -
        quantile at most, given that there are `produced` already. Asked when the request is first considered for
        admission, and again each time it outgrows the answer. The caller brings it into produced + 1 ..
        params.max_new_tokens."""

    def observe(self, prompt: Tokens, params: SamplingParams, output: int, ended: bool) -> None:
        """A request is over after `output` tokens: by itself, or (not ended) cut off by its limit or its user."""

    def alive(self, outputs: Iterable[int]) -> None:
        """The output tokens so far of all that run. They are at least that long: who learns from those alone that have
        ended takes outputs to be shorter than they are, most of all at the start."""


class Longest:
    """As long as the request allows."""

    def predict(self, prompt: Tokens, params: SamplingParams, quantile: float, produced: int = 0) -> int:
        return params.max_new_tokens

    def observe(self, prompt: Tokens, params: SamplingParams, output: int, ended: bool) -> None:
        pass

    def alive(self, outputs: Iterable[int]) -> None:
        pass


class Oracle(Longest):
    """The truth, from a function of the prompt and its parameters (a seed can tell requests apart)."""

    def __init__(self, output_tokens: Callable[[Tokens, SamplingParams], int]):
        self._output_tokens = output_tokens

    def predict(self, prompt: Tokens, params: SamplingParams, quantile: float, produced: int = 0) -> int:
        return self._output_tokens(prompt, params)


class Quantile:
    """The quantile of all requests so far, whatever their prompts.

    Kaplan and Meier's estimate (1958) of the distribution of lengths, in buckets RATIO wide: requests that were cut
    off, and those that still run, count as at least as long as they are. Where that leaves the tail open, and until
    FEWEST have ended, the answer is the longest. Of older requests each further WINDOW ones forget half.
    """

    RATIO = 1.05
    FEWEST = 16
    WINDOW = 4096

    def __init__(self) -> None:
        self._edges = [1]  # bucket b holds lengths up to edges[b]
        while self._edges[-1] < 1 << 24:
            self._edges.append(max(self._edges[-1] + 1, int(self._edges[-1] * self.RATIO)))
        self._ended = np.zeros(len(self._edges))
        self._cut = np.zeros(len(self._edges))
        self._alive = np.zeros(len(self._edges))
        self._seen = 0.0  # that ended
        self._survival: list[float] | None = None  # P(length > edges[b])

    def predict(self, prompt: Tokens, params: SamplingParams, quantile: float, produced: int = 0) -> int:
        if self._seen < self.FEWEST:
            return params.max_new_tokens
        if self._survival is None:
            self._survival = self._estimate()
        first = bisect_left(self._edges, produced)  # the last bucket that is wholly behind, or 0
        given = self._survival[first] if produced else 1.0
        target = (1 - quantile) * given
        for b in range(first + bool(produced), len(self._edges)):
            if self._edges[b] >= params.max_new_tokens:
                break
            if self._survival[b] <= target and given > 0:
                return self._edges[b]
        return params.max_new_tokens

    def observe(self, prompt: Tokens, params: SamplingParams, output: int, ended: bool) -> None:
        (self._ended if ended else self._cut)[bisect_left(self._edges, output)] += 1
        self._seen += ended
        self._survival = None
        if self._seen + self._cut.sum() >= 2 * self.WINDOW:
            self._ended /= 2
            self._cut /= 2
            self._seen /= 2

    def alive(self, outputs: Iterable[int]) -> None:
        buckets = [bisect_left(self._edges, n) for n in outputs if n]
        self._alive = np.bincount(np.array(buckets, np.int64), minlength=len(self._edges)).astype(float)
        self._survival = None

    def _estimate(self) -> list[float]:
        """Returns survival: the shares of those known to reach a bucket that ended in it, multiplied up. What was cut
        off in a bucket counts as having reached the next no more."""
        lost = self._ended + self._cut + self._alive
        reached = np.cumsum(lost[::-1])[::-1]
        at_risk = reached - (lost - self._ended) / 2  # the actuary's: cut off half-way through the bucket
        hazard = np.divide(self._ended, at_risk, out=np.zeros_like(lost), where=self._ended > 0)
        return np.maximum(np.cumprod(1 - hazard), 0.0).tolist()
