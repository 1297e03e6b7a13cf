"""Defines the protocol of KV policies, which decide who gets which pages and when, and the default policy.

The scheduler asks; a policy owns only its pool. Of a sequence it changes only `pages` and `expected`. The page table,
the step and the kernels depend on no policy. jllm/kv_policies has other policies. The policy in the options has no
pool. A scheduler makes a pool, and the policy over it; after the loss of a device it makes both again.

A sequence may come to admission with shared pages (PagePool.share). These are full pages at the head of seq.pages, and
their tokens count as computed. The policy adds the missing pages behind them.
"""

from collections.abc import Iterable
from collections.abc import Sequence as List
from copy import copy
from importlib import import_module
from numbers import Real
from typing import Protocol, Self, runtime_checkable

from jllm.engine.pages import PagePool
from jllm.engine.sequence import Sequence
from jllm.errors import ConfigError, TooLongError


@runtime_checkable
class Policy(Protocol):
    """Answers the scheduler's questions about memory. There is one object for each page pool; the one in the options
    has none."""

    def make_pool(self, num_pages: int, page_size: int) -> PagePool:
        """Returns a pool of the kind that the policy needs, all of it free."""

    def over(self, pool: PagePool) -> Self:
        """Returns a policy that hands out the pages of a pool of make_pool. This policy stays as it is. Both share
        their parts, so a predictor keeps what it has learned."""

    def check(self, length: int, max_length: int) -> None:
        """Raises TooLongError if a sequence of `length` tokens, alone, could never run to max_length."""

    def admit(self, seq: Sequence, running: List[Sequence]) -> bool:
        """Allocates the pages that seq needs to start, and returns True.

        Returns False, and allocates nothing, if seq must wait until a running sequence ends. If nothing runs, it always
        succeeds. An admitted sequence never causes a preemption in the next step.
        """

    def admissible(self, waiting: Iterable[Sequence], running: List[Sequence], tokens: int) -> tuple[int, bool]:
        """Returns about how many tokens of waiting sequences, in order, could be admitted now, up to `tokens`. Also
        returns whether too few pages are the limit. Allocates nothing."""

    def grow(self, seq: Sequence, pages: int, spare: int, room: int) -> list[tuple[int, int]]:
        """Allocates `pages` more pages for the next tokens of seq, as far as they are available.

        It may allocate more as long as `spare` pages stay available. If all pages of seq are full, it may move seq to
        others. The page table must have `room` for the changes. Then it returns copies (from, to) for the pages of seq.
        Some first pages may stay, without a copy. The scheduler frees the old pages in time. Otherwise it returns no
        copies.
        """

    def cause(self, seq: Sequence) -> str:
        """Returns why seq needs a page that it lacks: a word for the counts of preemptions."""

    def victim(self, running: List[Sequence], pages: int) -> Sequence:
        """Returns the sequence of `running` to preempt for `pages` pages, never the first if there are others.

        `running` has the first of all running sequences. The others have the highest priority value, and are in the
        order of arrival.
        """

    def observe(self, seq: Sequence) -> None:
        """Takes note that seq has ended."""

    def release(self, seq: Sequence) -> None:
        """Frees all pages of seq."""


class OnDemand:
    """Allocates pages as tokens come (PagedAttention): it runs the most requests at once, but may preempt.

    Admission asks for room for the whole prompt and its first decode, though chunks take their pages one by one. A
    prompt that fits only in part would be preempted and computed again. Beyond that, one page for each running sequence
    to grow into stays available, and `watermark`, a share of the pool. A sequence alone needs neither.
    """

    pool: PagePool  # set by `over`

    def __init__(self, *, watermark: float = 0.0):
        self.watermark = checked_share("watermark", watermark)

    def make_pool(self, num_pages: int, page_size: int) -> PagePool:
        return PagePool(num_pages, page_size)

    def over(self, pool: PagePool) -> Self:
        made = copy(self)
        made.pool = pool
        return made

    def check(self, length: int, max_length: int) -> None:
        pool, need = self.pool, self.pool.pages_for(max_length - 1)  # the last token never gets K and V
        if need > pool.num_pages:
            raise TooLongError(
                f"{length} prompt tokens and {max_length - length} new ones need {need} pages of {pool.page_size}, "
                f"the page pool has {pool.num_pages}: shorten the request or raise num_pages"
            )

    def cause(self, seq: Sequence) -> str:
        return "prefill" if seq.computed < seq.prefill_end else "decode"

    def victim(self, running: List[Sequence], pages: int) -> Sequence:
        """Returns the cheapest sequence that frees enough by itself: the fewest tokens to recompute, among equals the
        newest.

        Freed pages and lost tokens are in proportion. So a sequence that frees no more than needed loses the least. The
        oldest request is never preempted once it runs, and no other is admitted before it. So it ends, and the next
        becomes the oldest.
        """
        others = running[1:] or running
        if len(others) == 1:
            return others[0]
        costs = [(s.computed - s.cached, -i, s) for i, s in enumerate(others)]
        enough = [cost for cost in costs if self._frees(cost[2]) >= pages]
        return min(enough)[2] if enough else max(others, key=self._frees)

    def admit(self, seq: Sequence, running: List[Sequence]) -> bool:
        return self._begins(seq, running) - len(seq.pages) + self._keep(running) <= self.pool.num_available

    def admissible(self, waiting: Iterable[Sequence], running: List[Sequence], tokens: int) -> tuple[int, bool]:
        found, left = 0, self.pool.num_available - self._keep(running)
        for seq in waiting:
            if found >= tokens:
                break
            left -= self._begins(seq, running)
            if left < 0:
                return found, True
            found, left = found + seq.length, left - 1
        return found, False

    def _keep(self, running: List[Sequence]) -> int:
        """Returns how many pages stay available to running sequences when one more is admitted."""
        return len(running) + int(self.watermark * self.pool.num_pages) if running else 0

    def _begins(self, seq: Sequence, running: List[Sequence]) -> int:
        """Returns the pages that admission asks for, shared ones included: room for the whole prefill and a decode."""
        return self.pool.pages_for(min(seq.length + 1, seq.max_length - 1))

    def _frees(self, seq: Sequence) -> int:
        return sum(map(self.pool.frees, seq.pages))

    def observe(self, seq: Sequence) -> None:
        pass

    def release(self, seq: Sequence) -> None:
        self.pool.free(seq.pages)
        seq.pages = []

    def grow(self, seq: Sequence, pages: int, spare: int, room: int) -> list[tuple[int, int]]:
        seq.pages += self.pool.allocate(min(pages, self.pool.num_available)) or []
        return []


def checked_share(name: str, value: float, *, open_at_0: bool = False) -> float:
    """Returns the value, a number in [0, 1), or in (0, 1) with open_at_0. Raises ConfigError for any other."""
    number = isinstance(value, Real) and not isinstance(value, bool)
    if not number or not 0 <= float(value) < 1 or (open_at_0 and not value):
        raise ConfigError(f"{name} must be a number in {'(' if open_at_0 else '['}0, 1), not {value!r}")
    return value


PAGED = OnDemand()


KV_POLICIES = {  # policies by name, and their modules: the engine itself imports none of jllm/kv_policies
    "paged": "jllm.engine.kv_policy:OnDemand",
    "reserve": "jllm.kv_policies.reserve:Reserve",
    "extent": "jllm.kv_policies.extent:Extent",
}


def policy_of(policy: str | Policy) -> Policy:
    """Returns the policy of an option, given by name or as an object. Raises ConfigError for anything else."""
    if isinstance(policy, str) and policy in KV_POLICIES:
        module, name = KV_POLICIES[policy].split(":")
        return getattr(import_module(module), name)()
    if not isinstance(policy, Policy) or isinstance(policy, type):
        names = ", ".join(KV_POLICIES)
        raise ConfigError(f"kv_policy must be one of {names}, or an object like kv_policy.Policy, not {policy!r}")
    return policy
