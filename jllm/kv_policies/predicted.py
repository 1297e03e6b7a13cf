"""Defines a KV policy that admits as much as the pool should hold to the end."""

from collections.abc import Sequence as List

import numpy as np

from jllm.engine.kv_policy import OnDemand, checked_share
from jllm.engine.sequence import Sequence
from jllm.errors import ConfigError
from jllm.kv_policies.length import Longest, Predictor


class Predicted(OnDemand):
    """Allocates pages as tokens come, but a sequence waits while the pool is expected to overflow later.

    The expectation gives each running sequence, and the new one, its expected length. The pool overflows if they would
    then hold more pages at some time than there are. `quantile` is the expected quantile of a length; the default is
    0.9.
    """

    ALIVE = 16  # after so many ended requests, the predictor hears of the running ones again

    def __init__(self, predictor: Predictor, *, quantile: float | None = None, watermark: float = 0.0):
        super().__init__(watermark=watermark)
        if not isinstance(predictor, Predictor):
            raise ConfigError(f"predictor must be an object like length.Predictor, not {predictor!r}")
        if type(predictor) is Longest and quantile is not None:
            raise ConfigError("quantile has no meaning with the predictor Longest: leave it out")
        self.predictor = predictor
        self.quantile = checked_share("quantile", 0.9 if quantile is None else quantile, open_at_0=True)
        self._ended = 0  # requests that have ended since the predictor last heard of the running ones

    def admit(self, seq: Sequence, running: List[Sequence]) -> bool:
        return super().admit(seq, running) and (not running or self._holds(seq, running))

    def cause(self, seq: Sequence) -> str:
        outgrown = seq.prefill_end <= seq.computed and seq.expected <= seq.computed
        return "outgrown" if outgrown else super().cause(seq)

    def observe(self, seq: Sequence) -> None:
        if seq.finish_reason != "error":
            self.predictor.observe(seq.prompt, seq.params, len(seq.output), seq.finish_reason == "stop")
            self._ended += 1

    def _expect(self, seq: Sequence, running: List[Sequence] = ()) -> int:
        """Returns how many tokens of K and V seq is expected to need: more than it is known to have.

        Reads come a step late. So its last token is computed too, unless max_length shows in advance that it is the
        last.
        """
        known = max(seq.length, seq.computed + 1)  # tokens that exist, those in flight included
        if seq.expected < known:
            if self._ended >= self.ALIVE and running:
                self._ended = 0
                self.predictor.alive(len(s.output) for s in running)
            produced = known - len(seq.prompt)
            output = self.predictor.predict(seq.prompt, seq.params, self.quantile, produced)
            seq.expected = min(len(seq.prompt) + max(output, produced + 1), seq.max_length - 1)
        return seq.expected

    def _holds(self, seq: Sequence, running: List[Sequence]) -> bool:
        """Checks that the pool holds all sequences to their expected end. It is called often, hence written for speed.

        Pages that a sequence found (cached) count on neither side. Others hold them, so its end may free none of them.
        """
        self._expect(seq, running)
        now, end = [seq.length - seq.cached], [seq.expected - seq.cached]
        pages, found = len(seq.pages), seq.cached
        for s in running:
            computed, prefill_end, cached = s.computed, s.prefill_end, s.cached
            known = computed if computed >= prefill_end else prefill_end
            if s.expected <= known:
                self._expect(s, running)
            now.append(known - cached)
            end.append(s.expected - cached)
            pages += len(s.pages)
            found += cached
        most = self.pool.num_available + pages - found // self.pool.page_size
        return peak_pages(now, end, self.pool.page_size) <= most


def peak_pages(now: List[int], end: List[int], page_size: int) -> int:
    """Returns the most pages of page_size tokens that sequences hold at once.

    Sequence i has now[i] tokens, gains one a step, and frees all at end[i] tokens. Partial pages count as whole ones.
    """
    tokens = np.array(now, np.int64)
    left = np.array(end, np.int64) - tokens
    order = np.argsort(-left)
    # When a sequence ends, all before it in this order still run.
    alive = np.arange(1, len(now) + 1)
    return int((np.cumsum(tokens[order]) + alive * (left[order] + page_size - 1)).max()) // page_size
