"""Decides whether a step verifies drafts, by their measured cost and gain; tokens are the same either way."""

from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from statistics import median

from jllm.engine.options import EngineOptions, drafter_of
from jllm.programs.sizes import Limits
from jllm.speculative.tree import Tree
from jllm.step.buckets import Bucket


@dataclass
class DraftCounts:
    """Counts drafts since the engine was made, or its metrics were reset."""

    segments: int = 0  # short segments that had rows for drafts
    tokens: int = 0  # tokens by which these advanced their sequences
    offered: Counter[int] = field(default_factory=Counter)  # by depth: segments that had a draft of this depth
    accepted: Counter[int] = field(default_factory=Counter)  # by depth: segments whose draft of this depth was accepted

    def as_dict(self) -> dict[str, object]:
        """Returns the mean of tokens a segment, and each depth's share of accepted drafts, for Engine.metrics."""
        depths = sorted(self.offered)
        return {
            "draft_segments": self.segments,
            "draft_tokens_mean": self.tokens / self.segments if self.segments else None,
            "draft_acceptance": {depth: self.accepted[depth] / self.offered[depth] for depth in depths},
        }


class Drafting:
    """Chooses between steps of one row a sequence and steps with drafts.

    A step has no drafts if it computes prompts, or has more decodes than `most_decodes`. With `always`, all other steps
    have drafts. Without it, they have drafts only while these paid lately.

    A step with drafts pays if it makes more tokens a second. That is, its mean of tokens a segment exceeds the ratio of
    its time to a plain step's. Both times are medians over some steps of about as many decodes. The losing choice is
    tried again for a few steps now and then, in case the text has changed. These trials cost about LOSS of the time.
    """

    TRIALS, LOSS, LONGEST = 4, 0.015, 1024

    def __init__(self, tree: Tree, most_decodes: int, always: bool):
        self.tree, self.most_decodes, self.always = tree, most_decodes, always
        self.counts = DraftCounts()
        self._seconds: dict[tuple[int, int], deque[float]] = defaultdict(lambda: deque(maxlen=2 * self.TRIALS))
        self._gains: deque[float] = deque(maxlen=2 * self.TRIALS)
        self._left = 0  # steps before the next trial; negative within one
        self._drafted = False  # whether the newest read step verified drafts

    def rows(self, decodes: int, prompts: bool) -> int:
        """Returns the most rows that each of these decodes may have in the next planned step."""
        if prompts or not 0 < decodes <= self.most_decodes:
            return 1
        return self.tree.size if self.always or self._pays(decodes) else 1

    def _pays(self, decodes: int) -> bool:
        plain, drafted = self._times(decodes, 1), self._times(decodes, self.tree.size)
        if len(drafted) < self.TRIALS:
            return True
        if len(plain) < self.TRIALS:
            return False
        tokens, cost = sum(self._gains) / max(1, len(self._gains)), median(drafted) / median(plain)
        self._left -= 1
        if self._left < -self.TRIALS:  # a trial is over; its first step had no drafts yet
            self._left = min(self.LONGEST, int((self.TRIALS + 1) * abs(cost - tokens) / self.LOSS))
        return (tokens > cost) == (self._left >= 0)

    def _times(self, decodes: int, rows: int) -> deque[float]:
        """Returns the seconds of recent steps of about this size."""
        return self._seconds[(decodes - 1).bit_length(), rows]

    def observe(self, bucket: Bucket, advanced: list[tuple[int, int]], seconds: float | None) -> None:
        """Takes in a read step without prompts. `advanced` has the numbers of drafts and of new tokens of each decode.
        `seconds` is the step's time (None: unknown)."""
        if seconds is not None and advanced:
            self._times(len(advanced), bucket.rows).append(seconds)
        begins, self._drafted = not self._drafted, bucket.rows > 1
        if bucket.rows == 1 or not advanced:
            return
        if not begins:  # the first such step had no drafts yet
            self._gains.append(sum(tokens for _, tokens in advanced) / len(advanced))
        counts = self.counts
        for drafts, tokens in advanced:
            counts.segments += 1
            counts.tokens += tokens
            depth = max(self.tree.depths[: drafts + 1])
            counts.offered.update(range(1, depth + 1))
            counts.accepted.update(range(1, tokens))


def drafting_of(options: EngineOptions, limits: Limits) -> Drafting | None:
    """Returns the Drafting of an engine with these options; None without a drafter."""
    drafter = drafter_of(options)
    return None if drafter is None else Drafting(drafter.tree, limits.most_short, always=options.drafts is not None)
