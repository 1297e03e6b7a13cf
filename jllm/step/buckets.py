"""The sizes of steps that are compiled: buckets, and which of them holds a step."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Bucket:
    """One compiled size: R decodes of Q rows each, C prompt tokens in at most B chunks."""

    decodes: int
    tokens: int
    chunks: int
    rows: int = 1  # Q

    @property
    def size(self) -> int:
        return self.decodes * self.rows + self.tokens


FINE = (2, 7, 18, 28, 40, 50, 64, 80, 96, 114, 128)  # of 128 parts of the slots: see make_buckets


FEW_SLOTS = 64  # so few rows cost a GPU no more than one: reading the weights takes longer


def make_buckets(max_slots: int, max_step_tokens: int) -> tuple[Bucket, ...]:
    """At most 17 buckets, so that what they round up is little where it costs.

    Many slots: eleven numbers of decode rows without prompt tokens, since a full batch runs out row by row, spaced for
    the least waste on conversations (experiments.qps) by a scheduler that lets a few rows too many sit out; with prompt
    tokens six, since the scheduler fills those: a quarter and all of what fits a step in which every slot decodes,
    there, all of it while a batch begins, and a quarter where few decode or where pages are too few for all slots.
    Few slots: four numbers of decode rows (all slots, fewer by factors of 2 and 4, and one) times three of tokens.
    """
    most = max(1, max_step_tokens - max_slots)
    quarter = -(-most // 4)
    if max_slots > FEW_SLOTS:
        sizes = {(-(-max_slots * part // 128), 0) for part in FINE}
        sizes |= {(-(-max_slots * eighths // 8), most) for eighths in (2, 5, 8)}
        sizes |= {(-(-max_slots * sixteenths // 16), quarter) for sixteenths in (1, 10, 16)}
    else:
        sizes = {(max(1, -(-max_slots // n)), c) for n in (1, 2, 4, 16, max_slots) for c in (0, quarter, most)}
    return tuple(Bucket(r, c, min(max_slots, c)) for r, c in sorted(sizes))


def choose_bucket(buckets: Sequence[Bucket], decodes: int, tokens: int, chunks: int, rows: int = 1) -> Bucket:
    """Returns the smallest bucket that holds a step."""
    fits = [r for r in buckets if r.decodes >= decodes and r.tokens >= tokens and r.chunks >= chunks and r.rows >= rows]
    return min(fits, key=lambda r: (r.size, r))
