"""Reuses the beginning of a sequence instead of computing it.

It comes from pages in the prefix cache, from the sequence that this one continues, or from its snapshot. Full pages are
shared: their holders only read them. If a sequence would write to a page, it gets its own copy (copy on write). Its
last token is always computed, since its logits are needed.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from jllm.engine.pages import PagePool
from jllm.engine.prefix_cache import PrefixCache, PrefixCounts
from jllm.engine.sequence import Sequence


@dataclass(frozen=True)
class ReusedPrefix:
    """Holds the first `tokens` of a sequence, from elsewhere."""

    pages: tuple[int, ...] = ()  # full pages of other holders, to be shared
    source: int | None = None  # another holder's page, to be copied for the next tokens
    tokens: int = 0
    snapshot: bool = False  # the tokens are in the sequence's snapshot instead, which goes to its own pages
    cached: bool = False  # the pages are the prefix cache's

    @property
    def held(self) -> tuple[int, ...]:
        """Returns the pages of other holders."""
        return self.pages if self.source is None else (*self.pages, self.source)


class Sharing:
    """Finds reused prefixes for one scheduler's sequences.

    `keep`: a prefix cache keeps pages beyond their sequences. `block`: prefixes are whole multiples of this many
    tokens, where the pages lack K and V of newer ones (kv_formats.Kivi).
    """

    def __init__(self, keep: bool, block: int = 1):
        self.block = block
        self.counts = PrefixCounts()
        self.keep = keep
        self.cache: PrefixCache | None = None

    def renew(self, pool: PagePool) -> None:
        """Takes a new pool, with an empty cache."""
        self.pool = pool
        self.cache = pool.evictor = PrefixCache(pool, self.counts) if self.keep else None

    def reset_counts(self) -> None:
        self.counts = PrefixCounts()
        if self.cache is not None:
            self.cache.counts = self.counts

    @property
    def num_pages(self) -> int:
        """Returns how many pages are kept, in use or not."""
        return 0 if self.cache is None else self.cache.num_pages

    def clear(self) -> None:
        """Forgets all kept pages."""
        if self.cache is not None:
            self.cache.clear()

    def must_wait(self, seq: Sequence) -> bool:
        """Returns whether the sequence that this one continues will soon compute their common beginning."""
        origin = seq.origin
        if origin is None or origin.slot is None or origin.finished or not origin.prefilling:
            return False
        return known_tokens(origin) < min(seq.common, seq.skippable)

    def candidates(self, seq: Sequence, alone: bool) -> Iterator[ReusedPrefix]:
        """Yields prefixes that seq could begin with, best first. If seq is alone, the last one leaves it all pages of
        the pool."""
        seq.adapted = None if seq.adapter is None else seq.adapter.key
        if seq.snapshot is not None and not self._continues(seq).tokens:
            yield ReusedPrefix(tokens=self.whole(min(seq.snapshot.length, seq.length - 1)), snapshot=True)
            return
        best = self._continues(seq)
        if self.cache is not None and seq.snapshot is None and seq.skippable:
            match = self.cache.lookup(seq.tokens, seq.key)
            if match.tokens >= best.tokens:
                best = ReusedPrefix(match.pages, match.source, match.tokens, cached=True)
        best = self._cut(best, self.whole(min(best.tokens, seq.skippable)))
        yield best
        if best.source is not None:  # this page is held besides seq's own until it is copied
            size = self.pool.page_size
            full = next(n for n in range(len(best.pages), -1, -1) if self.whole(n * size) == n * size)
            yield self._cut(best, full * size)
        if alone and best.pages:  # the shared pages may leave no run of pages that is long enough
            yield ReusedPrefix()

    def take(self, seq: Sequence, reused: ReusedPrefix) -> None:
        """Gives seq its shared pages, and holds the page to be copied."""
        self.pool.share(reused.held)
        seq.pages = list(reused.pages)
        seq.computed, seq.cached = reused.tokens, len(reused.pages) * self.pool.page_size

    def give_back(self, seq: Sequence, reused: ReusedPrefix) -> None:
        """Undoes take."""
        self.pool.free(reused.held)
        seq.pages, seq.computed, seq.cached = [], 0, 0

    def begin(self, seq: Sequence, reused: ReusedPrefix) -> None:
        """Begins an admitted sequence with this prefix: allocates pages for its tokens, as far as seq lacks them."""
        missing = self.pool.pages_for(reused.tokens) - len(seq.pages)
        if missing > 0:
            pages = self.pool.allocate(missing)
            assert pages is not None, "a sequence was admitted without room for the tokens that it has"
            seq.pages += pages
        counts, found = self.counts, reused.tokens if reused.cached else 0
        counts.lookups += self.keep
        counts.hits += found > 0
        counts.hit_tokens += found
        counts.forked_tokens += reused.tokens - found

    def on_first_token(self, seq: Sequence) -> None:
        """Caches the pages that seq has prefilled, once its first token since admission is read."""
        if self.cache is not None and not (seq.private or seq.kept):
            self.cache.insert(seq.tokens[: self.whole(seq.prefill_end)], seq.pages, seq.key)

    def on_release(self, seq: Sequence) -> None:
        """Caches the pages of seq just before it frees them. No step writes them any more."""
        # If logits are not finite, K and V may not be either.
        if self.cache is not None and not (seq.private or seq.kept) and seq.finish_reason != "error":
            self.cache.insert(seq.tokens[: self.whole(known_tokens(seq))], seq.pages, seq.key, leaving=True)

    def whole(self, tokens: int) -> int:
        """Returns how many of a sequence's first tokens others can begin with."""
        return tokens - tokens % self.block

    def _cut(self, reused: ReusedPrefix, tokens: int) -> ReusedPrefix:
        """Returns the prefix of the first `tokens` alone."""
        full, part = divmod(tokens, self.pool.page_size)
        pages = (*reused.pages, reused.source)
        return replace(reused, pages=reused.pages[:full], source=pages[full] if part else None, tokens=tokens)

    def _continues(self, seq: Sequence) -> ReusedPrefix:
        """Returns the prefix from the sequence that seq continues, while that one holds its pages."""
        origin = seq.origin
        if origin is None or origin.slot is None or origin.finish_reason == "error":
            return ReusedPrefix()
        tokens = self.whole(min(known_tokens(origin), seq.common, seq.skippable))
        full, part = divmod(tokens, self.pool.page_size)
        return ReusedPrefix(tuple(origin.pages[:full]), origin.pages[full] if part else None, tokens)


def known_tokens(seq: Sequence) -> int:
    """Returns how many known tokens have K and V in seq's pages once all dispatched steps have run.

    The host knows the newest token too, but it has no K and V yet. An unread token may have ended seq on the device.
    """
    return min(seq.computed, seq.length - 1)
