"""Predicts how long an output will be, for admission.

A predictor is any object with Predictor's three methods; the policies Predicted and Extent take one. Longest predicts
max_new_tokens, and Quantile learns from past outputs. Oracle has the true lengths, for tests and experiments. The
caller can bring a predictor that reads the prompt: experiments/training has one.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import Protocol, runtime_checkable

import numpy as np

from jllm.engine.request import SamplingParams

Tokens = tuple[int, ...]


@runtime_checkable
class Predictor(Protocol):
    """Predicts output lengths between two steps: it should answer in microseconds, or cache its answers."""

    def predict(self, prompt: Tokens, params: SamplingParams, quantile: float, produced: int = 0) -> int:
        """Returns a number of output tokens that this request exceeds with a probability of at most 1 - quantile.

        The number includes the last token, and `produced` tokens exist already. It is called when the request is first
        considered for admission, and again each time the request outgrows the answer. The caller clips the answer to
        produced + 1 .. params.max_new_tokens.
        """

    def observe(self, prompt: Tokens, params: SamplingParams, output: int, ended: bool) -> None:
        """Takes in a request that has ended after `output` tokens. `ended` is False if its limit or its user cut it
        off."""

    def alive(self, outputs: Iterable[int]) -> None:
        """Takes in the output tokens so far of all running requests, which are at least that long. A predictor that
        learns only from ended requests underestimates lengths, most of all at the start."""


class Longest:
    """Predicts the request's limit."""

    def predict(self, prompt: Tokens, params: SamplingParams, quantile: float, produced: int = 0) -> int:
        return params.max_new_tokens

    def observe(self, prompt: Tokens, params: SamplingParams, output: int, ended: bool) -> None:
        pass

    def alive(self, outputs: Iterable[int]) -> None:
        pass


class Oracle(Longest):
    """Predicts the true length by a function of the prompt and its parameters (a seed can tell requests apart)."""

    def __init__(self, output_tokens: Callable[[Tokens, SamplingParams], int]):
        self._output_tokens = output_tokens

    def predict(self, prompt: Tokens, params: SamplingParams, quantile: float, produced: int = 0) -> int:
        return self._output_tokens(prompt, params)


class Quantile:
    """Predicts the quantile of all past output lengths, whatever the prompt.

    It is Kaplan and Meier's estimate (1958) of the distribution of lengths, in buckets RATIO wide. Requests that were
    cut off or still run count as at least as long as they are. Where that leaves the tail open, it predicts the limit.
    It also does so until FEWEST requests have ended. Every WINDOW further requests halve the weight of older ones.
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
        self._seen = 0.0  # requests that ended
        self._survival: list[float] | None = None  # P(length > edges[b])

    def predict(self, prompt: Tokens, params: SamplingParams, quantile: float, produced: int = 0) -> int:
        if self._seen < self.FEWEST:
            return params.max_new_tokens
        if self._survival is None:
            self._survival = self._estimate()
        first = bisect_left(self._edges, produced)  # the last bucket that the output has passed, or 0
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
        """Returns survival: the product of 1 - hazard over buckets. A bucket's hazard is the share of requests that
        ended in it, among those known to reach it. A request cut off in a bucket does not reach the next."""
        lost = self._ended + self._cut + self._alive
        reached = np.cumsum(lost[::-1])[::-1]
        at_risk = reached - (lost - self._ended) / 2  # actuarial estimate: cut off in mid-bucket
        hazard = np.divide(self._ended, at_risk, out=np.zeros_like(lost), where=self._ended > 0)
        return np.maximum(np.cumprod(1 - hazard), 0.0).tolist()
