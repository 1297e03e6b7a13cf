"""Who gets which pages of the KV pool, and when: the protocol of KV policies, and the default one.

The scheduler asks; a policy owns nothing but its pool. It changes `pages` and `expected` of sequences and nothing else
of them: the page table, the step and the kernels know no policy. Others are in jllm/kv_policies. What options are given
has no pool. A scheduler makes a pool, and the policy over it; both anew once the device was lost.

A sequence may come to admission with pages that it shares with others (PagePool.share), full ones, at the head of
seq.pages, whose tokens count as computed: a policy takes what is missing behind them.
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
    """What the scheduler asks about memory. One object for each page pool, but for that which options are given."""

    def make_pool(self, num_pages: int, page_size: int) -> PagePool:
        """Returns a pool such as the policy needs, all of it free."""

    def over(self, pool: PagePool) -> Self:
        """Returns the policy that hands out the pages of a pool of make_pool. This one stays as it is. What it was
        made of is shared: a predictor goes on learning."""

    def check(self, length: int, max_length: int) -> None:
        """TooLongError when a sequence of `length` tokens, alone, could never run to max_length."""

    def admit(self, seq: Sequence, running: List[Sequence]) -> bool:
        """Takes the pages that seq begins with. False, and nothing is taken, when it must wait: then for a running one
        to end; with none running, seq gets what it needs. What was admitted isn't the reason for a preemption in the
        very next step."""

    def admissible(self, waiting: Iterable[Sequence], running: List[Sequence], tokens: int) -> tuple[int, bool]:
        """About how many tokens of those that wait, in order, could be admitted now, up to `tokens`; and
        whether it is for want of pages that there are fewer. Takes nothing."""

    def grow(self, seq: Sequence, pages: int, spare: int, room: int) -> list[tuple[int, int]]:
        """Takes `pages` more pages for the next tokens of seq, as far as they are available, and more on top if it
        likes, as long as `spare` stay available. Where all pages of seq are full of tokens, it may move it to others,
        if the page table has `room` for the changes: it then returns copies (from, to) for all pages of seq but some
        first ones that stay, and the scheduler frees the old ones in time. Else it returns none."""

    def cause(self, seq: Sequence) -> str:
        """Returns why seq needs a page that it lacks: a word for the counts of preemptions."""

    def victim(self, running: List[Sequence], pages: int) -> Sequence:
        """Whom to preempt for `pages` pages: one of `running`, never the first if there are others. It has the first of
        all that run and then those of the highest priority value, in the order of arrival."""

    def observe(self, seq: Sequence) -> None:
        """seq has ended."""

    def release(self, seq: Sequence) -> None:
        """Gives back all pages of seq."""


class OnDemand:
    """Pages as tokens come (PagedAttention): most requests at once, at the price of preemption.

    Admission asks for room for the whole prompt and its first decode, though chunks take their pages one by one: a
    prompt that fits only in part would be preempted and computed again. Beyond that one page for each running sequence
    to grow into and `watermark`, a share of the pool, stay available, but for a sequence alone.
    """

    pool: PagePool  # where there is one: see over

    def __init__(self, *, watermark: float = 0.0):
        self.watermark = checked_share("watermark", watermark)

    def make_pool(self, num_pages: int, page_size: int) -> PagePool:
        return PagePool(num_pages, page_size)

    def over(self, pool: PagePool) -> Self:
        made = copy(self)
        made.pool = pool
        return made

    def check(self, length: int, max_length: int) -> None:
        pool, need = self.pool, self.pool.pages_for(max_length - 1)  # the last token never gets KV
        if need > pool.num_pages:
            raise TooLongError(
                f"{length} prompt tokens and {max_length - length} new ones need {need} pages of {pool.page_size}, "
                f"the page pool has {pool.num_pages}: shorten the request or raise num_pages"
            )

    def cause(self, seq: Sequence) -> str:
        return "prefill" if seq.computed < seq.prefill_end else "decode"

    def victim(self, running: List[Sequence], pages: int) -> Sequence:
        """Returns the cheapest that frees enough by itself: with the fewest tokens to recompute, and of equals the
        newest. Whoever is preempted, the pages that it frees and the tokens that it loses are in proportion, so the
        smallest loss is that which frees no more than what is wanted. The oldest of all requests is never taken once it
        runs, and no other is admitted before it while it waits: so it ends, and then the next is the oldest."""
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
        """Returns pages that stay available to those that run when one more is admitted."""
        return len(running) + int(self.watermark * self.pool.num_pages) if running else 0

    def _begins(self, seq: Sequence, running: List[Sequence]) -> int:
        """Returns pages that admission asks for, those included that seq shares: room for all that it prefills and a
        decode."""
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
    """Returns the value, a number from 0 to 1 without the 1, nor the 0 where that end is open. Raises ConfigError."""
    number = isinstance(value, Real) and not isinstance(value, bool)
    if not number or not 0 <= float(value) < 1 or (open_at_0 and not value):
        raise ConfigError(f"{name} must be a number in {'(' if open_at_0 else '['}0, 1), not {value!r}")
    return value


PAGED = OnDemand()


KV_POLICIES = {  # what options take by name, and where it is: the engine itself imports none of jllm/kv_policies
    "paged": "jllm.engine.kv_policy:OnDemand",
    "reserve": "jllm.kv_policies.reserve:Reserve",
    "extent": "jllm.kv_policies.extent:Extent",
}


def policy_of(policy: str | Policy) -> Policy:
    """Returns the policy that an option gives, by its name or as an object. Raises ConfigError for neither."""
    if isinstance(policy, str) and policy in KV_POLICIES:
        module, name = KV_POLICIES[policy].split(":")
        return getattr(import_module(module), name)()
    if not isinstance(policy, Policy) or isinstance(policy, type):
        names = ", ".join(KV_POLICIES)
        raise ConfigError(f"kv_policy must be one of {names}, or an object like kv_policy.Policy, not {policy!r}")
    return policy
