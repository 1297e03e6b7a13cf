"""Defines buckets, the sizes of compiled steps, and chooses the one that holds a step."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt


@dataclass(frozen=True, order=True)
class Bucket:
    """Holds one compiled size: R decodes of Q rows each, and C prompt tokens in at most B chunks."""

    decodes: int
    tokens: int
    chunks: int
    rows: int = 1  # Q

    @property
    def size(self) -> int:
        return self.decodes * self.rows + self.tokens


FEW_SLOTS = 64  # up to here rows cost a GPU no more than one row: reading the weights takes longer
CHEAP = 2 * FEW_SLOTS  # up to here they cost little more
ALONE = (2, 8, 16, 32, 52, 78, 104, 128)  # decode rows in 128ths of the slots: see make_buckets


def make_buckets(max_slots: int, max_step_tokens: int) -> tuple[Bucket, ...]:
    """Returns at most 17 buckets, spaced so that their padding costs little.

    With many slots, eight have decode rows alone, since a full batch runs out row by row. Up to nine have prompt
    tokens: all that fit a step in which every slot decodes, a quarter of these, and few. Sizes with few tokens serve a
    load that leaves most slots free. Its prompts are short, and must not delay decodes. The scheduler cuts prompts to
    sizes, and lets a few surplus rows wait. The spacing was chosen by simulated and measured conversations
    (experiments.qps), at steady loads and all at once.

    With few slots, five have decode rows alone: all slots, fewer by factors of 2, 4 and 16, and one. For each number of
    prompt tokens there are all slots, and a quarter of them.

    Sizes of more than eight rows are multiples of eight if the arguments are, and the second is larger. Hopper's
    products pad other sizes, with a pass each.
    """
    most = max(1, max_step_tokens - max_slots)
    quarter = min(most, _eights(max_slots + -(-most // 4)) - max_slots)

    def size(part: int, parts: int, tokens: int) -> tuple[int, int]:
        rows = max(1, -(-max_slots * part // parts))
        return min(max_slots, _eights(rows + tokens) - tokens), tokens

    few, more = min(quarter, FEW_SLOTS), min(quarter, 2 * FEW_SLOTS)
    if max_slots > FEW_SLOTS:
        between = _eights(isqrt(more * quarter)) if quarter > 4 * more else more
        sizes = {size(1, 8, few), size(1, 4, more), size(1, 2, between), size(1, 4, quarter)}
        sizes |= {size(part, 8, tokens) for part in (5, 8) for tokens in (quarter, most)} | {size(1, 4, most)}
        sizes = {a for a in sizes if not any(a[0] < b[0] and a[1] == b[1] and sum(b) <= CHEAP for b in sizes)}
        sizes |= {size(part, 128, 0) for part in ALONE}
    else:
        sizes = {size(1, n, 0) for n in (1, 2, 4, 16, max_slots)}
        sizes |= {size(1, n, c) for n in (1, 4) for c in (few if quarter > more else quarter, quarter, most)}
    return tuple(Bucket(r, c, min(max_slots, c)) for r, c in sorted(sizes))


def _eights(rows: int) -> int:
    return -(-rows // 8) * 8 if rows > 8 else rows


def choose_bucket(buckets: Sequence[Bucket], decodes: int, tokens: int, chunks: int, rows: int = 1) -> Bucket:
    """Returns the smallest bucket that holds a step."""
    fits = [r for r in buckets if r.decodes >= decodes and r.tokens >= tokens and r.chunks >= chunks and r.rows >= rows]
    return min(fits, key=lambda r: (r.size, r))
