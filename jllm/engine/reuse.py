"""What a sequence begins with instead of computing it: pages that the prefix cache has, pages of the sequence that it
continues, or a snapshot that was given with it.

Full pages are shared: whoever holds them only reads them. Of a page that the sequence would write to, it gets a copy of
its own (copy on write); its last token is always computed, since its logits are wanted.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from jllm.engine.pages import PagePool
from jllm.engine.prefix_cache import PrefixCache, PrefixCounts
from jllm.engine.sequence import Sequence


@dataclass(frozen=True)
class ReusedPrefix:
    """The first `tokens` of a sequence, from elsewhere."""

    pages: tuple[int, ...] = ()  # full ones of others, to be shared
    source: int | None = None  # a page of another, to be copied for the tokens that follow
    tokens: int = 0
    snapshot: bool = False  # they are in the sequence's snapshot instead, which goes to pages of its own
    cached: bool = False  # they are the prefix cache's

    @property
    def held(self) -> tuple[int, ...]:
        """Returns pages of others."""
        return self.pages if self.source is None else (*self.pages, self.source)


class Sharing:
    """Reused prefixes of one scheduler's sequences. `keep`: pages outlive their sequences, in a prefix cache. `block`:
    tokens of which prefixes are whole multiples, where K and V of newer ones are not in the pages (kv_formats.Kivi)."""

    def __init__(self, keep: bool, block: int = 1):
        self.block = block
        self.counts = PrefixCounts()
        self.keep = keep
        self.cache: PrefixCache | None = None

    def renew(self, pool: PagePool) -> None:
        """A new pool, and with it an empty cache."""
        self.pool = pool
        self.cache = pool.evictor = PrefixCache(pool, self.counts) if self.keep else None

    def reset_counts(self) -> None:
        self.counts = PrefixCounts()
        if self.cache is not None:
            self.cache.counts = self.counts

    @property
    def num_pages(self) -> int:
        """Returns pages that are kept, in use now or not."""
        return 0 if self.cache is None else self.cache.num_pages

    def clear(self) -> None:
        """Forgets what is kept."""
        if self.cache is not None:
            self.cache.clear()

    def must_wait(self, seq: Sequence) -> bool:
        """Returns whether the sequence that this one continues is about to compute what both begin with."""
        origin = seq.origin
        if origin is None or not _may_skip(seq) or origin.slot is None or origin.finished or not origin.prefilling:
            return False
        return known_tokens(origin) < min(seq.common, seq.length - 1)

    def candidates(self, seq: Sequence, alone: bool) -> Iterator[ReusedPrefix]:
        """Yields what seq could begin with, best first. If it is alone, the last one leaves it all pages of the
        pool."""
        if seq.snapshot is not None and not self._continues(seq).tokens:
            yield ReusedPrefix(tokens=self.whole(min(seq.snapshot.length, seq.length - 1)), snapshot=True)
            return
        best = self._continues(seq)
        if self.cache is not None and seq.snapshot is None and _may_skip(seq):
            match = self.cache.lookup(seq.tokens)
            if match.tokens >= best.tokens:
                best = ReusedPrefix(match.pages, match.source, match.tokens, cached=True)
        best = self._cut(best, self.whole(best.tokens))
        yield best
        if best.source is not None:  # that page is held besides seq's own until it is copied
            size = self.pool.page_size
            full = next(n for n in range(len(best.pages), -1, -1) if self.whole(n * size) == n * size)
            yield self._cut(best, full * size)
        if alone and best.pages:  # where they lie, they may leave no run of pages that is long enough
            yield ReusedPrefix()

    def take(self, seq: Sequence, reused: ReusedPrefix) -> None:
        """Gives seq the pages that it shares, and holds the one to be copied."""
        self.pool.share(reused.held)
        seq.pages = list(reused.pages)
        seq.computed, seq.cached = reused.tokens, len(reused.pages) * self.pool.page_size

    def give_back(self, seq: Sequence, reused: ReusedPrefix) -> None:
        """The reverse of take."""
        self.pool.free(reused.held)
        seq.pages, seq.computed, seq.cached = [], 0, 0

    def begin(self, seq: Sequence, reused: ReusedPrefix) -> None:
        """seq was admitted with this: it gets the pages that will hold these tokens, if it has not got them by now."""
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
        """The first token since seq was admitted has been read, and so has all that it prefilled."""
        if self.cache is not None and not seq.private:
            self.cache.insert(seq.tokens[: self.whole(seq.prefill_end)], seq.pages)

    def on_release(self, seq: Sequence) -> None:
        """seq is about to free its pages, and nothing writes them any more."""
        # Logits that are not finite may come from K and V that are not.
        if self.cache is not None and not seq.private and seq.finish_reason != "error":
            self.cache.insert(seq.tokens[: self.whole(known_tokens(seq))], seq.pages, leaving=True)

    def whole(self, tokens: int) -> int:
        """Returns how many of a sequence's first tokens others can begin with."""
        return tokens - tokens % self.block

    def _cut(self, reused: ReusedPrefix, tokens: int) -> ReusedPrefix:
        """Returns its first tokens alone."""
        full, part = divmod(tokens, self.pool.page_size)
        pages = (*reused.pages, reused.source)
        return replace(reused, pages=reused.pages[:full], source=pages[full] if part else None, tokens=tokens)

    def _continues(self, seq: Sequence) -> ReusedPrefix:
        """Returns what seq can have of the sequence that it continues, as long as that one holds its pages."""
        origin = seq.origin
        if origin is None or origin.slot is None or origin.finish_reason == "error" or not _may_skip(seq):
            return ReusedPrefix()
        tokens = self.whole(min(known_tokens(origin), seq.common, seq.length - 1))
        full, part = divmod(tokens, self.pool.page_size)
        return ReusedPrefix(tuple(origin.pages[:full]), origin.pages[full] if part else None, tokens)


def _may_skip(seq: Sequence) -> bool:
    """Returns whether seq asks for nothing that only computing a token gives: its log-probability in a prompt, its
    count for penalties, which the device takes from the chunks."""
    return not (seq.params.prompt_logprobs or seq.params.counts_tokens)


def known_tokens(seq: Sequence) -> int:
    """Returns tokens known to the host whose K and V are in seq's pages once all dispatched steps have run: the newest
    token's are not, and a token that the host has not read may have ended seq on the device."""
    return min(seq.computed, seq.length - 1)
